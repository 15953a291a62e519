"""Random programs of images and sequences: right, or refused in words.

With memory formats, views, pools, sorts, dropout and activation checkpoints; closures that take
gradients inside, make leaves, mix examples, share storage; every loss, estimator, curvature, engine
and form (``programs/``). The truth is nested autograd on the same program in elementary operations.
100 of them in the fast run, 5,000 in the long one.
"""

import os
from collections import Counter

import pytest
from programs.draws import drawn, smallest
from programs.judge import Wrong, judge
from programs.spec import Part, Spec

EVERYTHING = os.environ.get("SEHT_TESTS") == "all"
PROGRAMS = 5_000 if EVERYTHING else 100
PARTS = 25 if EVERYTHING else 4  # so that several processes can share them
FIRST = int(os.environ.get("SEHT_PROGRAMS", "0"))
"""Where to begin: another number looks at other programs."""


def is_wrong(spec):
    try:
        judge(spec)
    except Wrong:
        return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_right_or_refused(part):
    ends = Counter()
    for number in range(FIRST + part, FIRST + PROGRAMS, PARTS):
        spec = drawn(number)
        try:
            ends[judge(spec).partition(":")[0]] += 1
        except Wrong as error:
            pytest.fail(f"program {number}: {error}\nor smaller: {smallest(spec, is_wrong)}")
    # Refusals and accidents of the generator prove nothing.
    assert ends["right"] > 0.65 * sum(ends.values())


SEQUENCE = (Part("linear"),)
ONCE_WRONG = {
    "hardswish under an inner gradient": Spec(
        parts=(Part("conv", nodes=("act:hardswish",)),), closure="other-input", loss="huber"
    ),
    "a recurrent layer in a checkpoint": Spec(
        "tokens", (Part("gru", recompute="new"),), estimator="seht-s", seed=283
    ),
    "a model that ends in a log-softmax": Spec(
        "sequence", SEQUENCE, head="log-softmax", curvature="ggn"
    ),
    "a gradient inside the closure, a probe per example": Spec(
        "sequence", SEQUENCE, closure="r1", estimator="seht-s", seed=257
    ),
    "random numbers behind a replayed choice": Spec(
        "tokens",
        (Part("linear", nodes=("pool:max-pool-indices", "random:native-dropout")),),
        seed=646,
    ),
    "random numbers behind a norm in the reference": Spec(
        "tokens",
        (Part("gru", 2, ("norm:layer", "random:alpha-dropout")),),
        engine="autograd",
        seed=56,
    ),
}
REFUSED = {
    "two parameters on one storage": Spec(
        "tokens", (Part("causal"), Part("causal")), share="storage", seed=253
    ),
    "a loss without curvature": Spec("tokens", SEQUENCE, loss="l1", curvature="ggn", seed=20),
    "examples mixed, a probe per example": Spec(
        "image",
        (Part("conv", nodes=("pool:global-avg",)),),
        mix="matmul",
        estimator="seht-s",
        curvature="ggn",
        seed=213,
    ),
    "the curvature of a gradient through a fused norm": Spec(
        "sequence",
        (Part("linear", nodes=("norm:batch",)),),
        closure="gradient-norm",
        loss="mse",
        curvature="ggn",
        seed=4985,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_programs_that_were_wrong(spec):
    assert judge(spec) == "right"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", REFUSED.values(), ids=REFUSED)
def test_programs_that_are_refused(spec):
    assert judge(spec).startswith("refused")
