"""`penalty.backward` on models sharded by `fully_shard`: real processes, started with torchrun."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch with gloo"
)


def run(folder, checks, processes=2, device="cpu"):
    """One launch for all checks; every rank must have passed every one of them."""
    out = folder / "results"
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ, "FSDP_RESULTS": str(out), "FSDP_DEVICE": device, "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(processes), str(HERE / "fsdp_checks.py"), *checks]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    for rank in range(processes):
        file = out.with_name(f"{out.name}.{rank}")
        results = json.loads(file.read_text()) if file.exists() else {}
        for name in checks:
            result = results.get(name, "never came to an end")
            if result.startswith(("FAILED", "never")):
                pytest.fail(f"rank {rank}, {name}: {result}\n{done.stderr[-3000:]}", pytrace=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.supports("FSDP2 (`fully_shard`) with `penalty.backward`", engine="difference")
def test_fsdp(tmp_path):
    checks = ["trajectory:relu-transformer:float64:True", "trajectory:relu:float32:False"]
    checks += ["trajectory:relu:float64:True:d", "trajectory:smooth:float64:True:ggn"]
    checks += ["forms", "policies", "accumulation", "nonfinite", "failures:hessian:True", "seeds"]
    checks += ["hooks", "tuned:relu:hessian:sgd", "tuned:relu:ggn:adamw", "measured:ggn"]
    run(tmp_path, checks)


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["hessian", "ggn", "two", "d"])
def test_every_trajectory(tmp_path, curvature):
    kinds = ("smooth", "relu", "transformer", "relu-transformer")
    parts = product(kinds, ("float64", "float32"), ("True", "False"))
    run(tmp_path, [f"trajectory:{':'.join(part)}:{curvature}" for part in parts])


@pytest.mark.slow
def test_every_option(tmp_path):
    words = ["probes", "gaussian", "limit", "skip", "every", "all", "ggn:probes", "ggn:limit"]
    words += ["ggn:skip", "d:probes:skip:limit"]
    run(tmp_path, [f"trajectory:relu:float64:True:{word}" for word in words])


@pytest.mark.slow
def test_every_tuned_weight(tmp_path):
    parts = product(("smooth", "relu-transformer"), ("hessian", "ggn"), ("sgd", "adamw"))
    run(tmp_path, [*(f"tuned:{':'.join(part)}" for part in parts), "measured:hessian"])


@pytest.mark.slow
def test_gradients_and_failures(tmp_path):
    checks = ["accumulation", "settings", "scaler", "clipped", "seeds", "trace_not_finite"]
    parts = product(("hessian", "ggn"), ("True", "False"))
    checks += [f"failures:{':'.join(part)}:fallback" for part in parts]
    run(tmp_path, checks)


@pytest.mark.slow
def test_models(tmp_path):
    checks = ["tied", "frozen", "experts", "sums", "extras"]
    checks += ["buffers", "checkpointed", "columns", "twice", "other_parallelism", "strangers"]
    run(tmp_path, checks)


@pytest.mark.slow
def test_compiled(tmp_path):
    run(tmp_path, ["compiled"])


@pytest.mark.slow
def test_partly_sharded(tmp_path):
    checks = ["partly:hessian", "partly:ggn"]
    run(tmp_path, checks)


@pytest.mark.slow
def test_replicated_shards(tmp_path):
    run(tmp_path, ["replicated"], processes=4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_two_devices(tmp_path):
    checks = ["trajectory:relu-transformer:float64:True", "trajectory:relu:float32:False:ggn"]
    run(tmp_path, [*checks, "accumulation", "settings", "nonfinite"], device="cuda")
