"""Models that `fully_shard` shards as in real use, the same in one process; what checks share."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import seht

DEVICE = os.environ.get("FSDP_DEVICE", "cpu")


class Block(nn.Module):
    """A small pre-norm transformer block."""

    def __init__(self, width, heads, activation):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activation = activation

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, two blocks and a head: sharded per block, and the rest as the root."""

    def __init__(self, activation=F.gelu, words=11, width=8):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, 2, activation) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def perceptron(activation):
    # 7 and 5 rows do not divide by two: the ranks' shards differ in size.
    return nn.Sequential(
        nn.Linear(6, 7), activation(), nn.Linear(7, 5), activation(), nn.Linear(5, 3)
    )


def make(kind, dtype):
    torch.manual_seed(3)
    if kind == "transformer":
        return Transformer().to(DEVICE, dtype)
    if kind == "relu-transformer":
        return Transformer(F.relu).to(DEVICE, dtype)
    return perceptron({"smooth": nn.Tanh, "relu": nn.ReLU}[kind]).to(DEVICE, dtype)


def sharded(model, **options):
    """Per layer, then the root, as the documentation of `fully_shard` has it."""
    model = copy.deepcopy(model)
    for layer in getattr(model, "blocks", [m for m in model.children() if list(m.parameters())]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(kind, dtype, step, size=8):
    generator = torch.Generator().manual_seed(100 + step)
    if "transformer" in kind:
        return (torch.randint(0, 11, (size, 5), generator=generator).to(DEVICE),) * 2
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x.to(DEVICE), torch.randint(0, 3, (size,), generator=generator).to(DEVICE)


def half(data):
    """This rank's part of a batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return tuple(part.chunk(world)[rank] for part in data)


def loss_of(model, data):
    x, y = data
    z = model(x)
    if z.dim() == 3:  # the next word
        return F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    return F.cross_entropy(z, y)


def train(model, kind, dtype, steps, *, part, optimizer=torch.optim.SGD, lr=0.1, **options):
    """Some penalised steps; the records."""
    penalty = seht.HessianTrace(model, **{"weight": 1e-2, "seed": 5, **options})
    opt = optimizer(model.parameters(), lr=lr)
    records = []
    for step in range(steps):
        opt.zero_grad()
        data = part(batch(kind, dtype, step))
        penalty.backward(lambda: loss_of(model, data))
        opt.step()
        records.append(penalty.last)
    return records


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distance(model, reference):
    """The relative distance of all weights."""
    ours = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
    theirs = torch.cat([p.detach().flatten() for p in reference.parameters()])
    return ((ours - theirs).norm() / theirs.norm()).item()


CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def raised(kind, action):
    """The message of the error that the action must raise."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"nothing was raised where {kind.__name__} was due")


def parts(model):
    """Every weight's local part, bit for bit, and what `.grad` holds."""
    weights = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}
    grads = {
        n: None if p.grad is None else p.grad.to_local().clone()
        for n, p in model.named_parameters()
    }
    return weights, grads


def assert_same(before, after):
    for old, new in zip(before, after, strict=True):
        for name, tensor in old.items():
            other = new[name]
            assert (tensor is None) == (other is None), name
            assert tensor is None or torch.equal(tensor, other), name


def gradient(model):
    return {n: None if p.grad is None else whole(p.grad).clone() for n, p in
            model.named_parameters()}  # fmt: skip


def assert_close(ours, theirs, tolerance=1e-7):
    assert ours.keys() == theirs.keys()
    for name, g in theirs.items():
        assert (g is None) == (ours[name] is None), name
        if g is not None:
            off = (ours[name] - g).norm() / max(g.norm(), 1e-12)
            assert off < tolerance, f"{name}: {off:.2e}"


def reference_gradient(calls, kind="relu", **options):
    """One process, the whole batch, several calls without `zero_grad`."""
    model = make(kind, torch.float64)
    penalty = seht.HessianTrace(model, **{"weight": 1e-2, "seed": 5, **options})
    for step in range(calls):
        penalty.backward(lambda: loss_of(model, batch(kind, torch.float64, step)))
    return gradient(model)
