"""DDP in real processes over gloo, started by torchrun: one launch runs many checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ddp_checks
import pytest
import torch
from filelock import FileLock
from torch import nn

import seht
from seht.replay.state import compiles

HERE = Path(__file__).parent
FAST = ddp_checks.FAST
SLOW = [name for name in ddp_checks.CHECKS if name not in [*FAST, "fails-on-rank-1"]]


def supporting(name):
    """A check that says what DDP is supported with."""
    engine = next((e for e in ("difference", "autograd") if e in name), None)
    if engine is None:
        return name
    return pytest.param(name, marks=pytest.mark.supports("DDP", engine=engine))


def launch(names, out, *, limit=600, **environment):
    """Run the checks in two processes and return what rank 0 wrote down, and what was printed."""
    source = str(Path(seht.__file__).parents[1])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([source, str(HERE.parent / "kit"), str(HERE)]),
        **environment,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(HERE / "ddp_run.py"), str(out), ",".join(names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    ranks = [Path(f"{out}.{rank}") for rank in range(2)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in ranks]
    return {"ranks": found, "printed": done.stderr[-5000:], "code": done.returncode}


@pytest.fixture(scope="session")
def outcome(request, tmp_path_factory):
    """One launch for all selected checks of a kind, also where several test processes ask."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def of(kind, **environment):
        path = shared / f"ddp-{kind}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                names = [
                    item.callspec.params["name"]
                    for item in request.session.items
                    if item.originalname == f"test_ddp_{kind}"
                ]
                path.write_text(json.dumps(launch(names, path, **environment)))
        return json.loads(path.read_text())

    return of


def judge(outcome, name):
    missing = {"error": f"did not come to it: {outcome['printed']}"}
    errors = [results.get(name, missing)["error"] for results in outcome["ranks"]]
    # All of them: a rank that waited for another in vain has an error, too.
    assert errors == [None, None], "\n".join(f"rank {r}: {e}" for r, e in enumerate(errors))


@pytest.mark.parametrize("name", [supporting(name) for name in FAST])
def test_ddp_fast(name, outcome):
    judge(outcome("fast"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_ddp_slow(name, outcome):
    judge(outcome("slow"), name)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device for each rank")
@pytest.mark.parametrize("name", ddp_checks.GPU)
def test_ddp_nccl(name, outcome):
    judge(outcome("nccl", SEHT_TEST_DEVICE="cuda"), name)


@pytest.mark.slow
def test_a_failing_check_fails(tmp_path):
    """The machinery itself: an error on one rank is seen, and nobody hangs."""
    found = launch(["fails-on-rank-1"], tmp_path / "out", limit=120)
    assert found["code"] != 0
    with pytest.raises(AssertionError, match="as it should"):
        judge(found, "fails-on-rank-1")


@pytest.mark.supports("`nn.DataParallel` over several devices", cell="refused")
@pytest.mark.parametrize("engine", ["difference", "autograd"])
def test_data_parallel_on_several_devices_is_refused(engine):
    model = nn.Sequential(nn.Linear(3, 3), nn.DataParallel(nn.Linear(3, 1)))
    x = torch.randn(4, 3)
    penalty = seht.HessianTrace(model, weight=0.1, engine=engine)
    penalty(lambda: model(x).square().mean()).backward()  # on no or one device it is harmless
    model[1].device_ids = [0, 1]
    with pytest.raises(RuntimeError, match=r"'1' is a DataParallel on 2 devices.*use Distributed"):
        penalty(lambda: model(x).square().mean())


def test_data_parallel_beside_the_model_is_refused():
    if compiles():  # by another test: no hook then meets the modules beside the model
        torch._dynamo.reset()
    model, beside = nn.Linear(3, 3), nn.DataParallel(nn.Linear(3, 1))
    beside.device_ids = [0, 1]
    x = torch.randn(4, 3)
    penalty = seht.HessianTrace(model, weight=0.1)
    with pytest.raises(RuntimeError, match="is a DataParallel on 2 devices"):
        penalty(lambda: beside(model(x)).square().mean())


def test_synchronised_norm_is_harmless_in_one_process():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    x = torch.randn(4, 3)
    penalty = seht.HessianTrace(model, weight=0.1)
    penalty(lambda: model(x).square().mean()).backward()
    assert penalty.last.trace is not None
