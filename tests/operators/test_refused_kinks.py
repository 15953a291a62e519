"""Kinks without a rule are refused by name, never passed through; constants are left alone."""

import pytest
import torch
import torch.nn.functional as F
from kinked import IMAGE, ROW, problem
from torch import nn

import seht

PLACES = torch.arange(ROW[1]) % 5
SCALE, ZERO = torch.full((ROW[1],), 0.3), torch.zeros(ROW[1], dtype=torch.int32)


def zeros():
    return torch.zeros(ROW[0], 5).double()


class Bag(nn.EmbeddingBag):
    def forward(self, z):
        return super().forward(PLACES.view(-1, 4)) * z.mean()


class ExportedBag(nn.EmbeddingBag):
    def forward(self, z):
        starts = torch.arange(0, len(PLACES), 4)
        return torch.ops.aten.embedding_bag(self.weight, PLACES, starts, False, 2)[0] * z.mean()


class Clipped(nn.Embedding):
    def forward(self, z):
        return super().forward(PLACES) * z.mean()


class Recurrent(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, z):
        out = self.rnn(z.unsqueeze(0) if isinstance(self.rnn, nn.RNN) else z)
        return out[0] if isinstance(out, tuple) else out


# What is called, and the name the message must have.
REFUSED = {
    "aminmax": (lambda z: z.aminmax(dim=1).max, "aminmax"),
    "msort": (torch.msort, "msort"),
    "copysign": (lambda z: torch.copysign(z, z.flip(0)), "copysign"),
    "copysign_": (lambda z: (1.0 * z).copysign_(z.flip(0)), "copysign_"),
    "fmod": (lambda z: torch.fmod(z, 0.7), "fmod"),
    "remainder": (lambda z: z.remainder(0.7), "remainder"),
    "modulo": (lambda z: z % 0.7, "remainder|__mod__"),
    "quantile": (lambda z: z.quantile(0.3, dim=1), "quantile"),
    "nanquantile": (lambda z: torch.nanquantile(z, 0.3), "nanquantile"),
    "RNN": (Recurrent(nn.RNN(ROW[1], 3, nonlinearity="relu")), "rnn_relu"),
    "RNNCell": (Recurrent(nn.RNNCell(ROW[1], 3, nonlinearity="relu")), "rnn_relu_cell"),
    "pdist-1.5": (lambda z: torch.pdist(z, 1.5), "vector_norm"),
    "renorm": (lambda z: z.renorm(2, 0, 1.0), "renorm"),
    "frexp": (lambda z: torch.frexp(z).mantissa, "frexp"),
    "i0e": (torch.special.i0e, "i0e"),
    "heaviside": (lambda z: z * torch.heaviside(z, z.new_zeros(())), "heaviside"),
    "heaviside_": (lambda z: z * (1.0 * z).heaviside_(z.new_zeros(())), "heaviside_"),
    "logical_not_": (lambda z: z * (1.0 * z).logical_not_(), "logical_not_"),
    "cond-1": (lambda z: torch.linalg.cond(z[:, :6], 1), "cond"),
    "fake_quantize": (
        lambda z: torch.fake_quantize_per_tensor_affine(z, 0.3, 0, -8, 7),
        "fake_quantize_per_tensor_affine",
    ),
    "fake_quantize-channels": (
        lambda z: torch.fake_quantize_per_channel_affine(z, SCALE, ZERO, 1, -8, 7),
        "fake_quantize_per_channel_affine",
    ),
    "Gamma": (lambda z: torch.distributions.Gamma(z.exp(), 1.0).rsample(), "_standard_gamma"),
    "Dirichlet": (lambda z: torch.distributions.Dirichlet(z.exp()).rsample(), "_sample_dirichlet"),
    "scatter_reduce": (
        lambda z: zeros().scatter_reduce(1, PLACES.repeat(6, 1), z, "amax"),
        "scatter_reduce",
    ),
    "scatter_reduce_": (
        lambda z: zeros().scatter_reduce_(1, PLACES.repeat(6, 1), z, reduce="amin"),
        "scatter_reduce_",
    ),
    "index_reduce": (lambda z: zeros().index_reduce(1, PLACES, z, "amax"), "index_reduce"),
    "segment_reduce": (
        lambda z: torch.segment_reduce(z, "max", lengths=torch.tensor([2, 4])),
        "segment_reduce",
    ),
    "div-floor": (lambda z: z * torch.div(z, 0.3, rounding_mode="floor"), "div"),
    "div-trunc": (lambda z: z * z.div(0.3, rounding_mode="trunc"), "div"),
    "cdist-1.5": (lambda z: torch.cdist(z, z.flip(0), p=1.5), "vector_norm"),
    "norm-1.5": (lambda z: z.norm(1.5, dim=1), "norm"),
    "norm-minus-inf": (lambda z: torch.linalg.vector_norm(z, -torch.inf, dim=1), "vector_norm"),
    "pairwise_distance-1.5": (lambda z: F.pairwise_distance(z, z.flip(0), 1.5), "vector_norm"),
    "normalize-1.5": (lambda z: F.normalize(z, p=1.5), "norm"),
    "logit": (lambda z: torch.logit(z.sigmoid(), eps=0.1), "logit"),
    "EmbeddingBag": (Bag(5, 4, mode="max"), "embedding_bag"),
    "EmbeddingBag-exported": (ExportedBag(5, 4), "embedding_bag"),
    "EmbeddingBag-max_norm": (Bag(5, 4, max_norm=0.1), "embedding_bag"),
    "Embedding-max_norm": (Clipped(5, 4, max_norm=0.1), "embedding"),
    # The losses outside torch.nn.functional take their reduction as a number.
    "torch.hinge_embedding_loss": (
        lambda z: torch.hinge_embedding_loss(z, z.detach().sign()),
        r"hinge_embedding_loss.*torch\.nn\.functional",
    ),
    "torch.margin_ranking_loss": (
        lambda z: torch.margin_ranking_loss(z, z.flip(0), z.detach().sign()),
        "margin_ranking_loss",
    ),
}


def run(function, shape=ROW):
    model, closure, _ = problem(function, shape)
    return seht.hessian_trace(model, closure, engine="difference")


@pytest.mark.parametrize("id", REFUSED)
@pytest.mark.supports("{id}", section="decisions", engine="difference", cell="refused")
def test_refused_by_name(id):
    function, name = REFUSED[id]
    with pytest.raises(seht.KinkError, match=rf"{name}\b"):
        run(function)


def test_the_message_names_the_ways_out():
    with pytest.raises(seht.KinkError, match=r"engine='autograd'.*seht\.register_kink"):
        run(torch.msort)


def test_grid_sample_is_refused():
    grid = lambda z: F.grid_sample(z[:, :1], z[:, 1:].permute(0, 2, 3, 1).tanh())
    with pytest.raises(seht.KinkError, match="grid_sample"):
        run(lambda z: grid(z.sigmoid()), IMAGE)


SMOOTH = {
    "logit": lambda z: torch.logit(z.sigmoid()),
    "scatter_reduce-sum": lambda z: zeros().scatter_reduce(1, PLACES.repeat(6, 1), z, "sum"),
    "index_reduce-mean": lambda z: zeros().index_reduce(1, PLACES, z, "mean"),
    "cdist-2": lambda z: torch.cdist(z, z.flip(0) + 1),
    "div": lambda z: torch.div(z, 2.0, rounding_mode=None),
}


@pytest.mark.parametrize("id", SMOOTH)
def test_smooth_uses_of_the_same_functions_pass(id):
    assert run(SMOOTH[id]).isfinite()


CONSTANTS = {
    "detached": lambda z: z * torch.fmod(z.detach(), 0.7),
    "an-input": lambda z: z * torch.linspace(-1, 1, ROW[1]).double().remainder(0.3),
    "a-number": lambda z: z * z.detach().quantile(0.3),
}


def no_grad(z):
    with torch.no_grad():
        scale = z.quantile(0.9) + torch.frexp(z).mantissa
    return z * scale


@pytest.mark.parametrize("function", [*CONSTANTS.values(), no_grad], ids=[*CONSTANTS, "no_grad"])
def test_constants_are_left_alone(function):
    assert run(function).isfinite()


def test_a_fused_bag_by_the_names_of_its_arguments():
    weight = nn.Embedding(5, 4)
    ids, starts = torch.tensor([0, 1, 4, 2]), torch.tensor([0, 2])

    def loss(mode):
        bags = torch.embedding_bag(weight=weight.weight, indices=ids, offsets=starts, mode=mode)
        return (bags[0] ** 2).mean()

    found = seht.hessian_trace(weight, lambda: loss(0), seed=0)
    assert found.item() == pytest.approx(torch.tensor(2 / 8 * 4 * 4).item(), rel=1e-4)
    with pytest.raises(RuntimeError, match="embedding_bag"):
        seht.hessian_trace(weight, lambda: loss(2), seed=0)
