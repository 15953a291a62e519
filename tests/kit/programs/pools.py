"""Pools, sorts and reductions: which entry wins is a decision."""

import torch
import torch.nn.functional as F
from torch import Tensor

from programs.nodes import Function, largest


def windows(x: Tensor, kernel: int, stride: int) -> Tensor:
    """(N, C, h, w, kernel * kernel)."""
    return x.unfold(2, kernel, stride).unfold(3, kernel, stride).flatten(4)


def swapped(function: Function) -> Function:
    """Over the positions of a sequence, as one has to write it for the 1d pools."""
    return lambda x: function(x.transpose(1, 2)).transpose(1, 2)


def pairs(x: Tensor) -> Tensor:
    """(N, t, D, 2) from a sequence."""
    return x.unfold(1, 2, 2)


def ordered(x: Tensor, dim: int, descending: bool = False) -> Tensor:
    return torch.gather(x, dim, x.detach().argsort(dim, descending=descending))


def running_largest(x: Tensor, dim: int) -> Tensor:
    return torch.gather(x, dim, x.detach().cummax(dim).indices)


def spread(x: Tensor) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return torch.sqrt((centred**2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + 0.1)


POOLS_2D: dict[str, tuple[Function, Function]] = {
    "max-pool": (lambda x: F.max_pool2d(x, 2), lambda x: largest(windows(x, 2, 2), -1)),
    "max-pool-overlap": (
        lambda x: F.max_pool2d(x, 2, 1),
        lambda x: largest(windows(x, 2, 1), -1),
    ),
    "max-pool-padded": (
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: largest(windows(F.pad(x, (1, 1, 1, 1), value=-1e9), 3, 2), -1),
    ),
    "max-pool-indices": (
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: largest(windows(x, 2, 2), -1),
    ),
    "adaptive-max": (
        lambda x: F.adaptive_max_pool2d(x, 1),
        lambda x: largest(x.flatten(2), -1)[..., None, None],
    ),
    "avg-pool": (lambda x: F.avg_pool2d(x, 2), lambda x: windows(x, 2, 2).sum(-1) / 4),
    "global-avg": (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: (x.sum((2, 3)) / x.shape[2:].numel())[..., None, None],
    ),
    "lp-pool": (
        lambda x: F.lp_pool2d(x + 3, 2, 2),
        lambda x: torch.sqrt((windows(x + 3, 2, 2) ** 2).sum(-1)),
    ),
}

POOLS_1D: dict[str, tuple[Function, Function]] = {
    "max-pool": (swapped(lambda x: F.max_pool1d(x, 2)), lambda x: largest(pairs(x), -1)),
    "max-pool-indices": (
        swapped(lambda x: F.max_pool1d(x, 2, return_indices=True)[0]),
        lambda x: largest(pairs(x), -1),
    ),
    "adaptive-max": (
        swapped(lambda x: F.adaptive_max_pool1d(x, 1)),
        lambda x: largest(x, 1)[:, None],
    ),
    "avg-pool": (swapped(lambda x: F.avg_pool1d(x, 2)), lambda x: pairs(x).sum(-1) / 2),
}

SORTS: dict[str, tuple[Function, Function]] = {
    "sort": (lambda x: x.sort(-1).values, lambda x: ordered(x, -1)),
    "sort-first": (lambda x: x.sort(1, descending=True)[0], lambda x: ordered(x, 1, True)),
    "sort-transposed": (
        lambda x: x.transpose(1, -1).sort(-1).values,
        lambda x: ordered(x.transpose(1, -1).contiguous(), -1),
    ),
    "topk": (lambda x: x.topk(2, 1).values, lambda x: ordered(x, 1, True)[:, :2]),
    "max": (lambda x: x.max(1, keepdim=True).values, lambda x: largest(x, 1).unsqueeze(1)),
    "median": (
        lambda x: x.clone().median(-1, keepdim=True).values,  # of expanded tensors torch's is wrong
        lambda x: ordered(x, -1)[..., (x.shape[-1] - 1) // 2, None],
    ),
    "kthvalue": (
        lambda x: x.kthvalue(1, -1, keepdim=True).values,
        lambda x: ordered(x, -1)[..., :1],
    ),
    "cummax": (lambda x: x.cummax(-1).values, lambda x: running_largest(x, -1)),
    "argmax": (
        lambda x: x.gather(1, x.argmax(1, keepdim=True)) * x,
        lambda x: largest(x, 1).unsqueeze(1) * x,
    ),
    "cumsum": (
        lambda x: x.cumsum(1),
        lambda x: torch.stack([x[:, : i + 1].sum(1) for i in range(x.shape[1])], 1),
    ),
    "logsumexp": (
        lambda x: x.logsumexp(-1, keepdim=True),
        lambda x: torch.log(torch.exp(x).sum(-1, keepdim=True)),
    ),
    "std": (lambda x: (x.var(-1, keepdim=True) + 0.1).sqrt() * x, lambda x: spread(x) * x),
}
