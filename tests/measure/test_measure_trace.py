"""The trace over a data set: right, with an honest error, whatever the data looks like."""

import copy
import gc
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from curved_problems import data, exact_hessian, loss_fn, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht
from seht import measure
from seht.lab.models import GPT

CURVATURES = ("hessian", "ggn")


def truth(model, batch, curvature="hessian"):
    if curvature == "hessian":
        return float(seht.exact_trace(model, lambda: loss_fn(model, batch)))
    found = measure.eigenvalues(model, loss_fn, batch, largest=999, smallest=0, curvature="ggn")
    return sum(found.largest)


@pytest.fixture(scope="module")
def problem():
    return network(), data()


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "curvature", "micro_batch"),
    [
        ("per-sample", "hessian", 24),
        pytest.param("per-sample", "ggn", None, marks=slow),
        ("shared", "hessian", None),
        pytest.param("per-sample", "hessian", 6, marks=slow),
        pytest.param("per-sample", "ggn", 6, marks=slow),
        pytest.param("shared", "hessian", 6, marks=slow),
        pytest.param("shared", "ggn", 6, marks=slow),
    ],
)
def test_the_error_is_honest(problem, method, curvature, micro_batch):
    """Over 200 repetitions the 95 % interval holds the truth in 90 to 99 % of them."""
    model, batch = problem
    exact = truth(model, batch, curvature)
    inside, estimates = 0, []
    for seed in range(200):
        result = measure.trace(
            model, loss_fn, batch, seed=seed, curvature=curvature, micro_batch=micro_batch,
            method=method,
        )  # fmt: skip
        low, high = result.interval()
        inside += low <= exact <= high
        estimates.append(result.estimate)
    assert 0.90 <= inside / 200 <= 0.99
    assert result.method == method
    spread = torch.tensor(estimates).std() / math.sqrt(200)
    assert abs(sum(estimates) / 200 - exact) < 4 * spread


@slow
@pytest.mark.parametrize("curvature", CURVATURES)
def test_to_a_tolerance(problem, curvature):
    """Stopping must not make the error look smaller than it is."""
    model, batch = problem
    exact = truth(model, batch, curvature)
    inside = 0
    for seed in range(60):
        result = measure.trace(
            model, loss_fn, batch, tol=0.1, seed=seed, micro_batch=12, curvature=curvature
        )
        assert result.reached and result.relative <= 0.1 and result.dof >= 8
        low, high = result.interval()
        inside += low <= exact <= high
    assert inside >= 51  # 57 expected


def test_a_tolerance_out_of_reach_is_told(monkeypatch):
    """Linear in each layer: the Hessian has no diagonal, the trace is 0 and every probe noise."""
    monkeypatch.setattr(sys.modules["seht.measure.trace"], "_MOST_PROBES", 60)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False)).double()
    result = measure.trace(model, lambda m, x: m(x).mean(), torch.randn(4, 3).double(), tol=0.1)
    assert result.reached is False and "tolerance was not reached" in result.notes[0]
    assert "tolerance was not reached" in str(result)
    assert result.probes == 60 and abs(result.estimate) < 4 * result.stderr


@pytest.mark.parametrize("curvature", CURVATURES)
def test_layers(problem, curvature):
    model, batch = problem
    result = measure.trace(
        model, loss_fn, batch, tol=0.08, per_layer=True, micro_batch=12, curvature=curvature
    )
    assert list(result.layers) == ["0.weight", "2.weight"]
    assert sum(layer.estimate for layer in result.layers.values()) == pytest.approx(
        result.estimate, rel=1e-3
    )
    if curvature == "hessian":
        diagonal = exact_hessian(model, batch).diagonal()
        for layer, exact in zip(result.layers.values(), diagonal.split([40, 24]), strict=True):
            assert abs(layer.estimate - float(exact.sum())) < 4 * layer.stderr
    assert result.layers["0.weight"].weights == 40
    norms = [layer.weight_norm for layer in result.layers.values()]
    assert math.hypot(*norms) == pytest.approx(result.weight_norm)


def test_the_interval_of_a_layer_holds_its_trace(problem):
    """With two probes twice the error would hold some 7 of 10; bounds: 4 sigma of 100 draws."""
    model, batch = problem
    exact = exact_hessian(model, batch).diagonal().split([40, 24])
    inside = [0, 0]
    for seed in range(100):
        layers = measure.trace(
            model, loss_fn, batch, probes=2, per_layer=True, method="shared", seed=seed
        ).layers
        for i, layer in enumerate(layers.values()):
            low, high = layer.interval()
            inside[i] += low <= float(exact[i].sum()) <= high
            assert layer.dof == 1
    assert min(inside) >= 86


def test_the_same_number_however_the_data_comes():
    """The mean over examples: one batch, a loader with a short last batch, a data set."""
    model, (x, y) = network(nn.Tanh), data()
    exact = truth(model, (x, y))
    forms = [
        (x, y),
        TensorDataset(x, y),
        DataLoader(TensorDataset(x, y), batch_size=20),
        [(x[:20], y[:20]), (x[20:], y[20:])],
        ((x[i:i + 20], y[i:i + 20]) for i in (0, 20, 40)),
        DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True),
    ]  # fmt: skip
    for form in forms:
        result = measure.trace(model, loss_fn, form, tol=0.08)
        assert result.samples == 48 and not result.partial
        assert abs(result.estimate - exact) < 4 * result.stderr
        assert result.loss == pytest.approx(loss_fn(model, (x, y)).item())


def test_dictionaries_and_tuples_and_aux():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network(nn.Tanh)

        def forward(self, batch):
            return {"logits": self.body(batch["x"])}, "state"

    def loss(model, batch):
        out, state = model(batch)
        return F.cross_entropy(out["logits"], batch["y"]), state

    x, y = data()
    model = Model()
    exact = truth(model.body, (x, y))
    result = measure.trace(model, loss, {"x": x, "y": y}, tol=0.1)
    assert abs(result.estimate - exact) < 4 * result.stderr


def test_a_part_of_the_data_has_a_sampling_error_beside():
    model, (x, y) = network(nn.Tanh), data(400)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    whole = truth(model, (x, y))
    part = measure.trace(model, loss_fn, TensorDataset(x, y), limit=100, micro_batch=10, probes=40)
    assert part.samples == 100 and part.partial and part.sampling_stderr > 0
    assert abs(part.estimate - truth(model, (x[:100], y[:100]))) < 4 * part.stderr
    assert abs(part.estimate - whole) < 4 * math.hypot(part.stderr, part.sampling_stderr)
    everything = measure.trace(model, loss_fn, TensorDataset(x, y), micro_batch=100)
    assert everything.sampling_stderr is None and not everything.partial


def test_one_replicate_has_no_error(problem):
    result = measure.trace(problem[0], loss_fn, problem[1], probes=1)
    assert math.isnan(result.stderr) and all(map(math.isnan, result.interval()))
    assert result.as_dict()["stderr"] is None
    with pytest.raises(ValueError, match="one replicate has none"):
        measure.trace(problem[0], loss_fn, problem[1], probes=1, tol=0.1)


def test_the_result_is_a_function_of_the_seed(problem):
    model, batch = problem
    runs = [measure.trace(model, loss_fn, batch, seed=seed).estimate for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_progress(problem, capsys):
    seen = []
    measure.trace(problem[0], loss_fn, problem[1], micro_batch=12, progress=seen.append)
    assert [p.done for p in seen] == [1, 2, 3, 4] and seen[-1].estimate is not None
    measure.trace(problem[0], loss_fn, problem[1], progress=True)
    assert "trace 1" in capsys.readouterr().err
    with pytest.raises(TypeError, match="progress must be"):
        measure.trace(problem[0], loss_fn, problem[1], progress=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tol": 0}, "tol must be a positive finite number"),
        ({"tol": math.nan}, "tol must be a positive finite number"),
        ({"probes": 0}, "probes must be at least 1"),
        ({"curvature": "hesian"}, "did you mean 'hessian'"),
        ({"method": "share"}, "did you mean 'shared'"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"params": "3.weight"}, "no parameter of the model matches"),
    ],
)
def test_mistakes_are_named(problem, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        measure.trace(problem[0], loss_fn, problem[1], **options)


def test_the_example_of_the_documentation_runs(capsys):
    text = (Path(__file__).parents[2] / "docs" / "measure.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(code, names)
    assert names["result"].reached and "tr(H) = " in capsys.readouterr().out


def test_float32_is_right_where_losses_round(problem):
    """A GPT at its start: a loss of 4, a trace of 30, weights of 0.02."""
    torch.manual_seed(0)
    model = GPT(vocabulary=32, context=8, width=16, layers=1, heads=2)
    tokens = torch.randint(32, (9, 24))

    def loss(model, batch):
        z, _ = model(batch[0])
        return F.cross_entropy(z.flatten(0, 1), batch[1].flatten())

    batch = (tokens[:-1], tokens[1:])
    single = measure.trace(model, loss, batch, batch_dim=1)
    wide = measure.trace(copy.deepcopy(model).double(), loss, batch, batch_dim=1)
    assert single.method == "per-sample" and single.samples == 24
    assert single.estimate == pytest.approx(wide.estimate, rel=0.01)  # the same probes
    assert single.step_error < 0.01


def test_coupled_examples_share_their_probe_and_it_is_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = data(150)  # more than we would cut a batch into
    exact = float(seht.exact_trace(model, lambda: loss_fn(model, (x, y))))
    result = measure.trace(model, loss_fn, (x, y), probes=300)
    assert result.method == "shared" and "BatchNorm in train mode" in result.notes[0]
    assert result.samples == 150 and abs(result.estimate - exact) < 4 * result.stderr
    with pytest.raises(seht.ExampleError):
        measure.trace(model, loss_fn, (x, y), method="per-sample")
    model.eval()
    own = measure.trace(model, loss_fn, (x, y))
    assert own.method == "per-sample" and not own.notes


def test_one_large_batch_is_cut():
    model, batch = network(nn.Tanh), data(300)
    seen = []
    result = measure.trace(model, loss_fn, batch, progress=seen.append)
    assert seen[-1].done == 3 and result.samples == 300  # 128, 128, 44


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_nothing_stays_in_memory(curvature, per_layer):
    """A result that autograd saves with its own node is a circle that no collector sees."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 37))
    batch = (torch.randn(6, 4), torch.arange(6))

    def outputs():
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return sum(tensor.shape == (6, 37) for tensor in tensors)

    assert outputs() == 0
    for _ in range(2):
        measure.trace(
            model,
            lambda m, b: F.cross_entropy(m(b[0]), b[1]),
            batch,
            curvature=curvature,
            per_layer=per_layer,
        )
    assert outputs() == 0
