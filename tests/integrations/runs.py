"""One small problem, trained by hand: what every framework has to arrive at."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht

EPOCHS, ROWS, BATCH, ACCUMULATE, CLIP = 2, 48, 8, 2, 0.5
OPTIONS = {"weight": 0.01, "warmup": 2, "accumulate": ACCUMULATE, "seed": 5}


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)
    )


def dataset():
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(ROWS, 1, 5, 5, generator=generator), torch.arange(ROWS) % 4)


def loader():
    return DataLoader(dataset(), BATCH)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(**options):
    """The weights at the end and the records of every call."""
    model = network()
    optimizer = optimizer_of(model)
    penalty = seht.HessianTrace(model, **{**OPTIONS, **options})
    records = []
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader()):
            loss = penalty(lambda: F.cross_entropy(model(x), y))
            (loss / ACCUMULATE).backward()
            records.append(penalty.last)
            if (i + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict(), records


def assert_same(ours, truth):
    """Bit for bit, buffers included."""
    assert ours.keys() == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(ours[name], tensor), name
