"""The errors of SEHT-S, for losses and models that mix examples."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from seht.errors import ExampleError

COMPILED = (
    "estimator='seht-s' sees a model operation by operation, and a compiled one hides them; "
    "pass the model as it was before torch.compile, or use estimator='seht-h'"
)

TRANSFORMED = (
    "the model is called inside torch.func or torch.vmap, where examples cannot be followed (take "
    "gradients inside the closure with torch.autograd.grad(..., create_graph=True))"
)


def no_sum(reason: str, dim: int) -> ExampleError:
    """The error for examples that are mixed, with the ways out; ``dim`` holds the examples."""
    return ExampleError(
        f"estimator='seht-s' needs a loss that is a sum over examples, and here {reason}; use "
        "estimator='seht-h', keep the examples apart up to the loss, or say where they lie "
        f"with batch_dim= (now dimension {dim} of the model's inputs)"
    )


def refuse_compiled(modules: Iterable[nn.Module]) -> None:
    """Refuse a compiled model: it hides its operations."""
    for module in modules:
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ExampleError(COMPILED)
