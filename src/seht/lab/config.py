"""What a run is made of: a recipe, a complete typed description that can be written and read back.

Data flows one way: recipe, data, model, method, loop, records, report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = {
    "image": ("cifar10", "cifar100", "digits"),
    "table": ("cancer",),
    "series": ("italy-power",),
    "features": ("cifar10-lite0",),
    "text": ("wikitext2", "pydocs"),
}
"""The data sets, by the task that they are for: classification, or of text language modelling."""
MODELS = {
    "image": ("resnet18", "wrn", "cnn"),
    "table": ("mlp",),
    "series": ("cnn",),
    "features": ("lite0",),
    "text": ("lstm", "gru", "gpt"),
}
"""The networks that take the data of a task."""


@dataclass(frozen=True)
class DataConfig:
    """Which data, how much of it, and how images are augmented."""

    name: str
    """cifar10, cifar100, digits (images); cancer (table); italy-power (series);
    cifar10-lite0 (features of a pretrained network); wikitext2, pydocs (text)."""
    size: int | None = None
    """Keep so many training examples, drawn with the run's seed, or the first so many tokens of a
    text; ``None``: all of them."""
    validation: int = 0
    """Examples held out of the training data, drawn with the seed; with 0 nothing can be chosen on
    them. Texts have splits of their own: keep the first so many tokens of each, 0: all of them."""
    within: bool = False
    """Cut the validation examples out of the ``size`` ones, so that with ``validation`` 0 all are
    trained on; otherwise they come on top."""
    balanced: bool = False
    """As many examples of each class, by their true labels."""
    noise: float = 0.0
    """The fraction of the training and validation labels that are replaced, drawn with the seed;
    never the test set's."""
    noise_kind: str = "uniform"
    """What replaces a label: uniform (drawn anew from all classes, so that one in so many stays
    right), pair (the next class)."""
    average: int = 1
    """Average squares of so many pixels a side: 2 makes 16x16 of 32x32."""
    crop: int = 0
    """Random crop after padding by so many pixels."""
    flip: bool = False
    """Mirror half of the images, drawn anew each epoch."""
    bptt: int = 35
    """Text: how many tokens a batch is long."""
    vocabulary: int | None = None
    """Text: keep so many of the most frequent words; the others become ``<unk>``."""


@dataclass(frozen=True)
class ModelConfig:
    """A network of :mod:`seht.lab.models`; what the network does not know is ignored."""

    name: str
    """resnet18, wrn, cnn (images); mlp (table); cnn (series); lite0 (features); lstm, gru, gpt
    (text)."""
    width: int = 64
    """Channels of the first layer, a Wide ResNet's usual one is 16; units of a layer of an mlp."""
    depth: int = 28
    """Wide ResNet: 6n + 4 layers."""
    factor: int = 10
    """Wide ResNet: how many times as wide."""
    norm: str = "batch"
    """batch, group, or none (which only the cnn trains well without)."""
    dropout: float = 0.0
    """Between the convolutions of a block, before the last layer of a cnn or an mlp, between layers
    of text."""
    embedding: int = 512
    """Text: numbers that stand for a word; a gpt's width."""
    hidden: int = 512
    """Text: units of a recurrent layer."""
    layers: int = 2
    """Text: recurrent layers, or a gpt's blocks; hidden layers of an mlp."""
    heads: int = 4
    """gpt: attention heads, which share the width."""
    init: float = 0.1
    """lstm, gru: parameters start uniform between minus and plus this."""
    init_all: bool = True
    """Text: all of them, as the paper says; false: embedding and decoder only, as is usual."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule."""

    lr: float
    """The learning rate at the start."""
    momentum: float = 0.9
    """0 for none; AdamW's beta1."""
    weight_decay: float = 5e-4
    """What the methods weight-decay and none are about; the others keep it. SGD adds it to the
    gradient, AdamW takes lr times it off the weights."""
    schedule: str = "cosine"
    """cosine (to 0, per epoch), onecycle (up and down, per epoch), steps (times gamma at the
    milestones), plateau (times gamma when the validation loss is not a new best), constant."""
    milestones: tuple[int, ...] = ()
    """Epochs, for steps."""
    gamma: float = 0.1
    """Factor on the learning rate, for steps and plateau."""
    clip: float | None = None
    """Largest norm of the gradient."""
    name: str = "sgd"
    """sgd or adamw."""
    beta2: float = 0.999
    """AdamW: how slowly the mean square of the gradient follows."""
    eps: float = 1e-8
    """AdamW: added to its root."""


@dataclass(frozen=True)
class Recipe:
    """One experiment, complete but for the method and the seed."""

    name: str
    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    batch: int
    """Examples of a step, or parallel streams of text."""
    epochs: int
    """Times through the training data."""
    eval_batch: int = 500
    """The same when nothing is trained."""
    threads: int = 2
    """Part of the recipe: another number of threads gives other rounding, so another run."""
    precision: str = "32-true"
    """Lightning Fabric's name for it."""
    spectrum: int = 40
    """Hessian-vector products that the eigenvalues at the end may take; 0: none are measured."""
    robustness: bool = True
    """Measure on the test data what rounded and disturbed weights cost."""
    curve: bool = False
    """Test after every epoch too, for a figure of how it goes; no method and no choice sees it."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of methods in this experiment, by the method's name; what a user gives goes first."""
    paper: str | None = None
    """The paper's table whose figures belong beside ours: table1 ... table4."""

    @property
    def task(self) -> str:
        """A key of ``KINDS``: all but ``text`` (language modelling) are classification."""
        return next((task for task, names in KINDS.items() if self.data.name in names), "image")
