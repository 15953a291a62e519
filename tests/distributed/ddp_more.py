"""Rarer company: compiled models, two wrapped models, groups of some ranks, uneven batches."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_common import (
    WEIGHT,
    Branches,
    assert_close,
    averaged,
    data,
    expected,
    gradients,
    loss_of,
    same,
)
from ddp_wrappers import OPTIONS
from helpers import network
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import seht


def backward(penalty, closure, form):
    if form == "lean":
        penalty.backward(closure)
    else:
        penalty(closure).backward()


class Own(nn.Module):
    """Code that is not PyTorch's own, which the compiler would leave alone."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x)


def compiled(form, order):
    """The compiled model wrapped, or the wrapped model compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Own()
    plain = copy.deepcopy(model)
    if order == "inside":
        called = DDP(torch.compile(model, backend="aot_eager"))
    else:
        called = torch.compile(DDP(model), backend="aot_eager")
    penalty = seht.HessianTrace(called, weight=WEIGHT, every=2)
    for step in range(3):
        called.zero_grad()
        backward(penalty, loss_of(called, data(step)), form)
        plain.load_state_dict(model.state_dict())
        assert_close(gradients(model), expected(plain, penalty.last, data(step)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1  # record, replay


def adversaries(engine):
    """Two wrapped models in one loss, one of them given to the penalty, both trained by it."""
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        first, second = network(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        one, two = DDP(first, **options), DDP(second, **options)
        twins = copy.deepcopy(nn.ModuleList([first, second]))
        penalty = seht.HessianTrace(one, weight=WEIGHT, engine=engine)
        for step, called in enumerate((one, first, one)):  # once past its wrapper
            x, y = data(step)

            def closure(a=called, b=two, x=x, y=y):
                return F.cross_entropy(b(a(x)), y)

            for module in (one, two, twins):
                module.zero_grad()
            penalty(closure).backward()
            loss, trace = seht.loss_and_trace(
                twins[0], lambda c=closure: c(*twins), seed=penalty.last.seed, engine=engine
            )
            (loss + WEIGHT * trace).backward()
            both = nn.ModuleList([first, second])
            assert_close(gradients(both), averaged(twins))


def group_of_some():
    """A wrapper on a group of its own: ranks count within it, and nobody else is asked."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = network()
    ddp = DDP(model, process_group=groups[dist.get_rank()])
    penalty = seht.HessianTrace(ddp, weight=WEIGHT, seed=3)
    if dist.get_rank() == 1:  # alone
        penalty(loss_of(ddp, data())).backward()
        alone = seht.HessianTrace(copy.deepcopy(model), weight=WEIGHT, seed=3)
        alone(loss_of(alone.model, data())).backward()
        assert penalty.last.seed == alone.last.seed
        assert_close(gradients(model), gradients(alone.model))


def uneven(engine, form):
    """A rank that runs out of batches (``join``) shadows the others."""
    model = network(norm=False)
    ddp = DDP(model)
    penalty = seht.HessianTrace(ddp, weight=WEIGHT, engine=engine)
    steps = 0
    with ddp.join():
        for step in range(2 + 2 * dist.get_rank()):
            ddp.zero_grad()
            backward(penalty, loss_of(ddp, data(step)), form)
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            steps += 1
    assert steps == 2 + 2 * dist.get_rank()
    same(model)


def averages():
    """A buffer that the model reads, and that differs between ranks until DDP sends rank 0's."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(norm=False)
            self.register_buffer("mean", torch.zeros(3).double())

        def forward(self, x):
            z = self.net(x) - self.mean
            self.mean = 0.5 * self.mean + 0.5 * z.detach().mean(0)
            return z * z.detach().exp()

    for form in ("scalar", "lean"):
        model = Centred()
        twin = copy.deepcopy(model)
        ddp = DDP(model)
        penalty = seht.HessianTrace(ddp, weight=WEIGHT)
        for step in range(3):
            ddp.zero_grad()
            backward(penalty, loss_of(ddp, data(step)), form)
            dist.broadcast(twin.mean, 0)
            want = expected(twin, penalty.last, data(step))
            loss_of(twin, data(step))()
            assert_close(gradients(model), want)
            assert torch.allclose(model.mean, twin.mean)


def mixed(form, name):
    """Autocast around the call: in the scalar form the centre's backward pass is then ours. A part
    of what the wrapper puts out is not in the loss.
    """
    model = Branches() if name == "unused" else network()
    twin = copy.deepcopy(model)
    ddp = DDP(model, **OPTIONS[name])
    penalty = seht.HessianTrace(ddp, weight=WEIGHT, every=2)
    for step in range(4):
        closure = loss_of(ddp, data(step))

        def wasteful(closure=closure, step=step):
            if name == "unused":
                ddp(data(step)[0], side=True)
            return closure()

        ddp.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if form == "lean":
                penalty.backward(wasteful)
            else:
                loss = penalty(wasteful)
        if form != "lean":
            loss.backward()
        assert_close(gradients(model), expected(twin, penalty.last, data(step)))
    assert name != "unused" or model.side.weight.grad is None


def added_up(form, name):
    """Steps without ``no_sync``, and without a ``zero_grad`` in between, or one that writes zeros:
    DDP moves what is in ``.grad`` when it rebuilds its buckets, in the second forward pass.
    """
    for zeros in (False, True):
        model = network()
        ddp = DDP(model, **OPTIONS[name])
        penalty = seht.HessianTrace(ddp, weight=WEIGHT, every=2)
        total = {}
        for step in range(4):
            before = copy.deepcopy(model)
            backward(penalty, loss_of(ddp, data(step)), form)
            new = expected(before, penalty.last, data(step))
            total = {n: g + total.get(n, 0) for n, g in new.items()}
            assert_close(gradients(model), total)
            if zeros:
                ddp.zero_grad(set_to_none=False)
                total = {}
