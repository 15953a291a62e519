"""The state of a run while it trains, built from a recipe and advanced step by step.

The device and the precision are Lightning Fabric's business. Random numbers of a step come from
torch's global generator, which is seeded anew for every epoch: what an epoch draws depends on the
seed and its number, not on what was drawn before. Where several ranks train, it is seeded for every
step, first alike, for the batch, then for each rank apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seht.lab.config import Recipe
from seht.lab.data import Data
from seht.lab.evaluate import evaluate
from seht.lab.methods.base import Batch, Run
from seht.lab.methods.loss import make_closure, plain_loss
from seht.lab.ranks import FabricRanks, single
from seht.tensors.trees import mapped


def mix(seed: int, number: int) -> int:
    """A seed for the ``number``-th part of a run; neighbours have nothing in common."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def repeatable(threads: int) -> Iterator[None]:
    """Use this many threads, and no algorithms chosen by timing, in the block."""
    before = torch.get_num_threads()
    cudnn = torch.backends.cudnn
    try:
        torch.set_num_threads(threads)
        with cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True):
            yield
    finally:
        torch.set_num_threads(before)


class Training:
    """Model, data, method and optimiser of one run, and where it stands."""

    def __init__(
        self,
        recipe: Recipe,
        method: Any,
        seed: int,
        *,
        data_dir: str | Path | None = None,
        device: str = "auto",
        ranks: FabricRanks | None = None,
    ) -> None:
        from seht.lab import data, models, optimizers

        self.method = method.build(recipe)
        self.recipe = self.method.configure(recipe)
        self.seed = seed
        self.ranks = ranks or single(device, self.recipe.precision)
        self.fabric = self.ranks.fabric
        self.data = data.load(self.recipe, seed, data_dir=data_dir, device=str(self.fabric.device))
        torch.manual_seed(mix(seed, 0))
        self.bare = bare = models.build(self.recipe.model, self.data)
        self.model = self.fabric.setup_module(bare)
        self.own = self.model
        """The model without the other ranks, for what one of them computes alone."""
        if self.ranks.count > 1:
            self.own = type(self.model)(bare, self.fabric.strategy, original_module=bare)
        plain = optimizers.make(self.recipe.optim, bare.parameters())
        held_out = ValidationBatches(self.data, self.recipe.batch)
        self.method.setup(
            Run(
                self.recipe,
                bare,
                self.data.classes,
                self.data.steps_per_epoch,
                seed,
                optimizer=plain,
                held_out=(held_out, plain_loss),
            )
        )
        # Fabric's optimiser, or a tuple of them, says its type; there is one.
        self.optimizer: Any = self.fabric.setup_optimizers(self.method.optimizer(plain))
        self.epoch = 0
        self.position = 0
        """Batches of this epoch that are done."""
        self.hidden: Any = None
        """Text: where the last batch has left the model."""
        self.sums: dict[str, list[float]] = {}
        """Total and count of this epoch's figures."""
        self.loss = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        """Sum of this epoch's losses, left on the device; this rank's share of them."""

    @property
    def step(self) -> int:
        """Steps done since the run began."""
        return self.epoch * self.data.steps_per_epoch + self.position

    def go_to(self, epoch: int) -> None:
        """The next step is the first of that epoch."""
        self.epoch, self.position = epoch, 0

    def begin_epoch(self, lr: float) -> None:
        """Seed the epoch's random numbers and set its learning rate."""
        torch.manual_seed(mix(self.seed, self.epoch + 1))
        self.hidden, self.sums = None, {}
        self.loss.zero_()
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def learn(self, batch: Batch) -> None:
        """One step: batch, closure, objective, gradient, optimiser."""
        several = self.ranks.count > 1
        if several:
            torch.manual_seed(self._step_seed(0))
        batch = self.method.batch(replace(batch, hidden=self.hidden), self.step)
        batch, weight = self.ranks.share(batch)
        if several:
            torch.manual_seed(self._step_seed(1 + self.ranks.rank))
        objective = self.method.objective(make_closure(self.model, batch, self.method))

        def compute() -> tuple[Tensor, dict[str, Any]]:
            self.optimizer.zero_grad()
            loss, aux = objective()
            self.fabric.backward(loss if weight == 1 else weight * loss)
            if self.recipe.optim.clip is not None:
                self.fabric.clip_gradients(
                    self.model,
                    self.optimizer,
                    max_norm=self.recipe.optim.clip,
                    error_if_nonfinite=False,
                )
            return loss, aux

        _, aux = compute()
        if self.method.passes > 1:
            self.optimizer.step(lambda: compute()[0])
        else:
            self.optimizer.step()
        self.method.after_step()
        self.hidden = mapped(aux.get("hidden"), Tensor.detach)
        self.loss += aux["loss"] * (weight / self.ranks.count)
        self.position += 1
        for name, value in self.method.log().items():
            total = self.sums.setdefault(name, [0.0, 0])
            total[0] += value
            total[1] += 1

    def _step_seed(self, stream: int) -> int:
        streams = 1 + self.ranks.count
        return mix(mix(self.seed, self.epoch + 1), streams * self.position + stream)

    def means(self) -> dict[str, float]:
        """This epoch's figures so far, of all ranks; reads the loss from the device."""
        own = [total / count for total, count in self.sums.values()]
        loss, *rest = self.ranks.total([self.loss, *own])
        means = {"train_loss": loss / max(1, self.position)}
        return means | {
            name: figure / self.ranks.count for name, figure in zip(self.sums, rest, strict=True)
        }

    def evaluated(self, split: str, limit: int | None = None) -> dict[str, float]:
        """The figures of a split, of the present weights."""
        return evaluate(self.own, self.data.eval_batches(split, limit), self.recipe.task)

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a process needs to go on as if nothing had happened.

        With several ranks all have to ask, and the first has the whole: what is each rank's own is
        gathered there.
        """
        cuda = self.fabric.device.type == "cuda"
        own = {
            "method": self.method.state_dict(),
            "hidden": self.hidden,
            "sums": self.sums,
            "loss": self.loss,
        }
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "position": self.position,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.fabric.device) if cuda else None,
            **(own if self.ranks.count == 1 else {"ranks": self.ranks.gather(own)}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        own = state if self.ranks.count == 1 else state["ranks"][self.ranks.rank]
        self.method.load_state_dict(own["method"])
        self.epoch, self.position = state["epoch"], state["position"]
        self.hidden, self.sums = own["hidden"], own["sums"]
        self.loss.copy_(own["loss"])
        torch.set_rng_state(state["random"].cpu())
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self.fabric.device)


class ValidationBatches:
    """Batches of the validation split, of the size that is trained on, in their fixed order."""

    def __init__(self, data: Data, size: int) -> None:
        self._data, self._size = data, size

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._data.eval_batches("valid"):
            if not batch.x.is_floating_point():  # text is cut as it is trained on
                yield batch
                continue
            parts = zip(batch.x.split(self._size), batch.y.split(self._size), strict=True)
            yield from (replace(batch, x=x, y=y) for x, y in parts)
