"""The walk of one penalised step: files entered, sizes of the objects, time in plain steps.

    python benchmarks/walk.py            # files and objects
    python benchmarks/walk.py --time 20  # and the cost of small steps, 20 rounds in turns

A file counts when a function in it runs during a step. What the first steps do besides (the check
of the step size, the comparison of passes) is over by then. Times are
processor seconds of whole steps with SGD at learning rate 0, on one thread, each between two plain
ones, so that the ratios hold on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import seht
from seht.lab import models

SOURCE = Path(seht.__file__).parent
FORMS = {
    "hessian": {},
    "ggn": {"curvature": "ggn"},
    "seht-d": {"estimator": "seht-d", "prob": 0.05},
    "seht-s": {"estimator": "seht-s"},
}


def problem(kind: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A small network and its loss: the MLP of ``seht bench``, or the network of ``digits``."""
    torch.manual_seed(0)
    if kind == "mlp":
        model: nn.Module = models.MLP(28 * 28, 512, 512, 10)
        x, y = torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,))
    else:
        model = models.CNN(channels=1, classes=10, width=16, norm="none")
        x, y = torch.randn(50, 1, 8, 8), torch.randint(0, 10, (50,))
    return model, lambda: F.cross_entropy(model(x), y)


def files(form: str, kind: str = "digits") -> Counter[str]:
    """How many functions of each file run in one penalised step."""
    model, closure = problem(kind)
    penalty = seht.HessianTrace(model, weight=1e-3, seed=0, **FORMS[form])
    for _ in range(12):
        penalty(closure).backward()
    walks = []
    for _ in range(8):  # SEHT-D draws nothing on some
        found: Counter[str] = Counter()

        def look(frame, event, _, found=found):  # type: ignore[no-untyped-def]
            if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
                found[str(Path(frame.f_code.co_filename).relative_to(SOURCE))] += 1

        sys.setprofile(look)
        try:
            penalty(closure).backward()
        finally:
            sys.setprofile(None)
        walks.append(Counter({name: n for name, n in found.items() if "lab" not in name}))
    return max(walks, key=len)


def objects() -> Counter[str]:
    """The attributes of our objects that are alive during a step, the most of each class."""
    model, closure = problem("digits")
    penalty = seht.HessianTrace(model, weight=1e-3, seed=0)
    found: Counter[str] = Counter()

    def watched() -> torch.Tensor:
        if seht.replaying():
            for it in gc.get_objects():
                kind = type(it)
                if kind.__module__.startswith("seht") and hasattr(it, "__dict__"):
                    name = f"{kind.__module__}.{kind.__qualname__}"
                    found[name] = max(found[name], len(vars(it)))
        return closure()

    for _ in range(3):
        penalty(watched).backward()
    return found


def ratios(kind: str, rounds: int) -> dict[str, float]:
    """Penalised steps in plain ones: medians over rounds, in turns."""
    model, closure = problem(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    penalties = {
        f"{form}{'/lean' * lean}": (seht.HessianTrace(model, weight=1e-3, seed=0, **options), lean)
        for form, options in FORMS.items()
        for lean in (False, True)
        if not (lean and form.startswith("seht"))
    }

    def seconds(step: Callable[[], object], repeats: int) -> float:
        taken = []
        for _ in range(repeats):
            start = time.process_time()
            optimizer.zero_grad()
            step()
            optimizer.step()
            taken.append(time.process_time() - start)
        return statistics.median(taken)

    def plain() -> float:
        return seconds(lambda: closure().backward(), 11)

    steps = {
        name: (lambda p=p: p.backward(closure)) if lean else (lambda p=p: p(closure).backward())
        for name, (p, lean) in penalties.items()
    }
    for step in steps.values():
        seconds(step, 12)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        before = plain()
        for name, step in steps.items():
            own = seconds(step, 7)
            after = plain()
            found[name].append(2 * own / (before + after))
            before = after
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--names", action="store_true", help="list the files")
    arguments = parser.parse_args()
    for form in FORMS:
        entered = files(form)
        print(f"{form:8} {len(entered):3} files {sum(entered.values()):6} calls")
        if arguments.names:
            print("   " + "\n   ".join(f"{n} {count}" for n, count in sorted(entered.items())))
    for name, count in objects().most_common(6):
        print(f"{count:3} attributes  {name}")
    if arguments.time:
        torch.set_num_threads(1)
        for kind in ("mlp", "digits"):
            for name, value in ratios(kind, arguments.time).items():
                print(f"{kind:7} {name:13} {value:5.2f} plain steps")


if __name__ == "__main__":
    main()
