"""What the difference engine freezes: decisions, and all that autograd holds constant.

- ``table.py``: which function is frozen by which rule; ``register.py``: the user's own functions.
- ``rules.py``: what a rule is.
- The rules: ``pieces.py`` (ReLU and its kin), ``places.py`` (maxima), ``norms.py``,
  ``constants.py`` (comparisons, ``detach``), ``draws.py`` (random numbers), ``composed.py``
  (functions made of others; ``formulas.py``, ``foreach.py``).
"""

from seht.operators.register import register_kink
from seht.operators.table import DETACH, IN_PLACE, KINKS, RANDOM, spellings

__all__ = ["DETACH", "IN_PLACE", "KINKS", "RANDOM", "register_kink", "spellings"]
