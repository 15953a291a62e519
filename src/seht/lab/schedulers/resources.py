"""What Ray reserves for a trial; it affects where and when the trial runs, never its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from seht.lab.records import RunError
from seht.lab.trials import Trial


@dataclass(frozen=True)
class Resources:
    """CPUs and GPUs of a trial; ``None``: as many CPUs as the recipe has threads, and a GPU where
    the cluster has one and the trial may use it.
    """

    cpus: float | None = None
    gpus: float | None = None

    @classmethod
    def parse(cls, text: str) -> Resources:
        """``cpus=1,gpus=0.5``; either may be left out."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in ("cpus", "gpus") or name in found:
                raise ValueError(
                    f"--resources-per-trial {text!r}: {name!r} is none of cpus and gpus, or given "
                    "twice; write for example cpus=1,gpus=0.5"
                )
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not 0 <= number < math.inf or (number > 1 and number != int(number)):
                raise ValueError(
                    f"--resources-per-trial {text!r}: {name} must be a whole number, or a share "
                    f"between 0 and 1, not {value!r}"
                )
            found[name] = number
        return cls(**found)

    def of(
        self,
        trial: Trial,
        nodes: Sequence[Mapping[str, float]],
        may_grow: bool,
        say: Callable[[str], None],
    ) -> dict[str, float]:
        """Options of the trial's task; an error where no node has so much, nor ever will."""
        cpus, gpus = self.cpus, self.gpus
        if cpus is None:
            most = max(node.get("CPU", 0) for node in nodes)
            cpus = min(trial.recipe.threads, most or trial.recipe.threads)
        if gpus is None:
            device = trial.execution.device
            there = any(node.get("GPU", 0) >= 1 for node in nodes)
            gpus = float(device == "cuda" or (device == "auto" and there))
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            asked = f"{trial.name} takes {cpus:g} CPUs and {gpus:g} GPUs, and no node has so many"
            if not may_grow:
                raise RunError(f"{asked}; ask for less with --resources-per-trial")
            say(f"{asked}: it waits for one")
        return {"num_cpus": cpus, "num_gpus": gpus}
