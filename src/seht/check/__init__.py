"""Can the penalty's gradient be trusted on a model? A private copy, its numerical truth, a verdict.

`trust` has :func:`seht.check`, `sandbox` the copy, `tape` and `truth` the numbers (on their own:
nothing of the engines is used), `judge` and `blame` the verdict and `report` what is said of it.
"""

from seht.check.report import CheckReport
from seht.check.trust import check

__all__ = ["CheckReport", "check"]
