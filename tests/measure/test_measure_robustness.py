"""Rises under rounding and noise: against moved copies and the trace's prediction."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seht import PenaltyWarning, measure
from seht.measure.robustness import rounded


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(60, 4, dtype=dtype), torch.randint(3, (60,))
    return model, (x, y)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def rise(model, data, change):
    """Of a copy whose weights are changed by hand."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if weight.dim() > 1:
                weight.copy_(change(name, weight))
    return (loss_fn(other, data) - loss_fn(model, data)).item()


def test_rounding_of_all_weights_and_of_one_layer():
    model, data = problem()
    before = copy.deepcopy(model.state_dict())
    found = measure.robustness(model, loss_fn, data, noise=())
    for bits in (8, 4, 3):
        wanted = rise(model, data, lambda _, w, bits=bits: rounded(w, bits))
        assert found.rounded[bits] == pytest.approx(wanted, rel=1e-9, abs=1e-13)
    assert list(found.layers) == ["0.weight", "2.weight"]
    for layer, value in found.layers.items():
        wanted = rise(
            model, data, lambda name, w, layer=layer: rounded(w, 4) if name == layer else w
        )
        assert value == pytest.approx(wanted, rel=1e-9, abs=1e-13)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert found.samples == 60 and "rounded to 4 bits" in str(found)


def test_small_noise_is_what_the_trace_predicts():
    """By blocks: the exact traces of each weight's own Hessian."""
    model, data = problem()
    wanted = 0.0
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            call = lambda w, name=name: F.cross_entropy(
                torch.func.functional_call(model, {name: w}, data[0]), data[1]
            )
            hessian = torch.autograd.functional.hessian(call, weight.detach())
            block = hessian.reshape(weight.numel(), -1).trace()
            wanted += (0.01**2 / 2 * weight.square().mean() * block).item()
    found = measure.robustness(model, loss_fn, data, noise=(0.01,), draws=400, bits=())
    noise = found.noise[0.01]
    assert abs(noise.rise - wanted) < 5 * noise.stderr + 0.02 * abs(wanted)
    assert noise.predicted == pytest.approx(wanted, rel=0.5)  # two probes for each example
    assert abs(noise.predicted - wanted) < 5 * noise.predicted_stderr < abs(wanted)


def test_the_predictions_error_is_that_of_its_probes():
    """Against the spread over seeds: the layers' errors are not independent."""
    model, (x, y) = problem()
    data = [(x[:10], y[:10]), (x[10:20], y[10:20])]
    found = [
        measure.robustness(model, loss_fn, data, noise=(0.01,), draws=1, bits=(), seed=seed)
        for seed in range(60)
    ]
    values = torch.tensor([one.noise[0.01].predicted for one in found])
    said = torch.tensor([one.noise[0.01].predicted_stderr for one in found])
    assert said.square().mean().sqrt().item() == pytest.approx(values.std().item(), rel=0.35)


@pytest.mark.parametrize("activation, low", [(nn.GELU, False), (nn.ReLU, True)])
def test_the_prediction_is_too_low_where_examples_lie_on_kinks(activation, low):
    """What docs/quantisation.md says, of a network trained to a loss of some thousandths."""
    torch.manual_seed(0)
    x = torch.randn(300, 10, dtype=torch.float64)
    data = x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    model = nn.Sequential(
        *(nn.Linear(10, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 3))
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss_fn(model, data).backward()
        optimizer.step()
    found = measure.robustness(model, loss_fn, data, bits=(), noise=(0.001,), draws=10)
    assert found.loss < 0.01
    (noise,) = found.noise.values()
    assert noise.rise > 3 * noise.predicted if low else noise.rise < 1.5 * noise.predicted


def test_data_that_can_be_read_only_once():
    model, data = problem()
    found = measure.robustness(model, loss_fn, iter([data]), bits=(4,), noise=(0.03,))
    again = measure.robustness(model, loss_fn, data, bits=(4,), noise=(0.03,))
    assert found.rounded[4] == pytest.approx(again.rounded[4]) and found.samples == 60


def test_what_is_rounded_already_rises_by_nothing():
    model, data = problem()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(rounded(weight, 4))
    names = ", ".join(n for n, w in model.named_parameters() if w.dim() > 1)
    with pytest.warns(PenaltyWarning, match=f"{names}: rounded to 4 bits already") as heard:
        found = measure.robustness(model, loss_fn, data, noise=())
    assert "\n" not in str(heard[0].message)
    assert found.rounded[4] == pytest.approx(0.0, abs=1e-12)
    assert abs(found.rounded[3]) > 1e-6


class Quantised(nn.Module):
    """A whole-number layer, as a parameter or as a buffer, below a floating one."""

    def __init__(self, kind):
        super().__init__()
        codes = torch.randint(-7, 8, (4, 4), dtype=torch.int8)
        if kind == "parameter":
            self.codes = nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("codes", codes)
        self.head = nn.Linear(4, 4).double()

    def forward(self, x):
        return self.head(x @ self.codes.double().T)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_weights_that_are_whole_numbers_are_refused(kind):
    model, data = Quantised(kind), problem()[1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"codes holds whole numbers.* float32 model") as error:
        measure.robustness(model, loss_fn, data)
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = measure.robustness(model, loss_fn, data, params=["head.weight"], noise=())
    assert list(found.layers) == ["head.weight"]


def test_modules_of_torch_ao_are_refused():
    from torch.ao.nn.quantized.dynamic import Linear

    with pytest.raises(ValueError, match=r"^1 holds whole numbers"):
        measure.robustness(nn.Sequential(nn.Linear(4, 4), Linear(4, 4)), loss_fn, problem()[1])


def test_a_tied_weight_is_one():
    model, data = problem()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    found = measure.robustness(model, loss_fn, data, noise=())
    assert len(found.layers) == 1
    wanted = rise(model, data, lambda _, w: rounded(w, 3))
    assert found.rounded[3] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": (1,)}, "whole numbers from 2 to 16, not 1"),
        ({"bits": (4.0,)}, "whole numbers from 2 to 16"),
        ({"noise": (0.0,)}, "noise must be a positive finite number, not 0.0"),
        ({"draws": 0}, "draws"),
    ],
)
def test_bad_options(options, message):
    model, data = problem()
    with pytest.raises(ValueError, match=message):
        measure.robustness(model, loss_fn, data, **options)


def test_half_precision_weights_are_refused():
    model, data = problem(torch.bfloat16)
    with pytest.raises(TypeError, match=r"Measure a copy in float32"):
        measure.robustness(model, loss_fn, data)


def test_numbers_of_any_kind_of_collection():
    model, data = problem()
    found = measure.robustness(model, loss_fn, data, bits={4}, noise=(f for f in (0.01,)), draws=1)
    assert list(found.rounded) == [4] and list(found.noise) == [0.01]


def test_without_noise_there_is_no_figure_of_it():
    from seht.measure.page.figures import Findings, groups

    model, data = problem()
    found = Findings(
        "a",
        measure.trace(model, loss_fn, data, seed=0),
        robustness=measure.robustness(model, loss_fn, data, noise=()),
    )
    (drawn,) = (panels for title, _, panels in groups([found]) if title == "Robustness")
    assert len(drawn) == 1
