"""DDP's own options, who captured what, accumulation: checks that run in two processes."""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_common import (
    ESTIMATORS,
    WEIGHT,
    Branches,
    assert_close,
    averaged,
    data,
    expected,
    gradients,
    loss_of,
    refused,
    same,
    train,
)
from helpers import network
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import seht

OPTIONS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": 1e-4},  # a bucket for every tensor
    "local-buffers": {"broadcast_buffers": False},
}


def options(name, engine, form, curvature="hessian", schedule="every"):
    """Three steps with a plain one among them: the reducer must be ready for each."""
    model = Branches() if name == "unused" else network()
    schedule = {"warmup": 1} if schedule == "warmup" else {"every": 2}
    model, records = train(
        model=model, engine=engine, form=form, curvature=curvature, ddp_options=OPTIONS[name],
        steps=4, **schedule,
    )  # fmt: skip
    assert {r.trace is None for r in records} == {True, False}
    same(model)
    if name == "unused":
        assert model.never.weight.grad is None and model.side.weight.grad is None


def captured(engine, form, curvature):
    """The wrapper or the inner module, given to the penalty or called in the closure."""
    for given, called in (("wrapper", "wrapper"), ("wrapper", "inner"), ("inner", "wrapper")):
        model, records = train(
            given=given, called=called, form=form, engine=engine, curvature=curvature,
            steps=2, every=2, ddp_options={"find_unused_parameters": curvature == "ggn"},
            buffers=called == "wrapper",
        )  # fmt: skip
        assert records[0].trace is not None and records[1].trace is None
        same(model)


def no_sync(engine, form, name):
    """Two calls accumulated, the first without a reduction: the mean of the sums."""
    model = network()
    ddp = DDP(model, **OPTIONS[name])
    penalty = seht.HessianTrace(
        ddp, weight=WEIGHT, seed=3, accumulate=2, engine=engine, **ESTIMATORS["seht-d"]
    )
    for step in range(2):
        ddp.zero_grad()
        wanted, layers = [], []
        for call in range(2):
            batch = data(2 * step + call)
            with ddp.no_sync() if call == 0 else nullcontext():
                if form == "lean":
                    penalty.backward(loss_of(ddp, batch))
                else:
                    penalty(loss_of(ddp, batch)).backward()
            if call == 0:  # nothing has been sent yet
                mine = model[0].weight.grad.clone()
                dist.broadcast(mine, 0)
                assert dist.get_rank() == 0 or not torch.equal(mine, model[0].weight.grad)
            layers.append(penalty.last.layers)
            wanted.append(
                expected(model, penalty.last, batch, engine=engine, **ESTIMATORS["seht-d"])
            )
        assert layers[0] == layers[1]  # one draw for the step
        total = {n: wanted[0][n] + wanted[1][n] for n in wanted[0]}
        assert_close(gradients(model), total)


def aux_with_a_graph(engine):
    """A further loss on what the closure returned, through a branch that the first does not use."""
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = Branches()
        for p in model.never.parameters():
            p.requires_grad_("static_graph" not in options)
        twin = copy.deepcopy(model)
        ddp = DDP(model, **options)
        penalty = seht.HessianTrace(ddp, weight=WEIGHT, engine=engine, params="body.*")
        for _ in range(2):
            x, y = batch = data()

            def closure(module=ddp, x=x, y=y):
                z = module(x)
                return F.cross_entropy(z, y), {"side": module(x, side=True), "note": "kept"}

            ddp.zero_grad()
            loss, aux = penalty(closure)
            assert aux["note"] == "kept"
            (loss + aux["side"].square().mean()).backward()
            twin.zero_grad()
            loss, trace, aux = seht.loss_and_trace(
                twin, lambda c=closure: c(twin), seed=penalty.last.seed, params="body.*",
                engine=engine,
            )  # fmt: skip
            (loss + WEIGHT * trace + aux["side"].square().mean()).backward()
            assert_close(gradients(model), averaged(twin))
        del batch


def trace_elsewhere(engine, form):
    """The trace of another closure (``on=``), which goes another way through the model."""
    model = Branches()
    ddp = DDP(model, find_unused_parameters=True)
    penalty = seht.HessianTrace(ddp, weight=WEIGHT, engine=engine, params="body.*")
    x, y = batch = data()
    small = (x[:4], y[:4])
    twin = copy.deepcopy(model)
    for _ in range(2):
        ddp.zero_grad()
        call = penalty.backward if form == "lean" else penalty
        total = call(loss_of(ddp, batch), on=loss_of(ddp, small, side=True))
        if form != "lean":
            total.backward()
        twin.zero_grad()
        trace = seht.hessian_trace(
            twin, loss_of(twin, small, side=True), seed=penalty.last.seed, engine=engine,
            params="body.*",
        )  # fmt: skip
        (loss_of(twin, batch)() + WEIGHT * trace).backward()
        assert_close(gradients(model), averaged(twin))


class Step(nn.Module):
    """A training step that is wrapped itself, as Lightning does it."""

    def __init__(self, form, engine):
        super().__init__()
        self.net = network()
        self.form = form
        self.fails = False
        self.penalty = seht.HessianTrace(
            self.net, weight=WEIGHT, engine=engine, every=2, seed=dist.get_rank()
        )

    def forward(self, batch):
        closure = loss_of(self.net, batch)
        loss = self.penalty.backward(closure) if self.form == "lean" else self.penalty(closure)
        return 1 // 0 if self.fails else loss


def inside(engine, form, name):
    """The penalty is called inside the wrapper's forward pass."""
    step = Step(form, engine)
    ddp = DDP(step, **OPTIONS[name])
    for number in range(3):
        ddp.zero_grad()
        batch = data(number)
        loss = ddp(batch)
        if form != "lean":
            loss.backward()
        record = step.penalty.last
        assert (record.trace is None) == (number % 2 == 1)
        assert_close(gradients(step.net), expected(step.net, record, batch, engine=engine))
        assert step.penalty._course.ranks.size == 2  # they share a seed
    if form == "lean":  # an error after the backward pass is not taken for the pass after it
        step.fails = True
        refused(ZeroDivisionError, "", lambda: ddp(data()))
        step.fails, step.form = False, "scalar"
        ddp.zero_grad()
        ddp(data()).backward()
        record = step.penalty.last
        assert_close(gradients(step.net), expected(step.net, record, data(), engine=engine))


def functions():
    """The pure functions: a trace stays on its rank, loss_and_trace is a step."""
    model = network()
    ddp = DDP(model, static_graph=True)
    batch = data()
    for engine in ("difference", "autograd"):
        if dist.get_rank() == 0:  # alone: nobody else takes part
            found = seht.hessian_trace(ddp, loss_of(ddp, batch), seed=4, engine=engine)
            alone = seht.hessian_trace(model, loss_of(model, batch), seed=4, engine=engine)
            assert torch.equal(found, alone)
        ddp.zero_grad()
        loss, trace = seht.loss_and_trace(ddp, loss_of(ddp, batch), seed=4, engine=engine)
        (loss + WEIGHT * trace).backward()
        record = seht.StepRecord(0, 0.0, trace=0.0, weight=WEIGHT, seed=4)
        assert_close(gradients(model), expected(model, record, batch, engine=engine))


def refusals():
    """What cannot be right is refused, and nothing is left behind."""
    before = DDP.forward
    for engine in ("difference", "autograd"):
        model = network()
        ddp = DDP(model, static_graph=True)
        penalty = seht.HessianTrace(ddp, weight=WEIGHT, engine=engine)
        x, y = data()
        outputs = ddp(x)
        head = seht.HessianTrace(nn.Linear(3, 3).double(), weight=WEIGHT, engine=engine)
        refused(
            RuntimeError, "static_graph=True) that was called before the closure",
            lambda: penalty(lambda: F.cross_entropy(outputs, y)),
        )  # fmt: skip
        assert head.last is None

        def gathered():
            z = torch.distributed.nn.functional.all_reduce(ddp(x))
            return F.cross_entropy(z, y)

        model = network()
        ddp = DDP(model)
        x, y = x[:6], y[:6]
        penalty = seht.HessianTrace(ddp, weight=WEIGHT, engine=engine)
        refused(RuntimeError, "depends on other ranks", lambda: penalty(gathered))

    def summed():
        loss = F.cross_entropy(ddp(x), y)
        dist.all_reduce(torch.zeros(1))
        return loss

    penalty = seht.HessianTrace(ddp, weight=WEIGHT)
    refused(RuntimeError, "communicates between ranks", lambda: penalty(summed))

    def guarded():
        loss = F.cross_entropy(ddp(x), y)
        if not seht.replaying():
            dist.all_reduce(torch.zeros(1))
        return loss

    penalty(guarded).backward()  # a metric of the first run
    synced = nn.Sequential(nn.Conv2d(2, 4, 3), nn.SyncBatchNorm(4), nn.Flatten(), nn.Linear(36, 3))
    for engine in ("difference", "autograd"):
        penalty = seht.HessianTrace(synced, weight=WEIGHT, engine=engine)
        refused(RuntimeError, "'1' is a SyncBatchNorm", lambda: penalty(loss_of(synced, (x, y))))
    ddp.mixed_precision = object()
    penalty = seht.HessianTrace(ddp, weight=WEIGHT)
    refused(RuntimeError, "mixed_precision", lambda: penalty(loss_of(ddp, (x, y))))
    assert DDP.forward is before


def threads():
    """Another thread's wrapper goes its usual way."""
    import threading

    model, other = network(), network(norm=False)
    ddp, beside = DDP(model), DDP(other, find_unused_parameters=True)
    penalty = seht.HessianTrace(ddp, weight=WEIGHT)
    x, y = data()
    names = []

    def closure():
        if not names:
            thread = threading.Thread(target=lambda: names.append(beside(x).grad_fn.name()))
            thread.start()
            thread.join()
        return F.cross_entropy(ddp(x), y)

    penalty(closure).backward()
    assert names == ["_DDPSinkBackward"]


def module_hook(engine, form):
    """A backward hook inside the network, with DDP's own beside it: once in each step."""
    model, seen = network(), []
    inner = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)][-1]
    own = inner.register_full_backward_hook(lambda m, i, out: seen.append(out[0].norm().item()))
    ddp = DDP(model, find_unused_parameters=True)
    penalty = seht.HessianTrace(ddp, weight=WEIGHT, engine=engine)
    for step in range(2):
        batch = data(step)
        ddp.zero_grad()
        closure = loss_of(ddp, batch)
        (penalty.backward if form == "lean" else lambda c: penalty(c).backward())(closure)
        assert len(seen) == step + 1
    own.remove()
    assert_close(gradients(model), expected(model, penalty.last, batch, engine=engine))


def comm_hook(engine, form):
    """A communication hook sees the penalised gradient, once."""
    model = network()
    ddp = DDP(model)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().norm().item())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    penalty = seht.HessianTrace(ddp, weight=WEIGHT, engine=engine)
    batch = data()
    (penalty.backward if form == "lean" else lambda c: penalty(c).backward())(loss_of(ddp, batch))
    assert len(seen) == 1
    assert_close(gradients(model), expected(model, penalty.last, batch, engine=engine))
