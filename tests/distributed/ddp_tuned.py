"""A share and a tuned weight under DDP: one weight on all ranks, of all ranks' gradients."""

import copy
import math
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_common import assert_close, averaged, data, expected, gradients, loss_of, refused, same
from helpers import network
from torch.nn.parallel import DistributedDataParallel as DDP

import seht

MEASURED = 8


def _gather(value):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def _flat(found):
    return torch.cat([g.flatten() for g in found.values() if g is not None])


def share(form):
    """The norms are those of gradients averaged over steps and ranks."""
    model = network(norm=False)
    ddp = DDP(model)
    penalty = seht.HessianTrace(ddp, share=0.5, curvature="ggn", seed=1)
    losses, traces = [], []
    for step in range(MEASURED):
        batch = data(step)
        closure = loss_of(ddp, batch)
        ddp.zero_grad()
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        for place, found in enumerate((losses, traces)):
            alone = copy.deepcopy(model)
            alone.zero_grad()
            both = seht.loss_and_trace(
                alone, loss_of(alone, batch), curvature="ggn", seed=penalty.last.seed
            )
            both[place].backward()
            found.append(_flat(averaged(alone)))
    sizes = [torch.stack(found).mean(0).norm().item() for found in (losses, traces)]
    penalty(loss_of(ddp, data(MEASURED)))
    found = penalty.last.weight / (0.5 * sizes[0] / sizes[1])
    assert abs(found - 1) < 1e-3, found
    assert len(set(_gather(penalty.last.weight))) == 1


def tuned(form, given):
    """The ranks have one weight, and the step's own gradient is what it would be anyway."""
    model = network()
    twin = copy.deepcopy(model)
    ddp = DDP(model)
    free = seht.Tuning(gap=0.0)
    penalty = seht.HessianTrace(
        ddp if given == "wrapper" else model, weight=free, curvature="ggn", total_steps=16
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(16):
        batch = data(step)
        closure, held_out = loss_of(ddp, batch), loss_of(ddp, data(100 + step))
        twin.load_state_dict(model.state_dict())
        for buffer in twin.buffers():  # as DDP does before a forward pass
            dist.broadcast(buffer, 0)
        optimizer.zero_grad()
        if form == "lean":
            penalty.backward(closure, held_out=held_out)
        else:
            penalty(closure, held_out=held_out).backward()
        last = penalty.last
        charged = replace(last, weight=last.penalty / last.trace)  # a step may be held back
        assert_close(gradients(model), expected(twin, charged, batch, curvature="ggn"), 1e-5)
        assert len(set(_gather(last.weight))) == 1, step
        optimizer.step()
    paths = _gather(penalty.path)
    assert paths[0] == paths[1] and len(set(paths[0].weights)) > 2
    regimes = _gather(penalty.state_dict()["strength"]["gap"])
    assert regimes[0] == regimes[1] and regimes[0]["looks"] == 8
    same(model)


def joined():
    """Inside join() a rank may have left: refused before anybody waits for it."""
    ddp = DDP(network())
    penalty = seht.HessianTrace(ddp, share=0.5, curvature="ggn")
    for step in range(MEASURED - 1):
        penalty(loss_of(ddp, data(step))).backward()
    with ddp.join():
        refused(RuntimeError, "ddp.join()", lambda: penalty(loss_of(ddp, data())))
        loss_of(ddp, data())().backward()


class Sometimes(torch.nn.Module):
    """A network, and (w + x)^1.5, which has no second derivative where that is 0."""

    def __init__(self):
        super().__init__()
        self.body = network(norm=False)
        self.root = torch.nn.Parameter(torch.tensor([[1.0, 0.0]], dtype=torch.float64))

    def forward(self, x, y, beside):
        return F.cross_entropy(self.body(x), y) + 0.1 * (self.root + beside).pow(1.5).sum()


def skipped(options):
    """One rank has no trace on some steps: then no rank looks at gradients, and nobody waits."""
    rank = dist.get_rank()
    ddp = DDP(Sometimes())
    named = {
        "share": {"share": 0.5, "follow": True},
        "tuned": {"weight": seht.Tuning(gap=0.0, interval=1), "total_steps": 16},
    }[options]
    penalty = seht.HessianTrace(ddp, curvature="hessian", on_nonfinite="skip", **named)
    finite = []
    for step in range(16):
        x, y = data(step)
        bad = rank == 1 and step in (3, 11)
        beside = torch.zeros(1, 2) if bad else torch.ones(1, 2)
        others = data(100 + step)
        held_out = lambda o=others: ddp(*o, torch.ones(1, 2))
        given = {"held_out": held_out} if "weight" in named else {}
        penalty(lambda x=x, y=y, b=beside: ddp(x, y, b), **given).backward()
        finite.append(math.isfinite(penalty.last.trace))
        assert len(set(_gather(penalty.last.weight))) == 1, step
        ddp.zero_grad()
    assert finite.count(False) == (2 if rank == 1 else 0)
    assert penalty.last.weight > 0
