"""How a step's cost grows with parameters, batch, probes and processes.

    python benchmarks/growth.py --rounds 7 --threads 1 --what parameters batch probes processes

ResNet-18 on images of CIFAR's size; forward, backward and optimiser step. Plain and penalised steps
are taken in turns in one process, each round in the other order than the last; medians. With two
processes (DDP, gloo) each has half of the batch and as many threads as before, so that on two cores
nothing but the communication is shared. The table is Markdown; docs/large-end.md has one.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import seht
from seht.lab.models import resnet18

CASES = (
    *({"what": "parameters", "width": width} for width in (8, 16, 32)),
    *({"what": "batch", "batch": batch} for batch in (16, 64)),
    *({"what": "probes", "probes": probes} for probes in (2, 5)),
    {"what": "processes", "batch": 64, "ranks": 2},
)
KINDS = {"SEHT-H": {}, "ggn": {"curvature": "ggn"}}


def steps(width, batch, probes, wrap):
    """A model, and the seconds of each kind of step on it."""
    torch.manual_seed(0)
    model = wrap(resnet18(width=width))
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def closure():
        return F.cross_entropy(model(x), y)

    def seconds(objective):
        start = time.perf_counter()
        optimizer.zero_grad()
        objective().backward()
        optimizer.step()
        return time.perf_counter() - start

    kinds = {"plain": lambda: seconds(closure)}
    for name, options in KINDS.items():
        penalty = seht.HessianTrace(
            model, weight=1e-6, estimator=seht.SehtH(probes=probes), **options
        )
        kinds[name] = lambda penalty=penalty: seconds(lambda: penalty(closure))
    return sum(p.numel() for p in model.parameters()), kinds


def measure(rounds, width=16, batch=32, probes=1, wrap=lambda model: model):
    """Parameters, and each kind's median seconds."""
    count, kinds = steps(width, batch, probes, wrap)
    for _ in range(3):  # the first steps allocate, and choose the engine's step
        for step in kinds.values():
            step()
    times = {name: [] for name in kinds}
    for i in range(rounds):
        for name in list(kinds) if i % 2 else reversed(kinds):
            times[name].append(kinds[name]())
    return count, {name: statistics.median(found) for name, found in times.items()}


def one_of(rank, ranks, threads, rounds, batch, meet, file):
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    found = measure(rounds, batch=batch // ranks, wrap=DistributedDataParallel)
    if rank == 0:
        torch.save(found, file)
    dist.barrier()
    dist.destroy_process_group()


def together(ranks, threads, rounds, batch):
    """The same in several processes, as the first one sees it."""
    with tempfile.TemporaryDirectory() as directory:
        meet, file = os.path.join(directory, "meet"), os.path.join(directory, "found")
        torch.multiprocessing.spawn(
            one_of, (ranks, threads, rounds, batch, meet, file), nprocs=ranks
        )
        return torch.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    kinds = list(dict.fromkeys(case["what"] for case in CASES))
    parser.add_argument("--what", nargs="*", choices=kinds, default=kinds)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"ResNet-18, {options.threads} thread(s) a process, medians of {options.rounds}, "
        f"torch {torch.__version__}\n"
    )
    heads = ["changed", "parameters", "batch", "probes", "processes", "plain, ms"]
    heads += [word for name in KINDS for word in (f"{name}, ms", f"{name} / plain")]
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    for case in (case for case in CASES if case["what"] in options.what):
        sizes = {name: value for name, value in case.items() if name not in ("what", "ranks")}
        ranks, batch = case.get("ranks", 1), case.get("batch", 32)
        if ranks == 1:
            count, times = measure(options.rounds, **sizes)
        else:
            count, times = together(ranks, options.threads, options.rounds, batch)
        cells = [case["what"], f"{count:,}", batch, case.get("probes", 1), ranks]
        cells.append(f"{1e3 * times['plain']:.1f}")
        for name in KINDS:
            cells += [f"{1e3 * times[name]:.1f}", f"{times[name] / times['plain']:.2f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
