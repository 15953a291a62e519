"""NumPy's random numbers, whose module is loaded only when somebody asks for it."""

import subprocess
import sys

BEFORE = "import sys, numpy, torch, seht\n"
OURS = """
from seht.tensors.random_state import own_randomness, seed_cpu
with own_randomness():
    seed_cpu(0)
print(numpy.random.rand())
"""
FIRST_TO_DRAW = """
import torch.nn.functional as F
model = torch.nn.Linear(3, 2)
def closure():
    x = torch.as_tensor(numpy.random.rand(4, 3), dtype=torch.float32)
    return F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1]))
seht.HessianTrace(model, weight=1e-3)(closure).backward()
print(model.weight.grad.norm().item())
"""


def said(code):
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", BEFORE + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_seed_of_ours_does_not_stay():
    assert said(OURS) != said(OURS) != "0.5488135039273248\n"


def test_a_closure_may_be_the_first_to_draw():
    assert float(said(FIRST_TO_DRAW)) > 0
