"""What the DDP checks share: a wrapped model, and the gradient that it should have."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import network
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import seht

WEIGHT = 0.01
DEVICE = torch.device(os.environ.get("SEHT_TEST_DEVICE", "cpu"))
"""With NCCL every rank has a device of its own, which DDP moves the inputs to."""
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
ESTIMATORS = {
    "seht-h": {},
    "seht-d": {"estimator": "seht-d", "prob": 0.3, "layer_prob": 0.6},
    "seht-s": {"estimator": "seht-s"},
}


class Branches(nn.Module):
    """A side branch that some calls take, and one that none does."""

    def __init__(self):
        super().__init__()
        self.body = network()
        self.side = nn.Linear(3, 3).double()
        self.never = nn.Linear(3, 3).double()

    def forward(self, x, side=False):
        z = self.body(x)
        return self.side(z) if side else z


def data(step=0):
    """This rank's batch: of another size on each rank, as a last batch would be."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 + 10 * step + rank)
    n = 6 + 2 * rank
    x = torch.randn(n, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.arange(n) % 3


def loss_of(module, batch, **arguments):
    x, y = batch
    x = x if isinstance(module, DDP) else x.to(DEVICE)
    return lambda: F.cross_entropy(module(x, **arguments), y.to(DEVICE))


def averaged(model):
    """The mean over ranks of the gradients that each has computed alone; None where none has."""
    found = {}
    for name, p in model.named_parameters():
        some = torch.tensor([float(p.grad is not None)], device=DEVICE)
        dist.all_reduce(some)
        g = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(g)
        found[name] = g / dist.get_world_size() if some else None
    return found


def expected(model, record, batch, engine="auto", **options):
    """What a step should leave in ``.grad``, from its record, without a wrapper."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    closure = loss_of(alone, batch)
    if record.trace is None:
        closure().backward()
    else:
        loss, trace = seht.loss_and_trace(
            alone, closure, seed=record.seed, engine=engine, **options
        )
        (loss + record.weight * trace).backward()
    return averaged(alone)


def assert_close(found, wanted, tolerance=1e-6):
    """Tensor by tensor; one that is nothing beside the others (a bias before BatchNorm) may be off
    by as much as one of a hundredth of their size.
    """
    sizes = [w.double().norm() for w in wanted.values() if w is not None]
    least = torch.stack(sizes).norm() / 100 if sizes else 0.0
    for name, want in wanted.items():
        got = found[name]
        if want is None:
            assert got is None or not got.any(), name
            continue
        assert got is not None, f"{name} has no gradient"
        distance = (got - want).double().norm() / max(want.double().norm(), least)
        assert distance <= tolerance, f"{name} is off by {distance:.2g}"


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same(model):
    """All ranks hold the same weights."""
    for name, p in model.named_parameters():
        other = p.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, p), f"{name} differs between ranks"


def refused(error, words, call):
    """The call raises that, on this rank; the words are in its message."""
    try:
        call()
    except error as found:
        assert words in str(found), f"{found!s} does not say {words!r}"
    else:
        raise AssertionError(f"nothing raised about {words!r}")


def train(
    *, form="scalar", given="wrapper", called="wrapper", steps=3, model=None, ddp_options=None,
    buffers=True, **options,
):  # fmt: skip
    """Steps of training under DDP, each gradient held against the mean of the ranks' own.

    Returns the model and the records.
    """
    model = (network() if model is None else model).to(DEVICE)
    twin = copy.deepcopy(model)
    ids = [DEVICE] if DEVICE.type == "cuda" else None
    ddp = DDP(model, device_ids=ids, **(ddp_options or {}))
    modules = {"wrapper": ddp, "inner": model}
    schedule = {k: options.pop(k) for k in ("every", "warmup") if k in options}
    penalty = seht.HessianTrace(
        modules[given], weight=WEIGHT, seed=dist.get_rank(), **schedule, **options
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin)]
    records = []
    for step in range(steps):
        batch = data(step)
        closure = loss_of(modules[called], batch)
        optimizers[0].zero_grad()
        if form == "lean":
            penalty.backward(closure)
        else:
            penalty(closure).backward()
        if ddp.broadcast_buffers:
            for buffer in twin.buffers():  # as DDP does before a forward pass
                dist.broadcast(buffer, 0)
        want = expected(twin, penalty.last, batch, **options)
        with torch.no_grad():
            loss_of(twin, batch)()  # moves the statistics
        assert_close(gradients(model), want)
        if buffers:
            # Of weights that a step of the other's rounding, divided by e^2, has moved.
            assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), 1e-7)
        for name, p in twin.named_parameters():
            p.grad = want[name]
        for optimizer in optimizers:
            optimizer.step()
        records.append(penalty.last)
    return model, records
