"""Checks that a recipe can be trained; errors are one line."""

from __future__ import annotations

import itertools
import math

from seht.errors import unknown
from seht.lab import config
from seht.lab.config import DataConfig, Recipe
from seht.lab.optimizers import OPTIMIZERS
from seht.lab.schedule import SCHEDULES

NOISES = ("uniform", "pair")


def check(recipe: Recipe) -> None:
    """Raise if the recipe cannot be trained."""
    data, model, optim = recipe.data, recipe.model, recipe.optim
    _one_of("data.name", data.name, tuple(itertools.chain(*config.KINDS.values())))
    _one_of("model.name", model.name, config.MODELS[recipe.task])
    _one_of("model.norm", model.norm, ("batch", "group", "none"))
    _one_of("optim.name", optim.name, tuple(OPTIMIZERS))
    _one_of("optim.schedule", optim.schedule, SCHEDULES)
    _one_of("data.noise_kind", data.noise_kind, NOISES)
    ranges: dict[str, tuple[float | None, float, float]] = {
        "batch": (recipe.batch, 1, _MANY),
        "epochs": (recipe.epochs, 1, _MANY),
        "eval_batch": (recipe.eval_batch, 1, _MANY),
        "threads": (recipe.threads, 1, _THREADS),
        "spectrum": (recipe.spectrum, 0, _MANY),
        "data.size": (data.size, 1, _MOST),
        "data.validation": (data.validation, 0, _MOST),
        "data.average": (data.average, 1, 1000),
        "data.crop": (data.crop, 0, 1000),
        "data.bptt": (data.bptt, 1, _MANY),
        "data.vocabulary": (data.vocabulary, 2, _MOST),
        "model.width": (model.width, 1, _WIDE),
        "model.depth": (model.depth, 10, _WIDE),
        "model.factor": (model.factor, 1, _WIDE),
        "model.dropout": (model.dropout, 0, math.inf),
        "model.embedding": (model.embedding, 1, _WIDE),
        "model.hidden": (model.hidden, 1, _WIDE),
        "model.layers": (model.layers, 1, 1000),
        "model.heads": (model.heads, 1, _WIDE),
        "model.init": (model.init, 0, math.inf),
        "optim.lr": (optim.lr, 0, math.inf),
        "optim.momentum": (optim.momentum, 0, math.inf),
        "optim.weight_decay": (optim.weight_decay, 0, math.inf),
        "optim.gamma": (optim.gamma, 0, math.inf),
        "optim.clip": (optim.clip, 0, math.inf),
        "optim.beta2": (optim.beta2, 0, math.inf),
        "optim.eps": (optim.eps, 0, math.inf),
    }
    for name, (value, least, most) in ranges.items():
        if value is None or (least <= value <= most and value < math.inf):
            continue
        if value > most:
            raise ValueError(f"{name} must be at most {most:,}, not {value}")
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
    if optim.schedule == "plateau" and recipe.task != "text" and not data.validation:
        raise ValueError(
            "optim.schedule plateau looks at the validation loss, and data.validation is 0; hold "
            "some examples out, or choose another schedule"
        )
    _check_data(recipe)
    if data.file is not None and not data.name.startswith("own-"):
        raise ValueError("data.file belongs to own-table, own-series and own-images; choose one")


def _check_data(recipe: Recipe) -> None:
    """Check the fields about labels and pixels."""
    data = recipe.data
    if not 0 <= data.noise < 1:
        raise ValueError(f"data.noise must be in [0, 1), not {data.noise}")
    if data.noise_kind == "pair" and data.noise >= 0.5:
        raise ValueError(
            f"data.noise must be below 0.5 with data.noise_kind pair, not {data.noise}: most of a "
            "class would have the other's label"
        )
    labels = ("noise", "within", "balanced")
    pixels = ("average", *(() if recipe.task == "text" else ("crop", "flip")))
    for about, names, tasks in (
        ("examples with labels", labels, [task for task in config.KINDS if task != "text"]),
        ("images", pixels, ("image",)),
    ):
        for name in () if recipe.task in tasks else names:
            if getattr(data, name) != DataConfig.__dataclass_fields__[name].default:
                known = itertools.chain(*(config.KINDS[task] for task in tasks))
                raise ValueError(
                    f"data.{name} is about {about}, and {data.name} is {recipe.task}; leave it "
                    f"out, or choose one of {', '.join(known)}"
                )
    if data.within and data.size is not None and data.validation >= data.size:
        raise ValueError(
            f"data.validation ({data.validation}) is cut from the data.size ({data.size}) "
            "examples and leaves none to train on; lower it"
        )


# Beyond these is a slip of the hand, which torch answers with an overflow or a crash.
_MANY, _MOST, _WIDE, _THREADS = 10**6, 10**12, 2**16, 1024


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(unknown(name, value, known))
