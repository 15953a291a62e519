"""From a task to an estimate, in two ways: nested autograd, and differences of ordinary gradients.

- ``autograd``: the paper's Algorithms 1 and 2 as printed.
- ``difference``: the fast way; ``gauss_newton``: the same for the Gauss-Newton trace, with
  ``head_sides`` where the logits are large. How far they step: ``step_size``, ``looks``.
- ``forward_only`` and ``products``: the value alone and products with vectors, for measuring.

``measure`` and ``check`` take what is named in ``__all__``, and nothing from inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from seht.distributed import LOCAL, Ranks
from seht.engines.autograd import AutogradEngine
from seht.engines.difference import DifferenceEngine
from seht.engines.forward_only import Replicates, replicates
from seht.engines.products import Products, loss_in_logits
from seht.errors import unknown
from seht.task import Estimate, Task

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


class Engine(Protocol):
    """Turns a task into an estimate."""

    name: str
    precision: str

    @property
    def kappa(self) -> float | None:
        """The relative step that differences are taken with; None without one, or not known yet."""

    def estimate(
        self, task: Task, ranks: Ranks = LOCAL, *, lean: bool = False, watch: bool = False
    ) -> Estimate:
        """Run the closure and return loss and trace; ``ranks`` are those of the task's model.

        ``lean`` asks for ``total`` instead of a waiting graph, where the engine has that form;
        ``watch`` lets it check itself every so often.
        """

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned."""

    def back(self) -> Callable[[], None]:
        """A function that restores its present state, for a step that fails."""


ENGINES: dict[str, type[AutogradEngine] | type[DifferenceEngine]] = {
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
