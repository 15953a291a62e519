"""Activation checkpointing: its recomputation runs outside the mode that freezes decisions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import seht


def problem(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)).double()
    x, y = torch.randn(5, 3).double(), torch.arange(5) % 2

    def closure(save=True):
        def first(a):
            return activation(model[0](a))

        h = checkpoint(first, x, use_reentrant=False) if save else first(x)
        return F.cross_entropy(model[1](h), y)

    return model, closure


def test_smooth_parts_may_be_checkpointed():
    model, closure = problem(torch.tanh)
    values = [
        seht.hessian_trace(model, lambda save=save: closure(save), engine="difference", seed=1)
        for save in (True, False)
    ]
    gradients = [torch.autograd.grad(t, model[0].weight)[0] for t in values]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)


def test_decisions_in_a_checkpoint_are_refused():
    model, closure = problem(torch.relu)
    with pytest.raises(seht.KinkError, match="relu lies in an activation checkpoint"):
        seht.hessian_trace(model, closure, engine="difference", seed=1)
    with torch.autograd.graph.save_on_cpu():  # other hooks on saved tensors are harmless
        seht.hessian_trace(model, lambda: closure(False), engine="difference", seed=1)


def test_norms_in_a_checkpoint_are_refused_by_nested_autograd():
    model, closure = problem(nn.LayerNorm(8).double())
    with pytest.raises(RuntimeError, match="switch it off on penalised steps"):
        seht.hessian_trace(model, closure, engine="autograd", seed=1)
