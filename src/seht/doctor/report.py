"""What the doctor found, as a frozen record that prints as one page of tables."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from seht.check.report import CheckReport
from seht.doctor.cost import Cost, Costs
from seht.doctor.curvatures import CurvatureChoice
from seht.doctor.regime import Regime
from seht.doctor.shares import Shares
from seht.measure.numbers import aligned, duration, number, with_error
from seht.measure.results import PlainResult, plain
from seht.strength.share_weight import SHARE

_INDENT = len("curvature  ")
_LAYERS = 8
"""How many layers the terminal shows; the page and the JSON have more."""


@dataclass(frozen=True)
class DoctorReport(PlainResult):
    """The result of :func:`seht.doctor`; ``print(report)`` shows it."""

    model: str
    """The model's class."""
    mode: str
    """``train`` or ``eval``: the mode that gradient, cost and share were measured in."""
    check: CheckReport
    """Whether the gradient is right."""
    engine: str
    """The recommended engine."""
    choice: CurvatureChoice
    """The recommended curvature and boundary."""
    costs: Costs
    """Time and memory of each form."""
    shares: Shares
    """How strong a weight is."""
    regime: Regime
    """Whether the model memorises."""
    lines: tuple[str, str]
    """Two lines to paste into a training loop."""
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the penalty's gradient is right and there is something to penalise."""
        return self.check.ok and not self.nothing

    @property
    def nothing(self) -> bool:
        """Whether neither loss nor network is curved, so that the trace is 0."""
        return self.choice.flat and self.shares.vanishes

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.check.ok:
            return "Do not use the penalty on this model yet: its gradient is not to be trusted."
        if self.nothing:
            return (
                "There is nothing to penalise: the loss has no curvature in the outputs, and the "
                "network's own cannot be told from 0."
            )
        right = "The penalty's gradient is right on this model."
        return {
            "memorising": f"{right} The model memorises: expect a gain.",
            "between": f"{right} The model memorises a part: a gain is possible.",
            "underfitting": f"{right} But the model underfits: do not use the penalty now.",
            "untrained": f"{right} The model is not trained yet: its regime is not known.",
            "unknown": f"{right} The regime is not known without held-out data.",
        }[self.regime.kind]

    @property
    def heading(self) -> str:
        """The heading above the two lines."""
        if self.ok and self.regime.kind != "underfitting":
            return "Two lines to paste"
        return "Not now; but these would be the two lines"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with ``None`` for what is not finite."""
        values = {**vars(self), "check": self.check.as_dict()}
        return plain({"ok": self.ok, "verdict": self.verdict, **values})

    def __str__(self) -> str:
        shares, kind = self.shares, self.choice.curvature
        head = (
            f"{self.model}: {self.check.weights:,} probed weights in {self.check.tensors} tensors"
        )
        parts = [
            f"{head}, {self.mode} mode, {duration(self.seconds)}",
            *_wrapped(self.verdict),
            "",
            *_wrapped(f"gradient   {'; '.join(map(str, self.check.engines.values()))}", _INDENT),
            *_wrapped(f"curvature  {kind}: {self.choice.why}", _INDENT),
            *_wrapped(f"regime     {self.regime.why}", _INDENT),
            "",
            "scalar: penalty(closure), lean: penalty.backward(closure); both without optimiser",
            *aligned(cost_table(self.costs)),
            "",
            *_wrapped(share_words(shares)),
            *aligned(share_table(shares)),
        ]
        largest = sorted(shares.layers.items(), key=lambda item: -item[1])
        if largest:
            kept = largest[:_LAYERS]
            title = "share by layer, where the whole has 1"
            if len(largest) > len(kept):
                title += f" (largest {len(kept)} of {len(largest)})"
            parts += ["", *aligned([[title, "share"], *([n, number(v)] for n, v in kept)])]
        parts += ["", *aligned(loss_table(self.regime))]
        parts += ["", *(line for note in self.notes for line in _wrapped(f"note: {note}", 6))]
        return "\n".join([*parts, "", f"{self.heading}:", *self.lines])


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent=" " * indent, break_on_hyphens=False)


def cost_table(costs: Costs) -> list[list[str]]:
    """Forms, their seconds in plain steps and their memory."""
    head = ["one step", "plain steps", "quartiles", "peak MiB", "times plain"]
    rows = [["plain", "1", duration(costs.seconds), number(costs.memory), ""]]
    for cost in costs.forms:
        rows.append([f"{cost.curvature}, {cost.form}", *_cost_cells(cost, costs.memory)])
    return [head, *rows]


def _cost_cells(cost: Cost, plain_memory: float | None) -> list[str]:
    if cost.ratio is None or cost.low is None:
        return ["not here", "", "", ""]
    times = cost.memory / plain_memory if cost.memory and plain_memory else None
    quartiles = f"{number(cost.low)} to {number(cost.high)}" if cost.rounds > 1 else "one round"
    return [number(cost.ratio), quartiles, number(cost.memory), number(times, 2)]


def share_words(shares: Shares) -> str:
    """A sentence that explains the share and states the trace."""
    trace = f"trace {with_error(shares.trace, shares.trace_stderr)} over {shares.probes} probes"
    if shares.unit is None:
        return f"{trace}; a gradient is zero, so that no weight has a share"
    return (
        f"{trace}. Share: the penalty's averaged gradient over the loss's own. share={SHARE:g} is "
        f"a weight of {number(SHARE * shares.unit)} (± {100 * shares.error:.0f} %)"
    )


def share_table(shares: Shares) -> list[list[str]]:
    """Powers of ten and their share."""
    rows = [
        [f"{weight:.0e}".replace("e-0", "e-").replace("e+0", "e+"), number(share)]
        for weight, share in shares.weights.items()
    ]
    return [["weight", "share"], *rows]


def loss_table(regime: Regime) -> list[list[str]]:
    """The losses on training data, with swapped predictions, and on held-out data."""
    rows = [["training data", with_error(regime.train, regime.train_stderr)]]
    if regime.swapped is not None:
        rows.append(["... with the predictions of other examples", number(regime.swapped)])
    if regime.held_out is not None and regime.held_out_stderr is not None:
        rows.append(["held-out data", with_error(regime.held_out, regime.held_out_stderr)])
    return [["in evaluation mode", "loss"], *rows]


def two_lines(
    choice: CurvatureChoice, engine: str, *, held_out: bool, aux: bool = False
) -> tuple[str, str]:
    """What to paste, for this model."""
    arguments = [f"{name}={value!r}" for name, value in choice.arguments.items()]
    if engine != "difference":
        arguments.append(f"engine={engine!r}")
    way = 'weight="tuned", held_out=(held_out, loss_fn)' if held_out else f"share={SHARE:g}"
    options = ", ".join([way, *arguments, "warmup=0.1", "total_steps=total_steps"])
    return (
        f"penalty = seht.HessianTrace(model, {options})".replace("'", '"'),
        f"loss{', aux' if aux else ''} = penalty(lambda: loss_fn(model, batch))",
    )
