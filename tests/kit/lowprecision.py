"""One step of a small network, with low precision around it, inside its closure, or nowhere."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from stepping import FORMS, WEIGHT, gradients
from torch import nn
from torch.overrides import TorchFunctionMode

import seht

HALVES = [torch.bfloat16, torch.float16]
every_form = pytest.mark.parametrize("form", FORMS)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
every_curvature = pytest.mark.parametrize("curvature", ["hessian", "ggn"])


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5),
    )  # fmt: skip


def images(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 3, 8, 8, generator=generator).to(dtype), torch.arange(16) % 5


def autocast(where, there, dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype) if where == there else nullcontext()


def closure_of(model, where=None, dtype=torch.bfloat16, called=None, x=None):
    x, y = (images(next(model.parameters()).dtype)[0] if x is None else x), images()[1]

    def closure():
        with autocast(where, "inner", dtype):
            return F.cross_entropy((model if called is None else called)(x), y)

    return closure


def step(model, closure, form, where=None, dtype=torch.bfloat16, inside=False, **options):
    """One penalised step with autocast around it, inside its closure or nowhere."""
    penalty = seht.HessianTrace(model, **{"weight": WEIGHT, "seed": 1, **options})
    with autocast(where, "outer", dtype):
        if form == "lean":
            penalty.backward(closure)
            return penalty
        loss = penalty(closure)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return penalty


def one(where=None, form="scalar", **options):
    model = net()
    penalty = step(model, closure_of(model, where), form, where, **options)
    return penalty.last, gradients(model.parameters()), model


class Types(TorchFunctionMode):
    """What linear layers put out."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.seen.add(out.dtype)
        return out
