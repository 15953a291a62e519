"""A failure in any pass, forward and backward, of the reference engine, too; no memory; NaN."""

import pytest
import torch
import torch.nn.functional as F
from abusing import FORMS, Fuse, Surroundings, every_way, penalty_of, run
from helpers import Snapshot
from stepping import mlp, rows

import seht

ERRORS = [ValueError, KeyboardInterrupt, torch.OutOfMemoryError]
LARGE = 1 << 50  # more numbers than any machine has room for


class Failing:
    """A closure that fails in its n-th run, or when something is differentiated the n-th time."""

    def __init__(self, model, fail, *, run=None, backward=None):
        self.model, self.fail, self.run, self.backward = model, fail, run, backward
        self.runs = self.backwards = 0
        self.x, self.y = rows()

    def differentiated(self):
        self.backwards += 1
        if self.backwards == self.backward:
            self.fail()

    def __call__(self):
        self.runs += 1
        h = Fuse.apply(self.model[0](self.x), self.differentiated)
        if self.runs == self.run:
            self.fail()
        return F.cross_entropy(
            self.model[4](self.model[3](self.model[2](self.model[1](h)))), self.y
        )


def failure(error):
    def fail():
        raise error("boom")

    return fail


def no_memory():
    with torch._C.DisableTorchFunction():
        torch.empty(LARGE, dtype=torch.float64)


def prepared(engine, curvature, *, warm):
    model = mlp(dropout=0.3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    boundary = "4" if curvature == "ggn" else None
    return model, penalty_of(model, engine, curvature, boundary=boundary, warm=warm)


def check(engine, form, curvature, make, error, match, *, warm=True):
    """The call fails, all is as before, and the step that was missed can be made up for."""
    model, penalty = prepared(engine, curvature, warm=warm)
    before = Surroundings(model, penalty)
    closure = make(model)
    call = penalty.backward if form == "lean" else penalty
    torch.manual_seed(17)
    with pytest.raises(error, match=match):
        call(closure)
    Surroundings(model, penalty).assert_same(before, random=False)
    closure.run = closure.backward = None
    torch.manual_seed(17)
    got = run(penalty, closure, form)
    other, undisturbed = prepared(engine, curvature, warm=warm)
    torch.manual_seed(17)
    assert torch.equal(got, run(undisturbed, Failing(other, None), form))
    Snapshot(model).assert_same(Snapshot(other))
    assert penalty.last == undisturbed.last


@pytest.mark.supports("failures and interrupts in any pass leave the model as it was")
@every_way
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("warm", [True, False])
def test_in_a_forward_pass(engine, form, curvature, error, warm):
    runs = 1 if engine == "autograd" else 2
    for number in range(1, runs + 1):
        make = lambda model, n=number: Failing(model, failure(error), run=n)
        check(engine, form, curvature, make, error, "boom", warm=warm)


@pytest.mark.supports("failures and interrupts in any pass leave the model as it was")
@every_way
@pytest.mark.parametrize("error", ERRORS)
def test_in_a_backward_pass(engine, form, curvature, error):
    """Nested ones included: the first is the gradient, the second its derivative."""
    for number in (1, 2) if engine == "autograd" and curvature == "hessian" else (1,):
        make = lambda model, n=number: Failing(model, failure(error), backward=n)
        check(engine, form, curvature, make, error, "boom")


@every_way
def test_a_real_lack_of_memory(engine, form, curvature):
    for where in ({"run": 1 if engine == "autograd" else 2}, {"backward": 1}):
        make = lambda model, w=where: Failing(model, no_memory, **w)
        check(engine, form, curvature, make, RuntimeError, "can't allocate memory")


@every_way
@pytest.mark.parametrize("n", [0, 2])
def test_nan_at_a_step(engine, form, curvature, n):
    """The run stops there, or is taken up with the next batch; statistics stay clean."""
    model, (x, y) = mlp(), rows()
    penalty = penalty_of(model, engine, curvature, warm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(n + 2):
        bad = torch.nan if step == n and penalty.step == n else 1.0
        closure = lambda b=bad: F.cross_entropy(model(x * b), y)
        optimizer.zero_grad()
        if step == n:
            before = Surroundings(model, penalty)
            with pytest.raises(seht.NonFiniteError, match="the loss is nan; lower the learning"):
                run(penalty, closure, form)
            Surroundings(model, penalty).assert_same(before)
        else:
            run(penalty, closure, form)
            optimizer.step()
    assert penalty.step == n + 1
    assert all(t.isfinite().all() for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("form", FORMS)
def test_the_measured_error_of_held_statistics(form):
    """The statistics are leaves in the perturbed passes: the check once compared these with a
    centre in which they are not, saw an error of 73 % that was none, and spoilt the step.
    """
    model, (x, y) = mlp(), rows()
    for curvature, error in (("hessian", 1e-5), ("ggn", 1e-4)):
        penalty = penalty_of(
            model, "difference", curvature, estimator="seht-s", coupling="frozen", warm=False
        )
        kappa = None
        for _ in range(3):
            model.zero_grad()
            run(penalty, lambda: F.cross_entropy(model(x), y, label_smoothing=0.1), form)
            assert penalty.last.error < error
            kappa = kappa or penalty._course.engine.steps.kappa
            assert penalty._course.engine.steps.kappa == kappa
