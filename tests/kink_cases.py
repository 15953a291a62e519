"""Functions with kinks, in every spelling that reaches a function mode as another object.

A case is a function ``f(z)`` of a hidden layer; :func:`problem` puts it into a small network. Where
autograd has no second derivative ``truth`` is the same function composed of operations that have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROW, LINE, IMAGE, VOLUME = (6, 40), (4, 3, 20), (3, 3, 6, 6), (2, 3, 4, 4, 4)


@dataclass(frozen=True)
class Kink:
    id: str
    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...] = ROW
    truth: Callable[[Tensor], Tensor] | None = None
    family: str = ""

    def __str__(self) -> str:
        return self.id


class Hidden(nn.Module):
    """z, smooth in its weights, of the wanted shape; two weights are probed."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shape, self.function = shape, function
        size = torch.Size(shape[1:]).numel()
        self.first, self.second = nn.Linear(3, 5).double(), nn.Linear(5, size).double()
        if isinstance(function, nn.Module):
            function.double()

    def forward(self, x: Tensor) -> Tensor:
        z = 2.5 * self.second(self.first(x).tanh()).view(self.shape)
        return self.function(z)


def problem(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...] = ROW
) -> tuple[Hidden, Callable[[], Tensor], list[Tensor]]:
    """``(model, closure, leaves)``, the same at every call."""
    torch.manual_seed(11)
    model = Hidden(shape, function)
    x = torch.randn(shape[0], 3).double().requires_grad_()

    def closure() -> Tensor:
        y = model(x)
        weights = torch.linspace(0, 9, y.numel(), dtype=y.dtype).cos().view(y.shape)
        return (y * weights + (y + 0.3).sin()).mean()

    return model, closure, [*model.parameters(), x]


CASES: list[Kink] = []


def add(family: str, cases: dict[str, Any], shape: tuple[int, ...] = ROW) -> None:
    for id, case in cases.items():
        function, truth = case if isinstance(case, tuple) else (case, None)
        CASES.append(Kink(id, function, shape, truth, family))


def on(name: str, *args: Any, **kwargs: Any) -> Callable[[Tensor], Any]:
    """The method of that name."""
    return lambda z: getattr(z, name)(*args, **kwargs)


def ramp(z: Tensor, low: float, high: float) -> Tensor:
    """Clamp by constant masks: its second derivatives are 0, as they should be."""
    inside = ((z > low) & (z < high)).to(z.dtype)
    return z * inside + low * (z <= low) + high * (z >= high)


# --- elementwise ------------------------------------------------------------------------------

add(
    "relu",
    {
        "F.relu": F.relu,
        "torch.relu": torch.relu,
        "Tensor.relu": on("relu"),
        "nn.ReLU": nn.ReLU(),
        "F.relu-inplace": lambda z: F.relu(z, inplace=True),
        "torch.relu_": torch.relu_,
        "F.relu_": F.relu_,
        "Tensor.relu_": on("relu_"),
        "nn.ReLU-inplace": nn.ReLU(inplace=True),
        "relu-keyword": lambda z: F.relu(input=z),
    },
)

CORNERS = torch.linspace(-1, 1, 40).double()
add(
    "linear",
    {
        "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
        "leaky_relu-inplace": lambda z: F.leaky_relu(z, 0.2, inplace=True),
        "leaky_relu_": lambda z: F.leaky_relu_(z, 0.2),
        "relu6": F.relu6,
        "relu6-inplace": nn.ReLU6(inplace=True),
        "hardtanh": lambda z: F.hardtanh(z, -0.5, 0.8),
        "hardtanh-inplace": nn.Hardtanh(inplace=True),
        "hardtanh_": lambda z: F.hardtanh_(z, -0.5, 0.8),
        "hardsigmoid": (F.hardsigmoid, lambda z: ramp(z, -3, 3) / 6 + 0.5),
        "hardsigmoid-inplace": (nn.Hardsigmoid(True), lambda z: ramp(z, -3, 3) / 6 + 0.5),
        "threshold": lambda z: F.threshold(z, 0.3, -1.0),
        "threshold-inplace": lambda z: F.threshold(z, 0.3, -1.0, inplace=True),
        "threshold_": lambda z: F.threshold_(z, 0.3, -1.0),
        "torch.threshold": lambda z: torch.threshold(z, 0.3, -1.0),
        "rrelu": lambda z: F.rrelu(z, training=True) + F.dropout(z, 0.4),
        "rrelu-eval": lambda z: F.rrelu(z),
        "rrelu_": lambda z: F.rrelu_(z, training=True).clone() + F.dropout(z, 0.4),
        "clamp": lambda z: z.clamp(-0.4, 0.7),
        "clamp-keywords": lambda z: torch.clamp(z, min=-0.4),
        "clamp_": on("clamp_", max=0.7),
        "clip": lambda z: torch.clip(z, -0.4, 0.7),
        "clamp_min": on("clamp_min", -0.2),
        "clamp_max_": on("clamp_max_", 0.2),
        "clamp-tensors": lambda z: z.clamp(CORNERS - 0.5, CORNERS + 0.5),
        "clamp-learnt": lambda z: z.clamp(z.mean(0), z.mean(0) + 0.5),
        "clamp-keyword-tensor": lambda z: torch.clamp(z, max=z[:1] * 0.5),
        "abs": torch.abs,
        "Tensor.abs": on("abs"),
        "abs-operator": abs,
        "absolute": torch.absolute,
        "abs_": on("abs_"),
        "hardshrink": lambda z: F.hardshrink(z, 0.4),
        "softshrink": lambda z: F.softshrink(z, 0.4),
        "tanhshrink": F.tanhshrink,
        "maximum": lambda z: torch.maximum(z, z.flip(1) * 0.5),
        "minimum": lambda z: torch.minimum(z, CORNERS),
        "minimum-broadcast": lambda z: torch.minimum(z, z[:, :1]),
        "fmax": lambda z: torch.fmax(z, CORNERS),
        "fmin": lambda z: z.fmin(CORNERS),
        "max-of-two": lambda z: torch.max(z, z.flip(1) * 0.5),
        "Tensor.min-of-two": lambda z: z.min(CORNERS),
        "frac": on("frac"),
        "nan_to_num": lambda z: torch.nan_to_num(z.relu() / z, nan=0.0) * z,
        "round": lambda z: z + z.round(),
        "floor": lambda z: z * z.floor(),
        "ceil": lambda z: z * torch.ceil(z),
        "trunc": lambda z: z * z.trunc(),
        "sign": lambda z: z * z * torch.sign(z),
        "sgn": lambda z: z * z * z.sgn(),
    },
)
add(
    "sided",
    {
        "elu": F.elu,
        "elu-alpha": lambda z: F.elu(z, 0.6),
        "elu-keyword": lambda z: F.elu(z, alpha=1.4),
        "elu-inplace": lambda z: F.elu(z, 0.6, inplace=True),
        "elu_": lambda z: F.elu_(z, 0.6),
        "celu": lambda z: F.celu(z, 0.6),
        "celu-inplace": nn.CELU(0.6, inplace=True),
        "torch.celu": lambda z: torch.celu(z, alpha=1.7),
        "torch.celu_": lambda z: torch.celu_(z, 0.6),
        "selu": F.selu,
        "torch.selu": torch.selu,
        "selu-inplace": nn.SELU(inplace=True),
        "torch.selu_": torch.selu_,
        "prelu": nn.PReLU(init=0.3),
        "prelu-channels": nn.PReLU(40, init=0.3),
        "torch.prelu": lambda z: torch.prelu(z, z[0, :1]),
        "hardswish": F.hardswish,
        "hardswish-inplace": nn.Hardswish(inplace=True),
        "hardswish_": torch._C._nn.hardswish_,
        "softsign": F.softsign,
    },
)
add("sided", {"prelu-image": nn.PReLU(3, init=0.3)}, IMAGE)

# --- places -----------------------------------------------------------------------------------

def tied(z: Tensor) -> Tensor:
    """Every second maximum of a row is shared by two entries, whatever the weights."""
    top = z[:, :1].abs() + 3
    return torch.cat([z[:, 1:2], top, z[:, 2:4], top, z[:, 4:]], 1)


def soft_tied(z: Tensor) -> Tensor:
    return tied(z).amax(1)


add(
    "indexed",
    {
        "max-dim": lambda z: z.max(1).values,
        "max-dim-keyword": lambda z: torch.max(z, dim=0)[0],
        "max-keepdim": lambda z: z.max(1, keepdim=True)[0] * z,
        "max-negative-dim": lambda z: z.max(dim=-1, keepdim=True).values * z,
        "min-dim": lambda z: torch.min(z, 1)[0],
        "max-all": lambda z: z.max() * z,
        "min-all": lambda z: torch.min(z) * z,
        "median": lambda z: z.median() * z,
        "median-dim": lambda z: z.median(1, keepdim=True).values * z,
        "nanmedian": lambda z: torch.nanmedian(z, 0).values,
        "sort": lambda z: z.sort(1).values * CORNERS,
        "sort-default": lambda z: torch.sort(z, descending=True)[0] * CORNERS,
        "sort-stable": lambda z: torch.sort(z, stable=True, dim=0).values * CORNERS,
        "topk": lambda z: z.topk(5).values,
        "topk-dim": lambda z: torch.topk(z, 3, dim=0, largest=False)[0],
        "kthvalue": lambda z: z.kthvalue(7).values,
        "kthvalue-dim": lambda z: torch.kthvalue(z, 2, 0, keepdim=True)[0] * z,
        "mode": lambda z: z.mode(1).values,
        "cummax": lambda z: z.cummax(1).values,
        "cummin": lambda z: torch.cummin(z, dim=0)[0],
        "max-indices": lambda z: z.max(1).indices.unsqueeze(1) / 40 * z,
        "sort-indices": lambda z: z.gather(1, z.sort(1).indices.flip(0)) * CORNERS,
    },
)
add(
    "reduced",
    {
        "amax": lambda z: z.amax(1),
        "amax-keyword": lambda z: torch.amax(z, dim=0, keepdim=True) * z,
        "amax-dims": lambda z: z.amax((0, 1)) * z,
        "amax-all": lambda z: z.amax() * z,
        "amin": lambda z: torch.amin(z, 1, True) * z,
        "amax-ties": soft_tied,
        "max-all-ties": lambda z: tied(z).max() * z,
        "max-dim-ties": lambda z: tied(z).max(1).values,
    },
)

# --- max-pooling ------------------------------------------------------------------------------


def unbatched(pool: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: torch.stack([pool(one) for one in z])


def both(pool: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
    """The values, and the indices as numbers."""

    def call(z: Tensor) -> Tensor:
        values, indices = pool(z)
        return values * (1 + indices / 10)

    return call


for n, shape in ((1, LINE), (2, IMAGE), (3, VOLUME)):
    pool = getattr(F, f"max_pool{n}d")
    kind = getattr(nn, f"MaxPool{n}d")
    adaptive = getattr(F, f"adaptive_max_pool{n}d")
    add(
        "pooled",
        {
            f"max_pool{n}d": lambda z, f=pool: f(z, 2),
            f"max_pool{n}d-keywords": lambda z, f=pool: f(z, kernel_size=2, stride=1),
            f"max_pool{n}d-padding": lambda z, f=pool: f(z, 3, 2, 1),
            f"max_pool{n}d-dilation": lambda z, f=pool: f(z, 2, 1, dilation=2),
            f"max_pool{n}d-ceil": lambda z, f=pool: f(z, 3, ceil_mode=True),
            f"max_pool{n}d-unbatched": unbatched(lambda z, f=pool: f(z, 2)),
            f"max_pool{n}d-indices": both(lambda z, f=pool: f(z, 2, return_indices=True)),
            f"torch.max_pool{n}d": lambda z, f=getattr(torch, f"max_pool{n}d"): f(z, 2),
            f"MaxPool{n}d": kind(2),
            f"MaxPool{n}d-indices": both(kind(2, return_indices=True)),
            f"adaptive_max_pool{n}d": lambda z, f=adaptive: f(z, 2),
            f"adaptive_max_pool{n}d-indices": both(lambda z, f=adaptive: f(z, 2, True)),
            f"adaptive_max_pool{n}d-unbatched": unbatched(lambda z, f=adaptive: f(z, 2)),
        },
        shape,
    )
    if n > 1:
        fractional = getattr(F, f"fractional_max_pool{n}d")
        add(
            "pooled",
            {
                f"fractional_max_pool{n}d": lambda z, f=fractional: (
                    f(z, 2, output_size=2).repeat(*[1] * 2, *[z.shape[-1] // 2] * (z.dim() - 2))
                    + F.dropout(z, 0.4)
                ),
                f"fractional_max_pool{n}d-ratio": both(
                    lambda z, f=fractional: f(z, 2, output_ratio=(0.6,) * (z.dim() - 2), return_indices=True)
                ),
            },
            shape,
        )
