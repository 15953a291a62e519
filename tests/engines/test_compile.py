"""``torch.compile`` of the model: the eager result from two graphs, without a break."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import seht


def train(model, call, steps=3):
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    penalty = seht.HessianTrace(model, weight=1e-3, seed=0)
    traces = []
    for _ in range(steps):
        model.zero_grad()
        penalty(lambda: F.cross_entropy(call(x), y)).backward()
        traces.append(penalty.last.trace)
    return traces, [p.grad.clone() for p in model.parameters()]


def test_the_eager_result_from_two_graphs():
    eager = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    counters.clear()
    traces, gradients = train(model, torch.compile(model, backend="aot_eager"))
    assert counters["stats"]["unique_graphs"] == 2  # one records, one replays
    assert not counters["graph_break"]
    wanted, expected = train(eager, eager)
    torch.testing.assert_close(torch.tensor(traces), torch.tensor(wanted))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()
