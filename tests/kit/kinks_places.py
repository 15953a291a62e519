"""Kinks of functions that choose: maxima, order statistics, max-pooling; norms made of them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from kinked import IMAGE, LINE, ROW, VOLUME, add
from torch import Tensor, nn

EDGES = torch.linspace(-1, 1, ROW[1]).double()


def tied(z: Tensor) -> Tensor:
    """Three entries share the maximum of each row, exactly, and would part at the first step."""
    top = z[:, :3] - z[:, :3].detach() + 4
    return torch.cat([top, z[:, 3:]], 1)


def each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Row by row, for functions of a whole tensor."""
    return lambda z: torch.stack([function(row) for row in z])


add(
    {
        "max-dim": lambda z: z.max(1).values,
        "max-keyword": lambda z: torch.max(z, dim=0)[0],
        "max-keepdim": lambda z: z.max(1, keepdim=True)[0] * z,
        "max-negative": lambda z: z.max(dim=-1, keepdim=True).values * z,
        "max-indices": lambda z: z.max(1).indices.unsqueeze(1) / ROW[1] * z,
        "min-dim": lambda z: torch.min(z, 1)[0],
        "max-all": each(torch.max),
        "min-all": each(lambda row: row.min()),
        "median-all": each(torch.median),
        "median-dim": lambda z: z.median(1, keepdim=True).values * z,
        "nanmedian": lambda z: torch.nanmedian(z, 0).values,
        "sort": lambda z: z.sort(1).values * EDGES,
        "sort-default": lambda z: torch.sort(z, descending=True)[0] * EDGES,
        "sort-stable": lambda z: torch.sort(z, stable=True, dim=0).values * EDGES,
        "sort-indices": lambda z: z.gather(1, z.sort(1).indices.flip(0)) * EDGES,
        "topk": lambda z: z.topk(5).values,
        "topk-dim": lambda z: torch.topk(z, 3, dim=0, largest=False)[0],
        "topk-scatter": lambda z: torch.zeros_like(z).scatter(1, z.topk(5)[1], z.topk(5)[0]),
        "kthvalue": lambda z: z.kthvalue(7).values,
        "kthvalue-dim": lambda z: torch.kthvalue(z, 2, 0, keepdim=True)[0] * z,
        "mode": lambda z: z.mode(1).values,
        "cummax": lambda z: z.cummax(1).values,
        "cummin": lambda z: torch.cummin(z, dim=0)[0],
        "amax": lambda z: z.amax(1),
        "amax-keyword": lambda z: torch.amax(z, dim=0, keepdim=True) * z,
        "amax-dims": each(lambda row: row.view(5, 8).amax((0, 1))),
        "amax-all": each(torch.amax),
        "amin": lambda z: torch.amin(z, 1, True) * z,
        "amax-ties": lambda z: tied(z).amax(1),
        "max-all-ties": each(lambda row: tied(row.unsqueeze(0)).max()),
        "max-dim-ties": lambda z: tied(z).max(1).values,
        "norm-1": lambda z: z.norm(1, dim=1),
        "norm-1-keyword": lambda z: torch.norm(input=z, p=1, dim=1, keepdim=True) / 9 * z,
        "norm-inf": lambda z: torch.norm(z, torch.inf, 1),
        "norm-all": each(lambda row: torch.norm(row, 1, keepdim=True)),
        "vector_norm-1": lambda z: torch.linalg.vector_norm(z, 1, dim=1, dtype=torch.float64),
        "vector_norm-inf": lambda z: torch.linalg.vector_norm(z, ord=torch.inf, dim=1),
        "linalg.norm-row": each(lambda row: torch.linalg.norm(row, 1)),
        "linalg.norm-matrix": each(lambda row: torch.linalg.norm(row.view(5, 8), 1)),
        "linalg.norm-dims": lambda z: torch.linalg.norm(z.view(6, 5, 8), torch.inf, (1, 2)),
        "linalg.norm-dim": lambda z: torch.linalg.norm(z, torch.inf, 1),
        "matrix_norm-1": lambda z: torch.linalg.matrix_norm(z.view(6, 5, 8), 1),
        "matrix_norm-keep": lambda z: torch.linalg.matrix_norm(z.view(6, 5, 8), -1, keepdim=True),
        "matrix_norm-dims": lambda z: torch.linalg.matrix_norm(z.view(6, 5, 8), torch.inf, (2, 0)),
        "normalize-1": lambda z: F.normalize(z, p=1) * 9,
        "normalize-inf": lambda z: F.normalize(z, torch.inf, dim=1),
        "dist-1": each(lambda row: torch.dist(row, row.flip(0) / 2, 1) / 5),
        "dist-inf": each(lambda row: row.dist(row.flip(0) / 2, p=torch.inf)),
        "pairwise_distance-1": lambda z: F.pairwise_distance(z, z.flip(1) / 2, 1) / 5,
        "pairwise_distance-inf": lambda z: F.pairwise_distance(z, z.flip(1) / 2, torch.inf),
    }
)
# Smooth, although their functions are in the table.
add(
    {
        "norm-2": lambda z: z.norm(dim=1),
        "norm-3": lambda z: torch.norm(z, 3, dim=1),
        "norm-fro": each(lambda row: torch.norm(row.view(5, 8), "fro")),
        "norm-nuc": each(lambda row: torch.norm(row.view(5, 8), "nuc") / 9),
        "matrix_norm-2": lambda z: torch.linalg.matrix_norm(z.view(6, 5, 8), 2),
        "linalg.norm-2": each(lambda row: torch.linalg.norm(row.view(5, 8), 2)),
        "normalize-2": lambda z: F.normalize(z) * 9,
        "pairwise_distance-2": lambda z: F.pairwise_distance(z, z.flip(1) / 2),
        "dist-2": each(lambda row: torch.dist(row, row.flip(0) / 2)),
        "lp_pool1d-1": lambda z: F.lp_pool1d(z, 1, 4),
        "lp_pool1d-2": lambda z: F.lp_pool1d(z, 2, 4),
        "div": lambda z: torch.div(z, 1 + z.square()),
    },
    crosses=False,
)
add({"lp_pool2d-2": lambda z: F.lp_pool2d(z, 2, 2)}, IMAGE, crosses=False)
add({"lp_pool3d-2": lambda z: F.lp_pool3d(z, 2, 2)}, VOLUME, crosses=False)


# --- max-pooling ------------------------------------------------------------------------------


def unbatched(pool: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: torch.stack([pool(one) for one in z])


def both(pool: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
    """The values, and the indices as numbers."""

    def call(z: Tensor) -> Tensor:
        values, indices = pool(z)
        return values * (1 + indices / z[0, 0].numel())

    return call


for n, shape in ((1, LINE), (2, IMAGE), (3, VOLUME)):
    pool, kind = getattr(F, f"max_pool{n}d"), getattr(nn, f"MaxPool{n}d")
    plain, adaptive = getattr(torch, f"max_pool{n}d"), getattr(F, f"adaptive_max_pool{n}d")
    add(
        {
            f"max_pool{n}d": lambda z, f=pool: f(z, 2),
            f"max_pool{n}d-keywords": lambda z, f=pool: f(z, kernel_size=2, stride=1),
            f"max_pool{n}d-padding": lambda z, f=pool: f(z, 3, 2, 1),
            f"max_pool{n}d-dilation": lambda z, f=pool: f(z, 2, 1, dilation=2),
            f"max_pool{n}d-ceil": lambda z, f=pool: f(z, 3, ceil_mode=True),
            f"max_pool{n}d-unbatched": unbatched(lambda z, f=pool: f(z, 2)),
            f"max_pool{n}d-indices": both(lambda z, f=pool: f(z, 2, return_indices=True)),
            f"torch.max_pool{n}d": lambda z, f=plain: f(z, 2),
            f"MaxPool{n}d": kind(2),
            f"MaxPool{n}d-indices": both(kind(2, return_indices=True)),
            f"adaptive_max_pool{n}d": lambda z, f=adaptive: f(z, 2),
            f"adaptive_max_pool{n}d-indices": both(lambda z, f=adaptive: f(z, 2, True)),
            f"adaptive_max_pool{n}d-unbatched": unbatched(lambda z, f=adaptive: f(z, 2)),
        },
        shape,
    )
for n, shape in ((2, IMAGE), (3, VOLUME)):
    fractional = getattr(F, f"fractional_max_pool{n}d")
    add(
        {
            f"fractional_max_pool{n}d": lambda z, f=fractional: F.dropout(
                f(z, 2, output_size=2), 0.4
            ),
            f"fractional_max_pool{n}d-ratio": both(
                lambda z, f=fractional, n=n: f(z, 2, output_ratio=(0.6,) * n, return_indices=True)
            ),
        },
        shape,
    )
add({"unpool": lambda z: F.max_unpool1d(*F.max_pool1d(z, 2, return_indices=True), 2)}, LINE)
