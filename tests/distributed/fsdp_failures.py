"""Failures and numbers that are none: everything stays as it was, and no rank waits for ever."""

import torch
import torch.distributed as dist
from fsdp_problems import (
    assert_close,
    assert_same,
    batch,
    check,
    gradient,
    half,
    loss_of,
    make,
    parts,
    raised,
    sharded,
)
from torch.distributed.fsdp import FSDPModule

import seht


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("broken backward")


@check
def failures(curvature, again, *fallback):
    """A failure in any pass leaves weights, gradients and FSDP as they were."""
    kind, dtype, again = "transformer", torch.float64, again == "True"
    theirs = _undisturbed(kind, dtype, again, curvature)
    for without in (False, True) if fallback else (False,):
        model, penalty, data = _one_step(kind, dtype, again, curvature)
        _without_reset(model, without)
        before, random = parts(model), torch.get_rng_state()
        for place in range(3):
            for way in ("before", "inside", "after", "backward"):
                if way == "backward" and curvature == "ggn" and place == 0:
                    continue  # that pass has no backward through the network
                closure = _failing(model, data, place, way)
                assert "broken" in raised(RuntimeError, lambda: penalty.backward(closure))
                _assert_clean(model)
                assert_same(before, parts(model))
                assert torch.equal(random, torch.get_rng_state())
        penalty.backward(lambda: loss_of(model, data))
        assert_close(gradient(model), theirs, 1e-12)
    _without_reset(model, False)


def _one_step(kind, dtype, again, curvature):
    """A model with gradients of an earlier call, about to make another."""
    model = sharded(make(kind, dtype), reshard_after_forward=again)
    penalty = seht.HessianTrace(model, weight=1e-2, seed=5, curvature=curvature, kappa=1e-4)
    data = half(batch(kind, dtype, 0))
    penalty.backward(lambda: loss_of(model, data))
    return model, penalty, data


def _undisturbed(kind, dtype, again, curvature):
    model, penalty, data = _one_step(kind, dtype, again, curvature)
    penalty.backward(lambda: loss_of(model, data))
    return gradient(model)


def _without_reset(model, without):
    """As in versions of torch whose FSDP cannot be reset."""
    cls = type(model._get_fsdp_state())
    if without and hasattr(cls, "_reset_iter_state"):
        cls._set_aside = cls._reset_iter_state
        del cls._reset_iter_state
    elif not without and hasattr(cls, "_set_aside"):
        cls._reset_iter_state = cls._set_aside
        del cls._set_aside


def _failing(model, data, place, way):
    calls = []

    def closure():
        calls.append(0)
        if len(calls) - 1 != place:
            return loss_of(model, data)
        if way == "before":
            raise RuntimeError("broken")
        if way == "inside":
            handle = model.blocks[1].down.register_forward_pre_hook(_break)
            try:
                return loss_of(model, data)
            finally:
                handle.remove()
        if way == "backward":
            handle = model.blocks[0].register_forward_hook(lambda m, i, o: BrokenBackward.apply(o))
            try:
                return loss_of(model, data)
            finally:
                handle.remove()
        loss_of(model, data)
        raise RuntimeError("broken")

    return closure


def _break(module, inputs):
    raise RuntimeError("broken")


def _assert_clean(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            assert state._training_state.name == "IDLE"
            assert state._state_ctx.iter_forward_root is None
            for group in state._fsdp_param_groups:
                assert group.is_sharded and group._training_state.name == "IDLE"
                assert not vars(group).keys() & {"unshard", "wait_for_unshard", "reshard"}
    assert all(hasattr(p, "placements") for p in model.parameters())


@check
def nonfinite():
    """One rank's NaN is everybody's error, at once and without a deadlock."""
    kind, dtype = "relu", torch.float64
    for place, options in ((0, {}), (1, {"warmup": 5})):
        model = sharded(make(kind, dtype))
        penalty = seht.HessianTrace(model, weight=1e-2, seed=5, **options)
        x, y = half(batch(kind, dtype, 0))
        if dist.get_rank() == 1:
            x = x * torch.nan
        before = parts(model)
        message = raised(
            seht.NonFiniteError, lambda: penalty.backward(lambda: loss_of(model, (x, y)))
        )
        assert "the loss is nan" in message
        assert_same(before, parts(model))
        if place == 0:
            _assert_clean(model)
        model = sharded(make(kind, dtype))  # and everybody can go on together
        again = seht.HessianTrace(model, weight=1e-2, seed=5, **options)
        again.load_state_dict(penalty.state_dict())
        good = half(batch(kind, dtype, 0))
        again.backward(lambda: loss_of(model, good))


@check
def trace_not_finite():
    """A finite loss whose perturbed passes are not, on one rank: skipped by all, or an error."""
    kind, dtype = "relu", torch.float64

    def closure_of(model, data, rank):
        def closure():
            loss = loss_of(model, data)
            if seht.replaying() and dist.get_rank() == rank:
                loss = loss * torch.inf
            return loss

        return closure

    reference = make(kind, dtype)
    loss_of(reference, batch(kind, dtype, 0)).backward()
    data = half(batch(kind, dtype, 0))
    model = sharded(make(kind, dtype))
    penalty = seht.HessianTrace(model, weight=1e-2, seed=5)
    message = raised(seht.NonFiniteError, lambda: penalty.backward(closure_of(model, data, 1)))
    assert "on_nonfinite='skip'" in message and all(p.grad is None for p in model.parameters())
    for options in ({}, {"limit": 0.5}, {"probes": 2}):
        model.zero_grad()
        penalty = seht.HessianTrace(model, weight=1e-2, seed=5, on_nonfinite="skip", **options)
        penalty.backward(closure_of(model, data, 1))
        assert penalty.last.penalty == 0
        assert_close(gradient(model), gradient(reference))
