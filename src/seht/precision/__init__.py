"""In which precision the passes run: ``policy``, ``half_weights`` and ``tf32``.

For the floors above it, from ``curvature`` on; it knows tasks, and no passes.
"""
