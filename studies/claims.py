"""What of the paper's claims can be measured without a comparison: studies/claims.py

How large SEHT-D's partial trace is beside the trace, what share of the gradient each penalty is at
the paper's weight, and what the bound of section 3.2 says of a linear model.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from run import RECORDS, path_of
from torch import Tensor, nn

import seht
from seht.lab.methods.parse import parse
from seht.lab.recipes import override, recipe
from seht.lab.records import write
from seht.lab.training import Training, repeatable

SEEDS = (2000, 2001, 2002)
WEIGHT = 1e-3
"""The paper's for CIFAR-10."""
MOMENTS = {"after a tenth": 6, "in the middle": 30, "at the end": 60}
PROBES = 100
DRAWS = 4000


def shares(seed: int, probes: int = PROBES, draws: int = DRAWS) -> dict[str, Any]:
    """Of one plain training with right labels, at three moments, on one batch."""
    training = Training(
        override(recipe("digits-noisy"), {"data.noise": "0"}), parse("weight-decay"), seed
    )
    epochs, rate = training.recipe.epochs, training.recipe.optim.lr
    found = {}
    for moment, epoch in MOMENTS.items():
        while training.epoch < epoch:
            training.begin_epoch(rate * (1 + math.cos(math.pi * training.epoch / epochs)) / 2)
            for batch in training.data.train_batches(training.epoch):
                training.learn(batch)
            training.epoch, training.position = training.epoch + 1, 0
        batch = next(iter(training.data.train_batches(0)))
        found[moment] = _at(training.bare, batch.x, batch.y, probes, draws)
    return found


def _at(model: nn.Module, x: Tensor, y: Tensor, probes: int, draws: int) -> dict[str, float]:
    weights = [p for p in model.parameters() if p.ndim > 1]

    def closure() -> Tensor:
        return F.cross_entropy(model(x), y)

    own = _norm(torch.autograd.grad(closure(), weights))
    result = {"loss": closure().item(), "gradient": own}
    for name, options in {"tr(H)": {}, "tr(G)": {"curvature": "ggn"}}.items():
        trace = seht.hessian_trace(model, closure, probes=probes, seed=1, **options)
        gradient = torch.autograd.grad(trace, weights)
        result |= {name: trace.item(), f"share of {name}": WEIGHT * _norm(gradient) / own}
    for p in (0.01, 0.05):
        partial = [
            seht.hessian_trace(model, closure, estimator="seht-d", prob=p, seed=k).item()
            for k in range(draws)
        ]
        result[f"seht-d {p}"] = sum(partial) / draws
        # Its expectation is 2 p^2 times the trace, and so is its gradient's.
        result[f"share of seht-d {p}"] = 2 * p * p * result["share of tr(H)"]
    return result


def bound(seed: int, steps: int = 2000) -> dict[str, float]:
    """Section 3.2's for softmax regression, with B = 1, delta = 0.05 and constants of 1.

    mu and v are means over examples of the norm of the loss's gradient in the logits, and of the
    trace of its Hessian there, 1 - ||p||^2 (Wei, Kakade and Ma, arXiv 2002.12915).
    """
    data = Training(
        override(recipe("digits-noisy"), {"data.noise": "0"}), parse("weight-decay"), seed
    ).data
    (x, y), (x_test, y_test) = (_all(data.eval_batches(split)) for split in ("train", "test"))
    w = torch.zeros(x.shape[1], 10, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(x @ w, y).backward()
        optimizer.step()
    with torch.no_grad():
        p = (x @ w).softmax(1)
        mu = float((p - F.one_hot(y, 10)).norm(dim=1).mean())
        v = float((1 - p.square().sum(1)).mean())
        clipped = [
            float(F.cross_entropy(a @ w, b, reduction="none").clamp(max=1).mean())
            for a, b in ((x, y), (x_test, y_test))
        ]
        n, a = len(x), float(w.norm(dim=0).sum())  # ||W^T||_{2,1}: the sum over classes
        theta = math.log(10 * n) ** 3 * float(x.square().sum(1).max())
    terms = {
        "of mu": (a * mu) ** (2 / 3) * (theta / n) ** (1 / 3),
        "of v": a * math.sqrt(v * theta / n),
        "third": a * a * theta / (n * (math.log(a * a * theta / (v * n)) ** 2 + 1)),
        "zeta": (math.log(1 / 0.05) + math.log(math.log(n))) / n,
    }
    gap = clipped[1] - 1.01 * clipped[0]
    return {"mu": mu, "v": v, "A": a, "theta": theta, "gap": gap, "bound": sum(terms.values())} | {
        f"term {name}": value for name, value in terms.items()
    }


def _all(batches: Any) -> tuple[Tensor, Tensor]:
    every = [(batch.x.flatten(1), batch.y) for batch in batches]
    return torch.cat([x for x, _ in every]), torch.cat([y for _, y in every])


def _norm(gradient: Any) -> float:
    return float(torch.stack([g.double().norm() for g in gradient]).norm())


def main() -> None:
    """Measure and keep."""
    with repeatable(1):
        found = {
            "shares": {seed: shares(seed) for seed in SEEDS},
            "bound": {seed: bound(seed) for seed in SEEDS},
        }
    text = json.dumps(found, separators=(",", ":"))
    write(path_of("claims", RECORDS), lzma.compress(text.encode(), preset=9))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
