"""The precision of the passes: ``policy`` (autocast, TF32) and ``half_weights``.

It may import ``task`` and what is below it; ``curvature`` and everything above may import it.
"""
