"""LoRA, DoRA and checkpoints on language models nobody here wrote, against float64 truth.

Tiny configurations; the threshold is lowered, so that their logits go the way of large ones, which
the network does not form.
"""

import copy
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import pytest
import torch
from single import Problem, Settled, trained
from test_huggingface import Widened, sentences
from torch import nn

import seht
from seht.curvature import head_loop, head_rules

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
transformers.logging.set_verbosity_error()

SIZES = dict(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(intermediate_size=16, max_position_embeddings=8)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def qwen():
    config = transformers.Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def mixtral():
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2,
        output_router_logits=True,
    )  # fmt: skip
    config._experts_implementation = "eager"  # grouped products have no float64
    return transformers.MixtralForCausalLM(config)


MODELS = [gpt2, llama, qwen, mixtral]


def adapted(build, adapter, checkpointed):
    torch.manual_seed(0)
    model = build().train()
    if checkpointed:
        options = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
    if adapter is None:
        return model
    targets = ["c_attn"] if build is gpt2 else ["q_proj", "v_proj"]
    options = peft.LoraConfig(
        r=2, target_modules=targets, fan_in_fan_out=build is gpt2, use_dora=adapter == "dora"
    )
    model = peft.get_peft_model(model, options)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # they begin at 0, where half of the gradient vanishes
            nn.init.normal_(weight, std=0.2)
    return model


def own_loss(model, batch):
    return model(input_ids=batch[0], labels=batch[0]).loss


def wide_loss(model, batch):
    with Widened():
        return own_loss(model, batch)


@pytest.fixture
def loops(monkeypatch):
    monkeypatch.setattr(head_rules, "WORTH", (1, 2))
    calls, run = [], head_loop.run
    monkeypatch.setattr(head_loop, "run", lambda *args: (calls.append(1), run(*args))[1])
    return calls


FAST = [(model, "lora", model is gpt2) for model in MODELS]
ROWS = [(m, a, c) for m in MODELS for a in (None, "lora", "dora") for c in (False, True)]


def rows(chosen):
    return pytest.mark.parametrize(
        ("build", "adapter", "checkpointed"),
        [row if row in FAST else pytest.param(*row, marks=pytest.mark.slow) for row in chosen],
    )


# A checkpoint runs its part again outside of the mode that widens casts; GPT-2 has none.
@rows([row for row in ROWS if row[0] is gpt2 or not row[2]])
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_the_gradient_of_adapters(build, adapter, checkpointed, form, loops):
    """In float64, by the double backward of the other engine; the head is found by itself."""
    model = adapted(build, adapter, checkpointed).double()
    batch = sentences(torch.Generator().manual_seed(1))
    found = []
    for engine in ("difference", "autograd"):
        own = copy.deepcopy(model)
        penalty = seht.HessianTrace(
            own, weight=1.0, curvature="ggn", engine=engine, seed=0, boundary="lm_head"
        )
        closure = lambda: wide_loss(own, batch)
        if engine == "difference" and form == "lean":
            penalty.backward(closure)
        else:
            penalty(closure).backward()
        parts = [p.grad.flatten() for p in own.parameters() if p.grad is not None]
        found.append((penalty.last.trace, torch.cat(parts)))
    (value, g), (truth, exact) = found
    assert loops and value == pytest.approx(truth, rel=1e-3)
    assert (g - exact).norm() < 1e-3 * exact.norm()


@rows(ROWS)
def test_in_float32(build, adapter, checkpointed, loops):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(build, adapter, checkpointed)
        single = trained(model, sentences, own_loss, 0)
        # The same weights without checkpoints, which would run again outside of the mode.
        double = trained(adapted(build, adapter, False), sentences, own_loss, 0).double()
        truth = Problem(double.model, double.batch, wide_loss)
        settled = Settled(single, {"curvature": "ggn", "boundary": "lm_head"})
        errors = [settled.errors(truth, seed) for seed in range(3)]
    assert loops
    assert max(value for value, _ in errors) < 0.02
    assert max(g for _, g in errors) < 0.02
