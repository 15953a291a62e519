"""Does a step on which SEHT-D draws no layer cost a plain step?

    python benchmarks/undrawn.py --pairs 20 --width 64 --batch 32 --threads 2

ResNet-18, forward, backward and optimiser step; plain and undrawn steps in turns, in one process,
each pair in the other order than the last, so that whatever else the machine does slows both
alike. The figure wanted is a ratio of the medians of at most 1.05. A second plain step in each
round shows what the ratio of two equal things is on this machine.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import seht
from seht.lab.models import resnet18

WANTED = 1.05


class Nothing(seht.SehtD):
    """SEHT-D on the steps that interest us: the layers are drawn, and it is none of them."""

    def layers(self, count, seed):
        super().layers(count, seed)
        return ()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    model = resnet18(width=options.width)
    x, y = torch.randn(options.batch, 3, 32, 32), torch.randint(10, (options.batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    penalty = seht.HessianTrace(model, weight=1e-3, estimator=Nothing(prob=0.05))

    def closure():
        return F.cross_entropy(model(x), y)

    def seconds(objective):
        start = time.perf_counter()
        optimizer.zero_grad()
        objective().backward()
        optimizer.step()
        return time.perf_counter() - start

    steps = {
        "plain": lambda: seconds(closure),
        "undrawn": lambda: seconds(lambda: penalty(closure)),
        "plain again": lambda: seconds(closure),
    }
    for step in steps.values():  # the first steps allocate
        step()
    times = {name: [] for name in steps}
    for i in range(options.pairs):
        for name in list(steps) if i % 2 else reversed(steps):
            times[name].append(steps[name]())
    assert penalty.last.trace is None, "a layer was drawn"

    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"ResNet-18, width {options.width}, batch {options.batch}, "
        f"{options.threads} threads, medians of {options.pairs}, torch {torch.__version__}"
    )
    for name, median in medians.items():
        print(f"  {name:<12}{1e3 * median:9.1f} ms   ratio {median / medians['plain']:.3f}")
    ratio = medians["undrawn"] / medians["plain"]
    print(f"an undrawn step costs {ratio:.3f} plain steps (wanted: at most {WANTED})")


if __name__ == "__main__":
    main()
