"""The networks of the experiments: sizes, shapes, options, and that every weight is used."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seht import probes
from seht.lab import models
from seht.lab.config import ModelConfig


def count(model):
    return sum(p.numel() for p in model.parameters())


def on_meta(build, **options):
    with torch.device("meta"):  # only the shapes matter: nothing is allocated
        return build(**options)


def test_parameter_counts():
    assert count(on_meta(models.resnet18)) == 11_173_962
    assert count(on_meta(models.resnet18, classes=100)) == 11_220_132
    assert count(on_meta(models.WideResNet)) == 36_536_884
    assert count(on_meta(models.WideResNet, classes=10)) == 36_479_194
    words, size = 33_278, 512
    ends = 2 * words * size + words
    assert count(on_meta(models.RecurrentLM)) == ends + 2 * 4 * (2 * size * size + 2 * size)
    assert count(on_meta(models.RecurrentLM, cell="gru")) == ends + 2 * 3 * (2 * size**2 + 2 * size)


def test_resnet_has_the_paper_s_21_weights():
    """Hence the 81 % (p = 0.01) and 34 % (p = 0.05) of steps on which no layer is drawn."""
    chosen = probes.choose(on_meta(models.resnet18)).tensors
    assert len(chosen) == 21
    assert round(0.99**21, 2) == 0.81
    assert round(0.95**21, 2) == 0.34


IMAGES = {
    "resnet": lambda **o: models.resnet18(width=4, classes=7, channels=2, **o),
    "wide": lambda **o: models.WideResNet(10, 2, width=4, classes=7, channels=2, **o),
    "cnn": lambda **o: models.CNN(width=4, classes=7, channels=2, size=16, **o),
}
TEXTS = {
    "lstm": lambda: models.RecurrentLM("lstm", vocabulary=9, embedding=4, hidden=6),
    "gru": lambda: models.RecurrentLM("gru", vocabulary=9, embedding=4, hidden=6),
    "one layer": lambda: models.RecurrentLM(vocabulary=9, embedding=4, hidden=6, layers=1),
    "gpt": lambda: models.GPT(vocabulary=9, context=6, width=8, heads=2, layers=2, dropout=0.1),
}


def every_weight_is_used(model, loss):
    loss.backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not unused


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", IMAGES)
def test_images(name, norm, activation):
    model = IMAGES[name](norm=norm, activation=activation)
    x = torch.randn(3, 2, 16, 16)
    assert model(x).shape == (3, 7)
    every_weight_is_used(model, model(x).square().sum())
    kinds = {type(m) for m in model.modules()}
    assert (nn.BatchNorm2d in kinds) == (norm == "batch")
    assert (nn.GroupNorm in kinds) == (norm == "group")
    assert all(m.bias is None for m in model.modules() if isinstance(m, nn.Conv2d))


def test_a_network_without_norms():
    """The one for digits: then its convolutions have the bias a norm would take away."""
    model = models.CNN()
    assert count(model) == 6_090
    assert all(m.bias is not None for m in model.modules() if isinstance(m, nn.Conv2d))
    x = torch.randn(3, 1, 8, 8)
    every_weight_is_used(model, model(x).square().sum())
    same = nn.Sequential(
        model.layers[0].conv, nn.ReLU(), nn.MaxPool2d(2),
        model.layers[1].conv, nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), model.linear,
    )  # fmt: skip
    torch.testing.assert_close(model(x), same(x))


def test_wide_resnet_against_its_definition():
    """Pre-activation blocks; where the size changes, the shortcut sees the activated input."""
    model = IMAGES["wide"]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))

    p, x = model.state_dict(), torch.randn(2, 2, 12, 12)

    def conv(x, name, stride=1):
        kernel = p[f"{name}.weight"]
        return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)

    def active(x, name):  # in eval mode, with the running statistics 0 and 1 of a new model
        scale, shift = p[f"{name}.weight"], p[f"{name}.bias"]
        return (x / math.sqrt(1 + 1e-5) * scale[:, None, None] + shift[:, None, None]).relu()

    y = conv(x, "conv1")
    for i in range(3):
        at, stride = f"layers.{i}.0", 2 if i else 1
        h = active(y, f"{at}.norm1")
        residual = conv(active(conv(h, f"{at}.conv1", stride), f"{at}.norm2"), f"{at}.conv2")
        y = residual + conv(h, f"{at}.shortcut", stride)
    logits = active(y, "norm").mean((2, 3)) @ p["linear.weight"].t() + p["linear.bias"]
    torch.testing.assert_close(model(x), logits)


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name):
    model = TEXTS[name]()
    tokens = torch.arange(10).view(5, 2) % 9
    logits, _ = model(tokens)
    assert logits.shape == (5, 2, 9)
    every_weight_is_used(
        model, logits.square().sum() + sum(model(t[None])[0].sum() for t in tokens)
    )


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_hidden_states_carry_on(cell):
    model = TEXTS[cell]().eval()
    tokens = torch.arange(12).view(6, 2) % 9
    whole, _ = model(tokens)
    first, hidden = model(tokens[:3])
    second, _ = model(tokens[3:], hidden)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_gpt_is_causal():
    model = TEXTS["gpt"]().eval()
    tokens = torch.arange(10).view(5, 2) % 9
    changed = tokens.clone()
    changed[3] = 8
    a, b = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(a[:3], b[:3])
    assert not torch.allclose(a[3], b[3])


def test_recurrent_start():
    model = models.RecurrentLM(vocabulary=50, embedding=64, hidden=64, init=0.1)
    for p in model.parameters():
        assert p.abs().max() <= 0.1
        if p.numel() > 1000:
            assert abs(p.std().item() - 0.1 / math.sqrt(3)) < 0.003
    usual = models.RecurrentLM(vocabulary=50, embedding=64, hidden=4, init=0.1, init_all=False)
    assert usual.embedding.weight.abs().max() <= 0.1
    assert usual.rnn.weight_hh_l0.abs().max() > 0.1  # PyTorch's own: U(-1/2, 1/2) here
    assert usual.decoder.weight is not usual.embedding.weight


def test_dropout_acts_in_training_only():
    for model, x in (
        (IMAGES["wide"](dropout=0.5), torch.randn(3, 2, 8, 8)),
        (IMAGES["resnet"](dropout=0.5), torch.randn(3, 2, 8, 8)),
        (IMAGES["cnn"](dropout=0.5), torch.randn(3, 2, 16, 16)),
        (TEXTS["gpt"](), torch.arange(6).view(3, 2)),
        (TEXTS["lstm"](), torch.arange(6).view(3, 2)),
    ):
        out = lambda: (y := model(x), y[0] if isinstance(y, tuple) else y)[1]
        assert not torch.equal(out(), out())
        model.eval()
        assert torch.equal(out(), out())


def test_mlp():
    model = models.MLP(12, 5, 3, activation="tanh")
    assert model(torch.randn(4, 3, 2, 2)).shape == (4, 3)
    assert count(model) == 12 * 5 + 5 + 5 * 3 + 3


@pytest.mark.parametrize("build", [*IMAGES.values(), *TEXTS.values()])
def test_models_can_be_copied_and_pickled(build):
    model = build()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: models.resnet18(norm="bacth"), "did you mean 'batch'"),
        (lambda: models.resnet18(activation="rellu"), "did you mean 'relu'"),
        (lambda: models.RecurrentLM("lsmt"), "did you mean 'lstm'"),
        (lambda: models.WideResNet(27), "6n \\+ 4"),
        (lambda: models.GPT(width=10, heads=4), "multiple of heads"),
        (lambda: models.MLP(3), "at least two sizes"),
        (lambda: models.CNN(size=10), "multiple of 4"),
    ],
)
def test_errors_name_the_fix(build, message):
    with pytest.raises(ValueError, match=message):
        build()


class Shape:
    """What a network needs to know of data."""

    def __init__(self, classes, example):
        self.classes, self.example, self.steps_per_epoch = classes, example, 1


CIFAR, WORDS = Shape(100, (3, 32, 32)), Shape(33_278, None)


def built(data, **config):
    with torch.device("meta"):
        return models.build(ModelConfig(**config), data)


def test_build_the_paper_s_networks():
    assert count(built(Shape(10, (3, 32, 32)), name="resnet18")) == 11_173_962
    assert count(built(CIFAR, name="wrn", width=16)) == 36_536_884
    ends = 2 * 33_278 * 512 + 33_278
    assert count(built(WORDS, name="lstm")) == ends + 2 * 4 * (2 * 512 * 512 + 2 * 512)
    assert count(built(WORDS, name="gru")) == ends + 2 * 3 * (2 * 512 * 512 + 2 * 512)
    assert count(built(Shape(10, (1, 8, 8)), name="cnn", width=16, norm="none")) == 6_090


@pytest.mark.parametrize("norm, kind", [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm)])
@pytest.mark.parametrize("name", ["resnet18", "wrn", "cnn"])
def test_build_with_every_option(name, norm, kind):
    config = dict(name=name, width=8, depth=10, factor=2, norm=norm, dropout=0.25)
    model = built(CIFAR, **config)
    assert any(isinstance(m, kind) for m in model.modules())
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.25}
    assert model.linear.out_features == 100


def test_build_text_options():
    model = models.build(
        ModelConfig("gru", embedding=3, hidden=5, layers=1, dropout=0.1, init=0.01, init_all=False),
        Shape(7, None),
    )
    assert model.embedding.weight.shape == (7, 3) and model.decoder.weight.shape == (7, 5)
    assert model.rnn.num_layers == 1 and model.dropout.p == 0.1
    assert model.decoder.weight.abs().max() <= 0.01 < model.rnn.weight_hh_l0.abs().max()


def test_build_what_does_not_fit():
    with pytest.raises(ValueError, match="unknown model 'resnet'; did you mean 'resnet18'"):
        models.build(ModelConfig("resnet"), CIFAR)
    with pytest.raises(ValueError, match="known: lstm, gru, gpt"):
        models.build(ModelConfig("resnet18"), WORDS)
