"""Models of other shapes: partly sharded, tied, frozen, unused, checkpointed, replicated twice."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_problems import (
    assert_close,
    batch,
    check,
    distance,
    gradient,
    half,
    loss_of,
    make,
    reference_gradient,
    sharded,
    train,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import seht


def compare(model, reference, kind="relu", average=(), **options):
    """One call each; `average` are weights whose gradients FSDP does not reduce."""
    records = []
    for net, part in ((model, half), (reference, lambda data: data)):
        penalty = seht.HessianTrace(net, **{"weight": 1e-2, "seed": 5, **options})
        data = part(batch(kind, torch.float64, 0))
        penalty.backward(lambda: loss_of(net, data))
        records.append(penalty.last)
    for name, p in model.named_parameters():
        if name in average and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    assert_close(gradient(model), gradient(reference))
    ours, theirs = records
    assert abs(ours.trace - theirs.trace) <= 1e-6 * abs(theirs.trace)
    assert ours.unused == theirs.unused
    return ours


@check
def partly(curvature="hessian"):
    """Weights that are not sharded count once, in the step and in the trace."""
    reference = make("transformer", torch.float64)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block)  # the rest stays whole on every rank
    rest = [n for n, p in model.named_parameters() if not hasattr(p, "placements")]
    assert "head.weight" in rest
    compare(model, reference, "transformer", average=rest, curvature=curvature)
    reference = make("relu", torch.float64)
    model = copy.deepcopy(reference)
    fully_shard(model, ignored_params={model[2].weight})
    compare(model, reference, average=["2.weight"], curvature=curvature)


@check
def tied():
    """One weight under two names, in one group."""

    def made():
        model = make("transformer", torch.float64)
        model.head.weight = model.embed.weight
        return model

    for curvature in ("hessian", "ggn"):
        compare(sharded(made()), made(), "transformer", curvature=curvature)


@check
def frozen():
    """Frozen and unused weights; a name that the loss does not use is everybody's error."""

    def made():
        model = make("transformer", torch.float64)
        model.blocks[0].requires_grad_(False)
        model.blocks[1].register_parameter("idle", nn.Parameter(torch.ones(4, 4).double()))
        return model

    for curvature in ("hessian", "ggn"):
        last = compare(sharded(made()), made(), "transformer", curvature=curvature)
        assert last.unused == ("blocks.1.idle",)
        only = {"params": "blocks.1.idl*", "curvature": curvature}
        assert compare(sharded(made()), made(), "transformer", **only).trace == 0
    model = sharded(made())
    data = half(batch("transformer", torch.float64, 0))
    penalty = seht.HessianTrace(model, weight=1e-2, params=["blocks.1.idle", "head.weight"])
    try:
        penalty.backward(lambda: loss_of(model, data))
    except ValueError as error:
        assert "does not depend on parameter" in str(error)
    else:
        raise AssertionError("an unused name went unnoticed")


class Experts(nn.Module):
    """Two experts; each half of the batch goes to one of them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x):
        hidden = self.first(x).tanh()
        if dist.get_world_size() > 1 and len(x) == 4:  # a rank's half: one expert alone
            return self.experts[dist.get_rank()](hidden)
        a, b = hidden.chunk(2)
        return torch.cat([self.experts[0](a), self.experts[1](b)])


@check
def experts():
    """A weight that only one rank uses is moved on all of them."""
    torch.manual_seed(0)
    reference = Experts().double()
    model = copy.deepcopy(reference)
    fully_shard(model)
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        return "this FSDP cannot do that"
    model.set_reduce_scatter_unused_params(True)
    compare(model, reference)


@check
def sums():
    """Gradients that are summed instead of averaged: the loss is the sum, too."""
    kind, dtype = "relu", torch.float64
    reference = make(kind, dtype)
    penalty = seht.HessianTrace(reference, weight=1e-2, seed=5, limit=0.01)
    data = batch(kind, dtype, 0)
    penalty.backward(lambda: 2 * loss_of(reference, data))
    model = sharded(make(kind, dtype))
    for module in (model, *model):
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    ours = seht.HessianTrace(model, weight=1e-2, seed=5, limit=0.01)
    mine = half(data)
    ours.backward(lambda: loss_of(model, mine))
    assert_close(gradient(model), gradient(reference))
    assert abs(ours.last.loss - penalty.last.loss) < 1e-12
    assert abs(ours.last.penalty - penalty.last.penalty) < 1e-9


@check
def extras():
    """aux, an input with a gradient, a plain module beside the model, each rank's own loss."""
    kind, dtype = "smooth", torch.float64
    found = []
    for net, part in ((sharded(make(kind, dtype)), half), (make(kind, dtype), lambda d: d)):
        torch.manual_seed(7)
        beside = nn.Linear(6, 6).double()
        x, y = part(batch(kind, dtype, 0))
        x = x.clone().requires_grad_()
        penalty = seht.HessianTrace(net, weight=1e-2, seed=5)

        def closure():
            z = net(beside(x))
            return F.cross_entropy(z, y), z

        loss, logits = penalty.backward(closure)
        assert len(logits) == len(x)
        found.append((loss, x.grad, beside.weight.grad, penalty.last.loss))
    (loss, gx, gw, mean), (_, rx, rw, total) = found
    own = half((rx,))[0] * dist.get_world_size()  # the loss of a rank is a mean over its half
    assert (gx - own).norm() < 1e-7 * own.norm()
    dist.all_reduce(gw)
    assert (gw / 2 - rw).norm() < 1e-7 * rw.norm()
    assert abs(mean - total) < 1e-12 and loss.item() != mean
    dist.all_reduce(loss)
    assert abs(loss.item() / 2 - mean) < 1e-12


@check
def buffers():
    """BatchNorm's statistics move once, dropout is repeated, both on the rank's own half."""

    def made():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        ).double()

    plain, model = made(), sharded(made())
    data = half(batch("relu", torch.float64, 0))
    torch.manual_seed(1)
    loss_of(plain, data).backward()
    torch.manual_seed(1)
    seht.HessianTrace(model, weight=1e-2, seed=5).backward(lambda: loss_of(model, data))
    assert plain[1].num_batches_tracked == model[1].num_batches_tracked == 1
    assert (plain[1].running_mean - model[1].running_mean).abs().max() < 1e-12
    assert (plain[1].running_var - model[1].running_var).abs().max() < 1e-12


@check
def checkpointed():
    """Activation checkpointing of smooth blocks: gathered once more, to compute them again."""
    theirs = reference_gradient(1, "transformer")
    model = sharded(make("transformer", torch.float64))
    for block in model.blocks:
        run = block.forward
        block.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
    penalty = seht.HessianTrace(model, weight=1e-2, seed=5)
    data = half(batch("transformer", torch.float64, 0))
    penalty.backward(lambda: loss_of(model, data))
    assert_close(gradient(model), theirs)


@check
def twice():
    """A closure that calls the model twice."""
    reference = make("relu", torch.float64)
    model = sharded(reference)
    for net, part in ((model, half), (reference, lambda data: data)):
        one, two = (part(batch("relu", torch.float64, step)) for step in range(2))
        closure = lambda: loss_of(net, one) + loss_of(net, two)
        seht.HessianTrace(net, weight=1e-2, seed=5).backward(closure)
    assert_close(gradient(model), gradient(reference))


@check
def compiled():
    """Blocks compiled in place, then sharded."""
    reference = make("relu-transformer", torch.float64)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    for curvature in ("hessian", "ggn"):
        model.zero_grad()
        reference.zero_grad()
        compare(model, reference, "relu-transformer", curvature=curvature)


@check
def replicated():
    """HSDP over four processes: shards within a pair, copies across."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, {"curvature": "ggn"}):
        reference = make("relu-transformer", torch.float64)
        model = sharded(reference, mesh=mesh)
        every = (reference, "relu-transformer", torch.float64, 20)
        theirs = train(*every, part=lambda data: data, **options)
        ours = train(model, *every[1:], part=half, **options)
        off = distance(model, reference)
        assert off < 1e-8, f"{off:.2e}"
        assert abs(ours[-1].trace - theirs[-1].trace) < 1e-6 * abs(theirs[-1].trace)
    # Gradients that wait for their all-reduce cannot be told apart from ours.
    model.set_requires_all_reduce(False)
    data = half(batch("relu-transformer", torch.float64, 0))
    loss_of(model, data).backward()
    penalty = seht.HessianTrace(model, weight=1e-2)
    try:
        penalty.backward(lambda: loss_of(model, data))
    except RuntimeError as error:
        assert "set_requires_gradient_sync(False)" in str(error)
    else:
        raise AssertionError("half-reduced gradients were lost")
    return f"{off:.1e}"


@check
def columns():
    """Shards along another dimension than the first."""
    from torch.distributed.tensor import Shard

    def place(p):
        return Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else Shard(0)

    reference = make("transformer", torch.float64)
    model = sharded(reference, shard_placement_fn=place)
    assert whole(model.head.weight).shape == reference.head.weight.shape
    compare(model, reference, "transformer")
