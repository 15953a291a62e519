"""How each PyTorch function carries the examples of a batch."""
