"""The closure of a step: one forward pass, the cross-entropy, and every method's term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from seht.lab.methods.base import Batch, Forward, Method
from seht.tensors.trees import mapped


@dataclass(frozen=True)
class StepClosure:
    """The loss of a batch: called, ``(loss, aux)``; methods may wrap it, or ask for a part of it.

    aux is ``{"loss": plain cross-entropy, "hidden": text only}``, both detached. The plain
    cross-entropy, of the same labels but neither smoothed nor penalised, is the one whose
    exponential is a perplexity.
    """

    model: nn.Module
    batch: Batch
    method: Method

    def __call__(self) -> tuple[Tensor, dict[str, Any]]:
        method, batch = self.method, self.batch
        logits, hidden = outputs(self.model, batch)
        loss = plain = cross_entropy(logits, batch)
        if method.smoothing:
            loss = cross_entropy(logits, batch, method.smoothing)
        term = method.term(Forward(self.model, batch, logits, loss))
        total = loss if term is None else loss + term
        return total, {"loss": plain.detach(), "hidden": hidden}

    def of(self, part: float) -> StepClosure:
        """The loss of the first examples of the batch, that part of them and at least one."""
        return make_closure(self.model, first(self.batch, part), self.method)


def make_closure(model: nn.Module, batch: Batch, method: Method) -> StepClosure:
    """The closure of a step."""
    if method.input_gradient:
        # Outside the closure: it may run several times, and its leaves must be the same ones.
        batch = replace(batch, x=batch.x.detach().requires_grad_())
    return StepClosure(model, batch, method)


def first(batch: Batch, part: float) -> Batch:
    """The first examples of a batch, which is drawn in random order; text: the first streams."""
    axis = 0 if batch.x.is_floating_point() else 1
    count = max(1, round(part * batch.x.shape[axis]))

    return mapped(batch, lambda tensor: tensor.narrow(axis, 0, count))


def outputs(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    """Logits ``(examples, classes)``, and a language model's hidden state, detached."""
    if batch.x.is_floating_point():
        return model(batch.x), None
    logits, hidden = model(batch.x, batch.hidden)
    return logits.flatten(0, 1), mapped(hidden, Tensor.detach)


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Plain cross-entropy, without a method's terms: models are compared by the same measure."""
    return cross_entropy(outputs(model, batch)[0], batch)


def cross_entropy(logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """The mean over examples, for mixed labels too."""
    return over_labels(batch, lambda y: F.cross_entropy(logits, y, label_smoothing=smoothing))


def over_labels(batch: Batch, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``share * f(y) + (1 - share) * f(other)``; without second labels ``f(y)``."""
    value = function(batch.y.flatten())
    if batch.other is None:
        return value
    return batch.share * value + (1 - batch.share) * function(batch.other.flatten())
