"""A step that is broken off at any moment leaves everything bit for bit as it was.

Failures at the k-th operation and Ctrl-C at the k-th line of Python; a few k in the fast tests,
every fifth operation and every 499th line in the slow ones.
"""

import contextlib
import random

import pytest
from injections import Interrupts, Operations, Problem, broken_off, moments

CASES = {
    "autograd-lean": ("autograd", "lean", {}),
    "autograd-scalar": ("autograd", "scalar", {}),
    "autograd-ggn": ("autograd", "lean", {"curvature": "ggn"}),
    "autograd-checkpoints": ("autograd", "lean", {"model": "checkpoints"}),
    "autograd-noise": ("autograd", "lean", {"model": "noise"}),
    "autograd-limit": ("autograd", "lean", {"limit": 0.1, "on_nonfinite": "skip"}),
    "lean": ("difference", "lean", {}),
    "lean-first": ("difference", "lean", {"warm": False, "hook": True}),
    "lean-skip": ("difference", "lean", {"on_nonfinite": "skip"}),
    "lean-s": ("difference", "lean", {"estimator": "seht-s", "coupling": "own"}),
    "lean-s-frozen": ("difference", "lean", {"estimator": "seht-s", "coupling": "frozen"}),
    "lean-d": ("difference", "lean", {"estimator": "seht-d", "layer_prob": 0.9}),
    "lean-ggn": ("difference", "lean", {"curvature": "ggn"}),
    "lean-checkpoints": ("difference", "lean", {"model": "checkpoints"}),
    "lean-reentrant": ("difference", "lean", {"model": "reentrant"}),
    "lean-noise": ("difference", "lean", {"model": "noise"}),
    "scalar": ("difference", "scalar", {}),
    "scalar-checkpoints": ("difference", "scalar", {"model": "checkpoints", "warm": False}),
    "scalar-ggn": ("difference", "scalar", {"curvature": "ggn", "warm": False}),
    "scalar-s": ("difference", "scalar", {"estimator": "seht-s", "coupling": "own"}),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"  # Ctrl-C in the callback of a weak reference
)
every_case = pytest.mark.parametrize("name", CASES)
KINDS = {"operation": Operations, "interrupt": Interrupts}
every_kind = pytest.mark.parametrize("kind", KINDS)


def settings(name):
    engine, form, options = CASES[name]
    return {"engine": engine, "form": form, **options}


@every_case
@every_kind
def test_a_few_moments(kind, name):
    """Spread over the step; of the end, where it is handed out and noted, some more."""
    kind, given = KINDS[kind], settings(name)
    count, done = moments(kind, given)
    draw = random.Random(name)
    chosen = [draw.randrange(1, count) for _ in range(3)]
    chosen += [count - draw.randrange(1, count // 30) for _ in range(2)]
    assert sum(broken_off(kind, moment, given, done) for moment in chosen) >= 4


@pytest.mark.slow
@every_case
@every_kind
def test_many_moments(kind, name):
    kind, given = KINDS[kind], settings(name)
    count, done = moments(kind, given)
    step = 5 if kind is Operations else 499
    tried = range(1, count + 1, step)
    assert sum(broken_off(kind, moment, given, done) for moment in tried) > 0.9 * len(tried)


def users_backward(moment, given):
    """Ctrl-C in the user's own backward pass: how many moments it has, and what is left of it."""
    problem, keyboard = Problem(**given), Interrupts(moment)
    total = problem.penalty(problem.closure)
    before = problem.everything()
    with contextlib.suppress(KeyboardInterrupt), keyboard:
        total.backward()
    after = problem.everything()
    after.snapshot.gradient = before.snapshot.gradient  # half written, as after any backward
    assert after.differs(before) is None, (moment, keyboard.where)
    problem.model.zero_grad()
    problem.step()
    return keyboard.count


@pytest.mark.parametrize("name", ["autograd-checkpoints", "scalar-checkpoints"])
def test_ctrl_c_in_the_users_own_backward(name):
    """What a checkpoint computes again is ours: no module keeps what was lent to it."""
    given = settings(name) | {"form": "scalar", "warm": True}
    count, draw = min(users_backward(None, given) for _ in range(2)), random.Random(name)
    for moment in sorted(draw.randrange(1, count) for _ in range(40)):
        users_backward(moment, given)
