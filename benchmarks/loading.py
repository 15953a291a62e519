"""What data loading and augmentation cost beside a plain training step of ResNet-18.

    python benchmarks/loading.py --steps 12 --width 64 --batch 32 --threads 2

The paper's CIFAR-10 recipe: batches are drawn, cropped, flipped and normalised in memory. Batch and
step are timed in turns, in one process, so that whatever else the machine does slows both alike.
The figure wanted is a share of at most 0.10. Without SEHT_DATA the images are random ones
of the same size and number, which cost the same.
"""

import argparse
import os
import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F

from seht.lab.data import images
from seht.lab.data.examples import Examples, Labelled
from seht.lab.models import build
from seht.lab.recipes import recipe

WANTED = 0.10


def random_pictures():
    x = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8)
    y = torch.randint(10, (50_000,))
    return Labelled(x, y, x[:1], y[:1], 10, 255, *images.CIFAR_MOMENTS["cifar10"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    chosen = replace(recipe("cifar10"), batch=options.batch)
    chosen = replace(chosen, model=replace(chosen.model, width=options.width))
    if os.environ.get("SEHT_DATA"):
        what, pictures = "CIFAR-10", images.pictures("cifar10")
    else:  # nothing is fetched for a benchmark
        what, pictures = "random images", random_pictures()
    data = Examples(pictures, chosen, 0, "cpu")
    model = build(chosen.model, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loading, training = [], []
    batches = data.train_batches(0)  # the first batch draws the order of the epoch as well
    for _ in range(options.steps + 2):
        start = time.perf_counter()
        batch = next(batches)
        middle = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        loading.append(middle - start)
        training.append(time.perf_counter() - middle)
    first = loading[0] - statistics.median(loading[2:])  # the first steps allocate
    load = statistics.median(loading[2:]) + max(0.0, first) / data.steps_per_epoch
    step = statistics.median(training[2:])
    print(
        f"ResNet-18, width {options.width}, batch {options.batch}, {options.threads} threads, "
        f"{what}, medians of {options.steps}, torch {torch.__version__}\n"
        f"  a batch {1e3 * load:8.2f} ms (an epoch's order included, {1e3 * first:.1f} ms once)\n"
        f"  a step  {1e3 * step:8.2f} ms\n"
        f"data takes {load / step:.4f} of a plain step (wanted: at most {WANTED})"
    )


if __name__ == "__main__":
    main()
