"""The command ``seht bench``: run, print, and write what was asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from seht.commands.files import check_outputs, put_text
from seht.errors import unknown
from seht.lab import records
from seht.lab.bench import plot, report
from seht.lab.bench.cases import CASES
from seht.lab.bench.results import FAST, FULL, CaseResult, Settings
from seht.lab.bench.run import bench
from seht.lab.bench.timing import keep_memory


@dataclass(frozen=True)
class Command:
    """The arguments; a ``ValueError`` at once, not after an hour, if they make no sense."""

    models: Sequence[str] | None = None
    fast: bool = False
    repeats: int | None = None
    json: str | None = None
    plot: str | None = None
    out: str | None = None
    join: Sequence[str] = ()
    """JSON files of earlier runs: their models are not measured again."""

    def __post_init__(self) -> None:
        for name in self.models or ():
            if name not in CASES:
                raise ValueError(unknown("model", name, CASES))
        _ = self.earlier
        check_outputs(self.json, self.plot, self.out)
        if self.plot is not None:
            plot.require()

    def __str__(self) -> str:
        """The call, without the files it writes."""
        parts = ["seht bench", *(f"--model {name}" for name in self.models or ())]
        parts += ["--fast"] if self.fast else []
        parts += [] if self.repeats is None else [f"--repeats {self.repeats}"]
        return " ".join(parts)

    @cached_property
    def earlier(self) -> list[dict[str, Any]]:
        """What the files to join hold."""
        found = []
        for file in self.join:
            try:
                data = records.loads(Path(file).read_text(encoding="utf-8"))
                models = [CaseResult.from_dict(model) for model in data["models"]]
                # A file that makes no report should fail before an hour of measuring, not after it.
                report.to_markdown(models, self.settings, report.joined([data["machine"]], None))
            except Exception as error:  # whatever an altered file makes of itself
                reason = " ".join(repr(error).split())[:200]
                raise ValueError(
                    f"cannot join {file!r}: give a file that `seht bench --json` wrote ({reason})"
                ) from error
            found.append(data)
        return found

    @property
    def settings(self) -> Settings:
        """The preset, with the rounds that were asked for."""
        preset = FAST if self.fast else FULL
        if self.repeats is None:
            return preset
        slow = min(self.repeats, preset.slow_rounds)
        return replace(preset, rounds=self.repeats, slow_rounds=slow)

    def run(self, settings: Settings | None = None) -> None:
        """Measure, print the Markdown report, write the files."""
        settings = settings or self.settings
        start = time.perf_counter()
        about = report.machine(settings.threads)
        known = {
            model["name"]: CaseResult.from_dict(model)
            for data in self.earlier
            for model in data["models"]
        }
        asked = self.models or list(CASES)
        new = [name for name in asked if name not in known]
        if new:
            about["kept"] = keep_memory()
            known |= {result.name: result for result in bench(new, settings)}
        results = [known[name] for name in CASES if name in known]
        about |= {"command": str(self), "seconds": round(time.perf_counter() - start)}
        about = report.joined([data["machine"] for data in self.earlier], about if new else None)
        if self.json is not None:
            put_text(self.json, report.to_json(results, settings, about) + "\n")
        picture = self.plot
        if self.plot is not None:
            plot.draw(results, self.plot)
            if self.out is not None:
                picture = os.path.relpath(self.plot, Path(self.out).absolute().parent)
        text = report.to_markdown(results, settings, about, plot=picture)
        if self.out is not None:
            put_text(self.out, text)
        print(text, end="")
