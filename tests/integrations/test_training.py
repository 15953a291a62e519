"""``training`` around a loop by hand, in Accelerate and in Fabric: it tells the penalty the length
of the training in its own count of steps, however many batches and processes make a step.
"""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import runs
import torch
import torch.nn.functional as F
from helpers import same
from torch.utils.data import DataLoader, IterableDataset, Subset

import seht
from seht.integrations import counted, training

BATCHES = runs.ROWS // runs.BATCH
HALF = {"weight": 1e-3, "warmup": 0.5, "seed": 0}


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def loop(penalty, loader, epochs, backward=torch.Tensor.backward):
    """Which calls were penalised."""
    found = []
    for _ in range(epochs):
        for batch in loader:
            backward(penalty(lambda: loss_fn(penalty.model, batch)))
            found.append(penalty.last.trace is not None)
    return found


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_half_of_the_calls_are_a_warm_up(accumulate):
    """Also where six batches are no whole number of steps of four."""
    penalty = seht.HessianTrace(runs.network(), **HALF, accumulate=accumulate)
    with training(penalty, runs.loader(), epochs=4) as given:
        assert given is penalty
        found = loop(penalty, runs.loader(), 4)
    plain = 4 * BATCHES // 2
    assert found == [False] * plain + [True] * (4 * BATCHES - plain)
    assert penalty.step == penalty.schedule.total_steps == 4 * BATCHES // accumulate


@pytest.mark.parametrize("together", [1, 2, 4, 9])
def test_accelerate_says_how_many_batches_are_a_step(together):
    accelerator = pytest.importorskip("accelerate").Accelerator(
        cpu=True, gradient_accumulation_steps=together
    )
    penalty = seht.HessianTrace(runs.network(), **HALF, accumulate=together)
    loader = accelerator.prepare(runs.loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with training(penalty, loader, epochs=3):
            found = loop(penalty, loader, 3, accelerator.backward)
    assert penalty.schedule.total_steps == -(-len(found) // together)
    other = seht.HessianTrace(runs.network(), **HALF, accumulate=together + 1)
    with pytest.warns(seht.PenaltyWarning, match=f"accumulates {together} batches"):
        training(other, loader, epochs=3)


def test_a_tuned_weight_is_what_it_is_with_everything_given():
    def train(around, **more):
        model = runs.network()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        held_out = (DataLoader(Subset(runs.dataset(), range(24)), 8), loss_fn)
        more = {name: {"optimizer": optimizer, "held_out": held_out}.get(name) for name in more}
        penalty = seht.HessianTrace(
            model, weight=seht.Tuning(gap=0.0), seed=0, **({} if around else more),
            total_steps=None if around else 4 * BATCHES,
        )  # fmt: skip

        def steps():
            for _ in range(4):
                for batch in runs.loader():
                    optimizer.zero_grad()
                    penalty(lambda: loss_fn(model, batch)).backward()
                    optimizer.step()

        if around:
            with training(penalty, runs.loader(), epochs=4, **more):
                steps()
        else:
            steps()
        return penalty.path

    both = {"optimizer": 1, "held_out": 1}
    found = train(True, **both)
    assert found == train(False, **both) and len(set(found.weights)) > 2


def test_what_it_says_at_the_end():
    penalty = seht.HessianTrace(runs.network(), weight=1e-3, warmup=500)
    words = "at step 6, within the warm-up of 500"
    with (
        pytest.warns(seht.PenaltyWarning, match=words) as said,
        training(penalty, runs.loader(), epochs=1),
    ):
        loop(penalty, runs.loader(), 1)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), training(penalty, steps=100):
            raise KeyError  # which says enough
        with training(seht.HessianTrace(runs.network(), weight=1e-3), runs.loader(), 0.5) as half:
            loop(half, [next(iter(runs.loader()))] * 3, 1)
        assert half.schedule.total_steps == 3
    other = seht.HessianTrace(runs.network(), **HALF, accumulate=2, total_steps=24)
    with pytest.warns(seht.PenaltyWarning, match="total_steps=24, and this training has 12"):
        training(other, runs.loader(), epochs=4)
    assert other.schedule.total_steps == 24


class Stream(IterableDataset):
    """Nobody knows its length."""

    def __iter__(self):
        yield from runs.dataset()


ONE = DataLoader(runs.dataset(), 8)
REFUSED = [
    ({}, TypeError, "the loader and how often it is read, epochs=, or .* steps="),
    ({"loader": ONE}, TypeError, "the loader and how often it is read, epochs="),
    ({"epochs": 3}, TypeError, "the loader and how often it is read, epochs="),
    ({"loader": ONE, "epochs": 3, "steps": 7}, TypeError, "or steps=, not both"),
    ({"loader": DataLoader(Stream(), 8), "epochs": 3}, ValueError, "not known; give .*steps="),
    ({"loader": [], "epochs": 3}, ValueError, "is 0 or not known; give .*steps="),
    ({"loader": ONE, "epochs": 0}, ValueError, "epochs must be a positive"),
    ({"loader": ONE, "epochs": "3"}, TypeError, "epochs must be a positive"),
    ({"steps": 2.5}, TypeError, "steps must be a whole number"),
    ({"steps": 0}, ValueError, "steps must be at least 1"),
    ({"steps": 9, "optimizer": "adam"}, TypeError, "optimizer=optimizer"),
    ({"steps": 9, "held_out": ([1], loss_fn)}, ValueError, "leave weight= and share= out"),
]


@pytest.mark.parametrize("options, kind, words", REFUSED)
def test_what_it_cannot_know_is_refused_and_changes_nothing(options, kind, words):
    penalty = seht.HessianTrace(runs.network(), **HALF)
    before = copy.deepcopy((penalty.state_dict(), penalty.schedule)), torch.get_rng_state()
    with pytest.raises(kind, match=words) as failure:
        training(penalty, **options)
    assert "\n" not in str(failure.value)
    assert same(((penalty.state_dict(), penalty.schedule), torch.get_rng_state()), before)
    with pytest.raises(TypeError, match=r"the seht\.HessianTrace of the loop.*, not Sequential$"):
        training(penalty.model, **options)


def test_a_bad_optimiser_leaves_no_held_out_data_behind():
    penalty = seht.HessianTrace(runs.network(), seed=0)
    with pytest.raises(TypeError, match="optimizer=optimizer"):
        penalty.equip(held_out=(ONE, loss_fn), optimizer="adam")
    assert "share 2" in repr(penalty)


@pytest.mark.parametrize(
    "batches, together, epochs", [(6, 1, 3), (6, 2, 3), (7, 2, 3), (3, 4, 5), (10, 8, 20)]
)
def test_early_steps_at_the_end_of_an_epoch(batches, together, epochs):
    """As Lightning and Hugging Face count: each epoch ends with a step."""
    updates = epochs * -(-batches // together)
    assert counted(updates, batches, together, together) == -(-epochs * batches // together)
    assert counted(1, batches, together, together) == 1


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Each reads half of the batches: counted are its own, on both, with either framework."""
    pytest.importorskip("accelerate"), pytest.importorskip("lightning_fabric")
    source = str(Path(seht.__file__).parents[1])
    here = Path(__file__).parent
    kit = os.pathsep.join([source, str(here), str(here.parent / "kit")])
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": kit, "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(here / "training_ranks.py"), str(tmp_path / "said")]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    # 48 rows in batches of 8 on two ranks are 3 a rank, in steps of 2, over 4 epochs
    assert said[0].splitlines()[:2] == ["accelerate 6 of 6", "fabric 6 of 6"]
