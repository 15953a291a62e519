"""Activation checkpointing: what a backward pass computes again, it decides as before.

Truth is the same network without checkpoints: not a bit may differ.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import Square
from stepping import FORMS, WEIGHT, assert_gradients, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import seht
from seht.engines import ENGINES
from seht.engines.forward_only import replicates

every_form = pytest.mark.parametrize("form", FORMS)


def saved(function, x, kind):
    return checkpoint(function, x, use_reentrant=kind == "reentrant")


class Net(nn.Module):
    """Kinks, norms, dropout and a function that we compose anew, in two checkpoints."""

    def __init__(self, kind, middle=nn.Identity):
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.first = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(
            nn.Linear(12, 12), nn.BatchNorm1d(12), nn.CELU(), middle(), nn.Linear(12, 12), nn.ReLU()
        )
        self.head = nn.Linear(12, 3)
        self.double()

    def forward(self, x):
        if self.kind is None:
            return self.head(self.second(self.first(x)))
        if self.kind == "nested":
            inner = lambda a: saved(self.second, saved(self.first, a, "plain"), "plain")
            return saved(lambda a: self.head(inner(a)), x, "plain")
        if self.kind == "sequential":
            parts = nn.Sequential(*self.first, *self.second)
            return self.head(checkpoint_sequential(parts, 3, x, use_reentrant=False))
        return self.head(saved(self.second, saved(self.first, x, self.kind), self.kind))


def train(kind, form, *, steps=2, middle=nn.Identity, grad=True, dtype=None, **options):
    """A few penalised steps; everything they leave behind."""
    model = Net(kind, middle)
    torch.manual_seed(5)
    x, y = torch.randn(16, 6).double().requires_grad_(grad), torch.arange(16) % 3
    if dtype is not None:
        model, x = model.float(), x.detach().float().requires_grad_()
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=1, **options)
    found = []

    def closure():
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return F.cross_entropy(model(x), y)

    for _ in range(steps):
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        found.append((penalty.last.loss, penalty.last.trace))
    state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    return found, gradients([*model.parameters(), x]), *state


def assert_same(got, expected, rtol=0):
    assert got[0] == expected[0]
    assert_gradients(got[1], expected[1], rtol=rtol)
    for a, b in zip(got[2], expected[2], strict=True):
        assert torch.equal(a, b)  # BatchNorm's statistics move once
    assert torch.equal(got[3], expected[3])


CASES = [
    ("difference", "hessian", "scalar", "plain"),
    ("difference", "hessian", "lean", "nested"),
    ("difference", "ggn", "scalar", "reentrant"),
    ("difference", "ggn", "lean", "plain"),
    ("autograd", "hessian", "scalar", "reentrant"),
    ("autograd", "hessian", "scalar", "plain"),
    ("autograd", "ggn", "scalar", "nested"),
]
ALL = itertools.product(ENGINES, ["hessian", "ggn"], FORMS, ["plain", "reentrant", "nested"])


@pytest.mark.supports("activation checkpointing")
@pytest.mark.parametrize(
    ("engine", "curvature", "form", "kind"),
    [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in CASES)],
)
def test_the_result_without_checkpoints(engine, curvature, form, kind):
    options = {"engine": engine, "curvature": curvature}
    assert_same(train(kind, form, **options), train(None, form, **options))


def test_a_sequence_of_checkpoints():
    assert_same(train("sequential", "scalar"), train(None, "scalar"))


@every_form
@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("precision", ["full", "native"])
def test_under_autocast(form, kind, precision):
    """A checkpoint remembers that autocast was on."""
    options = {"dtype": torch.bfloat16, "precision": precision}
    assert_same(train(kind, form, **options), train(None, form, **options), rtol=1e-6)


@every_form
@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "seht-s", "coupling": "own"},
        {"estimator": "seht-d", "prob": 0.5, "layer_prob": 0.4},
        {"probes": 2, "limit": 0.1},
    ],
    ids=str,
)
def test_other_estimates(form, options):
    # SEHT-D shares what comes before its layers, but not through a checkpoint.
    got, expected = (train(kind, form, steps=3, **options) for kind in ("plain", None))
    values = [[(loss, trace or 0) for loss, trace in run[0]] for run in (got, expected)]
    torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-6, atol=1e-9)
    assert_gradients(got[1], expected[1], rtol=1e-6)


# --- what may lie inside -----------------------------------------------------------------------


class Middle(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            size = x.std() + torch.rand(())
        x = torch.where(x > 0.1, x.sin(), x) / size
        return Square.apply(x) + x.detach() * x


@every_form
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU])
def test_recurrent_layers_with_a_probe_per_example(recurrent, curvature, form):
    """They run step by step there, and so they must when they run again."""

    def found(kind):
        torch.manual_seed(6)
        layer, head = recurrent(3, 4, batch_first=True), nn.Linear(4, 2)
        model = nn.ModuleList([layer, head]).double()
        x, y = torch.randn(5, 4, 3).double(), torch.arange(5) % 2
        body = lambda x: layer(x)[0][:, -1]
        model.forward = lambda x: head(body(x) if kind is None else saved(body, x, kind))
        penalty = seht.HessianTrace(
            model, weight=WEIGHT, seed=1, estimator="seht-s", curvature=curvature
        )
        closure = lambda: F.cross_entropy(model(x), y)
        penalty(closure).backward() if form == "scalar" else penalty.backward(closure)
        return [p.grad for p in model.parameters()]

    for ours, right in zip(found("plain"), found(None), strict=True):
        assert torch.equal(ours, right)


@every_form
@pytest.mark.parametrize("kind", ["plain", "reentrant", "nested"])
def test_constants_and_custom_functions_inside(form, kind):
    assert_same(train(kind, form, middle=Middle), train(None, form, middle=Middle))


def test_inputs_without_a_gradient():
    """The reentrant kind then trains nothing inside, and says so; the other does."""
    assert_same(train("plain", "scalar", grad=False), train(None, "scalar", grad=False))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 2
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        penalty(lambda: F.cross_entropy(model[2](saved(model[:2], x, "reentrant")), y)).backward()
    assert penalty.last.unused == ("0.weight",)
    assert model[0].weight.grad is None and model[2].weight.grad is not None


def test_a_generator_of_its_own_is_refused():
    """PyTorch does not set it back, and silently draws other numbers."""
    model = nn.Linear(4, 2).double()
    x, generator = torch.randn(6, 4).double(), torch.Generator()

    def noisy(a):
        return model(a) * torch.rand(6, 2, generator=generator, dtype=a.dtype)

    def closure():
        return checkpoint(noisy, x, use_reentrant=False).square().mean()

    with pytest.raises(RuntimeError, match="draw them before the checkpoint"):
        seht.HessianTrace(model, weight=WEIGHT)(closure).backward()


def test_frozen_statistics_are_refused():
    with pytest.raises(seht.KinkError, match="switch checkpointing off"):
        train("plain", "scalar", estimator="seht-s", coupling="frozen")


# --- and around ---------------------------------------------------------------------------------


def test_pytorchs_own_checkpoints_are_back():
    names = ["_CheckpointFrame", "_checkpoint_hook", "_recomputation_hook", "CheckpointFunction"]
    before = [getattr(torch.utils.checkpoint, n) for n in names]
    for engine in ("difference", "autograd"):
        train("plain", "scalar", steps=1, engine=engine)
    model = Net("plain")
    with pytest.raises(ArithmeticError):
        seht.HessianTrace(model, weight=WEIGHT)(lambda: model(1 / 0))
    assert [getattr(torch.utils.checkpoint, n) for n in names] == before


@pytest.mark.parametrize("per_layer", [False, True])
def test_measuring(per_layer):
    found = []
    for kind in ("plain", None):
        model = Net(kind).eval()
        x, y = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)).double(), None
        y = torch.arange(16) % 3
        closure = lambda: F.cross_entropy(model(x), y)
        found.append(replicates(model, closure, per_layer=per_layer).traces)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_other_hooks_on_saved_tensors():
    with torch.autograd.graph.save_on_cpu():
        assert_same(train(None, "scalar"), train(None, "scalar"))


@pytest.mark.parametrize("form", ["scalar", pytest.param("lean", marks=pytest.mark.slow)])
def test_compiled_checkpoints(form):
    """Penalised steps run them uncompiled: a compiler would hide what is decided inside."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
        called = lambda a: model[2](checkpoint(model[:2], a, use_reentrant=False))
        if compiled:
            called = torch.compile(called, backend="aot_eager")
        penalty = seht.HessianTrace(model, weight=WEIGHT, seed=1)
        closure = lambda: F.cross_entropy(called(x), y)
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        found.append(gradients(model.parameters()))
    torch._dynamo.reset()
    assert_gradients(found[1], found[0], rtol=1e-7)


def test_hugging_face_models():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8, activation_function="relu"
    )
    words = torch.arange(24).view(3, 8) % 11
    found = []
    for kind in (None, True, False):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).train()
        if kind is not None:
            model.gradient_checkpointing_enable({"use_reentrant": kind})
            assert model.is_gradient_checkpointing
        torch.manual_seed(7)
        penalty = seht.HessianTrace(model, weight=WEIGHT, seed=1)
        closure = lambda: model(input_ids=words, labels=words, use_cache=False).loss
        if kind:  # the reentrant kind needs an input with a gradient
            model.enable_input_require_grads()
        penalty(closure).backward()
        found.append(gradients(model.parameters()))
    assert_gradients(found[1], found[0], rtol=1e-5)
    assert_gradients(found[2], found[0], rtol=1e-5)
