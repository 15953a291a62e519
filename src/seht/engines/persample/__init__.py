"""SEHT-S: a probe for every example. Which file has what.

- Where the examples lie: ``axes.py`` (the notion), ``tracking.py`` (followed from call to call),
  ``axis_rules.py`` (what each function does to them), ``experiment.py`` (functions without a rule).
- Their probes: ``signs.py`` (the signs, and the product that applies them), ``uses.py``.
- A layer with each example's own weights: ``layers.py`` (the table), ``norm_layers.py``,
  ``recurrent.py``.

The passes themselves are those of the difference engine (``engines/passes.py``).
"""
