"""The closure of a step: one forward pass, the cross-entropy, and every method's term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from seht.lab.methods.base import Batch, Closure, Forward, Method


def make_closure(model: nn.Module, batch: Batch, method: Method) -> Closure:
    """Returns ``(loss, aux)``, with aux ``{"loss": plain cross-entropy, "hidden": text only}``.

    The plain cross-entropy, of the same labels but neither smoothed nor penalised, is the one whose
    exponential is a perplexity. Both are detached.
    """
    if method.input_gradient:
        # Outside the closure: it may run several times, and its leaves must be the same ones.
        batch = replace(batch, x=batch.x.detach().requires_grad_())

    def closure() -> tuple[Tensor, dict[str, Any]]:
        logits, hidden = outputs(model, batch)
        loss = plain = cross_entropy(logits, batch)
        if method.smoothing:
            loss = cross_entropy(logits, batch, method.smoothing)
        term = method.term(Forward(model, batch, logits, loss))
        total = loss if term is None else loss + term
        return total, {"loss": plain.detach(), "hidden": hidden}

    return closure


def outputs(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    """Logits ``(examples, classes)``, and a language model's hidden state, detached."""
    if batch.x.is_floating_point():
        return model(batch.x), None
    logits, hidden = model(batch.x, batch.hidden)
    return logits.flatten(0, 1), detached(hidden)


def detached(hidden: Any) -> Any:
    """A recurrent state without its graph."""
    if isinstance(hidden, Tensor):
        return hidden.detach()
    if isinstance(hidden, (tuple, list)):
        return tuple(map(detached, hidden))
    return hidden


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
