"""How strong the penalty is, and when: schedule, share, the tuned weight, and the path it took.

`weight` is what the penalty asks of a weight (a number, a path); `share_weight` and `tuned_weight`
find theirs from looks at gradients (`seen`, `products`, `held_out`); `arguments` says which of them
the user means; `schedule` says which steps are penalised. The penalty imports from here, and
nobody below it.
"""

from seht.strength.path import WeightPath
from seht.strength.schedule import Schedule

__all__ = ["Schedule", "WeightPath"]
