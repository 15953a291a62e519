"""AdamW in place of SGD, and the small GPT that trains with it."""

from dataclasses import replace

import pytest
import torch
from small import TEXT, digits, outcome, timeless, train
from stops import stopped_and_resumed
from torch import nn
from training import RECIPES, Trainer

from seht.lab import models, optimizers
from seht.lab.config import OptimConfig
from seht.lab.data import load
from seht.lab.methods import METHODS
from seht.lab.recipes import identity, override, recipe

ADAMW = OptimConfig(lr=0.02, name="adamw", weight_decay=0.01, schedule="constant")
ACT = {"seht-s": "seht-s(coupling=frozen)", "lookahead": "lookahead(k=2)"}
WRAPPED = ("weight-decay", "sam", "lookahead", "seht-h")
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in METHODS
    if name not in (*WRAPPED, "linbreg")
]


def test_one_step_is_the_formula():
    """Loshchilov and Hutter's, in float64: the decay is not divided by the root."""
    w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    made = optimizers.make(replace(ADAMW, lr=0.1, beta2=0.99, eps=1e-3, momentum=0.8), [w])
    start, m, v = w.detach().clone(), 0.0, 0.0
    for step in (1, 2, 3):
        gradient = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64) * step
        w.grad = gradient.clone()
        made.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.99 * v + 0.01 * gradient**2
        start = start * (1 - 0.1 * 0.01)
        start = start - 0.1 * (m / (1 - 0.8**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-3)
        torch.testing.assert_close(w.detach(), start, rtol=1e-12, atol=0)


@pytest.mark.parametrize("task", ["image", "text"])
@pytest.mark.parametrize("name", [*WRAPPED, *SLOW])
def test_every_method_learns_and_resumes_bit_for_bit(name, task):
    if task not in METHODS[name].tasks:
        pytest.skip("does not fit")
    made = replace(RECIPES[task], optim=ADAMW)
    straight = Trainer(ACT.get(name, name), made)
    before = straight.evaluate()
    straight.train(7)
    saved = straight.save()
    straight.train(2)
    assert straight.evaluate() < before - 0.1
    resumed = Trainer(ACT.get(name, name), made)
    resumed.train(1)
    resumed.load(saved)
    resumed.train(2)
    ours, theirs = straight.weights(), resumed.weights()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("method", ["weight-decay", "sam"])
def test_a_stopped_run_ends_as_if_it_had_not_been(method, tmp_path):
    made = digits(**{"epochs": "2", "optim.name": "adamw", "optim.lr": "0.003"})
    undisturbed = train(made, method, 0, tmp_path / "a")
    assert undisturbed.done, undisturbed.reason
    resumed = stopped_and_resumed(made, method, tmp_path / "b", 6)
    assert timeless(vars(resumed)) == timeless(vars(undisturbed))
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_weight_decay_is_what_the_method_says():
    made = replace(RECIPES["image"], optim=ADAMW)
    assert Trainer("weight-decay(weight=0.2)", made).optimizer.defaults["weight_decay"] == 0.2
    assert Trainer("none", made).optimizer.defaults["weight_decay"] == 0.0


def test_linbreg_is_an_optimiser_of_its_own():
    with pytest.raises(ValueError, match=r"linbreg takes the place of SGD.*--optim.name sgd"):
        Trainer("linbreg", replace(RECIPES["image"], optim=ADAMW))


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("digits", {"optim.name": "adam"}, "did you mean 'adamw'"),
        ("digits", {"optim.name": "adamw", "optim.beta2": "1"}, "optim.beta2 must be below 1"),
        ("digits", {"optim.name": "adamw", "optim.momentum": "1"}, "optim.momentum must be below"),
        ("gpt-small", {"model.heads": "5"}, "must be a multiple of model.heads"),
    ],
)
def test_mistakes_in_one_line(name, changes, message):
    with pytest.raises(ValueError, match=message):
        override(recipe(name), changes)


def test_runs_of_before_are_still_the_same_runs():
    kept = identity(recipe("pydocs"))
    assert not {"name", "beta2", "eps"} & kept["optim"].keys() and "heads" not in kept["model"]
    assert identity(recipe("gpt-small"))["optim"]["name"] == "adamw"


# --- the GPT ----------------------------------------------------------------------------------

TINY = {**TEXT, "epochs": "2", "model.heads": "2", "model.layers": "1"}


def test_the_recipe_s_network():
    made = recipe("gpt-small")
    data = load(made, 0)
    model = models.build(made.model, data)
    assert model.place.num_embeddings == made.data.bptt == data.context
    assert len(model.blocks) == made.model.layers
    assert model.token.weight.shape == (2000, made.model.embedding)


@pytest.mark.parametrize("method", ["seht-h+dropout", "sam"])
def test_a_gpt_s_run_goes_on(method, tmp_path):
    made = override(recipe("gpt-small"), TINY)
    undisturbed = train(made, method, 0, tmp_path / "a")
    assert undisturbed.done, undisturbed.reason
    assert undisturbed.trace is not None and undisturbed.stability["verdict"] != "undecided"
    stopped_and_resumed(made, method, tmp_path / "b", undisturbed.steps // 2 + 3)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


@pytest.mark.slow
def test_gpt_small_knows_its_text_by_heart(tmp_path):
    result = train(recipe("gpt-small"), "weight-decay", 0, tmp_path)
    last, best = (result.metrics[which] for which in ("last", "best"))
    assert result.train_loss < last["valid_loss"] - 1.5
    assert last["valid_loss"] > best["valid_loss"] + 0.3
