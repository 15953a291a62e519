"""Fabric: the two lines, whichever of its modules the penalty is given, and its own checkpoints."""

import pytest
import runs
import torch
import torch.nn.functional as F
from helpers import every_engine

import seht

fabric_package = pytest.importorskip("lightning_fabric")
from lightning_fabric.plugins import Precision  # noqa: E402


def train(fabric, state, epochs=runs.EPOCHS):
    model, optimizer, penalty = state["model"], state["optimizer"], state["penalty"]
    loader = fabric.setup_dataloaders(runs.loader())
    records = []
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % runs.ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = penalty(lambda: F.cross_entropy(model(x), y))
                fabric.backward(loss / runs.ACCUMULATE)
            records.append(penalty.last)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=runs.CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return records


def start(fabric, wrapped=False, **options):
    bare = runs.network()
    model, optimizer = fabric.setup(bare, runs.optimizer_of(bare))
    penalty = seht.HessianTrace(model if wrapped else bare, **{**runs.OPTIONS, **options})
    return {"model": model, "optimizer": optimizer, "penalty": penalty}


class Watched(Precision):
    """With a backward of its own, as mixed precision has: others' gradients are refused."""

    def post_backward(self, tensor, module):
        pass


@every_engine
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.supports("Fabric", section="frameworks")
def test_as_by_hand(engine, wrapped, curvature):
    fabric = fabric_package.Fabric(accelerator="cpu", plugins=[Watched()])
    options = {"engine": engine, "curvature": curvature}
    truth, records = runs.by_hand(**options)
    state = start(fabric, wrapped, **options)
    assert train(fabric, state) == records
    runs.assert_same(state["model"].state_dict(), truth)


def test_others_gradients_are_still_refused():
    fabric = fabric_package.Fabric(accelerator="cpu", plugins=[Watched()])
    state = start(fabric, warmup=0)
    x, y = next(iter(runs.loader()))
    loss = state["penalty"](lambda: F.cross_entropy(state["model"](x), y))
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        loss.backward()


@pytest.mark.supports("Fabric, resumed", section="frameworks", engine="difference")
def test_saved_and_loaded(tmp_path):
    fabric = fabric_package.Fabric(accelerator="cpu")
    truth, records = runs.by_hand()
    half = start(fabric)
    train(fabric, half, 1)
    fabric.save(tmp_path / "half.ckpt", half)
    rest = start(fabric, seed=99)
    fabric.load(tmp_path / "half.ckpt", rest)
    assert train(fabric, rest, 1) == records[len(records) // 2 :]
    runs.assert_same(rest["model"].state_dict(), truth)


@pytest.mark.slow
def test_mixed_precision():
    """Whatever the other half of a mixed-precision step does, it is not refused."""
    fabric = fabric_package.Fabric(accelerator="cpu", precision="bf16-mixed")
    state = start(fabric, curvature="ggn")
    records = train(fabric, state)
    assert all(torch.isfinite(p).all() for p in state["model"].parameters())
    assert records[-1].trace > 0
