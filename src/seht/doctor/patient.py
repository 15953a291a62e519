"""The patient: a private copy of the user's model, with some batches to look at it on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from seht import probes
from seht.check.sandbox import copied, copy_model
from seht.distributed import ranks_of
from seht.errors import one_line
from seht.measure.data import Batches, cut, size_of
from seht.measure.objective import Objective
from seht.replay.closures import check_arguments
from seht.replay.state import BorrowedBuffers
from seht.task import LossFn, check_loss, split

KEPT = 16
"""How many batches are read, of training and of held-out data each."""
_FEW = 4
"""How many examples are enough to check a derivative."""


class Patient:
    """A private copy of the user's model, which itself stays as it is.

    Args:
        model: the user's.
        loss_fn: ``loss_fn(model, batch)``.
        data: a batch, a data set or batches.
        held_out: the same, of examples that are not trained on; or nothing.
        seconds: for reading batches.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, data: Any, held_out: Any, seconds: float
    ) -> None:
        check_arguments(model, loss_fn, "loss_fn")
        ranks_of(model).need_whole("seht.doctor")
        inner = getattr(model, "_orig_mod", None)
        self.compiled = isinstance(inner, nn.Module)
        """Whether it came from ``torch.compile``: it is examined without, as each of the many kinds
        of pass here would be compiled for itself, and PyTorch gives up after a few.
        """
        model = inner if isinstance(inner, nn.Module) else model
        probes.choose(model)  # raises if there is nothing to probe, before anything is copied
        self.model, self.loss_fn = copy_model(model, wide=False), loss_fn
        self.objective = Objective(self.model, loss_fn, probes.choose(self.model))
        self.batches = self._read("data", data, seconds)
        self.held_out = [] if held_out is None else self._read("held_out", held_out, seconds)
        self.aux = self._first_look()
        """Whether the loss comes with something else."""
        self.few = self._small(self.batches[0])

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.objective.device

    def losses(self, batches: Sequence[Any], end: float) -> list[float]:
        """The loss of each batch, at least one, until the time (``time.perf_counter``) is over."""
        found: list[float] = []
        for place, batch in enumerate(batches):
            found.append(self.objective.loss(batch))
            self.objective.check_finite(found[-1], place)
            if time.perf_counter() > end:
                break
        return found

    def _read(self, name: str, data: Any, seconds: float) -> list[Any]:
        found: list[Any] = []
        end = time.perf_counter() + seconds
        try:
            for batch, _ in Batches(data, device=self.device):
                found.append(copied(batch, wide=False))
                if len(found) == KEPT or time.perf_counter() > end:
                    break
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {one_line(error)}") from error
        if not found:
            raise ValueError(
                f"{name} gives no batch: has the iterator been read to its end, or is the data set "
                "empty? Pass a DataLoader, a list of batches or one batch"
            )
        return found

    def _first_look(self) -> bool:
        """Refuse a loss that cannot be one, before anything long is begun; whether there is aux."""
        with torch.enable_grad(), BorrowedBuffers(self.model):
            found, _, aux = split(self.objective.called(self.batches[0], Exception))
        loss = check_loss(found)
        self.objective.check_finite(float(loss.detach()), 0)
        return aux

    def _small(self, batch: Any) -> Any:
        """Some examples of a batch, if the loss can be computed on them; else all."""
        try:
            count = size_of(batch)
            part = batch if count <= _FEW else cut(batch, 0, count, 0, _FEW)
            return part if math.isfinite(self.objective.loss(part)) else batch
        except Exception:  # one size of batch only, or sizes in another place
            return batch
