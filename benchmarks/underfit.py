"""What does the penalty cost where there is nothing to memorise?

    python benchmarks/underfit.py --seeds 6

A student learns from a teacher, every example new, 300 steps: it underfits, so that any penalty can
only harm. Test accuracy in %, the difference to a training without a penalty by seed.
"""

import argparse
import statistics
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import seht

STEPS = 300
ROWS = {
    "tuned": {"weight": "tuned"},
    "tuned, gentle": {"weight": seht.Tuning(start=0.3, home=0.3, most=1.0)},
    "share 1": {"share": 1.0},
    "share 4": {"share": 4.0},
}
OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 3e-3),
}


def accuracy(seed, make, options):
    """After one training."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(100 + seed)
    teacher = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 4))
    with torch.no_grad():
        for part in teacher.parameters():
            part.mul_(3)

    def draw(count):
        x = torch.randn(count, 10, generator=generator)
        return x, teacher(x).argmax(1)

    (x_test, y_test), (x_held, y_held) = draw(4000), draw(200)
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
        return 100 * (model(x_test).argmax(1) == y_test).float().mean().item()


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    seeds = range(parser.parse_args().seeds)
    warnings.simplefilter("ignore", seht.PenaltyWarning)
    for name, make in OPTIMIZERS.items():
        plain = [accuracy(seed, make, None) for seed in seeds]
        print(f"{name}: without {statistics.mean(plain):.1f}")
        for row, options in ROWS.items():
            off = [accuracy(seed, make, options) - plain[seed] for seed in seeds]
            each = " ".join(f"{step:+.1f}" for step in off)
            print(f"  {row:14} {statistics.mean(off):+.1f}   ({each})", flush=True)


if __name__ == "__main__":
    main()
