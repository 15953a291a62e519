"""The figures that the paper prints, to stand beside ours. Nothing here was measured by us.

Liu, Yu and Lin, *Regularizing Deep Neural Networks with Stochastic Estimators of Hessian Trace*,
arXiv 2208.05924: tables 1 to 4, mean ± standard error over 5 runs as the paper says, are in
``paper.json``. Rows marked ``quoted`` were taken by the paper from other publications, with their
settings; ``elsewhere`` is what others publish for the same network and data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seht.lab.methods.parse import parse

SOURCE = "Liu, Yu and Lin, arXiv 2208.05924"


@dataclass(frozen=True)
class PaperRow:
    """One line of a table."""

    label: str
    """As the paper writes it."""
    figures: Mapping[str, tuple[float, float | None]]
    """Mean and standard error by the name of our metric."""
    method: str | None
    """Our method with the paper's settings; ``None`` where none of ours could stand for it."""
    quoted: bool = False
    note: str = ""

    @property
    def printed(self) -> bool:
        """Whether it is in the table itself; the others are discussed in the paper's text."""
        return not self.note.startswith("left out")

    def allows(self, method: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a method that ran with these options, but for defaults, is this one.

        An option that the paper does not have, or has otherwise, makes it another method.
        """
        if self.method is None:
            return False
        own = {name: dict(options) for name, options in parse(self.method).parts}
        return own.keys() == method.keys() and all(
            options.items() <= own[name].items() for name, options in method.items()
        )


@dataclass(frozen=True)
class Table:
    """A table of the paper, and what others publish for the same network and data."""

    title: str
    rows: list[PaperRow]
    elsewhere: list[str]

    def find(self, method: Mapping[str, Mapping[str, Any]]) -> PaperRow | None:
        """The one row of a method, given by name with the options it ran with."""
        fitting = [row for row in self.rows if row.allows(method)]
        return fitting[0] if len(fitting) == 1 else None


def _table(title: str, columns: list[str], rows: list[dict[str, Any]], elsewhere: Any) -> Table:
    made = []
    for row in rows:
        figures = {key: tuple(pair) for key, pair in zip(columns, row["figures"], strict=True)}
        made.append(PaperRow(**{**row, "figures": figures}))
    return Table(title, made, elsewhere)


TABLES: dict[str, Table] = {
    name: _table(**table)
    for name, table in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    ).items()
}
