"""The loss as a function of the network's outputs, and its curvature there."""
