"""seht.check: right engines are trusted, nothing of the user's is touched, bad input is named."""

import copy
import dataclasses
import json
import random

import pytest
import torch
import torch.nn.functional as F
from check_problems import Handmade, StraightThrough, cross_entropy, flat, images, resnet
from helpers import Snapshot
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader

import seht
from seht.engines import ENGINES
from seht.operators import orders, safe_forms

RIGHT = {
    "resnet relu": resnet,
    "resnet silu": lambda: resnet(nn.SiLU),
    "resnet elu": lambda: resnet(nn.ELU),
    "relu in place": lambda: flat(nn.BatchNorm1d(8), nn.ReLU(inplace=True)),
    "layer norm": lambda: flat(nn.LayerNorm(8), nn.GELU()),
    "dropout": lambda: flat(nn.Dropout(0.5), nn.LeakyReLU()),
    "weight norm": lambda: flat(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh()),
    "spectral norm in training": lambda: flat(
        parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh()
    ),
    "straight through": lambda: flat(nn.Tanh(), StraightThrough()),
    "handmade": lambda: flat(Handmade()),
    "linear": lambda: flat(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_trusted(name):
    torch.manual_seed(1)
    report = seht.check(RIGHT[name](), cross_entropy, images())
    assert report.engines.keys() == ENGINES.keys()
    for engine, found in report.engines.items():
        assert found.verdict == "trusted", str(found)
        assert found.error < 1e-3 and found.directions == 3
        assert (found.module, found.reason) == (None, None)
        assert f"engine {engine}: the penalty's gradient can be trusted" in str(report)
    assert report.ok


def test_trusted_on_sequences():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8, padding_idx=-11)  # row 0 moves with no gradient
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.rnn = nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 11)

        def forward(self, tokens):
            return self.head(self.rnn(self.block(self.embed(tokens)))[0])

    def loss_fn(model, batch):
        tokens = batch.pop("tokens")  # as trainers do: the caller's dictionary must survive
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    batch = {"tokens": torch.randint(11, (3, 5))}
    batch["tokens"][:, -2:] = 0
    assert (report := seht.check(Tagger(), loss_fn, batch)).ok, str(report)
    assert batch.keys() == {"tokens"}


def random_network(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kinds = [nn.ReLU, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.Hardswish, nn.SELU, nn.ReLU6, nn.Tanh]
    kinds += [lambda: nn.ReLU(inplace=True), nn.CELU, nn.Softsign]
    width, layers, channels = draw.choice([2, 4, 8]), [], 3
    for _ in range(draw.randint(1, 3)):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=draw.random() < 0.5)]
        norm = draw.choice([nn.Identity, nn.BatchNorm2d, nn.InstanceNorm2d])
        layers += [norm(width), draw.choice(kinds)(), nn.Dropout(draw.choice([0, 0.3]))]
        channels = width
    layers += [draw.choice([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(4)])]
    layers += [
        nn.Flatten(),
        nn.Linear(width * 16, 6),
        draw.choice([nn.LayerNorm, nn.BatchNorm1d])(6),
    ]
    return nn.Sequential(*layers, draw.choice(kinds)(), nn.Linear(6, 4))


def no_false_alarm(seed):
    report = seht.check(random_network(seed), cross_entropy, images(seed=seed), seed=seed)
    assert report.ok, f"{seed}: {report}"


@pytest.mark.parametrize("seed", range(12))
def test_no_false_alarm(seed):
    no_false_alarm(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 500))
def test_no_false_alarm_in_many_networks(seed):
    no_false_alarm(seed)


# --- nothing of the user's is touched ---------------------------------------------------------


@pytest.mark.parametrize("ambient", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("broken", [False, True])
def test_everything_is_left_as_it_was(monkeypatch, ambient, broken):
    if broken:  # the search for a culprit must not leave traces either
        monkeypatch.setattr(safe_forms, "SAFE", {})
        monkeypatch.setattr(orders, "WRONG", {})
    numpy = pytest.importorskip("numpy")
    model = resnet(blocks=1)
    model[2] = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
    model.eval()[3].train()
    x, y = images()
    model(x).sum().backward()
    modes = [module.training for module in model.modules()]
    tensors = [id(t) for t in (*model.parameters(), *model.buffers())]
    before, kept, batch = Snapshot(model), copy.deepcopy(x), {"in": [x], "out": (y, None)}

    def loss_fn(model, batch):
        batch["in"][0].add_(0.1 * random.random() + 0.1 * numpy.random.rand())
        return F.cross_entropy(model(batch["in"][0]), batch.pop("out")[0])

    random.seed(1), numpy.random.seed(1)
    expected = random.Random(1).random(), numpy.random.RandomState(1).rand()
    with ambient():
        report = seht.check(model, loss_fn, batch, directions=1)
    assert (report.engines["autograd"].verdict == "trusted") == (not broken), str(report)
    assert (random.random(), numpy.random.rand()) == expected
    Snapshot(model).assert_same(before)
    assert [module.training for module in model.modules()] == modes
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == tensors
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(x, kept) and batch.keys() == {"in", "out"} and batch["in"][0] is x
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not _get_current_function_mode_stack()


def test_the_same_seed_gives_the_same_report():
    model = resnet()
    one, two, other = (seht.check(model, cross_entropy, images(), seed=s) for s in (5, 5, 6))
    assert one == two != other


# --- the report and bad input -----------------------------------------------------------------


def test_the_report_is_frozen_plain_data():
    report = seht.check(flat(nn.Tanh()), cross_entropy, images(), directions=2)
    assert isinstance(report, seht.CheckReport)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loss = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.engines["autograd"].verdict = "trusted"
    data = json.loads(json.dumps(report.as_dict()))
    assert data["ok"] is True and data["weights"] == 192 * 8 + 8 * 4 and data["tensors"] == 2
    assert data["engines"]["autograd"]["directions"] == 2
    assert str(report).splitlines()[0].startswith("Sequential: 1,568 probed weights in 2 tensors")


def test_params_are_those_of_the_penalty():
    report = seht.check(flat(nn.ReLU()), cross_entropy, images(), params="1.*")
    assert (report.ok, report.tensors, report.weights) == (True, 2, 192 * 8 + 8)


BAD = [
    ((3, cross_entropy, None), {}, TypeError, "must be a torch.nn.Module, not int"),
    ((nn.Linear(2, 2), "loss", None), {}, TypeError, r"a function loss_fn\(model, batch\)"),
    ((flat(), lambda m, b: m(b[0]), images()), {}, ValueError, r"scalar.*\.mean\(\)"),
    ((flat(), lambda m, b: m(b[0]).sum().item(), images()), {}, TypeError, "not loss.item()"),
    ((flat(), lambda m, b: m(b[0]).sum() / 0, images()), {}, ValueError, "loss is -?inf"),
    ((flat(), lambda m, b: 1 / 0, images()), {}, RuntimeError, "division by zero"),
    ((flat().requires_grad_(False), cross_entropy, images()), {}, ValueError, "frozen"),
    ((flat(), cross_entropy, images()), {"params": "x.*"}, ValueError, "no parameter"),
    ((flat(), cross_entropy, images()), {"engines": "autogad"}, ValueError, "did you mean"),
    ((flat(), cross_entropy, DataLoader([])), {}, TypeError, r"give next\(iter\(loader\)\)"),
    ((flat(), cross_entropy, images()), {"engines": []}, ValueError, "engines is empty"),
    ((flat(), cross_entropy, images()), {"directions": 0}, ValueError, "directions must be"),
    ((flat(), cross_entropy, images()), {"tolerance": 0}, ValueError, "tolerance must be"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message) as caught:
        seht.check(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_a_loss_function_that_ignores_its_model():
    outer = flat(nn.ReLU()).double()
    with pytest.raises(ValueError, match="compute it with that argument"):
        seht.check(outer, lambda model, batch: cross_entropy(outer, batch), images())
