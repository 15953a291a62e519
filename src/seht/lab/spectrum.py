"""The ends of the training loss's spectrum at the end of a run: the paper's sections 3.3 and 3.4.

The same measure for every method: plain cross-entropy in eval mode, on a part of the training data,
with as many Hessian-vector products as the recipe allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from seht.lab.evaluate import judging
from seht.lab.methods.base import Batch
from seht.lab.methods.loss import plain_loss

EXAMPLES = 200
"""Images; of text one stretch of every stream, or as many as reach so many tokens."""
TOLERANCE = 0.05
"""The residual that is asked for, relative to the eigenvalue."""
MEMORY = 4 * 2**30
"""Bytes that the vectors of the search may take."""


def spectrum(
    model: nn.Module, batches: Iterable[Batch], seed: int, products: int
) -> dict[str, Any]:
    """``eigenvalues`` and ``stability`` for a run's result; with no products, nothing.

    A search that ends before its values are found has bounds (``converged`` is false): the largest
    eigenvalue is at least, the smallest at most what it says. One that cannot be made says why.
    """
    from seht.measure import stability

    if not products:
        return {}
    size = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    kept = list(batches)
    try:
        with judging(model):
            found = stability(
                model,
                plain_loss,
                kept,
                largest=1,
                smallest=1,
                tol=TOLERANCE,
                max_products=max(2, min(products, MEMORY // (8 * size))),
                solver="lanczos",
                batch_dim=kept[0].y.dim() - 1,
                seed=seed,
            )
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        return {"stability": {"verdict": "undecided", "reason": " ".join(str(error).split())}}
    ends = found.eigenvalues
    numbers = found.as_dict()
    return {
        "eigenvalues": {
            "largest": ends.largest[0],
            "smallest": ends.smallest[0],
            "largest_residual": ends.largest_residuals[0],
            "smallest_residual": ends.smallest_residuals[0],
            "converged": ends.converged,
            "products": ends.products,
            "samples": ends.samples,
        },
        "stability": {
            name: numbers[name]
            for name in ("verdict", "equilibrium", "distance", "gradient_norm", "largest_rate")
        },
    }
