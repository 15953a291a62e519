"""The table of operators: what we know of each PyTorch function, one row each (``operator.py``).

The rows are with their families. From them come the look-ups, by function object: how a function
is frozen, how it carries the examples, whether it is affine, what stands for it where third
derivatives are taken. A function without a row is smooth, and its examples are found by experiment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seht.operators import (
    activations,
    arithmetic,
    constants,
    distances,
    foreach,
    layers,
    losses,
    maxima,
    movement,
    norms,
)
from seht.operators.axes import Follow
from seht.operators.operator import IN_PLACE, Affinity, Operator
from seht.operators.rules import Rule

_FAMILIES = (
    activations, arithmetic, constants, distances, foreach, layers, losses, maxima, movement, norms,
)  # fmt: skip

OPERATORS: tuple[Operator, ...] = tuple(row for family in _FAMILIES for row in family.OPERATORS)


def _where(chosen: Callable[[Operator], bool]) -> frozenset[Any]:
    return frozenset(f for row in OPERATORS if chosen(row) for f in row.functions)


KINKS: dict[Any, Rule] = {f: row.kink for row in OPERATORS if row.kink for f in row.functions}
"""How a function's decisions are frozen."""

AXES: dict[Any, Follow] = {f: row.axes for row in OPERATORS if row.axes for f in row.functions}
"""Where the examples of a batch go."""

AFFINE: dict[Any, Affinity] = {
    f: row.affine for row in OPERATORS if row.affine for f in row.functions
}
"""In which of its arguments a function is affine."""

SAFE: dict[Any, Callable[..., Any]] = {
    f: row.safe(f)
    for row in OPERATORS
    if row.safe
    for f in row.functions
    if "out" not in getattr(f, "_overloadname", "")  # which autograd does not take
}
"""What stands for functions that are wrong, or have no derivative, at some order."""

SHARP: dict[Any, Rule] = {f: row.sharp for row in OPERATORS if row.sharp for f in row.functions}
"""How a function is taken in float64."""

RANDOM = _where(lambda row: row.random)
"""Functions with a rule that consume random numbers, which a replay must skip."""

MOVEMENT = _where(lambda row: row.moves and not row.by_content)
"""Functions that put entries elsewhere and change none."""

PICKS = _where(lambda row: row.moves and row.by_content)
"""Functions that put entries elsewhere as an index or a mask says, which may be other each time."""

BY_CONTENT = _where(lambda row: row.by_content)
"""Functions whose answer depends on what an index tensor holds: asked anew in each step."""

LINEAR = (MOVEMENT | _where(lambda row: row.adds)) - IN_PLACE
"""Functions under which a sum over examples stays one."""
