"""The command in a process that does not find some packages, as where they are not installed."""

import os
import subprocess
import sys
from pathlib import Path

import seht

SOURCE = str(Path(seht.__file__).parents[1])
# `site` imports it at the start of Python; -S and -I would leave it out.
HOOK = """
from importlib.machinery import PathFinder

names, find_spec = set({names!r}), PathFinder.find_spec

def find(name, path=None, target=None):
    return None if name.partition(".")[0] in names else find_spec(name, path, target)

PathFinder.find_spec = find
"""


def run(arguments, without, cwd, start=("-m", "seht")):
    """What ``seht`` does there, or another start of Python: a finished process."""
    hook = Path(cwd).parent / f"{Path(cwd).name}-hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK.format(names=sorted(without)))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(hook), SOURCE]),
        "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",  # torch's, where it finds none
    }
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
