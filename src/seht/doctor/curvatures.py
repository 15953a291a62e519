"""Which curvature, and why: one estimate of each is tried on a few examples."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from seht import probes
from seht.course import make_task
from seht.curvature.flat_losses import NoCurvature, NotTwice
from seht.curvature.head import find_head, returns_loss
from seht.doctor.patient import Patient
from seht.engines import Engine, make_engine
from seht.errors import one_line
from seht.estimators import SehtH
from seht.measure.results import PlainResult
from seht.strength.products import Vector, gradient, trainable
from seht.task import Estimate


@dataclass(frozen=True)
class CurvatureChoice(PlainResult):
    """The curvature to take."""

    curvature: str
    boundary: str | None
    """For ``"ggn"``: the module whose outputs are the logits, if it is not the model itself."""
    why: str
    flat: bool = False
    """Whether the loss has no curvature in the outputs."""
    refused: str | None = None
    """The error message of ``"ggn"``, if it is not possible."""

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments for :class:`seht.HessianTrace`."""
        found = {"curvature": self.curvature}
        return found if self.boundary is None else {**found, "boundary": self.boundary}


def choose_curvature(patient: Patient, seed: int) -> CurvatureChoice:
    """The Gauss-Newton trace if it is possible, with a boundary that may have to be found."""
    head, said = find_head(patient.model), ""
    flat = twice = labelled = False

    def look(_: Any, __: Any, arguments: dict[str, Any]) -> None:
        nonlocal labelled
        labelled = labelled or returns_loss(arguments)

    for boundary in [None] if head is None else [None, head]:
        watch = patient.model.register_forward_pre_hook(look, with_kwargs=True)
        try:
            gradients(patient, make_engine("auto"), "ggn", boundary, patient.few, seed)
        except Exception as error:  # whatever it is, there is another curvature
            said = said or one_line(error)
            flat = flat or isinstance(error, NoCurvature)
            twice = twice or isinstance(error, NotTwice)
            continue
        finally:
            watch.remove()
        if boundary is None and not (labelled and head is not None):
            why = "the loss is curved in the model's outputs; it is cheaper than tr(H) and bounded"
            return CurvatureChoice("ggn", None, f"{why} below where the loss is convex in them")
        why = f"the model returns its own loss, so that the outputs to take are its head's, {head}"
        return CurvatureChoice("ggn", head, why, refused=said or None)
    if twice:
        why = "the loss cannot be differentiated twice (as CTC cannot), which tr(G) needs and"
        why += " tr(H) by differences does not"
    elif flat:
        why = "the loss has no curvature in the model's outputs (L1, hinge), so that tr(G) is 0"
    else:
        why = "tr(G) cannot be had here"
    return CurvatureChoice("hessian", None, why, flat=flat and not twice, refused=said)


def gradients(
    patient: Patient, engine: Engine, curvature: str, boundary: str | None, batch: Any, seed: int
) -> tuple[float, Vector, Vector]:
    """The trace of one probe on one batch, and the gradients of the loss and of the trace."""
    task = make_task(
        patient.model,
        patient.objective.closure(batch),
        probes.choose(patient.model),
        SehtH(),
        seed,
        curvature=curvature,
        boundary=boundary,
    )
    assert task is not None  # SEHT-H draws every layer
    weights = trainable(patient.model)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report has its own warnings
        estimate: Estimate = engine.estimate(task, watch=True)
        found = [gradient(part, weights) for part in (estimate.loss, estimate.trace)]
        if estimate.learn is not None:
            estimate.learn()
    return float(estimate.trace.detach()), found[0], found[1]
