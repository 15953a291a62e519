"""Accelerate: the two lines, its accumulation and its checkpoints."""

import pytest
import runs
import torch
import torch.nn.functional as F
from helpers import every_engine

import seht

accelerate = pytest.importorskip("accelerate")


def start(**options):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=runs.ACCUMULATE)
    model = runs.network()
    penalty = seht.HessianTrace(model, **{**runs.OPTIONS, **options})
    prepared = accelerator.prepare(model, runs.optimizer_of(model), runs.loader())
    accelerator.register_for_checkpointing(penalty)
    return accelerator, *prepared, penalty


def train(accelerator, model, optimizer, loader, penalty, epochs=runs.EPOCHS):
    records = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(penalty(lambda: F.cross_entropy(model(x), y)))
                records.append(penalty.last)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), runs.CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return records


@every_engine
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.supports("Accelerate", section="frameworks")
def test_as_by_hand(engine, curvature):
    options = {"engine": engine, "curvature": curvature}
    truth, records = runs.by_hand(**options)
    parts = start(**options)
    assert train(*parts) == records
    runs.assert_same(parts[1].state_dict(), truth)


@pytest.mark.supports("Accelerate, resumed", section="frameworks", engine="difference")
def test_saved_and_loaded(tmp_path):
    truth, records = runs.by_hand()
    half = start()
    train(*half, epochs=1)
    half[0].save_state(tmp_path)
    rest = start(seed=99)
    rest[0].load_state(tmp_path)
    assert train(*rest, epochs=1) == records[len(records) // 2 :]
    runs.assert_same(rest[1].state_dict(), truth)


def test_evaluated_in_inference_mode():
    _, model, _, loader, penalty = start(warmup=0)
    x, y = next(iter(loader))
    with torch.inference_mode():
        value = penalty(lambda: F.cross_entropy(model(x), y))
    assert not value.requires_grad and penalty.step == 0 and penalty.last is None
