"""One run from beginning to end: train, validate, save, resume, test once, record.

A run that is killed at any moment and started again ends with the same metrics: what an epoch draws
depends on the seed and its number alone, and a checkpoint, taken between two steps, holds all the
rest.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from seht.errors import NonFiniteError, one_line
from seht.lab import checkpoint, ending
from seht.lab.ending import EXAMPLES, DivergedError, measures, spectrum
from seht.lab.evaluate import TRACE_EXAMPLES, flatness, in_float
from seht.lab.methods.weights import score
from seht.lab.optimizers import rate
from seht.lab.places import alone, check_run
from seht.lab.progress import Events, Watch
from seht.lab.ranks import join
from seht.lab.records import Record, Result, RunError, fingerprint, write
from seht.lab.training import Training, repeatable
from seht.lab.trials import Trial

LOOK_EVERY = 20  # steps between two looks at the loss, which wait for the device


def run(
    trial: Trial, *, watch: Watch | None = None, patience: float = 0.0, devices: int = 1
) -> Result:
    """Train a trial in its directory, or go on where it was left.

    Returns the result, at once where there is one already. A loss that is not finite, or any other
    failure of the computation, is a result with the status ``failed`` and its reason; a directory
    that cannot be used is a :class:`~seht.lab.records.RunError`.

    Args:
        trial: what is run, and where it goes.
        watch: is told how the run goes.
        patience: seconds to wait for another process to leave the directory.
        devices: so many processes share every batch (DDP); under ``torchrun``, those it started.
    """
    recipe, how = trial.recipe, trial.execution
    ranks = join(how.device, devices, recipe.precision)
    watch = watch if watch is not None and ranks.leads else Watch()
    record = Record(trial.out)
    config = trial.describe(ranks.count)
    with ExitStack() as held:
        ranks.lead(lambda: check_run(record.directory))
        ranks.lead(lambda: held.enter_context(alone(record.directory, patience)))
        there = ranks.lead(lambda: record.ended(config, how.retry))
        if there is None:
            loop = _Loop(trial, record, fingerprint(config), watch)
            with repeatable(recipe.threads):
                training = None
                try:
                    training = Training(
                        recipe, trial.method, trial.seed, data_dir=how.data_dir, ranks=ranks
                    )
                    ranks.lead(lambda: record.claim(config))
                    result = loop.run(training)
                except ValueError as error:
                    if training is not None:
                        raise
                    # A setting that does not fit, or missing data.
                    raise RunError(one_line(error)) from error
                except (ArithmeticError, MemoryError, RuntimeError) as error:
                    if ranks.count > 1 and not isinstance(error, (DivergedError, NonFiniteError)):
                        raise  # a rank that is gone, perhaps: no result of the computation
                    if training is None:  # too large to be built, for example
                        record.claim(config)
                    result = loop.failed(error, training.step if training is not None else 0)
                finally:
                    watch.close()
            ranks.lead(lambda: record.finish(result))
        ranks.leave()
    return result if there is None else there


class _Loop:
    """The loop; :meth:`run` reads top to bottom."""

    def __init__(self, trial: Trial, record: Record, identity: str, watch: Watch) -> None:
        self.trial, self.record, self.identity, self.watch = trial, record, identity, watch
        self.rows: list[dict[str, Any]] = []
        self.tested: list[dict[str, float]] = []
        """The test set's curve, apart from the rows that methods and choices look at."""
        self.best: dict[str, Any] | None = None
        self.seconds = 0.0

    def run(self, training: Training) -> Result:
        recipe = training.recipe  # as the method wants it
        self.ranks = training.ranks
        state = checkpoint.load(self.record.checkpoint, self.identity, training.fabric.device)
        if state is not None:
            training.load_state_dict(state["training"])
            self.rows, self.best, self.seconds = state["rows"], state["best"], state["seconds"]
            self.tested = state.get("tested", [])
        self.watch.begin(recipe.epochs, training.data.steps_per_epoch, training.step)
        saved = time.perf_counter()
        points = Events(self.record.directory, self.rows)
        with points if self.ranks.leads else nullcontext():
            while training.epoch < recipe.epochs and not training.method.stop(self.rows):
                losses = [row["valid_loss"] for row in self.rows]
                lr = rate(recipe.optim, recipe.epochs, training.epoch, losses)
                if training.position == 0:
                    training.begin_epoch(lr)
                training.model.train()
                clock = time.perf_counter()
                for batch in training.data.train_batches(training.epoch, training.position):
                    training.learn(batch)
                    if training.position % LOOK_EVERY == 0:
                        self.look(training)
                    self.watch.step(training.step)
                    now = time.perf_counter()
                    self.seconds += now - clock
                    if self.ranks.any(now - saved > self.trial.execution.save_every):
                        self.save(training)
                        saved = time.perf_counter()
                    clock = time.perf_counter()
                with training.method.judged():
                    row = self.end_epoch(training, lr)
                self.ranks.lead(partial(points.add, row))
                self.watch.epoch(row)
        return self.finish(training)

    def look(self, training: Training) -> dict[str, float]:
        """This epoch's means so far; raises if the loss is not finite."""
        means = training.means()
        if not math.isfinite(means["train_loss"]):
            raise DivergedError(
                f"the training loss is {means['train_loss']} in epoch {training.epoch + 1}"
            )
        self.watch.figures(means)
        return means

    def end_epoch(self, training: Training, lr: float) -> dict[str, Any]:
        """Validate, write the epoch's row, keep the weights if they are the best so far."""
        means = self.look(training)
        task, number = training.recipe.task, training.epoch + 1
        valid = self.ranks.lead(lambda: training.evaluated("valid"))
        if valid and not math.isfinite(valid["loss"]):
            raise DivergedError(f"the validation loss is {valid['loss']} in epoch {number}")
        row = {
            "epoch": number,
            "step": training.step,
            "seconds": round(self.seconds, 3),
            "lr": lr,
            "train_loss": means.pop("train_loss"),
            **{f"valid_{name}": valid.get(name) for name in measures(task)},
            "trace": means.pop("trace", None),
            "penalty": means.pop("penalty", None),
        }
        self.rows.append(row)
        if valid and (self.best is None or score(row) > score(self.best["row"])):
            weights = {k: v.detach().cpu().clone() for k, v in training.model.state_dict().items()}
            self.best = {"row": row, "weights": weights}
        training.go_to(number)
        if training.recipe.curve and self.trial.test:
            self.tested.append(self.ranks.lead(lambda: ending.curve(training)))
        curve = self.tested or [{} for _ in self.rows]
        shown = [row | tested for row, tested in zip(self.rows, curve, strict=True)]
        self.ranks.lead(lambda: self.record.metrics(shown))
        return row

    def save(self, training: Training) -> None:
        """All that a resumed run needs; reads, and changes nothing."""
        state = {
            "training": training.state_dict(),
            "rows": self.rows,
            "tested": self.tested,
            "best": self.best,
            "seconds": self.seconds,
        }
        self.ranks.lead(lambda: checkpoint.save(self.record.checkpoint, state, self.identity))

    def finish(self, training: Training) -> Result:
        """The last weights' figures and the best weights'; the one time the test set is read."""
        with training.method.judged():
            return self.ranks.lead(lambda: self.ended(training))

    def ended(self, training: Training) -> Result:
        """The same, on the rank that writes; the others wait."""
        last = self.rows[-1]
        if training.method.chooses and self.best is not None:
            last = self.best["row"]
            training.model.load_state_dict(self.best["weights"])
        model = in_float(training.bare)
        batches = training.data.eval_batches("train", TRACE_EXAMPLES)
        found = flatness(model, batches, self.trial.seed)
        found["train_loss"] = ending.train_loss(training)
        found["wrong_labels"] = training.data.wrong or None
        found["paths"] = training.method.paths() or None
        if self.trial.test:  # a search looks at the validation split alone
            batches = training.data.eval_batches("train", EXAMPLES)
            found |= spectrum(model, batches, self.trial.seed, training.recipe.spectrum)
        write(self.record.model, checkpoint.to_bytes(training.model.state_dict()))
        figures = ending.figures(training, last, self.trial.test)
        metrics = {"last": figures | ending.robust(training, "last", self.trial.test)}
        best = self.best["row"] if self.best else last
        if self.best is not None and best["epoch"] != last["epoch"]:
            training.model.load_state_dict(self.best["weights"])
            figures = ending.figures(training, best, self.trial.test)
        figures |= ending.robust(training, "best", self.trial.test)
        metrics["best"] = figures | {"epoch": best["epoch"]}
        return self.result("done", None, training.step, metrics, found)

    def failed(self, error: Exception, steps: int) -> Result:
        """A result like any other, with the reason and without metrics."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = "" if isinstance(error, DivergedError) else f"{type(error).__name__}: "
        return self.result("failed", kind + lines[0], steps, {}, {})

    def result(
        self, status: str, reason: str | None, steps: int, metrics: Any, found: dict[str, Any]
    ) -> Result:
        run = (self.trial.title, self.trial.seed, len(self.rows), steps, round(self.seconds, 3))
        return Result(status, reason, *run, metrics, **found)
