"""What the study runs: tasks, and the seeds that judge. docs/evidence/protocol.md says why."""

from __future__ import annotations

from dataclasses import dataclass

from rows import (
    CARRIED,
    EIGHT,
    EVERY,
    IMAGES,
    LARGE,
    ON_CLEAN,
    ON_NOISY,
    PAPER,
    PRICE,
    SEARCHED,
    STOPPED,
    STRONGER,
    TEXT,
    Stage,
)

FIRST_SEED = 2000
"""The judging seeds begin here. The searches take the lab's own, from 1,000,000 on."""
SEARCH_SEEDS = 3
NO_EXTRAS = ("--spectrum", "0", "--robustness", "false")


@dataclass(frozen=True)
class Task:
    """Stages on one recipe, with the same judging seeds; later ones may use earlier choices."""

    recipe: str
    stages: tuple[Stage, ...]
    seeds: int
    options: tuple[str, ...] = NO_EXTRAS
    search_seeds: int = SEARCH_SEEDS
    curves: bool = False
    """Whether the figures of every epoch are kept too."""
    title: str = ""
    base: str = ""
    """The row that the others are compared with, where it is not the tuned weight decay."""


_NO_NOISE, _FIFTH = ("--data.noise", "0"), ("--data.noise", "0.2")
_TEN = ("--data.size", "100", "--data.validation", "20")
_ON_PHOTOGRAPHS = {
    "finetune-noisy": ("finetune", ON_NOISY, "fine-tuning, 50 images a class, 30 % replaced"),
    "cifar10-low-noisy": ("cifar10-low-noisy", ON_NOISY, "2,000 images, 40 % replaced"),
    "finetune-10": ("finetune", ON_CLEAN, "fine-tuning, 10 images a class"),
    "finetune": ("finetune", ON_CLEAN, "fine-tuning, 50 images a class"),
    "cifar10-low-noisy-20": ("cifar10-low-noisy", ON_NOISY, "2,000 images, 20 % replaced"),
    "cifar10-low-noisy-pair": (
        "cifar10-low-noisy",
        ON_NOISY,
        "2,000 images, 20 % of each class named as the next",
    ),
    "cifar10-low": ("cifar10-low", ON_CLEAN, "2,000 images, right labels"),
}
_OPTIONS = {
    "finetune-noisy": ("--data.noise", "0.3"),
    "finetune-10": _TEN,
    "cifar10-low-noisy-20": _FIFTH,
    "cifar10-low-noisy-pair": (*_FIFTH, "--data.noise_kind", "pair"),
}
_PHOTOGRAPHS = {
    f"{name}-carried": Task(
        recipe,
        stages,
        5,
        (*NO_EXTRAS, *_OPTIONS.get(name, ())),
        title=f"{title}, settings of 16x16",
    )
    for name, (recipe, stages, title) in _ON_PHOTOGRAPHS.items()
}
TASKS = {
    "digits-noisy": Task("digits-noisy", EVERY, 20, title="digits, 40 % of the labels replaced"),
    "digits-noisy-20": Task(
        "digits-noisy", EVERY, 20, (*NO_EXTRAS, *_FIFTH), title="digits, 20 % replaced"
    ),
    "digits-clean": Task(
        "digits-noisy", EVERY, 20, (*NO_EXTRAS, *_NO_NOISE), title="digits, right labels"
    ),
    "digits-clean-carried": Task(
        "digits-noisy",
        CARRIED,
        10,
        (*NO_EXTRAS, *_NO_NOISE),
        title="digits, right labels, settings of 40 %",
    ),
    "digits-noisy-20-carried": Task(
        "digits-noisy",
        CARRIED,
        10,
        (*NO_EXTRAS, *_FIFTH),
        title="digits, 20 % replaced, settings of 40 %",
    ),
    "digits-noisy-long-carried": Task(
        "digits-noisy",
        (*CARRIED, STRONGER),
        5,
        (*NO_EXTRAS, "--epochs", "200"),
        title="digits, 40 % replaced, 200 epochs, settings of 60",
    ),
    "digits-noisy-fitted": Task(
        "digits-noisy",
        (*EVERY, Stage("carried", {"tr(G) share carried": "{digits-noisy:tr(G) share}"})),
        20,
        (*NO_EXTRAS, "--batch", "20"),
        title="digits, 40 % replaced, steps enough to fit them",
    ),
    "stopped-digits-noisy": Task(
        "digits-noisy", STOPPED, 10, title="digits, 40 % replaced, stopped early"
    ),
    "stopped-digits-fitted": Task(
        "digits-noisy",
        STOPPED,
        10,
        (*NO_EXTRAS, "--batch", "20"),
        title="digits, 40 % replaced, steps enough to fit them, stopped early",
    ),
    "stopped-digits-clean": Task(
        "digits-noisy",
        STOPPED,
        10,
        (*NO_EXTRAS, *_NO_NOISE),
        title="digits, right labels, stopped early",
    ),
    "stopped-cancer-noisy": Task(
        "cancer-noisy", STOPPED, 10, title="a table, 40 % replaced, stopped early"
    ),
    "stopped-cancer": Task("cancer", STOPPED, 10, title="a table, right labels, stopped early"),
    "price": Task("digits-noisy", (PRICE,), 10, title="what cheaper schedules keep"),
    "paper": Task(
        "digits-noisy",
        (PAPER,),
        10,
        ("--robustness", "false", *_NO_NOISE),
        curves=True,
        title="the paper's claims on digits",
    ),
    "cancer-noisy": Task("cancer-noisy", SEARCHED, 20, title="a table, 40 % replaced"),
    "cancer-noisy-carried": Task(
        "cancer-noisy", CARRIED, 10, title="a table, 40 % replaced, settings of digits"
    ),
    "italy-power-noisy-carried": Task(
        "italy-power-noisy", CARRIED, 10, title="time series, 40 % replaced, settings of digits"
    ),
    "cancer": Task("cancer", SEARCHED, 20, title="a table, right labels"),
    "italy-power-noisy": Task(
        "italy-power-noisy", SEARCHED, 20, title="time series, 40 % replaced"
    ),
    "italy-power": Task("italy-power", SEARCHED, 20, title="time series, right labels"),
    "cifar10-16-noisy": Task(
        "cifar10-16-noisy",
        IMAGES,
        10,
        search_seeds=2,
        title="CIFAR-10, 16x16, 40 % replaced",
    ),
    "cifar10-16": Task(
        "cifar10-16", EIGHT, 10, search_seeds=2, title="CIFAR-10, 16x16, right labels"
    ),
    **_PHOTOGRAPHS,
    "cifar10-low-noisy": Task(
        "cifar10-low-noisy", EIGHT, 5, search_seeds=2, title="2,000 images, 40 % replaced"
    ),
    "cifar10-low-noisy-20": Task(
        "cifar10-low-noisy", EIGHT, 5, (*NO_EXTRAS, *_FIFTH), title="2,000 images, 20 % replaced"
    ),
    "cifar10-low-noisy-pair": Task(
        "cifar10-low-noisy",
        EIGHT,
        5,
        (*NO_EXTRAS, *_FIFTH, "--data.noise_kind", "pair"),
        title="2,000 images, 20 % of each class named as the next",
    ),
    "cifar10-low": Task("cifar10-low", EIGHT, 5, title="2,000 images, right labels"),
    "finetune": Task("finetune", EIGHT, 5, search_seeds=2, title="fine-tuning, 50 images a class"),
    "finetune-10": Task(
        "finetune",
        EIGHT,
        5,
        (*NO_EXTRAS, *_TEN),
        title="fine-tuning, 10 images a class",
    ),
    "finetune-noisy": Task(
        "finetune",
        EIGHT,
        5,
        (*NO_EXTRAS, "--data.noise", "0.3"),
        search_seeds=2,
        title="fine-tuning, 50 images a class, 30 % replaced",
    ),
    "gpt-small": Task("gpt-small", TEXT, 5, search_seeds=2, title="a transformer that memorises"),
    "wikitext2-lstm-small": Task("wikitext2-lstm-small", TEXT, 5, title="an LSTM that underfits"),
    "cifar10-large-noisy": Task(
        "cifar10-large-noisy",
        LARGE,
        3,
        curves=True,
        title="all 50,000 images, 20 % replaced, settings of 2,000",
        base="plain",  # the weight decay of 2,000 images underfits so many
    ),
}
"""In the order in which a budget is spent."""
