"""How much less does a probe for every example vary, on real images?

    python benchmarks/variance.py --width 8 --epochs 2 --draws 150 --threads 2

A network after two epochs of CIFAR-10 (looked for in SEHT_DATA and the cache), one batch of 128
images: ResNet-18 with GroupNorm, or, with --model conv, three convolutions and a linear layer. The
variance is that of the penalty's gradient over its probes, relative to its squared mean; the time
that of a step, in turns with plain ones. What counts is the product of the two: a fifth of the
variance at twice the time is worth 2.5 probes. Wanted of SEHT-S: at most a fifth of SEHT-H's.
"""

import argparse
import warnings

import torch
from measuring.problems import Size, criterion
from torch import nn

from seht.errors import PenaltyWarning
from seht.lab.bench.accuracy import draw_moments
from seht.lab.bench.cases import Problem
from seht.lab.bench.rows import table
from seht.lab.bench.timing import time_rows
from seht.lab.data.images import pictures
from seht.lab.models import resnet18

WANTED = 5.0
TRAIN = Size(0, 0, 0).batch
ROWS = ("hessian/scalar", "hessian/s", "ggn/scalar", "ggn/s")


def convolutions(width):
    """Three convolutions without any norm, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


MODELS = {
    "resnet18": ("ResNet-18 with GroupNorm", lambda width: resnet18(width=width, norm="group")),
    "conv": ("three convolutions and a linear layer", convolutions),
}


def trained(make, width, epochs, batch):
    """The network after some epochs of Adam, in batches of 128, on one more batch."""
    torch.manual_seed(0)
    data = pictures("cifar10", None)
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (data.mean, data.std))
    model = make(width).train()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def batches(size):
        for part in torch.randperm(len(data.x)).split(size):
            yield (data.x[part].float() / data.white - mean) / std, data.y[part]

    for _ in range(epochs):
        for x, y in batches(TRAIN):
            adam.zero_grad()
            criterion(model(x), y).backward()
            adam.step()
    model.zero_grad()
    return Problem(model, *next(batches(batch)), axis=0)


def failed(key, error):
    raise error


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=TRAIN)
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", PenaltyWarning)  # of weights that no training would use

    title, make = MODELS[options.model]
    problem = trained(make, options.width, options.epochs, options.batch)
    rows = {row.key: row for row in table() if row.key in ROWS}
    times, _ = time_rows(
        problem,
        {key: row.runner(problem) for key, row in rows.items()},
        slow=set(),
        rounds=options.rounds,
        slow_rounds=0,
        budget=1e9,
        failed=failed,
    )
    print(
        f"{title}, width {options.width}, CIFAR-10, {options.epochs} epochs "
        f"(loss {problem.closure().item():.2f}), batch {options.batch}, {options.draws} draws, "
        f"{options.threads} threads, torch {torch.__version__}\n"
    )
    print("| | | time | variance | variance x time |\n| --- | --- | --- | --- | --- |")
    products = {}
    for key, row in rows.items():
        found = draw_moments(row, problem, options.draws, seconds=1e9)[0].relative_variance()
        assert found is not None, f"{key}: the mean is not to be seen in {options.draws} draws"
        products[key] = found.value * times[key].ratio
        trace = "tr(H)" if row.curvature == "hessian" else "tr(G)"
        print(
            f"| {row.label} | {trace} | {times[key].ratio:.2f} | {found.value:.2f} +- "
            f"{found.error:.2f} | {products[key]:.2f} |",
            flush=True,
        )
    print()
    for curvature, trace in (("hessian", "tr(H)"), ("ggn", "tr(G)")):
        gain = products[f"{curvature}/scalar"] / products[f"{curvature}/s"]
        print(f"- {trace}: at equal time SEHT-S varies {gain:.1f} times less (wanted: {WANTED:g})")


if __name__ == "__main__":
    main()
