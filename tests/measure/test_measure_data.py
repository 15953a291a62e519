"""What counts as a batch, a data set, an iterable; and that nothing is read twice by mistake."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import seht.measure
from seht.measure.data import Batches, size_of

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "train"


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def counts(data, **options):
    return [count for _, count in Batches(data, **options)]


@pytest.mark.parametrize(
    "batch",
    [X, (X, Y), [X, Y], {"x": X, "y": Y}, UserDict(x=X, y=Y), Pair(X, Y), Record(X, Y),
     (X, None), {"x": X, "deep": {"y": Y}}],
    ids=["tensor", "tuple", "list", "dict", "mapping", "namedtuple", "dataclass", "none", "nested"],
)  # fmt: skip
def test_one_batch(batch):
    assert counts(batch) == [10]
    ((whole, _),) = Batches(batch)
    assert whole is batch
    assert counts(batch, size=4) == [4, 4, 2]
    parts = [part for part, _ in Batches(batch, size=4)]
    assert all(type(part) in (type(batch), dict) for part in parts)
    assert [size_of(part) for part in parts] == [4, 4, 2]


@pytest.mark.parametrize(
    "data",
    [
        [(X[:6], Y[:6]), (X[6:], Y[6:])],
        ((X[:6], Y[:6]), (X[6:], Y[6:])),
        DataLoader(TensorDataset(X, Y), batch_size=6),
    ],
    ids=["list", "tuple", "loader"],
)
def test_iterables_of_batches(data):
    batches = Batches(data)
    assert [count for _, count in batches] == [count for _, count in batches] == [6, 4]
    assert batches.total == 2
    assert counts(data, size=4) == [4, 2, 4]


def test_data_sets_are_cut():
    assert counts(TensorDataset(X, Y)) == [10]
    assert counts(TensorDataset(X, Y), size=3) == [3, 3, 3, 1]
    assert counts(Stream(), size=4) == [4, 4, 2]
    assert counts(Stream()) == [10]


def test_a_stream_has_no_length():
    for stream in (Stream(), DataLoader(Stream(), batch_size=4)):
        assert Batches(stream).total is None


def test_an_iterator_is_kept_only_where_it_is_read_again():
    def stream():
        yield X[:6]
        yield X[6:]

    again = Batches(stream(), again=True)
    assert [c for _, c in again] == [c for _, c in again] == [6, 4]
    once = Batches(stream())
    assert [c for _, c in once] == [6, 4] and [c for _, c in once] == []


@pytest.mark.parametrize("name", ["trace", "density", "landscape", "sharpness", "robustness"])
def test_every_measurement_reads_all_of_an_iterator(name):
    model, batches = torch.nn.Linear(3, 1), [torch.ones(4, 3), torch.ones(2, 3), torch.ones(5, 3)]
    found = getattr(seht.measure, name)(model, lambda m, x: m(x).square().mean(), iter(batches))
    assert found.samples == 11


def test_the_limit_says_whether_something_was_left_out():
    loader = [(X[:4],), (X[4:8],), (X[8:],)]  # a list of tensors would be one batch
    for limit, sizes, partial in [(4, [4], True), (6, [4, 2], True), (8, [4, 4], True),
                                  (10, [4, 4, 2], False), (99, [4, 4, 2], False)]:  # fmt: skip
        batches = Batches(loader, limit=limit)
        assert [c for _, c in batches] == sizes and batches.partial is partial


def test_another_axis():
    text = torch.zeros(7, 5, dtype=torch.long)
    assert counts((text, text), axis=1, size=2) == [2, 2, 1]
    part = next(iter(Batches((text, text), axis=1, size=2)))[0]
    assert part[0].shape == (7, 2)


@pytest.mark.parametrize("data", [3, "batch", None, lambda: None])
def test_what_is_no_data_is_refused(data):
    with pytest.raises(TypeError, match="data must be a batch"):
        Batches(data)


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(ValueError, match="cannot tell how many examples"):
        counts([["a", "b"]])
    with pytest.raises(ValueError, match="micro_batch must be at least 1"):
        Batches(X, size=0)
