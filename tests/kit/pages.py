"""The Python of a Markdown page: its blocks, run in their order in one namespace."""

import re
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import seht

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Net(nn.Module):
    """The model of a page that does not make its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 16), nn.Linear(16, 3)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


def usual():
    """The names that a training script has before the penalty comes in."""
    torch.manual_seed(0)
    model = Net()
    x, y = torch.randn(8, 20), torch.randint(0, 3, (8,))
    return {
        "__name__": "page",
        "torch": torch,
        "F": F,
        "nn": nn,
        "seht": seht,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": [(torch.randn(8, 20), torch.randint(0, 3, (8,))) for _ in range(2)],
        "Net": Net,
        "epochs": 30,
        "held_out_loader": [(x, y)],
        "x": x,
        "y": y,
        "batch": (x, y),
        "loss_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "penalty": seht.HessianTrace(model, weight=1e-3, curvature="ggn"),
    }


def blocks(text):
    """Each block with the line it begins in."""
    return [(text[: match.start(1)].count("\n"), match.group(1)) for match in BLOCK.finditer(text)]


def run(text, name):
    """Run the blocks of a page or of a docstring; returns their names at the end."""
    names = usual()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line, code in blocks(text):
            # Line numbers of a traceback are those of the page.
            exec(compile("\n" * line + code, name, "exec"), names)
    sys.stdout.flush()
    return names
