"""How much worse a model becomes when its weights are rounded or disturbed.

Both act on the weights of two or more dimensions; biases and norms stay as they are. The weights
are as before when it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from seht.lab.data.examples import generator
from seht.measure.robustness import rounded

BITS = (8, 4, 3)
NOISE = (1, 3, 10)
"""Per cent of each tensor's root mean square."""


def robustness(model: nn.Module, measure: Callable[[], float], seed: int) -> dict[str, float]:
    """The measure by what was done to the weights: ``8bit`` ... ``noise10``.

    What is not finite is left out.
    """
    found = {}
    for bits in BITS:
        with changed(model, lambda w, bits=bits: rounded(w, bits)):  # type: ignore[misc]
            found[f"{bits}bit"] = measure()
    for share in NOISE:
        draw = generator(seed, "weight noise", share)
        with changed(model, lambda w, draw=draw, share=share: disturbed(w, share / 100, draw)):  # type: ignore[misc]
            found[f"noise{share}"] = measure()
    return {name: value for name, value in found.items() if math.isfinite(value)}


@contextmanager
def changed(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Every weight of two or more dimensions changed, for a while."""
    weights = [weight for weight in model.parameters() if weight.dim() >= 2]
    kept = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                weight.copy_(change(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)


def disturbed(weight: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """With Gaussian noise whose deviation is that share of the tensor's root mean square."""
    noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight)
    return weight + share * weight.square().mean().sqrt() * noise
