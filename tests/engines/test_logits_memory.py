"""How much of the logits' size is in memory at once, where they are formed after all."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import seht

ROWS, WORDS = 500, 2000  # too few to be left unformed, and several stretches
X, Y = torch.arange(ROWS) % 7, torch.arange(ROWS) % WORDS
SOFT = torch.full((ROWS, WORDS), 1 / WORDS)


class Alive(TorchDispatchMode):
    """The most memory in large tensors at one time, in logits."""

    def __init__(self):
        super().__init__()
        self.most, self._seen = 0.0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.numel() >= ROWS * WORDS // 2:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._seen = {key: s for key, s in self._seen.items() if not s[0].expired()}
        held = sum(size for _, size in self._seen.values())
        self.most = max(self.most, held / (4 * ROWS * WORDS))
        return out


def looked_at(z):
    with torch.no_grad():
        z.argmax(1)
    return F.cross_entropy(z, Y)


# Each with what a plain step holds, and what both forms of a penalised one may.
LOSSES = {
    "looked at": (looked_at, 3, 6, 5),
    "soft labels": (lambda z: F.cross_entropy(z, SOFT), 3, 7, 6),
    "by hand": (lambda z: -z.log_softmax(1).gather(1, Y[:, None]).mean(), 3, 7, 6),
}


@pytest.mark.parametrize("name", LOSSES)
def test_one_direction_at_a_time(name):
    """The direction and its curvature are made a few rows at a time, and graphs go when done."""
    loss, *allowed = LOSSES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, WORDS))
    penalty = seht.HessianTrace(model, weight=1e-4, curvature="ggn", seed=0)
    steps = [
        lambda: loss(model(X)).backward(),
        lambda: penalty(lambda: loss(model(X))).backward(),
        lambda: penalty.backward(lambda: loss(model(X))),
    ]
    for step, most in zip(steps, allowed, strict=True):
        for _ in range(4):  # past the checks of the first ones
            step()
        with Alive() as alive:
            step()
        assert alive.most == pytest.approx(most, abs=0.5)
