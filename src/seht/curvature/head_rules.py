r"""How passes treat a large linear map, and cross-entropy of what it puts out.

Where the Gauss-Newton trace is taken, perturbed passes leave the logits unformed (``unformed.py``),
and so does the centre of the lean form. The loss's value is that of the centre in every pass: the
trace takes no difference of losses, and what the closure decides by it stays decided. In the
centre of the lean form it is computed a few rows at a time.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.curvature.cross_entropy import CrossEntropy, linear_in, stretches
from seht.curvature.unformed import Head, KeepLogits, Unformed
from seht.operators.rules import Rule, untaped

WORTH = (1 << 20, 2)
"""Fewer logits are formed, and those of which there are not so many for each hidden state."""
_ARGUMENTS = inspect.signature(F.cross_entropy)
_SAVED = torch._C._autograd._top_saved_tensors_default_hooks


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
        """If a call of ``F.cross_entropy`` is one."""
        given = _ARGUMENTS.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        logits, target, weight = call["input"], call["target"], call["weight"]
        if not isinstance(logits, Unformed) or logits.looks:
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
        """Of what the call returns."""
        left = [size for d, size in enumerate(self.logits.shape) if d != self.logits.rows.dim]
        return torch.Size(left if self.reduction == "none" else ())

    @property
    def rows(self) -> Tensor:
        """Of the hidden states."""
        return self.logits.rows.places.flatten().to(self.target.device)

    @property
    def _kept(self) -> Tensor:
        return self.target != self.ignored

    @property
    def _labels(self) -> Tensor:
        return self.target.where(self._kept, 0)  # what is ignored need not be a class

    def each(self) -> Tensor:
        """Of every row."""
        head, rows = self.logits.head, self.rows
        hidden = head.hidden.detach().flatten(0, -2)
        found = hidden.new_empty(len(rows))
        with torch.no_grad():
            for part in stretches(len(rows), head.weight):
                z = F.linear(hidden[rows[part]], head.weight, head.bias)
                found[part] = F.cross_entropy(
                    z, self.target[part], weight=self.weight, ignore_index=self.ignored,
                    reduction="none", label_smoothing=self.smoothing,
                )  # fmt: skip
        return found

    def reduced(self, each: Tensor) -> Tensor:
        """What the call returns."""
        if self.reduction == "none":
            return each.view(self.shape)
        if self.reduction == "sum":
            return each.sum()
        kept = self._kept
        if self.weight is None:
            return each.sum() / kept.sum()
        return each.sum() / self.weight[self._labels].where(kept, 0).sum()

    def term(self, slope: Tensor) -> CrossEntropy:
        """Its curvature, for the loss's derivative in the rows' losses."""
        kept, labels = self._kept, self._labels
        classes = self.logits.shape[self.logits.rows.dim]
        size = slope.where(kept, 0).unsqueeze(1)
        weight = slope.new_ones(classes) if self.weight is None else self.weight.to(slope.dtype)
        own = (1 - self.smoothing) * size * weight[labels].unsqueeze(1)
        share, even = own, tuple[tuple[Tensor, Tensor], ...]()
        if self.smoothing:
            even = ((-self.smoothing / classes * size, weight),)
            share = own + self.smoothing / classes * weight.sum() * size
        return CrossEntropy(0, -1, self.rows, share, ((labels.unsqueeze(1), -own),), (), even)


class Attached(torch.autograd.Function):
    """A value in the place that logits have in a graph; its gradient is taken elsewhere."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, losses: Losses) -> Tensor:
        """The value."""
        ctx.losses = losses
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Nothing; a closure that asks for a gradient itself needs the logits."""
        if not ctx.losses.settled:
            raise KeepLogits("a gradient")
        return None, None, None


class Losses:
    """The losses that a centre pass has computed."""

    def __init__(self) -> None:
        self._found: list[tuple[RowLosses, Tensor]] = []
        self._values: list[Tensor] = []
        self.settled = False
        """Whether their gradient has been taken."""

    def settle(self) -> None:
        """Their gradient has been taken: from here on they are constants."""
        self.settled = True

    def rules(self, *, unformed: bool) -> dict[Any, Rule]:
        """Of one pass: the ``F.linear`` of large logits, and their ``F.cross_entropy``."""
        values = list(self._values)

        def again(mode: Any, _: Any, func: Any, args: Any, kwargs: Any) -> Any:
            call = RowLosses.match(args, kwargs)
            known = values.pop(0) if values else None
            if call is None:
                return func(*args, **kwargs)
            if known is None or known.shape != call.shape:  # a metric was left out
                known = call.logits.head.hidden.new_zeros(call.shape)
            return self._attached(call.logits, known)

        found: dict[Any, Rule] = {F.cross_entropy: Rule(self._record, again, taped=False)}
        if unformed:
            found[F.linear] = untaped(_linear)
        return found

    def _record(self, mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, None]:
        call = RowLosses.match(args, kwargs)
        if call is None:
            out = func(*args, **kwargs)
        else:
            each = self._attached(call.logits, call.each())
            self._found.append((call, each))
            out = call.reduced(each)
        self._values.append(out.detach())
        return out, None

    def _attached(self, logits: Tensor, value: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return Attached.apply(logits, value, self)

    def terms(self, loss: Tensor, logits: Tensor) -> list[CrossEntropy] | None:
        """The curvature, where the loss is linear in them and nobody saw the logits."""
        if not isinstance(logits, Unformed) or logits.looks:
            return None
        calls = [(call, each) for call, each in self._found if call.logits.head is logits.head]
        slopes = linear_in(loss, [each for _, each in calls]) if calls else None
        if slopes is None:
            return None
        return [call.term(slope) for (call, _), slope in zip(calls, slopes, strict=True)]


def _linear(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    hidden, weight, bias = [None] * 3 if kwargs else [*args, None][:3]
    if (
        type(hidden) is Tensor
        and isinstance(weight, nn.Parameter)
        and (bias is None or isinstance(bias, nn.Parameter))
        and hidden.dtype == weight.dtype
        and (bias is None or bias.dtype == weight.dtype)
        and hidden.dtype in (torch.float32, torch.float64)
        and hidden.dim() > 1
        and weight.shape[0] > WORTH[1] * weight.shape[1]
        and hidden.numel() // weight.shape[1] * weight.shape[0] >= WORTH[0]
        and (hidden.requires_grad or weight.requires_grad)
        and not hidden.is_meta
        and not torch.is_autocast_enabled(hidden.device.type)
        and not is_functorch_wrapped_tensor(hidden)
        and _SAVED(False) is None  # an activation checkpoint counts what is saved
    ):
        return Unformed.of(Head(hidden, weight, bias))
    return func(*args, **kwargs)
