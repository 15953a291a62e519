"""Problem cases: every operator the library answers for, and the paper's four networks in small.

A case builds ``(model, batch, loss_fn)`` in float64, the same at every call; the loss is
``loss_fn(model, batch)``. It knows nothing of engines. A case is *smooth* if its loss has four
continuous derivatives where we look, and *kinked* (ReLU, maxima, Huber ...) if a finite step may
cross a kink: the Hessian, which ignores kinks, is then no limit of coarse differences.
"""

import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from case_parts import (
    Dot,
    First,
    Pair,
    Problem,
    SelfAttention,
    body,
    classify,
    encoder,
    image,
    logits_loss,
    next_token,
    pictures,
    same_mask,
    spectral_norm,
    text,
    tokens,
    vector,
    weight_norm,
)
from torch import nn

from seht.lab import models


@dataclass(frozen=True)
class Case:
    id: str
    make: Callable[[], Problem]
    smooth: bool = True

    @property
    def section(self) -> str:
        """Of the support matrix."""
        kinds = {"activation": "activations", "loss": "losses"}
        first = self.id.split("-")[0]
        return "networks" if first in NETWORKS else kinds.get(first, "layers")

    @property
    def operator(self) -> str:
        """Its row there: variants of one operator are one, the two modes of a norm are not."""
        parts = self.id.split("-")
        if self.section == "networks":
            return self.id
        name = parts[1] if self.section != "layers" else parts[0]
        return f"{name}, eval" if "eval" in parts else name

    def build(self) -> Problem:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old weight_norm is deprecated, and still in use
            torch.manual_seed(zlib.crc32(self.id.encode()))
            return self.make()

    def __str__(self) -> str:
        return self.id


NETWORKS = {"resnet18", "wrn10", "lstm", "gru", "gpt", "mlp", "vit"}
CASES: list[Case] = []


def add(id: str, make: Callable[[], Problem], smooth: bool = True) -> None:
    CASES.append(Case(id, make, smooth))


def smooth() -> list[Case]:
    return [case for case in CASES if case.smooth]


def kinked() -> list[Case]:
    return [case for case in CASES if not case.smooth]


def find(id: str) -> Case:
    return next(case for case in CASES if case.id == id)


# --- norms ------------------------------------------------------------------------------------

for train, mode in ((True, "train"), (False, "eval")):
    for affine in (True, False):
        for stats in (True, False):
            norm = nn.BatchNorm2d(4, affine=affine, track_running_stats=stats)
            name = f"BatchNorm2d-{mode}{'' if affine else '-plain'}{'' if stats else '-nostats'}"
            add(name, image(norm, train=train))
    add(f"BatchNorm1d-{mode}", vector(nn.BatchNorm1d(5), train=train))
    add(f"BatchNorm1d-{mode}-sequence", image(nn.BatchNorm1d(4), dims=1, train=train))
    add(f"BatchNorm3d-{mode}", image(nn.BatchNorm3d(4), dims=3, train=train))
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    add(f"InstanceNorm2d-{mode}-stats", image(norm, train=train))
add("BatchNorm1d-cumulative", vector(nn.BatchNorm1d(5, momentum=None)))
add("InstanceNorm1d", image(nn.InstanceNorm1d(4), dims=1))
add("InstanceNorm2d", image(nn.InstanceNorm2d(4)))
add("InstanceNorm2d-affine", image(nn.InstanceNorm2d(4, affine=True)))
add("InstanceNorm3d", image(nn.InstanceNorm3d(4, affine=True), dims=3))
add("LayerNorm", vector(nn.LayerNorm(5)))
add("LayerNorm-plain", vector(nn.LayerNorm(5, elementwise_affine=False)))
add("LayerNorm-nobias", vector(nn.LayerNorm(5, bias=False)))
add("LayerNorm-3d", image(nn.LayerNorm([4, 4, 4])))
add("GroupNorm", image(nn.GroupNorm(2, 4)))
add("RMSNorm", vector(nn.RMSNorm(5)))
add("LocalResponseNorm", image(nn.LocalResponseNorm(2)))

# --- reparametrised weights -------------------------------------------------------------------

for old, name in ((False, "parametrization"), (True, "hook")):
    add(f"weight_norm-{name}", body(weight_norm(old), 6, 4))
    add(f"weight_norm-{name}-dim1", body(weight_norm(old, dim=1), 6, 4))
    add(f"weight_norm-{name}-whole", body(weight_norm(old, dim=None), 6, 4))
    # In eval mode: training moves u and v, which are constants to the derivative.
    add(f"spectral_norm-{name}-eval", body(spectral_norm(old), 6, 4, train=False))

# --- attention --------------------------------------------------------------------------------

visible = torch.ones(5, 5).tril().bool()
bias = torch.arange(25.0).view(5, 5).double().sin()
add("MultiheadAttention-weights", body(lambda: SelfAttention(True), 3, 5, 4))
add("MultiheadAttention", body(lambda: SelfAttention(False), 3, 5, 4))
add("MultiheadAttention-eval", body(lambda: SelfAttention(False), 3, 5, 4, train=False))
add("attention", body(Dot, 3, 5, 4))
add("attention-causal", body(lambda: Dot(is_causal=True), 3, 5, 4))
add("attention-mask", body(lambda: Dot(attn_mask=visible), 3, 5, 4))
add("attention-bias", body(lambda: Dot(attn_mask=bias, scale=0.3), 3, 5, 4))
add("TransformerEncoderLayer", body(lambda: encoder("gelu", False), 3, 5, 4))
add("TransformerEncoderLayer-first", body(lambda: encoder("gelu", True), 3, 5, 4))
add("TransformerEncoderLayer-relu", body(lambda: encoder("relu", True), 3, 5, 4), smooth=False)

# --- linear maps, pools, dropout, recurrent layers --------------------------------------------

masked = same_mask(classify)
add("Linear", vector())
add("Bilinear", body(Pair, 6, 4))
add("Embedding", tokens(nn.Embedding(7, 4)))
add("Embedding-padding", tokens(nn.Embedding(7, 4, padding_idx=0)))
add("Conv1d", image(dims=1))
add("Conv2d", image())
add("Conv2d-strided", image(nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)))
add("Conv3d", image(dims=3))
add("ConvTranspose1d", image(nn.ConvTranspose1d(4, 2, 3, stride=2), dims=1))
add("ConvTranspose2d", image(nn.ConvTranspose2d(4, 2, 2, stride=2)))
add("AvgPool2d", image(nn.AvgPool2d(2)))
add("AdaptiveAvgPool2d", image(nn.AdaptiveAvgPool2d(3)))
add("MaxPool1d", image(nn.MaxPool1d(2), dims=1), smooth=False)
add("MaxPool2d", image(nn.MaxPool2d(2)), smooth=False)
add("AdaptiveMaxPool2d", image(nn.AdaptiveMaxPool2d(2)), smooth=False)
add("Dropout", vector(nn.Dropout(0.4), loss_fn=masked))
add("Dropout2d", image(nn.Dropout2d(0.4), loss_fn=masked))
add("Dropout-eval", vector(nn.Dropout(0.4), train=False))
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    for layers in (1, 2):
        add(f"{kind.__name__}-{layers}", body(lambda k=kind, n=layers: First(k(3, 4, n)), 2, 4, 3))
add("LSTM-bidirectional", body(lambda: First(nn.LSTM(3, 2, bidirectional=True)), 2, 4, 3))
add("LSTM-projected", body(lambda: First(nn.LSTM(3, 4, proj_size=2)), 2, 4, 3))
add("LSTM-dropout", body(lambda: First(nn.LSTM(3, 4, 2, dropout=0.3)), 2, 4, 3, loss_fn=masked))

# --- activations ------------------------------------------------------------------------------

KINKED = [nn.ReLU(), nn.LeakyReLU(0.1), nn.PReLU(), nn.ELU(), nn.SELU(), nn.CELU(0.7)]
KINKED += [nn.Hardswish(), nn.Hardsigmoid(), nn.Softsign(), nn.ReLU6(), nn.Hardtanh()]
SMOOTH = [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Sigmoid(), nn.Tanh()]
SMOOTH += [nn.LogSigmoid(), nn.Softmax(1), nn.LogSoftmax(1), nn.GLU()]
for activation in (*KINKED, *SMOOTH):
    variant = "-tanh" if getattr(activation, "approximate", "none") == "tanh" else ""
    # Scaled up, so that both branches of Hardswish, ReLU6 ... are met.
    add(
        f"activation-{type(activation).__name__}{variant}",
        vector(activation, width=6, scale=3.0),
        smooth=activation in SMOOTH,
    )

# --- losses (cross_entropy is every other case's) ---------------------------------------------

class_weights = torch.tensor([0.5, 1.0, 2.0]).double()
SMOOTH_LOSSES = {
    "cross_entropy-smoothed": lambda z, y, t: F.cross_entropy(z, y, label_smoothing=0.1),
    "cross_entropy-soft": lambda z, y, t: F.cross_entropy(z, t.softmax(1)),
    "cross_entropy-weighted": lambda z, y, t: F.cross_entropy(z, y, class_weights, ignore_index=1),
    "nll": lambda z, y, t: F.nll_loss(z.log_softmax(1), y),
    "mse": lambda z, y, t: F.mse_loss(z, t),
    "bce_with_logits": lambda z, y, t: F.binary_cross_entropy_with_logits(z, t.sigmoid()),
    "kl_div": lambda z, y, t: F.kl_div(z.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "logsumexp": lambda z, y, t: z.logsumexp(1).mean(),
    "norm": lambda z, y, t: z.norm(dim=1).mean(),
    "vector_norm-3": lambda z, y, t: torch.linalg.vector_norm(z, 3, dim=1).mean(),
    "cosine_similarity": lambda z, y, t: 1 - F.cosine_similarity(z, t).mean(),
    "entropy": lambda z, y, t: (z.softmax(1) * z.log_softmax(1)).sum(1).mean(),
}
for name, loss in SMOOTH_LOSSES.items():
    add(f"loss-{name}", logits_loss(loss))
# Scaled up, so that both branches are met.
add(
    "loss-smooth_l1", logits_loss(lambda z, y, t: F.smooth_l1_loss(z, t, beta=0.5), 2), smooth=False
)
add(
    "loss-multi_margin",
    logits_loss(lambda z, y, t: F.multi_margin_loss(z, y, p=2), 2),
    smooth=False,
)
add("loss-huber", logits_loss(lambda z, y, t: F.huber_loss(z, t, delta=0.7), 2), smooth=False)

# --- the paper's networks, a GPT and an MLP, in small -----------------------------------------


def resnet(**options: str) -> Callable[[], nn.Module]:
    return lambda: models.resnet18(width=2, classes=3, **options)


def wide(activation: str) -> Callable[[], nn.Module]:
    return lambda: models.WideResNet(10, 2, width=2, classes=3, dropout=0.3, activation=activation)


def recurrent(cell: str) -> Callable[[], nn.Module]:
    sizes = {"vocabulary": 11, "embedding": 4, "hidden": 5}
    return lambda: models.RecurrentLM(cell, init=0.5, dropout=0.3, **sizes)


def gpt() -> nn.Module:
    return models.GPT(vocabulary=11, context=8, width=4, heads=2, layers=2)


add("resnet18", pictures(resnet()), smooth=False)
add("resnet18-silu", pictures(resnet(activation="silu")))
add("resnet18-group", pictures(resnet(norm="group", activation="silu")))
add("wrn10", pictures(wide("relu"), masked), smooth=False)
add("wrn10-silu", pictures(wide("silu"), masked))
add("lstm", text(recurrent("lstm"), same_mask(next_token)))
add("gru", text(recurrent("gru"), same_mask(next_token)))
add("gpt", text(gpt))
add("mlp", pictures(lambda: models.MLP(432, 6, 3)), smooth=False)
add("mlp-tanh", pictures(lambda: models.MLP(432, 6, 3, activation="tanh")))


class ViT(nn.Module):
    """A vision transformer in small: patches, a class token, places, two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 4, 6, stride=6)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 4)), nn.Embedding(5, 4)
        self.layers = nn.Sequential(encoder("gelu", True), encoder("gelu", True))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places.weight
        return self.head(self.norm(self.layers(x))[:, 0])


add("vit", pictures(ViT))
