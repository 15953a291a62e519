r"""How passes treat a large linear head and the cross-entropy of its logits.

The head returns logits without content (``unformed.py``), and cross-entropy forms its rows and
keeps them for its gradient. For tr(H) it is so in every pass, each with a gradient of its own
(``head_losses.py``). For the Gauss-Newton trace only the centre's are kept, and the loss's value is
that of the centre in every pass: the trace takes no difference of losses, and what the closure
decides by it stays decided. Its gradient is taken with that of the trace (``head_loop.py``), or
waits for the user's ``backward()``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.curvature.cross_entropy import CrossEntropy, linear_in
from seht.curvature.head_loop import KeptRows
from seht.curvature.head_losses import HeadLosses, RowLosses, Stage
from seht.curvature.unformed import Head, KeepLogits, Unformed
from seht.operators.rules import Mode, Rule, first, untaped
from seht.operators.table import SHARP
from seht.tensors.trees import tensors

WORTH = (1 << 20, 2)
"""Logits are formed if there are fewer than the first number of them, or if they are at most the
second number of times as many as the numbers in the hidden states."""
_HESSIAN = 4
"""So many times as many for tr(H), whose passes have a gradient each: with fewer the loop is slower
than what it replaces (an LSTM with 2 million logits: 3.9 plain steps, not 3.4)."""
_SAVED = torch._C._autograd._top_saved_tensors_default_hooks


class Attached(torch.autograd.Function):
    """A value in the place that logits have in a graph; its gradient is taken elsewhere."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, stage: Stage) -> Tensor:
        """The value."""
        ctx.stage = stage
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Nothing; a closure that asks for a gradient itself needs the logits."""
        if not ctx.stage.settled:
            raise KeepLogits("a gradient")
        return None, None, None


class Losses:
    """The losses of unformed logits that a centre pass has computed."""

    def __init__(self, *, waiting: bool, same: bool) -> None:
        self._waiting = waiting
        """Whether their gradient is taken in the usual way, and not by whoever needs the terms."""
        self._same = same
        """Whether every pass has the centre's values."""
        self._found: list[tuple[RowLosses, Tensor]] = []
        self._values: list[Tensor] = []
        self.kept: list[KeptRows] = []
        """The logits of each call, for the Gauss-Newton trace."""
        self.ends: list[Tensor] = []
        """Where the gradient waits: a root for the trace's gradient in the logits of each call."""
        self._stage = Stage()

    def settle(self) -> None:
        """Their gradient has been taken: from here on they are constants."""
        self._stage.settle()

    def rules(self, *, unformed: bool) -> dict[Any, Rule]:
        """Of one pass: the ``F.linear`` of large logits, and their ``F.cross_entropy``."""
        if self._stage.closed and not self._same and not self._found:
            return {}  # the centre has formed them, and rounded as it did so
        values = list(self._values)

        def again(mode: Mode, _: Any, func: Any, args: Any, kwargs: Any) -> Any:
            call = RowLosses.match(args, kwargs)
            known = values.pop(0) if values else None
            if call is None:
                return _otherwise(mode, func, args, kwargs)
            if not self._same:
                return call.reduced(self._with_gradient(call)[0])
            if known is None or known.shape != call.shape:  # a metric was left out
                known = call.logits.head.hidden.new_zeros(call.shape)
            return self._attached(call.logits, known)

        found: dict[Any, Rule] = {F.cross_entropy: Rule(self._record, again, taped=False)}
        if unformed:
            least = WORTH[0] if self._same else _HESSIAN * WORTH[0]
            found[F.linear] = untaped(partial(_linear, least))
        return found

    def _record(self, mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, None]:
        call = RowLosses.match(args, kwargs)
        if call is None:
            if self._waiting and isinstance(first(args, kwargs), Unformed):
                raise KeepLogits("cross-entropy of another kind")
            out = _otherwise(mode, func, args, kwargs)
        elif self._waiting:
            each, root, kept = self._with_gradient(call)
            self._found.append((call, each))
            if self._same:
                self.kept.append(kept)
                self.ends.append(root)
            out = call.reduced(each)
        else:
            kept = KeptRows(call.form())
            each = self._attached(call.logits, call.each(kept))
            self._found.append((call, each))
            self.kept.append(kept)
            out = call.reduced(each)
        self._values.append(out.detach())
        return out, None

    def _with_gradient(self, call: RowLosses) -> tuple[Tensor, Tensor, KeptRows]:
        head, kept = call.logits.head, KeptRows(call.form())
        with torch._C.DisableTorchFunction():
            each, root = HeadLosses.apply(
                self._stage, call, kept, call.logits, head.hidden, head.weight, head.bias
            )
        return each, root, kept

    def _attached(self, logits: Tensor, value: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return Attached.apply(logits, value, self._stage)

    def close(self, aux: Any) -> None:
        """The centre's closure has run to its end: nobody may have looked at logits, or will."""
        self._stage.close()
        seen = any(call.logits.looks for call, _ in self._found)
        if seen or any(isinstance(t, Unformed) for t in tensors(aux)):
            raise KeepLogits("somebody looks at them")

    def terms(self, loss: Tensor, logits: Tensor) -> list[CrossEntropy] | None:
        """The curvature, if the loss is linear in these losses and nothing else uses the logits."""
        if not isinstance(logits, Unformed) or logits.looks:
            return None
        if any(call.logits.head is not logits.head for call, _ in self._found):
            return None  # of a second head, past the outputs
        slopes = linear_in(loss, [each for _, each in self._found]) if self._found else None
        if slopes is None:
            return None
        return [call.term(slope) for (call, _), slope in zip(self._found, slopes, strict=True)]


def _otherwise(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
    """A loss of other logits, in float64 where that costs nothing."""
    rule = SHARP.get(func) if mode.sharp else None
    return func(*args, **kwargs) if rule is None else rule.replay(mode, None, func, args, kwargs)


def _linear(least: int, mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
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
        and hidden.numel() // weight.shape[1] * weight.shape[0] >= least
        and (hidden.requires_grad or weight.requires_grad)
        and not hidden.is_meta
        and not torch.is_autocast_enabled(hidden.device.type)
        and not is_functorch_wrapped_tensor(hidden)
        and _SAVED(False) is None  # an activation checkpoint counts what is saved
    ):
        return Unformed.of(Head(hidden, weight, bias))
    return func(*args, **kwargs)
