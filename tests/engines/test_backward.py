"""The scalar is an ordinary one, except twice; and ``on=`` takes the trace of another closure."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import Snapshot
from stepping import FORMS, WEIGHT, assert_gradients, entropy, gradients, mlp, penalise, rows

import seht


def test_retain_graph_and_a_second_backward():
    model = mlp()
    total = seht.HessianTrace(model, weight=WEIGHT, seed=5)(entropy(model))
    total.backward(retain_graph=True)
    once = gradients(model.parameters())
    total.backward()
    assert_gradients(gradients(model.parameters()), [2 * g for g in once], rtol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_differentiating_twice_is_an_error(curvature):
    model = mlp()
    total = seht.HessianTrace(model, weight=WEIGHT, curvature=curvature)(entropy(model))
    (g,) = torch.autograd.grad(total, model[0].weight, create_graph=True)
    plain = torch.autograd.grad(total, model[0].weight, retain_graph=True)[0]
    assert torch.equal(g, plain)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        g.sum().backward()


def test_the_scalar_is_part_of_a_larger_loss():
    model, (x, y) = mlp(norm=False), rows()
    extra = lambda logits: logits.square().mean()

    def closure():
        logits = model(x)
        return F.cross_entropy(logits, y), logits

    loss, aux = seht.HessianTrace(model, weight=WEIGHT, seed=5)(closure)
    (3 * loss + extra(aux)).backward()
    got = gradients(model.parameters())
    model.zero_grad()
    penalise(model, closure, "autograd")
    wanted = [3 * g for g in gradients(model.parameters())]
    model.zero_grad()
    extra(model(x)).backward()
    wanted = [a + b for a, b in zip(wanted, gradients(model.parameters()), strict=True)]
    assert_gradients(got, wanted)


@pytest.mark.parametrize("form", [*FORMS, "autograd"])
@pytest.mark.supports("gradient accumulation", engine="{form}")
def test_accumulation_over_micro_batches_is_the_mean(form):
    model = mlp(norm=False)
    penalty = seht.HessianTrace(
        model, weight=WEIGHT, seed=5, accumulate=2,
        engine="autograd" if form == "autograd" else "difference",
    )  # fmt: skip
    parts, singles = [rows(seed=s) for s in (1, 2)], []
    for data in parts:
        closure = lambda: entropy(model, data)() / 2
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        singles.append(penalty.last.seed)
    got = gradients(model.parameters())
    assert penalty.step == 1
    model.zero_grad()
    for data, seed in zip(parts, singles, strict=True):
        loss, trace = seht.loss_and_trace(model, entropy(model, data), seed=seed, engine="autograd")
        ((loss + WEIGHT * trace) / 2).backward()
    assert_gradients(got, gradients(model.parameters()))


@pytest.mark.parametrize("form", FORMS)
def test_aux_is_the_centres(form):
    model, (x, y) = mlp(dropout=0.5), rows()
    runs = []

    def closure():
        logits = model(x)
        runs.append(logits)
        return F.cross_entropy(logits, y), {"logits": logits}

    penalty = seht.HessianTrace(model, weight=WEIGHT)
    run = penalty.backward if form == "lean" else penalty
    loss, aux = run(closure)
    assert torch.equal(aux["logits"], runs[0]) and len(runs) > 2
    assert not torch.equal(runs[0], runs[1])
    if form == "lean":
        assert not loss.requires_grad and loss.item() == penalty.last.loss


# --- the trace of another closure -----------------------------------------------------------------


def apart(model, main, small, **options):
    """Loss of the one and trace of the other, put together by hand."""
    torch.manual_seed(11)
    loss = main()
    after = torch.get_rng_state()
    seed = seht.probes.call_seed(5, 0)
    trace = seht.hessian_trace(model, small, seed=seed, engine="autograd", **options)
    (loss + WEIGHT * trace).backward()
    torch.set_rng_state(after)


@pytest.mark.parametrize("form", [*FORMS, "autograd"])
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.supports("the trace of another closure, `on=`", engine="{form}")
def test_on_another_closure(form, curvature):
    model = mlp(dropout=0.4)
    other = copy.deepcopy(model)
    x, y = rows()
    small = (x[:3], y[:3])
    apart(other, entropy(other), entropy(other, small), curvature=curvature)
    expected = Snapshot(other)
    aux = object()
    main = lambda: (entropy(model)(), aux)
    penalty = penalise(model, main, form, on=entropy(model, small), curvature=curvature)
    assert_gradients(gradients(model.parameters()), gradients(other.parameters()))
    # Buffers and random state are those of one main closure.
    assert torch.equal(torch.get_rng_state(), expected.random)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state[name], rtol=1e-12, atol=0)
    assert model[1].num_batches_tracked == 1
    torch.manual_seed(11)
    model[1].reset_running_stats()
    assert penalty.last.loss == pytest.approx(entropy(model)().item(), rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_on_is_not_called_on_plain_steps_and_aux_is_the_main_closures(form):
    model = mlp()
    called = []

    def small():
        called.append("small")
        return entropy(model)()

    penalty = seht.HessianTrace(model, weight=WEIGHT, every=2)
    run = penalty.backward if form == "lean" else penalty
    for _ in range(4):
        called.append("step")
        _, aux = run(lambda: (entropy(model)(), "main"), on=small)
        assert aux == "main"
    assert called.index("small") == 1 and called.count("step") == 4
    steps = "".join(c[1] for c in called).split("t")[1:]
    assert [bool(s) for s in steps] == [True, False, True, False]


def test_on_with_a_limit_is_held_to_the_main_loss():
    model = mlp()
    penalty = penalise(model, entropy(model), "scalar", on=entropy(model), weight=10.0, limit=0.1)
    assert abs(penalty.last.penalty) == pytest.approx(0.1 * penalty.last.loss, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_no_drawn_weight_is_used(form, curvature):
    model = Idle()
    entropy(model)().backward()
    plain = gradients(model.parameters())
    model.zero_grad()
    penalty = penalise(model, entropy(model), form, params="idle.*", curvature=curvature)
    assert_gradients(gradients(model.parameters()), plain)
    assert penalty.last.trace == 0
    assert penalty.last.unused == ("idle.weight", "idle.bias")


class Idle(torch.nn.Module):
    """A layer that the model never calls."""

    def __init__(self):
        super().__init__()
        self.body, self.idle = mlp(norm=False), torch.nn.Linear(4, 3).double()

    def forward(self, x):
        return self.body(x)
