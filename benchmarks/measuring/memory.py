"""Peak memory of the measurement over that of plain evaluation, each in a process of its own.

python -m measuring.memory resnet18 trace 128 2
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from measuring.problems import Sentences, loss_fn
from seht import measure
from seht.lab.bench.memory import RETURN_AT_ONCE, Peak
from seht.lab.models import GPT, resnet18


def ratio(name: str, batch: int, threads: int) -> float:
    """Peak above the start, as a multiple of plain evaluation's."""
    plain, trace = (_child(name, what, batch, threads) for what in ("plain", "trace"))
    return trace / plain


def _child(name: str, what: str, batch: int, threads: int) -> float:
    command = [sys.executable, "-m", "measuring.memory", name, what, str(batch), str(threads)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, **RETURN_AT_ONCE, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"measuring memory failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def main(name: str, what: str, batch: int, threads: int) -> None:
    """Memory does not depend on training: random weights and random data of the same shape."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name == "resnet18":
        model: torch.nn.Module = resnet18(width=16)
        x, y = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
    else:
        model = Sentences(GPT(vocabulary=1000, context=32, width=64, layers=2, heads=4))
        x = torch.randint(1000, (batch, 32))
        y = x.roll(1, 1)
    model.eval()
    run = _plain(model, (x, y)) if what == "plain" else _trace(model, (x, y))
    small = (x[:2], y[:2])
    (_plain(model, small) if what == "plain" else _trace(model, small))()  # loads code, not data
    peak = Peak()
    run()
    print(peak.mib())


def _plain(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            for _ in range(2):
                loss_fn(model, batch)

    return run


def _trace(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        measure.trace(model, loss_fn, [batch, batch])

    return run


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
