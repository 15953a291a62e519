"""Where the network ends and the loss begins: in both forms, whatever the closure does with it.

What the Gauss-Newton trace is, is tested elsewhere; here both forms of the difference engine meet
nested autograd, and that one a dense reference where its own answer might be in doubt.
"""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from stepping import FORMS, WEIGHT, assert_gradients, gradients, penalise, rows
from torch import nn

import seht

Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Frozen:
    a: object
    b: object
    name: str = "frozen"


class Wrapped(nn.Module):
    """A tanh network whose outputs have any structure; with labels it returns its own loss."""

    def __init__(self, dress, inputs=4, classes=3):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, classes)).double()
        self.dress = dress

    def forward(self, x, y=None):
        return self.dress(self.body(x), y)


def case(dress, loss, labels=False, **options):
    def build():
        model, (x, y) = Wrapped(dress), rows()
        closure = lambda: loss(model(x, y) if labels else model(x), y)
        return model, closure, list(model.parameters()), options

    return build


plain = lambda z, y: z
own_loss = lambda z, y: F.cross_entropy(z, y)
ce = F.cross_entropy


# --- closures: each returns (model, closure, leaves, options) ---------------------------------


def in_place_on_the_output():
    model, (x, y) = Wrapped(plain), rows()

    def closure():
        z = model(x)
        z /= 2
        z[:, 0] = z[:, 0].exp()
        return ce(z, y)

    return model, closure, list(model.parameters()), {}


def in_place_on_a_mark():
    model, (x, y) = Wrapped(plain), rows()

    def closure():
        z = seht.boundary(model(x))
        z.masked_fill_(torch.eye(8, 3, dtype=torch.bool), -3.0)
        return ce(z, y)

    return model, closure, list(model.parameters()), {}


def weight_as_an_output():
    """A learnt variance, as it is: it lies in the weight's own memory."""
    model, (x, _) = Wrapped(lambda z, y: (z, model.spread, model.table.t())), rows()
    model.spread = nn.Parameter(torch.zeros(1, 3).double())
    model.table = nn.Parameter(torch.ones(3, 2).double())

    def closure():
        mean, spread, table = model(x)
        return ((mean - 1).square() * (-spread).exp() + spread + table.sum(0).sin()).mean()

    return model, closure, list(model.parameters()), {}


def hidden_state_that_comes_back():
    model, (x, y) = Wrapped(plain, inputs=3), rows(width=3)

    def closure():
        h, total = x, 0.0
        for _ in range(3):
            h = model(h)
            total = total + ce(h, y)
        return total

    return model, closure, list(model.parameters()), {}


def tied_on_both_sides():
    torch.manual_seed(3)
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), rows()
    model[2].weight = model[0].weight
    closure = lambda: ce(F.linear(model(x).tanh(), model[0].weight), y)
    return model, closure, list(model.parameters()), {}


def module_and_features_behind_it():
    model, head, other, (x, y) = (
        Wrapped(plain), nn.Linear(3, 3).double(), nn.Linear(4, 3).double(), rows(),
    )  # fmt: skip
    features = other(x).tanh()
    leaves = [*model.parameters(), *head.parameters(), *other.parameters()]
    return model, lambda: ce(head(model(x) * features).tanh(), y), leaves, {}


def decay_of_captured_parameters():
    model, (x, y) = Wrapped(plain), rows()
    params = list(model.parameters())
    return model, lambda: ce(model(x), y) + sum(p.pow(4).sum() for p in params), params, {}


def calls_that_do_not_count():
    model, (x, y) = Wrapped(plain), rows()

    def closure():
        model(2 * x)
        with torch.no_grad():
            target = model(x).softmax(1)
        return ce(model(x), y) + ce(model(x + 1), target)

    return model, closure, list(model.parameters()), {}


CASES = {
    "tensor": case(plain, ce),
    "tuple": case(lambda z, y: (z, z.sin(), 3), lambda o, y: ce(o[0] + o[1], y)),
    "same tensor twice": case(lambda z, y: [z, z], lambda o, y: ce(o[0] * o[1], y)),
    "dictionary": case(lambda z, y: {"a": z, "b": [z.sin()]}, lambda o, y: ce(o["b"][0], y)),
    "named tuple": case(lambda z, y: Pair(z, z.cos()), lambda o, y: ce(o.a * o.b, y)),
    "frozen dataclass": case(lambda z, y: Frozen(z, z.cos()), lambda o, y: ce(o.a * o.b, y)),
    "named module": case(own_loss, lambda o, y: o, True, boundary="body"),
    "mark inside the model": case(
        lambda z, y: ce(seht.boundary(z), y), lambda o, y: 2 * o, labels=True
    ),
    "mark in the closure": case(plain, lambda z, y: ce(seht.boundary(z.exp()).sqrt(), y)),
    "marks win": case(lambda z, y: (z, z.sin()), lambda o, y: ce(seht.boundary(o[0] + o[1]), y)),
    "not convex": case(
        plain, lambda z, y: ce(z, y) + 3 * (z.softmax(1) * z.log_softmax(1)).sum(1).mean()
    ),
    **{
        build.__name__: build
        for build in (
            in_place_on_the_output, in_place_on_a_mark, weight_as_an_output,
            hidden_state_that_comes_back, tied_on_both_sides, module_and_features_behind_it,
            decay_of_captured_parameters, calls_that_do_not_count,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("extra", [{}, {"probes": 2}, {"two_sided": True}], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_both_forms_give_what_nested_autograd_gives(name, form, extra):
    model, closure, leaves, options = CASES[name]()
    shared = {k: v for k, v in extra.items() if k != "two_sided"}
    expected = penalise(model, closure, "autograd", curvature="ggn", **options, **shared)
    wanted = gradients(leaves)
    assert abs(expected.last.trace) > 1e-3
    model, closure, leaves, options = CASES[name]()
    got = penalise(model, closure, form, curvature="ggn", **options, **extra)
    assert got.last.trace == pytest.approx(expected.last.trace, rel=1e-4)
    assert_gradients(gradients(leaves), wanted, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_on_both_sides_keeps_the_second_order(form):
    errors = []
    for kappa in (1e-2, 5e-3):
        model, closure, _, _ = tied_on_both_sides()
        exact = penalise(model, closure, "autograd", curvature="ggn").last.trace
        model, closure, _, _ = tied_on_both_sides()
        options = {"curvature": "ggn", "two_sided": True, "kappa": kappa}
        errors.append(abs(penalise(model, closure, form, **options).last.trace - exact))
    assert errors[0] > 3 * errors[1]


# --- what nested autograd itself must answer ------------------------------------------------------


@pytest.mark.parametrize("engine", ["autograd", "difference"])
def test_a_hidden_state_is_a_part_of_the_network(engine):
    """G has the whole derivative of every state, and the Hessian of the loss in the states."""
    model, closure, _, _ = hidden_state_that_comes_back()
    x, y = rows(width=3)
    names = [n for n, p in model.named_parameters() if p.dim() > 1]
    values = [dict(model.named_parameters())[n] for n in names]

    def states(*values):
        h, out = x, []
        for _ in range(3):
            h = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (h,))
            out.append(h)
        return torch.stack(out)

    jacobian = torch.autograd.functional.jacobian(states, tuple(values))
    z = states(*values).detach()
    total = lambda z: sum(ce(part, y) for part in z)
    h = torch.autograd.functional.hessian(total, z).view(z.numel(), z.numel())
    task = seht.course.make_task(model, closure, seht.probes.choose(model), seht.SehtH(), 7)
    (sigma,) = task.probes()
    along = sum(
        (j.reshape(z.numel(), -1) @ sigma[n].double().flatten())
        for n, j in zip(names, jacobian, strict=True)
    )
    trace = seht.hessian_trace(model, closure, curvature="ggn", engine=engine, seed=7)
    assert trace.item() == pytest.approx((along @ h @ along).item(), rel=1e-4)


@pytest.mark.parametrize("engine", ["autograd", "difference"])
def test_a_state_that_is_changed_on_the_way_back_is_refused(engine):
    model, (x, y) = Wrapped(plain, inputs=3), rows(width=3)
    marked = []

    def closure(mark=False):
        h = model(0.7 * model(x))
        if mark:
            h = seht.boundary(h)
            marked.append(h)
        return ce(h, y)

    with pytest.raises(RuntimeError, match=r"goes into the model again.*seht.boundary"):
        seht.hessian_trace(model, closure, curvature="ggn", engine=engine)
    trace = seht.hessian_trace(model, lambda: closure(mark=True), curvature="ggn", engine=engine)
    assert trace > 0 and marked


@pytest.mark.parametrize("form", [*FORMS, "autograd"])
@pytest.mark.parametrize(
    ("dress", "loss"),
    [(own_loss, lambda o, y: o), (lambda z, y: (ce(z, y), z), lambda o, y: o[0] / 4)],
    ids=["loss", "loss and logits"],
)
def test_a_model_that_returns_its_loss_is_told_both_ways_out(form, dress, loss):
    model, closure, leaves, _ = case(dress, loss, labels=True)()
    with pytest.raises(RuntimeError, match=r'boundary="module.name".*seht.boundary\(logits\)'):
        penalise(model, closure, form, curvature="ggn")
    assert all(leaf.grad is None for leaf in leaves)


def test_aux_keeps_its_graph_in_the_scalar_form():
    model, (x, y) = Wrapped(plain), rows()

    def closure():
        z = model(x)
        return ce(z, y), z

    penalty = seht.HessianTrace(model, weight=WEIGHT, curvature="ggn", seed=5)
    total, aux = penalty(closure)
    (total + aux.square().mean()).backward()
    got = gradients(model.parameters())
    model.zero_grad()
    penalise(model, closure, "autograd", curvature="ggn")
    model(x).square().mean().backward()
    assert_gradients(got, gradients(model.parameters()), rtol=1e-5)


def test_no_hook_is_left_behind():
    model, closure, _, _ = CASES["tensor"]()
    for form in FORMS:
        penalise(model, closure, form, curvature="ggn")
    assert not model._forward_hooks and not model._forward_pre_hooks
    z = torch.ones(2)
    assert seht.boundary(z) is z
