"""The figures that the paper prints, to stand beside ours. Nothing here was measured by us.

Liu, Yu and Lin, *Regularizing Deep Neural Networks with Stochastic Estimators of Hessian Trace*,
arXiv 2208.05924: tables 1 to 4, mean ± standard error over 5 runs as the paper says. Rows marked
``quoted`` were taken by the paper from other publications, with their settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SOURCE = "Liu, Yu and Lin, arXiv 2208.05924"


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    label: str
    """As the paper writes it."""
    figures: Mapping[str, tuple[float, float | None]]
    """Mean and standard error by the name of our metric."""
    method: Mapping[str, Mapping[str, Any]] | None
    """Our methods that it is made of, with the paper's settings; ``None`` where there is no method
    of ours that could stand for it."""
    quoted: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the paper, and what others publish for the same network and data."""

    title: str
    rows: list[Row]
    elsewhere: list[str] = field(default_factory=list)

    def find(self, method: Mapping[str, Mapping[str, Any]]) -> Row | None:
        """The row of a method, given by name with the options it ran with (but for defaults).

        An option that the paper does not have, or has otherwise, makes it another method.
        """
        rows = [row for row in self.rows if row.method and row.method.keys() == method.keys()]
        fitting = [
            row
            for row in rows
            if all(
                key in row.method[name] and row.method[name][key] == value
                for name, options in method.items()
                for key, value in options.items()
                if row.method
            )
        ]
        return fitting[0] if len(fitting) == 1 else None


def _accuracy(top1: float, error: float | None) -> dict[str, tuple[float, float | None]]:
    return {"test_top1": (top1, error)}


def _accuracies(
    top1: float, error1: float, top5: float, error5: float
) -> dict[str, tuple[float, float | None]]:
    return {"test_top1": (top1, error1), "test_top5": (top5, error5)}


def _perplexities(
    valid: float, valid_error: float, test: float, test_error: float
) -> dict[str, tuple[float, float | None]]:
    return {"valid_perplexity": (valid, valid_error), "test_perplexity": (test, test_error)}


def _weighted(name: str, weight: float, **more: Any) -> dict[str, dict[str, Any]]:
    return {name: {"weight": weight, **more}}


def _seht_d(weight: float, probes: int, prob: float) -> dict[str, dict[str, Any]]:
    return _weighted("seht-d", weight, probes=probes, prob=prob)


_DROPPED = "left out of the printed table, discussed in the paper's text"

TABLES: dict[str, Table] = {
    "table1": Table(
        "ResNet-18 on CIFAR-10",
        [
            Row("Baseline with Weight-Decay", _accuracy(94.00, 0.24), {"weight-decay": {}}),
            Row("Jacobian", _accuracy(89.23, 0.52), _weighted("jacobian", 0.01, projections=1)),
            Row("DropBlock", _accuracy(89.23, 0.22), {"dropblock": {"block": 7, "keep": 0.9}}),
            Row(
                "Confidence Penalty",
                _accuracy(94.40, 0.02),
                {"confidence-penalty": {"weight": 0.001}},
            ),
            Row("Label Smoothing", _accuracy(94.40, 0.07), {"label-smoothing": {"weight": 0.01}}),
            Row("cutout", _accuracy(94.02, 0.22), {"cutout": {"size": 16}}),
            Row("mixup", _accuracy(95.39, 0.13), {"mixup": {"alpha": 1.0}}),
            Row("Vanilla", _accuracy(93.6, None), {"none": {}}, quoted=True),
            Row(
                "Middle Network Method",
                _accuracy(88.13, 0.12),
                _weighted("htr-middle", 1e-5),
                quoted=True,
            ),
            Row("MM + FRL", _accuracy(95.33, 0.12), None, quoted=True),
            Row(
                "Lookahead",
                _accuracy(95.23, 0.19),
                {"lookahead": {"k": 5, "alpha": 0.8}},
                quoted=True,
                note="the SGD row of Lookahead's own paper, where Lookahead itself has 95.27",
            ),
            Row("SEHT-D (maxIter=1, prob=0.01)", _accuracy(95.37, 0.09), _seht_d(0.001, 1, 0.01)),
            Row("SEHT-D (maxIter=10, prob=0.01)", _accuracy(95.42, 0.11), _seht_d(0.001, 10, 0.01)),
            Row("SEHT-D (maxIter=10, prob=0.05)", _accuracy(95.49, 0.06), _seht_d(0.001, 10, 0.05)),
            Row("SEHT-H (maxIter=5)", _accuracy(95.59, 0.06), _weighted("seht-h", 0.001, probes=5)),
        ],
        [
            "plain SGD with weight decay: 95.28 (Cutout's authors, 5 runs), "
            "95.23 (Lookahead's authors)",
            "Cutout: 96.01 (its authors)",
            "SAM: about 96.4",
        ],
    ),
    "table2": Table(
        "WRN-28-10 on CIFAR-100",
        [
            Row("Baseline", _accuracies(74.61, 0.52, 92.48, 0.40), {"weight-decay": {}}),
            Row(
                "Confidence Penalty",
                _accuracies(77.15, 1.54, 93.97, 0.66),
                {"confidence-penalty": {"weight": 0.1}},
            ),
            Row(
                "Label Smoothing",
                _accuracies(79.38, 0.26, 94.39, 0.33),
                {"label-smoothing": {"weight": 0.1}},
            ),
            Row("cutout", _accuracies(76.70, 0.79, 93.72, 0.40), {"cutout": {"size": 8}}),
            Row("mixup", _accuracies(78.38, 0.31, 94.37, 0.31), {"mixup": {"alpha": 1.0}}),
            Row(
                "SEHT-D (maxIter=1, prob=0.01)",
                _accuracies(79.53, 0.72, 95.00, 0.24),
                _seht_d(0.1, 1, 0.01),
            ),
            Row(
                "SEHT-D (maxIter=1, prob=0.05)",
                _accuracies(80.31, 0.33, 94.96, 0.05),
                _seht_d(0.1, 1, 0.05),
            ),
            Row(
                "Dropout",
                _accuracies(73.13, 1.00, 91.89, 0.52),
                {"dropout": {"rate": 0.3}},
                note=_DROPPED,
            ),
            Row(
                "Confidence Penalty + Dropout",
                _accuracies(77.69, 0.16, 94.32, 0.46),
                {"confidence-penalty": {"weight": 0.1}, "dropout": {"rate": 0.3}},
                note=_DROPPED,
            ),
            Row(
                "Label Smoothing + Dropout",
                _accuracies(78.55, 1.10, 94.23, 0.34),
                {"label-smoothing": {"weight": 0.1}, "dropout": {"rate": 0.3}},
                note=_DROPPED,
            ),
            Row(
                "SEHT-D (maxIter=1, prob=0.01) + Dropout",
                _accuracies(77.75, 0.37, 94.38, 0.09),
                {**_seht_d(0.1, 1, 0.01), "dropout": {"rate": 0.3}},
                note=_DROPPED,
            ),
        ],
        [
            "plain SGD with weight decay: 80.8 to 81.2",
            "Cutout: 81.6 (its authors)",
            "SAM: 83.5",
        ],
    ),
    "table3": Table(
        "LSTM on WikiText-2",
        [
            Row("Baseline", _perplexities(101.82, 0.16, 95.65, 0.10), {"weight-decay": {}}),
            Row(
                "Confidence Penalty",
                _perplexities(101.39, 0.16, 95.57, 0.06),
                {"confidence-penalty": {"weight": 0.01}},
            ),
            Row(
                "Label Smoothing",
                _perplexities(99.58, 0.06, 95.03, 0.30),
                {"label-smoothing": {"weight": 0.01}},
            ),
            Row(
                "SEHT-D (maxIter=1, prob=0.05)",
                _perplexities(100.69, 0.27, 94.86, 0.26),
                _seht_d(0.01, 1, 0.05),
            ),
        ],
    ),
    "table4": Table(
        "GRU on WikiText-2",
        [
            Row("Baseline", _perplexities(119.04, 2.38, 111.64, 1.87), {"weight-decay": {}}),
            Row(
                "Confidence Penalty",
                _perplexities(116.40, 0.08, 109.27, 0.03),
                {"confidence-penalty": {"weight": 0.005}},
            ),
            Row(
                "Label Smoothing",
                _perplexities(117.47, 0.24, 110.46, 0.45),
                {"label-smoothing": {"weight": 0.05}},
            ),
            Row(
                "SEHT-D (maxIter=1, prob=0.01)",
                _perplexities(116.21, 0.31, 109.03, 0.15),
                _seht_d(0.001, 1, 0.01),
            ),
        ],
    ),
}
