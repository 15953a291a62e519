"""What acts on images and feature maps: Cutout, mixup, DropBlock."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seht.lab import models
from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe
from seht.lab.methods.base import Batch, Run
from seht.lab.methods.batches import Cutout, Mixup, cut
from seht.lab.methods.features import DropBlock, block_mask, drop_blocks, places


def images(count=4, side=8):
    return Batch(torch.rand(count, 3, side, side) + 1, torch.arange(count) % 10)


# --- Cutout -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "column", "rows", "columns"),
    [
        (4, 4, range(2, 6), range(2, 6)),
        (0, 0, range(0, 2), range(0, 2)),
        (7, 7, range(5, 8), range(5, 8)),
        (0, 4, range(0, 2), range(2, 6)),
    ],
)
def test_cutout_is_clipped_at_the_border(row, column, rows, columns):
    x = images(1).x
    expected = x.clone()
    for i in rows:
        for j in columns:
            expected[..., i, j] = 0
    assert torch.equal(cut(x, torch.tensor([row]), torch.tensor([column]), 4), expected)


def test_cutout_cuts_every_image_at_its_own_place():
    batch = images(400)
    x = Cutout(size=4).batch(batch, 0).x
    gone = (x == 0).all(1)
    assert torch.equal((x == 0).any(1), gone)  # all channels alike
    assert torch.equal(x[~gone[:, None].expand_as(x)], batch.x[~gone[:, None].expand_as(x)])
    areas = gone.sum((1, 2))
    assert areas.min() == 4 and areas.max() == 16
    # From each of the 8 centres a side is 2, 3, 4, 4, 4, 4, 4 or 3 long: 3.5 on average.
    assert areas.double().mean() == pytest.approx(3.5**2, rel=0.06)


def test_cutout_takes_half_the_image_where_no_size_is_given():
    areas = (Cutout().batch(images(200, side=32), 0).x == 0).all(1).sum((1, 2))
    assert areas.max() == 16 * 16


# --- mixup ------------------------------------------------------------------------------------


def test_mixup_mixes_inputs_and_labels_alike():
    batch = Batch(torch.eye(10)[:, :, None, None], torch.arange(10))
    mixed = Mixup().batch(batch, 0)
    soft = mixed.share * F.one_hot(mixed.y, 10) + (1 - mixed.share) * F.one_hot(mixed.other, 10)
    torch.testing.assert_close(mixed.x.squeeze(), soft)
    assert sorted(mixed.other.tolist()) == list(range(10))
    assert torch.equal(mixed.y, batch.y)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_share_is_beta(alpha):
    batch = images(2)
    shares = torch.tensor([Mixup(alpha=alpha).batch(batch, 0).share for _ in range(1500)])
    assert shares.mean() == pytest.approx(0.5, abs=0.04)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.15)


# --- DropBlock --------------------------------------------------------------------------------


def covering(side, size):
    """For each place, how many corners of whole blocks would drop it."""
    count = torch.zeros(side, side)
    for i in range(side - size + 1):
        for j in range(side - size + 1):
            count[i : i + size, j : j + size] += 1
    return count


@pytest.mark.parametrize(("side", "size"), [(7, 3), (8, 4), (6, 1), (4, 4)])
def test_kept_fraction_at_every_place(side, size):
    keep, draws = 0.9, 40000
    gamma = (1 - keep) / size**2 * side**2 / (side - size + 1) ** 2
    kept = block_mask(torch.empty(draws, 1, side, side), size, keep).mean((0, 1))
    expected = (1 - gamma) ** covering(side, size)
    error = (expected * (1 - expected) / draws).sqrt()
    assert ((kept - expected).abs() < 5 * error).all()
    # The formula neglects overlaps, so that a little more than asked for is kept.
    assert keep - 0.01 < kept.mean() < keep + 0.03


def test_blocks_are_whole_squares_of_their_own_channel():
    size, gone = 3, 1 - block_mask(torch.empty(50, 4, 9, 9), 3, 0.8)
    assert 0 < gone.mean() < 1
    # A union of 3x3 squares is what remains of it when everything narrower is taken away.
    eroded = 1 - F.max_pool2d(1 - gone, size, stride=1)
    again = F.max_pool2d(F.pad(eroded, (size - 1,) * 4), size, stride=1)
    assert torch.equal(again, gone)
    assert not torch.equal(gone[0, 0], gone[0, 1]) and not torch.equal(gone[0], gone[1])


def test_a_block_larger_than_the_map_drops_whole_maps():
    mask = block_mask(torch.empty(20000, 1, 4, 4), 7, 0.9)
    assert torch.equal(mask.amin((2, 3)), mask.amax((2, 3)))
    assert mask.mean() == pytest.approx(0.9, abs=0.01)


def test_what_is_kept_is_scaled_up():
    x = torch.ones(8, 4, 6, 6)
    dropped = drop_blocks(x, 3, 0.8)
    kept = dropped != 0
    torch.testing.assert_close(dropped.sum(), x.sum())
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 288 * 4 / kept.sum()))


def test_places_are_the_last_two_groups():
    model = models.resnet18(width=4)
    names = {id(module): name for name, module in model.named_modules()}
    found = {names[id(module)]: part for module, part in places(model)}
    assert found == {
        f"layers.{group}.{block}.{place}": part
        for group, part in ((2, 0.25), (3, 1.0))
        for block in (0, 1)
        for place in ("norm1", "norm2", "shortcut")
    }


def run_of(model):
    recipe = Recipe("r", DataConfig("digits"), ModelConfig("cnn"), OptimConfig(0.1), 4, 2)
    return Run(recipe, model, 10, 11, 0)


@pytest.mark.parametrize(
    "model",
    [
        models.resnet18(width=4),
        models.WideResNet(10, 1, width=4),
        models.CNN(channels=3),
    ],
    ids=lambda model: type(model).__name__,
)
def test_dropblock_ramps_and_rests_in_evaluation(model):
    method, batch = DropBlock(keep=0.5), images()
    model.train()
    plain = model(batch.x)
    method.setup(run_of(model))
    method.batch(batch, 0)
    assert torch.equal(model(batch.x), plain)
    rates = []
    for step in (7, 14, 21):
        method.batch(batch, step)
        rates.append(method.now)
        assert not torch.equal(model(batch.x), plain)
    assert rates == pytest.approx([0.5 / 3, 1 / 3, 0.5])
    model.eval()
    assert torch.equal(model(batch.x), model(batch.x))


def test_dropblock_refuses_a_network_it_does_not_know():
    with pytest.raises(ValueError, match="knows no feature maps in a Linear"):
        DropBlock().setup(run_of(nn.Linear(2, 2)))
