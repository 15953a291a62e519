"""Random small networks for property tests (hypothesis strategies)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

ACTIVATIONS = {
    "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU, "softplus": nn.Softplus,
    "relu": nn.ReLU, "leaky": nn.LeakyReLU, "elu": nn.ELU,
}  # fmt: skip
NORMS = ["none", "batch", "batch-eval", "layer", "instance", "group", "rms"]
LOSSES = {
    "cross_entropy": lambda z, y, t: F.cross_entropy(z, y),
    "smoothed": lambda z, y, t: F.cross_entropy(z, y, label_smoothing=0.2),
    "mse": lambda z, y, t: F.mse_loss(z, t),
    "bce": lambda z, y, t: F.binary_cross_entropy_with_logits(z, t.sigmoid()),
    "huber": lambda z, y, t: F.huber_loss(z, t, delta=0.5),
}


@dataclass(frozen=True)
class Network:
    """What hypothesis prints when a property fails: enough to build the network again."""

    layers: tuple[tuple[str, int, str, str], ...]
    """(linear or conv, width, norm, activation) for each hidden layer."""
    inputs: int
    classes: int
    examples: int
    loss: str
    seed: int

    @property
    def magnification(self) -> float:
        """By what norms may enlarge rounding: each divides by sqrt(eps) where nothing varies."""
        norms = [norm for _, _, norm, _ in self.layers if norm not in ("none", "batch-eval")]
        return 1e-5 ** (-len(norms) / 2)

    def build(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Callable[[], Tensor]]:
        """The model, and the closure that computes its loss on its batch."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            conv = self.layers[0][0] == "conv"
            x = torch.randn(self.examples, self.inputs, *([4] if conv else []))
            model, channels = nn.Sequential(), self.inputs
            for kind, width, norm, activation in self.layers:
                layer = (
                    nn.Conv1d(channels, width, 2) if kind == "conv" else nn.Linear(channels, width)
                )
                model.extend([layer, *norm_layer(norm, width, conv), ACTIVATIONS[activation]()])
                channels = width
            if conv:
                model.append(nn.Flatten())
            model.append(nn.Linear(model(x).flatten(1).shape[1], self.classes))
            for parameter in model.parameters():
                parameter.data.add_(0.3 * torch.randn_like(parameter))
            y = torch.arange(self.examples) % self.classes
            t = torch.randn(self.examples, self.classes).to(dtype)
        model, x = model.to(dtype), x.to(dtype)
        return model, lambda: LOSSES[self.loss](model(x), y, t)


def norm_layer(name: str, width: int, conv: bool) -> list[nn.Module]:
    if name.startswith("batch"):
        return [nn.BatchNorm1d(width).train(name == "batch")]
    if name == "group":
        return [nn.GroupNorm(1, width)]
    if name == "instance":
        return [nn.InstanceNorm1d(width, affine=True)] if conv else []
    if name in ("layer", "rms") and not conv:
        return [nn.LayerNorm(width) if name == "layer" else nn.RMSNorm(width)]
    return []


@st.composite
def networks(
    draw: st.DrawFn, max_depth: int = 3, max_width: int = 4, norms: Sequence[str] = NORMS
) -> Network:
    kind = draw(st.sampled_from(["linear", "conv"]))
    depth = draw(st.integers(1, max_depth if kind == "linear" else min(max_depth, 2)))
    layers = tuple(
        (
            kind,
            draw(st.integers(1, max_width)),
            draw(st.sampled_from(norms)),
            draw(st.sampled_from(sorted(ACTIVATIONS))),
        )
        for _ in range(depth)
    )
    return Network(
        layers,
        inputs=draw(st.integers(1, 3)),
        classes=draw(st.integers(2, 3)),
        examples=draw(st.integers(3, 5)),
        loss=draw(st.sampled_from(sorted(LOSSES))),
        seed=draw(st.integers(0, 2**20)),
    )
