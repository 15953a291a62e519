"""``kinks="free"``: the mean of the loss at both sides of the probe, and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from stepping import FORMS, WEIGHT, assert_gradients, entropy, gradients, mlp, penalise, rows
from torch import nn

import seht


def by_hand(model, closure, *, probes=1, seed=5, weight=WEIGHT):
    """(L(w + es) + L(w - es)) / 2 with e = sqrt(2 weight), averaged over the probes."""
    chosen = seht.probes.choose(model)
    task = seht.functional.make_task(
        model, closure, chosen, seht.SehtH(probes=probes), seht.probes.call_seed(seed, 0)
    )
    old = {n: w.detach().clone() for n, w in task.weights.items()}
    start = {n: b.clone() for n, b in model.named_buffers()}
    total, first = 0.0, None
    for sigma in task.probes():
        for side in (1, -1):
            for n, b in model.named_buffers():
                b.copy_(start[n])
            with torch.no_grad():
                for n, w in task.weights.items():
                    w.copy_(old[n] + side * (2 * weight) ** 0.5 * sigma[n].double())
            torch.manual_seed(11)
            loss = closure() / (2 * probes)
            loss.backward()
            total += loss.item()
            first = first or {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        for n, w in task.weights.items():
            w.copy_(old[n])
    for n, b in model.named_buffers():
        b.copy_(first[n])
    return total


@pytest.mark.parametrize("probes", [1, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.supports('`kinks="free"`', engine="{form}")
def test_the_objective(form, probes):
    expected, model = mlp(dropout=0.3), mlp(dropout=0.3)
    total = by_hand(expected, entropy(expected), probes=probes)
    random = torch.get_rng_state()
    penalty = penalise(model, entropy(model), form, kinks="free", probes=probes)
    assert penalty.last.loss + penalty.last.penalty == pytest.approx(total, rel=1e-12)
    assert_gradients(gradients(model.parameters()), gradients(expected.parameters()), rtol=1e-12)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model[1].num_batches_tracked == 1
    assert torch.equal(torch.get_rng_state(), random)


def test_the_scalar_is_that_mean():
    model, other = mlp(), mlp()
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=5, kinks="free")
    total = penalty(entropy(model))
    assert total.item() == pytest.approx(by_hand(other, entropy(other)), rel=1e-12)


def test_on_a_smooth_network_it_tends_to_the_trace():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    exact = penalise(model, entropy(model), "autograd").last.trace
    for weight in (1e-6, 1e-8):
        got = penalise(model, entropy(model), "scalar", kinks="free", weight=weight).last
        assert got.trace == pytest.approx(exact, rel=200 * weight**0.5)


@pytest.mark.parametrize("probes", [1, 2])
def test_two_runs_for_each_probe(probes):
    model, (x, y), seen = mlp(), rows(), []

    def closure():
        seen.append(seht.replaying())
        return F.cross_entropy(model(x), y)

    penalise(model, closure, "scalar", kinks="free", probes=probes)
    assert seen == [False] + [True] * (2 * probes - 1)


@pytest.mark.parametrize("form", FORMS)
def test_every_leaf_and_an_outer_graph(form):
    leaves, totals = [], []
    for free in (True, False):
        model, body, (x, y) = mlp(norm=False), nn.Linear(4, 4).double(), rows()
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        nn.init.constant_(body.weight, 0.3)
        nn.init.constant_(body.bias, 0.1)
        features = body(x).tanh()

        def closure():
            features_now = features if free else body(x).tanh()
            return F.cross_entropy(model(features_now) * scale, y)

        everything = [*model.parameters(), *body.parameters(), scale]
        if free:
            penalise(model, closure, form, kinks="free")
        else:
            totals.append(by_hand(model, closure))
        leaves.append(gradients(everything))
    assert_gradients(*leaves, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_drawn_weights_in_an_outer_graph_are_refused(form):
    model, (x, y) = mlp(norm=False), rows()
    features = model[2](model[0](x))
    with pytest.raises(RuntimeError, match=r"'0.weight'.*before the closure"):
        penalise(model, lambda: F.cross_entropy(model[4](features), y), form, kinks="free")


@pytest.mark.parametrize("fresh", [False, True])
def test_one_noise_from_a_generator_of_its_own(fresh):
    model, (x, y), seen = mlp(), rows(), []
    own = torch.Generator().manual_seed(2)

    def closure():
        generator = torch.Generator().manual_seed(2) if fresh else own
        seen.append(torch.randn(x.shape, generator=generator, dtype=x.dtype))
        return F.cross_entropy(model(x + seen[-1]), y)

    penalise(model, closure, "scalar", kinks="free")
    assert len(seen) == 2 and torch.equal(*seen)
    if not fresh:
        once = torch.Generator().manual_seed(2)
        torch.randn(x.shape, generator=once, dtype=x.dtype)
        assert torch.equal(own.get_state(), once.get_state())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"curvature": "ggn"}, "leave one of them out"),
        ({"limit": 0.5}, "limit"),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"engine": "autograd"}, "engine='difference'"),
    ],
)
def test_what_does_not_go_with_it(options, words):
    model = mlp()
    with pytest.raises(ValueError, match=words):
        penalise(model, entropy(model), "scalar", kinks="free", **options)


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="did you mean 'free'"):
        seht.HessianTrace(mlp(), weight=WEIGHT, kinks="fre")


def test_on_another_closure():
    """Either the main closure's gradient is there, or it is an error."""
    model = mlp(norm=False)
    penalty = seht.HessianTrace(model, weight=WEIGHT, kinks="free")
    try:
        total = penalty(lambda: 100 * entropy(model)(), on=entropy(model))
    except ValueError:
        return
    assert total.item() == pytest.approx(penalty.last.loss + penalty.last.penalty, rel=1e-9)


def test_a_compiled_closure_has_no_mode_to_be_traced():
    """With the decisions free nothing is recorded: only modes that leave compiled code alone."""
    model, (x, y) = mlp(), rows()
    modes = []

    def closure():
        modes.append(torch.overrides._get_current_function_mode_stack())
        return F.cross_entropy(model(x), y)

    penalise(model, closure, "scalar", kinks="free")
    names = {type(mode).__name__ for stack in modes for mode in stack}
    assert names <= {"Generators", "Casts"}
