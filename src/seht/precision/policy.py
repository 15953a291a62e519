"""The precision of the passes of an estimate: float32 by default, or the user's own.

A difference divides the rounding of its passes by the step, once for the value and twice for the
gradient, so that a pass in bfloat16 or TF32 drowns what it is to show. With ``precision="full"``
autocast is switched off in every pass, also one that the closure enters itself, and matrix products
and convolutions are not shortened to TF32. With ``precision="native"`` all passes run as the user's
own would (never a mixture), and the step is made larger instead (``engines/step_size.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext

from seht.errors import unknown
from seht.precision.half_weights import HALVES, Copies
from seht.task import Task
from seht.tensors.deferred import Deferred, normalised
from seht.tensors.graph import coarser, leaves_of
from seht.tensors.process import AUTOCAST, PRODUCTS, STRICT, unshortened
from seht.tensors.trees import mapped

PRECISIONS = ("full", "native")
FP16_SCALE = 2.0**10
"""The factor of gradients while they are computed in float16, where small ones would become 0."""

_KINDS = ("cpu", "cuda", "xpu", "mps")
DEVICES = tuple(kind for kind in _KINDS if torch.amp.is_autocast_available(kind))
_BACKENDS = {"cuda": "cuda", "mkldnn": "cpu"}
any_autocast = torch._C._is_any_autocast_enabled


def autocasts() -> list[tuple[str, torch.dtype]]:
    """The devices on which autocast is on, with its type."""
    if not any_autocast():
        return []
    return [(k, torch.get_autocast_dtype(k)) for k in DEVICES if torch.is_autocast_enabled(k)]


def shortened(kinds: set[str]) -> torch.dtype | None:
    """How float32 products are shortened on these devices: float16 for TF32, bfloat16, or None."""
    old, new = PRODUCTS.read()
    found = {value for (backend, _), value in new.items() if _BACKENDS[backend] in kinds}
    if not new and old is not None:  # an older PyTorch
        matmul, *tf32 = old
        if "cuda" in kinds and any(tf32):
            found.add("tf32")
        if "cpu" in kinds and matmul == "medium":
            found.add("bf16")
    if "bf16" in found:
        return torch.bfloat16
    return torch.float16 if "tf32" in found else None


def check_precision(precision: str) -> str:
    """Refuse an unknown one."""
    if precision not in PRECISIONS:
        raise ValueError(unknown("precision", precision, PRECISIONS))
    return precision


def _enter(self: Any) -> Any:
    """``torch.autocast.__enter__`` in a pass: compiled code must not find it on either."""
    result = AUTOCAST.before["__enter__"](self)
    precision: Precision | None = STRICT.get()
    if precision is not None:
        precision.switch_off(self.device)
    return result


class Precision:
    """What the passes of one estimate do about autocast, TF32 and weights in half precision."""

    def __init__(self, precision: str = "full", copies: Copies | None = None) -> None:
        self.native = precision == "native"
        self._copies = copies
        self.wide = copies is not None
        """The weights are float32 copies."""
        self.widens = self.wide
        """Whatever is in half precision is widened: beside float32 copies of the weights, and
        where autocast, switched off, would have brought the operands of a call to one type.
        """
        self.lowest: torch.dtype | None = None
        """The least precise type that a native pass was seen to compute in."""
        self._outside: list[tuple[str, torch.dtype]] = []
        self.apart = self.wide
        """Whether the user's backward() would be less precise than the passes (``deferred.py``)."""
        self.hooked = False
        """Whether the centre's graph has hooks of the user's, which must see ordinary gradients."""

    def hear(self) -> None:
        """Hooks of the user's are in the centre's graph."""
        self.hooked = True

    @contextmanager
    def around(self, tensors: Iterable[Tensor]) -> Iterator[Precision]:
        """Around a whole estimate: our own arithmetic is never rounded to half precision."""
        self._outside = autocasts()
        short = shortened({t.device.type for t in tensors})
        lowered = [dtype for _, dtype in self._outside] + ([] if short is None else [short])
        self.apart |= bool(lowered)
        if self.native:
            for dtype in lowered:
                self.note(dtype)
        with self.backward():
            yield self

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass: no autocast, and with ``"full"`` nothing that shortens."""
        with ExitStack() as stack:
            for kind, _ in autocasts():
                stack.enter_context(torch.autocast(kind, enabled=False))
            if not self.native:
                stack.enter_context(unshortened())
            yield

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run of the closure: with ``"native"``, the user's autocast is on again."""
        if not self.native:
            self.widens = self.wide or bool(self._outside)  # each run comes to it by itself
            token = STRICT.set(self)
            try:
                with AUTOCAST.replaced(__enter__=_enter):
                    yield
            finally:
                STRICT.reset(token)
            return
        if not self._outside:
            yield
            return
        # Autocast keeps the weights it has cast, and would not notice that they have moved.
        torch.clear_autocast_cache()
        try:
            with ExitStack() as stack:
                for kind, dtype in self._outside:
                    stack.enter_context(torch.autocast(kind, dtype))
                yield
        finally:
            torch.clear_autocast_cache()

    def meet(self) -> None:
        """Called before every operation of a closure: an autocast that is on is noticed."""
        for kind, dtype in autocasts():
            if self.native:
                self.note(dtype)
            else:
                self.switch_off(kind)

    def switch_off(self, kind: str) -> None:
        """Switch autocast off. Its end sets what was there before, so that nothing is to undo."""
        if torch.is_autocast_enabled(kind):
            torch.set_autocast_enabled(kind, False)
            if CompileContext.try_get() is None:  # compiled code sees to it itself: `mixed`
                self.widens = True

    def note(self, dtype: torch.dtype) -> None:
        """The passes compute in this type."""
        self.apart = True
        if dtype in HALVES and self.lowest != torch.bfloat16:
            self.lowest = dtype

    def effective(self, weights: torch.dtype, seen: torch.dtype | None = None) -> torch.dtype:
        """The type that stands for how precise the passes are; float16 for TF32, too.

        ``seen`` is the least precise one that was seen in their graph.
        """
        noted = weights if self.lowest is None or weights == torch.float64 else self.lowest
        return coarser(noted, seen)

    def targets(self, leaves: list[Tensor]) -> list[Tensor]:
        """The tensors that receive the gradients: the leaves, or the originals of copies."""
        return leaves if self._copies is None else list(map(self._copies.original, leaves))

    def check_leaves(self, leaves: list[Tensor]) -> None:
        """Refuse weights in half precision that were not replaced by their copies."""
        if self._copies is not None:
            self._copies.refuse_originals(leaves)

    def handed_on(self, roots: list[Tensor]) -> list[Tensor]:
        """The same values, whose gradients go to the originals of the copies."""
        leaves = leaves_of([r for r in roots if r.requires_grad])
        self.check_leaves(leaves)
        found = Deferred.apply(self, False, roots, leaves, *self.targets(leaves))
        return list(found[: len(roots)])

    def given_out(self, output: Any) -> Any:
        """What the closure returned; it cannot be differentiated if weights were copied."""
        return mapped(output, _dead_end) if self.wide else output

    def committing(self, commit: Callable[[], None]) -> Callable[[], None]:
        """Buffers in half precision take over what their copies did."""
        if self._copies is None:
            return commit
        own = self._copies.commit

        def both() -> None:
            commit()
            own()

        return both

    def scaled(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None] | None
    ) -> tuple[list[Tensor], Tensor] | None:
        """In float16: cotangents at a size that neither underflows nor overflows, and the factor
        that undoes it; None where no scaling is needed.
        """
        if self.scale == 1:
            return None
        given = cotangents or [None] * len(outputs)
        pairs = zip(outputs, given, strict=True)
        return normalised([torch.ones_like(o) if c is None else c for o, c in pairs], self.scale)

    @property
    def scale(self) -> float:
        """The factor of gradients while they are computed."""
        return FP16_SCALE if self.lowest == torch.float16 else 1.0


@contextmanager
def prepared(task: Task, precision: str) -> Iterator[tuple[Task, Precision]]:
    """Around an estimate: the task to run instead, on float32 weights, and how to run it."""
    half = any(w.dtype in HALVES for w in task.weights.values())
    copies = Copies(task) if half else None
    ready = Precision(precision, copies)
    with copies.installed() if copies else nullcontext(), ready.around(task.weights.values()):
        yield copies.task if copies else task, ready


def _dead_end(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    raising = torch._C._functions.DelayedError(
        "aux of a penalised step cannot be differentiated where the weights are in half precision: "
        "it was computed from float32 copies; add the term to the closure's loss",
        1,
    )
    out: Tensor = raising(tensor.detach().requires_grad_())
    return out
