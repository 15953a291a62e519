"""What per-sample probes must give, built another way: example by example, by nested autograd.

Example n is run alone, as a batch of one, with weights :math:`w + e s_n`; the trace is the second
derivative in e of the mean loss. Nothing of the library's rules, axes or differences is used.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

import seht
from seht import probes

ROWS, COLUMNS = 11, 12


def directions(
    tensors: dict[str, Tensor],
    n: int,
    seed: int,
    shared: frozenset[str] = frozenset(),
    block: int = 8,
) -> dict[str, Tensor]:
    """The probe of each example, (n, *shape), from the seed."""
    found = {}
    for index, (name, w) in enumerate(tensors.items()):
        own = probes.entry_seed(seed, 0, index)
        s = probes.rademacher(w.shape, own).to(w.dtype)
        if name not in shared:
            for dim in range(2 if w.dim() > 1 else 0):
                s = s.index_select(dim, torch.arange(w.shape[dim]) % period(w.shape[dim], block))
        s = s.expand(n, *w.shape)
        if name not in shared:
            for dim, tag in zip(range(min(w.dim(), 2)), (ROWS, COLUMNS), strict=False):
                signs = probes.rademacher(torch.Size((n, w.shape[dim])), probes.mix(own, tag))
                s = s * signs.view(n, *(-1 if d == dim else 1 for d in range(w.dim())))
        found[name] = s
    return found


def period(size: int, block: int) -> int:
    """After how many rows or columns the part that examples share begins anew."""
    divisors = [d for d in range(1, block + 1) if size % d == 0]
    return divisors[-1] if divisors[-1] > min(size, block) / 2 else size


def _parts(model: nn.Module, problem, x: Tensor, y: Tensor, s: dict[str, Tensor], e: Tensor):
    weights = dict(model.named_parameters())
    for n in range(len(y)):
        moved = {k: w + e * s[k][n] if k in s else w for k, w in weights.items()}
        one, target = problem.one(x, y, n)
        yield functional_call(model, moved, (one,)), target


def hessian(model: nn.Module, problem, x: Tensor, y: Tensor, s: dict[str, Tensor], loss_fn):
    """(trace, gradient of the trace in every parameter)."""
    e = torch.zeros((), dtype=torch.float64, requires_grad=True)
    with seht.operators.safe_forms.safe_ops():
        parts = [loss_fn(z, t) for z, t in _parts(model, problem, x, y, s, e)]
        loss = torch.stack(parts).mean()
    (first,) = torch.autograd.grad(loss, e, create_graph=True)
    (trace,) = torch.autograd.grad(first, e, create_graph=True)
    return trace.detach(), _gradient(trace, model)


def gauss_newton(model: nn.Module, problem, x: Tensor, y: Tensor, s: dict[str, Tensor], loss_fn):
    """The same for the Gauss-Newton part."""
    e = torch.zeros((), dtype=torch.float64, requires_grad=True)
    traces = []
    with seht.operators.safe_forms.safe_ops():
        for z, target in _parts(model, problem, x, y, s, e):
            slope = [torch.autograd.grad(entry, e, create_graph=True)[0] for entry in z.flatten()]
            dz = torch.stack(slope).view(z.shape)
            loss = loss_fn(z, target) / len(y)
            (g,) = torch.autograd.grad(loss, z, create_graph=True)
            (h,) = torch.autograd.grad((g * dz.detach()).sum(), z, create_graph=True)
            # The direction is differentiated as well: H_out is symmetric, so twice the half.
            traces.append((h * dz.detach()).sum() + 2 * (h.detach() * (dz - dz.detach())).sum())
    trace = torch.stack(traces).sum()
    return trace.detach(), _gradient(trace, model)


def _gradient(trace: Tensor, model: nn.Module) -> list[Tensor]:
    return list(
        torch.autograd.grad(trace, list(model.parameters()), materialize_grads=True)
        if trace.requires_grad
        else [torch.zeros_like(p) for p in model.parameters()]
    )
