"""LoRA with PEFT in a loop of your own, in the lean form: logits are never kept.

Needs `pip install peft transformers`; run it with `python examples/lora_loop.py`. The base is a
tiny Llama from a configuration, so that nothing is downloaded.
"""

import copy
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import seht

text = "".join(topics[name] for name in sorted(topics))[:30_000]
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
batches = tokens[: 40 * 8 * 64].view(40, 8, 64)


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    penalty = seht.HessianTrace(
        model, weight=1e-3, curvature="ggn", boundary="lm_head", warmup=5, seed=0
    )
    adapters = [p for p in model.parameters() if p.requires_grad]
    return model.train(), penalty, torch.optim.AdamW(adapters, lr=3e-3)


def run(model, penalty, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        penalty.backward(lambda: model(input_ids=batch, labels=batch).loss)
        optimizer.step()


whole = build()
run(*whole, batches[:20])
last = whole[1].last
print(f"step {last.step}: loss {last.loss:.3f}, trace {last.trace:.3g}")

half = build()
run(*half, batches[:10])
state = copy.deepcopy([part.state_dict() for part in half])
resumed = build()
for part, known in zip(resumed, state, strict=True):
    part.load_state_dict(known)
run(*resumed, batches[10:20])
pairs = zip(whole[0].parameters(), resumed[0].parameters(), strict=True)
print("resumed run identical:", all(torch.equal(a, b) for a, b in pairs))
