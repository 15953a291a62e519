"""HessianTrace: what a step leaves behind is what a plain step leaves behind."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Snapshot, batch, closure_of, every_engine, network
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import seht

WEIGHT = 0.01


def train(model, penalty, steps=4):
    """A few steps of SGD with momentum; the closure draws a dropout mask and moves BatchNorm."""
    torch.manual_seed(21)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for k in range(steps):
        closure = closure_of(model, batch(seed=k))
        optimizer.zero_grad()
        (closure() if penalty is None else penalty(closure)).backward()
        optimizer.step()
    return Snapshot(model)


def undrawn(model, steps):
    """A seed with which SEHT-D draws no layer in the first steps."""
    for seed in range(1000):
        penalty = seht.HessianTrace(model, weight=WEIGHT, estimator="seht-d", seed=seed)
        draws = [
            penalty.estimator.layers(3, seht.probes.layer_seed(seht.probes.call_seed(seed, k)))
            for k in range(steps)
        ]
        if not any(draws):
            return seed
    raise AssertionError("no such seed")


# --- steps without a penalty ------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize(
    "options",
    [
        {"weight": 0.0},
        {"weight": lambda step: 0.0},
        {"weight": WEIGHT, "warmup": 4},
        {"weight": WEIGHT, "estimator": "seht-d"},
    ],
    ids=["weight 0", "weight function 0", "warm-up", "no layer drawn"],
)
def test_plain_steps_equal_a_run_without_the_penalty_bit_for_bit(engine, options):
    model = network(dropout=0.5)
    if "estimator" in options:
        options = options | {"seed": undrawn(model, 4)}
    expected = train(network(dropout=0.5), None)
    train(model, seht.HessianTrace(model, engine=engine, **options))
    Snapshot(model).assert_same(expected)


def test_that_comparison_would_notice_a_penalty():
    model = network(dropout=0.5)
    expected = train(network(dropout=0.5), None)
    train(model, seht.HessianTrace(model, weight=1e-9))
    with pytest.raises(AssertionError):
        Snapshot(model).assert_same(expected)


@every_engine
def test_the_skipped_steps_of_every_are_plain(engine):
    model, other = network(dropout=0.5), network(dropout=0.5)
    penalty = seht.HessianTrace(model, weight=WEIGHT, every=2, engine=engine)
    penalty(closure_of(model)).backward()
    other.load_state_dict(model.state_dict())
    for module in (model, other):
        module.zero_grad()
        torch.manual_seed(5)
        (penalty(closure_of(model)) if module is model else closure_of(other)()).backward()
    assert penalty.last.trace is None and penalty.last.step == 1
    Snapshot(model).assert_same(Snapshot(other))


@every_engine
def test_no_mode_is_active_on_a_plain_step_nor_after_a_penalised_one(engine):
    model = network()
    inner = closure_of(model)
    stacks = []

    def closure():
        stacks.append(len(_get_current_function_mode_stack()))
        return inner()

    penalty = seht.HessianTrace(model, weight=WEIGHT, every=2, engine=engine)
    penalty(closure)
    assert stacks[0] > 0  # the counter works
    assert not _get_current_function_mode_stack()
    stacks.clear()
    penalty(closure)
    assert stacks == [0]


@pytest.mark.parametrize("spoil", [torch.nan, torch.ones(2)])
def test_a_plain_step_with_weight_0_does_not_look_at_the_loss(spoil):
    model = network()
    penalty = seht.HessianTrace(model, weight=0.0)
    out = penalty(lambda: (closure_of(model)() * spoil, "aux"))
    assert out[1] == "aux"  # weight 0 is the plain closure, whatever it returns
    assert math.isnan(penalty.last.loss)
    copy.deepcopy(penalty)


@every_engine
def test_the_lean_form_on_a_plain_step_is_the_plain_step(engine):
    """Also after a penalised step in the other form."""
    model, plain = network(), network()
    penalty = seht.HessianTrace(model, weight=WEIGHT, every=2, engine=engine)
    penalty(closure_of(model, batch(seed=1)))
    plain.load_state_dict(model.state_dict())
    expected = closure_of(plain)()
    expected.backward()
    assert torch.equal(penalty.backward(closure_of(model)), expected.detach())
    Snapshot(model).assert_same(Snapshot(plain))


# --- penalised steps --------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("probes", [1, 3])
@pytest.mark.supports("BatchNorm statistics move once")
def test_random_state_and_statistics_end_where_one_plain_closure_leaves_them(engine, probes):
    plain, model = network(dropout=0.5), network(dropout=0.5)
    torch.manual_seed(13)
    closure_of(plain)()
    expected = Snapshot(plain)
    torch.manual_seed(13)
    penalty = seht.HessianTrace(model, weight=WEIGHT, probes=probes, engine=engine, seed=0)
    penalty(closure_of(model)).backward()
    got = Snapshot(model)
    assert torch.equal(got.random, expected.random)
    moved = 0
    for name, value in expected.state.items():
        torch.testing.assert_close(got.state[name], value, rtol=1e-12, atol=1e-14)
        moved += "running" in name or "num_batches" in name
    assert moved == 3 and got.state["1.num_batches_tracked"] == 1


@every_engine
@pytest.mark.supports("dropout: one mask a step")
def test_one_dropout_mask_per_step(engine):
    """With one mask the trace is that of a network with the mask written out."""
    x, y = batch()
    model = network(norm=False, dropout=0.5)
    masks = []
    model[3].register_forward_hook(lambda module, args, out: masks.append(out.detach() != 0))
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine, probes=2, seed=1)
    torch.manual_seed(8)
    penalty(lambda: F.cross_entropy(model(x), y))
    assert all(torch.equal(mask, masks[0]) for mask in masks)

    hidden = model[3](model[2](model[0](x)))  # whichever mask: it is replaced by the first
    keep = masks[0].to(hidden.dtype) * 2
    tail = nn.Sequential(*list(model)[4:])
    trace = seht.hessian_trace(
        model,
        lambda: F.cross_entropy(tail(model[2](model[0](x)) * keep), y),
        engine=engine,
        probes=2,
        seed=penalty.last.seed,
    )
    assert penalty.last.trace == pytest.approx(trace.item(), rel=1e-6)


@every_engine
def test_gradients_that_are_there_already_stay(engine):
    model = network()
    closure_of(model)().backward()
    before = Snapshot(model)
    seht.HessianTrace(model, weight=WEIGHT, engine=engine)(closure_of(model))
    Snapshot(model).assert_same(before, random=False, buffers=False)


@every_engine
def test_the_pure_functions_move_statistics_once_or_not_at_all(engine):
    model = network(dropout=0.5)
    before = Snapshot(model)
    seht.hessian_trace(model, closure_of(model), engine=engine)
    Snapshot(model).assert_same(before, random=False)
    seht.loss_and_trace(model, closure_of(model), engine=engine)
    assert model[1].num_batches_tracked == 1


@every_engine
@pytest.mark.parametrize("limit", [None, 0.5])
def test_values_are_looked_at_on_the_host_at_most_once(engine, limit, monkeypatch):
    model = network(dropout=0.5)
    closure = closure_of(model)
    looks = []

    def count(owner, name):
        original = getattr(owner, name)

        def look(*args, **kwargs):
            if args[0].is_floating_point():  # the generator's state, bytes, is on the host anyway
                looks.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, look)

    penalty = seht.HessianTrace(model, weight=WEIGHT, probes=2, limit=limit, engine=engine)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu"):
        count(Tensor, name)
    for name in ("equal", "allclose"):
        count(torch, name)
    for step in range(8):
        looks.clear()
        penalty(closure).backward()
        if step < 3 and engine == "difference":
            continue  # it looks for its step
        assert len(looks) <= 1, (step, looks)
        assert penalty.last.trace is not None and len(looks) <= 1
    assert looks  # the counters count


# --- under no_grad ----------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("ambient", [torch.no_grad, torch.inference_mode])
@pytest.mark.supports("evaluation under `no_grad` and `inference_mode`")
def test_without_gradients(engine, ambient):
    model = network()
    closure = closure_of(model)
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    with ambient():
        assert torch.equal(penalty(closure), closure())
        assert penalty.step == 0 and penalty.last is None
        value = seht.hessian_trace(model, closure, engine=engine, seed=3)
        loss, trace = seht.loss_and_trace(model, closure, engine=engine, seed=3)
    for result in (value, loss, trace):
        assert not result.requires_grad
    expected = seht.hessian_trace(model, closure, engine=engine, seed=3)
    assert expected.requires_grad
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(trace, value, rtol=1e-9, atol=0)


def test_no_layer_drawn_is_a_zero_without_graph():
    model = network()
    closure = closure_of(model)
    seed = next(s for s in range(1000) if not seht.SehtD().layers(3, seht.probes.layer_seed(s)))
    trace = seht.hessian_trace(model, closure, estimator="seht-d", seed=seed)
    assert trace == 0 and not trace.requires_grad and trace.shape == ()
    loss, trace = seht.loss_and_trace(model, closure, estimator="seht-d", seed=seed)
    assert trace == 0 and loss.requires_grad
