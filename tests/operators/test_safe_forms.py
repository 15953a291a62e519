"""The safe forms against PyTorch's fused operators: value, first gradient, running statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seht.operators.safe_forms import SAFE, safe_ops

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def run(module, x, weights):
    """Output, gradients in the input and the parameters, and the buffers afterwards."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    y = module(x)
    (y * weights.to(y.dtype)).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y, "x": x.grad, **gradients, **dict(module.named_buffers())}


def compare(module, x, tolerance, times=1):
    weights = torch.randn(module(x).shape)
    for _ in range(times):
        fused = run(module, x, weights)
        with safe_ops():
            safe = run(module, x, weights)
        assert fused.keys() == safe.keys()
        for name in fused:
            assert type(safe[name]) is type(fused[name])
            assert safe[name].dtype == fused[name].dtype
            scale = float(fused[name].detach().abs().max())
            torch.testing.assert_close(
                safe[name], fused[name], rtol=tolerance, atol=tolerance * max(scale, 1.0)
            )
        module(x)  # move on, so that a cumulative average is met at later steps as well


def randomise(module):
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
    return module


IMAGE, VECTOR, SEQUENCE, VOLUME = (4, 6, 5, 3), (7, 6), (4, 6, 5), (3, 6, 2, 3, 2)
NORMS = {
    "bn1d": (nn.BatchNorm1d(6), VECTOR),
    "bn1d-sequence": (nn.BatchNorm1d(6), SEQUENCE),
    "bn2d": (nn.BatchNorm2d(6), IMAGE),
    "bn3d": (nn.BatchNorm3d(6), VOLUME),
    "bn-plain": (nn.BatchNorm2d(6, affine=False), IMAGE),
    "bn-nostats": (nn.BatchNorm2d(6, track_running_stats=False), IMAGE),
    "bn-momentum": (nn.BatchNorm2d(6, momentum=0.7, eps=0.01), IMAGE),
    "bn-momentum-0": (nn.BatchNorm2d(6, momentum=0.0), IMAGE),
    "bn-cumulative": (nn.BatchNorm2d(6, momentum=None), IMAGE),
    "in1d": (nn.InstanceNorm1d(6), SEQUENCE),
    "in1d-nobatch": (nn.InstanceNorm1d(6, affine=True), (6, 5)),
    "in2d": (nn.InstanceNorm2d(6, affine=True), IMAGE),
    "in2d-stats": (nn.InstanceNorm2d(6, affine=True, track_running_stats=True), IMAGE),
    "in3d-stats": (nn.InstanceNorm3d(6, momentum=0.3, track_running_stats=True), VOLUME),
    "ln": (nn.LayerNorm(5), SEQUENCE),
    "ln-several": (nn.LayerNorm([6, 5, 3], eps=0.01), IMAGE),
    "ln-plain": (nn.LayerNorm(5, elementwise_affine=False), SEQUENCE),
    "ln-nobias": (nn.LayerNorm(5, bias=False), SEQUENCE),
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_equal_the_fused_ones(name, dtype, train):
    module, shape = NORMS[name]
    module = randomise(copy.deepcopy(module)).to(dtype).train(train)
    x = (2 * torch.randn(shape) + 1).to(dtype)
    compare(module, x, DTYPES[dtype], times=3 if dtype == torch.float64 else 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bn2d", "in2d-stats", "ln", "ln-several"])
def test_half_inputs_with_float32_parameters(name, dtype):
    module, shape = NORMS[name]
    x = (2 * torch.randn(shape) + 1).to(dtype)
    compare(randomise(copy.deepcopy(module)), x, DTYPES[dtype])
    with torch.autocast("cpu", torch.bfloat16):
        compare(randomise(copy.deepcopy(module)), x, DTYPES[torch.bfloat16])


@given(shape=st.lists(st.integers(2, 5), min_size=2, max_size=5), offset=st.sampled_from([0, 100]))
def test_norms_of_any_shape(shape, offset):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double() + offset
    functions = [
        lambda mean, var: F.layer_norm(x, shape[1:]),
        lambda mean, var: F.batch_norm(x, mean, var, training=True),
        lambda mean, var: F.batch_norm(x, mean, var),
    ]
    if len(shape) > 2:
        functions.append(lambda mean, var: F.instance_norm(x, mean, var))
    start = torch.arange(1, shape[1] + 1).double()
    for function in functions:
        fused_stats, safe_stats = ((start.clone(), start.clone()) for _ in range(2))
        fused = function(*fused_stats)
        with safe_ops():
            torch.testing.assert_close(function(*safe_stats), fused, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(safe_stats, fused_stats, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_weight_norm(dim, dtype):
    v = torch.randn(3, 4, 5).to(dtype)
    g = torch.rand_like(torch.norm_except_dim(v, 2, dim)) + 0.5

    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Parameter(g)

        def forward(self, v):
            return torch._weight_norm(v, self.g, dim)

    compare(Weight(), v, DTYPES[dtype])


def test_functions_that_take_their_arguments_in_another_order():
    x, w, b = torch.randn(4, 6, 5), torch.rand(6), torch.rand(6)
    calls = [
        lambda s: torch.batch_norm(x, w, b, *s, True, 0.2, 1e-3, True),
        lambda s: torch.batch_norm(x, w, b, *s, training=False, momentum=0.2, eps=1e-3,
                                   cudnn_enabled=False),
        lambda s: torch.instance_norm(x, w, b, *s, True, 0.2, 1e-3, True),
        lambda s: torch.instance_norm(x, w, b, *s, False, 0.2, 1e-3, True),
        lambda s: torch.layer_norm(x, (5,), w[:5], b[:5], 1e-3, True),
        lambda s: F.layer_norm(x, (5,), bias=b[:5], weight=w[:5], eps=1e-3),
        lambda s: F.batch_norm(x, *s, weight=w, bias=b, training=True, eps=1e-3),
    ]  # fmt: skip
    for call in calls:
        fused_stats, safe_stats = ((torch.zeros(6), torch.ones(6)) for _ in range(2))
        plain = call(fused_stats)
        with safe_ops():
            torch.testing.assert_close(call(safe_stats), plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(safe_stats, fused_stats)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_untouched_on_the_cpu(kind):
    rnn, x = kind(3, 4, 2), torch.randn(5, 2, 3)
    plain = rnn(x)[0]
    with safe_ops():
        assert torch.equal(rnn(x)[0], plain)
    assert torch.backends.cudnn.enabled


# --- the mode ---------------------------------------------------------------------------------


def ops_of(tensor):
    """The names of all nodes of the graph behind a tensor."""
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


FUSED = ["NativeLayerNorm", "NativeBatchNorm", "WeightNormInterface", "ScaledDotProduct"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.LayerNorm(4)),
        lambda: nn.Sequential(nn.BatchNorm1d(3)),
        lambda: nn.Sequential(nn.InstanceNorm1d(3)),
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    ],
    ids=["ln", "bn", "in", "weight_norm", "transformer"],
)
def test_no_fused_operator_is_left_in_the_graph(build):
    model, x = build(), torch.randn(2, 3, 4, requires_grad=True)
    fused = ops_of(model(x))
    assert any(name.startswith(tuple(FUSED)) for name in fused)
    with safe_ops():
        safe = ops_of(model(x))
    assert not any(name.startswith(tuple(FUSED)) for name in safe)
    assert ops_of(model(x)) == fused  # the mode ends with the block


def test_the_mode_ends_with_an_error():
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(KeyError), safe_ops():
        raise KeyError
    assert any(name.startswith("NativeLayerNorm") for name in ops_of(F.layer_norm(x, [3])))


def test_nested_blocks():
    x = torch.randn(2, 3, requires_grad=True)
    with safe_ops():
        with safe_ops():
            inner = ops_of(F.layer_norm(x, [3]))
        outer = ops_of(F.layer_norm(x, [3]))
    assert inner == outer
    assert not any(name.startswith("NativeLayerNorm") for name in inner)


def test_further_results_are_those_of_the_kernel():
    """The mean and inverse deviation, without a derivative, and the statistics moved."""
    x = torch.randn(4, 3, requires_grad=True)
    calls = [
        lambda s: torch.native_batch_norm(x, None, None, *s, True, 0.1, 1e-5),
        lambda s: torch.ops.aten.native_batch_norm(x, None, None, *s, False, 0.1, 1e-5),
        lambda s: torch.ops.aten._native_batch_norm_legit_functional(
            x, None, None, *s, True, 0.1, 1e-5
        ),
        lambda s: torch.native_layer_norm(x, [3], None, None, 1e-5),
    ]
    for call in calls:
        fused_stats, safe_stats = ((torch.zeros(3), torch.ones(3)) for _ in range(2))
        plain = call(fused_stats)
        with safe_ops():
            first, *rest = call(safe_stats)
        torch.testing.assert_close(first, plain[0])
        assert len(rest) == len(plain) - 1
        for part, other in zip(rest, plain[1:], strict=True):
            assert torch.equal(part, other) and not part.requires_grad
        assert all(map(torch.equal, safe_stats, fused_stats))
    assert all(callable(replacement) for replacement in SAFE.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.batch_norm(torch.randn(1, 3), None, None, training=True),
        lambda: F.batch_norm(torch.randn(2, 3), None, None, training=False),
        lambda: F.instance_norm(torch.randn(2, 3, 1)),
        lambda: F.layer_norm(torch.randn(2, 3), [4]),
        lambda: F.layer_norm(torch.randn(2, 3), [3], torch.randn(1)),
        lambda: F.batch_norm(torch.randn(4, 3), None, None, torch.randn(1), training=True),
        lambda: F.batch_norm(torch.randn(4, 3), torch.zeros(1), torch.ones(1), training=True),
    ],
    ids=["bn-one", "bn-eval", "in-one", "ln-shape", "ln-weight", "bn-weight", "bn-stats"],
)
def test_what_the_fused_form_refuses_the_safe_form_refuses(call):
    with pytest.raises((ValueError, RuntimeError)):
        call()
    with safe_ops(), pytest.raises((ValueError, RuntimeError)):
        call()
