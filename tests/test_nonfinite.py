"""An estimate that is not finite: an error, or a step without the penalty and one warning."""

import math
import warnings

import pytest
import torch
from helpers import Snapshot, every_engine, own_state
from torch import nn

import seht

WEIGHT = 0.01


class Root(nn.Module):
    """w^1.5 at a zero weight: loss and gradient are finite, the second derivative is not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def loss(self):
        self.count += 1
        return self.weight.pow(1.5).sum()


@every_engine
@pytest.mark.supports("estimates that are not finite", cell="refused")
def test_nonfinite_estimates_raise(engine):
    model = Root()
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    before, state = Snapshot(model), own_state(penalty)
    with pytest.raises(seht.NonFiniteError, match=r"lower the learning rate.*on_nonfinite='skip'"):
        penalty(model.loss)
    Snapshot(model).assert_same(before)
    assert own_state(penalty) == state


@every_engine
@pytest.mark.supports('`on_nonfinite="skip"`')
def test_nonfinite_estimates_can_be_skipped_with_one_warning(engine):
    model, plain = Root(), Root()
    penalty = seht.HessianTrace(model, weight=WEIGHT, on_nonfinite="skip", engine=engine)
    plain.loss().backward()
    with pytest.warns(seht.PenaltyWarning, match="left out") as caught:
        total = penalty(model.loss)
    assert caught[0].filename == __file__  # it points at the user's line
    total.backward()
    assert total.item() == 1.0
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert not math.isfinite(penalty.last.trace) and penalty.last.penalty == 0.0
    assert model.count == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        penalty(model.loss)
    assert penalty.step == 2 and model.count == 2
    assert penalty.guard.count == 0  # nonsense does not enter the running means
