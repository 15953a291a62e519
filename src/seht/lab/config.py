"""Recipes: complete, typed descriptions of an experiment that can be saved and loaded, and checks
that they can be trained.

Data flows one way: recipe, data, model, method, loop, records, report.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from seht.errors import unknown

KINDS = {
    "image": ("cifar10", "cifar100", "digits", "own-images"),
    "table": ("cancer", "own-table"),
    "series": ("italy-power", "own-series"),
    "features": ("cifar10-lite0",),
    "text": ("wikitext2", "pydocs"),
}
"""The data sets, by the task that they are for: classification, or of text language modelling."""
MODELS = {
    "image": ("resnet18", "wrn", "cnn"),
    "table": ("mlp",),
    "series": ("cnn",),
    "features": ("lite0", "lite0-linear"),
    "text": ("lstm", "gru", "gpt"),
}
"""The networks that take the data of a task."""
NOISES, NORMS, OPTIMIZERS = ("uniform", "pair"), ("batch", "group", "none"), ("sgd", "adamw")
SCHEDULES = ("cosine", "onecycle", "steps", "plateau", "constant")


class Between(NamedTuple):
    """The range of a field. Beyond it is a slip of the hand, which torch answers with a crash."""

    least: float
    most: float = math.inf


Count = Annotated[int, Between(1, 10**6)]
Width = Annotated[int, Between(1, 2**16)]
Amount = Annotated[float, Between(0)]
_MOST = 10**12


@dataclass(frozen=True)
class DataConfig:
    """Which data, how much of it, and how images are augmented."""

    name: str
    """cifar10, cifar100, digits (images); cancer (table); italy-power (series);
    cifar10-lite0 (features of a pretrained network); wikitext2, pydocs (text); own-images,
    own-table, own-series (yours)."""
    size: Annotated[int | None, Between(1, _MOST)] = None
    """Number of training examples, drawn with the run's seed; for text, of tokens from its start.
    ``None``: all of them."""
    validation: Annotated[int, Between(0, _MOST)] = 0
    """Number of examples held out for validation, drawn with the seed. Texts have a validation and
    a test part of their own, cut to this many tokens; 0: all of them."""
    within: bool = False
    """Take the validation examples out of the ``size`` ones, so that ``validation`` 0 trains on all
    of these; otherwise they are drawn in addition."""
    balanced: bool = False
    """As many examples of each class, by their true labels."""
    noise: float = 0.0
    """The fraction of training and validation labels that are replaced, drawn with the seed; test
    labels stay right."""
    noise_kind: str = "uniform"
    """What replaces a label: uniform (drawn from all classes, so that some stay right by chance),
    pair (the next class)."""
    average: Annotated[int, Between(1, 1000)] = 1
    """Average squares of this many pixels a side: 2 makes 16x16 of 32x32."""
    crop: Annotated[int, Between(0, 1000)] = 0
    """Random crop after padding by this many pixels."""
    flip: bool = False
    """Mirror half of the images, drawn anew each epoch."""
    bptt: Count = 35
    """Text: the length of a batch in tokens."""
    vocabulary: Annotated[int | None, Between(2, _MOST)] = None
    """Text: keep this many of the most frequent words; the others become ``<unk>``."""
    file: str | None = None
    """Your own data: a NumPy file with the arrays x and y, and x_test and y_test if you have a test
    set; a table may be a CSV file, with the label in the last column."""
    seal: str | None = None
    """The checksum of your file, filled in by the command."""


@dataclass(frozen=True)
class ModelConfig:
    """A network of :mod:`seht.lab.models`; fields that it does not have are ignored."""

    name: str
    """resnet18, wrn, cnn (images); mlp (table); cnn (series); lite0, lite0-linear
    (features; its last layer alone); lstm, gru, gpt (text)."""
    width: Width = 64
    """Channels of the first layer (16 in the usual Wide ResNet); units of an mlp's layers."""
    depth: Annotated[int, Between(10, 2**16)] = 28
    """Wide ResNet: 6n + 4 layers."""
    factor: Width = 10
    """Wide ResNet: how many times as wide."""
    norm: str = "batch"
    """batch, group, or none (only the cnn trains well without a norm)."""
    dropout: Amount = 0.0
    """Dropout rate: between the convolutions of a block, before the last layer of a cnn or an mlp,
    between the layers of a language model."""
    embedding: Width = 512
    """Text: size of the word embedding; a gpt's width."""
    hidden: Width = 512
    """Text: units of a recurrent layer."""
    layers: Annotated[int, Between(1, 1000)] = 2
    """Text: recurrent layers, or a gpt's blocks; hidden layers of an mlp."""
    heads: Width = 4
    """gpt: attention heads, which share the width."""
    init: Amount = 0.1
    """lstm, gru: parameters start uniform between minus and plus this number."""
    init_all: bool = True
    """lstm, gru: apply init to all parameters, as in the paper; false: to embedding and decoder
    only, as is usual."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule."""

    lr: Amount
    """The learning rate at the start."""
    momentum: Amount = 0.9
    """Momentum, 0 for none; AdamW's beta1."""
    weight_decay: Amount = 5e-4
    """Weight decay, which the methods weight-decay and none change. SGD adds it times the weights
    to the gradient, AdamW subtracts lr times it times the weights."""
    schedule: str = "cosine"
    """cosine (to 0, per epoch), onecycle (up and down, per epoch), steps (times gamma at the
    milestones), plateau (times gamma when the validation loss is not a new best), constant."""
    milestones: tuple[int, ...] = ()
    """The epochs at which the schedule steps lowers the learning rate."""
    gamma: Amount = 0.1
    """Factor on the learning rate, for steps and plateau."""
    clip: Annotated[float | None, Between(0)] = None
    """Clip the gradient to this norm."""
    name: str = "sgd"
    """sgd or adamw."""
    beta2: Amount = 0.999
    """AdamW: decay of the mean square of the gradient."""
    eps: Amount = 1e-8
    """AdamW: added to the root of the mean square."""


@dataclass(frozen=True)
class Recipe:
    """One experiment: everything but the method and the seed."""

    name: str
    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    batch: Count
    """Examples in a step, or parallel streams of text."""
    epochs: Count
    """How often the training data is read."""
    eval_batch: Count = 500
    """Examples, or streams of text, in a batch of an evaluation."""
    threads: Annotated[int, Between(1, 1024)] = 2
    """Threads of the CPU; part of the recipe because their number changes the rounding."""
    precision: str = "32-true"
    """The precision, as Lightning Fabric names it."""
    spectrum: Annotated[int, Between(0, 10**6)] = 40
    """The most Hessian-vector products for the eigenvalues at the end; 0: none are measured."""
    robustness: bool = True
    """Measure the test data with rounded and disturbed weights, too."""
    curve: bool = False
    """Test after every epoch too, for a figure; no method and no choice uses it."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of methods in this experiment, by the method's name; the user's own override them."""
    paper: str | None = None
    """The paper's table to show beside our figures: table1 ... table4."""

    @property
    def task(self) -> str:
        """A key of ``KINDS``: all but ``text`` (language modelling) are classification."""
        return next((task for task, names in KINDS.items() if self.data.name in names), "image")


class Leaf(NamedTuple):
    """A field of a recipe, or of one of its parts."""

    owner: Any
    """The class that has it."""
    hint: Any
    """Its type."""
    default: Any
    ranges: tuple[Between, ...]
    of: Callable[[Recipe], Any]
    """Its value in a recipe."""


def _leaves(kind: Any, prefix: str = "") -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    hints, full = typing.get_type_hints(kind), typing.get_type_hints(kind, include_extras=True)
    for part in fields(kind):
        name, hint = prefix + part.name, hints[part.name]
        if is_dataclass(hint):
            found |= _leaves(hint, f"{name}.")
        else:
            ranges = getattr(full[part.name], "__metadata__", ())
            found[name] = Leaf(kind, hint, part.default, ranges, attrgetter(name))
    return found


LEAVES = _leaves(Recipe)
"""Every field of a recipe by its dotted name, such as ``model.width``."""


def check(recipe: Recipe) -> None:
    """Raise a :class:`ValueError` of one line if the recipe cannot be trained."""
    data, model, optim = recipe.data, recipe.model, recipe.optim
    _one_of("data.name", data.name, tuple(itertools.chain(*KINDS.values())))
    fitting = MODELS[recipe.task]
    if model.name not in fitting and model.name in itertools.chain(*MODELS.values()):
        raise ValueError(
            f"model.name {model.name} does not take {data.name}, which is {recipe.task}; choose "
            f"one of {', '.join(fitting)}"
        )
    _one_of("model.name", model.name, fitting)
    _one_of("model.norm", model.norm, NORMS)
    _one_of("optim.name", optim.name, OPTIMIZERS)
    _one_of("optim.schedule", optim.schedule, SCHEDULES)
    _one_of("data.noise_kind", data.noise_kind, NOISES)
    for name, leaf in LEAVES.items():
        for allowed in leaf.ranges:
            _check_range(name, leaf.of(recipe), allowed)
    if optim.clip == 0:
        raise ValueError("optim.clip 0 leaves nothing of the gradient; none is without clipping")
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
        ("examples with labels", labels, [task for task in KINDS if task != "text"]),
        ("images", pixels, ("image",)),
    ):
        for name in () if recipe.task in tasks else names:
            if getattr(data, name) != LEAVES[f"data.{name}"].default:
                known = itertools.chain(*(KINDS[task] for task in tasks))
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
    kind = "" if isinstance(value, int) else "a finite number of "
    raise ValueError(f"{name} must be {kind}at least {allowed.least}, not {value}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(unknown(name, value, known))
