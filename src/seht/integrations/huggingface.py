"""Hugging Face's ``Trainer`` with the penalty as one more argument: ``SehtTrainer``.

``SehtMixin`` adds it to a Trainer of your own or of another library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from seht.extras import need

need("huggingface", "seht.integrations.huggingface")
# ruff: noqa: E402
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from seht.errors import warn
from seht.integrations import check_accumulation, log_values, tell_length
from seht.penalty import HessianTrace
from seht.strength.held_out import length_of

STATE = "seht.pt"
"""The file with the penalty's state in a checkpoint's folder."""


class Follow(TrainerCallback):
    """Tells the penalty how long the training is and when it ends, and writes its state into each
    checkpoint the Trainer has saved.
    """

    def __init__(self, penalty: HessianTrace) -> None:
        self.penalty = penalty

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The number of optimiser steps is known now, and the optimiser is there."""
        batches = length_of(kwargs.get("train_dataloader"))
        tell_length(self.penalty, state.max_steps, batches, args.gradient_accumulation_steps)
        self.penalty.equip(optimizer=kwargs.get("optimizer"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn if the training was over before the warm-up."""
        self.penalty.close()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the penalty's state, once per node that saves."""
        if args.should_save:
            folder = Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            torch.save(self.penalty.state_dict(), folder / STATE)


class SehtMixin:
    """Adds the penalty, L + λ tr(H), to the loss of any Trainer class that stands after it.

    Cost: that of the penalty (:class:`seht.HessianTrace`); evaluation is not touched.

    Example:
        ```python
        from transformers import Trainer
        from seht.integrations.huggingface import SehtMixin


        class MyTrainer(SehtMixin, Trainer):  # or trl's SFTTrainer; then MyTrainer(..., penalty=)
            pass
        ```

    Args:
        penalty: the :class:`seht.HessianTrace` of the model that is trained.
        held_out: tunes a weight that was not given: a dataset of examples that are neither trained
            on nor used to judge the model. It is batched like an evaluation set, and the loss is
            the Trainer's.
    """

    def __init__(
        self, *args: Any, penalty: HessianTrace, held_out: Any = None, **kwargs: Any
    ) -> None:
        if kwargs.get("model_init") is not None:
            raise ValueError(
                "model_init builds a model that the penalty does not know; pass model= instead, "
                "the one that seht.HessianTrace was given"
            )
        super().__init__(*args, **kwargs)
        self.penalty = penalty
        trainer: Any = self
        trainer.add_callback(Follow(penalty))
        if held_out is not None:
            pair = isinstance(held_out, tuple) and any(map(callable, held_out))
            if pair or callable(held_out) or isinstance(held_out, DataLoader):
                raise TypeError(
                    "held_out must be a data set, as eval_dataset is; leave loss_fn out, the loss "
                    "is the Trainer's own, and so are the batches"
                )
            penalty.equip(held_out=(trainer.get_eval_dataloader(held_out), self._held_out_loss))
        check_accumulation(penalty, trainer.args.gradient_accumulation_steps)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The Trainer's loss, or its loss and outputs, with the penalty in training steps."""
        compute = super().compute_loss  # type: ignore[misc]
        # The Trainer takes the labels out of the inputs, and the closure runs more than once.
        return self.penalty(lambda: compute(model, dict(inputs), *args, **kwargs))

    def _held_out_loss(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """In the units of the training's loss, with which it is compared: divided by the Trainer's
        count of items, and a batch's part of an accumulated step where the training's is that.
        """
        trainer: Any = self
        _, items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        counted = {} if items is None else {"num_items_in_batch": items}
        loss = super().compute_loss(model, dict(batch), **counted)  # type: ignore[misc]
        part = getattr(trainer, "loss_is_scaled_for_ga", None)
        if part is None:
            counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
            part = items is not None and counts
        return loss / trainer.args.gradient_accumulation_steps if part else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the penalty's values wherever the training loss is logged."""
        if "loss" in logs:
            logs = {**logs, **log_values(self.penalty)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train; from a checkpoint, resume the penalty's state too."""
        folder: Any = resume_from_checkpoint
        if resume_from_checkpoint is True:
            trainer: Any = self
            folder = get_last_checkpoint(trainer.args.output_dir)
        path = Path(folder or "") / STATE
        if folder and path.exists():
            self.penalty.load_state_dict(torch.load(path, weights_only=True))
        elif folder:
            warn(
                f"seht: {path} is missing, so that the penalty starts at its step 0, warm-up "
                "included; was the checkpoint written without a penalty?"
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]


class SehtTrainer(SehtMixin, Trainer):
    """``transformers.Trainer`` whose loss is L + λ tr(H), with the arguments of :class:`SehtMixin`.

    It logs the penalty with the loss, saves its state in each checkpoint, and tells it the number
    of steps and the optimiser. Cost: that of the penalty (:class:`seht.HessianTrace`).

    Example:
        ```python
        import tempfile
        from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        from seht.integrations.huggingface import SehtTrainer

        config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        model = GPT2LMHeadModel(config)
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 20, (8, 8))]
        arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=2, report_to="none")
        penalty = seht.HessianTrace(model, weight=1e-4, curvature="ggn")
        SehtTrainer(model=model, args=arguments, train_dataset=rows, penalty=penalty).train()
        ```

    Args:
        penalty: the :class:`seht.HessianTrace` of the model that is trained.
        held_out: for ``weight="tuned"``, a dataset of held-out examples.
    """
