"""What does a tuned weight cost on top of a fixed one?

    python benchmarks/tuning.py --width 16 --batch 64 --rounds 8

On the bench's ResNet-18: a plain step, a penalised step, and one that also looks at held-out data
(a batch of the same size), in turns; their ratios' medians. The looks come each eighth step of a
long training (`seht.Tuning`), so that an eighth of what a look adds is the cost of tuning. Wanted:
at most 0.3 plain steps.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import seht
from seht.lab.models import resnet18

WANTED = 0.3


def step(model, run):
    """Seconds of the processor for one step, its gradient included; other programs do not count."""
    model.zero_grad()
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(width, batch, rounds, curvature, form):
    """The median ratios to a plain step of a penalised one and of one with a look."""
    torch.manual_seed(0)
    model = resnet18(width=width)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    other, label = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def closure():
        return F.cross_entropy(model(x), y)

    def held_out():
        return F.cross_entropy(model(other), label)

    def penalised(penalty, **more):
        if form == "lean":
            return lambda: penalty.backward(closure, **more)
        return lambda: penalty(closure, **more).backward()

    fixed = seht.HessianTrace(model, weight=1e-6, curvature=curvature)
    tuned = seht.HessianTrace(
        model, weight=seht.Tuning(interval=1), curvature=curvature, total_steps=10**6
    )
    ways = [
        lambda: closure().backward(),
        penalised(fixed),
        penalised(tuned, held_out=held_out),
    ]
    for _ in range(10):  # the share is measured, the step size found
        for way in ways[1:]:
            step(model, way)
    found = []
    for _ in range(rounds):
        plain, *others = (step(model, way) for way in ways)
        found.append([other / plain for other in others])
    return [statistics.median(column) for column in zip(*found, strict=True)]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--curvature", nargs="+", default=["ggn", "hessian"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    apart = seht.Tuning().spacing(10**6, 1)
    print(f"{'':18}{'penalised':>10}{'with a look':>12}{'tuning, on average':>20}")
    for curvature in options.curvature:
        for form in ("scalar", "lean"):
            fixed, look = measure(options.width, options.batch, options.rounds, curvature, form)
            cost = (look - fixed) / apart
            print(f"{curvature + ', ' + form:18}{fixed:10.2f}{look:12.2f}{cost:20.2f}", flush=True)
    print(f"in plain steps; wanted of tuning: at most {WANTED}")


if __name__ == "__main__":
    main()
