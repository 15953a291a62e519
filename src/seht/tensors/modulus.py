r"""The absolute value of complex numbers, with derivatives of every order at 0.

There :math:`|c|` has no derivative. PyTorch takes 0 for the first, and NaN for the third, which
would reach the weights from every frame of silence in a spectrogram. Here all of them are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODULI = frozenset((torch.abs, Tensor.abs, Tensor.__abs__, torch.absolute, Tensor.absolute))
"""The functions that give it."""


def modulus(c: Tensor, zero: Tensor) -> Tensor:
    """|c|, and the constant 0 where ``zero`` says that it is 0."""
    return c.masked_fill(zero, 1).abs().masked_fill(zero, 0)
