"""The scheduler of the trials, from ``--engine`` and its options."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seht.lab.progress import Watch
    from seht.lab.schedulers import Scheduler
    from seht.lab.trials import Trial


def scheduler_of(arguments: argparse.Namespace) -> Scheduler:
    """The scheduler that the arguments ask for; a mistake is a ``ValueError``."""
    if arguments.engine == "ray":
        from seht.lab.schedulers.on_ray import RayTasks, need_ray
        from seht.lab.schedulers.resources import Resources

        if arguments.jobs > 1:
            raise ValueError(
                "--jobs belongs to --engine local; on Ray as many runs go at a time as "
                "--resources-per-trial leaves room for"
            )
        need_ray()
        asked = arguments.resources_per_trial
        return RayTasks(arguments.address, None if asked is None else Resources.parse(asked), say)
    for option in ("address", "resources_per_trial"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} belongs to --engine ray")
    from seht.lab.schedulers.local import InTurn, Processes

    return Processes(arguments.jobs, say) if arguments.jobs > 1 else InTurn(watch)


def watch(trial: Trial) -> Watch | None:
    """A progress bar, if the output is a terminal."""
    from seht.lab import progress

    return progress.Bar(trial.name, transient=True) if sys.stdout.isatty() else None


def say(line: str) -> None:
    """Print it now."""
    print(line, flush=True)
