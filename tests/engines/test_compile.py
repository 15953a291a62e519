"""``torch.compile`` of the model: the eager result, two graphs, no break, no recompilation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import Square
from stepping import FORMS, WEIGHT, Drawn, assert_gradients, gradients, warm_up
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import seht


@pytest.fixture(autouse=True)
def fresh():
    """Compiled code and its counters belong to one test; afterwards nothing compiles any more."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """ReLU, BatchNorm and max-pooling, and something in the middle."""

    def __init__(self, middle=lambda net, h: h):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.head = nn.Linear(16, 6), nn.Linear(6, 3)
        self.middle = middle
        self.double()

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(self.middle(self, F.relu(self.hidden(h.flatten(1)))))


def images(seed=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.arange(5) % 3


def train(model, called, form, *, steps=4, handle=None, mark=False, **options):
    """A few SGD steps; the values and the last gradients."""
    penalty = seht.HessianTrace(
        model if handle is None else handle, weight=WEIGHT, seed=5, **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    put_out = seht.boundary if mark else (lambda z: z)
    values = []
    for k in range(steps):
        x, y = images(k)
        closure = lambda: F.cross_entropy(put_out(called(x)), y)
        optimizer.zero_grad()
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        values.append((penalty.last.loss, penalty.last.trace))
        optimizer.step()
    return torch.tensor(values, dtype=torch.float64), gradients(model.parameters())


def assert_same_training(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-8, atol=1e-10)
    assert_gradients(got[1], expected[1], rtol=1e-7)


def counted(model):
    backend = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=backend), backend


slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("form", "handle"),
    [
        ("scalar", "model"),
        ("lean", "compiled"),
        slow("scalar", "compiled"),
        slow("lean", "model"),
    ],
)
@pytest.mark.supports("`torch.compile`", engine="{form}")
def test_the_eager_result_from_two_graphs(form, handle):
    model = Net()
    eager = copy.deepcopy(model)
    expected = train(eager, eager, form)
    compiled, backend = counted(model)
    got = train(model, compiled, form, handle=compiled if handle == "compiled" else None)
    assert_same_training(got, expected)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-12)
    assert backend.frame_count == 2  # it records and it replays, over all four steps
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_plain_steps_have_a_third_graph(form):
    model = Net()
    eager = copy.deepcopy(model)
    losses = []
    compiled, backend = counted(model)
    for module, called in ((eager, eager), (model, compiled)):
        penalty = seht.HessianTrace(module, weight=WEIGHT, seed=5, every=2)
        run = penalty.backward if form == "lean" else penalty
        for k in range(4):
            x, y = images(k)
            run(lambda: F.cross_entropy(called(x), y))
            losses.append(penalty.last.loss)
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-9)
    assert backend.frame_count == 3 and not counters["graph_break"]


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("scalar", "boundary"),
        slow("lean", "compiled"),
        slow("scalar", "compiled"),
        slow("lean", "boundary"),
    ],
)
def test_the_gauss_newton_trace(form, way):
    model = Net()
    eager = copy.deepcopy(model)
    expected = train(eager, eager, form, curvature="ggn")
    compiled, backend = counted(model)
    handle, mark = (compiled, False) if way == "compiled" else (model, True)
    got = train(model, compiled, form, curvature="ggn", handle=handle, mark=mark)
    assert_same_training(got, expected)
    assert backend.frame_count == 2 and not counters["graph_break"]


@pytest.mark.slow
def test_several_probes_and_few_layers():
    for options in ({"probes": 2}, {"estimator": Drawn(-1)}, {"estimator": Drawn(1, 2)}):
        torch._dynamo.reset()
        model = Net()
        eager = copy.deepcopy(model)
        expected = train(eager, eager, "scalar", **options)
        compiled, backend = counted(model)
        assert_same_training(train(model, compiled, "scalar", **options), expected)
        assert backend.frame_count == 2


@pytest.mark.slow
def test_a_compiled_body_with_an_eager_head():
    """Few layers are drawn behind the compiled part, which is computed anew all the same."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(6, 3)).double()
    eager = copy.deepcopy(model)
    expected = train(eager, eager, "scalar", estimator=Drawn(-1))
    compiled = torch.compile(model[0], backend="aot_eager")
    called = lambda x: model[2](model[1](compiled(x)))
    assert_same_training(train(model, called, "scalar", estimator=Drawn(-1)), expected)


# --- what is constant inside ----------------------------------------------------------------------


def under_no_grad(net, h):
    with torch.no_grad():
        size = h.std()
    return h / size


MIDDLES = {
    "no_grad": under_no_grad,
    "detach": lambda net, h: h * h.detach().sigmoid(),
    "detached weight": lambda net, h: h + F.linear(h[:, :3], net.head.weight.detach().t()),
    "comparison": lambda net, h: torch.where(h > 0.1, h.sin(), h),
    "maximum": lambda net, h: h - h.max(1, keepdim=True).values.square(),
    "custom function": lambda net, h: Square.apply(h),
    "graph break": lambda net, h: h / h.std().item(),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [("no_grad", "scalar"), *(slow(name, form) for name in MIDDLES for form in FORMS)],
)
def test_constants_and_decisions_are_traced(name, form):
    model = Net(MIDDLES[name])
    eager = copy.deepcopy(model)
    expected = train(eager, eager, form, steps=3)
    compiled = torch.compile(model, backend="aot_eager")
    assert_same_training(train(model, compiled, form, steps=3), expected)


def test_a_module_that_is_not_compiled_after_all():
    """``nn.Sequential.compile`` does nothing; our handlers must not be compiled in its place."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    eager = copy.deepcopy(model)
    expected = train(eager, eager, "scalar", steps=2)
    backend = CompileCounterWithBackend("aot_eager")
    model.compile(backend=backend)
    assert_same_training(train(model, model, "scalar", steps=2), expected)
    assert backend.frame_count == 0


def test_what_lies_outside_the_compiled_part_is_watched():
    """As far as compiled code lets us look: before it."""
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    (x, y), factors = images(), [1.0]

    def closure():
        factors.append(factors[-1] + 0.1)
        return F.cross_entropy(compiled(x * factors[-1]), y)

    with pytest.raises(seht.UnrepeatableError, match="mul was given another argument"):
        seht.HessianTrace(model, weight=WEIGHT)(closure)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.supports("`torch.compile`", engine="autograd", cell="refused")
def test_nested_autograd_says_that_it_cannot(how):
    model = Net()
    if how == "wrapped":
        handle = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
        handle = model
    x, y = images()
    with pytest.raises(RuntimeError, match="engine='difference'"):
        seht.HessianTrace(handle, weight=WEIGHT, engine="autograd")(
            lambda: F.cross_entropy(handle(x), y)
        )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_inductor(form):
    model = Net()
    eager = copy.deepcopy(model)
    expected = train(eager, eager, form)
    compiled = torch.compile(model)
    got = train(model, compiled, form)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-8)
    assert_gradients(got[1], expected[1], rtol=1e-5)


@pytest.mark.slow
def test_inductor_replays_its_dropout_masks():
    model = Net(lambda net, h: F.dropout(h, 0.5))
    compiled = torch.compile(model)
    penalty = seht.HessianTrace(model, weight=WEIGHT, seed=5)
    x, y = images()
    for _ in range(2):
        warm_up(penalty)
        torch.manual_seed(6)
        penalty(lambda: F.cross_entropy(compiled(x), y)).backward()
    assert abs(penalty.last.trace) < 1e4  # with another mask in each pass it would be of order 1/e


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_dropout_behind_images_with_their_channels_last(form):
    """The two graphs draw the same mask: what is replayed in the second lies as in the first.
    Against nested autograd, uncompiled.
    """

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(16, 3)
            self.double()

        def forward(self, x):
            h = F.dropout(F.max_pool2d(F.relu(self.conv(x)), 2), 0.3)
            return self.head(h.flatten(1))

    x, y = images()
    x = x.to(memory_format=torch.channels_last)
    found = []
    for compiling in (False, True):
        model = Pooled()
        called = torch.compile(model, backend="aot_eager") if compiling else model
        engine = "difference" if compiling else "autograd"
        penalty = seht.HessianTrace(model, weight=WEIGHT, seed=5, engine=engine)
        closure = lambda called=called: F.cross_entropy(called(x), y)
        torch.manual_seed(7)
        penalty.backward(closure) if form == "lean" else penalty(closure).backward()
        found.append((penalty.last.loss, penalty.last.trace, gradients(model.parameters())))
    (loss, trace, wanted), got = found
    assert got[:2] == pytest.approx((loss, trace), rel=1e-5)
    assert_gradients(got[2], wanted)


def test_batches_of_two_sizes_in_the_scalar_form():
    """The second size makes PyTorch compile for any size: such code gives up its buffers, and would
    refuse a second gradient of a graph.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    eager, x, y = copy.deepcopy(model), torch.randn(7, 4).double(), torch.arange(7) % 3
    compiled, found = torch.compile(model, backend="aot_eager"), []
    for called, own in ((compiled, model), (eager, eager)):
        penalty = seht.HessianTrace(own, weight=WEIGHT, curvature="ggn", seed=0)
        for n in (7, 5):
            own.zero_grad()
            penalty(lambda n=n, net=called: F.cross_entropy(net(x[:n]), y[:n])).backward()
        found.append(gradients(own.parameters()))
    assert_gradients(found[0], found[1], rtol=1e-7)
