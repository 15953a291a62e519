"""Penalised steps beside low precision: in float32 by default, or the user's own, and never mixed.

Truth is the same step without any of it; for ``precision="native"``, nested autograd in float64.
"""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers import Snapshot, every_engine
from stepping import FORMS, WEIGHT, assert_gradients, gradients, mlp, rows
from torch import nn
from torch.overrides import TorchFunctionMode

import seht
from seht.engines import ENGINES
from seht.engines.tf32 import shortened, unshortened

HALVES = [torch.bfloat16, torch.float16]
every_form = pytest.mark.parametrize("form", FORMS)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
every_curvature = pytest.mark.parametrize("curvature", ["hessian", "ggn"])


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5),
    )  # fmt: skip


def images(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 3, 8, 8, generator=generator).to(dtype), torch.arange(16) % 5


def autocast(where, there, dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype) if where == there else nullcontext()


def closure_of(model, where=None, dtype=torch.bfloat16, called=None, x=None):
    x, y = (images(next(model.parameters()).dtype)[0] if x is None else x), images()[1]

    def closure():
        with autocast(where, "inner", dtype):
            return F.cross_entropy((model if called is None else called)(x), y)

    return closure


def step(model, closure, form, where=None, dtype=torch.bfloat16, inside=False, **options):
    """One penalised step with autocast around it, inside its closure or nowhere."""
    penalty = seht.HessianTrace(model, **{"weight": WEIGHT, "seed": 1, **options})
    with autocast(where, "outer", dtype):
        if form == "lean":
            penalty.backward(closure)
            return penalty
        loss = penalty(closure)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return penalty


def one(where=None, form="scalar", **options):
    model = net()
    penalty = step(model, closure_of(model, where), form, where, **options)
    return penalty.last, gradients(model.parameters()), model


# --- float32 by default -----------------------------------------------------------------------


@pytest.mark.supports("autocast")
@every_engine
@every_curvature
@every_form
@pytest.mark.parametrize("where", ["outer", "inner"])
def test_autocast_is_off_in_penalised_steps(engine, curvature, form, where):
    options = {"engine": engine, "curvature": curvature}
    expected, wanted, model = one(form=form, **options)
    last, got, other = one(where, form, **options)
    assert (last.loss, last.trace, last.error) == (expected.loss, expected.trace, expected.error)
    # The scalar form sums in another order under autocast.
    assert_gradients(got, wanted, rtol=0 if form == "lean" else 3e-3)
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)


@every_curvature
def test_a_backward_under_autocast(curvature):
    """PyTorch would round the centre's gradient, and the penalty's weighs it in the thousands."""
    _, wanted, _ = one("outer", curvature=curvature)
    _, got, _ = one("outer", inside=True, curvature=curvature)
    assert_gradients(got, wanted, rtol=0)


def test_the_nested_engine_is_off_by_rounding_under_an_autocast_backward():
    _, wanted, _ = one("outer", engine="autograd")
    _, got, _ = one("outer", inside=True, engine="autograd")
    assert_gradients(got, wanted, rtol=0.02)


class Types(TorchFunctionMode):
    """What linear layers put out."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.seen.add(out.dtype)
        return out


@every_engine
@pytest.mark.parametrize("where", ["outer", "inner"])
def test_plain_steps_keep_the_users_autocast(engine, where):
    model = net()
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine, warmup=1)
    closure = closure_of(model, where)
    for expected in (torch.bfloat16, torch.float32, torch.float32):
        with Types() as types, autocast(where, "outer"):
            penalty(closure)
            assert torch.is_autocast_enabled("cpu") == (where == "outer")
        assert types.seen == {expected}
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast.__enter__.__module__ == "torch.amp.autocast_mode"


def test_what_the_closure_asks_about_autocast():
    """Models cast by hand where they find it on."""
    model, seen = net(), set()
    x, y = images()

    def closure():
        with torch.autocast("cpu", torch.bfloat16):
            seen.add(torch.is_autocast_enabled("cpu"))
            with torch.autocast("cpu", enabled=False):
                h = model[:7](x)
            seen.add(torch.is_autocast_enabled("cpu"))
            return F.cross_entropy(model[7:](h), y)

    seht.HessianTrace(model, weight=WEIGHT)(closure)
    assert seen == {False}


def test_the_trace_of_another_closure():
    model = net()
    loss = seht.HessianTrace(model, weight=WEIGHT, seed=1)
    value = loss(closure_of(model, "inner"), on=closure_of(model, "inner"))
    value.backward()
    expected = one()[0]
    assert loss.last.trace == expected.trace
    assert loss.last.loss != expected.loss  # that one is the user's own


def test_exact_trace_is_exact_under_autocast():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = seht.exact_trace(model, lambda: model(x).square().mean())
    with torch.autocast("cpu", torch.bfloat16):
        got = seht.exact_trace(model, lambda: model(x).square().mean())
    assert torch.equal(got, expected)


def test_an_unknown_precision():
    with pytest.raises(ValueError, match="did you mean 'native'"):
        seht.HessianTrace(net(), weight=1, precision="nativ")


# --- TF32 -------------------------------------------------------------------------------------


def flags():
    found = [torch._C._get_fp32_precision_getter(b, o) for b, o in PLACES]
    try:
        return [
            *found,
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        ]
    except RuntimeError:  # PyTorch's two ways were mixed
        return found


PLACES = [(b, o) for b in ("cuda", "mkldnn") for o in ("matmul", "conv", "rnn")]


@pytest.fixture
def tf32():
    """Settings are the process's."""
    yield
    for place in PLACES:
        torch._C._set_fp32_precision_setter(*place, "ieee")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def new_way():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


WAYS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn off": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "cublas": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "new": new_way,
}


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="one way only")
@every_engine
@pytest.mark.parametrize("way", WAYS)
def test_tf32_is_off_around_the_passes(tf32, engine, way):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    WAYS[way]()
    before, seen = flags(), []

    def closure(fail=False):
        seen.append(shortened({"cpu", "cuda"}))
        if fail:
            raise ArithmeticError
        return F.cross_entropy(model(x), y)

    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine)
    penalty(closure).backward()
    assert flags() == before
    with pytest.raises(ArithmeticError):
        penalty(lambda: closure(fail=True))
    assert flags() == before
    assert set(seen) == {None}


class Flagged(torch.autograd.Function):
    """Notes in which surroundings it is differentiated."""

    seen: list[object]

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        Flagged.seen.append(shortened({"cpu"}))
        return g


@every_curvature
def test_shortened_products_do_not_reach_the_users_backward(tf32, curvature):
    """On the CPU, "medium" stands for bfloat16, where the machine has it."""

    def train():
        Flagged.seen = []
        model = net()
        closure = lambda: F.cross_entropy(Flagged.apply(model(images()[0])), images()[1])
        loss = seht.HessianTrace(model, weight=WEIGHT, seed=1, curvature=curvature)(closure)
        inside = len(Flagged.seen)
        loss.backward()
        assert len(Flagged.seen) == inside + 1
        return gradients(model.parameters())

    wanted = train()
    torch.set_float32_matmul_precision("medium")
    got = train()
    assert set(Flagged.seen) == {None}
    assert_gradients(got, wanted, rtol=3e-3)
    with unshortened():
        assert shortened({"cpu", "cuda"}) is None


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_tf32_on_a_card(form, curvature, tf32):
    found = []
    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
        model = net().cuda()
        x, y = (t.cuda() for t in images())
        penalty = seht.HessianTrace(model, weight=WEIGHT, seed=1, curvature=curvature)
        closure = lambda: F.cross_entropy(model(x), y)
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        found.append(gradients(model.parameters()))
    assert_gradients(found[1], found[0], rtol=5e-3)


# --- the user's own precision ------------------------------------------------------------------

# The relative error of the gradient that must hold, by type and curvature: what the trials of
# this network gave at most, rounded up.
NATIVE = {
    (torch.float16, "hessian"): 0.2,
    (torch.float16, "ggn"): 0.15,
    (torch.bfloat16, "hessian"): 0.7,
    (torch.bfloat16, "ggn"): 0.5,
}


def flat(trace, model):
    parts = torch.autograd.grad(trace, list(model.parameters()), allow_unused=True)
    zeros = (torch.zeros_like(p) for p in model.parameters())
    pairs = zip(parts, zeros, strict=True)
    return torch.cat([(z if g is None else g).flatten().double() for g, z in pairs])


@pytest.mark.supports('`precision="native"`', engine="difference")
@every_half
@every_curvature
@pytest.mark.parametrize("where", ["outer", pytest.param("inner", marks=pytest.mark.slow)])
def test_native_precision_has_a_step_of_its_own(dtype, curvature, where):
    model = net()
    exact = copy.deepcopy(model).double()
    options = {"curvature": curvature, "seed": 1}
    truth = flat(seht.hessian_trace(exact, closure_of(exact), engine="autograd", **options), exact)
    closure = closure_of(model, where, dtype)
    with Types() as types, autocast(where, "outer", dtype):
        ours = seht.hessian_trace(model, closure, precision="native", **options)
    assert types.seen == {dtype}
    found = flat(ours, model)
    assert (found - truth).norm() / truth.norm() < NATIVE[dtype, curvature]
    assert torch.cosine_similarity(found, truth, 0) > (0.98 if dtype == torch.float16 else 0.8)
    # ... which is what it is worth: at the step of float32 there is nothing but noise
    with autocast(where, "outer", dtype):
        small = seht.hessian_trace(model, closure, precision="native", kappa=1e-3, **options)
    assert (flat(small, model) - truth).norm() > 3 * (found - truth).norm()


@every_half
@every_curvature
def test_the_forms_agree_in_native_precision(dtype, curvature):
    found = [
        one(w, form, dtype=dtype, precision="native", curvature=curvature)
        for form in FORMS
        for w in ("outer",)
    ]
    (last, got, _), (expected, wanted, _) = found
    assert last.trace == expected.trace and last.error == expected.error
    assert_gradients(got, wanted, rtol=1e-5)


@every_half
def test_the_stated_error_tells_what_native_precision_costs(dtype):
    last = one("outer", dtype=dtype, precision="native")[0]
    assert last.error > 10 * one()[0].error
    assert last.error < NATIVE[dtype, "hessian"]


def test_autocasts_own_copies_of_the_weights_are_dropped():
    """It keeps them while it is on, and would show the centre's weights to every pass."""
    model = net()
    closure = closure_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(images()[0]), images()[1])  # fills them
        before = model(images()[0])
        penalty = seht.HessianTrace(model.eval(), weight=WEIGHT, precision="native")
        before = model(images()[0])
        penalty(closure)
        assert torch.equal(model(images()[0]), before)  # not those of a perturbed pass
    assert abs(penalty.last.trace) > 0.1


def test_the_step_starts_again_when_the_precision_changes():
    model = net()
    penalty = seht.HessianTrace(model, weight=WEIGHT, precision="native")
    closure = closure_of(model)
    kappas = []
    for dtype in (None, torch.float16, None):
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            penalty(closure)
        kappas.append(penalty.state_dict()["engine"]["kappa"])
    assert kappas[1] > 3 * max(kappas[0], kappas[2])
    other = seht.HessianTrace(model, weight=WEIGHT, precision="native")
    other.load_state_dict(penalty.state_dict())
    assert other.state_dict() == penalty.state_dict()


def test_a_loss_in_half_precision():
    """``(1 - 2 weight / e^2)`` times a gradient has no room for 8 bits."""
    model = net()
    x = images()[0]
    with torch.autocast("cpu", torch.bfloat16):
        closure = lambda: model(x).square().mean()
        assert closure().dtype == torch.bfloat16
    found = []
    for form in FORMS:
        model = net()
        penalty = step(model, lambda: model(x).square().mean(), form, "outer", precision="native")
        assert penalty.last.error < 1
        found.append(gradients(model.parameters()))
    assert_gradients(found[0], found[1], rtol=2e-3)


# --- weights in half precision -----------------------------------------------------------------


def half_step(dtype, form, wide=False, **options):
    """One step of a network in half precision, or of the same numbers in float32."""
    model, x = net().to(dtype), images(dtype)[0]
    model, x = (model.float(), x.float()) if wide else (model, x)
    penalty = step(model, closure_of(model, x=x), form, **options)
    return penalty.last, gradients(model.parameters()), model


@pytest.mark.supports("weights in bfloat16 or float16")
@pytest.mark.parametrize(
    ("engine", "dtype", "curvature", "form"),
    [
        ("difference", torch.bfloat16, "hessian", "scalar"),
        ("difference", torch.float16, "ggn", "scalar"),
        ("difference", torch.bfloat16, "ggn", "lean"),
        ("difference", torch.float16, "hessian", "lean"),
        ("autograd", torch.bfloat16, "hessian", "scalar"),
        ("autograd", torch.float16, "ggn", "lean"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(ENGINES, HALVES, ["hessian", "ggn"], FORMS)
        ),
    ],
)
def test_weights_in_half_precision_have_float32_copies(engine, dtype, curvature, form):
    options = {"engine": engine, "curvature": curvature}
    expected, wanted, wide = half_step(dtype, form, wide=True, **options)
    last, got, model = half_step(dtype, form, **options)
    assert (last.loss, last.trace) == (expected.loss, expected.trace)
    assert all(g.dtype == dtype for g in got)
    assert_gradients([g.float() for g in got], wanted, rtol=max(4e-3, torch.finfo(dtype).eps))
    for a, b in zip(model.buffers(), wide.buffers(), strict=True):
        assert torch.equal(a, b.to(a.dtype))
    assert all(p.dtype == dtype for p in model.parameters())


def test_a_failure_leaves_the_half_precision_weights():
    model = net().bfloat16()
    parameters, calls = list(model.parameters()), []
    before = Snapshot(model)

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError
        return closure_of(model)()

    with pytest.raises(ArithmeticError):
        seht.HessianTrace(model, weight=WEIGHT)(closure)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    before.assert_same(Snapshot(model))


def test_half_precision_weights_reached_past_their_module():
    model = net().bfloat16()
    weight, (x, y) = model[9].weight, images(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"'9\.weight'.*past its module"):
        seht.HessianTrace(model, weight=WEIGHT)(
            lambda: F.cross_entropy(F.linear(model[:9](x), weight), y)
        )


def test_aux_of_half_precision_weights():
    model, (x, y) = net().bfloat16(), images(torch.bfloat16)
    penalty = seht.HessianTrace(model, weight=WEIGHT)
    loss, aux = penalty(lambda: (lambda z: (F.cross_entropy(z, y), {"logits": z}))(model(x)))
    assert aux["logits"].detach().shape == (16, 5)
    with pytest.raises(RuntimeError, match="add the term to the closure's loss"):
        (loss + aux["logits"].sum()).backward()


def test_recurrent_weights_in_half_precision():
    """They keep a list of their own weights."""
    found = []
    for wide in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"body": nn.LSTM(3, 4), "head": nn.Linear(4, 2)}).bfloat16()
        x = torch.randn(5, 6, 3).bfloat16()
        if wide:
            model, x = model.float(), x.float()
        y = torch.arange(6) % 2
        closure = lambda: F.cross_entropy(model["head"](model["body"](x)[0][-1]), y)
        step(model, closure, "scalar")
        found.append(gradients(model.parameters()))
    assert_gradients([g.float() for g in found[1]], found[0], rtol=0.01)


def test_casts_by_hand_are_left_out_with_half_precision_weights():
    found = []
    for wide in (True, False):
        model = net().bfloat16()
        x, y = images(torch.bfloat16)
        if wide:
            model, x = model.float(), x.float()
            closure = lambda: F.cross_entropy(model(x) + 1, y)
        else:
            ones = lambda: torch.ones(5, dtype=torch.bfloat16)
            closure = lambda: F.cross_entropy(
                model(x.float().to(torch.bfloat16)).to(dtype=torch.bfloat16).bfloat16() + ones(), y
            )
        found.append(step(model, closure, "scalar").last.trace)
    assert found[0] == found[1]


# --- GradScaler, clipping, memory format, compilation --------------------------------------------


@pytest.mark.supports("`GradScaler` and gradient clipping", engine="{form}")
@every_form
@pytest.mark.parametrize("native", [False, True])
def test_a_grad_scaler_with_clipping(form, native):
    """Powers of two are exact, through unscale_ and clip_grad_norm_."""
    options = {"precision": "native"} if native else {}
    found = []
    for scale in (None, 2.0**16):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        penalty = seht.HessianTrace(model, weight=WEIGHT, seed=1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        closure = closure_of(model, "inner", torch.float16)
        if form == "lean":
            penalty.backward(closure, scaler=scaler)
        else:
            scaler.scale(penalty(closure)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        scaler.step(optimizer)
        scaler.update()
        found.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@every_form
def test_steps_on_which_the_scaler_finds_infinities(form):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-111)
    entropy = closure_of(model, "inner", torch.float16)
    closure = lambda: 100 * entropy()
    for skipped in (True, False):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        if form == "lean":
            penalty.backward(closure, scaler=scaler)
        else:
            scaler.scale(penalty(closure)).backward()
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) if skipped else not any(same)
        assert all(p.isfinite().all() for p in model.parameters())
    assert scaler.get_scale() == 2.0**16


@pytest.mark.supports("`channels_last`")
@every_engine
@every_form
def test_channels_last(engine, form):
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = net().double().to(memory_format=layout)
        x, y = images(torch.float64)
        x = x.to(memory_format=layout)
        step(model, lambda: F.cross_entropy(model(x), y), form, engine=engine)
        assert model[4].weight.is_contiguous(memory_format=layout)
        found.append(gradients(model.parameters()))
    assert_gradients(found[1], found[0], rtol=1e-5)


slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def rows_of(model, where=None, called=None):
    x, y = rows(dtype=next(model.parameters()).dtype)

    def closure():
        with autocast(where, "inner"):
            return F.cross_entropy(called(x), y)

    return closure


@pytest.mark.parametrize(
    ("form", "where", "precision"),
    [
        ("scalar", "inner", "full"),
        *(slow(f, w, p) for f in FORMS for w in ("outer", "inner") for p in ("full", "native")),
    ],
)
def test_compiled_code_under_autocast(form, where, precision):
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = mlp(dtype=torch.float32, norm=False)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        closure = rows_of(model, where, called=called)
        step(model, closure, form, where, precision=precision)
        found.append(gradients(model.parameters()))
    torch._dynamo.reset()
    assert_gradients(found[1], found[0], rtol=1e-5)


class Casting(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.net, self.dtype = mlp(dtype=torch.float32, norm=False), dtype

    def forward(self, x):
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return self.net(x)


@pytest.mark.parametrize("precision", ["full", slow("native")])
def test_autocast_inside_compiled_code(precision):
    torch._dynamo.reset()
    found = []
    for dtype, compiled in ((None if precision == "full" else torch.bfloat16, False),
                            (torch.bfloat16, True)):  # fmt: skip
        model = Casting(dtype)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        step(model, rows_of(model, called=called), "scalar", precision=precision)
        found.append(gradients(model.parameters()))
    torch._dynamo.reset()
    assert_gradients(found[1], found[0], rtol=1e-5)


@pytest.mark.slow
def test_half_precision_weights_in_compiled_code():
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = mlp(dtype=torch.float32, norm=False).bfloat16()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        step(model, rows_of(model, called=called), "scalar")
        found.append([g.float() for g in gradients(model.parameters())])
    torch._dynamo.reset()
    assert_gradients(found[1], found[0], rtol=1e-5)
