"""Random nodes: their numbers are drawn in the order of the input's memory."""

import torch
import torch.nn.functional as F

from programs.nodes import Function

RANDOMS: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout-inplace": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "feature-dropout": lambda x: F.dropout1d(x, 0.3) if x.dim() == 3 else F.dropout2d(x, 0.3),
    "alpha-dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "native-dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "own-mask": lambda x: x * (torch.rand_like(x) > 0.3),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "in-place-mask": lambda x: x * torch.empty_like(x).bernoulli_(0.7),
    "rrelu": lambda x: F.rrelu(x, training=True),
}
