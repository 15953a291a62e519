"""Lightning's ``Trainer``: a callback that logs the penalty and saves its state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from seht.extras import need
from seht.integrations import check_accumulation, log_values, tell_length
from seht.penalty import HessianTrace

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ModuleNotFoundError:
        try:  # the same code under its older name
            from pytorch_lightning.callbacks import Callback
        except ModuleNotFoundError:
            need("lightning", "seht.integrations.lightning")
            raise


class SehtCallback(Callback):
    """Logs the penalty of a LightningModule, saves its state, and tells it the number of steps.

    The penalty itself, L + λ tr(H), is a line in ``training_step``; see
    :class:`seht.HessianTrace`, also for what it costs. The callback costs nothing.

    Example:
        ```python
        import lightning as L
        from seht.integrations.lightning import SehtCallback


        class Classifier(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = Net()
                self.penalty = seht.HessianTrace(self.net, warmup=0.1)

            def training_step(self, batch):
                x, y = batch
                return self.penalty(lambda: F.cross_entropy(self.net(x), y))

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)


        off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[SehtCallback()], **off)
        data = torch.utils.data.TensorDataset(x, y)
        trainer.fit(Classifier(), torch.utils.data.DataLoader(data, 4))
        ```

    Args:
        attribute: the attribute of the LightningModule that holds the penalty.
        prefix: put before each name in the logger.
        held_out: tunes a weight that was not given: a pair ``(batches, loss_fn)`` with
            ``loss_fn(model, batch)``, as :class:`seht.HessianTrace` takes it; the batches are moved
            to the training's device.
    """

    def __init__(
        self, attribute: str = "penalty", prefix: str = "seht/", held_out: Any = None
    ) -> None:
        self.attribute, self.prefix, self.held_out = attribute, prefix, held_out

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for the penalty before the first batch, and tell it how long the training is."""
        penalty, together = self._penalty(pl_module), trainer.accumulate_grad_batches
        check_accumulation(penalty, together)
        steps = trainer.estimated_stepping_batches
        tell_length(penalty, steps, trainer.num_training_batches, together)
        if self.held_out is not None:
            penalty.equip(held_out=_there(self.held_out, trainer.strategy.batch_to_device))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the penalty the optimiser, for a share or a tuned weight."""
        if len(trainer.optimizers) == 1:
            self._penalty(pl_module).equip(optimizer=trainer.optimizers[0])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the training was over before the warm-up."""
        self._penalty(pl_module).close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Hand the values to the module's logger, which takes every ``log_every_n_steps``-th."""
        pl_module.log_dict(log_values(self._penalty(pl_module), self.prefix))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the penalty's state."""
        checkpoint[f"seht.{self.attribute}"] = self._penalty(pl_module).state_dict()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the penalty's state, if the checkpoint has one."""
        if f"seht.{self.attribute}" in checkpoint:
            self._penalty(pl_module).load_state_dict(checkpoint[f"seht.{self.attribute}"])

    def _penalty(self, module: LightningModule) -> HessianTrace:
        found = getattr(module, self.attribute, None)
        if not isinstance(found, HessianTrace):
            raise TypeError(
                f"SehtCallback looks for a seht.HessianTrace in {type(module).__name__}."
                f"{self.attribute}, which is {found!r}; make one in __init__ or pass "
                "SehtCallback(attribute=...)"
            )
        return found


def _there(held_out: Any, moved: Callable[[Any], Any]) -> Any:
    """The pair with its batches on the training's device; all else as it is, to be judged."""
    if not (isinstance(held_out, tuple) and len(held_out) == 2 and callable(held_out[1])):
        return held_out
    data, loss_fn = held_out
    return data, lambda model, batch: loss_fn(model, moved(batch))
