"""SEHT-S: a probe for every example. Which file has what.

- Where the examples lie: ``axes.py`` (the notion), ``inputs.py`` (where they begin),
  ``tracking.py`` (followed from call to call), ``tags.py``, ``memory.py``, ``errors.py``.
- What a function does to them: ``axis_table.py`` (the table), ``calls.py``, ``arithmetic.py``,
  ``criteria.py`` (losses), ``movement.py``, ``inner.py`` (gradients that the closure takes itself),
  ``experiment.py`` (for functions without a rule).
- Their probes: ``signs.py`` (the signs, and the product that applies them), ``weights.py`` and
  ``uses.py`` (where a weight meets them).
- A layer with each example's own weights: ``layers.py`` (the table), ``norm_layers.py``,
  ``recurrent.py``.

The passes themselves are those of the difference engine (``engines/passes.py``).
"""
