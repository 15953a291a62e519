"""Every method, driven by the registry: it learns, it resumes, it combines."""

import pytest
import torch
from training import RECIPES, Trainer

from seht.lab.methods import METHODS

CASES = [(name, task) for name in METHODS for task in sorted(METHODS[name].tasks)]
every_method = pytest.mark.parametrize(("name", "task"), CASES, ids=[f"{n}-{t}" for n, t in CASES])


@every_method
def test_learns(name, task):
    trainer = Trainer(name, RECIPES[task])
    before = trainer.evaluate()
    trainer.train(20)
    assert trainer.evaluate() < before - 0.2


@every_method
def test_resumes_bit_for_bit(name, task):
    straight = Trainer(name, RECIPES[task])
    straight.train(4)
    saved = straight.save()
    straight.train(3)
    resumed = Trainer(name, RECIPES[task], seed=0)
    resumed.train(1)  # what it has done before must not matter
    resumed.load(saved)
    resumed.train(3)
    ours, theirs = straight.weights(), resumed.weights()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@every_method
@pytest.mark.parametrize("partner", ["seht-h", "seht-h(curvature=ggn)", "label-smoothing"])
def test_combines(name, task, partner):
    if partner.startswith(name):
        pytest.skip("with itself")
    trainer = Trainer(f"{name}+{partner}", RECIPES[task])
    before = trainer.evaluate()
    trainer.train(12)
    assert trainer.evaluate() < before - 0.1
    if partner.startswith("seht"):
        assert trainer.method.methods[-1].name or trainer.method.log()["trace"]
