"""Two ways to the same number: nested autograd, and differences of ordinary gradients."""

from __future__ import annotations

from seht.engines.autograd import AutogradEngine
from seht.engines.base import Engine
from seht.estimators import unknown

ENGINES = {"autograd": AutogradEngine}
AUTO = "autograd"


def make_engine(name: str) -> Engine:
    """The engine of that name; ``"auto"`` is the one we recommend."""
    if name != "auto" and name not in ENGINES:
        raise ValueError(unknown("engine", name, ["auto", *ENGINES]))
    return ENGINES[AUTO if name == "auto" else name]()
