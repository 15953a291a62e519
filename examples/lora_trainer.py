"""LoRA with PEFT and Hugging Face's Trainer: the penalty is taken of the adapters' weights.

Needs `pip install peft "transformers[torch]"`; run it with `python examples/lora_trainer.py`.
The base is a tiny GPT-2 from a configuration, so that nothing is downloaded.
"""

import tempfile
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, logging, set_seed

import seht
from seht.integrations.huggingface import SehtTrainer

logging.set_verbosity_error()

text = "".join(topics[name] for name in sorted(topics))[:30_000]
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text]).split(64)[:-1]
rows = [{"input_ids": row, "labels": row} for row in tokens]


def fit(folder, steps, resume=None):
    set_seed(0)
    config = GPT2Config(vocab_size=len(letters), n_positions=64, n_embd=32, n_layer=2, n_head=2)
    adapter = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    model = get_peft_model(GPT2LMHeadModel(config), adapter)
    # The model is given labels and returns its own loss: its head is found, no boundary= needed.
    penalty = seht.HessianTrace(model, weight=1e-3, curvature="ggn", warmup=5, seed=0)
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3,
        logging_steps=5, save_steps=10, report_to="none", disable_tqdm=True, use_cpu=True, seed=0,
        lr_scheduler_type="constant", gradient_checkpointing=True,
    )  # fmt: skip
    trainer = SehtTrainer(model=model, args=args, train_dataset=rows, penalty=penalty)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


with tempfile.TemporaryDirectory() as folder:
    whole = fit(folder, 20)
    resumed = fit(folder, 20, f"{folder}/checkpoint-10")
print({name: float(f"{value:.3g}") for name, value in whole.state.log_history[-2].items()})
print("penalised:", *whole.penalty.last.layers[:2], "...")
pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
print("resumed run identical:", all(torch.equal(a, b) for a, b in pairs))
