"""What the tests compare with: plain first-order gradients, differences of them, and Hessians.

Nothing here uses the library, except to read the names of the chosen weights and to hand it a
probe of our own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from cases import Case
from torch import Tensor, nn

from seht import probes

SEED = 5


class Along:
    """An estimator whose one probe is given: the estimate is exactly ``s^T H s``."""

    name, probes, scale = "along", 1, 1.0
    signs = False

    def __init__(self, directions: Sequence[Tensor], seed: int = SEED) -> None:
        self.parts = {probes.entry_seed(seed, 0, i): part for i, part in enumerate(directions)}

    def layers(self, count: int, seed: int) -> tuple[int, ...]:
        return tuple(range(count))

    def entries(self, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
        return self.parts[seed].view(shape).to(device)


class Fixture:
    """A case at one point: its closure, what it may be differentiated in, and one fixed probe."""

    def __init__(self, case: Case) -> None:
        self.model, self.batch, loss_fn = case.build()
        self.closure = lambda: loss_fn(self.model, self.batch)
        self.leaves = [p for p in self.model.parameters() if p.requires_grad]
        parts = self.batch if isinstance(self.batch, tuple) else (self.batch,)
        self.leaves += [x.requires_grad_() for x in parts if x.is_floating_point()]
        generator = torch.Generator().manual_seed(SEED)
        chosen = {id(w) for w in probes.choose(self.model).tensors.values()}
        # The probe, with zeros for every leaf that is not probed (biases, inputs).
        self.probe = [
            signs(w, generator) if id(w) in chosen else torch.zeros_like(w) for w in self.leaves
        ]
        self._zero_padding(self.probe)
        pairs = zip(self.leaves, self.probe, strict=True)
        self.estimator = Along([s for w, s in pairs if id(w) in chosen])

    def directions(self, count: int) -> list[list[Tensor]]:
        """Random directions over every leaf, of length one."""
        generator = torch.Generator().manual_seed(SEED + 1)
        raw = [
            [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in self.leaves]
            for _ in range(count)
        ]
        for direction in raw:
            self._zero_padding(direction)
        return [[part / norm(d) for part in d] for d in raw]

    def _zero_padding(self, direction: list[Tensor]) -> None:
        # To PyTorch the row of padding_idx is a constant: it has no gradient, but moves the loss.
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                (i,) = (i for i, w in enumerate(self.leaves) if w is module.weight)
                direction[i][module.padding_idx] = 0


def signs(w: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2, w.shape, generator=generator).to(w.dtype) * 2 - 1


# --- vectors that are lists of tensors --------------------------------------------------------


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def norm(a: Sequence[Tensor]) -> Tensor:
    return dot(a, a).sqrt()


def relative(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The distance of ``a`` from ``b`` over the length of ``b``."""
    return float(norm([x.detach() - y.detach() for x, y in zip(a, b, strict=True)]) / norm(b))


def gradient(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    return list(
        torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        if value.requires_grad
        else map(torch.zeros_like, leaves)
    )


# --- differences ------------------------------------------------------------------------------


@contextmanager
def moved(leaves: Sequence[Tensor], direction: Sequence[Tensor], step: float) -> Iterator[None]:
    """Within the block the leaves are displaced by ``step * direction``."""
    before = [w.detach().clone() for w in leaves]
    with torch.no_grad():
        for w, d in zip(leaves, direction, strict=True):
            w.add_(d, alpha=step)
    yield
    with torch.no_grad():
        for w, old in zip(leaves, before, strict=True):
            w.copy_(old)


def plain_gradient(fixture: Fixture, direction: Sequence[Tensor], step: float) -> list[Tensor]:
    """The ordinary gradient of the loss, at a displaced point, on the unmodified model."""
    with moved(fixture.leaves, direction, step):
        return gradient(fixture.closure(), fixture.leaves)


def curvature(fixture: Fixture, step: float) -> float:
    """``s . (g(w + hs) - g(w - hs)) / 2h``, which is ``s^T H s`` up to h^2."""
    s = fixture.probe
    plus, minus = (plain_gradient(fixture, s, h) for h in (step, -step))
    return float((dot(s, plus) - dot(s, minus)) / (2 * step))


def curvature_gradient(fixture: Fixture, step: float) -> list[Tensor]:
    """``(g(w + hs) + g(w - hs) - 2 g(w)) / h^2``: the gradient of ``s^T H s`` up to h^2."""
    s = fixture.probe
    plus, minus, here = (plain_gradient(fixture, s, h) for h in (step, -step, 0.0))
    return [(p + m - 2 * g) / step**2 for p, m, g in zip(plus, minus, here, strict=True)]


def extrapolated(function: Callable[[float], Sequence[Tensor]], step: float) -> list[Tensor]:
    """Richardson's step: what is left of the error is of order h^4."""
    fine, coarse = function(step), function(2 * step)
    return [(4 * f - c) / 3 for f, c in zip(fine, coarse, strict=True)]


def slope(
    value: Callable[[], Tensor], leaves: Sequence[Tensor], direction: Sequence[Tensor], step: float
) -> float:
    """The central difference of ``value`` along ``direction``."""
    ends = []
    for h in (step, -step):
        with moved(leaves, direction, h):
            ends.append(value().item())
    return (ends[0] - ends[1]) / (2 * step)


# --- networks whose norms are written out -----------------------------------------------------


class WrittenOut(nn.Module):
    """A norm in the textbook's words, with the parameters of the fused one it stands for."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.fused, self.weight, self.bias = [fused], fused.weight, fused.bias

    def forward(self, x: Tensor) -> Tensor:
        (fused,) = self.fused
        shape = (1, -1) + (1,) * (x.dim() - 2)
        if isinstance(fused, nn.LayerNorm):
            dims, shape = tuple(range(-len(fused.normalized_shape), 0)), fused.normalized_shape
        elif isinstance(fused, nn.modules.instancenorm._InstanceNorm):
            dims = tuple(range(2, x.dim()))
        elif fused.training or fused.running_mean is None:
            dims = (0, *range(2, x.dim()))
        else:
            dims = ()
        if dims:
            mean, var = x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)
        else:
            mean, var = fused.running_mean.view(shape), fused.running_var.view(shape)
        x = (x - mean) / torch.sqrt(var + fused.eps)
        if self.weight is not None:
            x = x * self.weight.view(shape)
        return x if self.bias is None else x + self.bias.view(shape)


FUSED = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm)


@contextmanager
def written_out(model: nn.Module) -> Iterator[None]:
    """Within the block the written-out forms stand in the places of the fused norms."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, FUSED)
    ]
    for parent, name, child in places:
        setattr(parent, name, WrittenOut(child))
    yield
    for parent, name, child in places:
        setattr(parent, name, child)


def quadratic_form(loss: Tensor, weights: Sequence[Tensor], s: Sequence[Tensor]) -> Tensor:
    """``s^T H s`` by nested autograd; right only where every operator of the loss is."""
    g = torch.autograd.grad(loss, weights, create_graph=True)
    h = torch.autograd.grad(dot(g, s), weights, create_graph=True)
    return dot(h, s)


def hessian(loss: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The explicit Hessian, row by row."""
    g = torch.autograd.grad(loss, weights, create_graph=True)
    flat = torch.cat([part.flatten() for part in g])
    rows = []
    for entry in flat:
        row = torch.autograd.grad(entry, weights, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in row]))
    return torch.stack(rows)
