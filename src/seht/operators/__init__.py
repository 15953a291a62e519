"""What we know of each PyTorch function, one row each, in the file of its family.

- ``operator.py``: a row; ``table.py``: all of them, as look-ups by function object;
  ``register.py``: the user's own functions.
- The families, each with its rows: ``activations.py``, ``arithmetic.py``, ``constants.py`` (all
  that autograd holds constant, random numbers, too), ``distances.py``, ``foreach.py``,
  ``layers.py``, ``losses.py``, ``maxima.py`` (pooling, too), ``movement.py``, ``norms.py``.
- The columns. Kinks: ``rules.py`` (what a rule is), ``pieces.py``. Axes: ``axes.py`` (what a tag
  is). Affine: the mode in ``affine.py``. Safe forms: the mode in ``safe_forms.py``, ``orders.py``
  (what no mode sees). Sharp: ``losses.py``.

May import ``tensors/`` and what lies beneath; imported by all above.
"""

from seht.operators.register import register_kink

__all__ = ["register_kink"]
