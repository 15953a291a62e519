"""What may surround a step or lie inside its closure: modes, global switches, torch.func."""

import pytest
import torch
import torch.nn.functional as F
from abusing import Surroundings, assert_right, every_difference, every_way, penalty_of, run
from stepping import assert_gradients, mlp, rows
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import seht


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Switch:
    """A setter of something global, as a context."""

    def __init__(self, setter, on, off):
        self.setter, self.on, self.off = setter, on, off

    def __enter__(self):
        self.setter(self.on)

    def __exit__(self, *_):
        self.setter(self.off)


AROUND = {
    "function mode": Functions,
    "dispatch mode": Dispatch,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: Switch(torch.use_deterministic_algorithms, True, False),
    "default dtype": lambda: Switch(torch.set_default_dtype, torch.float16, torch.float32),
    "default device": lambda: Switch(torch.set_default_device, "meta", None),
    "device": lambda: torch.device("meta"),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "enable grad": torch.enable_grad,
}


def step(engine, form, curvature, around=None, inside=None, **options):
    model, (x, y) = mlp(), rows()
    penalty = penalty_of(model, engine, curvature, warm=False, **options)

    def closure():
        if inside is None:
            return F.cross_entropy(model(x), y)
        with inside():
            return F.cross_entropy(model(x), y)

    if around is None:
        run(penalty, closure, form)
    else:
        with around():
            before = Surroundings(model)
            run(penalty, closure, form)
            after = Surroundings(model)
            assert after.modes == before.modes and after.grad == before.grad
    return [p.grad for p in model.parameters()], penalty.last.trace


@every_way
@pytest.mark.parametrize("name", AROUND)
def test_around_a_step(engine, form, curvature, name):
    got, trace = step(engine, form, curvature, around=AROUND[name])
    expected, known = step(engine, form, curvature)
    assert_gradients(got, expected, rtol=1e-9)
    assert trace == pytest.approx(known, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "seht-d", "prob": 0.5, "layer_prob": 1.0},
        {"distribution": "gaussian", "probes": 2},
        {"estimator": "seht-s", "coupling": "frozen"},
    ],
    ids=str,
)
def test_another_default_device(options):
    """Nothing of ours is made where the user's tensors are not."""
    around = AROUND["default device"]
    got, _ = step("difference", "scalar", "hessian", around=around, **options)
    expected, _ = step("difference", "scalar", "hessian", **options)
    assert_gradients(got, expected, rtol=1e-9)


@every_way
@pytest.mark.parametrize("name", ["function mode", "dispatch mode", "anomaly", "saved tensors"])
def test_inside_a_closure(engine, form, curvature, name):
    got, trace = step(engine, form, curvature, inside=AROUND[name])
    expected, known = step(engine, form, curvature)
    assert_gradients(got, expected, rtol=1e-9)
    assert trace == pytest.approx(known, rel=1e-9)


@every_way
def test_inference_mode(engine, form, curvature):
    model, (x, y) = mlp(), rows()
    penalty = penalty_of(model, engine, curvature)
    before = Surroundings(model, penalty)
    with torch.inference_mode():
        if form == "scalar":
            assert not penalty(lambda: F.cross_entropy(model(x), y)).requires_grad
        else:
            with pytest.raises(RuntimeError, match=r"leave torch.no_grad\(\) first"):
                penalty.backward(lambda: F.cross_entropy(model(x), y))
        made_inside = x * 1
    Surroundings(model, penalty).assert_same(before, buffers=False)
    before = Surroundings(model, penalty)
    with pytest.raises(RuntimeError, match="you can make a clone"):  # PyTorch's own words
        run(penalty, lambda: F.cross_entropy(model(made_inside), y), form)
    Surroundings(model, penalty).assert_same(before)
    run(penalty, lambda: F.cross_entropy(model(made_inside.clone()), y), form)


@every_difference
def test_targets_made_in_inference_mode(form, curvature):
    x, y = rows()

    def make(model):
        def closure():
            with torch.inference_mode():
                soft = model(x).softmax(1)
            z = model(x)
            return F.cross_entropy(z, y) + (z * soft.clone()).sum()

        return closure

    assert_right(lambda: mlp(norm=False), make, form, curvature)


def vmapped(model, x):
    return torch.vmap(model)(x)


def called(model, x):
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,))


@every_difference
@pytest.mark.parametrize("forward", [vmapped, called])
def test_torch_func_inside(form, curvature, forward):
    x, y = rows()
    make = lambda model: lambda: F.cross_entropy(seht.boundary(forward(model, x)), y)
    assert_right(lambda: mlp(norm=False), make, form, curvature)


@every_difference
def test_a_gradient_by_torch_func(form, curvature):
    x, y = rows()

    def make(model):
        def closure():
            g = torch.func.grad(lambda inner: model(inner).square().sum())(x)
            return F.cross_entropy(model(x), y) + g.square().mean()

        return closure

    assert_right(lambda: mlp(norm=False), make, form, curvature)


def test_losses_by_vmap():
    x, y = rows()

    def make(model):
        def one(weights, row, label):
            z = torch.func.functional_call(model, weights, (row[None],))
            return F.cross_entropy(z, label[None])

        return lambda: torch.vmap(one, (None, 0, 0))(dict(model.named_parameters()), x, y).mean()

    assert_right(lambda: mlp(norm=False), make, "lean", "hessian")
