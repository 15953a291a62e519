"""Recipes: the paper's settings word for word, every one builds, and fields go there and back."""

import dataclasses
import importlib.util
import json
import math

import pytest
import torch
import torch.nn.functional as F
from real_data import there

from seht.lab import config, models
from seht.lab.data import load
from seht.lab.recipes import RECIPES, check, fields, from_dict, override, recipe, to_dict

PAPER = ("cifar10", "cifar100", "wikitext2-lstm", "wikitext2-gru")


def value(of, name):
    for part in name.split("."):
        of = of[part] if isinstance(of, dict) else getattr(of, part)
    return of


# --- what the paper says ----------------------------------------------------------------------

IMAGE = {
    "batch": 32,
    "epochs": 200,
    "data.crop": 4,
    "data.flip": True,
    "data.size": None,
    "data.validation": 5000,
    "optim.momentum": 0.9,
    "optim.weight_decay": 5e-4,
    "optim.clip": None,
    "model.dropout": 0.0,
    "model.norm": "batch",
}
TEXT = {
    "batch": 20,
    "epochs": 40,
    "data.bptt": 35,
    "data.vocabulary": None,
    "data.size": None,
    "data.validation": 0,
    "optim.lr": 20.0,
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.schedule": "plateau",
    "optim.gamma": 0.25,
    "optim.clip": 0.25,
    "model.embedding": 512,
    "model.hidden": 512,
    "model.layers": 2,
    "model.init": 0.1,
    "model.init_all": True,
}
SAID = {
    "cifar10": {
        **IMAGE,
        "paper": "table1",
        "model.name": "resnet18",
        "model.width": 64,
        "optim.lr": 0.01,
        "optim.schedule": "cosine",
        "settings.seht-h": {"weight": 0.001, "probes": 5},
        "settings.seht-d": {"weight": 0.001, "probes": 10, "prob": 0.05},
        "settings.confidence-penalty.weight": 0.001,
        "settings.label-smoothing.weight": 0.01,
        "settings.cutout.size": 16,
    },
    "cifar100": {
        **IMAGE,
        "paper": "table2",
        "model.name": "wrn",
        "model.depth": 28,
        "model.factor": 10,
        "model.width": 16,
        "optim.lr": 0.1,
        "optim.schedule": "steps",
        "optim.milestones": (60, 120, 160),
        "optim.gamma": 0.2,
        "settings.seht-d": {"weight": 0.1, "probes": 1, "prob": 0.05},
        "settings.confidence-penalty.weight": 0.1,
        "settings.label-smoothing.weight": 0.1,
        "settings.cutout.size": 8,
        "settings.dropout.rate": 0.3,
    },
    "wikitext2-lstm": {
        **TEXT,
        "paper": "table3",
        "model.name": "lstm",
        "model.dropout": 0.5,
        "settings.seht-d": {"weight": 0.01, "probes": 1, "prob": 0.05},
        "settings.confidence-penalty.weight": 0.01,
        "settings.label-smoothing.weight": 0.01,
    },
    "wikitext2-gru": {
        **TEXT,
        "paper": "table4",
        "model.name": "gru",
        "model.dropout": 0.3,
        "settings.seht-d": {"weight": 0.001, "probes": 1, "prob": 0.01},
        "settings.confidence-penalty.weight": 0.005,
        "settings.label-smoothing.weight": 0.05,
    },
}


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_recipes(name):
    made = recipe(name)
    assert {key: value(made, key) for key in SAID[name]} == SAID[name]


@pytest.mark.parametrize("name", PAPER)
def test_small_ones_are_the_same_experiment(name):
    large, small = recipe(name), recipe(f"{name}-small")
    assert small.paper is None and small.name == f"{name}-small"
    assert small.data.name == large.data.name and small.model.name == large.model.name
    assert (small.data.crop, small.data.flip) == (large.data.crop, large.data.flip)
    calm = {"seht-h", "seht-s"}  # the whole trace would end the training of these
    assert small.settings.keys() == large.settings.keys() | calm
    for method in calm:
        assert small.settings[method]["limit"] == 0.1
        epoch = small.data.size / small.batch / (1 if large.task == "image" else small.data.bptt)
        assert small.settings[method]["warmup"] == math.ceil(epoch)
    for method in small.settings.keys() - calm:
        options = small.settings[method]
        assert options == {
            **large.settings[method],
            **({"probes": 1} if "probes" in options else {}),
        }
    assert small.optim.schedule == large.optim.schedule and small.epochs < large.epochs
    assert small.data.validation > 0


def test_low():
    low = recipe("cifar10-low")
    assert (low.data.size, low.data.crop, low.data.flip) == (2000, 0, False)
    assert low.data.validation > 0 and low.model.name == "resnet18"


def files_are_there(made):
    package = {"italy-power": "aeon", "cifar10-lite0": "efficientnet_lite_pytorch"}
    if made.data.name in package and importlib.util.find_spec(package[made.data.name]) is None:
        return False
    if made.data.name.startswith("own-"):
        return False  # test_own.py brings some
    if made.task in ("series", "features"):
        return made.task == "series" or there("cifar10")
    return made.data.name in ("digits", "pydocs", "cancer") or there(made.data.name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n == "finetune" else [])
        for n in RECIPES
        if n not in PAPER
    ],
)
def test_every_recipe_that_runs_here_builds_and_learns_a_batch(name):
    made = recipe(name)
    if not files_are_there(made):
        pytest.skip(f"SEHT_DATA names no directory with {made.data.name}")
    data = load(made, 0)
    model = models.build(made.model, data)
    batch = next(iter(data.train_batches(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss():
        torch.manual_seed(1)  # the same units are dropped
        out = model(batch.x)
        logits = out[0].flatten(0, 1) if isinstance(out, tuple) else out
        assert logits.shape == (batch.y.numel(), data.classes)
        return F.cross_entropy(logits, batch.y.flatten())

    first = loss()
    first.backward()
    optimizer.step()
    assert loss() < first
    for split in ("train", "valid", "test"):
        assert next(iter(data.eval_batches(split, limit=1))).y.numel()


# --- there and back ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_as_json_and_back(name):
    made = recipe(name)
    assert made.name == name
    check(made)
    assert from_dict(json.loads(json.dumps(to_dict(made)))) == made


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_can_be_given_as_it_is_shown(name):
    made = recipe(name)
    shown = {}
    for field in fields(made):
        assert value(made, field.name) == field.value
        assert field.help, field.name
        text = (
            ",".join(map(str, field.value)) if isinstance(field.value, tuple) else str(field.value)
        )
        shown[field.name] = text
    assert override(made, shown) == made
    everything = {
        f"{part}.{f.name}"
        for part in ("data", "model", "optim")
        for f in dataclasses.fields(getattr(made, part))
    }
    assert everything < shown.keys()


def test_override():
    made = override(
        recipe("cifar100"),
        {
            "epochs": "3",
            "model.width": " 8 ",
            "data.flip": "no",
            "data.size": "200",
            "optim.lr": "1e-3",
            "optim.clip": "0.5",
            "optim.milestones": "1,2",
            "settings.seht-d.weight": "1e-2",
            "settings.seht-h.curvature": "ggn",
            "settings.sam.adaptive": "true",
        },
    )
    assert (made.epochs, made.model.width, made.data.flip, made.data.size) == (3, 8, False, 200)
    assert (made.optim.lr, made.optim.clip, made.optim.milestones) == (1e-3, 0.5, (1, 2))
    assert made.settings["seht-d"] == {"weight": 0.01, "probes": 1, "prob": 0.05}
    assert made.settings["seht-h"]["curvature"] == "ggn"
    assert made.settings["sam"] == {"adaptive": True}
    assert override(made, {"data.size": "none"}).data.size is None
    again = recipe("cifar100")
    assert again.epochs == 200 and "sam" not in again.settings  # nothing is shared between calls


@pytest.mark.parametrize(
    "changes, paper",
    [
        ({}, "table1"),
        ({"threads": "8", "precision": "bf16-mixed", "eval_batch": "100"}, "table1"),
        ({"data.validation": "0"}, "table1"),
        ({"epochs": "200"}, "table1"),
        ({"epochs": "3"}, None),
        ({"model.norm": "group"}, None),
        ({"settings.seht-h.weight": "0.5"}, None),
    ],
)
def test_the_paper_s_figures_belong_to_the_paper_s_recipe(changes, paper):
    assert override(recipe("cifar10"), changes).paper == paper


def test_a_cut_test_text_is_not_the_paper_s():
    assert override(recipe("wikitext2-gru"), {"data.validation": "50000"}).paper is None
    assert override(recipe("wikitext2-gru"), {"threads": "8"}).paper == "table4"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"epoch": "3"}, "unknown field 'epoch'; did you mean 'epochs'"),
        ({"model.widht": "3"}, "did you mean 'model.width'"),
        ({"name": "mine"}, "unknown field 'name'"),
        ({"epochs": "many"}, "epochs must be a whole number, not 'many'"),
        ({"epochs": "2.5"}, "epochs must be a whole number"),
        ({"epochs": "0"}, "epochs must be at least 1, not 0"),
        ({"optim.lr": "nan"}, "optim.lr must be a finite number"),
        ({"optim.lr": "none"}, "optim.lr must be a number, not 'none'"),
        ({"data.flip": "perhaps"}, "data.flip must be true or false"),
        ({"optim.milestones": "1;2"}, "optim.milestones must be whole numbers with commas"),
        ({"data.name": "cifar"}, "unknown data.name 'cifar'; did you mean 'cifar10'"),
        (
            {"data.name": "pydocs"},
            "resnet18 does not take pydocs, which is text; choose one of lstm",
        ),
        ({"model.name": "lstm"}, "lstm does not take cifar10"),
        ({"model.name": "resnet"}, "unknown model.name 'resnet'; did you mean 'resnet18'"),
        ({"optim.clip": "0"}, "optim.clip 0 leaves nothing of the gradient"),
        ({"model.norm": "layer"}, "unknown model.norm 'layer'"),
        ({"model.dropout": "1"}, "model.dropout must be below 1"),
        ({"model.name": "wrn", "model.depth": "27"}, "6n \\+ 4"),
        ({"optim.schedule": "cosin"}, "did you mean 'cosine'"),
        ({"settings.weight": "1"}, "not settings.METHOD.OPTION"),
    ],
)
def test_mistakes_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        override(recipe("cifar10"), changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda v: v.pop("batch"), "needs batch"),
        (lambda v: v["data"].pop("name"), "needs data.name"),
        (lambda v: v.update(batch="32"), "batch must be a whole number, not '32'"),
        (lambda v: v.update(batch=True), "batch must be a whole number, not True"),
        (lambda v: v.update(colour="red"), "unknown field 'colour'"),
        (lambda v: v["model"].update(colour="red"), "unknown field 'model.colour'"),
        (lambda v: v.update(data=3), "data must be a mapping"),
        (lambda v: v.update(settings={"seht-d": 3}), "settings must be options by method"),
    ],
)
def test_a_written_recipe_that_makes_no_sense(change, message):
    values = to_dict(recipe("digits"))
    change(values)
    with pytest.raises(ValueError, match=message):
        from_dict(values)


def test_unknown_recipe():
    with pytest.raises(ValueError, match="unknown recipe 'digit'; did you mean 'digits'"):
        recipe("digit")


def test_tasks():
    assert {n for n in RECIPES if recipe(n).task == "text"} == {
        n for n in RECIPES if n.startswith(("wikitext2", "pydocs", "gpt"))
    }
    names = [name for kind in config.KINDS.values() for name in kind]
    assert len(names) == len(set(names))
    assert recipe("cancer").task == "table" and recipe("italy-power-noisy").task == "series"
