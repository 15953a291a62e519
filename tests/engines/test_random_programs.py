"""Random programs of images and sequences: right, or refused in words.

With memory formats, views, pools, sorts, dropout and activation checkpoints; closures that take
gradients inside, make leaves, mix examples, share storage; every loss, estimator, curvature, engine
and form (``programs/``). The truth is nested autograd on the same program in elementary operations.
100 of them in the fast run, 5,000 in the long one.
"""

import os
from collections import Counter
from itertools import count, islice

import pytest
from programs.draws import drawn, smallest
from programs.expected import EXPECTED, expected
from programs.judge import Wrong, judge
from programs.spec import Part, Spec

EVERYTHING = os.environ.get("SEHT_TESTS") == "all"
PROGRAMS = 5_000 if EVERYTHING else 100
PARTS = 25 if EVERYTHING else 4  # so that several processes can share them
FIRST = int(os.environ.get("SEHT_PROGRAMS", "0"))
"""Where to begin: another number looks at other programs."""


def numbered(part):
    """(number, program), without those that are known to go wrong."""
    every = ((n, drawn(n)) for n in count(FIRST + part, PARTS))
    return islice((pair for pair in every if not expected(pair[1])), PROGRAMS // PARTS)


def is_wrong(spec):
    try:
        judge(spec)
    except Wrong:
        return not expected(spec)
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_right_or_refused(part):
    ends = Counter()
    for number, spec in numbered(part):
        try:
            ends[judge(spec).partition(":")[0]] += 1
        except Wrong as error:
            pytest.fail(f"program {number}: {error}\nor smaller: {smallest(spec, is_wrong)}")
    # Refusals and accidents of the generator prove nothing.
    assert ends["right"] > 0.65 * sum(ends.values())


ONCE_WRONG = {
    "hardswish under an inner gradient": Spec(
        parts=(Part("conv", nodes=("act:hardswish",)),), closure="other-input", loss="huber"
    ),
    "a recurrent layer in a checkpoint": Spec(
        "tokens", (Part("gru", recompute="new"),), estimator="seht-s", seed=283
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_programs_that_were_wrong(spec):
    assert judge(spec) == "right"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.why, marks=pytest.mark.xfail(raises=Wrong, strict=True))
        for row in EXPECTED
    ],
)
def test_expected_failures(row):
    """One that passes is mended: take it out of the table."""
    assert expected(row.example)
    judge(row.example)
