"""What to expect of the penalty on *your* model, and which lines to write, on one page.

`examine` has :func:`seht.doctor`, `patient` the private copy that everything runs on. `curvatures`,
`cost`, `shares` and `regime` answer one question each, `report` prints the answers, and `page` is
the same in HTML. For the command ``seht doctor`` and users.
"""

from seht.doctor.examine import doctor
from seht.doctor.report import DoctorReport

__all__ = ["DoctorReport", "doctor"]
