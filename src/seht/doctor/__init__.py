"""What should I expect of the penalty on *my* model, and what do I write? One page.

`examine` has :func:`seht.doctor`, `patient` the private copy that everything runs on, `curvatures`,
`cost`, `shares` and `regime` one question each, `report` what is said of the answers, `page` the
same in HTML. For users, and for ``seht doctor``.
"""

from seht.doctor.examine import doctor
from seht.doctor.report import DoctorReport

__all__ = ["DoctorReport", "doctor"]
