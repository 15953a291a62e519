"""``seht.register_kink``: teaching the difference engine a user's own operations."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Square
from kinked import problem
from reference import gradient, relative

import seht
from seht.operators.table import KINKS

COARSE = 0.1  # crosses many kinks, so that only a frozen decision can be right


@pytest.fixture(autouse=True)
def table():
    """The table as it was, afterwards."""
    before = dict(KINKS)
    yield KINKS
    KINKS.clear()
    KINKS.update(before)


def estimate(function, engine="difference", **options):
    model, closure, leaves = problem(function)
    trace = seht.hessian_trace(model, closure, engine=engine, seed=3, **options)
    return gradient(trace, leaves)


def assert_right(ours, truth):
    """At a fine step and across kinks."""
    exact = estimate(truth, "autograd")
    assert relative(estimate(ours), exact) < 1e-6
    assert relative(estimate(ours, kappa=COARSE), exact) < 0.05


class Clip(torch.autograd.Function):
    """Clamp, with a gradient of its own: it leaks a little outside."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.where(x.abs() < 0.5, 1.0, 0.1)


class NewStyle(Clip):
    """With ``setup_context``, as ``torch.func`` wants it."""

    @staticmethod
    def forward(x):
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class Composite(Clip):
    """The kink is inside a function made of others."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.hardswish(x)


class Within(Clip):
    """The kink is in an intermediate result, which requires no gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (2 * x).clamp(-1, 1) / 2


class Smooth(torch.autograd.Function):
    """With a decision about a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        scale = torch.ones(()).clamp(max=0.5)
        return (scale * x) * (2 * x)

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


# --- custom autograd functions ----------------------------------------------------------------


@pytest.mark.parametrize("function", [Clip, NewStyle], ids=["old", "new"])
def test_an_unregistered_function_with_a_kink_is_refused(function):
    with pytest.raises(seht.KinkError, match=r"clamp inside a custom autograd\.Function.*register"):
        estimate(function.apply)


def test_a_kink_inside_a_composite_inside_a_function_is_refused():
    with pytest.raises(seht.KinkError, match="relu6 inside a custom"):
        estimate(Composite.apply)


def test_a_kink_in_an_intermediate_result_is_refused():
    with pytest.raises(seht.KinkError, match="clamp inside a custom"):
        estimate(Within.apply)


def test_a_decision_about_a_constant_is_none():
    assert_right(Smooth.apply, torch.square)


@pytest.mark.parametrize("function", [Clip, NewStyle], ids=["old", "new"])
def test_a_registered_function_is_right(function):
    clip = seht.register_kink(function.apply, "linear")
    assert_right(clip, function.apply)


def test_a_smooth_function_needs_no_registration():
    assert_right(Square.apply, torch.square)


# --- the named rules --------------------------------------------------------------------------


def test_linear_on_a_function_of_pytorch_is_registered_in_place():
    with pytest.raises(seht.KinkError, match="fmod"):
        estimate(lambda z: torch.fmod(z, 0.7))
    assert seht.register_kink(torch.fmod, "linear") is torch.fmod
    assert_right(lambda z: torch.fmod(z, 0.7), lambda z: torch.fmod(z, 0.7))


def test_linear_in_several_tensors():
    seht.register_kink(torch.copysign, "linear")
    function = lambda z: torch.copysign(z, z.flip(1))
    assert_right(function, function)


class Stop(torch.autograd.Function):
    """A gradient of zero, which nobody outside can see."""

    @staticmethod
    def forward(ctx, x):
        return x.exp().mean(1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        return None


def test_constant():
    truth = lambda z: z * z.detach().exp().mean(1, keepdim=True)
    assert relative(estimate(lambda z: z * Stop.apply(z)), estimate(truth, "autograd")) > 0.1
    stop = seht.register_kink(Stop.apply, "constant")
    assert_right(lambda z: z * stop(z), truth)


def test_smooth_lifts_a_refusal():
    function = lambda z: torch.special.i0e(z.square() + 0.1)  # its kink, at 0, is never met
    with pytest.raises(seht.KinkError, match="i0e"):
        estimate(function)
    seht.register_kink(torch.special.i0e, "smooth")
    assert relative(estimate(function), estimate(function, "autograd")) < 1e-6


def test_the_default_is_constant():
    frozen = seht.register_kink(lambda z: (3 * z).round().detach())
    assert_right(lambda z: z * frozen(z), lambda z: z * (3 * z).round().detach())


# --- a pair of functions ----------------------------------------------------------------------


def gate(z, threshold=0.0):
    """Quadratic above the threshold and linear below, with a jump between."""
    return torch.where(z.detach() > threshold, z * z, z - 1)


def test_a_pair():
    calls = []

    def record(z, threshold=0.0):
        above = z.detach() > threshold
        calls.append("record")
        return gate(z, threshold), above

    def replay(above, z, threshold=0.0):
        calls.append("replay")
        return torch.where(above, z * z, z - 1)

    ours = seht.register_kink(gate, (record, replay))
    truth = lambda z: gate(z, threshold=0.2)
    assert_right(lambda z: ours(z, threshold=0.2), truth)
    assert calls == ["record", "replay", "replay"] * 2


def test_a_wrong_pair_is_wrong():
    """What the pair says is what is done: a replay that decides anew is no better than none."""
    free = seht.register_kink(
        torch.relu, (lambda z: (torch.relu(z), None), lambda _, z: torch.relu(z))
    )
    exact = estimate(torch.relu, "autograd")
    assert relative(estimate(free, kappa=COARSE), exact) > 1


# --- what it returns, and errors --------------------------------------------------------------


def test_the_wrapper_is_the_function_elsewhere():
    clip = seht.register_kink(Clip.apply, "linear")
    gated = seht.register_kink(gate, "linear")
    x = torch.linspace(-1, 1, 7)
    assert torch.equal(clip(x), Clip.apply(x))
    assert torch.equal(gated(x, threshold=0.3), gate(x, threshold=0.3))
    assert gated.__name__ == "gate"
    assert gated.__doc__ == gate.__doc__


def test_errors():
    with pytest.raises(ValueError, match=r"unknown rule 'linar'.*linear, constant, smooth"):
        seht.register_kink(gate, "linar")
    for rule in (None, 3, (gate,), (gate, None), [gate, gate]):
        with pytest.raises(TypeError, match=r"a name or a pair \(record, replay\)"):
            seht.register_kink(gate, rule)
    with pytest.raises(TypeError, match="callable, not int"):
        seht.register_kink(3, "linear")


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x: x.relu().cumsum(-1),
        lambda x: x.relu().flip(-1),
        lambda x: x.relu() - x.relu().mean(),
        lambda x: x.relu().sum(-1, keepdim=True),
    ],
)
def test_linear_is_for_entry_by_entry_alone(mixing):
    """Its slopes would be those of sums over entries, silently."""
    ours = seht.register_kink(mixing, "linear")
    with pytest.raises(seht.KinkError, match=r"registered as 'linear'.*register a pair"):
        estimate(ours)


def test_a_linear_operation_of_two_arguments_may_be_broadcast():
    ours = seht.register_kink(lambda x, bias: torch.maximum(x, bias), "linear")
    bias = torch.tensor(0.1, dtype=torch.float64)
    assert_right(lambda x: ours(x, bias), lambda x: torch.maximum(x, bias))
