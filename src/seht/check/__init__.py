"""Can the penalty's gradient be trusted on a model? Engines are held against numerical references.

`trust` has :func:`seht.check`, `sandbox` a private copy of the model, `tape`, `truth` and `outputs`
the reference (which uses nothing of the engines), `judge` the verdict, `blame` the search for the
module at fault, and `report` the result. For the doctor, the commands and users.
"""

from seht.check.report import CheckReport
from seht.check.trust import check

__all__ = ["CheckReport", "check"]
