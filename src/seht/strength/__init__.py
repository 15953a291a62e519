"""How strong the penalty is, and when: schedule, share, the tuned weight, and the path it took.

`weight` has the four ways to a weight (a number, a path, a share, tuned on held-out data) behind
one interface; `schedule` says which steps are penalised; `products` and `held_out` have the numbers
that a share and a tuned weight are found from. The penalty imports from here, and nobody below it.
"""

from seht.strength.path import WeightPath
from seht.strength.schedule import Schedule

__all__ = ["Schedule", "WeightPath"]
