"""Runs a closure again, at other weights and with the same decisions.

- ``centre`` plans, runs the closure and records it (``recorder``), ``passes`` runs it again
  (``replayer``); what both modes share is in ``mode``. ``leaves``: what gradients are taken in;
  ``prefix``: what comes before the first drawn weight is kept.
- Every run begins alike and leaves nothing behind: ``state`` (weights and buffers),
  ``checkpoints``.
- The closure must repeat itself, and only compute a loss: ``witness``, ``closures``, ``followed``.

For ``distributed``, ``engines`` and what is above them.
"""
