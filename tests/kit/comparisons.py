"""Comparison directories as `seht compare` writes them, with made-up figures, for the report."""

import csv
import json
import math
import random
from pathlib import Path

METHODS = [
    "weight-decay",
    "label-smoothing",
    "mixup",
    "sam",
    "seht-h(curvature=ggn,weight=0.001)",
    "seht-d(probes=10,prob=0.05)+label-smoothing",
]
VERSIONS = {"seht": "0.1.0", "torch": "2.13.0", "python": "3.12.1"}


def recipe(name="digits", data="digits", epochs=12, paper=None, settings=None):
    return {
        "name": name,
        "data": {"name": data, "size": 300, "validation": 100, "crop": 0, "flip": False},
        "model": {"name": "cnn", "width": 16, "norm": "batch"},
        "optim": {"lr": 0.05, "momentum": 0.9, "schedule": "cosine", "milestones": []},
        "batch": 50,
        "epochs": epochs,
        "threads": 1,
        "settings": settings or {},
        "paper": paper,
    }


def write_json(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2))


def folder(top, method, seed):
    slug = "".join(c if c.isalnum() or c in "-." else "_" for c in method)
    return Path(top) / "runs" / slug / f"seed-{seed}"


def result(method, seed, *, text=False, gain=0.0, epochs=12, **more):
    """A finished run; `gain` is what the method adds to every seed's figure."""
    luck = random.Random(seed).gauss(0, 0.4) + random.Random(f"{method}{seed}").gauss(0, 0.2)
    if text:
        ppl = 98 - gain + luck
        last = {"test_perplexity": ppl + 1, "test_loss": math.log(ppl + 1)}
        last |= {"valid_perplexity": ppl + 5, "valid_loss": math.log(ppl + 5)}
        best = {"test_perplexity": ppl, "valid_perplexity": ppl + 4, "epoch": epochs - 2}
    else:
        last = {"test_top1": 95 + gain + luck, "test_top5": 99.2, "test_loss": 0.2 - gain / 50}
        last |= {"valid_top1": 94 + gain + luck, "valid_top5": 99.0, "valid_loss": 0.25}
        best = {**last, "test_top1": 95.1 + gain + luck, "epoch": epochs - 1}
    return {
        "status": "done",
        "reason": None,
        "method": method,
        "seed": seed,
        "epochs": epochs,
        "steps": 20 * epochs,
        "seconds": 41.5 + seed,
        "metrics": {"last": last, "best": best},
        "trace": {"estimate": 120 - 20 * gain + luck, "stderr": 2.5, "probes": 100},
        "weight_norm": 21.4 + luck,
        "train_loss": 0.02 + 0.001 * seed,
        **more,
    }


def failed(top, method, seed, reason):
    """Make a run one that has failed."""
    content = {**result(method, seed), "status": "failed", "reason": reason, "metrics": {}}
    write_json(folder(top, method, seed) / "result.json", content)


def metrics(file, *, text=False, epochs=12, gain=0.0, pace=3.0, seed=0):
    """A run's epochs."""
    last = ["valid_perplexity"] if text else ["valid_top1", "valid_top5"]
    names = [
        "epoch",
        "step",
        "seconds",
        "lr",
        "train_loss",
        "valid_loss",
        *last,
        "trace",
        "penalty",
    ]
    luck = random.Random(f"{gain}{seed}")
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        for epoch in range(1, epochs + 1):
            done = 1 - math.exp(-3.5 * epoch / epochs)
            loss = (6.5 - 2.2 * done if text else 2.3 * math.exp(-5 * done)) * luck.uniform(
                0.95, 1.05
            )
            top1 = 15 + (80 + gain) * done + luck.gauss(0, 0.4)
            quality = [math.exp(loss)] if text else [top1, 100 - (100 - top1) / 6]
            row = [
                epoch,
                20 * epoch,
                round(pace * epoch, 2),
                0.05,
                loss,
                loss + 0.1,
                *quality,
                "",
                "",
            ]
            writer.writerow(row)


def comparison(top, methods=None, *, seeds=3, text=False, about=None, costs=True, more=None):
    """A complete comparison in `top`."""
    methods = methods or METHODS
    top = Path(top)
    about = about or recipe(**({"name": "pydocs", "data": "pydocs"} if text else {}))
    asked = {"recipe": about, "methods": methods, "seeds": list(range(seeds)), "version": "0.1.0"}
    write_json(top / "comparison.json", asked)
    if costs:
        cost = {
            m: {"ratio": 1 + 0.45 * i, "low": 0.97 + 0.45 * i, "high": 1.04 + 0.45 * i}
            for i, m in enumerate(methods)
        }
        write_json(top / "cost.json", cost)
    for number, method in enumerate(methods):
        for seed in range(seeds):
            where = folder(top, method, seed)
            config = {"recipe": about, "method": method, "seed": seed, "versions": VERSIONS}
            write_json(where / "config.json", config)
            gain = 0.35 * (number % 7)
            metrics(where / "metrics.csv", text=text, gain=gain, pace=2 + 0.6 * number, seed=seed)
            write_json(
                where / "result.json", result(method, seed, text=text, gain=gain, **(more or {}))
            )
    return top
