"""A tuned weight's bound is lifted where the held-out loss rises and the training loss falls."""

import pytest

from seht.strength.lift import Lift


def after(train, held_out, looks=150):
    found = [Lift()]
    for k in range(looks):
        found.append(found[-1].after(k + 1, train(k), held_out(k)))
    return found


FALLING = lambda k: 2.3 - k / 100


@pytest.mark.parametrize(
    ("train", "held_out", "lifted"),
    [
        (FALLING, lambda k: 2.3, False),
        (FALLING, FALLING, False),
        (FALLING, lambda k: 2.3 * (1.04 if k > 50 else 1), False),
        (FALLING, lambda k: 2.3 * (1.1 if k > 50 else 1), True),
        (lambda k: -1 - k / 100, lambda k: -1.0 * (0.9 if k > 50 else 1), True),
        (lambda k: 2.3 + k / 100, lambda k: 2.3 + k / 100, False),  # a penalty that is too strong
        (FALLING, lambda k: 5.0 if k < 50 else 2.3, False),
    ],
)
def test_memorising_lifts_it(train, held_out, lifted):
    found = after(train, held_out)
    assert found[-1].lifted is lifted and not found[-1].failed
    assert not any(lift.lifted for lift in found[:10])
    assert Lift(**found[-1].state()) == found[-1]


def test_it_is_kept_where_it_helps():
    """The training loss is higher then, and the held-out loss lower."""
    found = after(
        lambda k: FALLING(k) if k < 80 else 2.0, lambda k: 2.3 if k < 60 or k > 90 else 2.5
    )
    assert found[80].lifted and not found[-1].lifted and not found[-1].failed


def test_it_is_taken_back_for_good_where_it_does_harm():
    found = after(
        lambda k: FALLING(k) if k < 80 or k > 120 else 3.0,
        lambda k: 2.3 if k < 60 else 2.5 + k / 50,
    )
    assert found[80].lifted and found[100].failed
    assert found[-1].failed and not found[-1].lifted
