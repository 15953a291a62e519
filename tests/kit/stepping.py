"""One penalised step in each form, and ways to compare what two of them leave behind."""

import torch
import torch.nn.functional as F
from torch import nn

import seht

WEIGHT = 0.01
FORMS = ("scalar", "lean")


def mlp(*, dropout=0.0, norm=True, dtype=torch.float64, seed=3):
    """A small ReLU network: weights 0 and 4 are probed, biases and the norm are not."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Identity(), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(6, 3),
    ).to(dtype)  # fmt: skip


def rows(count=8, *, width=4, dtype=torch.float64, seed=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.arange(count) % 3


def entropy(model, data=None):
    x, y = data or rows(dtype=next(model.parameters()).dtype)
    return lambda: F.cross_entropy(model(x), y)


def penalise(model, closure, form, *, warm=False, seed=5, weight=WEIGHT, on=None, **options):
    """Run one step in this form; ``warm`` leaves out the checks of the first steps."""
    engine = "autograd" if form == "autograd" else "difference"
    options.setdefault("engine", engine)
    penalty = seht.HessianTrace(model, weight=weight, seed=seed, **options)
    if warm:
        warm_up(penalty)
    torch.manual_seed(11)
    if form == "lean":
        penalty.backward(closure, on=on)
    else:
        out = penalty(closure, on=on)
        (out[0] if isinstance(out, tuple) else out).backward()
    return penalty


def warm_up(penalty):
    """As after many steps: the engine neither compares steps nor watches the closure."""
    steps = penalty._course.engine.steps
    steps.uses, steps.next_check = 100, 10**9


def gradients(leaves):
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def assert_gradients(got, expected, rtol=1e-6):
    """Leaf by leaf, relative to the whole; None where None is expected."""
    whole = sum(g.norm() ** 2 for g in expected if g is not None) ** 0.5
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a is None) == (b is None), f"leaf {i}"
        if a is not None:
            assert (a - b).norm() <= rtol * whole, f"leaf {i}: {(a - b).norm() / whole:.1e}"


class Drawn:
    """An estimator that draws given tensors, whatever the seed."""

    name, scale = "drawn", 1.0
    signs = False

    def __init__(self, *indices, probes=1):
        self.indices, self.probes = indices, probes

    def layers(self, count, seed):
        return tuple(sorted(i % count for i in self.indices))

    def entries(self, shape, seed, device):
        return seht.SehtH().entries(shape, seed, device)
