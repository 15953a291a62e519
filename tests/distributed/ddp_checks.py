"""Checks that run in two processes: gradients, seeds, wrappers in every combination."""

import itertools

import torch
import torch.distributed as dist
from ddp_common import ESTIMATORS, assert_close, train
from helpers import network

COMBINATIONS = {
    f"gradient-{engine}-{norm}-{form}-{curvature}-{estimator}": (
        engine, norm == "norm", form, curvature, estimator,
    )
    for engine, norm, form, curvature, estimator in itertools.product(
        ("difference", "autograd"), ("norm", "plain"), ("scalar", "lean"),
        ("hessian", "ggn"), ESTIMATORS,
    )
    if not (estimator == "seht-s" and (engine == "autograd" or norm == "norm"))
}  # fmt: skip


def gradient(engine, norm, form, curvature, estimator):
    model, twin, records = train(
        form=form, model=network(norm=norm), engine=engine, curvature=curvature, steps=2,
        **ESTIMATORS[estimator],
    )  # fmt: skip
    assert any(r.trace is not None for r in records)
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), 1e-9)
    same(model)


def same(model):
    """All ranks hold the same weights."""
    for name, p in model.named_parameters():
        other = p.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, p), f"{name} differs between ranks"


FAST = {name: (gradient, arguments) for name, arguments in COMBINATIONS.items()}
SLOW = {}
