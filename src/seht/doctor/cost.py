"""What a penalised step costs on this machine: time, in turns with plain steps, and peak memory.

A step is forward and backward passes, without the optimiser. Each timed step stands between two
plain ones, so that other load on the machine slows all three. The engine's rare checks of its step
size are left out. Peak memory is what tensors hold at one time beyond the weights: on the CPU from
PyTorch's profiler, allocation by allocation, on CUDA from its allocator.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from seht.doctor.curvatures import CurvatureChoice
from seht.doctor.patient import Patient
from seht.errors import one_line
from seht.measure.results import PlainResult
from seht.penalty import HessianTrace
from seht.task import split
from seht.tensors.process import quiet_profiler

_ROUNDS = 9
_LEAST = 0.03
"""Steps shorter than this many seconds are repeated until they take that long."""
_NEVER = 1 << 60
MIB = 2**20
Step = Callable[[], None]


@dataclass(frozen=True)
class Cost(PlainResult):
    """One form of the penalty, beside a plain step."""

    curvature: str
    form: str
    """``scalar``: ``penalty(closure)``; ``lean``: ``penalty.backward(closure)``."""
    ratio: float | None = None
    """Time divided by that of a plain step: the median over the rounds."""
    low: float | None = None
    high: float | None = None
    """... and its quartiles."""
    rounds: int = 0
    memory: float | None = None
    """Peak in MiB, beyond the weights."""
    failed: str | None = None
    """Why there are no figures."""


@dataclass(frozen=True)
class Costs(PlainResult):
    """Every form, and the plain step."""

    seconds: float
    """Seconds of a plain step."""
    memory: float | None
    """... and its peak in MiB."""
    forms: tuple[Cost, ...]


def measure_cost(patient: Patient, choice: CurvatureChoice, seed: int, seconds: float) -> Costs:
    """Each form in turns with a plain step, until the time is over; each once at least."""
    closure = patient.objective.closure(patient.batches[0])
    parameters = [p for p in patient.model.parameters() if p.requires_grad]

    def plain() -> None:
        split(closure())[0].backward()

    def penalised(curvature: str, form: str) -> Step:
        boundary = choice.boundary if curvature == "ggn" else None
        penalty = HessianTrace(
            patient.model, weight=1e-6, curvature=curvature, boundary=boundary, seed=seed
        )
        state = penalty.state_dict()
        checks = {"uses": 2, "next_check": _NEVER}
        penalty.load_state_dict({**state, "engine": {**state["engine"], **checks}})
        if form == "lean":
            return lambda: penalty.backward(closure)
        return lambda: split(penalty(closure))[0].backward()

    curvatures = ("ggn", "hessian") if choice.curvature == "ggn" else ("hessian",)
    steps = {(c, form): penalised(c, form) for c in curvatures for form in ("scalar", "lean")}
    memory: dict[Any, float | None] = {}
    failed: dict[Any, str] = {}
    clock = _Clock(parameters, patient.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = clock.peak(plain)
        clock.plain(plain)  # the first step allocates
        for key, step in steps.items():
            try:
                memory[key] = clock.peak(step)
            except Exception as error:  # the other forms are still wanted
                failed[key] = one_line(error)
        working = {key: step for key, step in steps.items() if key not in failed}
        ratios = clock.turns(plain, working, seconds)
    forms = [_cost(*key, ratios.get(key, []), memory.get(key), failed.get(key)) for key in steps]
    if choice.curvature != "ggn":
        forms += [Cost("ggn", form, failed=choice.why) for form in ("scalar", "lean")]
    return Costs(statistics.median(clock.plain_seconds), own, tuple(forms))


def _cost(
    curvature: str, form: str, ratios: list[float], memory: float | None, failed: str | None
) -> Cost:
    if not ratios:
        return Cost(curvature, form, memory=memory, failed=failed)
    middle = low = high = ratios[0]
    if len(ratios) > 1:
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Cost(curvature, form, middle, low, high, len(ratios), memory)


class _Clock:
    """Measures time and memory of steps; gradients are cleared afterwards."""

    def __init__(self, parameters: list[Any], device: torch.device) -> None:
        self._parameters, self._device = parameters, device
        self.plain_seconds: list[float] = []

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _seconds(self, step: Step, repeats: int = 1) -> float:
        taken = 0.0
        for _ in range(repeats):
            self._clear()
            start = time.perf_counter()
            step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            taken += time.perf_counter() - start
        self._clear()
        return taken / repeats

    def plain(self, step: Step, repeats: int = 1) -> float:
        """Seconds of a plain step."""
        self.plain_seconds.append(self._seconds(step, repeats))
        return self.plain_seconds[-1]

    def turns(self, plain: Step, steps: dict[Any, Step], seconds: float) -> dict[Any, list[float]]:
        """For each step its time divided by that of the plain steps around it, round by round."""
        found: dict[Any, list[float]] = {key: [] for key in steps}
        repeats = max(1, round(_LEAST / self.plain(plain)))
        end = time.perf_counter() + seconds
        for _ in range(_ROUNDS):
            before = self.plain(plain, repeats)
            for key, step in steps.items():
                taken = self._seconds(step, max(1, repeats // 3))
                after = self.plain(plain, repeats)
                found[key].append(2 * taken / (before + after))
                before = after
            if time.perf_counter() > end:
                break
        return found

    def peak(self, step: Step) -> float | None:
        """The peak in MiB beyond what was there before; ``None`` if it cannot be measured."""
        self._clear()
        try:
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
                before = torch.cuda.memory_allocated(self._device)
                step()
                return (torch.cuda.max_memory_allocated(self._device) - before) / MIB
            if self._device.type != "cpu" or not torch.profiler.kineto_available():
                return None
            return _profiled(step)
        finally:
            self._clear()


def _profiled(step: Step) -> float | None:
    with quiet_profiler():
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        with profile:
            step()
    results = getattr(profile.profiler, "kineto_results", None)
    if results is None:
        return None
    events = [event for event in results.events() if event.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest / MIB
