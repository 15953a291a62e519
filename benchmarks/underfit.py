"""What does the penalty cost where there is nothing to memorise?

    python benchmarks/underfit.py --seeds 6
    python benchmarks/underfit.py --seeds 10 --first-seed 300 --rows tuned --json underfit.json
    python benchmarks/underfit.py --seeds 7 --first-seed 400 --rows tuned --held-out 1000

A student learns from a teacher, every example new, 300 steps: it underfits, so that any penalty can
only harm. Test accuracy in %, the difference to a training without a penalty by seed.
"""

import argparse
import json
import statistics
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import seht

STEPS = 300
ROWS = {
    "tuned": {"weight": "tuned"},
    "tuned, gap=0": {"weight": seht.Tuning(gap=0.0)},
    "share 1": {"share": 1.0},
    "share 2": {"share": 2.0},
    "share 3": {"share": 3.0},
    "share 4": {"share": 4.0},
}
OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 3e-3),
}


USUAL = 200
"""Held-out examples."""


def accuracy(seed, make, options, held_out=USUAL):
    """After one training; and the tuned weight's first and last. The training examples are the same
    with any number of held-out ones.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(100 + seed)
    teacher = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 4))
    with torch.no_grad():
        for part in teacher.parameters():
            part.mul_(3)

    def draw(count, generator=generator):
        x = torch.randn(count, 10, generator=generator)
        return x, teacher(x).argmax(1)

    (x_test, y_test), (x_held, y_held) = draw(4000), draw(USUAL)
    if held_out != USUAL:
        x_held, y_held = draw(held_out, torch.Generator().manual_seed(10_000 + seed))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = make(model.parameters())
    penalty = seht.HessianTrace(
        model, curvature="ggn", every=2, warmup=0.1, total_steps=STEPS, seed=seed,
        optimizer=optimizer, **(options or {"weight": 0.0}),
    )  # fmt: skip
    more = {}
    if "weight" in (options or {}):
        more["held_out"] = lambda: F.cross_entropy(model(x_held), y_held)
    for _ in range(STEPS):
        x, y = draw(50)
        optimizer.zero_grad()
        penalty(lambda: F.cross_entropy(model(x), y), **more).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(x_test).argmax(1) == y_test).float().mean().item()
    weights = penalty.path.weights if penalty.path else [None]
    return 100 * right, [weights[0], weights[-1]]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--held-out", type=int, default=USUAL, help="how many examples")
    parser.add_argument("--json", type=Path, help="write the runs here, too")
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    warnings.simplefilter("ignore", seht.PenaltyWarning)
    runs = []

    def run(name, row, seed):
        found, weights = accuracy(seed, OPTIMIZERS[name], ROWS.get(row), given.held_out)
        runs.append(
            {"task": f"new examples only, {name}", "row": row, "seed": seed, "steps": STEPS,
             "measure": "accuracy", "value": found, "weights": weights}
        )  # fmt: skip
        return found

    for name in OPTIMIZERS:
        plain = {seed: run(name, "without", seed) for seed in seeds}
        print(f"{name}: without {statistics.mean(plain.values()):.1f}")
        for row in given.rows:
            off = [run(name, row, seed) - plain[seed] for seed in seeds]
            each = " ".join(f"{step:+.1f}" for step in off)
            print(f"  {row:14} {statistics.mean(off):+.1f}   ({each})", flush=True)
    if given.json:
        given.json.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
