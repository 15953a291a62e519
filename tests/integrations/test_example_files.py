"""Every example runs as printed, in a process and a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
NEEDS = {
    "plain.py": ["sklearn"],
    "lightning_trainer.py": ["sklearn", "lightning"],
    "fabric.py": ["sklearn", "lightning_fabric"],
    "accelerate_loop.py": ["sklearn", "accelerate"],
    "huggingface_trainer.py": ["transformers", "accelerate"],
    "tuned_weight.py": ["sklearn"],
    "lora_trainer.py": ["transformers", "accelerate", "peft"],
    "lora_loop.py": ["transformers", "peft"],
}


def test_every_file_is_run():
    assert {path.name for path in FOLDER.glob("*.py")} == NEEDS.keys()


# Their loops are those of the fast tests of Fabric, Accelerate and Hugging Face's trainer.
LONG = {"fabric.py", "accelerate_loop.py", "tuned_weight.py", "lora_trainer.py"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in NEEDS]
)
def test_runs(tmp_path, name):
    for package in NEEDS[name]:
        pytest.importorskip(package)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trace" in done.stdout
    assert done.stdout.endswith("resumed run identical: True\n")
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
