"""The difference engine in single precision, at the step it finds for itself.

Truth is the ``autograd`` engine on a copy in double. Measured over these networks: dense tr(H)
0.7 % at most, tr(G) 0.3 % one-sided and 0.1 % two-sided; one probe's own noise is some 400 %.
"""

import statistics
import warnings

import pytest
import torch
import torch.nn.functional as F
from kinked import problem as kinked_problem
from single import NETWORKS, Settled, calls, problem
from torch import nn

import seht

FAST = ["lstm", "mlp"]
every_network = pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS]
)
every_age = pytest.mark.parametrize("steps", [0, 50], ids=["fresh", "trained"])

# Relative errors of the gradient that must hold.
KINDS = {
    "hessian": ({}, 0.02),
    "ggn": ({"curvature": "ggn"}, 0.1),
    "ggn-two-sided": ({"curvature": "ggn", "two_sided": True}, 0.02),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_network
@every_age
@every_kind
def test_dense(name, steps, kind):
    options, tolerance = KINDS[kind]
    single = problem(name, steps)
    settled, exact = Settled(single, options), single.double()
    for seed in range(3):
        value, g = settled.errors(exact, seed)
        assert g < tolerance
        assert value < tolerance


@every_network
@every_age
@every_kind
def test_the_stated_error_is_the_error(name, steps, kind):
    """From the first call on; after three checks it may be that probes differ too much."""
    for number, call in enumerate(calls(problem(name, steps), 6, **KINDS[kind][0])):
        if number < 3 or call.stated is not None:
            assert call.error / 3 < call.stated < 3 * call.error


SPARSE = seht.SehtD(prob=0.05, layer_prob=0.2)


@every_network
@every_age
def test_sparse(name, steps):
    """SEHT-D, a layer or two at a time: each set of them has a best step of its own."""
    found = list(calls(problem(name, steps), 25, estimator=SPARSE))
    assert all(call.honest for call in found)
    assert statistics.median(call.error for call in found) < 0.005
    assert max(call.error for call in found) < 0.3


# --- warnings ---------------------------------------------------------------------------------


def penalise(model, closure, count=12, **options):
    penalty = seht.HessianTrace(model, engine="difference", seed=3, **{"weight": 0.1, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            penalty(closure)
    return penalty, [str(w.message) for w in caught if w.category is seht.PenaltyWarning]


class TestWarnings:
    def test_a_tiny_trace_beside_a_large_gradient_is_rounding(self):
        """The loss is scaled up and nearly linear: what is curved drowns."""
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        x = torch.randn(8, 4)
        closure = lambda: 1e3 * model(x).mean() + 3e3 * sum(p.sum() for p in model.parameters())
        torch.manual_seed(0)
        penalty, messages = penalise(model, closure, params=["2.weight"], weight=1e4)
        assert len(messages) == 1
        assert "rounding" in messages[0]
        assert "To mend it" in messages[0]
        assert penalty.last.error > 0.1

    def test_too_large_a_step_is_truncation(self):
        single = problem("mlp")
        penalty, messages = penalise(single.model, single.closure, kappa=2.0)
        assert len(messages) == 1
        assert "truncation" in messages[0]
        assert "lower kappa=" in messages[0]
        assert penalty.last.error > 0.1

    def test_a_decision_that_is_not_frozen_is_noticed(self):
        """Hidden in the backward of a custom function, where no mode sees it."""

        class Gate(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                return g * 2 * x * (x.abs() < 0.5)

        model, closure, _ = kinked_problem(Gate.apply)
        _, messages = penalise(model, closure, kappa=0.02)
        assert len(messages) == 1
        assert "a decision is not frozen" in messages[0]
        assert "seht.register_kink" in messages[0]

    @pytest.mark.parametrize("name", ["mlp", "lstm"])
    def test_none_for_an_ordinary_network(self, name):
        single = problem(name)
        _, messages = penalise(single.model, single.closure, weight=1e-3)
        assert messages == []

    def test_none_where_the_penalty_is_nothing_beside_the_loss(self):
        """A quadratic loss: the trace does not change, and what is left of it is rounding."""
        model, x = nn.Linear(4, 3), torch.randn(8, 4)
        _, messages = penalise(model, lambda: F.mse_loss(model(x), x[:, :3]), weight=1e-3)
        assert messages == []
