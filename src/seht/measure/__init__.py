"""Measure how flat a model is: the Hessian's trace over a whole data set, and what goes with it.

Every function takes ``(model, loss_fn, data)``, ``loss_fn(model, batch)`` being the mean loss of a
batch, returns a frozen record that carries its error, and leaves the model as it was.

A file for each function has its name. What they share: ``objective`` (the loss over the data as a
function of the weights), ``data``, ``keep`` (nothing is changed), ``results``, ``stats``,
``progress``, ``numbers``; ``probing`` and ``krylov`` do the work of traces and spectra. ``survey``
and ``page/`` are for ``seht measure``. Users, the doctor, the commands and the lab may import it.
"""

from seht.errors import MissingExtraError
from seht.measure.bound import BoundResult, bound
from seht.measure.density import DensityResult, density
from seht.measure.eigenvalues import EigenvaluesResult, eigenvalues
from seht.measure.landscape import LandscapeResult, landscape
from seht.measure.progress import Progress
from seht.measure.results import Layer, TraceResult
from seht.measure.robustness import RobustnessResult, robustness
from seht.measure.sharpness import SharpnessResult, sharpness
from seht.measure.stability import StabilityResult, stability
from seht.measure.trace import trace
from seht.measure.tracker import Tracked, Tracker

__all__ = [
    "BoundResult",
    "DensityResult",
    "EigenvaluesResult",
    "LandscapeResult",
    "Layer",
    "MissingExtraError",
    "Progress",
    "RobustnessResult",
    "SharpnessResult",
    "StabilityResult",
    "TraceResult",
    "Tracked",
    "Tracker",
    "bound",
    "density",
    "eigenvalues",
    "landscape",
    "robustness",
    "sharpness",
    "stability",
    "trace",
]
