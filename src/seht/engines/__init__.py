"""Two ways to the same number: nested autograd, and differences of ordinary gradients."""

from __future__ import annotations

import inspect
from typing import Any

from seht.engines.autograd import AutogradEngine
from seht.engines.base import Engine
from seht.engines.difference import DifferenceEngine
from seht.estimators import unknown

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


def engine_options() -> set[str]:
    """The names of all options that some engine knows."""
    return {name for cls in ENGINES.values() for name in inspect.signature(cls).parameters}
