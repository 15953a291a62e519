"""Large logits that the network does not form: value and gradient are those of the general way,
and a closure that does anything else with its logits has them.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import seht
from seht.curvature import cross_entropy, head_loop, head_rules
from seht.curvature.unformed import Head, Unformed
from seht.replay import centre

WORDS = 30
CLASSES = torch.linspace(0.5, 1, WORDS).double()


class Net(nn.Module):
    """Tokens of shape (batch, time)."""

    def __init__(self, tied=False, bias=True):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


class Capped(Net):
    def forward(self, x):
        return 5 * torch.tanh(super().forward(x) / 5)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def tokens():
    return torch.arange(12).view(3, 4) * 7 % WORDS


def targets():
    y = torch.arange(12).view(3, 4) * 5 % WORDS
    y[1, 2] = -100
    return y


def entropy(**options):
    return lambda net: F.cross_entropy(net(tokens()).flatten(0, 1), targets().flatten(), **options)


def shifted(net):
    logits = net(tokens())[..., :-1, :].contiguous().float().double()
    return F.cross_entropy(logits.view(-1, WORDS), targets()[:, 1:].flatten())


def moved(net):
    logits = net(tokens()).to(torch.float64).transpose(0, 1)[1:].reshape(-1, WORDS)
    return F.cross_entropy(logits, targets().t()[1:].reshape(-1))


def masked(net):
    mask = targets() > 9
    return F.cross_entropy(net(tokens())[mask], targets()[mask])


def by_token(net):
    each = F.cross_entropy(net(tokens()).transpose(1, 2), targets(), reduction="none")
    return (each * torch.arange(12).view(3, 4)).sum() / 50 + each.mean()


def nothing_masked(net):
    logits, none = net(tokens()), targets() > WORDS
    loss = F.cross_entropy(logits.flatten(0, 1), targets().flatten())
    return loss + F.cross_entropy(logits[none], targets()[none], reduction="sum")


def with_a_decay(net):
    loss = F.cross_entropy(net(tokens()).flatten(0, 1), targets().flatten())
    return 0.5 * loss + 0.1 * net.head.weight.square().sum() + net.embed.weight.square().mean()


def deciding(net):
    """The same branch in every pass, whatever the pass knows of its loss."""
    loss = F.cross_entropy(net(tokens()).flatten(0, 1), targets().flatten())
    return 2 * loss if loss > 1 else loss.relu()


LOOPED = {
    "plain": entropy(),
    "smoothed": entropy(label_smoothing=0.1),
    "weighted": entropy(weight=CLASSES),
    "all of it": lambda net: F.cross_entropy(
        net(tokens()).flatten(0, 1),
        tokens().flatten(),
        weight=CLASSES,
        label_smoothing=0.2,
        ignore_index=7,
    ),
    "sum": entropy(reduction="sum"),
    "moved": moved,
    "masked": masked,
    "nothing masked": nothing_masked,
    "by token": by_token,
    "with a decay": with_a_decay,
    "deciding": deciding,
}


def metric(net):
    logits = net(tokens())
    with torch.no_grad():
        assert (logits.argmax(-1) < WORDS).all()
    return F.cross_entropy(logits.flatten(0, 1), targets().flatten())


def squared(net):
    logits = net(tokens())
    return F.cross_entropy(logits.flatten(0, 1), targets().flatten()) + 0.01 * logits.square().sum()


def written_into(net):
    logits = net(tokens())
    logits /= 2
    return F.cross_entropy(logits.flatten(0, 1), targets().flatten())


def adversarial(net):
    given = net.embed(tokens()).detach().requires_grad_()
    loss = F.cross_entropy(net.head(net.body(given)).flatten(0, 1), targets().flatten())
    (slope,) = torch.autograd.grad(loss, given)
    logits = seht.boundary(net.head(net.body(net.embed(tokens()) + 0.1 * slope.detach())))
    return F.cross_entropy(logits.flatten(0, 1), targets().flatten())


def checkpointed(net):
    logits = checkpoint(net, tokens(), use_reentrant=False)
    return F.cross_entropy(logits.flatten(0, 1), targets().flatten())


FORMED = {
    "by hand": lambda net: (
        -net(tokens()).log_softmax(-1).gather(-1, targets().clamp(min=0)[..., None]).mean()
    ),
    "cast": shifted,
    "soft targets": lambda net: F.cross_entropy(
        net(tokens()).flatten(0, 1), torch.eye(WORDS).double()[targets().clamp(min=0).flatten()]
    ),
    "perplexity": lambda net: entropy()(net).exp(),
    "a metric": metric,
    "squared besides": squared,
    "written into": written_into,
    "a custom function": lambda net: F.cross_entropy(
        Twice.apply(net(tokens())).flatten(0, 1), targets().flatten()
    ),
    "checkpointed": checkpointed,
    "aux": lambda net: (
        lambda z: (F.cross_entropy(z.flatten(0, 1), targets().flatten()), {"logits": z})
    )(net(tokens())),
}


def gradient(closure, form, make=Net, steps=1, frozen=(), **options):
    torch.manual_seed(0)
    net = make().double()
    for name in frozen:
        net.get_submodule(name).requires_grad_(False)
    options = {"weight": 0.3, "curvature": "ggn", "seed": 0, **options}
    penalty = seht.HessianTrace(net, **options)
    for _ in range(steps):
        net.zero_grad()
        out = (penalty.backward if form == "lean" else penalty)(lambda: closure(net))
        loss = out[0] if isinstance(out, tuple) else out
        if form == "scalar":
            loss.backward()
    if isinstance(out, tuple):
        assert type(out[1]["logits"]) is torch.Tensor
    trace = torch.tensor(penalty.last.trace)
    parts = [p.grad for p in net.parameters() if p.grad is not None]
    return [loss.detach(), trace, *parts]


class Counts:
    def __init__(self, monkeypatch):
        self.loops = self.forms = self.flows = 0
        run, form, flow = head_loop.run, Head.form, head_loop.KeptRows.flow

        def counted(*args):
            self.loops += 1
            return run(*args)

        def formed(head):
            self.forms += 1
            return form(head)

        def flowed(*args, **options):
            self.flows += 1
            return flow(*args, **options)

        monkeypatch.setattr(head_loop, "run", counted)
        monkeypatch.setattr(head_loop.KeptRows, "flow", flowed)
        monkeypatch.setattr(Head, "form", formed)


@pytest.fixture
def lazy(monkeypatch):
    """Switches unformed logits off and on, with stretches of a few rows."""

    def switch(on):
        monkeypatch.setattr(head_rules, "WORTH", (1 if on else 1 << 40, 1))
        monkeypatch.setattr(cross_entropy, "_STRETCH", (5 * 8 * WORDS, 5 * 8 * WORDS))
        monkeypatch.setattr(cross_entropy, "_AT_HAND", (2 * WORDS, 2 * WORDS))

    return switch


def agree(lazy, monkeypatch, closure, form, **options):
    lazy(False)
    expected = gradient(closure, form, **options)
    lazy(True)
    counts = Counts(monkeypatch)
    found = gradient(closure, form, **options)
    assert len(found) == len(expected)
    atol = 1e-7 if options.get("curvature") == "hessian" else 1e-9  # rounding, over e^2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=atol)
    return counts


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("name", LOOPED)
def test_never_formed(name, form, lazy, monkeypatch):
    counts = agree(lazy, monkeypatch, LOOPED[name], form)
    assert counts.loops > 0 and counts.forms == 0


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("name", LOOPED)
def test_never_formed_for_the_hessian(name, form, lazy, monkeypatch):
    counts = agree(lazy, monkeypatch, LOOPED[name], form, curvature="hessian")
    assert counts.flows > 2 and counts.forms == 0


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("name", FORMED)
def test_formed_for_the_hessian(name, form, lazy, monkeypatch):
    """But for functions of the loss that are not linear, which its gradient does not mind."""
    counts = agree(lazy, monkeypatch, FORMED[name], form, steps=2, curvature="hessian")
    assert (counts.flows > 0) == (name == "perplexity")


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("name", FORMED)
def test_formed_where_somebody_looks(name, form, lazy, monkeypatch):
    """In the scalar form the centre has its logits anyway, and only a perturbed pass forms them."""
    counts = agree(lazy, monkeypatch, FORMED[name], form, steps=2)
    assert counts.flows == 0
    assert form == "scalar" or counts.loops == 0


def test_one_form_after_the_other(lazy):
    """What the closure was seen to need in the one is known to the other."""
    lazy(True)
    found = []
    for forms in (["scalar", "lean"], ["lean", "lean"]):
        torch.manual_seed(0)
        net = Net().double()
        penalty = seht.HessianTrace(net, weight=0.3, curvature="ggn", seed=0)
        for form in forms:
            net.zero_grad()
            if form == "scalar":
                penalty(lambda: metric(net)).backward()
            else:
                penalty.backward(lambda: metric(net))
        found.append(net.head.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize(
    "options",
    [
        {"make": lambda: Net(tied=True)},
        {"make": lambda: Net(bias=False)},
        {"frozen": ["head"]},
        {"frozen": ["embed", "body"]},
        {"params": ["body.0.weight"]},
        {"probes": 2},
        {"limit": 0.5},
        {"weight": None, "share": 0.5, "steps": 9},
        {"on_nonfinite": "skip"},
    ],
    # Names without addresses, which differ between the processes that share the tests.
    ids=["tied", "no bias", "head", "body", "params", "probes", "limit", "share", "skip"],
)
def test_heads_and_penalties(options, form, lazy, monkeypatch):
    assert agree(lazy, monkeypatch, entropy(), form, **options).loops > 0


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_gradient_inside_the_closure(form, curvature, lazy, monkeypatch):
    agree(lazy, monkeypatch, adversarial, form, steps=2, curvature=curvature)


class TwoHeads(Net):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(6, WORDS)


def two_heads(net):
    hidden = net.body(net.embed(tokens()))
    second = F.cross_entropy(net.second(hidden.sin()).flatten(0, 1), tokens().flatten())
    return F.cross_entropy(net.head(hidden).flatten(0, 1), targets().flatten()) + second


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("options", [{"boundary": "head"}, {"curvature": "hessian"}])
def test_a_second_head_beside(options, form, lazy, monkeypatch):
    """Past the outputs, it adds nothing to tr(G), and trains as before."""
    agree(lazy, monkeypatch, two_heads, form, make=TwoHeads, **options)


def test_the_waiting_gradient(lazy):
    """Twice with retain_graph, and an error where it is not retained or differentiated again."""
    lazy(True)
    torch.manual_seed(0)
    net = Net().double()
    penalty = seht.HessianTrace(net, weight=0.1, curvature="ggn")
    loss = penalty(lambda: entropy()(net))
    loss.backward(retain_graph=True)
    once = net.head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(net.head.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = penalty(lambda: entropy()(net))
    (slope,) = torch.autograd.grad(loss, net.head.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        slope.sum().backward()
    loss = penalty(lambda: entropy()(net))
    with torch.no_grad():
        net.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_head_that_is_not_the_last(form, lazy, monkeypatch):
    counts = agree(lazy, monkeypatch, entropy(), form, make=Capped)
    assert counts.loops == 0


@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_two_sided_keeps_its_logits(form, lazy, monkeypatch):
    assert agree(lazy, monkeypatch, entropy(), form, two_sided=True).loops == 0


def test_logits_kept_past_the_step_are_those_of_the_step(lazy):
    lazy(True)
    torch.manual_seed(0)
    net, kept = Net().double(), []

    def closure():
        kept.append(net(tokens()))
        return F.cross_entropy(kept[-1].flatten(0, 1), targets().flatten())

    seht.HessianTrace(net, weight=0.1, curvature="ggn").backward(closure)
    assert isinstance(kept[-1], Unformed) and kept[-1].shape == (3, 4, WORDS)
    torch.testing.assert_close(kept[-1] + 0, net(tokens()))
    with torch.no_grad():
        net.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="return them as aux"):
        kept[0].argmax(-1)


ENDS = ["backward", "dropped", "closure", "perturbed"]


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("end", ENDS)
def test_a_step_leaves_nothing_behind(end, form, curvature, lazy):
    """Neither hidden states nor the rows' logits, without the collector, however the step ends."""
    lazy(True)
    torch.manual_seed(0)
    net, hidden, rows = Net().double(), [], []
    penalty = seht.HessianTrace(net, weight=0.1, curvature=curvature, seed=0)
    net.body.register_forward_hook(lambda module, given, out: hidden.append(weakref.ref(out)))
    fails = {"closure": 1, "perturbed": 2}.get(end)

    def closure():
        loss = entropy()(net)
        if len(hidden) == fails:
            raise KeyError("the user's")
        return loss

    def step():
        try:
            if form == "lean":
                penalty.backward(closure)
            else:
                loss = penalty(closure)
                if end == "backward":
                    loss.backward()
        except KeyError:
            pass

    init = head_loop.KeptRows.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            head_loop.KeptRows,
            "__init__",
            lambda kept, logits: rows.append(weakref.ref(logits)) or init(kept, logits),
        )
        gc.collect()
        gc.disable()
        try:
            step()
        finally:
            gc.enable()
    assert hidden and rows
    assert not [ref for ref in (*hidden, *rows) if ref() is not None]


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("form", ["scalar", "lean"])
def test_a_head_outside_the_autocast_of_its_loss(form, curvature, lazy, monkeypatch):
    def closure(net):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                logits = net(tokens())
            return F.cross_entropy(logits.flatten(0, 1), targets().flatten())

    counts = agree(lazy, monkeypatch, closure, form, curvature=curvature, precision="native")
    assert counts.loops + counts.flows > 0 and counts.forms == 0


def test_moves_are_followed():
    head = Head(torch.randn(2, 3, 4, requires_grad=True), nn.Parameter(torch.randn(7, 4)), None)
    logits, real = Unformed.of(head), head.form()
    assert torch.is_floating_point(logits) and logits.is_contiguous()
    assert not logits.looks  # none of these needs a number
    moves = {
        "shift": lambda z: z[:, :-1].reshape(-1, 7),
        "mask": lambda z: z[torch.tensor([[True, False, True], [False, True, False]])],
        "rows": lambda z: z.flatten(0, 1)[torch.tensor([4, 0, 4])],
        "chunk": lambda z: z.chunk(3, 1)[1],
        "second": lambda z: z.transpose(1, 2),
    }
    for name, move in moves.items():
        found = move(logits)
        assert type(found) is Unformed and not found.looks, name
        places = found.rows.places.movedim(found.rows.dim, -1).flatten()
        rows = move(real).movedim(found.rows.dim, -1).reshape(-1, 7)
        torch.testing.assert_close(real.flatten(0, 1)[places], rows)
    torch.testing.assert_close(logits.exp(), real.exp())
    assert logits.looks == ["exp"]


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_a_model_without_a_head_is_not_looked_at(curvature, monkeypatch):
    """Its rules would run at every linear layer for nothing."""
    asked = []
    monkeypatch.setattr(
        centre, "Losses", lambda **options: asked.append(options) or head_rules.Losses(**options)
    )
    x, y = torch.randn(5, 8), torch.randint(0, 3, (5,))
    for width in (8, 20):  # no layer here puts out more than twice what it takes; the next does
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
        penalty = seht.HessianTrace(model, weight=1e-3, curvature=curvature)
        penalty(lambda: F.cross_entropy(model(x), y)).backward()
        assert bool(asked) == (width == 20)
