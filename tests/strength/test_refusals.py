"""What cannot be right about a weight is refused in one line that names the fix, and leaves no
trace: not in the model, its gradients and statistics, the optimiser, the penalty or random numbers.
"""

import copy
import math
import random
import re
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht

X, Y = torch.randn(64, 6), torch.randint(0, 3, (64,))
XV, YV = torch.randn(32, 6), torch.randint(0, 3, (32,))
PATH = seht.WeightPath((0.1, 0.9), (1e-3, 2e-3), "ggn")
SMALL = TensorDataset(XV[:8], YV[:8])
BATCHES = [(XV[:16], YV[:16]), (XV[16:], YV[16:])]


def network(dropout=0.2):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)
    )


def loss_on(model, x=X, y=Y):
    return lambda: F.cross_entropy(model(x), y)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Training:
    """In its middle: momentum, gradients and statistics are there."""

    def __init__(
        self, *, steps=9, held_out=None, form="scalar", dropout=0.2, model=None, **options
    ):
        self.model, self.form = model or network(dropout), form
        self.closure = loss_on(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        if held_out is not None:
            options["held_out"] = held_out(self)
        options = {"total_steps": 40, "seed": 0, **options}
        self.penalty = seht.HessianTrace(self.model, optimizer=self.optimizer, **options)
        more = {"held_out": loss_on(self.model, XV, YV)} if self._asks and not held_out else {}
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.step(**more)
            self.optimizer.step()

    @property
    def _asks(self):
        return "tuned" in repr(self.penalty)

    def step(self, closure=None, **more):
        closure = closure or self.closure
        if self.form == "lean":
            self.penalty.backward(closure, **more)
        else:
            self.penalty(closure, **more).backward()

    def everything(self):
        return copy.deepcopy(
            (
                self.model.state_dict(),
                [p.grad for p in self.model.parameters()],
                self.optimizer.state_dict(),
                self.penalty.state_dict(),
                self.penalty.last,
                [module.training for module in self.model.modules()],
                (torch.get_rng_state(), torch.initial_seed()),
                (random.getstate(), numpy.random.get_state(legacy=False)),
            )
        )

    def refuses(self, kind, words, call):
        """The call fails with these words in one line, and nothing has changed; twice."""
        before = self.everything()
        for _ in range(2):
            with pytest.raises(kind) as failure:
                call()
            said = str(failure.value)
            assert re.search(words, said) and "\n" not in said, said
            after = self.everything()
            assert list(map(same, before, after)) == [True] * len(before)


def drawing(batches):
    """Gives each batch once, and draws random numbers meanwhile."""
    for batch in batches:
        torch.rand(3), random.random(), numpy.random.rand()
        yield batch


def spoilt(training, change):
    loss = loss_on(training.model, XV, YV)
    return lambda: change(loss())


def noisily(training):
    """Uses every kind of randomness, then fails."""

    def held_out():
        training.model(XV), torch.rand(3), random.random(), numpy.random.rand()
        raise KeyError("mine")

    return held_out


def stepping(training):
    """A step of training, given for a loss."""

    def held_out():
        loss = loss_on(training.model, XV, YV)()
        training.optimizer.step()
        return loss

    return held_out


ELSEWHERE = nn.Linear(2, 2)
HELD_OUT = {
    "missing": (
        lambda t: None,
        ValueError,
        r"held_out=lambda: .* or held_out=\(batches, loss_fn\)",
    ),
    "NaN": (
        lambda t: spoilt(t, lambda loss: loss * math.nan),
        seht.NonFiniteError,
        "not finite at step 9; look for the held-out batch",
    ),
    "infinite": (
        lambda t: spoilt(t, lambda loss: loss + math.inf),
        seht.NonFiniteError,
        "held-out loss is not finite at step 9; look for the held-out batch",
    ),
    "elsewhere": (
        lambda t: lambda: ELSEWHERE(torch.ones(2, 2)).sum(),
        ValueError,
        r"none of the probed weights; compute it with the model that is trained: held_out=lambda",
    ),
    "detached": (
        lambda t: spoilt(t, torch.Tensor.detach),
        RuntimeError,
        r"^held_out: the loss has no graph .* without detach\(\) or no_grad\(\)",
    ),
    "a number": (
        lambda t: spoilt(t, torch.Tensor.item),
        TypeError,
        "^held_out: the closure must return a scalar tensor",
    ),
    "no scalar": (
        lambda t: lambda: t.model(XV),
        ValueError,
        r"^held_out: the loss must be a scalar.* reduce it with .mean\(\)",
    ),
    "a tensor": (lambda t: XV, TypeError, "held_out must be a function .*, not Tensor"),
    "a model": (lambda t: t.model, TypeError, "held_out must be a function .*, not Sequential"),
    "pair": (lambda t: (BATCHES, loss_fn), TypeError, "give the pair .* when the penalty is made"),
    "the closure itself": (
        lambda t: t.closure,
        ValueError,
        "the training closure itself.*; compute the loss on examples that are not trained on",
    ),
    "that fails": (noisily, KeyError, "mine"),
    "a training step": (stepping, RuntimeError, r"^held_out calls SGD.step\(\).*only compute"),
}


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("case", HELD_OUT)
def test_held_out_data_of_a_call(case, form):
    make, kind, words = HELD_OUT[case]
    training = Training(weight="tuned", form=form)
    given = make(training)
    training.refuses(kind, words, lambda: training.step(held_out=given))
    training.step(held_out=loss_on(training.model, XV, YV))  # and it goes on
    assert training.penalty.step == 10


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_held_out_data_that_nobody_gave(form, accumulate):
    """Refused in the first step, although the first look is far off."""
    training = Training(steps=0, form=form, weight="tuned", warmup=0.5, accumulate=accumulate)
    for _ in range(accumulate - 1):  # the last call of a step may bring them
        training.step()
    training.refuses(ValueError, "weight='tuned' needs held-out data", training.step)
    training.step(held_out=loss_on(training.model, XV, YV))
    assert training.penalty.step == 1


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_look_with_a_backward_pass_or_a_penalty_inside(form):
    """What a training step given as held_out does; nested penalties ended in a recursion."""
    training = Training(weight="tuned", form=form)

    def held_out():
        loss = loss_on(training.model, XV, YV)()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match=r"^held_out leaves a gradient in 0.weight.grad"):
        training.step(held_out=held_out)
    boxed = []
    inside = lambda t: ([(XV, YV)], lambda model, batch: boxed[0](loss_on(model, *batch)))
    training = Training(weight="tuned", form=form, held_out=inside, steps=8)
    boxed.append(training.penalty)
    training.refuses(RuntimeError, "penalties cannot be nested", training.step)


GIVEN = {
    "run out": (
        8 + 2,
        lambda t: (drawing(BATCHES), loss_fn),
        ValueError,
        "have run out.*; pass a DataLoader or a list",
    ),
    "a batch that is not finite": (
        8 + 1,
        lambda t: ([BATCHES[0], (XV / 0, YV)], loss_fn),
        seht.NonFiniteError,
        "look for the held-out batch",
    ),
    "the closure itself": (0, lambda t: t.closure, ValueError, "the training closure itself"),
}


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("case", GIVEN)
def test_held_out_data_given_once(case, form):
    steps, make, kind, words = GIVEN[case]
    training = Training(weight="tuned", form=form, steps=steps, held_out=make)
    training.refuses(kind, words, training.step)


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_the_training_batch_in_other_words(form):
    """A closure of its own on the same examples, which no identity tells."""
    same_batch = lambda training: loss_on(training.model)
    training = Training(weight="tuned", form=form, steps=8, dropout=0.0, held_out=same_batch)
    for _ in range(2):
        training.step()
    training.refuses(ValueError, "give it examples that are not trained on", training.step)


@pytest.mark.parametrize("options", [{"weight": 1e-3}, {"share": 0.5}, {"weight": PATH}])
def test_held_out_data_without_a_weight_to_tune(options):
    training = Training(**options)
    others, words = loss_on(training.model, XV, YV), "leave weight= and share= out"
    training.refuses(ValueError, words, lambda: training.step(held_out=others))
    training.refuses(ValueError, words, lambda: training.penalty.equip(held_out=others))


@pytest.mark.parametrize("options", [{"share": 0.5}, {"weight": "tuned"}])
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_loss_whose_gradient_is_zero(options, form):
    training = Training(steps=0, form=form, curvature="hessian", **options)
    constant = lambda: 0.0 * F.cross_entropy(training.model(X), Y)
    more = {"held_out": loss_on(training.model, XV, YV)} if "weight" in options else {}
    for _ in range(7):
        training.step(constant, **more)
    words = "gradient of the loss is zero in all weights.*; check that the closure computes"
    training.refuses(ValueError, words, lambda: training.step(constant, **more))


@pytest.mark.parametrize("options", [{"share": 0.5}, {"weight": "tuned"}])
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_trace_that_is_only_rounding(options, form):
    """Its share is that of noise: a weight of 40,000, and noise twice as large as the gradient."""
    torch.manual_seed(0)
    model, target = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), X[:, :3].sin()
    training = Training(steps=0, form=form, curvature="hessian", model=model, **options)
    straight = lambda: F.l1_loss(training.model(X), target)
    more = {"held_out": loss_on(training.model, XV, YV)} if "weight" in options else {}
    for _ in range(4):
        training.step(straight, **more)
    state = training.penalty.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's own
        training.penalty.load_state_dict(state)
        for _ in range(3):
            training.step(straight, **more)
        words = r"lost in rounding on each step.*; seht\.doctor says"
        training.refuses(ValueError, words, lambda: training.step(straight, **more))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"weight": 1e-3, "warmup": 0.1}, "warmup=0.1 is a fraction .* pass total_steps="),
        ({"weight": 1e-3, "ramp": 0.1}, "ramp=0.1 is a fraction .* pass total_steps="),
        ({"share": 2.0, "warmup": 0.1}, "warmup=0.1 is a fraction .* pass total_steps="),
        ({"weight": "tuned", "ramp": 0.5}, "ramp=0.5 is a fraction .* pass total_steps="),
        ({"weight": PATH}, "length of the training.*; pass total_steps="),
    ],
)
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_fraction_of_nobody_knows_what(options, words, form):
    given = (lambda t: (BATCHES, loss_fn)) if options.get("weight") == "tuned" else None
    training = Training(steps=0, form=form, total_steps=None, held_out=given, **options)
    training.refuses(ValueError, words, training.step)
    training.penalty.close()  # nothing was trained
    training.penalty.lasts(40)
    training.step()


MADE = [
    ({"share": 0.1, "weight": 1e-3}, ValueError, "give weight= or share=, not both"),
    ({"share": 0.1, "weight": "tuned"}, ValueError, "give weight= or share=, not both"),
    ({"share": 0.1, "weight": PATH}, ValueError, "give weight= or share=, not both"),
    ({"share": 0.0}, ValueError, "positive"),
    ({"share": "0.1"}, TypeError, "finite number"),
    ({"share": math.inf}, ValueError, "finite"),
    ({"weight": 1e-3, "follow": True}, ValueError, "give it with share="),
    ({"curvature": "hessian"}, TypeError, "needs a weight: weight=1e-3"),
    ({"weight": "auto"}, ValueError, "a number, a path or 'tuned'"),
    ({"weight": [1e-3]}, TypeError, "a number, a function of the step, a path or 'tuned'"),
    ({"weight": {"format": "x/1"}}, ValueError, r"'x/1' in place of .*; pass penalty\.path"),
    ({"weight": {**PATH.state(), "format": "seht.WeightPath/2"}}, ValueError, r"penalty\.path"),
    ({"weight": {**PATH.state(), "weights": [1e-3]}}, ValueError, "as many weights as positions"),
    ({"weight": {**PATH.state(), "weights": ["a", "b"]}}, ValueError, r"numbers.*penalty\.path"),
    ({"weight": {**PATH.state(), "curvature": "round"}}, ValueError, "unknown curvature 'round'"),
    (
        {"weight": 1e-3, "held_out": loss_fn},
        ValueError,
        "leave weight= and share= out",
    ),
    ({"share": 2.0, "held_out": loss_fn}, ValueError, "leave weight= and share= out"),
    ({"weight": "tuned", "held_out": 3}, TypeError, "held_out must be a function"),
    ({"weight": "tuned", "held_out": (3, loss_fn)}, TypeError, "held_out must be a function"),
    (
        {"weight": "tuned", "held_out": ("mine.npz", loss_fn)},
        TypeError,
        r"a pair \(batches, loss_fn\) .*, not \(str, function\)",
    ),
    ({"held_out": ([], loss_fn)}, ValueError, "has no batch"),
    ({"held_out": (DataLoader(SMALL, 9, drop_last=True), loss_fn)}, ValueError, "has no batch"),
    ({"held_out": (BATCHES, lambda batch: 0)}, TypeError, "the model and one batch.*too many"),
    ({"held_out": (BATCHES, lambda model, x, y: 0)}, TypeError, "the model and one batch.*'y'"),
    ({"held_out": (BATCHES, F.cross_entropy)}, TypeError, "cross_entropy by itself"),
    ({"held_out": (BATCHES, nn.CrossEntropyLoss())}, TypeError, "CrossEntropyLoss by itself"),
    ({"weight": seht.HessianTrace(nn.Linear(2, 2))}, TypeError, r"weight=penalty\.path"),
    ({"weight": "tuned", "optimizer": "adam"}, TypeError, "optimizer=optimizer"),
]


@pytest.mark.parametrize("options, kind, words", MADE)
def test_arguments(options, kind, words):
    training = Training(weight=1e-3, steps=1)
    training.refuses(kind, words, lambda: seht.HessianTrace(training.model, **options))


KINDS = {
    "given": {"weight": 1e-3},
    "share": {"share": 0.5},
    "path": {"weight": PATH},
    "tuned": {"weight": "tuned"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_mode(kind):
    """Of both halves of a training: while a share is measured, and after."""
    for other, options in KINDS.items():
        training = Training(**KINDS[kind])
        for steps in (3, 12):
            state = Training(steps=steps, curvature=training.penalty.curvature, **options)
            state = state.penalty.state_dict()
            load = lambda state=state: training.penalty.load_state_dict(state)
            if other == kind:
                load()
                assert training.penalty.step == steps
            else:
                training.refuses(ValueError, f"belongs to a {other} weight.*; make it with", load)


@pytest.mark.parametrize("kind", ["share", "tuned"])
def test_a_state_of_another_curvature(kind):
    """A weight of the Gauss-Newton trace means something else for the whole one."""
    training = Training(**KINDS[kind])
    state = Training(curvature="hessian", **KINDS[kind]).penalty.state_dict()
    load = lambda: training.penalty.load_state_dict(state)
    training.refuses(ValueError, "curvature='hessian', and this penalty has 'ggn'; make it", load)


@pytest.mark.parametrize("options", [{"share": 0.5}, {"weight": "tuned"}])
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_head_of_another_size_while_the_share_is_measured(options, form):
    """As where a classifier is given new classes, or a state comes from another model."""
    training = Training(steps=4, form=form, **options)
    training.model[4] = nn.Linear(16, 5)
    more = {"held_out": loss_on(training.model, XV, YV)} if "weight" in options else {}
    words = r"'4.weight' has the shape \(5, 16\), and had \(3, 16\).*; make a new penalty"
    training.refuses(ValueError, words, lambda: training.step(**more))


@pytest.mark.parametrize("kind, missing", [("share", "unit"), ("tuned", "gap"), ("path", "calm")])
def test_a_state_with_something_missing(kind, missing):
    training = Training(**KINDS[kind])
    state = Training(**KINDS[kind], steps=12).penalty.state_dict()
    state["strength"] = {k: v for k, v in state["strength"].items() if k != missing}
    load = lambda: training.penalty.load_state_dict(state)
    training.refuses(
        ValueError, f"{kind} weight is not complete .'{missing}'.*; continue with", load
    )


def test_beyond_its_length_the_weight_stays_with_one_warning():
    for options in ({"weight": "tuned"}, {"weight": PATH}):
        training, asked = Training(steps=12, total_steps=12, **options), []

        def held_out(training=training, asked=asked):
            asked.append(1)
            return loss_on(training.model, XV, YV)()

        more = {"held_out": held_out} if options["weight"] != PATH else {}
        last = training.penalty.path.at(1.0)
        with pytest.warns(seht.PenaltyWarning) as found:
            for _ in range(6):
                training.step(**more)
                assert training.penalty.last.weight == pytest.approx(last)
        assert asked == []  # nor does anything else of it move
        said = [str(w.message) for w in found if "beyond" in str(w.message)]
        assert len(said) == 1 and "Give the number of optimiser steps as total_steps=" in said[0]


def test_an_optimiser_of_another_model_is_named_once():
    """Its rates and mean squares belong to other weights, so that none of them count."""
    model, other = network(), network()
    closure = loss_on(model)
    penalty = seht.HessianTrace(
        model, share=1.0, optimizer=torch.optim.AdamW(other.parameters()), total_steps=9
    )
    with pytest.warns(seht.PenaltyWarning, match="none of the model's parameters") as found:
        for _ in range(3):
            penalty(closure).backward()
    assert len(found) == 1
    head = torch.optim.AdamW(model[-1].parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for weights in (model, model.bfloat16()):
            x = X.to(next(weights.parameters()).dtype)
            seht.HessianTrace(weights, share=1.0, optimizer=head)(loss_on(weights, x))
