"""The data that are no images: what is in them, how it is divided and scaled, and who fits."""

import importlib.util
from pathlib import Path

import pytest
import torch

from seht.lab.data import DataError, load, tables
from seht.lab.models import build
from seht.lab.recipes import override, recipe

aeon = pytest.mark.skipif(importlib.util.find_spec("aeon") is None, reason="aeon is not here")
NAMES = ["cancer", pytest.param("italy-power", marks=aeon)]


def joined(data, split):
    batches = list(data.eval_batches(split))
    return torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_in_one_place_and_scaled_by_the_pool(name):
    made = override(recipe(name), {"data.size": "300"})
    parts = {split: joined(load(made, 3), split) for split in ("train", "valid", "test")}
    whole = {"cancer": 569, "italy-power": 1096}[name]
    assert [len(y) for _, y in parts.values()] == [260, 40, whole - 300]
    rows = {row.numpy().tobytes() for x, _ in parts.values() for row in x}
    assert len(rows) >= whole - 2  # of the days, two may be alike
    pool = torch.cat([parts["train"][0], parts["valid"][0]]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(pool.mean(1), torch.zeros(len(pool)), rtol=0, atol=1e-4)
    torch.testing.assert_close(pool.std(1), torch.ones(len(pool)), rtol=0, atol=1e-4)
    other = joined(load(made, 4), "test")
    assert torch.equal(other[0], parts["test"][0]) and torch.equal(other[1], parts["test"][1])


def test_cancer_is_scikit_learn_s():
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    found = tables.table("cancer")
    numbers = torch.cat([found.x, found.x_test]).double().sum(0)
    torch.testing.assert_close(numbers, torch.as_tensor(x).sum(0), rtol=1e-5, atol=0)
    assert int(found.y.sum() + found.y_test.sum()) == y.sum()


@aeon
def test_italy_power_is_aeon_s():
    found = tables.table("italy-power")
    labels = torch.cat([found.y, found.y_test])
    assert labels.bincount().tolist() == [547, 549]
    (folder,) = importlib.util.find_spec("aeon").submodule_search_locations
    path = f"{folder}/datasets/data/ItalyPowerDemand/ItalyPowerDemand_TRAIN.ts"
    last = Path(path).read_text().split()[-1]
    day = torch.tensor([float(value) for value in last.split(":")[0].split(",")])
    days = torch.cat([found.x, found.x_test]).flatten(1)
    (place,) = (days == day).all(1).nonzero()
    assert labels[place].item() == int(last.split(":")[1]) - 1


def test_a_file_that_cannot_be_read(tmp_path):
    path = tmp_path / "x.ts"
    path.write_text("@data\n1.0,oh:1\n")
    with pytest.raises(DataError, match="force-reinstall aeon"):
        tables._series(path)


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_replaced_as_in_images(name):
    clean, noisy = load(recipe(name), 1), load(recipe(f"{name}-noisy"), 1)
    for split in ("train", "valid"):
        wrong = joined(clean, split)[1] != joined(noisy, split)[1]
        assert wrong.double().mean().item() == noisy.wrong[split]
        assert torch.equal(joined(clean, split)[0], joined(noisy, split)[0])
    assert torch.equal(joined(clean, "test")[1], joined(noisy, "test")[1])
    assert 0.1 < noisy.wrong["train"] < 0.3


@pytest.mark.parametrize("name", NAMES)
def test_the_networks_have_dropout_where_it_is_asked_for(name):
    made = override(recipe(name), {"model.dropout": "0.5"})
    model = build(made.model, load(made, 0))
    x = torch.randn(6, *load(made, 0).example)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x)) and model(x).shape == (6, 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data.crop": "2"}, "data.crop is about images, and cancer is table"),
        ({"data.flip": "true"}, "data.flip is about images"),
        ({"data.average": "2"}, "data.average is about images"),
        ({"model.name": "cnn"}, "model.name cnn does not take cancer"),
    ],
)
def test_what_is_about_pixels_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        override(recipe("cancer"), changes)
