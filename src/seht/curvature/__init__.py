"""The network's outputs, and the curvature of the loss as a function of them.

``boundary`` finds the outputs, ``output_curvature`` differentiates the loss in them, ``softmax``
does so in closed form, ``flat_losses`` refuses a loss that has no curvature there. For ``replay``
and what is above it.
"""
