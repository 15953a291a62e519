"""Every recipe with every method that fits, once: an epoch of few examples.

Where a recipe's files are not part of a package, made-up ones in their format stand in for them.
"""

import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest
from small import train

from seht.lab.data import files, images
from seht.lab.methods import METHODS
from seht.lab.methods.parse import options
from seht.lab.recipes import RECIPES, override, recipe
from seht.lab.records import RunError

BRIEF = {"epochs": "1", "spectrum": "0", "robustness": "false", "threads": "1"}
FEW = {"data.size": "40", "data.validation": "10", "batch": "10", "eval_batch": "50"}
NARROW = {"model.width": "4", "model.depth": "10", "model.factor": "1"}
TEXT = {
    **{"data.size": "600", "data.validation": "200", "data.vocabulary": "50", "data.bptt": "10"},
    **{"batch": "5", "eval_batch": "5", "model.embedding": "8", "model.hidden": "8"},
}
TUNED = "seht-h(curvature=ggn,weight=tuned,warmup=0)"
PACKAGES = {"italy-power": "aeon", "cifar10-lite0": "efficientnet_lite_pytorch"}
FAST = ("cancer-noisy", "italy-power-noisy")
NORMED = ("resnet18", "wrn")
"""Networks with BatchNorm; lite0's has fixed statistics."""


def brief(name):
    made = recipe(name)
    text = made.task == "text"
    narrow = NARROW if made.task in ("image", "table", "series") else {}
    own = {"data.file": f"{name}.npz"} if name.startswith("own-") else {}
    return override(made, {**BRIEF, **(TEXT if text else FEW), **narrow, **own})


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """A directory with 24 images, or 900 words, in each of the official files."""
    top, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, source in files.SOURCES.items():
        for file in source.files.values():
            path = top / file.path
            path.parent.mkdir(exist_ok=True)
            if name == "wikitext2":
                words = [f"w{number}" for number in draw.integers(60, size=900)]
                path.write_text("\n".join(" ".join(words[i : i + 9]) for i in range(0, 900, 9)))
                continue
            labels = {"cifar10": b"labels", "cifar100": b"fine_labels"}[name]
            pixels = draw.integers(256, size=(24 if name == "cifar10" else 120, 3072), dtype="u1")
            content = {b"data": pixels, labels: [i % 10 for i in range(len(pixels))]}
            path.write_bytes(pickle.dumps(content, protocol=3))
    for name, shape in {"table": (5,), "series": (2, 8), "images": (3, 8, 8)}.items():
        y = np.arange(60) % 3
        np.savez(top / f"own-{name}.npz", x=draw.normal(size=(60, *shape)), y=y)
    return top


def refused(made, method):
    """What is said where a method does not fit a recipe, else ``None``."""
    if made.task not in METHODS[method].tasks:
        return f"{method} works on .*, and recipe {made.name} is {made.task}; leave it out"
    if method == "seht-s" and made.model.name in NORMED:
        return "seht-s: .* use --model.norm group"
    if method == "linbreg" and made.optim.name == "adamw":
        return "linbreg takes the place of SGD.* leave it out"
    return None


PAIRS = [
    pytest.param(name, method, marks=[] if name in FAST else [pytest.mark.slow])
    for name in RECIPES
    for method in (*METHODS, TUNED)
]


@pytest.fixture
def official(stand_ins, monkeypatch):
    """The directory, whose files are taken for the official ones."""
    monkeypatch.setattr(
        files,
        "find",
        lambda what, place: {
            key: Path(place, file.path) for key, file in files.SOURCES[what].files.items()
        },
    )
    return stand_ins


def test_gpt_small_on_wikitext(official, tmp_path):
    made = override(brief("gpt-small"), {"data.name": "wikitext2"})
    assert train(made, "weight-decay", 0, tmp_path, data_dir=official).done


@pytest.mark.filterwarnings("ignore")  # a few steps warn of many things
@pytest.mark.parametrize("name, method", PAIRS)
def test_it_runs(name, method, official, tmp_path, monkeypatch):
    made = brief(name)
    package = PACKAGES.get(made.data.name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(images, "SEEN", 60)
    monkeypatch.setattr(images, "SEEN_TEST", 20)
    message = None if method == TUNED else refused(made, method)
    if message is not None:
        with pytest.raises(RunError, match=message):
            train(made, method, 0, tmp_path / "run", data_dir=official)
        assert not (tmp_path / "run").exists()
        return
    if method != TUNED and "warmup" in options(method):
        method += "(warmup=0)"  # the recipe's may be longer than this run
    result = train(made, method, 0, tmp_path / "run", data_dir=official)
    assert result.done, result.reason
    assert {"test_loss", "valid_loss"} <= result.metrics["last"].keys()
