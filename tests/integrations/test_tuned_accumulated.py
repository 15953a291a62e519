"""Held-out batches beside gradient accumulation: its steps and the units of its losses stay."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_accelerate_steps_when_it_did():
    """Accelerate ends a step at the end of the loader that was begun last: never the held-out one,
    whose last batch is in use for several steps.
    """
    accelerator = pytest.importorskip("accelerate").Accelerator(
        cpu=True, gradient_accumulation_steps=2
    )
    torch.manual_seed(0)
    x, y = torch.randn(68, 5), torch.arange(68) % 3
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader, others = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(x[:60], y[:60]), 2),
        DataLoader(TensorDataset(x[60:], y[60:]), 4),
    )  # fmt: skip
    penalty = seht.HessianTrace(
        model, weight=seht.Tuning(gap=0.0, interval=2), accumulate=2, total_steps=15,
        held_out=(others, loss_fn),
    )  # fmt: skip
    stepped = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(penalty(lambda: loss_fn(model, batch)))
            stepped.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    assert penalty.path is not None and len(penalty.path.weights) > 3
    assert stepped == [False, True] * 15


@pytest.mark.parametrize("accumulate", [1, 4])
def test_hugging_face_compares_losses_of_one_unit(accumulate, tmp_path):
    """The Trainer divides a batch's loss by the items of the whole step, and counts items that a
    causal model does not predict; next to that, a plain mean looks as if a lot were memorised.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from seht.integrations.huggingface import SehtTrainer

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 20, (48, 8))]
    penalty = seht.HessianTrace(model, accumulate=accumulate, seed=0)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=11, per_device_train_batch_size=4, learning_rate=1e-5,
        gradient_accumulation_steps=accumulate, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = SehtTrainer(
        model=model, args=args, train_dataset=rows[:32], held_out=rows[32:], penalty=penalty
    )
    trainer.train()
    found = penalty.state_dict()["strength"]["gap"]
    assert found["looks"] > 1
    assert found["held_out"] == pytest.approx(found["train"], rel=0.03)


def test_a_loss_of_the_user_s_own_is_given_the_count(tmp_path):
    """``compute_loss_func`` divides by the count of items, on held-out examples, too."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from seht.integrations.huggingface import SehtTrainer

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))

        def forward(self, x, labels=None):
            return {"logits": self.net(x)}

    def total(outputs, labels, num_items_in_batch):
        each = F.cross_entropy(outputs["logits"], labels, reduction="sum")
        return each / num_items_in_batch

    torch.manual_seed(0)
    model = Network()
    x = torch.randn(48, 5)
    rows = [{"x": row, "labels": torch.tensor(k % 3)} for k, row in enumerate(x)]
    penalty = seht.HessianTrace(model, accumulate=2, seed=0)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=4, learning_rate=1e-5,
        gradient_accumulation_steps=2, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = SehtTrainer(
        model=model, args=args, train_dataset=rows[:32], held_out=rows[32:], penalty=penalty,
        compute_loss_func=total,
    )  # fmt: skip
    trainer.train()
    found = penalty.state_dict()["strength"]["gap"]
    assert found["held_out"] == pytest.approx(found["train"], rel=0.15)
