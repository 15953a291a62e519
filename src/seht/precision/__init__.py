"""In which precision the passes run: ``policy`` (autocast, TF32) and ``half_weights``.

For the floors above it, from ``curvature`` on; it knows tasks, and no passes.
"""
