"""Peak memory of a step, each row in a process of its own.

    python -m seht.lab.bench.memory mlp tiny plain hessian/lean

imports torch once and forks a child for each row. The child notes its resident memory, builds model
and data, runs a plain step and one of the row and reports how far the peak rose above that:
weights, gradients, momentum, graph, and whatever the engine holds. Allocators keep memory that was
freed, by chance more or less of it. So glibc's is asked to give every large block back at once
(:data:`RETURN_AT_ONCE`), and the peak is what the step held; on other systems expect some noise.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from seht.errors import brief
from seht.lab.bench.cases import CASES, Problem
from seht.lab.bench.rows import BenchRow, table
from seht.lab.bench.runners import Penalty, Runner

RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MIB = 2**20


def measure(
    case: str, scale: str, rows: list[str], *, threads: int, checks: bool
) -> Iterator[dict[str, Any]]:
    """For each row ``{"row", "peak"}`` in MiB, or ``{"row", "error"}``.

    With ``checks`` also ``"check"``, the peak of a step on which the engine checks itself.
    """
    command = [sys.executable, "-m", "seht.lab.bench.memory", case, scale, *rows]
    command += [f"--threads={threads}", *(["--checks"] if checks else [])]
    environment = {**os.environ, **RETURN_AT_ONCE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"the process that measures memory ended with {process.returncode}")


def peak_of(row: BenchRow, case: str, scale: str, checks: bool) -> dict[str, Any]:
    """Runs in the child."""
    # Torch's code is read from disk when it is first used, which is not memory of the step: let a
    # tiny model use it first.
    with suppress(Exception):
        for _ in _steps(row, CASES[case].problem("tiny"), checks):
            pass
    watch = Peak()
    problem = CASES[case].problem(scale)
    return {"row": row.key, **{name: watch.mib() for name in _steps(row, problem, checks)}}


def _steps(row: BenchRow, problem: Problem, checks: bool) -> Iterator[str]:
    """Runs steps, and says what the highest level so far stands for."""
    optimizer = problem.optimizer()
    runner = row.runner(problem)
    if isinstance(runner, Penalty):
        runner.steady()
    draws = [draw for _, draw in runner.plan(0)]

    def step(draw: int) -> None:
        runner.prepare(draw)
        optimizer.zero_grad()
        runner.run()
        optimizer.step()

    plain = Runner(problem)
    optimizer.zero_grad()
    plain.run()
    optimizer.step()  # allocates momentum
    for draw in draws:
        step(draw)
    yield "peak"
    if checks and isinstance(runner, Penalty) and runner.check_next():
        step(draws[-1])
        yield "check"


class Peak:
    """How far resident memory rises from here on."""

    def __init__(self) -> None:
        self._reset = False
        with suppress(OSError):  # Linux: forget the peak so far
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self._reset = True
        self._start = self._read()

    def mib(self) -> float:
        """The highest level since, in MiB above the start."""
        return (self._read() - self._start) / MIB

    def _read(self) -> int:
        if self._reset:
            with open("/proc/self/status") as file:
                for line in file:
                    if line.startswith("VmHWM:"):
                        return int(line.split()[1]) * 1024
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(arguments: list[str]) -> None:
    """One fork for each row; a line of JSON for each on standard output."""
    checks = "--checks" in arguments
    threads = next(int(a.partition("=")[2]) for a in arguments if a.startswith("--threads="))
    case, scale, *keys = [a for a in arguments if not a.startswith("--")]
    rows = {row.key: row for row in table()}
    # An optimizer imports half of torch when it is first used: here, once, and not in every child.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0).step()
    for key in keys:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(threads)
            warnings.simplefilter("ignore")
            try:
                found = peak_of(rows[key], case, scale, checks)
            except Exception as error:
                found = {"row": key, "error": brief(error)}
            print(json.dumps(found), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"row": key, "error": f"the process died ({status})"}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
