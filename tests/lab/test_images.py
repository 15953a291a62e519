"""Images: splits, order, augmentation against plain Python, pickles, and the real CIFAR-10."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from real_data import needs

from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe
from seht.lab.data import DataError, files, images, load
from seht.lab.data.examples import Examples, Labelled, crop_flip, draw
from seht.lab.recipes import override, recipe


def of(name="digits", batch=50, eval_batch=64, **data):
    model = ModelConfig("cnn" if name == "digits" else "resnet18")
    return Recipe("test", DataConfig(name, **data), model, OptimConfig(0.1), batch, 2, eval_batch)


def joined(batches):
    batches = list(batches)
    return torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])


def as_sets(data):
    """The images of each split as bytes."""
    return {
        split: {x.numpy().tobytes() for x in joined(data.eval_batches(split))[0]}
        for split in ("train", "valid", "test")
    }


# --- splits and order -------------------------------------------------------------------------


def test_splits_do_not_meet():
    data = load(of(size=300, validation=200), 0)
    sets = as_sets(data)
    assert [len(sets[s]) for s in ("train", "valid", "test")] == [300, 200, 1797 - images.POOL]
    assert not sets["train"] & sets["valid"]
    assert not (sets["train"] | sets["valid"]) & sets["test"]


def test_a_seed_draws_its_own_images_but_not_its_own_test():
    first, same, other = (as_sets(load(of(size=300, validation=200), s)) for s in (0, 0, 1))
    assert first == same
    assert first["train"] != other["train"] and first["valid"] != other["valid"]
    assert first["test"] == other["test"]


def test_a_smaller_size_is_a_part_of_the_larger_one_and_leaves_the_validation_split_alone():
    few, all_ = as_sets(load(of(size=100, validation=200), 3)), as_sets(load(of(validation=200), 3))
    assert few["train"] < all_["train"] and len(all_["train"]) == images.POOL - 200
    assert few["valid"] == all_["valid"]


def test_without_validation_the_split_is_empty():
    data = load(of(), 0)
    assert list(data.eval_batches("valid")) == []
    assert len(joined(data.eval_batches("train"))[0]) == images.POOL


@pytest.mark.parametrize(
    "sizes", [{"size": 701}, {"size": 600, "validation": 101}, {"validation": 700}]
)
def test_more_images_than_there_are(sizes):
    with pytest.raises(DataError, match=r"digits has 700 examples .* lower (one of them|it)"):
        load(of(**sizes), 0)


def test_an_epoch_is_every_image_once_in_an_order_of_its_own():
    data = load(of(size=130, batch=50), 0)
    batches = list(data.train_batches(0))
    assert [len(b.x) for b in batches] == [50, 50, 30] and data.steps_per_epoch == 3
    assert batches[0].x.dtype is torch.float32 and batches[0].y.dtype is torch.int64
    fixed, labels = joined(data.eval_batches("train"))
    seen, seen_labels = joined(batches)
    rows = lambda x, y: Counter((a.numpy().tobytes(), int(b)) for a, b in zip(x, y, strict=True))
    assert rows(seen, seen_labels) == rows(fixed, labels)
    assert not torch.equal(seen, fixed)
    assert not torch.equal(joined(data.train_batches(1))[0], seen)


def test_batches_depend_on_seed_and_epoch_and_nothing_else():
    config = of(size=100, batch=30, crop=1, flip=True)
    data = load(config, 5)
    first = joined(data.train_batches(7))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    list(data.train_batches(2))
    again = joined(data.train_batches(7))
    fresh = joined(load(config, 5).train_batches(7))
    other = joined(load(config, 6).train_batches(7))
    assert torch.equal(first[0], again[0]) and torch.equal(first[0], fresh[0])
    assert torch.equal(first[1], fresh[1]) and not torch.equal(first[1], other[1])
    assert torch.equal(torch.get_rng_state(), before)  # and they leave the global state alone


def test_an_epoch_can_be_entered_in_the_middle():
    data = load(of(size=100, batch=30, crop=1, flip=True), 0)
    whole, rest = list(data.train_batches(4)), list(data.train_batches(4, start=2))
    assert len(whole) == 4 and len(rest) == 2
    for a, b in zip(whole[2:], rest, strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


def test_evaluation_is_limited_and_not_augmented():
    data = load(of(size=200, eval_batch=64, crop=2, flip=True), 0)
    plain = load(of(size=200, eval_batch=64), 0)
    assert [len(b.y) for b in data.eval_batches("train", limit=100)] == [64, 36]
    x, _ = joined(data.eval_batches("train", limit=100))
    assert torch.equal(x, joined(plain.eval_batches("train"))[0][:100])


def test_digits_are_scikit_learn_s():
    from sklearn.datasets import load_digits

    original, labels = load_digits(return_X_y=True)
    data = load(of(), 0)
    assert (data.classes, data.example) == (10, (1, 8, 8))
    x, y = (
        torch.cat(t)
        for t in zip(*(joined(data.eval_batches(s)) for s in ("train", "test")), strict=True)
    )
    rows = lambda x, y: sorted((tuple(map(float, a)), int(b)) for a, b in zip(x, y, strict=True))
    assert rows(x.flatten(1).mul(16), y) == rows(original, labels)


# --- augmentation -----------------------------------------------------------------------------


def by_hand(image, padding, dy, dx, flip):
    """One image, pixel by pixel."""
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y = row + dy - padding
            x = (width - 1 - column if flip else column) + dx - padding
            if 0 <= y < height and 0 <= x < width:
                out[:, row, column] = image[:, y, x]
    return out


@pytest.mark.parametrize("padding, flip", [(0, True), (1, False), (2, True), (4, True)])
def test_crop_and_flip_against_plain_python(padding, flip):
    batch = torch.randint(256, (40, 3, 6, 5), dtype=torch.uint8)
    draws = draw(40, padding, flip, torch.Generator().manual_seed(1))
    got = crop_flip(batch, padding, draws)
    for i, image in enumerate(batch):
        one = (int(draws.dy[i]), int(draws.dx[i]), bool(draws.flip[i]))
        assert torch.equal(got[i], by_hand(image, padding, *one))


def test_every_shift_and_flip_is_equally_likely():
    draws = draw(81 * 2 * 400, 4, True, torch.Generator().manual_seed(0))
    counts = Counter(zip(draws.dy.tolist(), draws.dx.tolist(), draws.flip.tolist(), strict=True))
    assert len(counts) == 9 * 9 * 2
    chi = sum((c - 400) ** 2 / 400 for c in counts.values())
    assert chi < 161 + 5 * (2 * 161) ** 0.5  # degrees of freedom, and five standard deviations


def test_no_flip_and_no_crop():
    draws = draw(100, 0, False, torch.Generator().manual_seed(0))
    assert not draws.flip.any() and not draws.dx.any() and not draws.dy.any()


def test_the_border_is_black_before_normalising(monkeypatch):
    """A shifted border holds what a black pixel becomes, not zero."""
    white = torch.full((8, 3, 8, 8), 255, dtype=torch.uint8)
    label = torch.zeros(8, dtype=torch.int64)
    made = Labelled(white, label, white, label, 2, 255, (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    data = Examples(made, of("cifar10", batch=8, crop=2), 0, "cpu")
    (batch,) = data.train_batches(0)
    for channel, (mean, std) in enumerate(zip(made.mean, made.std, strict=True)):
        values = batch.x[:, channel].unique()
        torch.testing.assert_close(values, torch.tensor([-mean / std, (1 - mean) / std]))


# --- pickles ----------------------------------------------------------------------------------


def test_pickles_hold_arrays_and_nothing_that_runs(tmp_path):
    path = tmp_path / "batch"
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    path.write_bytes(pickle.dumps({b"data": array, b"labels": [1, 2]}, protocol=3))
    read = images.unpickled(path)
    assert (read[b"data"] == array).all() and read[b"labels"] == [1, 2]

    class Runs:
        def __reduce__(self):
            return (open, (str(tmp_path / "trace"), "w"))

    for attack in (Runs(), {b"data": Runs()}):
        path.write_bytes(pickle.dumps(attack, protocol=3))
        with pytest.raises(DataError, match=r"asks for .*open"):
            images.unpickled(path)
    assert not (tmp_path / "trace").exists()
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match="holds no dictionary"):
        images.unpickled(path)


@pytest.mark.parametrize("name, classes", [("cifar10", 10), ("cifar100", 100)])
def test_cifar_files_are_read_in_order(name, classes, tmp_path, monkeypatch):
    """Files of the official form but few images: order, labels and channels as they come."""
    wanted = {}
    for i, (key, file) in enumerate(sorted(files.SOURCES[name].files.items())):
        pixels = np.full((2, 3072), i, dtype=np.uint8)
        pixels[:, 1024:2048] += 100  # green
        content = {
            b"data": pixels,
            b"labels" if classes == 10 else b"fine_labels": [i, classes - 1],
        }
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).write_bytes(pickle.dumps(content, protocol=3))
        wanted[key] = tmp_path / file.path
    monkeypatch.setattr(files, "find", lambda *_: wanted)
    images._cifar.cache_clear()
    try:
        made = images.pictures(name, tmp_path)
    finally:
        images._cifar.cache_clear()
    train = [0, 1, 2, 3, 4] if name == "cifar10" else [1]
    test = 5 if name == "cifar10" else 0
    assert made.x[:, 0, 0, 0].tolist() == [i for i in train for _ in range(2)]
    assert made.y.tolist() == [v for i in train for v in (i, classes - 1)]
    assert made.x_test[:, 1, 31, 31].tolist() == [test + 100] * 2
    assert made.classes == classes


# --- the real thing ---------------------------------------------------------------------------


@needs("cifar10")
def test_real_cifar10():
    made = images.pictures("cifar10")
    assert made.x.shape == (50000, 3, 32, 32) and made.x_test.shape == (10000, 3, 32, 32)
    assert made.y.bincount().tolist() == [5000] * 10
    assert made.y_test.bincount().tolist() == [1000] * 10
    mean = torch.stack([made.x[:, c].double().mean() for c in range(3)]) / 255
    std = torch.stack([made.x[:, c].double().std() for c in range(3)]) / 255
    torch.testing.assert_close(mean, torch.tensor(made.mean).double(), atol=5e-5, rtol=0)
    torch.testing.assert_close(std, torch.tensor(made.std).double(), atol=5e-5, rtol=0)


@needs("cifar10")
def test_real_cifar10_in_the_paper_s_recipe():
    data = load(recipe("cifar10"), 0)
    assert (data.classes, data.example, data.steps_per_epoch) == (10, (3, 32, 32), 1407)
    batch = next(iter(data.train_batches(0)))
    assert batch.x.shape == (32, 3, 32, 32)
    counts = [sum(len(b.y) for b in data.eval_batches(s)) for s in ("train", "valid", "test")]
    assert counts == [45000, 5000, 10000]
    all_ = load(override(recipe("cifar10"), {"data.validation": "0"}), 0)
    assert all_.steps_per_epoch == 1563


@needs("cifar10")
def test_a_damaged_batch_is_never_unpickled(tmp_path, monkeypatch):
    """One altered byte of a real file, and its opcodes are not even looked at."""
    source = files.find("cifar10")
    for key, path in source.items():
        target = tmp_path / files.SOURCES["cifar10"].files[key].path
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(path)
    body = bytearray(source["data_batch_3"].read_bytes())
    body[1000] ^= 1
    damaged = tmp_path / "cifar-10-batches-py/data_batch_3"
    damaged.unlink()
    damaged.write_bytes(body)
    monkeypatch.setattr(images, "unpickled", lambda path: pytest.fail(f"{path} was unpickled"))
    images._cifar.cache_clear()
    with pytest.raises(DataError, match="data_batch_3 is cut short or altered: sha256:0f00d98e"):
        load(recipe("cifar10-low"), 0, data_dir=tmp_path)
