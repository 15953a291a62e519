"""A tuned training that goes on in another process, twice, ends as if it had never stopped."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import same

import seht

SCRIPT = Path(__file__).parent / "resumed_run.py"


@pytest.mark.slow
def test_to_the_last_bit(tmp_path):
    """While the share is measured, and in the middle of a round of held-out batches."""
    environment = {**os.environ, "PYTHONPATH": str(Path(seht.__file__).parents[1])}
    for name, stops in (("whole", [0, 48]), ("parts", [0, 6, 30, 48])):
        for first, last in itertools.pairwise(stops):
            command = [sys.executable, str(SCRIPT), str(first), str(last), str(tmp_path / name)]
            subprocess.run(command, env=environment, check=True, timeout=100)
    whole, parts = (torch.load(tmp_path / name) for name in ("whole", "parts"))
    points = whole["penalty"]["strength"]["points"]
    assert len({weight for _, weight in points}) > 2
    assert all(same(whole[name], parts[name]) for name in whole)
