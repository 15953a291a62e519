"""``seht bench measure``: how long until the trace of a trained network is known to 2 %."""
