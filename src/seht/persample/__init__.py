"""SEHT-S, a probe for every example.

- Where the examples lie: ``tags.py`` (where they begin, too), ``tracking.py`` (followed from call
  to call, by the rules in ``operators/``), ``experiment.py`` (for functions without a rule),
  ``memory.py``, ``errors.py``.
- Their probes: ``signs.py``, ``products.py`` (a layer's product, and the one with the signs),
  ``weights.py`` and ``uses.py`` (where a weight meets them).
- A layer with each example's own weights: ``layers.py`` (the table), ``norm_layers.py``,
  ``recurrent.py``.

The passes themselves are those of the difference engine (``replay/passes.py``). For ``replay`` and
what is above it.
"""
