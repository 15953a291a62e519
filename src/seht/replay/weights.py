"""The drawn weights: moved along a probe, and put back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor

from seht.task import Directions, Probe


class Weights:
    """The drawn tensors: moved along a probe in place, and restored bit for bit.

    In place and past the version counter, so that every use of a weight moves (tied, captured,
    compiled), the leaves of a perturbed graph are the leaves of the centre's, and the centre's
    pending backward finds its saved weights as it left them.
    """

    def __init__(self, weights: dict[str, Tensor], still: Set[str] = frozenset()) -> None:
        self._weights = weights
        self._saved: dict[str, Tensor] = {}
        self.still = still
        """Tensors that are not moved, because every example has a direction of its own."""
        self._away = False

    def step(self, sigma: Directions, kappa: float) -> Tensor:
        """One e for all drawn tensors, relative to weights and probe: kappa |w| / |sigma|.

        It stays on the device, as every number of the engine does: nothing waits for the host.
        """
        size = norm(self._weights.values())
        if isinstance(sigma, Probe) and sigma.signs:  # every entry is 1 or -1: nothing to look at
            return step_size(size, sum(w.numel() for w in self._weights.values()) ** 0.5, kappa)
        return step_size(size, norm(sigma[n] for n in self._weights), kappa)

    def lengths(self, sigma: Directions) -> tuple[Tensor, Tensor]:
        """The norms of each drawn tensor and of its part of the probe."""
        sizes = torch.stack([norm([w]) for w in self._weights.values()])
        return sizes, torch.stack([norm([sigma[n]]) for n in self._weights])

    def within(self, sigma: Directions, reach: dict[str, float]) -> Tensor:
        """The largest e at which no tensor moves further than its reach, relative to its size."""
        sizes, parts = self.lengths(sigma)
        most = sizes.new_tensor([reach.get(n, math.inf) for n in self._weights])
        each = torch.where((sizes > 0) & (parts > 0), most * sizes / parts, math.inf)
        return each.min()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Around several passes: the weights are restored once, at the end of the block.

        In between nobody may look at them.
        """
        self._away = True
        try:
            yield
        finally:
            self._away = False
            self._restore()

    @contextmanager
    def moved(self, sigma: Directions, step: Tensor | float) -> Iterator[None]:
        """The weights are w + step * sigma while the block runs."""
        if not self._saved:
            self._saved = {
                name: w.detach().clone()
                for name, w in self._weights.items()
                if name not in self.still
            }
        try:
            self._move(sigma, step, self._saved)
            yield
        finally:
            if not self._away:
                self._restore()

    def _restore(self) -> None:
        for name, saved in self._saved.items():
            self._weights[name].data.copy_(saved)

    @contextmanager
    def back(self, sigma: Directions, step: Tensor | float, names: Iterable[str]) -> Iterator[None]:
        """Inside :meth:`moved`: some of the weights are where they were while the block runs."""
        names = [name for name in names if name in self._saved]
        for name in names:
            self._weights[name].data.copy_(self._saved[name])
        yield
        self._move(sigma, step, names)

    def at_centre(self, weight: Tensor) -> Tensor:
        """Inside :meth:`moved`: a weight of the model as it was."""
        names = (name for name in self._saved if self._weights[name] is weight)
        return next((self._saved[name] for name in names), weight.detach())

    def _move(self, sigma: Directions, step: Tensor | float, names: Iterable[str]) -> None:
        steps: dict[torch.dtype, Tensor] = {}
        for name in names:
            w, part = self._weights[name].data, sigma[name]
            if w.dtype not in steps:
                steps[w.dtype] = torch.as_tensor(step, dtype=w.dtype, device=w.device)
            if part.dtype != w.dtype:  # signs of a byte each
                part = w.copy_(part)
            torch.addcmul(self._saved[name], part, steps[w.dtype], out=w)


def step_size(size: Tensor, length: Tensor | float, kappa: float) -> Tensor:
    """kappa |w| / |sigma|; of 1 where the weights, or the entries that SEHT-D drew, are all 0."""
    if isinstance(length, Tensor):
        length = torch.where(length > 0, length, 1.0)
    return kappa * torch.where(size > 0, size, 1.0) / length


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """The common norm of several tensors."""
    wide = [t.detach() if t.is_floating_point() else t.detach().float() for t in tensors]
    return torch.stack([n.double() for n in torch._foreach_norm(wide)]).norm()
