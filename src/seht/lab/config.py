"""What a run is made of: a recipe, a complete typed description that can be written and read back.

Data flows one way: recipe, data, model, method, loop, records, report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DataConfig:
    """Which data, how much of it, and how images are augmented."""

    name: str
    """cifar10, cifar100, digits (images); wikitext2, pydocs (text)."""
    size: int | None = None
    """Keep so many training examples, drawn with the run's seed; ``None``: all of them."""
    validation: int = 0
    """Examples held out of the training data; for text with a split of its own it does nothing."""
    crop: int = 0
    """Random crop after padding by so many pixels."""
    flip: bool = False
    bptt: int = 35
    """Text: how many tokens a batch is long."""
    vocabulary: int | None = None
    """Text: keep so many of the most frequent words; the others become ``<unk>``."""


@dataclass(frozen=True)
class ModelConfig:
    """A network of :mod:`seht.lab.models`; what the network does not know is ignored."""

    name: str
    """resnet18, wrn, cnn (images); lstm, gru (text)."""
    width: int = 64
    depth: int = 28
    factor: int = 10
    norm: str = "batch"
    dropout: float = 0.0
    embedding: int = 512
    hidden: int = 512
    layers: int = 2
    init: float = 0.1
    init_all: bool = True


@dataclass(frozen=True)
class OptimConfig:
    """SGD and its schedule."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    """cosine (to 0, per epoch), steps (times gamma at the milestones), plateau (divided by
    ``1 / gamma`` when the validation loss is not a new best), constant."""
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    clip: float | None = None
    """Largest norm of the gradient."""


@dataclass(frozen=True)
class Recipe:
    """One experiment, complete but for the method and the seed."""

    name: str
    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    batch: int
    epochs: int
    eval_batch: int = 500
    threads: int = 2
    """Part of the recipe: another number of threads gives other rounding, so another run."""
    precision: str = "32-true"
    """Lightning Fabric's name for it."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of methods in this experiment, by the method's name; what a user gives goes first."""
    paper: str | None = None
    """The paper's table whose figures belong beside ours: table1 ... table4."""

    @property
    def task(self) -> str:
        """``image`` (classification) or ``text`` (language modelling)."""
        return "text" if self.data.name in ("wikitext2", "pydocs") else "image"
