"""What ranks share and what not: checks that run in two processes."""

import copy
import math
import pickle

import torch
import torch.distributed as dist
from ddp_common import ESTIMATORS, WEIGHT, data, gradients, loss_of, refused, same
from helpers import network
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import seht
from seht.distributed.detour import collectives


def gather(value):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def seeds(engine, given):
    """One draw of layers, probes of one's own, and a record that repeats the estimate."""
    model = network()
    ddp = DDP(model)
    settings = {**ESTIMATORS["seht-d"], "engine": engine}
    torch.manual_seed(1000 + dist.get_rank())
    own = seht.HessianTrace(ddp if given == "wrapper" else model, weight=WEIGHT, **settings)
    assert len(set(gather(own.seed))) == 2  # torch's, which differ
    drawn = []
    for step in range(8):
        batch = data(step)
        own(loss_of(ddp, batch)).backward()
        record = own.last
        if given == "inner" and step == 0:  # the wrapper is known from now on
            continue
        assert gather(record.layers) == [record.layers] * 2
        assert len(set(gather(own.seed))) == 1
        drawn.append(record.layers)
        if record.trace is not None:
            assert len(set(gather(record.seed))) == 2
            alone = copy.deepcopy(model)
            again = seht.hessian_trace(alone, loss_of(alone, batch), seed=record.seed, **settings)
            assert math.isclose(again.item(), record.trace, rel_tol=1e-6)
    assert len(set(drawn)) > 2 and () in drawn


def entries():
    """The probes differ between ranks, and rank 0's are those of a run of one process."""
    model = network(norm=False)
    ddp = DDP(model)
    x, y = (part[:6] for part in data())
    dist.broadcast(x, 0)  # the same batch, so that only the probes differ
    one = seht.HessianTrace(ddp, weight=WEIGHT, seed=7)
    alone = seht.HessianTrace(copy.deepcopy(model), weight=WEIGHT, seed=7)
    for _ in range(2):
        one(loss_of(ddp, (x, y)))
        alone(loss_of(alone.model, (x, y)))
        traces = gather(one.last.trace)
        assert traces[0] != traces[1]
        assert gather(alone.last.trace)[0] == traces[0]


def silence():
    """A group that serves something else: not a word is sent, also by rank 0 alone."""
    model = network()
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=dist.get_rank())
    before = collectives()
    if dist.get_rank() == 0:
        for _ in range(2):
            penalty(loss_of(model, data())).backward()
        assert penalty.seed == 0
    assert collectives() == before


def once():
    """The seed is asked for once; later steps send one number and the buffers."""
    ddp = DDP(network())
    penalty = seht.HessianTrace(ddp, weight=WEIGHT, warmup=3)
    counts = []
    for step in range(6):
        before = collectives()
        loss = penalty(loss_of(ddp, data(step)))
        counts.append(collectives() - before)
        loss.backward()
    plain = counts[2]  # DDP's own, when its buckets are in order
    assert plain > 0 and counts[3:] == [plain + 2, plain + 1, plain + 1], counts


def numbers():
    """What the ranks tell each other between steps, once a wrapper is known."""
    model, rank = network(), dist.get_rank()
    own = torch.tensor([1.0, 10.0 * rank], dtype=torch.float64)
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    assert penalty._course.ranks.mean(own) is own and penalty._course.ranks.agree(rank) == rank
    ddp = DDP(model)
    penalty(loss_of(ddp, data())).backward()
    assert penalty._course.ranks.mean(own).tolist() == [1.0, 5.0] and own[1] == 10 * rank
    assert penalty._course.ranks.agree({"rank": rank}) == {"rank": 0}


def resumed(whose):
    """A run goes on from its states as if nothing had happened: its own, or rank 0's."""
    settings = {**ESTIMATORS["seht-d"], "warmup": 1}

    def start(seed):
        model = network()
        ddp = DDP(model)
        penalty = seht.HessianTrace(ddp, weight=WEIGHT, seed=seed, **settings)
        return model, ddp, penalty, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def go(run, steps):
        _, ddp, penalty, optimizer = run
        out = []
        for step in steps:
            optimizer.zero_grad()
            penalty(loss_of(ddp, data(step))).backward()
            optimizer.step()
            out.append(penalty.last)
        return out

    whole = start(dist.get_rank())
    records = go(whole, range(7))
    for stop in (1, 4):  # before the ranks have agreed, and after
        first = start(dist.get_rank())
        go(first, range(stop))
        states = gather([first[0].state_dict(), first[2].state_dict(), first[3].state_dict()])
        mine = states[0 if whose == "first" else dist.get_rank()]
        second = start(50 + dist.get_rank())
        for part, state in zip((second[0], second[2], second[3]), mine, strict=True):
            part.load_state_dict(state)
        for record, known in zip(go(second, range(stop, 7)), records[stop:], strict=True):
            if whose == "own":
                assert record == known
            else:  # with the step that rank 0 had found
                assert (record.seed, record.layers) == (known.seed, known.layers)
                assert math.isclose(record.loss, known.loss, rel_tol=1e-6)
        same(second[0])
        for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-9)


def out_of_step():
    """States of different steps are an error on every rank."""
    ddp = DDP(network())
    penalty = seht.HessianTrace(ddp, weight=WEIGHT)
    penalty.load_state_dict(penalty.state_dict() | {"calls": dist.get_rank()})
    refused(RuntimeError, "different calls", lambda: penalty(loss_of(ddp, data())))


def copies():
    """Pickles and copies of a penalty find their own wrapper."""
    ddp = DDP(network())
    penalty = seht.HessianTrace(ddp, weight=WEIGHT)
    penalty(loss_of(ddp, data())).backward()
    for twin in (copy.deepcopy(penalty), pickle.loads(pickle.dumps(penalty))):
        assert twin.model is not ddp and twin.seed == penalty.seed
        twin(loss_of(twin.model, data())).backward()
    penalty(loss_of(ddp, data())).backward()
    assert twin.last.seed == penalty.last.seed


def wrapped_later():
    """A model that is wrapped after its first steps; and wrapped anew when that one has gone."""
    model = network()
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    penalty(loss_of(model, data())).backward()
    for _ in range(2):
        ddp = DDP(model)
        for _ in range(2):
            penalty(loss_of(ddp, data())).backward()
        assert len(set(gather(penalty.seed))) == 1
        assert len(set(gather(penalty.last.seed))) == 2
        del ddp


def fails_on_rank_1():
    """For the test of the tests."""
    if dist.get_rank() == 1:
        raise ValueError("as it should")


class Root(nn.Module):
    """(w + x)^1.5: where that is 0 loss and gradient are finite, the second derivative is not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 0.0]], dtype=torch.float64))

    def forward(self, x):
        return (self.weight + x).pow(1.5).sum()


def nonfinite(engine, form):
    """One rank's estimate is not finite: all raise, or that rank leaves its penalty out."""
    rank = dist.get_rank()
    good, bad = torch.ones(1, 2).double(), torch.zeros(1, 2).double()

    def run(penalty, closure):
        if form == "lean":
            penalty.backward(closure)
        else:
            penalty(closure).backward()

    for skip in (False, True):
        ddp = DDP(Root())
        penalty = seht.HessianTrace(
            ddp, weight=WEIGHT, engine=engine, on_nonfinite="skip" if skip else "raise"
        )
        x = bad if rank == 1 else good

        def closure(ddp=ddp, x=x):
            return ddp(x)

        if not skip:
            words = "the trace estimate is" if rank == 1 else "the trace estimate of another rank"
            refused(seht.NonFiniteError, words, lambda: run(penalty, closure))
            assert gradients(ddp.module)["weight"] is None and penalty.step == 0
            run(penalty, lambda: ddp(good))  # the ranks are still together
            assert penalty.step == 1
            words = "the loss is" if rank == 0 else "the loss of another rank"
            factor = math.nan if rank == 0 else 1.0
            refused(
                seht.NonFiniteError, words, lambda f=factor: run(penalty, lambda: ddp(good) * f)
            )
            run(penalty, lambda: ddp(good))
        else:
            run(penalty, closure)
            assert math.isfinite(penalty.last.trace) == (rank == 0)
            assert ddp.module.weight.grad.isfinite().all()
            same(ddp.module)


def steps_of_their_own():
    """A rank whose step is checked when the other's is not: nobody waits."""
    ddp = DDP(network())
    penalty = seht.HessianTrace(ddp, weight=WEIGHT)
    for step in range(4):
        penalty._course.engine.steps.next_check = step if dist.get_rank() == 1 else 100
        penalty(loss_of(ddp, data(step))).backward()
    same(ddp.module)
