"""Every method, driven by the registry: it learns, it resumes, it combines."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from training import RECIPES, Trainer

from seht.lab.methods import METHODS

# What waits for its time, or acts seldom, is made to act in a few steps.
TEXTS = {name: name for name in METHODS} | {
    "dropblock": "dropblock(size=2,keep=0.8,ramp=false)",
    "htr-full": "htr-full(every=2,start=0,weight=1e-4)",
    "htr-middle": "htr-middle(every=2,start=0,weight=1e-4)",
    "seht-d": "seht-d(prob=0.4)",
    "seht-s": "seht-s(coupling=frozen)",
    "lookahead": "lookahead(k=2)",
    "ema": "ema(decay=0.3)",
}
CASES = [(name, task) for name in METHODS for task in sorted(METHODS[name].tasks & RECIPES.keys())]
every_method = pytest.mark.parametrize(("name", "task"), CASES, ids=[f"{n}-{t}" for n, t in CASES])

# The Gauss-Newton trace has passes of its own; the fast tests have them in few combinations.
slow = pytest.mark.slow
PARTNERS = ["seht-h", "label-smoothing", pytest.param("seht-h(curvature=ggn)", marks=slow)]


def test_all_methods_are_there():
    assert set(METHODS) == {
        "weight-decay", "none", "linbreg", "jacobian", "dropblock", "confidence-penalty",
        "label-smoothing", "cutout", "mixup", "dropout", "htr-full", "htr-middle", "lookahead",
        "nontarget-uniform", "feature-redundancy", "seht-h", "seht-d", "seht-s", "sam",
        "nso", "fisher", "asam", "ema", "early-stopping",
    }  # fmt: skip


@every_method
def test_learns_and_resumes_bit_for_bit(name, task):
    straight = Trainer(TEXTS[name], RECIPES[task])
    before = straight.evaluate()
    straight.train(7)
    saved = straight.save()
    straight.train(2)
    assert straight.evaluate() < before - 0.2
    resumed = Trainer(TEXTS[name], RECIPES[task])
    resumed.train(1)  # what it has done before must not matter
    resumed.load(saved)
    resumed.train(2)
    ours, theirs = straight.weights(), resumed.weights()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@cache
def plain_weights(task):
    trainer = Trainer("none", RECIPES[task])
    trainer.train(2)
    return list(trainer.weights().values())


@every_method
def test_does_something(name, task):
    """Same seed, same data: the weights differ from those of plain training."""
    if name in ("none", "weight-decay", "early-stopping"):
        pytest.skip("its steps are plain ones")
    trainer = Trainer(TEXTS[name], RECIPES[task])
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0
    trainer.train(2)
    ours = list(trainer.weights().values())
    assert not all(map(torch.equal, ours, plain_weights(task)))


@every_method
@pytest.mark.parametrize("partner", PARTNERS)
def test_combines(name, task, partner):
    if partner.startswith(name):
        pytest.skip("with itself")
    if (name, task) == ("fisher", "image") and "ggn" in partner:
        # Fisher's inner gradient puts a batch norm's backward between the outputs and the loss.
        with pytest.raises(RuntimeError, match="use engine='autograd'"):
            Trainer(f"{TEXTS[name]}+{partner}", RECIPES[task]).train(6)
        partner = partner.replace("ggn", "ggn,engine=autograd")
    trainer = Trainer(f"{TEXTS[name]}+{partner}", RECIPES[task])
    before = trainer.evaluate()
    trainer.train(6)
    assert trainer.evaluate() < before - 0.1


@every_method
def test_the_trace_beside_it_is_that_of_its_own_loss(name, task):
    """Random draws, hooks and inner derivatives are replayed: both engines find the same trace,
    the same gradient, the same buffers, and leave the random state alike.
    """
    if name == "seht-h":
        pytest.skip("with itself")

    def step(engine):
        text = f"{TEXTS[name]}+seht-h(weight=0.01,engine={engine})"
        trainer = Trainer(text, RECIPES[task], dtype=torch.float64)
        torch.manual_seed(5)
        batch = trainer.method.batch(trainer.data[0], 0)
        loss, aux = trainer.method.objective(trainer.closure(batch))()
        loss.backward()
        found = [torch.tensor(trainer.method.log()["trace"]), loss, aux["loss"]]
        found += [p.grad for p in trainer.model.parameters()]
        return [*found, *trainer.model.buffers(), torch.rand(1)]

    for difference, exact in zip(step("difference"), step("autograd"), strict=True):
        torch.testing.assert_close(difference, exact, rtol=1e-4, atol=1e-7)


def test_seht_s_says_at_once_that_examples_meet():
    with pytest.raises(ValueError, match=r"--model\.norm group, or seht-s\(coupling=frozen\)"):
        Trainer("seht-s", RECIPES["image"])


@pytest.mark.parametrize("task", ["image", "text"])
def test_the_trace_of_a_part_of_the_batch(task):
    """It is that of the loss on the first examples, or streams, while the loss is that of all."""

    def step(text, part):
        trainer = Trainer(text, RECIPES[task], dtype=torch.float64)
        axis = 1 if task == "text" else 0
        whole = trainer.data[0]
        count = round(part * whole.x.shape[axis])
        narrow = replace(whole, x=whole.x.narrow(axis, 0, count), y=whole.y.narrow(axis, 0, count))
        loss = trainer.closure(whole)()[0].item()
        batch = whole if "part" in text else narrow
        total, aux = trainer.method.objective(trainer.closure(batch))()
        return loss, total.item(), aux["loss"].item(), trainer.method.log()["trace"]

    loss, total, plain, trace = step("seht-h(weight=0.01,part=0.5)", 0.5)
    assert step("seht-h(weight=0.01)", 0.5)[3] == pytest.approx(trace, rel=1e-9)
    assert step("seht-h(weight=0.01)", 1.0)[3] != pytest.approx(trace, rel=1e-3)
    assert plain == pytest.approx(loss) and total == pytest.approx(loss + 0.01 * trace)


def test_a_part_of_the_batch_beside_another_penalty():
    one = Trainer("htr-full(every=1,start=0)+seht-h(part=0.5)", RECIPES["image"])
    one.train(2)
    assert math.isfinite(one.method.log()["trace"])


def test_a_part_that_cannot_be():
    for part in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="part must be"):
            Trainer(f"seht-h(part={part})", RECIPES["image"])
    with pytest.raises(ValueError, match="leave out part= or that method"):
        Trainer("fisher+seht-h(part=0.5)", RECIPES["text"]).train(1)
