"""A share and a tuned weight on shards: the training of one process on the whole batch."""

import torch
import torch.distributed as dist
from fsdp_problems import batch, check, distance, half, loss_of, make, raised, sharded

import seht

FREE = seht.Tuning(gap=0.0)
OPTIMIZERS = {"sgd": (torch.optim.SGD, 0.1), "adamw": (torch.optim.AdamW, 0.01)}


def _train(model, kind, part, optimizer, steps, **options):
    way, lr = OPTIMIZERS[optimizer]
    optimizer = way(model.parameters(), lr=lr)
    penalty = seht.HessianTrace(
        model,
        **{"weight": FREE, "seed": 5, "total_steps": 20, "optimizer": optimizer, **options},
    )
    for step in range(steps):
        optimizer.zero_grad()
        here, there = (part(batch(kind, torch.float64, s)) for s in (step, 100 + step))
        more = {} if "share" in options else {"held_out": lambda: loss_of(model, there)}
        penalty.backward(lambda: loss_of(model, here), **more)
        optimizer.step()
    return penalty


@check
def tuned(kind, curvature, optimizer):
    """The weight goes the way that it goes in one process, and so do the weights of the model."""
    reference = make(kind, torch.float64)
    model = sharded(reference)
    options = {"curvature": curvature, "kappa": 1e-3}
    theirs = _train(reference, kind, lambda data: data, optimizer, 20, **options)
    ours = _train(model, kind, half, optimizer, 20, **options)
    a, b = (torch.tensor(p.path.weights, dtype=torch.float64) for p in (ours, theirs))
    assert len(set(b.tolist())) > 2
    assert torch.allclose(a, b, rtol=1e-5), (a / b).tolist()
    regimes = [p.state_dict()["strength"]["gap"] for p in (ours, theirs)]
    a, b = (torch.tensor(list(found.values()), dtype=torch.float64) for found in regimes)
    assert torch.allclose(a, b, rtol=1e-5), regimes
    off = distance(model, reference)
    assert off < 1e-6, f"{off:.2e}"
    return f"{off:.1e}"


@check
def measured(curvature):
    """A share, saved while it is measured: each rank has the averages of its own shards."""
    model = sharded(make("relu", torch.float64))
    options = {"share": 0.5, "weight": None, "curvature": curvature}
    penalty = _train(model, "relu", half, "sgd", 4, **options)
    state = penalty.state_dict()
    other = seht.HessianTrace(model, share=0.5, curvature=curvature)
    other.load_state_dict(state)
    for step in range(4, 9):
        data = half(batch("relu", torch.float64, step))
        traces = []
        for one in (penalty, other):
            model.zero_grad()
            one.backward(lambda: loss_of(model, data))
            traces.append(one.last)
        assert traces[0] == traces[1]
    assert penalty.last.weight > 0
    swapped = {**state, "strength": {**state["strength"], "place": 1 - dist.get_rank()}}
    assert "on every rank" in raised(ValueError, lambda: other.load_state_dict(swapped))
