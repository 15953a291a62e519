"""Whether a recipe can be trained; what makes no sense is said in one line."""

from __future__ import annotations

import math

from seht.estimators import unknown
from seht.lab import config
from seht.lab.config import DataConfig, Recipe
from seht.lab.optimizers import OPTIMIZERS
from seht.lab.schedule import SCHEDULES

NOISES = ("uniform", "pair")


def check(recipe: Recipe) -> None:
    """Raise if the recipe cannot be trained."""
    data, model, optim = recipe.data, recipe.model, recipe.optim
    _one_of("data.name", data.name, (*config.IMAGES, *config.TEXTS))
    _one_of("model.name", model.name, _MODELS[recipe.task])
    _one_of("model.norm", model.norm, ("batch", "group", "none"))
    _one_of("optim.name", optim.name, tuple(OPTIMIZERS))
    _one_of("optim.schedule", optim.schedule, SCHEDULES)
    _one_of("data.noise_kind", data.noise_kind, NOISES)
    at_least = {
        "batch": (recipe.batch, 1),
        "epochs": (recipe.epochs, 1),
        "eval_batch": (recipe.eval_batch, 1),
        "threads": (recipe.threads, 1),
        "spectrum": (recipe.spectrum, 0),
        "data.size": (data.size, 1),
        "data.validation": (data.validation, 0),
        "data.average": (data.average, 1),
        "data.crop": (data.crop, 0),
        "data.bptt": (data.bptt, 1),
        "data.vocabulary": (data.vocabulary, 2),
        "model.width": (model.width, 1),
        "model.depth": (model.depth, 10),
        "model.factor": (model.factor, 1),
        "model.dropout": (model.dropout, 0),
        "model.embedding": (model.embedding, 1),
        "model.hidden": (model.hidden, 1),
        "model.layers": (model.layers, 1),
        "model.heads": (model.heads, 1),
        "model.init": (model.init, 0),
        "optim.lr": (optim.lr, 0),
        "optim.momentum": (optim.momentum, 0),
        "optim.weight_decay": (optim.weight_decay, 0),
        "optim.gamma": (optim.gamma, 0),
        "optim.clip": (optim.clip, 0),
        "optim.beta2": (optim.beta2, 0),
        "optim.eps": (optim.eps, 0),
    }
    for name, (value, least) in at_least.items():
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least {least}, not {value}")
    if model.dropout >= 1:
        raise ValueError(f"model.dropout must be below 1, not {model.dropout}")
    for name, beta in (("momentum", optim.momentum), ("beta2", optim.beta2)):
        if optim.name == "adamw" and beta >= 1:
            raise ValueError(f"optim.{name} must be below 1 with optim.name adamw, not {beta}")
    if model.name == "gpt" and model.embedding % model.heads:
        raise ValueError(
            f"model.embedding ({model.embedding}) must be a multiple of model.heads ({model.heads})"
        )
    if model.name == "wrn" and (model.depth - 4) % 6:
        raise ValueError(f"model.depth must be 6n + 4 (10, 16, 22, 28 ...), not {model.depth}")
    if optim.schedule == "plateau" and recipe.task == "image" and not data.validation:
        raise ValueError(
            "optim.schedule plateau looks at the validation loss, and data.validation is 0; hold "
            "some images out, or choose another schedule"
        )
    _check_images(recipe)


def _check_images(recipe: Recipe) -> None:
    """What is about labels and pixels."""
    data = recipe.data
    if not 0 <= data.noise < 1:
        raise ValueError(f"data.noise must be in [0, 1), not {data.noise}")
    if data.noise_kind == "pair" and data.noise >= 0.5:
        raise ValueError(
            f"data.noise must be below 0.5 with data.noise_kind pair, not {data.noise}: most of a "
            "class would have the other's label"
        )
    if recipe.task == "text":
        for name in ("noise", "average", "within"):
            if getattr(data, name) != DataConfig.__dataclass_fields__[name].default:
                raise ValueError(
                    f"data.{name} is about images with labels, and {data.name} is text; leave it "
                    "out, or choose one of " + ", ".join(config.IMAGES)
                )
    if data.within and data.size is not None and data.validation >= data.size:
        raise ValueError(
            f"data.validation ({data.validation}) is cut from the data.size ({data.size}) images "
            "and leaves none to train on; lower it"
        )


_MODELS = {"image": ("resnet18", "wrn", "cnn"), "text": ("lstm", "gru", "gpt")}


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(unknown(name, value, known))
