"""The interface of ranks: one process alone, and a wrapper that nobody has heard of."""

import copy
import pickle

import pytest
import torch
from stepping import FORMS, WEIGHT, entropy, gradients, mlp
from torch import nn

import seht
from seht import distributed
from seht.distributed import LOCAL, Ranks, ranks_of, unwrapped


def test_one_process_alone():
    model, values = mlp(), torch.tensor([1.0, 2.0], dtype=torch.float64)
    ranks = ranks_of(model)
    assert ranks is LOCAL and unwrapped(model) is model
    assert ranks.mean(values) is values and ranks.agree("mine") == "mine"
    assert ranks.seed(5, 0) == 5 and ranks.number(3) == 3
    for twin in (copy.deepcopy(ranks), pickle.loads(pickle.dumps(ranks))):
        assert type(twin) is Ranks


class Quiet(nn.Module):
    """A wrapper that does nothing."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


class QuietRanks(Ranks):
    """Two ranks that never say a word."""

    wrapper = Quiet

    @classmethod
    def find(cls, model, before):
        found = before if isinstance(before, cls) else cls()
        return found if isinstance(model, Quiet) else None

    def need_whole(self, what):
        raise RuntimeError(f"{what} needs whole weights")

    def number(self, call):
        return 2 * call + 1


@pytest.mark.parametrize("form", FORMS)
def test_another_wrapper(monkeypatch, form):
    """One file, one line in a list: the rest of the house asks what it says."""
    monkeypatch.setattr(distributed.ranks, "KINDS", [*distributed.KINDS, QuietRanks])
    bare, model = mlp(), Quiet(mlp())
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=3)
    ranks = penalty._course.ranks
    assert type(ranks) is QuietRanks and unwrapped(model) is model.module
    closure = entropy(model)
    penalty.backward(closure) if form == "lean" else penalty(closure).backward()
    assert penalty._course.ranks is ranks
    assert penalty.last.seed == seht.probes.call_seed(3, 0, 1)
    twin = seht.HessianTrace(bare, weight=WEIGHT, seed=3)
    monkeypatch.setattr(Ranks, "number", lambda self, call: 2 * call + 1)
    closure = entropy(bare)
    twin.backward(closure) if form == "lean" else twin(closure).backward()
    for ours, theirs in zip(*(gradients(m.parameters()) for m in (model, bare)), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match=r"seht\.exact_trace needs whole weights"):
        seht.exact_trace(model, entropy(model))
