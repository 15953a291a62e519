"""seht: flat minima for PyTorch, with derivatives that are right.

>>> penalty = seht.HessianTrace(model, weight=1e-3)             # doctest: +SKIP
>>> loss = penalty(lambda: F.cross_entropy(model(x), y))        # doctest: +SKIP
"""

from seht.estimators import Estimator, SehtD, SehtH
from seht.functional import exact_trace, hessian_trace, loss_and_trace
from seht.guards import PenaltyWarning
from seht.penalty import HessianTrace, NonFiniteError, StepRecord

__version__ = "0.1.0"

__all__ = [
    "Estimator",
    "HessianTrace",
    "NonFiniteError",
    "PenaltyWarning",
    "SehtD",
    "SehtH",
    "StepRecord",
    "exact_trace",
    "hessian_trace",
    "loss_and_trace",
]
