"""Checks that a recipe can be trained; errors are one line."""

from __future__ import annotations

import itertools
import math
import typing

from seht.errors import unknown
from seht.lab import config
from seht.lab.config import Between, DataConfig, Recipe
from seht.lab.optimizers import OPTIMIZERS
from seht.lab.schedule import SCHEDULES

NOISES = ("uniform", "pair")


def check(recipe: Recipe) -> None:
    """Raise if the recipe cannot be trained."""
    data, model, optim = recipe.data, recipe.model, recipe.optim
    _one_of("data.name", data.name, tuple(itertools.chain(*config.KINDS.values())))
    _one_of("model.name", model.name, config.MODELS[recipe.task])
    _one_of("model.norm", model.norm, ("batch", "group", "none"))
    _one_of("optim.name", optim.name, OPTIMIZERS)
    _one_of("optim.schedule", optim.schedule, SCHEDULES)
    _one_of("data.noise_kind", data.noise_kind, NOISES)
    for prefix, part in (("", recipe), ("data.", data), ("model.", model), ("optim.", optim)):
        for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
            for allowed in getattr(hint, "__metadata__", ()):
                _check_range(prefix + name, getattr(part, name), allowed)
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


def _check_range(name: str, value: float | None, allowed: Between) -> None:
    if value is None or (allowed.least <= value <= allowed.most and value < math.inf):
        return
    if value > allowed.most:
        raise ValueError(f"{name} must be at most {allowed.most:,}, not {value}")
    raise ValueError(f"{name} must be a finite number of at least {allowed.least}, not {value}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(unknown(name, value, known))
