"""What the difference engine freezes: decisions, and all that autograd holds constant.

The table of functions is ``table.py``; the rules that it names are in the other files.
"""

from seht.engines.kinks.table import DETACH, IN_PLACE, KINKS, RANDOM, register_kink, spellings

__all__ = ["DETACH", "IN_PLACE", "KINKS", "RANDOM", "register_kink", "spellings"]
