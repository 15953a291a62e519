"""How each PyTorch function carries the examples of a batch: ``axes.py`` says what a tag is, the
rules are in ``arithmetic.py``, ``criteria.py`` (losses) and ``movement.py``. For the rows of the
table, and for ``persample/``.
"""
