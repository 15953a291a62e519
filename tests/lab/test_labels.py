"""Wrong labels: how many, which, independent of everything but the seed, never in the test set."""

import json

import pytest
import torch
from real_data import needs
from small import FEW, digits, train

from seht.lab.compare import Comparison, Entry
from seht.lab.config import DataConfig
from seht.lab.data import DataError, examples, images, load
from seht.lab.data.examples import replaced, share_wrong
from seht.lab.methods.parse import parse
from seht.lab.recipes import RECIPES, identity, override, recipe
from seht.lab.report.load import load as load_report
from seht.lab.report.words import command
from seht.lab.training import Training

COUNT, CLASSES = 50_000, 10
TRUE = torch.arange(COUNT) % CLASSES
ALL = torch.arange(COUNT)


def noisy(noise, kind="uniform", seed=0, true=TRUE):
    config = DataConfig("digits", noise=noise, noise_kind=kind)
    return replaced(true, CLASSES, config, seed)


def within(found, wanted, count, deviations=5):
    """Of a share of so many independent draws."""
    return abs(found - wanted) < deviations * (wanted * (1 - wanted) / count) ** 0.5


def joined(data, split):
    return torch.cat([batch.y for batch in data.eval_batches(split)])


# --- the draw ---------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.1, 0.4, 0.9])
def test_uniform_noise_leaves_one_in_ten_of_the_replaced_right(noise):
    assert within(share_wrong(noisy(noise), TRUE, ALL), 0.9 * noise, COUNT)


@pytest.mark.parametrize("noise", [0.1, 0.45])
def test_pair_noise_goes_to_the_next_class(noise):
    found = noisy(noise, "pair")
    wrong = found != TRUE
    assert within(wrong.double().mean().item(), noise, COUNT)
    assert torch.equal(found[wrong], (TRUE[wrong] + 1) % CLASSES)


def test_a_new_label_says_nothing_about_the_old_one():
    found = noisy(0.4)
    table = torch.zeros(CLASSES, CLASSES).index_put_(
        (TRUE, found), torch.ones(COUNT), accumulate=True
    )
    each = COUNT / CLASSES
    for old in range(CLASSES):
        for new in range(CLASSES):
            wanted = 0.04 + (0.6 if old == new else 0.0)
            assert within(table[old, new].item() / each, wanted, each)


def test_neighbouring_images_and_other_seeds_draw_for_themselves():
    wrong = noisy(0.4) != TRUE
    pairs = (wrong[:-1] & wrong[1:]).double().mean().item()
    assert within(pairs, 0.36**2, COUNT, deviations=7)  # neighbours overlap: a wider bound
    both = (wrong & (noisy(0.4, seed=1) != TRUE)).double().mean().item()
    assert within(both, 0.36**2, COUNT)


def test_the_same_seed_gives_the_same_labels_and_more_noise_adds_to_them():
    assert torch.equal(noisy(0.4), noisy(0.4))
    few, many = noisy(0.2), noisy(0.4)
    assert torch.equal(many[few != TRUE], few[few != TRUE])
    assert noisy(0.0) is TRUE


# --- in a run ---------------------------------------------------------------------------------

SETTINGS = {"size": 300, "validation": 60, "within": True}


def data_of(seed=0, **changes):
    return load(override(recipe("digits-noisy"), changes), seed)


def test_training_and_validation_labels_are_replaced_and_the_test_set_s_are_not():
    clean, dirty = data_of(**{"data.noise": "0"}), data_of()
    for split in ("train", "valid"):
        wrong = (joined(clean, split) != joined(dirty, split)).double().mean().item()
        assert wrong == dirty.wrong[split] and 0.2 < wrong < 0.55
    assert torch.equal(joined(clean, "test"), joined(dirty, "test"))
    assert torch.equal(joined(dirty, "test"), images.pictures("digits").y_test)
    assert clean.wrong == {} and set(dirty.wrong) == {"train", "valid"}


def test_an_image_keeps_its_label_when_the_validation_images_are_trained_on():
    cut, whole = data_of(), data_of(**{"data.validation": "0"})
    both = torch.cat([joined(cut, "train"), joined(cut, "valid")])
    assert torch.equal(both, joined(whole, "train"))
    assert len(joined(cut, "train")) == 240 and whole.steps_per_epoch == 6


def test_what_an_epoch_trains_on_has_the_same_labels_as_what_is_evaluated():
    data = data_of()
    look = {
        x.numpy().tobytes(): int(y)
        for b in data.eval_batches("train")
        for x, y in zip(b.x, b.y, strict=True)
    }
    for epoch in (0, 3):
        for batch in data.train_batches(epoch):
            for x, y in zip(batch.x, batch.y, strict=True):
                assert look[x.numpy().tobytes()] == int(y)


def test_every_method_has_the_same_labels():
    made = recipe("digits-noisy")
    found = [
        Training(made, parse(method), 3, device="cpu").data
        for method in ("weight-decay", "seht-h", "sam", "mixup+label-smoothing")
    ]
    for other in found[1:]:
        for split in ("train", "valid"):
            assert torch.equal(joined(other, split), joined(found[0], split))
    assert not torch.equal(joined(data_of(seed=4), "train"), joined(found[0], "train"))


def test_a_run_says_how_many_labels_were_wrong(tmp_path):
    made = digits(**{"data.noise": "0.4", "data.within": "true"})
    result = train(made, "weight-decay", 0, tmp_path / "run")
    assert result.wrong_labels == load(made, 0).wrong
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["recipe"]["data"]["noise"] == 0.4
    plain = train(digits(), "weight-decay", 0, tmp_path / "plain")
    assert plain.wrong_labels is None


def test_runs_of_before_are_still_the_same_runs():
    for name in ("digits", "cifar10", "pydocs"):
        assert (
            not {"noise", "noise_kind", "within", "average"} & identity(recipe(name))["data"].keys()
        )
    assert identity(recipe("digits-noisy"))["data"]["noise"] == 0.4


def test_the_command_of_a_report_repeats_a_recipe_without_its_noise(tmp_path):
    made = override(recipe("digits-noisy"), {**FEW, "data.noise": "0"})
    Comparison(made, (Entry(parse("weight-decay"), made),), (0,), tmp_path).claim()
    assert "--data.noise 0.0" in command(load_report(tmp_path))


# --- splits and pixels ------------------------------------------------------------------------


def test_validation_is_cut_from_the_images_or_comes_on_top():
    count = images.POOL
    assert examples.split(DataConfig("digits", **SETTINGS), count) == (
        slice(0, 240),
        slice(240, 300),
    )
    beside = DataConfig("digits", size=300, validation=60)
    assert examples.split(beside, count) == (slice(0, 300), slice(count - 60, count))
    assert recipe("digits").data == DataConfig("digits", size=300, validation=400)
    with pytest.raises(DataError, match="lower one of them"):
        examples.split(DataConfig("digits", size=count + 1, validation=60, within=True), count)


@needs("cifar10")
def test_images_are_averaged_in_squares():
    made = recipe("cifar10-16")
    data, whole = load(made, 0), load(override(made, {"data.average": "1"}), 0)
    small, large = (next(d.eval_batches("train", 20)).x.double() for d in (data, whole))
    assert data.example == (3, 16, 16) and small.shape == (20, 3, 16, 16)
    wanted = sum(large[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)) / 4
    torch.testing.assert_close(small, wanted, rtol=0, atol=1e-5)
    batch = next(iter(data.train_batches(0)))
    assert batch.x.shape[1:] == (3, 16, 16)


def test_squares_must_fill_the_image():
    with pytest.raises(DataError, match=r"8x8.*data.average \(3\)"):
        data_of(**{"data.average": "3"})


NOISY = [name for name in RECIPES if "noisy" in name]


@pytest.mark.parametrize("name", NOISY)
def test_noisy_recipes(name):
    made = recipe(name)
    noise = 0.2 if name == "cifar10-large-noisy" else 0.4
    assert (made.data.noise, made.data.noise_kind, made.paper) == (noise, "uniform", None)
    assert made.data.within and made.data.validation
    trace = made.settings["seht-h"]
    assert (
        trace["warmup"] == 0.1
        and trace["every"] == 2
        and trace["curvature"] == "ggn"
        and "limit" not in trace
    )


def test_their_names():
    assert set(NOISY) == {
        "digits-noisy",
        "cifar10-16-noisy",
        "cifar10-low-noisy",
        "cifar10-noisy",
        "cifar10-noisy-small",
        "cifar10-large-noisy",
        "cancer-noisy",
        "italy-power-noisy",
    }
    low = recipe("cifar10-16")
    assert (low.data.size, low.data.average, low.epochs, low.optim.lr) == (2000, 2, 40, 0.1)
    assert (low.model.width, low.model.norm, low.optim.schedule) == (8, "batch", "onecycle")


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("digits", {"data.noise": "1"}, r"data.noise must be in \[0, 1\), not 1.0"),
        ("digits", {"data.noise": "-0.1"}, r"data.noise must be in \[0, 1\)"),
        ("digits", {"data.noise": "nan"}, r"data.noise must be in \[0, 1\)"),
        ("digits", {"data.noise": "0.5", "data.noise_kind": "pair"}, "below 0.5 .* pair"),
        ("digits", {"data.noise_kind": "pairs"}, "did you mean 'pair'"),
        (
            "pydocs",
            {"data.noise": "0.1"},
            "about examples with labels, and pydocs is text",
        ),
        ("pydocs", {"data.average": "2"}, "data.average is about images"),
        ("digits-noisy", {"data.validation": "300"}, "leaves none to train on; lower it"),
    ],
)
def test_bad_noise_in_words(name, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        override(recipe(name), changes)
    assert "\n" not in str(error.value)
