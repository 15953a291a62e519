"""Two ways to the same number: nested autograd, and differences of ordinary gradients.

- ``base.py``: what an engine is asked and what it answers.
- ``autograd.py``: the paper's Algorithms 1 and 2 as printed.
- ``difference.py``: the fast way; ``ggn.py``: the Gauss-Newton trace, with the loss's own curvature
  (``curved.py``, ``softmax.py``) in the network's outputs (``boundary.py``).
- ``centre.py``: its first pass, which is recorded; ``passes.py``: the others, which replay it
  (``mode.py``, ``recorder.py``, ``replay.py``, ``prefix.py``), by the rules in ``kinks/``;
  ``steps.py``: how far.
- ``persample/``: a probe for every example (SEHT-S).
- ``graphfree.py``: the value alone, for measuring; ``free.py``: another penalty, kinks and all.
- Everything is given back as it was: ``state.py``, ``buffers.py``; and the closure must repeat
  itself: ``witness.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

from seht.engines.autograd import AutogradEngine
from seht.engines.difference import DifferenceEngine
from seht.estimators import unknown
from seht.task import Engine

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
