"""seht: flat minima for PyTorch, with derivatives that are right.

>>> penalty = seht.HessianTrace(model, weight=1e-3)             # doctest: +SKIP
>>> loss = penalty(lambda: F.cross_entropy(model(x), y))        # doctest: +SKIP
"""

from seht.check import CheckReport, check
from seht.curvature.boundary import boundary
from seht.errors import ExampleError, KinkError, NonFiniteError, PenaltyWarning, UnrepeatableError
from seht.estimators import Estimator, SehtD, SehtH, SehtS
from seht.functional import exact_trace, hessian_trace, loss_and_trace
from seht.operators import register_kink
from seht.penalty import HessianTrace
from seht.record import StepRecord
from seht.replay.replayer import replaying
from seht.strength.tuning import Tuning
from seht.strength.weight import WeightPath

from seht import measure  # isort: skip
from seht.doctor import DoctorReport, doctor  # isort: skip

__version__ = "0.2.0"

__all__ = [
    "CheckReport",
    "DoctorReport",
    "Estimator",
    "ExampleError",
    "HessianTrace",
    "KinkError",
    "NonFiniteError",
    "PenaltyWarning",
    "SehtD",
    "SehtH",
    "SehtS",
    "StepRecord",
    "Tuning",
    "UnrepeatableError",
    "WeightPath",
    "boundary",
    "check",
    "doctor",
    "exact_trace",
    "hessian_trace",
    "loss_and_trace",
    "measure",
    "register_kink",
    "replaying",
]
