"""The computation after the outputs, and its two kinds where these are the logits of a large linear
head, which the perturbed passes form a few rows at a time (``curvature/head_loop.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from seht.curvature import head_loop
from seht.curvature.head_loop import HeadGradient, LoopedRows
from seht.curvature.unformed import Head, KeepLogits, Unformed
from seht.replay.passes import Passes
from seht.task import Directions
from seht.tensors.gradients import Gradient, add

Probed = tuple[Tensor, Gradient, list[Tensor]]
"""The results of one probe: the value, a gradient in the leaves, cotangents of the centre."""


class OutputSide(ABC):
    """The computation after the outputs: the curvature, and gradients pulled back from it."""

    _passes: Passes

    @abstractmethod
    def probe(self, sigma: Directions, e: Tensor, *, alone: bool = False) -> Probed:
        """One probe; ``alone`` without anything of the loss's own gradient."""

    @abstractmethod
    def roots(self) -> list[Tensor]:
        """The tensors of a pass at the centre that its cotangents belong to."""

    def ends(self) -> list[Tensor]:
        """The same in the centre's own graph, where that is kept."""
        return self.roots()

    def pulled(self, pulls: list[Tensor]) -> Gradient:
        """The gradient that cotangents of the centre give."""
        return self._passes.pull_centre(self.ends(), pulls) if pulls else []

    @abstractmethod
    def slopes(self) -> tuple[Gradient, list[Tensor]]:
        """The gradient of the loss: in leaves behind the roots, and its cotangents."""

    @abstractmethod
    def forget(self) -> None:
        """No other probe will come."""

    def with_slope(self, total: Gradient, pulls: list[Tensor]) -> tuple[Gradient, list[Tensor]]:
        """Add what the loss, differentiated in the last pass, does not give by itself."""
        return total, pulls


class WaitingHead(OutputSide):
    """A linear head whose logits at the centre are kept, for the user's backward pass."""

    def __init__(self, passes: Passes) -> None:
        assert passes.boundary is not None and passes.terms is not None
        assert passes.losses is not None
        self._passes, self._boundary, self._terms = passes, passes.boundary, passes.terms
        self._kept, self._ends = passes.losses.kept, passes.losses.ends
        self._probed = False

    def roots(self) -> list[Tensor]:
        """The tensors whose gradient stands for that of the trace in the logits."""
        return self._ends

    def slopes(self) -> tuple[Gradient, list[Tensor]]:
        """All of it."""
        return self._passes.leaves.pull([self._passes.loss], None, keep=True), []

    def forget(self) -> None:
        """The user's backward pass is still to come."""

    def probe(self, sigma: Directions, e: Tensor, *, alone: bool = False) -> Probed:
        """A few rows at a time. What flows back from the logits is added up there."""
        first = alone or not self._probed
        if first:
            for kept in self._kept:
                kept.straighten()
        self._probed = not alone
        with self._passes.at(sigma, e):
            there = HeadGradient(head_of(self._boundary.outputs))
            value = torch.stack(
                [
                    head_loop.run(term, kept, there, None, e, 0.0)
                    for term, kept in zip(self._terms, self._kept, strict=True)
                ]
            ).sum()
            part = through(self._passes, there)
        return value, part, [value.new_full((), float(first)) for _ in self._kept]


class LoopedHead(OutputSide):
    """A linear head whose gradient at the centre is taken with that of the trace."""

    def __init__(self, passes: Passes, weight: float) -> None:
        assert passes.boundary is not None and passes.terms is not None
        assert passes.losses is not None
        self._passes, self._boundary, self._losses = passes, passes.boundary, passes.losses
        self._terms = list(zip(passes.terms, passes.losses.kept, strict=True))
        self._weight = weight
        self._head = head_of(self._boundary.outputs)
        self._apart: HeadGradient | None = None
        """The loss's own gradient, where its share is not known in the beginning."""
        self._pending = True
        self._left = passes.task.estimator.probes
        """The probes that are still to come."""
        self._states = False
        """Whether the hidden states depend on anything."""

    def roots(self) -> list[Tensor]:
        """The hidden states, if they require a gradient."""
        hidden = head_of(self._boundary.outputs).hidden
        return [hidden] if hidden.requires_grad else []

    def ends(self) -> list[Tensor]:
        """The centre's graph was dropped."""
        return []

    def pulled(self, pulls: list[Tensor]) -> Gradient:
        """The gradient from cotangents of the hidden states."""
        with self._passes.at(None):
            return _pulled(self._passes, self.roots(), pulls)

    def slopes(self) -> tuple[Gradient, list[Tensor]]:
        """Through the head."""
        centre = self._centre(self._states)
        for term, kept in self._terms:
            head_loop.slopes(term, kept, centre)
        return self._passes.leaves.by_place(centre.leaves()), centre.cotangents()

    def forget(self) -> None:
        """The centre's logits."""
        for _, kept in self._terms:
            kept.forget()

    def with_slope(self, total: Gradient, pulls: list[Tensor]) -> tuple[Gradient, list[Tensor]]:
        """The last pass takes the logits' losses for constants."""
        self._losses.settle()
        if self._apart is None:
            return total, pulls
        total = add(total, self._passes.leaves.by_place(self._apart.leaves()))
        own = self._apart.cotangents()
        return total, [p + s for p, s in zip(pulls, own, strict=False)] or own

    def probe(self, sigma: Directions, e: Tensor, *, alone: bool = False) -> Probed:
        """A few rows at a time."""
        passes, apart, slope = self._passes, None, 0.0
        with passes.at(sigma, e):
            head = head_of(self._boundary.outputs)
            self._states = head.hidden.requires_grad
            there, centre = HeadGradient(head), self._centre(self._states)
            if self._pending and not alone:
                self._pending = False
                if self._weight:
                    slope = 1 / self._weight
                else:
                    self._apart = apart = self._centre(self._states)
            if not alone:
                self._left -= 1
            values = []
            for term, kept in self._terms:
                near = LoopedRows(kept, centre, last=self._left == 0)
                values.append(head_loop.run(term, near, there, None, e, slope, apart))
                near.close(term)
            value = torch.stack(values).sum()
            part = through(passes, there)
        return value, add(part, passes.leaves.by_place(centre.leaves())), centre.cotangents()

    def _centre(self, states: bool) -> HeadGradient:
        head, at_centre = self._head, self._passes.weights.at_centre
        bias = None if head.bias is None else at_centre(head.bias)
        return HeadGradient(head, at_centre(head.weight), bias, states=states)


def head_of(outputs: list[Tensor]) -> Head:
    """The head whose logits a pass has not formed."""
    if len(outputs) != 1 or not isinstance(outputs[0], Unformed) or outputs[0].looks:
        raise KeepLogits
    return outputs[0].head


def through(passes: Passes, head: HeadGradient) -> Gradient:
    """The gradient in all leaves, of a head and before it."""
    part = _pulled(passes, head.states(), head.cotangents())
    return add(part, passes.leaves.by_place(head.leaves()))


def _pulled(passes: Passes, roots: list[Tensor], pulls: list[Tensor]) -> Gradient:
    return passes.leaves.pull(roots, pulls, keep=passes.older) if roots else []
