"""Run the comparison and write it as Markdown and JSON."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from measuring import memory
from measuring.problems import PROBLEMS, Size, Trained, loss_fn, trained
from measuring.rivals import RIVALS, Sample, missing, products_to
from seht import measure
from seht.commands.files import check_outputs
from seht.errors import unknown
from seht.lab.bench.report import machine

TOL = 0.02
FULL = {"resnet18": Size(50_000, 4, 2048), "gpt": Size(20_000, 6, 2048)}
FAST = {"resnet18": Size(2_048, 2, 512), "gpt": Size(2_048, 3, 512)}
GOALS = {"PyHessian, Hutchinson": 100.0, "hessian-eigenthings, Hutch++": 20.0}
"""At least so many times our time, on images."""
MEMORY = 1.5
"""At most so many times plain evaluation's peak, on images."""

HOW = """\
Seconds until the standard error of the trace of the Hessian, over all weights of two or more
dimensions, is {tol:.0%} of it; {threads} thread(s), float32, evaluation mode, batches of 128.
Ours is measured: `seht.measure.trace(..., tol={tol})`, its checks included, the median of a run
before the others and one after each of them. It draws whole replicates, and so may end below
{tol:.0%}: "at our error" takes the others to that error as well. They are extrapolated from
{products} products of the Hessian with a vector: (spread / error)^2 probes; for Hutch++ the better
of that for its residual and an error that falls like 1 / products. The spread of one shared probe
is taken over all Hutchinson rows together, which draw from the same distribution.
Memory is the peak above the start over that of plain evaluation at the same micro-batch.
"""


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    name: str
    seconds: float
    estimate: float
    stderr: float
    note: str
    ratio: float | None = None
    """Times our seconds, to the tolerance."""
    equal: float | None = None
    """The same to the standard error that we reached."""


@dataclass(frozen=True)
class Found:
    """One network."""

    name: str
    title: str
    samples: int
    loss: float
    lines: list[Line]
    memory: float | None
    skipped: list[str]


@dataclass(frozen=True)
class Command:
    """What was asked for; ``ValueError`` at once if it cannot be done."""

    models: Sequence[str] | None = None
    fast: bool = False
    products: int | None = None
    json: str | None = None
    out: str | None = None
    data_dir: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in self.models or ():
            if name not in PROBLEMS:
                raise ValueError(unknown("model", name, PROBLEMS))
        if self.products is not None and self.products < 6:
            raise ValueError(f"--products must be at least 6, not {self.products}")
        check_outputs(self.json, self.out)

    def run(self) -> None:
        """Measure, print the Markdown, write the files."""
        threads = self.threads or torch.get_num_threads()
        torch.set_num_threads(threads)
        start, about = time.perf_counter(), machine(threads)
        products = self.products or (6 if self.fast else 30)
        sizes = FAST if self.fast else FULL
        found = [
            _network(name, sizes[name], products, self.data_dir, threads)
            for name in self.models or PROBLEMS
        ]
        about |= {
            "command": "python benchmarks/measuring" + (" --fast" if self.fast else ""),
            "seconds": round(time.perf_counter() - start),
            "products": products,
        }
        text = markdown(found, about)
        if self.json is not None:
            data = {"machine": about, "models": [asdict(one) for one in found]}
            Path(self.json).write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
        if self.out is not None:
            Path(self.out).write_text(text)
        print(text, end="")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _network(name: str, size: Size, products: int, data_dir: str | None, threads: int) -> Found:
    problem = trained(name, size, data_dir, _say)
    samples: dict[str, Sample] = {}
    skipped = []
    measure.trace(problem.model, loss_fn, problem.batches[:1])  # loads code
    runs = [_ours(problem)]
    for rival in RIVALS:
        if missing(rival):
            skipped.append(f"{rival.name}: not installed (pip install 'seht[crosscheck]')")
            continue
        _say(f"{name}: ours {runs[-1].seconds:.1f} s; now {rival.name}, {products} products")
        samples[rival.name] = rival.run(problem, products)
        runs.append(_ours(problem))
    lines = _lines(runs, samples)
    _say(f"{name}: memory")
    used = memory.ratio(name, size.batch, threads)
    return Found(name, problem.title, size.samples, problem.loss, lines, used, skipped)


def _ours(problem: Trained) -> measure.TraceResult:
    return measure.trace(problem.model, loss_fn, problem.batches, tol=TOL)


def _lines(runs: Sequence[measure.TraceResult], samples: dict[str, Sample]) -> list[Line]:
    ours, seconds = runs[0], statistics.median(run.seconds for run in runs)  # one seed, one result
    note = f"{ours.probes} replicates, {ours.method}; reached {ours.relative:.2%}"
    lines = [Line("`seht.measure.trace`", seconds, ours.estimate, ours.stderr, note)]
    plain = [s for s in samples.values() if not s.fixed]
    spread = math.sqrt(sum(s.spread**2 for s in plain) / len(plain)) if plain else math.nan
    for key, sample in samples.items():
        own = sample if sample.fixed else replace(sample, spread=spread)
        count, same = (products_to(own, ours.estimate, tol) for tol in (TOL, ours.relative))
        free = max(1, sample.products - sample.fixed)
        lines.append(
            Line(
                key,
                count * sample.each,
                sample.estimate,
                sample.spread / math.sqrt(free),
                f"{count:,.0f} products of {sample.each:.2f} s",
                count * sample.each / seconds,
                same * sample.each / seconds,
            )
        )
    return lines


def markdown(found: Sequence[Found], about: dict[str, Any]) -> str:
    """The report."""
    lines = [
        "# How long until the trace is known to 2 %",
        "",
        f"`{about['command']}`, {about['seconds'] / 60:.1f} minutes, {about['date']}: "
        f"{about['cpu']}, {about['cores']} cores, {about['system']}, torch {about['torch']}, "
        f"Python {about['python']}, seht {about['seht']}; load before the start {about['load']}.",
        "",
        HOW.format(tol=TOL, threads=about["threads"], products=about["products"]),
    ]
    for one in found:
        lines += [
            f"## {one.title}, {one.samples:,} samples",
            "",
            f"Loss {one.loss:.3f}. Peak memory {one.memory:.2f} times that of plain evaluation.",
            "",
            f"| | seconds to {TOL:.0%} | times ours | at our error | estimate | how |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for line in one.lines:
            ratios = ["1" if r is None else f"{r:,.0f}" for r in (line.ratio, line.equal)]
            lines.append(
                f"| {line.name} | {line.seconds:,.1f} | {' | '.join(ratios)} | "
                f"{line.estimate:,.4g} +- {line.stderr:,.2g} | {line.note} |"
            )
        lines += ["", *(f"- {text}" for text in one.skipped), *([""] if one.skipped else [])]
        if one.name == "resnet18":
            lines += [*_goals(one), ""]
    return "\n".join(lines).rstrip() + "\n"


def _goals(one: Found) -> list[str]:
    rows = ["| target | wanted | found | reached |", "| --- | --- | --- | --- |"]
    for line in one.lines:
        wanted = GOALS.get(line.name)
        if wanted is not None and line.equal is not None:
            verdict = "yes" if line.equal >= wanted else "no"
            what = f"times less than {line.name} at equal error, at least"
            rows.append(f"| {what} | {wanted:g} | {line.equal:,.0f} | {verdict} |")
    if one.memory is not None:
        verdict = "yes" if one.memory <= MEMORY else "no"
        what = "peak memory over plain evaluation, at most"
        rows.append(f"| {what} | {MEMORY:g} | {one.memory:.2f} | {verdict} |")
    return rows
