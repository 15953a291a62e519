"""What the abuse tests share: every way to penalise a step, and all that it may touch."""

import itertools
import threading

import pytest
import torch
import torch.optim.optimizer as optimizers
from helpers import Snapshot, own_state
from stepping import FORMS, WEIGHT, assert_gradients, warm_up
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import seht
from seht.engines import ENGINES
from seht.replay import closures

CURVATURES = ("hessian", "ggn")
FIRST = {
    ("difference", "scalar", "hessian"),
    ("difference", "lean", "ggn"),
    ("autograd", "scalar", "hessian"),
}
"""One of each in the fast tests; the others are slow."""
every_way = pytest.mark.parametrize(
    ("engine", "form", "curvature"),
    [
        pytest.param(*way, marks=[] if way in FIRST else pytest.mark.slow)
        for way in itertools.product(sorted(ENGINES), FORMS, CURVATURES)
    ],
)
every_difference = pytest.mark.parametrize(
    ("form", "curvature"),
    [
        pytest.param(f, c, marks=[] if ("difference", f, c) in FIRST else pytest.mark.slow)
        for f, c in itertools.product(FORMS, CURVATURES)
    ],
)


def penalty_of(model, engine, curvature, *, warm=True, **options):
    """As after many steps, unless ``warm`` is False: the first ones check themselves."""
    options = {"weight": WEIGHT, "seed": 5} | options
    penalty = seht.HessianTrace(model, engine=engine, curvature=curvature, **options)
    if warm and engine == "difference":
        warm_up(penalty)
    return penalty


def run(penalty, closure, form, **options):
    """One step in this form, with its backward; returns what the call returned."""
    if form == "lean":
        return penalty.backward(closure, **options)
    out = penalty(closure, **options)
    (out[0] if isinstance(out, tuple) else out).backward()
    return out


class Surroundings:
    """What a step may touch: the model, its hooks, and everything that is global."""

    def __init__(self, model, penalty=None):
        self.snapshot = Snapshot(model)
        self.modes = (
            len(_get_current_function_mode_stack()),
            len(_get_current_dispatch_mode_stack()),
        )
        self.grad = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
        )
        self.saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.hooks = [dict(p._backward_hooks or {}) for p in model.parameters()]
        self.hooks += [
            [dict(getattr(m, kind)) for kind in vars(m) if kind.endswith("_hooks")]
            for m in model.modules()
        ]
        everywhere = nn.modules.module
        self.everywhere = [
            len(getattr(everywhere, name)) for name in dir(everywhere) if name.endswith("_hooks")
            and name.startswith("_global")
        ] + [len(optimizers._global_optimizer_pre_hooks)]  # fmt: skip
        self.identities = [id(t) for t in (*model.parameters(), *model.buffers())]
        self.trained = [p.requires_grad for p in model.parameters()]
        self.training = [m.training for m in model.modules()]
        self.penalty = None if penalty is None else own_state(penalty)
        self.replaying = seht.replaying()
        self.busy = dict(closures._busy)
        self.threads = threading.active_count()

    def assert_same(self, other, *, random=True, buffers=True):
        self.snapshot.assert_same(other.snapshot, random=random, buffers=buffers)
        for name in vars(self).keys() - {"snapshot"}:
            assert getattr(self, name) == getattr(other, name), name


class Fuse(torch.autograd.Function):
    """Does nothing, but calls something when it is differentiated."""

    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.action()
        return grad, None


def gradients_of(model, make, engine, form, curvature, **options):
    """The gradients that one step leaves, of a closure made for this model, and the penalty."""
    penalty = penalty_of(model, engine, curvature, **options)
    torch.manual_seed(11)
    run(penalty, make(model), form)
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()], penalty


def assert_right(build, make, form, curvature, rtol=1e-5, **options):
    """The difference engine leaves the gradients, statistics and trace of the reference."""
    ours, other = build(), build()
    got, penalty = gradients_of(ours, make, "difference", form, curvature, warm=False, **options)
    wanted, reference = gradients_of(other, make, "autograd", "scalar", curvature, **options)
    assert_gradients(got, wanted, rtol=rtol)
    assert penalty.last.trace == pytest.approx(reference.last.trace, rel=1e-4)
    for a, b in zip(ours.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    return penalty
