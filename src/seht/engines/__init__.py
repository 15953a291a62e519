"""From a task to an estimate, in two ways: nested autograd, and differences of ordinary gradients.

- ``autograd``: the paper's Algorithms 1 and 2 as printed.
- ``difference``: the fast way; ``gauss_newton``: the same for the Gauss-Newton trace, with
  ``head_sides`` where the logits are large. How far they step: ``step_size``, ``looks``.
- ``forward_only`` and ``products``: the value alone and products with vectors, for measuring.

``measure`` and ``check`` take what is named in ``__all__``, and nothing from inside.
"""

from __future__ import annotations

import inspect
from typing import Any

from seht.engines.autograd import AutogradEngine
from seht.engines.difference import DifferenceEngine
from seht.engines.forward_only import Replicates, replicates
from seht.engines.products import Products, loss_in_logits
from seht.errors import unknown

__all__ = [
    "ENGINES",
    "Engine",
    "Products",
    "Replicates",
    "engine_options",
    "loss_in_logits",
    "make_engine",
    "replicates",
]


Engine = AutogradEngine | DifferenceEngine
"""Turns a task into an estimate."""

ENGINES: dict[str, type[Engine]] = {
    "autograd": AutogradEngine,
    "difference": DifferenceEngine,
}
AUTO = "difference"


def make_engine(name: str, options: dict[str, Any] | None = None) -> Engine:
    """The engine of that name; ``"auto"`` is the one we recommend."""
    if name != "auto" and name not in ENGINES:
        raise ValueError(unknown("engine", name, ["auto", *ENGINES]))
    cls = ENGINES[AUTO if name == "auto" else name]
    for option in options or {}:
        if option not in inspect.signature(cls).parameters:
            raise ValueError(
                f"{option} is an option of engine='difference', not of engine={cls.name!r}; "
                "leave it out"
            )
    return cls(**(options or {}))


def engine_options() -> list[str]:
    """The names of all options that some engine knows."""
    names = (inspect.signature(engine).parameters for engine in ENGINES.values())
    return list(dict.fromkeys(name for own in names for name in own))
