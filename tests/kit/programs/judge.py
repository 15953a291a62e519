"""Runs a program through the library: right, or refused in words; anything else is wrong."""

import linecache
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

import seht
from programs.spec import Spec
from programs.truth import ESTIMATORS, Answer, Invalid, Truth, dot, taken
from seht import probes
from seht.errors import PenaltyWarning

SEED = 3
BOUND = 1e-5
"""Of value and gradient, relative."""
ADAPTED = 1e-2
"""The same where the engine chooses its step: it stops looking at an error of 2e-3."""
DRAWS = 16
HOME = str(Path(seht.__file__).parent)

STEPS: dict[str, list[dict[str, Any]]] = {
    "hessian": [{"kappa": k} for k in (1e-4, 1e-5, 1e-3, 1e-6, 3e-4)],
    "ggn": [
        {"kappa": 1e-6}, {"kappa": 1e-5, "two_sided": True}, {"kappa": 1e-4, "two_sided": True},
        {"kappa": 1e-6, "two_sided": True}, {"kappa": 1e-7},
    ],
}  # fmt: skip
"""Sharp bends want a smaller step than the engine's own, tiny gradients a larger one."""


class Wrong(AssertionError):
    """Neither right nor refused."""


def refusal(error: Exception) -> bool:
    """Whether the library itself said no, in one line."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_filename
    line = linecache.getline(code, trace.tb_lineno).strip()
    own = code.startswith(HOME) and line.startswith("raise")
    return own and len(str(error)) > 0 and "\n" not in str(error).strip()


class Found(Answer):
    """What the library said, with the seed of its probes and what it told beside."""

    seed = 0
    shared: frozenset[str] = frozenset()
    told = False


def ask(truth: Truth, options: dict[str, Any]) -> Found:
    """One run of the library on a fresh copy of the program's state."""
    built, spec = truth.built, truth.built.spec
    common = {
        "estimator": ESTIMATORS[spec.estimator], "curvature": spec.curvature,
        "engine": spec.engine, "seed": SEED, **options,
    }  # fmt: skip
    taken(built.leaves)  # what a failed run may have left
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ask_in_form = _function if spec.form == "function" else _penalty
        found = ask_in_form(truth, common)
    found.told = any(issubclass(w.category, PenaltyWarning) for w in heard)
    return found


def _function(truth: Truth, common: dict[str, Any]) -> Found:
    built = truth.built
    truth.seed_random()
    loss, trace = seht.loss_and_trace(built.model, built.user, **common)
    (loss + trace).backward()  # a reentrant checkpoint allows nothing but backward()
    found = Found(loss.item(), trace.item(), truth.slope, beyond(truth))
    found.seed = SEED
    return found


def beyond(truth: Truth) -> list[Tensor]:
    """What the trace added to the gradient."""
    return [a - b for a, b in zip(taken(truth.built.leaves), truth.slope, strict=True)]


def _penalty(truth: Truth, common: dict[str, Any]) -> Found:
    built, spec = truth.built, truth.built.spec
    penalty = seht.HessianTrace(built.model, weight=1.0, **common)
    steps = 4 if spec.form == "steps" else 1
    for step in range(steps):
        taken(built.leaves)
        truth.seed_random()
        lean = spec.form == "backward" or (spec.form == "steps" and step % 2 == 1)
        if lean:
            penalty.backward(built.user)
        else:
            penalty(built.user).backward()
    last = penalty.last
    found = Found(last.loss, last.trace or 0.0, truth.slope, beyond(truth))
    found.seed, found.shared = probes.call_seed(SEED, steps - 1), frozenset(last.shared)
    return found


def size(parts: list[Tensor]) -> float:
    return dot(parts, parts).sqrt().item()


def distance(found: Found, right: Answer, bound: float) -> float:
    """In units of the bound: 1 is where it ends. Rounding is relative to the loss's gradient."""
    floor = 1e-6 * size(right.slope) + 1e-9
    gap = size([a - b for a, b in zip(found.gradient, right.gradient, strict=True)])
    parts = (
        abs(found.loss - right.loss) / (1e-6 * (1 + abs(right.loss))),
        abs(found.trace - right.trace) / (bound * abs(right.trace) + floor),
        gap / (bound * size(right.gradient) + floor),
    )
    return math.inf if any(map(math.isnan, parts)) else max(parts)


def judge(spec: Spec) -> str:
    """``"right"``, ``"refused"`` or ``"invalid"``; raises :class:`Wrong`."""
    try:
        truth = Truth(spec.build())
    except Invalid:
        return "invalid"
    try:
        return _judged(truth)
    except Wrong:
        raise
    except Exception as error:
        if refusal(error) and spec.refusable:
            return f"refused: {error}"
        if isinstance(error, CheckpointError) and spec.engine == "autograd":
            return f"refused: {error}"  # PyTorch's own limit, in the user's own backward pass
        raise Wrong(f"an error without need: {type(error).__name__}: {error}") from error


def _judged(truth: Truth) -> str:
    spec = truth.built.spec
    if spec.estimator == "seht-s" and not truth.built.apart:
        return _drawn(truth)
    best, said = math.inf, ""
    for found, bound in _attempts(truth):
        right = truth.answer(found.seed, found.shared)
        flat = spec.curvature == "ggn" and not spec.measure.curved and right.drawn
        if flat and right.trace == 0 and not found.told:
            raise Wrong("a Gauss-Newton trace of 0, without a word")
        away = distance(found, right, bound)
        if away < best:
            best = away
            said = f"trace {found.trace:.8g}, truth {right.trace:.8g}; gradient off by " + (
                f"{size([a - b for a, b in zip(found.gradient, right.gradient, strict=True)]):.3g}"
                f" of {size(right.gradient):.3g}; loss {found.loss:.8g}, truth {right.loss:.8g}"
            )
        if best < 1:
            return "right"
    raise Wrong(f"{best:.3g} bounds away: {said}")


def _attempts(truth: Truth) -> Iterator[tuple[Found, float]]:
    spec = truth.built.spec
    if spec.engine == "autograd":
        yield ask(truth, {}), BOUND
        return
    if spec.form == "steps":
        yield ask(truth, {}), ADAPTED
        return
    for options in STEPS[spec.curvature]:
        yield ask(truth, options), BOUND


def _drawn(truth: Truth) -> str:
    """Examples meet: the mean of many draws must be the trace, or SEHT-S must say no."""
    built, spec, values = truth.built, truth.built.spec, []
    for seed in range(DRAWS):
        truth.seed_random()
        with torch.no_grad():
            found = seht.hessian_trace(
                built.model, built.user, estimator="seht-s", curvature=spec.curvature, seed=seed
            )
        values.append(found.item())
    mean = sum(values) / DRAWS
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (DRAWS - 1) / DRAWS)
    right = truth.exact()
    if abs(mean - right) > 6 * error + 1e-4 * abs(right) + 1e-7:
        raise Wrong(
            f"the mean of {DRAWS} draws is {mean:.6g} +- {error:.2g}, the trace {right:.6g}"
        )
    return "right"
