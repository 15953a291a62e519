"""What is known to go wrong: programs that the random tests leave out, and one example of each.

A row whose example comes out right is reported by ``test_expected_failures``, and has to go.
"""

from collections.abc import Callable
from typing import NamedTuple

from programs.spec import Part, Spec


class Row(NamedTuple):
    why: str
    covers: Callable[[Spec], bool]
    example: Spec


def follows(spec: Spec, first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    """Whether a node of the one kind comes after one of the other."""
    names = spec.nodes
    places = [i for i, name in enumerate(names) if name.startswith(first)]
    return any(name.startswith(second) for name in names[places[0] + 1 :]) if places else False


CHOOSING = ("pool:max", "pool:adaptive-max", "sort:")
FUSED = ("norm:batch", "norm:layer", "norm:instance")
SEQUENCE = (Part("linear"),)

EXPECTED: list[Row] = [
    Row(
        "two parameters on one storage",
        lambda spec: spec.share == "storage" and spec.engine == "difference",
        Spec("tokens", (Part("causal"), Part("causal")), share="storage", seed=253),
    ),
    Row(
        "ggn of a loss without curvature",
        lambda spec: spec.curvature == "ggn" and not spec.measure.curved,
        Spec("tokens", SEQUENCE, loss="l1", curvature="ggn", seed=20),
    ),
    Row(
        "ggn of a model that ends in a log-softmax",
        lambda spec: spec.curvature == "ggn" and spec.head == "log-softmax",
        Spec("sequence", SEQUENCE, head="log-softmax", curvature="ggn"),
    ),
    Row(
        "SEHT-S with a gradient inside the closure",
        lambda spec: spec.estimator == "seht-s" and spec.how.inner,
        Spec("sequence", SEQUENCE, closure="r1", estimator="seht-s", seed=257),
    ),
    Row(
        "SEHT-S where examples are mixed",
        lambda spec: spec.estimator == "seht-s"
        and (spec.mix != "none" or spec.loss.startswith("root-mse")),
        Spec(
            "image", (Part("conv", nodes=("pool:global-avg",)),), mix="matmul",
            estimator="seht-s", curvature="ggn", seed=213,
        ),
    ),
    Row(
        "random numbers behind a replayed choice",
        lambda spec: spec.engine == "difference" and follows(spec, CHOOSING, ("random:",)),
        Spec(
            "tokens", (Part("linear", nodes=("pool:max-pool-indices", "random:native-dropout")),),
            seed=646,
        ),
    ),
    Row(
        "random numbers behind a norm in the reference",
        lambda spec: spec.engine == "autograd" and follows(spec, ("norm:",), ("random:",)),
        Spec(
            "tokens", (Part("gru", 2, ("norm:layer", "random:alpha-dropout")),),
            engine="autograd", seed=56,
        ),
    ),
    Row(
        "ggn of a gradient in the weights through a fused norm",
        lambda spec: spec.curvature == "ggn" and spec.engine == "difference"
        and spec.closure == "gradient-norm"
        and any(name in FUSED for name in spec.nodes),
        Spec(
            "sequence", (Part("linear", nodes=("norm:batch",)),), closure="gradient-norm",
            loss="mse", curvature="ggn", seed=4985,
        ),
    ),
]  # fmt: skip


def expected(spec: Spec) -> bool:
    return any(row.covers(spec) for row in EXPECTED)


OPERATORS: dict[str, str] = {
    "sparse.mm": "a constant CSR tensor",
    **dict.fromkeys(["bfloat16", "half", "float", "cfloat", "chalf"], "a cast inside the closure"),
}
"""Operators of PyTorch's database, and why they are wrong."""
