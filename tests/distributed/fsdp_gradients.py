"""Gradients that are there already, settings of FSDP's, scaling, clipping and seeds."""

import torch
import torch.distributed as dist
from fsdp_problems import (
    assert_close,
    batch,
    check,
    gradient,
    half,
    loss_of,
    make,
    reference_gradient,
    sharded,
    whole,
)

import seht


@check
def accumulation():
    """Calls add up, with and without synchronisation, also after plain backward passes."""
    kind, dtype = "relu", torch.float64
    # Plain in calls 0 and 2: without synchronisation FSDP keeps those on the gathered weights.
    options = {"every": 2, "warmup": 1}
    theirs = reference_gradient(4, **options)
    for sync in (True, False):
        for last in (True, False):
            model = sharded(make(kind, dtype))
            penalty = seht.HessianTrace(model, weight=1e-2, seed=5, **options)
            for step in range(4):
                data = half(batch(kind, dtype, step))
                model.set_requires_gradient_sync(sync or step == 3)
                model.set_is_last_backward(last or step == 3)
                penalty.backward(lambda: loss_of(model, data))
            state = model._get_fsdp_state()
            assert state._state_ctx.is_last_backward
            assert_close(gradient(model), theirs)
    # The last call plain: it reduces what the first calls left.
    theirs = reference_gradient(3, **options)
    model = sharded(make(kind, dtype))
    penalty = seht.HessianTrace(model, weight=1e-2, seed=5, **options)
    for step in range(3):
        data = half(batch(kind, dtype, step))
        model.set_requires_gradient_sync(step == 2)
        penalty.backward(lambda: loss_of(model, data))
    assert_close(gradient(model), theirs)


@check
def settings():
    """Gathered weights kept after backward, prefetching, evaluation in between, hooks."""
    kind, dtype = "transformer", torch.float64
    theirs = reference_gradient(2, kind)
    model = sharded(make(kind, dtype), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    penalty = seht.HessianTrace(model, weight=1e-2, seed=5)
    calls = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: calls.append(whole(p.grad).clone()))
        for p in model.parameters()
    ]
    for step in range(2):
        data = half(batch(kind, dtype, step))
        with torch.no_grad():
            loss_of(model, data)  # leaves the root's weights gathered
        penalty.backward(lambda: loss_of(model, data))
    assert_close(gradient(model), theirs)
    assert len(calls) == 2 * len(handles), "a hook ran for a pass that is none of the user's"


@check
def scaler():
    """A GradScaler's scale reaches the gradients."""
    kind, dtype = "relu", torch.float64
    theirs = reference_gradient(1)
    model = sharded(make(kind, dtype))
    penalty = seht.HessianTrace(model, weight=1e-2, seed=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = half(batch(kind, dtype, 0))
    penalty.backward(lambda: loss_of(model, data), scaler=scaler)
    assert_close({n: g / 1024 for n, g in gradient(model).items()}, theirs)


@check
def clipped():
    """Clipping sees the norm of the whole gradient."""
    model, reference = sharded(make("relu", torch.float64)), make("relu", torch.float64)
    for net, part in ((model, half), (reference, lambda data: data)):
        data = part(batch("relu", torch.float64, 0))
        seht.HessianTrace(net, weight=1e-2, seed=5).backward(lambda: loss_of(net, data))
    ours = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert abs(ours - theirs) < 1e-7 * theirs
    assert_close(gradient(model), gradient(reference))


@check
def seeds():
    """Ranks that were seeded apart draw the same probes; a resumed run goes on with them."""
    kind, dtype = "relu", torch.float64
    model = sharded(make(kind, dtype))
    torch.manual_seed(100 + dist.get_rank())
    penalty = seht.HessianTrace(model, weight=1e-2)
    data = half(batch(kind, dtype, 0))
    penalty.backward(lambda: loss_of(model, data))
    ours = gradient(model)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (penalty.seed, penalty.last.seed, penalty.last.trace))
    assert found[0] == found[1] and found[0][0] == 100
    own = torch.tensor([1.0, 10.0 * dist.get_rank()], dtype=torch.float64)
    assert penalty._course.ranks.mean(own).tolist() == [1.0, 5.0]
    assert penalty._course.ranks.agree({"rank": dist.get_rank()}) == {"rank": 0}
    reference = make(kind, dtype)
    again = seht.HessianTrace(reference, weight=1e-2, seed=100)
    again.backward(lambda: loss_of(reference, batch(kind, dtype, 0)))
    assert_close(ours, gradient(reference))
    resumed = seht.HessianTrace(model, weight=1e-2)
    resumed.load_state_dict(penalty.state_dict())
    for each in (penalty, resumed):
        model.zero_grad()
        each.backward(lambda: loss_of(model, data))
    assert penalty.last == resumed.last
