"""Tensors, the graphs behind them and the process around them; knows nothing of estimates.

- Tensors: ``trees`` (structures of them), ``memory`` (how they lie there, and on ranks),
  ``gradients`` (one for each leaf).
- Graphs: ``graph`` (walks through them, and hooks in them), ``graph_need``, ``deferred``,
  ``second_derivatives``.
- The process: ``process`` (all that we change in it), ``random_state``, ``undo``.

The lowest floor: anyone may import it, and it imports nothing of ours.
"""
