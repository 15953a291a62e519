r"""Cross-entropy of logits that are not formed, as one function of hidden states and head.

The rows' logits are kept for its gradient, and nothing else of their size: not the
log-probabilities, nor a gradient in either, which a plain step has besides. For the Gauss-Newton
trace the gradient of the trace in the logits lies beside them, and both flow back through the head
together.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.curvature.cross_entropy import CrossEntropy, at_hand
from seht.curvature.head_loop import HeadGradient, KeptRows
from seht.curvature.unformed import Head, KeepLogits, Unformed
from seht.operators.rules import first
from seht.tensors.gradients import once

_ARGUMENTS = inspect.signature(F.cross_entropy)


@dataclass(frozen=True)
class RowLosses:
    """Cross-entropy of rows of unformed logits with class labels: one call."""

    logits: Unformed
    target: Tensor
    weight: Tensor | None
    ignored: int
    reduction: str
    smoothing: float

    @classmethod
    def match(cls, args: Any, kwargs: dict[str, Any]) -> RowLosses | None:
        """The losses of a call of ``F.cross_entropy``, if it is of this kind; otherwise None."""
        if not isinstance(first(args, kwargs), Unformed):
            return None
        given = _ARGUMENTS.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        logits, target, weight = call["input"], call["target"], call["weight"]
        if logits.looks:
            return None
        dim = min(1, logits.dim() - 1)
        shape = [size for d, size in enumerate(logits.shape) if d != dim]
        if (
            logits.rows.dim != dim
            or type(target) is not Tensor
            or target.is_floating_point()
            or list(target.shape) != shape
            or (weight is not None and weight.requires_grad)
            or call["reduction"] not in ("mean", "sum", "none")
            or not (call["size_average"] is None and call["reduce"] is None)
        ):
            return None
        return cls(
            logits, target.flatten(), weight,
            call["ignore_index"], call["reduction"], call["label_smoothing"],
        )  # fmt: skip

    @property
    def shape(self) -> torch.Size:
        """The shape of what the call returns."""
        left = [size for d, size in enumerate(self.logits.shape) if d != self.logits.rows.dim]
        return torch.Size(left if self.reduction == "none" else ())

    @property
    def rows(self) -> Tensor:
        """The rows of the hidden states."""
        return self.logits.rows.places.flatten().to(self.target.device)

    @property
    def _counted(self) -> Tensor:
        return self.target != self.ignored

    @property
    def _labels(self) -> Tensor:
        return self.target.where(self._counted, 0)  # what is ignored need not be a class

    @torch.no_grad()
    def form(self) -> Tensor:
        """The logits of these rows, as precise as the head, whatever autocast the loss is under."""
        head = self.logits.head
        with torch.autocast(head.hidden.device.type, enabled=False):
            return F.linear(head.hidden.flatten(0, -2)[self.rows], head.weight, head.bias)

    @torch.no_grad()
    def each(self, kept: KeptRows) -> Tensor:
        """The loss of every row, from its logits."""
        everything = slice(0, len(self.target))
        z = kept.logits(everything, self.rows)
        found = z.new_empty(len(z))
        for near, own in at_hand(everything, z):
            found[own] = F.cross_entropy(
                z[near], self.target[own], weight=self.weight, ignore_index=self.ignored,
                reduction="none", label_smoothing=self.smoothing,
            )  # fmt: skip
        return found

    def reduced(self, each: Tensor) -> Tensor:
        """The rows' losses, reduced as the call asks."""
        if self.reduction == "none":
            return each.view(self.shape)
        if self.reduction == "sum":
            return each.sum()
        kept = self._counted
        if self.weight is None:
            return each.sum() / kept.sum()
        return each.sum() / self.weight[self._labels].where(kept, 0).sum()

    def term(self, slope: Tensor) -> CrossEntropy:
        """The curvature, given the derivative of the whole loss in the rows' losses."""
        kept, labels = self._counted, self._labels
        classes = self.logits.shape[self.logits.rows.dim]
        size = slope.where(kept, 0).unsqueeze(1)
        weight = slope.new_ones(classes) if self.weight is None else self.weight.to(slope.dtype)
        own = (1 - self.smoothing) * size * weight[labels].unsqueeze(1)
        share, even = own, tuple[tuple[Tensor, Tensor], ...]()
        if self.smoothing:
            even = ((-self.smoothing / classes * size, weight),)
            share = own + self.smoothing / classes * weight.sum() * size
        return CrossEntropy(0, -1, self.rows, share, ((labels.unsqueeze(1), -own),), (), even)


class Stage:
    """How far an estimate is: all that nodes of the graph know of it. Did they know more, which in
    turn knows the nodes, the hidden states of a step could be lost to Python's collector for good.
    """

    def __init__(self) -> None:
        self.closed = False
        """Whether the centre's closure has run to its end."""
        self.settled = False
        """Whether the gradient of the losses was taken."""

    def close(self) -> None:
        """The closure has run to its end."""
        self.closed = True

    def settle(self) -> None:
        """Their gradient has been taken."""
        self.settled = True


class HeadLosses(torch.autograd.Function):
    """The losses of a call's rows, and a number whose gradient stands for that of the trace."""

    @staticmethod
    def forward(
        ctx: Any,
        stage: Stage,
        call: RowLosses,
        kept: KeptRows,
        logits: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Each row's loss, and 0."""
        ctx.stage, ctx.call, ctx.kept = stage, call, kept
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias)
        each = call.each(kept)
        return each, each.new_zeros(())

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, bent: Tensor | None) -> Any:
        """Through the head; a closure that asks for a gradient itself needs the logits."""
        if not ctx.stage.closed:
            raise KeepLogits("a gradient")
        hidden, weight, bias = ctx.saved_tensors
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        with torch.no_grad():
            wanted = ctx.needs_input_grad
            found = HeadGradient(Head(hidden, weight, bias), states=wanted[4])
            if slope is not None or bent is not None:
                term = None if slope is None else ctx.call.term(slope)
                ctx.kept.flow(ctx.call.rows, term, bent, found, last=last)
        if last:
            ctx.kept.forget()
        own = {id(leaf): g for leaf, g in found.leaves()}
        states = next(iter(found.cotangents()), None)
        parts = [states, own.get(id(weight)), own.get(id(bias))]
        if torch.is_grad_enabled():
            parts = once(parts)
        return (None, None, None, None, *parts)
