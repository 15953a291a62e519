"""Low precision together with what users put around a step: scalers, formats, compilation."""

import pytest
import torch
import torch.nn.functional as F
from helpers import every_engine
from lowprecision import (
    autocast,
    closure_of,
    every_curvature,
    every_form,
    every_half,
    images,
    net,
    step,
)
from stepping import FORMS, WEIGHT, assert_gradients, gradients, mlp, rows
from torch import nn

import seht


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@every_half
@every_curvature
@every_form
def test_a_mixed_precision_loop(form, curvature, dtype, device):
    """As ``docs/precision.md`` prints it: two steps, the first of them plain, against the same in
    float32. The plain one is off by the rounding of the user's own precision.
    """
    found = []
    for mixed in (False, True):
        model = net().to(device)
        x, y = (t.to(device) for t in images())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler(device, enabled=mixed)
        penalty = seht.HessianTrace(model, weight=WEIGHT, seed=1, curvature=curvature, warmup=1)
        closure = lambda: F.cross_entropy(model(x), y)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast(device, dtype, enabled=mixed):
                if form == "lean":
                    penalty.backward(closure, scaler=scaler)
                else:
                    loss = penalty(closure)
            if form != "lean":
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0**16 if mixed else 1.0)
        assert penalty.last.trace is not None and penalty.last.error < 0.02
        found.append(gradients(model.parameters()))
    assert_gradients(found[1], found[0], rtol=0.02)


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
        x = x.bfloat16() if self.dtype is not None else x.bfloat16().float()
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
