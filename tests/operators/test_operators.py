"""Every operator of PyTorch's own test database: right, or refused in words.

One sample of each in the fast run, six in the long one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="PyTorch's database of operators imports it")

EVERYTHING = os.environ.get("SEHT_TESTS") == "all"
SAMPLES = 6 if EVERYTHING else 1
PARTS = 4 if EVERYTHING else 1
TESTS = Path(__file__).parents[1] / "kit"
CASTS = {"bfloat16", "half", "float", "cfloat", "chalf"}
"""Casts to fewer digits than the truth has: ``test_casts.py`` judges them by what they have."""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator(part):
    command = [sys.executable, "-m", "programs.opinfo", str(SAMPLES), str(part), str(PARTS)]
    paths = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        command, cwd=TESTS, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"].keys() <= CASTS
    ends = found["ends"]
    assert ends["right"] > 0.85 * (sum(ends.values()) - ends.get("unusable", 0))
