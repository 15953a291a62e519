"""What acts on optimiser and objective: LinBreg, Lookahead, SAM, HTR, NSO, SEHT."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import IMAGE, TEXT, Trainer

import seht
from seht.lab import models
from seht.lab.methods.optimizers import LinBreg
from seht.lab.methods.parse import parse
from seht.lab.methods.trace import HtrFull, HtrMiddle
from seht.probes import entry_seed, gaussian


def quadratic(seed=0):
    """A weight and a bias, and the gradient of a loss in them, written out."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    w = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    return w, target, lambda: 0.5 * (w - target).square().sum()


# --- LinBreg ----------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_linbreg_arithmetic(momentum):
    w, target, loss = quadratic()
    with torch.no_grad():
        w.copy_(torch.tensor([[0.5, -0.2, 0.0], [1.0, -1.0, 0.05]]))
    tau, weight, delta = 0.1, 0.3, 2.0
    optimizer = LinBreg([w], lr=tau, momentum=momentum, weight=weight, delta=delta)
    u = w.detach().clone()
    v, m = u / delta + weight * u.sign(), torch.zeros_like(u)
    zeros = []
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        m = momentum * m + (u - target)
        v = v - tau * m
        for index in range(6):  # entry by entry
            x = delta * v.flatten()[index].item()
            y = abs(x) - delta * weight
            u.view(-1)[index] = 0.0 if y < 0 else (y if x > 0 else -y)
        torch.testing.assert_close(w.detach(), u)
        zeros.append((u == 0).sum().item())
    assert 0 < zeros[0] < 6 and len(set(zeros)) > 1  # the threshold is met and left


def test_linbreg_thresholds_weights_only_and_has_no_weight_decay():
    trainer = Trainer("linbreg(weight=0.5)", IMAGE)
    assert trainer.recipe.optim.weight_decay == 0
    for group in trainer.optimizer.param_groups:
        assert {p.dim() >= 2 for p in group["params"]} == {group["weight"] == 0.5}
        assert group["lr"] == IMAGE.optim.lr and group["momentum"] == IMAGE.optim.momentum


def test_linbreg_makes_weights_sparse():
    trainer = Trainer("linbreg(weight=0.05)", IMAGE)
    trainer.train(10)
    zeros = sum((p == 0).sum() for p in trainer.model.parameters() if p.dim() > 1)
    assert zeros > 20


# --- Lookahead --------------------------------------------------------------------------------


def test_lookahead_arithmetic():
    w, target, loss = quadratic()
    (method,) = parse("lookahead(k=3,alpha=0.8)").build(IMAGE).methods
    optimizer = method.optimizer(torch.optim.SGD([w], lr=0.1))
    fast = slow = torch.zeros_like(target)
    for step in range(1, 8):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        fast = fast - 0.1 * (fast - target)
        if step % 3 == 0:
            slow = slow + 0.8 * (fast - slow)
            fast = slow
        torch.testing.assert_close(w.detach(), fast)


# --- SAM --------------------------------------------------------------------------------------


def by_hand(trainer, batch, rho, momentum):
    """One step of SAM with SGD, from the article; the buffers are those of the first pass."""
    model, optim = trainer.model, trainer.recipe.optim
    loss, _ = trainer.closure(batch)()
    first = torch.autograd.grad(loss, list(model.parameters()))
    buffers = [b.clone() for b in model.buffers()]
    norm = torch.cat([g.flatten() for g in first]).norm()
    with torch.no_grad():
        for p, g in zip(model.parameters(), first, strict=True):
            p += rho * g / norm
    second = torch.autograd.grad(trainer.closure(batch)()[0], list(model.parameters()))
    with torch.no_grad():
        for p, g, h, m in zip(model.parameters(), first, second, momentum, strict=True):
            p -= rho * g / norm
            m.mul_(optim.momentum).add_(h + optim.weight_decay * p)
            p -= optim.lr * m
        for buffer, kept in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(kept)


def test_sam_is_its_two_steps_and_moves_batch_norm_once():
    trainer, hand = (Trainer("sam(rho=0.1)", IMAGE, dtype=torch.float64) for _ in range(2))
    hand.model.train()
    momentum = [torch.zeros_like(p) for p in hand.model.parameters()]
    for step in range(3):
        trainer.train(1)
        by_hand(hand, hand.data[step], 0.1, momentum)
    ours, theirs = trainer.model.state_dict(), hand.model.state_dict()
    for name, tensor in theirs.items():
        # The library computes the gradient's norm in float32.
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7)
    assert ours["norm1.num_batches_tracked"] == 3


def test_sam_without_a_radius_is_sgd():
    sam, plain = Trainer("sam(rho=0)", TEXT), Trainer("weight-decay", TEXT)
    sam.train(3), plain.train(3)
    for a, b in zip(sam.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("text", ["sam+lookahead(k=2)", "lookahead(k=2)+sam", "sam+linbreg"])
def test_optimisers_nest_whatever_the_order(text):
    trainer = Trainer(text, IMAGE)
    before = trainer.evaluate()
    trainer.train(5)
    saved = trainer.save()
    trainer.train(3)
    assert trainer.evaluate() < before
    again = Trainer(text, IMAGE)
    again.load(saved)
    again.train(3)
    other = again.weights()
    assert all(torch.equal(tensor, other[name]) for name, tensor in trainer.weights().items())


def test_both_passes_of_sam_are_one_step_of_a_penalty():
    trainer = Trainer("sam+seht-h(warmup=2)", IMAGE)
    traces = []
    for _ in range(4):
        trainer.train(1)
        traces.append("trace" in trainer.method.log())
    assert traces == [False, False, True, True]
    penalty = trainer.method.methods[0].penalty
    assert penalty.step == 4


# --- penalties --------------------------------------------------------------------------------


def names_of(model):
    return [name for name, _ in model.named_parameters()]


def test_htr_tensor_range():
    model = models.resnet18(width=4)
    names = names_of(model)
    assert len(names) == 62
    middle = HtrMiddle().params(model)
    assert middle == names[15:46]
    assert any("norm" in name for name in middle)  # scales and biases of norms are among them
    assert HtrFull().params(model) == names


def test_htr_schedule_and_weight():
    trainer = Trainer("htr-middle(every=5,start=0.125,weight=1e-3)", IMAGE)  # 6 of 48 steps
    (method,) = trainer.method.methods
    assert method.penalty.estimator == seht.SehtH(probes=3, distribution="gaussian")
    seen = {}
    for step in range(13):
        trainer.train(1)
        last = method.penalty.last
        if last.trace is not None:
            seen[step] = last
    assert list(seen) == [6, 11]
    names = names_of(trainer.model)
    for last in seen.values():
        assert last.penalty == pytest.approx(1e-3 * last.trace)
        assert list(last.layers) == names[len(names) // 4 : 3 * len(names) // 4]


def test_penalties_add_up():
    """L + a + b, each the trace of L alone; not the trace of a penalised loss."""
    trainer = Trainer(
        "seht-h(weight=0.01)+htr-full(weight=0.02,every=1,start=0)", IMAGE, dtype=torch.float64
    )
    trainer.model.train()
    batch = trainer.data[0]
    total, aux = trainer.method.objective(trainer.closure(batch))()
    lasts = {m.name: m.penalty.last for m in trainer.method.methods}
    assert trainer.method.log()["penalty"] == pytest.approx(sum(r.penalty for r in lasts.values()))
    assert total.item() == pytest.approx(aux["loss"].item() + trainer.method.log()["penalty"])
    for method in trainer.method.methods:
        alone = seht.hessian_trace(
            trainer.model,
            lambda: F.cross_entropy(trainer.model(batch.x), batch.y),
            params=list(lasts[method.name].layers),
            estimator=method.penalty.estimator,
            seed=lasts[method.name].seed,
        )
        assert lasts[method.name].trace == pytest.approx(alone.item(), rel=1e-6)


def test_nso_is_the_mean_loss_at_both_sides():
    sigma = 0.05
    trainer = Trainer(f"nso(sigma={sigma})", IMAGE, dtype=torch.float64)
    (method,), model, batch = trainer.method.methods, trainer.model, trainer.data[0]
    model.train()
    seed = method.seed
    total, _ = trainer.method.objective(trainer.closure(batch))()
    total.backward()
    weights = list(model.parameters())
    ours = [p.grad.clone() for p in weights]
    noise = [gaussian(p.shape, entry_seed(seed, 0, i), p.device) for i, p in enumerate(weights)]
    losses, gradients = [], []
    for side in (sigma, -sigma):
        with torch.no_grad():
            for p, u in zip(weights, noise, strict=True):
                p += side * u
        loss, _ = trainer.closure(batch)()
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, weights))
        with torch.no_grad():
            for p, u in zip(weights, noise, strict=True):
                p -= side * u
    assert total.item() == pytest.approx(sum(losses) / 2)
    for mine, a, b in zip(ours, *gradients, strict=True):
        torch.testing.assert_close(mine, (a + b) / 2, rtol=1e-6, atol=1e-9)
    slopes = [
        sum((g * u).sum().item() for g, u in zip(part, noise, strict=True)) for part in gradients
    ]
    assert trainer.method.log() == pytest.approx({"penalty": sigma * (slopes[0] - slopes[1]) / 4})
    assert method.seed != seed


def test_nso_leaves_what_one_plain_pass_leaves():
    """Of buffers and random numbers; all of its passes draw the same dropout mask."""
    states, starts = [], []
    for text in ("dropout(rate=0.5)", "dropout(rate=0.5)+nso(probes=2)"):
        trainer = Trainer(text, IMAGE)
        trainer.model.train()
        plain = trainer.closure(trainer.data[0])

        def closure(plain=plain):
            starts.append(torch.get_rng_state())
            return plain()

        torch.manual_seed(7)
        trainer.method.objective(closure)()
        counts = [b.item() for n, b in trainer.model.named_buffers() if n.endswith("tracked")]
        states.append((torch.get_rng_state().tolist(), counts))
    assert states[0] == states[1]
    assert not torch.equal(torch.get_rng_state(), starts[0])
    assert len(starts) == 5 and all(torch.equal(start, starts[0]) for start in starts)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("seht-h(probes=2,weight=0.02)", {"weight": 0.02, "probes": 2}),
        (
            "seht-d(weight=0.02,prob=0.4,rescale=true)",
            {"weight": 0.02, "estimator": "seht-d", "prob": 0.4, "rescale": True},
        ),
        ("seht-h(curvature=ggn)", {"weight": 1e-3, "curvature": "ggn"}),
    ],
)
def test_seht_is_the_librarys_penalty(text, options):
    trainer = Trainer(text, IMAGE, seed=3)
    trainer.model.train()
    batch = trainer.data[0]
    penalty = seht.HessianTrace(trainer.model, seed=3, **options)
    expected = penalty(lambda: F.cross_entropy(trainer.model(batch.x), batch.y))
    found, _ = trainer.method.objective(trainer.closure(batch))()
    assert penalty.last.trace is not None
    torch.testing.assert_close(found, expected)
    assert trainer.method.log()["trace"] == pytest.approx(penalty.last.trace, rel=1e-5)
