"""A part of a training with a tuned weight, in a process of its own: from, to, the file between."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def main(first, last, path):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    x, y = torch.randn(96, 6), torch.arange(96) % 3
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    others = DataLoader(TensorDataset(x[64:], y[64:]), 12, shuffle=True)
    penalty = seht.HessianTrace(
        model, weight=seht.Tuning(gap=0.0), total_steps=24, held_out=(others, loss_fn),
        optimizer=optimizer, accumulate=2,
    )  # fmt: skip
    parts = {"model": model, "optimizer": optimizer, "penalty": penalty}
    if first:
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
    for call in range(first, last):
        rows = slice(16 * (call % 4), 16 * (call % 4) + 16)
        penalty(lambda: loss_fn(model, (x[rows], y[rows]))).backward()
        if call % 2:
            optimizer.step()
            optimizer.zero_grad()
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**states, "random": torch.get_rng_state()}, path)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
