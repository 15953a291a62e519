"""Hugging Face's Trainer: one more argument. A tiny GPT-2 learns the letters of Python's manual.

For a weight that is tuned leave `weight` out and write `SehtTrainer(..., held_out=rows)`, as
tuned_weight.py does.
Needs `pip install "transformers[torch]"`; run it with `python examples/huggingface_trainer.py`.
"""

import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, logging, set_seed

import seht
from seht.integrations.huggingface import SehtTrainer

logging.set_verbosity_error()

text = "".join(topics[name] for name in sorted(topics))[:60_000]
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text]).split(64)[:-1]
rows = [{"input_ids": row, "labels": row} for row in tokens]
train, test = rows[:640], rows[640:800]


def fit(folder, steps, resume=None):
    set_seed(0)
    config = GPT2Config(vocab_size=len(letters), n_positions=64, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    penalty = seht.HessianTrace(  # the model returns its own loss: its outputs are the head's
        model, weight=1e-3, curvature="ggn", boundary="lm_head", warmup=15, accumulate=2, seed=0
    )
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3,
        gradient_accumulation_steps=2, logging_steps=10, save_steps=15, eval_strategy="steps",
        eval_steps=15, report_to="none", disable_tqdm=True, use_cpu=True, seed=0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = SehtTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=test, penalty=penalty
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


with tempfile.TemporaryDirectory() as folder:
    whole = fit(folder, 30)
    resumed = fit(folder, 30, f"{folder}/checkpoint-15")
print({name: float(f"{value:.3g}") for name, value in whole.state.log_history[-3].items()})
print(f"test loss {whole.evaluate()['eval_loss']:.3f}")
pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
print("resumed run identical:", all(torch.equal(a, b) for a, b in pairs))
