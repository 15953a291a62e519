"""Held-out data: a closure for each look, and the gradient of its loss, without side effects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from seht.distributed import Ranks
from seht.precision.policy import prepared
from seht.probes import mix
from seht.replay.checkpoints import checkpoints
from seht.replay.closures import Guarded, alone
from seht.replay.mode import Casts
from seht.replay.replayer import extra_run
from seht.replay.state import BorrowedBuffers
from seht.strength.products import Vector, trainable, vector
from seht.task import Closure, LossFn, Task, check_loss, split
from seht.tensors.graph import hooks_of, muted
from seht.tensors.process import own_gradients
from seht.tensors.random_state import RandomState, seed_cpu
from seht.tensors.trees import is_batch

_SIZE = 128
"""The most examples of a data set that one look reads."""


class HeldOutBatches:
    """An iterable of held-out batches, begun again at its end, and the loss on one of them.

    Creating the iterator of a ``DataLoader`` and reading from it draws random numbers; the global
    random state is put back, and so are generators of the loader's own, so that a training with
    held-out data shuffles as one without. What the reading of a batch draws (an order, an
    augmentation) follows from the seed of the process, or of such a generator, and the batch's
    number, so that a resumed run reads the same batches.
    """

    read: int
    """Batches read so far, of all rounds."""
    _again: bool
    """Whether the last one is to be given once more."""
    _number: int
    """Of the next batch that the iterator gives, counted over all rounds."""
    _iterator: Iterator[Any] | None

    def __init__(self, batches: Iterable[Any], loss_fn: LossFn) -> None:
        self._batches, self._loss_fn = batches, loss_fn
        self._last: Any = None
        self.go_on(0)

    def closure(self, model: nn.Module) -> Closure:
        """The loss on the next batch."""
        if not self._again:
            state, own = RandomState(model.parameters()), generators_of(self._batches)
            for generator in own:
                state.meet(generator)
            seed, seeds = torch.initial_seed(), [generator.initial_seed() for generator in own]
            with state.all_kept():
                while self._number <= self.read:  # after a resumption some are passed over
                    seed_cpu(mix(seed, self._number))
                    for generator, its in zip(own, seeds, strict=True):
                        generator.manual_seed(mix(its, self._number))
                    self._last = self._next()
                    self._number += 1
        self._again, self.read = False, self.read + 1
        batch = self._last
        return lambda: self._loss_fn(model, batch)

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                length = length_of(self._batches)
                if length and hasattr(self._batches, "set_epoch"):  # a count of Accelerate's own
                    self._batches.set_epoch(self._number // length)
                self._iterator = iter(self._batches)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
            finally:
                # Accelerate takes the loader that was begun last for the training's, and at that
                # one's end ends an accumulated step: held-out batches must not stay the last.
                if hasattr(self._batches, "gradient_state"):
                    self._batches.end()  # type: ignore[attr-defined]
        raise ValueError(
            "the held-out batches have run out: the iterable gives none when it is begun again; "
            "pass a DataLoader or a list, not an iterator or a generator"
        )

    def back(self) -> Callable[[], None]:
        """The way back, where the step fails: its batch is given once more."""
        read = self.read

        def back() -> None:
            self._again, self.read = self._again or self.read > read, read

        return back

    def go_on(self, read: int) -> None:
        """Continue after this many batches, if the iterable yields the same ones in each round."""
        self._iterator, self.read, self._again = None, read, False
        length = length_of(self._batches)
        self._number = read - read % length if length else 0

    def __getstate__(self) -> tuple[Iterable[Any], LossFn, int]:
        """Without the iterator: a loader's cannot be copied."""
        return self._batches, self._loss_fn, self.read

    def __setstate__(self, state: tuple[Iterable[Any], LossFn, int]) -> None:
        self._batches, self._loss_fn, read = state
        self._last = None
        self.go_on(read)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Those that a loader and its samplers draw from."""
    found: list[torch.Generator] = []
    parts = [loader]
    for part in parts:
        own = getattr(part, "generator", None)
        if isinstance(own, torch.Generator) and not any(own is known for known in found):
            found.append(own)
        inner = (getattr(part, name, None) for name in ("batch_sampler", "sampler"))
        parts += [one for one in inner if one is not None and all(one is not p for p in parts)]
    return found


def length_of(batches: Any) -> int:
    """How many there are, or examples; 0 where nobody knows: a stream's ``len`` raises."""
    try:
        return len(batches)
    except TypeError:
        return 0


def source(held_out: Any) -> Closure | HeldOutBatches:
    """Check what a user gives as ``held_out``: a closure, or ``(data, loss_fn)``."""
    if isinstance(held_out, tuple) and len(held_out) == 2 and callable(held_out[1]):
        data, loss_fn = held_out
        batches = _batches(data)
        if batches is not None:
            _check_pair(batches, loss_fn)
            return HeldOutBatches(batches, loss_fn)
    if callable(held_out) and not isinstance(held_out, nn.Module):
        closure: Closure = held_out
        return closure
    raise TypeError(
        "held_out must be a function without arguments that computes the loss on held-out "
        "examples, as in lambda: F.cross_entropy(model(xv), yv), or a pair (batches, loss_fn) with "
        f"loss_fn(model, batch), not {_named(held_out)}"
    )


def _batches(data: Any) -> Iterable[Any] | None:
    """What :func:`seht.doctor` takes: one batch, a data set, or batches; None for all else."""
    if is_batch(data):  # an iterable, too, but of tensors
        return [data]
    if isinstance(data, Dataset):
        return DataLoader(data, _even(length_of(data)))
    return data if isinstance(data, Iterable) and not isinstance(data, (str, bytes)) else None


def _check_pair(batches: Any, loss_fn: LossFn) -> None:
    """What would fail at the first look fails now: that look is behind the warm-up, hours later."""
    if _empty(batches):
        raise ValueError(
            "held_out has no batch: the data set is empty, or smaller than a batch with "
            "drop_last=True; give it examples"
        )
    called = (
        "held_out: loss_fn is called with the model and one batch, as in "
        "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
    )
    if str(getattr(loss_fn, "__module__", None)).startswith("torch.nn."):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(f"{called}; {name} by itself is called with outputs and targets")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return  # written in C, and says nothing about its arguments
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"{called}; this one cannot be called so: {error}") from None


def _empty(batches: Any) -> bool:
    """Known to be so: the length of a stream's loader raises."""
    try:
        return len(batches) == 0
    except TypeError:
        return False


def _even(count: int) -> int:
    """The batch size that leaves no small last batch: one example alone has no batch statistics."""
    size = -(-count // -(-count // _SIZE)) if count else _SIZE
    while count > 1 and count % size == 1:
        size -= 1
    return size


def _named(held_out: Any) -> str:
    """Its type; of a tuple also what is in it, since a tuple was asked for."""
    if isinstance(held_out, tuple):
        return f"({', '.join(type(item).__name__ for item in held_out)})"
    return type(held_out).__name__


@contextmanager
def _same_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A closure that calls ``model.eval()`` and fails, or forgets ``model.train()``, would leave
    the rest of the training without dropout and with fixed batch statistics.
    """
    modes = [module.training for module in modules]
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            if module.training != mode:
                module.training = mode


def gradient(task: Task, precision: str, ranks: Ranks) -> tuple[Tensor, Vector]:
    """The loss of the task's closure, and its gradient in all trainable parameters.

    The pass runs in the mode the model is in, in the precision of the other passes, past the
    user's hooks. Buffers, random state and mode are as they were.
    """
    random = RandomState(task.model.parameters(), task.random)
    drawn = {id(w) for w in task.weights.values()}  # a wrapper has other names for them
    probed = [name for name, w in trainable(task.model).items() if id(w) in drawn]
    with (
        torch.enable_grad(),
        own_gradients(),
        random.all_kept(),
        prepared(task, precision) as (task, policy),
    ):
        weights = trainable(task.model)
        hooks = hooks_of(task.modules)
        if hooks:
            policy.hear()

        def run() -> Any:
            with muted(hooks), extra_run(), Casts(policy), policy.run(), checkpoints():
                return task.closure()

        with BorrowedBuffers(task.model), _same_mode(task.modules), ranks.looking(), alone():
            output = Guarded(task.modules, run, "held_out")()
        try:
            loss = check_loss(split(output)[0])
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"held_out: {error}") from None
        found = ranks.gradient(loss, list(weights.values()))
    result = vector(list(weights), found)
    if not any(name in result for name in probed):
        raise ValueError(
            "the held-out loss depends on none of the probed weights; compute it with the model "
            "that is trained: held_out=lambda: loss_fn(model(xv), yv)"
        )
    return loss.detach(), result
