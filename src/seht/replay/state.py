"""What the passes change in a model, and put back: weights move along a probe, and buffers
(BatchNorm statistics, counters, averages) once per step, or not at all.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from seht.task import Directions, Probe, refuse_parallel
from seht.tensors.process import MODULE_CALLS


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
    return torch.stack(torch._foreach_norm(wide)).double().norm()


# --- buffers --------------------------------------------------------------------------------------


@dataclass
class _Loan:
    holder: dict[str, Tensor | None]
    name: str
    original: Tensor
    clone: Tensor
    version: int
    left: Tensor | None = None
    """What the module held when the block ended."""

    def end(self) -> None:
        """Give the module its own buffer back."""
        self.left = self.holder.get(self.name)
        self.holder[self.name] = self.original


_lent: dict[int, int] = {}
"""By identity of a module's buffers: the thread that has replaced them by clones. If several
threads call a frozen network beside their own models, only the first replaces its buffers.
"""


class BorrowedBuffers:
    """While the block runs, the modules hold clones of their buffers; afterwards the originals.

    Nothing is written into an original while a pass runs, so that a failure leaves the model as it
    was, a pending backward finds the values it saved, and several passes can start from the same
    values. What a pass wrote is taken over by :meth:`commit`, once it is known to be wanted.

    A module that the closure calls beside the model (a second network with BatchNorm) is found when
    it is called and treated the same, unless this process compiles (``torch.compile``): then make
    it a part of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[nn.Module] = (),
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        self._model = model
        self._modules = modules
        """The parts of the model, where they are known."""
        self._known: set[int] = set()
        self._own: set[int] = set()
        """The parts of the model itself."""
        self._clones: dict[int, Tensor] = {}
        self._loans: list[_Loan] = []
        self._lent: list[int] = []
        self._thread = threading.get_ident()
        self.clones: set[int] = set()
        """The identities of the clones that the modules hold while the block runs."""
        self.others: list[nn.Module] = list(others)
        """Modules met beside the model."""

    def __enter__(self) -> BorrowedBuffers:
        self._hook: RemovableHandle | None = None
        try:
            self._adopt(self._model.modules() if self._modules is None else self._modules)
            self._own = set(self._known)
            for other in self.others:
                self._adopt(other.modules())
        except BaseException:  # no memory for a clone
            self.__exit__()
            raise
        # Compiled code guards on global hooks: with one it would be compiled anew each time.
        self._hook = None if compiles() else MODULE_CALLS(self._meet)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()
        for loan in self._loans:
            loan.end()
        for holder in self._lent:
            if _lent.get(holder) == self._thread:
                del _lent[holder]

    def _lend(self, holder: dict[str, Tensor | None]) -> bool:
        """Whether we may replace these buffers: not if another thread has already done so."""
        if id(holder) not in _lent:
            self._lent.append(id(holder))
        return _lent.setdefault(id(holder), self._thread) == self._thread

    def commit(self) -> None:
        """Take over what the pass wrote: in place, or as a new tensor where it assigned one."""
        for loan in self._loans:
            if loan.left is not loan.clone:
                loan.holder[loan.name] = loan.left
            elif loan.clone._version != loan.version or loan.clone.is_floating_point():
                # Fused kernels write statistics past the version counter.
                loan.original.data.copy_(loan.clone)
        self._loans.clear()

    def _meet(self, module: nn.Module, inputs: object) -> None:
        # The hook is for all threads, and another one may train a model of its own.
        if threading.get_ident() != self._thread:
            if id(module) in self._own:
                raise RuntimeError(
                    "the model is called in another thread while a penalised step runs, where its "
                    "weights are moved and its decisions cannot be seen; call it in the thread of "
                    "the step only, or use a copy of it elsewhere"
                )
        elif id(module) not in self._known:
            parts = tuple(module.modules())
            refuse_parallel(parts)
            self.others.append(module)
            self._adopt(parts)

    @property
    def modules_beside(self) -> list[nn.Module]:
        """The parts of the modules met beside the model."""
        return [module for other in self.others for module in other.modules()]

    def _adopt(self, modules: Iterable[nn.Module]) -> None:
        with torch._C.DisableTorchFunction():  # our operations, not the closure's
            new = [module for module in modules if id(module) not in self._known]
            self._known.update(map(id, new))
            for module in new:
                if not module._buffers or not self._lend(module._buffers):
                    continue
                for name, original in module._buffers.items():
                    if original is None:
                        continue
                    if id(original) not in self._clones:
                        self._clones[id(original)] = original.clone()
                    clone = self._clones[id(original)]
                    self._loans.append(
                        _Loan(module._buffers, name, original, clone, clone._version)
                    )
                    module._buffers[name] = clone
                    self.clones.add(id(clone))


def compiles() -> bool:
    """Whether this process runs compiled code."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", {})
    return any(backend is not None for backend in backends.values())
