"""Ctrl-C at any moment of a step: it is delivered, and the model is never damaged."""

import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
from stepping import FORMS, WEIGHT, entropy, mlp, rows, warm_up
from torch import nn

import seht

CASES = [(form, curvature) for form in FORMS for curvature in ("hessian", "ggn")]


class Keyboard:
    """Presses Ctrl-C at given events of the profiler: calls and returns, Python's and C's."""

    def __init__(self, *moments):
        self.moments = sorted(moments)
        self.pressed = self.events = 0
        self._default = signal.getsignal(signal.SIGINT)

    def __call__(self, frame, event, arg):
        self.events += 1
        over = self.pressed and signal.getsignal(signal.SIGINT) is self._default
        if self.moments and self.events >= self.moments[0] and not over:
            self.moments.pop(0)
            self.pressed += 1
            signal.raise_signal(signal.SIGINT)


def interrupted(form, curvature, *moments):
    """A step with Ctrl-C at these moments: whether it was delivered, and the keyboard."""
    model = mlp(dropout=0.3)
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=5, curvature=curvature)
    warm_up(penalty)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    handler = signal.getsignal(signal.SIGINT)
    keyboard, delivered = Keyboard(*moments), False
    closure = entropy(model)
    run = penalty.backward if form == "lean" else penalty
    try:
        sys.setprofile(keyboard)
        run(closure)
    except KeyboardInterrupt:
        delivered = True
    finally:
        sys.setprofile(None)
    assert torch._C._len_torch_function_stack() == 0
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert not seht.replaying()
    assert not nn.modules.module._global_forward_pre_hooks
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
    assert {b.dtype for b in model.buffers()} == {torch.float64, torch.int64}
    assert model[1].num_batches_tracked <= 1
    return delivered, keyboard


def events(form, curvature):
    """How many moments a step has; the first one of a process has more."""
    return min(interrupted(form, curvature)[1].events for _ in range(3)) - 60


@pytest.mark.parametrize(("form", "curvature"), CASES)
def test_once(form, curvature):
    last = events(form, curvature)
    for moment in range(1, last, last // 40):
        delivered, keyboard = interrupted(form, curvature, moment)
        assert keyboard.pressed == 1 and delivered


@pytest.mark.parametrize(("form", "curvature"), CASES)
def test_twice(form, curvature):
    """The second one breaks in, between two operations of the closure."""
    last, sooner, draw = events(form, curvature), 0, random.Random(3)
    for _ in range(40):
        first = draw.randrange(1, last)
        delivered, keyboard = interrupted(form, curvature, first, draw.randrange(first, last))
        assert delivered
        sooner += keyboard.events < 0.8 * last
    assert sooner > 2  # it did not wait for the end


@pytest.mark.slow
@pytest.mark.parametrize(("form", "curvature"), CASES)
@pytest.mark.parametrize("presses", [1, 2])
def test_at_every_moment(form, curvature, presses):
    last, draw = events(form, curvature), random.Random(4)
    for first in range(1, last, 17):
        rest = [draw.randrange(first, last) for _ in range(presses - 1)]
        assert interrupted(form, curvature, first, *rest)[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_real_signal(form):
    """From outside, at a random time, while a training loop runs."""
    draw = random.Random(5)
    for _ in range(8):
        model = mlp(dropout=0.3)
        penalty = seht.HessianTrace(model, weight=WEIGHT)
        weights = [p.detach().clone() for p in model.parameters()]
        run = penalty.backward if form == "lean" else penalty
        delay = draw.uniform(0.0, 0.05)
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            end = time.monotonic() + 10
            while time.monotonic() < end:
                run(entropy(model))
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert torch._C._len_torch_function_stack() == 0
        run(entropy(model))  # and goes on


def test_the_users_own_handler_is_called():
    model, seen = mlp(), []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        penalty = seht.HessianTrace(model, weight=WEIGHT)
        x, y = rows()

        def closure():
            if not seht.replaying():
                signal.raise_signal(signal.SIGINT)
                assert not seen  # held back
            return nn.functional.cross_entropy(model(x), y)

        total = penalty(closure)
        assert seen == [signal.SIGINT]
        total.backward()
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_without_a_python_handler(handler):
    model = mlp()
    previous = signal.signal(signal.SIGINT, handler)
    try:
        seht.HessianTrace(model, weight=WEIGHT)(entropy(model))
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_another_thread_leaves_the_handlers_alone():
    model, failures = mlp(), []
    handler = signal.getsignal(signal.SIGINT)

    def work():
        try:
            seht.HessianTrace(model, weight=WEIGHT).backward(entropy(model))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures and signal.getsignal(signal.SIGINT) is handler
    assert model[0].weight.grad is not None
