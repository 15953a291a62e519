"""Kinks of functions that work entry by entry."""

import torch
import torch.nn.functional as F
from kinked import IMAGE, ROW, add, on
from torch import Tensor, nn

EDGES = torch.linspace(-1, 1, ROW[1]).double()


def ramp(z: Tensor, low: float, high: float) -> Tensor:
    """Clamp by constant masks, so that its second derivative is there, and 0."""
    inside = ((z > low) & (z < high)).to(z.dtype)
    return z * inside + low * (z <= low) + high * (z >= high)


def masked(z: Tensor) -> Tensor:
    """Some entries minus infinity, as in the scores of an attention."""
    return z.masked_fill(torch.arange(ROW[1]) % 3 == 0, -torch.inf)


add(
    {
        "F.relu": F.relu,
        "torch.relu": torch.relu,
        "Tensor.relu": on("relu"),
        "nn.ReLU": nn.ReLU(),
        "F.relu-inplace": lambda z: F.relu(z, inplace=True),
        "F.relu_": F.relu_,
        "torch.relu_": torch.relu_,
        "Tensor.relu_": on("relu_"),
        "nn.ReLU-inplace": nn.ReLU(inplace=True),
        "relu-keyword": lambda z: F.relu(input=z),
        "relu-infinite": lambda z: masked(z).relu(),
    }
)

# Piecewise linear.
add(
    {
        "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
        "leaky_relu-inplace": lambda z: F.leaky_relu(z, 0.2, inplace=True),
        "leaky_relu_": lambda z: F.leaky_relu_(z, 0.2),
        "relu6": F.relu6,
        "relu6-inplace": nn.ReLU6(inplace=True),
        "hardtanh": lambda z: F.hardtanh(z, -0.5, 0.8),
        "hardtanh-inplace": nn.Hardtanh(inplace=True),
        "hardtanh_": lambda z: F.hardtanh_(z, -0.5, 0.8),
        "hardsigmoid": (lambda z: F.hardsigmoid(3 * z), lambda z: ramp(3 * z, -3, 3) / 6 + 0.5),
        "hardsigmoid-inplace": (
            lambda z: F.hardsigmoid(3 * z, inplace=True),
            lambda z: ramp(3 * z, -3, 3) / 6 + 0.5,
        ),
        "threshold": lambda z: F.threshold(z, 0.3, -1.0),
        "threshold-inplace": lambda z: F.threshold(z, 0.3, -1.0, inplace=True),
        "threshold_": lambda z: F.threshold_(z, 0.3, -1.0),
        "torch.threshold": lambda z: torch.threshold(z, 0.3, -1.0),
        # Dropout after it shows whether the random numbers go on where they should.
        "rrelu": lambda z: F.dropout(F.rrelu(z, training=True), 0.4),
        "rrelu-eval": F.rrelu,
        "rrelu-inplace": lambda z: F.dropout(F.rrelu(z, training=True, inplace=True), 0.4),
        "rrelu_": lambda z: F.dropout(F.rrelu_(z, training=True), 0.4),
        "clamp": lambda z: z.clamp(-0.4, 0.7),
        "clamp-keyword": lambda z: torch.clamp(z, min=-0.4),
        "clamp_": on("clamp_", max=0.7),
        "clip": lambda z: torch.clip(z, -0.4, 0.7),
        "clamp_min": on("clamp_min", -0.2),
        "clamp_max_": on("clamp_max_", 0.2),
        "clamp-tensors": lambda z: z.clamp(EDGES - 0.5, EDGES + 0.5),
        "clamp-learnt": lambda z: z.clamp(z.mean(0), z.mean(0) + 0.5),
        "clamp-keyword-tensor": lambda z: torch.clamp(z, max=z[:1] * 0.5),
        "clamp-infinite": lambda z: masked(z).clamp(min=-0.5),
        "abs": torch.abs,
        "Tensor.abs": on("abs"),
        "abs-operator": abs,
        "absolute": torch.absolute,
        "abs_": on("abs_"),
        "hardshrink": lambda z: F.hardshrink(z, 0.4),
        "softshrink": lambda z: F.softshrink(z, 0.4),
        "maximum": lambda z: torch.maximum(z, z.flip(1) * 0.5),
        "minimum": lambda z: torch.minimum(z, EDGES),
        "minimum-broadcast": lambda z: torch.minimum(z, z[:, :1]),
        "fmax": lambda z: torch.fmax(z, EDGES),
        "fmin": lambda z: z.fmin(EDGES),
        "max-of-two": lambda z: torch.max(z, z.flip(1) * 0.5),
        "Tensor.min-of-two": lambda z: z.min(EDGES),
        "frac": on("frac"),
        "round": lambda z: z + z.round(),
        "round-decimals": lambda z: z * torch.round(z, decimals=1),
        "round_": lambda z: z * (1.0 * z).round_(),
        "floor": lambda z: z * z.floor(),
        "ceil": lambda z: z * torch.ceil(z),
        "trunc": lambda z: z * z.trunc(),
        "sign": lambda z: z * torch.sign(z),
        "sgn": lambda z: z * z.sgn(),
        "angle": lambda z: z * z.angle(),
        "gt_": lambda z: z * (1.0 * z).gt_(0.2),
    }
)
add(
    {
        "nan_to_num": lambda z: torch.nan_to_num(masked(z), neginf=0.5),
        "nan_to_num_": lambda z: masked(z).nan_to_num_(neginf=0.5),
        # The modulus of a complex number is smooth, and must not be taken for the other kind.
        "abs-complex": lambda z: (torch.fft.rfft(0.1 * z) + 5).abs(),
    },
    crosses=False,
)

# Smooth on each side.
add(
    {
        "elu": F.elu,
        "elu-alpha": lambda z: F.elu(z, 0.6),
        "elu-keyword": lambda z: F.elu(z, alpha=1.4),
        "elu-inplace": lambda z: F.elu(z, 0.6, inplace=True),
        "elu_": lambda z: F.elu_(z, 0.6),
        "celu": lambda z: F.celu(z, 0.6),
        "celu-inplace": nn.CELU(0.6, inplace=True),
        "torch.celu": lambda z: torch.celu(z, alpha=0.4),
        "torch.celu_": lambda z: torch.celu_(z, 0.6),
        "selu": F.selu,
        "torch.selu": torch.selu,
        "selu-inplace": nn.SELU(inplace=True),
        "torch.selu_": torch.selu_,
        "prelu": nn.PReLU(init=0.3),
        "prelu-channels": nn.PReLU(ROW[1], init=0.3),
        "torch.prelu": lambda z: torch.prelu(z, z[0, :1]),
        "hardswish": lambda z: F.hardswish(3 * z),
        "hardswish-inplace": lambda z: F.hardswish(3 * z, inplace=True),
        "hardswish_": lambda z: [y := 3 * z, torch._C._nn.hardswish_(y)] and y,
        "softsign": F.softsign,
    }
)
add({"prelu-image": nn.PReLU(3, init=0.3)}, IMAGE)
