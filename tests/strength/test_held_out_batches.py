"""Held-out batches: read one after the other, begun again, and the same ones in a resumed run."""

import copy
import pickle
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import seht
from seht.strength.held_out import HeldOutBatches, source

SET = TensorDataset(torch.arange(12.0))


class Stream(IterableDataset):
    """Has no length, and its loader none either."""

    def __iter__(self):
        return iter(torch.arange(12.0))


class Augmented(TensorDataset):
    """Draws anew for each example, as transforms of images do."""

    def __getitem__(self, place):
        noise = torch.rand(()) + random.random() + numpy.random.rand()
        return (super().__getitem__(place)[0] + noise,)


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


def first(model, batch):
    return batch[0] if isinstance(batch, (list, tuple)) else batch


MODEL = nn.Linear(1, 2)
SOURCES = {
    "list": lambda: [torch.tensor([k, k + 0.5]) for k in range(5)],
    "loader": lambda: DataLoader(SET, 5),
    "shuffled": lambda: DataLoader(SET, 5, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 5),
    "generator": lambda: DataLoader(SET, 5, shuffle=True, generator=seeded()),
    "sampler": lambda: DataLoader(SET, 5, sampler=RandomSampler(SET, generator=seeded())),
    "augmented": lambda: DataLoader(Augmented(*SET.tensors), 5, shuffle=True),
}


def read(batches, count):
    return [batches.closure(MODEL)().tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", SOURCES)
def test_a_resumed_run_reads_the_same(kind):
    """From every place, also where the random state is another one by then."""
    torch.manual_seed(3)
    whole = read(HeldOutBatches(SOURCES[kind](), first), 11)
    if kind in ("shuffled", "generator", "sampler"):
        assert whole[:3] != whole[3:6] and {*whole[0], *whole[1], *whole[2]} == {*range(12)}
    elif kind == "augmented":
        assert len({x for batch in whole for x in batch}) == 46
    else:
        assert whole[0] == whole[3 if kind != "list" else 5]
    for stop in range(11):
        before = HeldOutBatches(SOURCES[kind](), first)
        assert read(before, stop) == whole[:stop] and before.read == stop
        torch.rand(stop), random.random(), numpy.random.rand()
        after = HeldOutBatches(SOURCES[kind](), first)
        after.go_on(stop)
        assert read(after, 11 - stop) == whole[stop:]


@pytest.mark.parametrize("kind", SOURCES)
def test_no_random_number_is_used_up(kind):
    torch.manual_seed(3)
    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)
    read(HeldOutBatches(SOURCES[kind](), first), 7)
    now = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)
    assert same(state, now) and torch.initial_seed() == 3


def test_a_generator_shared_with_the_training_shuffles_as_without():
    orders = []
    for looks in (False, True):
        own = seeded()
        others = HeldOutBatches(DataLoader(SET, 5, shuffle=True, generator=own), first)
        orders.append([])
        for _ in range(3):
            for batch in DataLoader(SET, 5, shuffle=True, generator=own):
                orders[-1] += batch[0].tolist()
                read(others, 2 * looks)
    assert orders[0] == orders[1]


def test_accelerates_own_seeded_order():
    accelerate = pytest.importorskip("accelerate")
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(3)
    made = lambda: HeldOutBatches(accelerator.prepare(DataLoader(SET, 5, shuffle=True)), first)
    whole, after = read(made(), 8), made()
    after.go_on(4)
    assert whole[:3] != whole[3:6] and read(after, 4) == whole[4:]


def test_another_seed_shuffles_otherwise():
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(read(HeldOutBatches(SOURCES["shuffled"](), first), 3))
    assert found[0] == found[2] != found[1]


def test_a_batch_is_given_again_where_its_step_failed():
    batches = HeldOutBatches(iter(SOURCES["list"]()), first)
    [one] = read(batches, 1)
    back = batches.back()
    [two] = read(batches, 1)
    for _ in range(2):
        back()
        assert batches.read == 1
        assert read(batches, 1) == [two] and batches.read == 2
    assert read(batches, 1)[0] not in (one, two)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_from_there(copied):
    """A loader's iterator cannot be copied."""
    penalty = seht.HessianTrace(
        nn.Linear(1, 2), weight="tuned", total_steps=20, held_out=(DataLoader(SET, 5), squared)
    )
    steps(penalty, 10)
    other = copied(penalty)
    assert other.state_dict()["strength"]["read"] == 2
    for one in (penalty, other):
        steps(one, 3)
    assert penalty.path == other.path and len(penalty.path.weights) == 6


def squared(model, batch):
    x = batch[0].unsqueeze(1) / 12
    return F.cross_entropy(model(x), (x[:, 0] > 0.5).long())


def steps(penalty, count):
    batch = [torch.linspace(0, 12, 7)]
    for _ in range(count):
        penalty(lambda: squared(penalty.model, batch))


def test_batches_that_are_given_after_the_state():
    """As Lightning does: the checkpoint is read before the training begins."""
    made = lambda **more: seht.HessianTrace(MODEL, weight="tuned", total_steps=20, seed=0, **more)
    given = {"held_out": (DataLoader(SET, 5, shuffle=True), squared)}
    penalty = made(**given)
    steps(penalty, 12)
    late = made()
    late.load_state_dict(penalty.state_dict())
    assert late.state_dict()["strength"]["read"] == 4
    late.equip(**given)
    for one in (penalty, late):
        steps(one, 6)
    assert penalty.path == late.path


X, Y = torch.arange(300.0)[:, None], torch.arange(300)
HELD_OUT = {
    "one batch": ((X, Y), [300, 300]),
    "as a loader gives it": ([X, Y], [300, 300]),
    "by name": ({"x": X, "y": Y}, [300, 300]),
    "a data set": (TensorDataset(X, Y), [100, 100, 100, 100]),
    "batches": ([(X[:5], Y[:5]), (X[5:], Y[5:])], [5, 295, 5]),
}


@pytest.mark.parametrize("kind", HELD_OUT)
def test_what_the_doctor_takes_tunes_a_weight(kind):
    """It prints ``held_out=(held_out, loss_fn)`` for whatever held-out data it was given."""
    data, sizes = HELD_OUT[kind]
    part = "x" if kind == "by name" else 0
    batches = source((data, lambda model, batch: batch[part]))
    assert isinstance(batches, HeldOutBatches)
    assert [len(batches.closure(MODEL)()) for _ in sizes] == sizes


@pytest.mark.parametrize("count", [1, 2, 3, 128, 129, 257, 198 * 128 + 1])
def test_no_example_of_a_data_set_is_alone(count):
    """Batch normalisation refuses a batch of one; nor is one larger than 128."""
    data = TensorDataset(torch.arange(float(count)))
    batches = source((data, lambda model, batch: batch[0]))
    found = []
    while sum(map(len, found)) < count:
        found.append(batches.closure(MODEL)())
    assert torch.equal(torch.cat(found), data.tensors[0])
    assert min(map(len, found)) > 1 or count == 1
    assert max(map(len, found)) <= 128
