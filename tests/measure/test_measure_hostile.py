"""Whatever goes wrong, the model is afterwards byte for byte what it was."""

import copy
import math
import os
import random
import signal

import numpy
import pytest
import torch
import torch.nn.functional as F
from curved_problems import data, loss_fn, network
from torch import nn

import seht
from seht import measure

CALLS = {
    "trace": lambda *a, **k: measure.trace(*a, **k),
    "eigenvalues": lambda *a, **k: measure.eigenvalues(*a, **k),
    "density": lambda *a, **k: measure.density(*a, probes=1, steps=5, **k),
    "landscape": lambda *a, **k: measure.landscape(*a, points=3, directions=1, **k),
    "sharpness": lambda *a, **k: measure.sharpness(*a, draws=1, steps=2, **k),
    "stability": lambda *a, **k: measure.stability(*a, **k),
    "bound": lambda *a, **k: measure.bound(*a, **k),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def normed(dtype=torch.float64):
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3)
    ).to(dtype)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    model[3].eval()  # a mixture of modes
    model[0].bias.requires_grad_(False)
    return model


class Bytes:
    """Everything of a model and of the random states."""

    def __init__(self, model):
        self.state = {k: v.clone() for k, v in model.state_dict().items()}
        self.grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.objects = [id(t) for t in (*model.parameters(), *model.buffers())]
        self.grad_objects = [id(p.grad) for p in model.parameters()]
        self.flags = [p.requires_grad for p in model.parameters()]
        self.modes = [m.training for m in model.modules()]
        self.hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        self.random = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1])
        self.grad_mode = torch.is_grad_enabled()

    def assert_same(self, model):
        now = Bytes(model)
        for name, tensor in self.state.items():
            assert tensor.numpy().tobytes() == now.state[name].numpy().tobytes(), name
        for a, b in zip(self.grads, now.grads, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for name in ("objects", "grad_objects", "flags", "modes", "hooks", "grad_mode"):
            assert getattr(self, name) == getattr(now, name), name
        assert torch.equal(self.random[0], now.random[0]) and self.random[1] == now.random[1]
        assert (self.random[2] == now.random[2]).all()


@every_call
def test_untouched(call):
    model = normed()
    before = Bytes(model)

    def loss(model, batch):
        torch.rand(1), random.random(), numpy.random.rand()
        model.train()
        return loss_fn(model, batch)

    call(model, loss, data(), micro_batch=12)
    before.assert_same(model)


@every_call
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", [1, 6])  # 2 to 4 only ask whether the loss is a sum
def test_untouched_after_an_exception(call, error, when):
    model = normed()
    before = Bytes(model)
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        model.eval()
        z = model(batch[0])
        if calls == when:
            raise error("stop")
        return F.cross_entropy(z, batch[1])

    with pytest.raises(error):
        call(model, loss, data(), micro_batch=4)
    before.assert_same(model)


@every_call
@pytest.mark.parametrize("when", [7])
def test_untouched_after_ctrl_c(call, when):
    model = normed()
    before = Bytes(model)
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == when:
            os.kill(os.getpid(), signal.SIGINT)
        return loss_fn(model, batch)

    with pytest.raises(KeyboardInterrupt):
        call(model, loss, data(), micro_batch=4)
    before.assert_same(model)


@every_call
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(call, dtype):
    model = network(dtype=dtype)
    before = Bytes2(model)
    with pytest.raises(TypeError, match=r"deepcopy\(model\).float\(\)"):
        call(model, loss_fn, data(dtype=dtype))
    before.assert_same(model)


class Bytes2(Bytes):
    """NumPy has no bfloat16."""

    def assert_same(self, model):
        for name, tensor in model.state_dict().items():
            assert torch.equal(self.state[name].view(torch.int16), tensor.view(torch.int16)), name


def test_autocast_around_it_is_switched_off():
    model, batch = network(dtype=torch.float32), data(dtype=torch.float32)
    plain = measure.trace(model, loss_fn, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = measure.trace(model, loss_fn, batch)
    assert inside.estimate == plain.estimate


@every_call
def test_nan_weights(call):
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    before = Bytes(model)
    with pytest.raises(seht.NonFiniteError, match=r"'2.weight' holds values that are not finite"):
        call(model, loss_fn, data())
    before.assert_same(model)


@every_call
def test_a_batch_that_is_not_finite(call):
    x, y = data()
    x[3] = math.inf
    with pytest.raises(seht.NonFiniteError, match="although every weight is finite"):
        call(network(), loss_fn, (x, y))


@every_call
def test_no_parameters(call):
    with pytest.raises(ValueError, match="has no parameters"):
        call(nn.Sequential(nn.Flatten()), loss_fn, data())


@every_call
@pytest.mark.parametrize("empty", [[], (torch.zeros(0, 5), torch.zeros(0)), iter(())],
                         ids=["list", "batch", "iterator"])  # fmt: skip
def test_no_data(call, empty):
    empty = copy.copy(empty)
    with pytest.raises(ValueError, match="nothing to measure on"):
        call(network(), loss_fn, empty)


@every_call
def test_a_loss_that_is_a_sum(call):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    model = network()
    before = Bytes(model)
    with pytest.raises(ValueError, match="returns a sum over the examples"):
        call(model, loss, data())
    before.assert_same(model)


def test_a_loss_that_is_no_scalar():
    with pytest.raises(ValueError, match=r"reduce it with .mean\(\)"):
        measure.trace(network(), lambda m, b: m(b[0]), data())


@every_call
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        lambda batch: batch[0].mean(),
        lambda model, x, y: F.cross_entropy(model(x), y),
        lambda z, y: z.pow(2).mean(),
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    ],
    ids=["criterion", "batch-alone", "unpacked", "outputs", "keys"],
)
def test_a_loss_that_takes_something_else(call, loss):
    model = network()
    before = Bytes(model)
    with pytest.raises(TypeError, match=r"called with the model and one batch \(here a tuple\)"):
        call(model, loss, data())
    before.assert_same(model)


def test_a_loss_that_knows_nothing_of_the_model():
    with pytest.raises((ValueError, RuntimeError)):
        measure.trace(network(), lambda m, b: b[0].mean(), data())
    other = network()
    with pytest.raises(ValueError, match="none of the chosen parameters"):
        measure.trace(network(), lambda m, b: loss_fn(other, b), data())


@every_call
def test_a_single_sample(call):
    x, y = data()
    result = call(network(), loss_fn, (x[:1], y[:1]))
    assert getattr(result, "samples", 1) == 1


def test_a_single_sample_has_the_right_trace():
    x, y = data()
    model, one = network(), (x[:1], y[:1])
    result = measure.trace(model, loss_fn, one, probes=400)
    exact = float(seht.exact_trace(model, lambda: loss_fn(model, one)))
    assert abs(result.estimate - exact) < 4 * result.stderr


def test_under_no_grad_and_inference_mode():
    model, batch = network(), data()
    wanted = measure.trace(model, loss_fn, batch).estimate
    with torch.no_grad():
        assert measure.trace(model, loss_fn, batch).estimate == wanted
    with torch.inference_mode():
        assert measure.trace(model, loss_fn, batch).estimate == wanted


# --- arguments that are refused, and one that is not ------------------------------------------


@pytest.mark.parametrize(
    ("function", "option", "message"),
    [
        ("eigenvalues", {"tol": -1.0}, "tol must be a positive finite number"),
        ("stability", {"tol": "tight"}, "tol must be a positive finite number"),
        ("robustness", {"bits": 8}, r"bits must be a sequence such as \(8,\), not 8"),
        ("robustness", {"noise": 0.1}, r"noise must be a sequence such as \(0.1,\), not 0.1"),
        ("trace", {"seed": "x"}, "seed must be a whole number or None"),
    ],
)
def test_bad_arguments(function, option, message):
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(measure, function)(network(), loss_fn, data(), **option)


def test_without_a_seed_torchs_own_is_taken():
    """As by the penalty: what the message about a bad seed promises."""
    torch.manual_seed(5)
    taken = measure.trace(network(), loss_fn, data(), seed=torch.initial_seed())
    torch.manual_seed(5)
    assert measure.trace(network(), loss_fn, data(), seed=None).estimate == taken.estimate
    assert seht.check(network(), loss_fn, data(), seed=None, engines="difference", directions=1).ok
    with pytest.raises(TypeError, match="seed must be a whole number or None"):
        seht.check(network(), loss_fn, data(), seed="x")
