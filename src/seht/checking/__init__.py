"""The parts of :func:`seht.check`: a private copy, frozen decisions, the numerical truth, blame."""
