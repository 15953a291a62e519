"""Kinks of functions of lists of tensors (``torch._foreach_*``)."""

import torch
from kinked import ROW, add
from torch import Tensor

EDGES = torch.linspace(-1, 1, ROW[1]).double()


def lists(name: str, *args, **kwargs):
    """The function of two tensors, its results added up."""

    def call(z: Tensor) -> Tensor:
        parts = getattr(torch, f"_foreach_{name}")([z, z.flip(1) * 0.5], *args, **kwargs)
        return z + z * parts[0] + parts[1]

    return call


def written(name: str, *args):
    """The same in place."""

    def call(z: Tensor) -> Tensor:
        parts = [1 * z, z.flip(1) * 0.5]
        out = getattr(torch, f"_foreach_{name}_")(parts, *args)
        return z + z * out[0] + parts[1]

    return call


def plain(name: str, *args):
    """The same by the function of one tensor: not every one of a list has a second derivative."""

    def call(z: Tensor) -> Tensor:
        parts = [getattr(torch, name)(t, *args) for t in (z, z.flip(1) * 0.5)]
        return z + z * parts[0] + parts[1]

    return call


for name in ("abs", "ceil", "floor", "frac", "round", "sign", "trunc"):
    add(
        {
            f"foreach_{name}": (lists(name), plain(name)),
            f"foreach_{name}-inplace": (written(name), plain(name)),
        }
    )
for name in ("clamp_max", "clamp_min", "maximum", "minimum"):
    bound = torch.tensor(0.2).double()
    add(
        {
            f"foreach_{name}": (lists(name, 0.2), plain(name, bound)),
            f"foreach_{name}-scalars": (lists(name, [0.2, 0.2]), plain(name, bound)),
            f"foreach_{name}-tensors": (lists(name, [EDGES, EDGES]), plain(name, EDGES)),
        }
    )
    if name.startswith("clamp"):  # the others have no derivative in place
        add({f"foreach_{name}-inplace": (written(name, 0.2), plain(name, bound))})


def rows(name: str, *args):
    """Numbers, one of each row."""
    return lambda z: torch.stack(getattr(torch, f"_foreach_{name}")(list(z), *args))


def each(name: str, *args):
    return lambda z: torch.stack([getattr(torch, name)(row, *args) for row in z])


for order in (1, torch.inf):
    add({f"foreach_norm-{order}": (rows("norm", order), each("norm", order))})
add({"foreach_norm-2": (rows("norm"), each("norm"))}, crosses=False)
add({"foreach_max": (rows("max"), each("max"))})
