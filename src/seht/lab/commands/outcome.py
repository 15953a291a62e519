"""What ``seht train`` prints when a run is over: its figures as a table."""

from __future__ import annotations

import re

from seht.lab.records import Result
from seht.measure.numbers import aligned, number, with_error

_PARTS = {"valid": "validation", "test": "test"}
_FIGURES = {
    "loss": "loss",
    "top1": "accuracy, %",
    "top5": "top-5 accuracy, %",
    "perplexity": "perplexity",
    "ece": "calibration error, %",
}
_NAME = re.compile(
    r"(?P<part>valid|test)_(?P<figure>[a-z]+\d?)(_(?P<bits>\d+)bit|_noise(?P<noise>\d+))?"
    r"|train_rise_noise(?P<rise>\d+)(?P<predicted>_predicted)?"
)


def outcome(result: Result) -> list[str]:
    """The lines of a table: a row for each figure, with the last weights and the best ones."""
    last, best = (result.metrics.get(which, {}) for which in ("last", "best"))
    heads = ["last epoch", "best epoch"]
    if "epoch" in best:
        heads[1] += f" ({best['epoch']:g})"
    rows = [
        [_words(name), *(number(found[name], 4) if name in found else "" for found in (last, best))]
        for name in dict.fromkeys((*last, *best))
        if name != "epoch" and not (name.endswith("top5") and last.get(name) == 100)
    ]
    if result.train_loss is not None:
        rows.append(["training loss", number(result.train_loss, 4), ""])
    if result.trace is not None:
        trace = with_error(result.trace["estimate"], result.trace["stderr"])
        rows.append(["trace", trace, ""])
    if result.weight_norm is not None:
        rows.append(["weight norm", number(result.weight_norm, 4), ""])
    return aligned([["", *heads], *rows])


def _words(name: str) -> str:
    """A figure's name in ``result.json``, as one says it; unknown ones as they are."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    if found["rise"]:
        said = f"training loss: rise at {found['rise']} % noise"
        return f"{said}, by the trace" if found["predicted"] else said
    figure, comma, unit = _FIGURES.get(found["figure"], found["figure"]).rpartition(", ")
    said = f"{_PARTS[found['part']]} {figure or unit}"
    if found["bits"]:
        said += f" at {found['bits']} bits"
    elif found["noise"]:
        said += f" with {found['noise']} % noise"
    return f"{said}, {unit}" if comma else said
