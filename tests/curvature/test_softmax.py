"""Cross-entropy's curvature written out, against three derivatives of the loss."""

import pytest
import torch
import torch.nn.functional as F

import seht
from seht.curvature.output_curvature import Curvature
from seht.curvature.softmax import SoftmaxCurvature

FLAT, DEEP, PIXELS = (6, 5), (3, 4, 5), (3, 5, 4)
WEIGHT = torch.linspace(0.5, 2, 5).double()
SOFT = torch.linspace(-1, 1, 30).double().view(6, 5).softmax(1)
MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 0]]).bool()


def labels(*shape):
    return (torch.arange(torch.Size(shape).numel()) % 5).view(shape)


def ignoring(z, index=-100, **options):
    y = labels(6)
    y[2] = index
    return F.cross_entropy(z, y, ignore_index=index, **options)


def shifted(z, **options):
    return F.cross_entropy(z[:, :-1].reshape(-1, 5), labels(9), **options)


def masked_mean(z):
    each = F.cross_entropy(z.reshape(-1, 5), labels(12), reduction="none")
    return (each * MASK.flatten()).sum() / MASK.sum()


def by_hand(z):
    return -z.log_softmax(-1).gather(-1, labels(3, 4, 1)).squeeze(-1)[MASK].mean()


def distilled(z):
    return 0.3 * F.cross_entropy(z, labels(6)) + 0.7 * F.kl_div(
        z.log_softmax(1), SOFT, reduction="batchmean"
    )


def confident_only(z):
    """A mask and weights that depend on the logits, as constants."""
    p = z.detach().softmax(1)
    each = F.cross_entropy(z, labels(6), reduction="none")
    return (each * p.amax(1) * (p.amax(1) > 0.3)).mean()


MATCHED = {
    "plain": (FLAT, lambda z: F.cross_entropy(z, labels(6))),
    "sum": (FLAT, lambda z: F.cross_entropy(z, labels(6), reduction="sum")),
    "none": (FLAT, lambda z: F.cross_entropy(z, labels(6), reduction="none").mean()),
    "ignored": (FLAT, ignoring),
    "ignored, no class": (FLAT, lambda z: ignoring(z, 255)),
    "ignore_index": (FLAT, lambda z: F.cross_entropy(z, labels(6), ignore_index=3)),
    "one example": ((5,), lambda z: F.cross_entropy(z, torch.tensor(3))),
    "flattened": (DEEP, lambda z: F.cross_entropy(z.view(-1, 5), labels(12))),
    "reshaped": (DEEP, lambda z: F.cross_entropy(z.reshape(-1, 5), labels(12))),
    "in two steps": (FLAT, lambda z: F.nll_loss(z.log_softmax(-1), labels(6))),
    "by hand": (DEEP, by_hand),
    "shifted": (DEEP, shifted),
    "shifted, smoothed": (DEEP, lambda z: shifted(z, label_smoothing=0.1)),
    "transposed": (DEEP, lambda z: F.cross_entropy(z.transpose(0, 1).reshape(-1, 5), labels(12))),
    "classes second": (DEEP, lambda z: F.cross_entropy(z.transpose(1, 2), labels(3, 4))),
    "classes first": ((5, 6), lambda z: F.cross_entropy(z.t(), labels(6))),
    "permuted": (DEEP, lambda z: F.cross_entropy(z.permute(1, 2, 0), labels(4, 3))),
    "pixels": (PIXELS, lambda z: F.cross_entropy(z, labels(3, 4))),
    "image": ((2, 5, 3, 4), lambda z: F.cross_entropy(z, labels(2, 3, 4))),
    "image, all of it": (
        (2, 5, 3, 4),
        lambda z: F.cross_entropy(
            z, labels(2, 3, 4), weight=WEIGHT, label_smoothing=0.2, ignore_index=1
        ),
    ),
    "pixels flattened": (
        PIXELS,
        lambda z: F.cross_entropy(z.permute(0, 2, 1).reshape(-1, 5), labels(12)),
    ),
    "smoothed": (FLAT, lambda z: F.cross_entropy(z, labels(6), label_smoothing=0.1)),
    "smoothed, ignored": (FLAT, lambda z: ignoring(z, label_smoothing=0.1)),
    "weighted": (FLAT, lambda z: F.cross_entropy(z, labels(6), weight=WEIGHT)),
    "weighted, sum": (FLAT, lambda z: F.cross_entropy(z, labels(6), WEIGHT, reduction="sum")),
    "weighted, smoothed, ignored": (
        FLAT,
        lambda z: ignoring(z, weight=WEIGHT, label_smoothing=0.1),
    ),
    "soft labels": (FLAT, lambda z: F.cross_entropy(z, SOFT)),
    "soft labels, weighted": (FLAT, lambda z: F.cross_entropy(z, SOFT, weight=WEIGHT)),
    "scaled": (FLAT, lambda z: 2 * F.cross_entropy(z, labels(6)) / 3),
    "masked mean": (DEEP, masked_mean),
    "mask": (DEEP, lambda z: F.cross_entropy(z[MASK], labels(7))),
    "chosen": (DEEP, lambda z: F.cross_entropy(z[:, [2, 0, 2]].flatten(0, 1), labels(9))),
    "index_select": (FLAT, lambda z: F.cross_entropy(z.index_select(0, labels(6)), labels(6))),
    "last": (DEEP, lambda z: F.cross_entropy(z[:, -1], labels(3))),
    "strided": (DEEP, lambda z: F.cross_entropy(z[::2, 1:].flatten(0, 1), labels(6))),
    "unbound": (DEEP, lambda z: sum(F.cross_entropy(part, labels(3)) for part in z.unbind(1))),
    "split": (FLAT, lambda z: sum(F.cross_entropy(part, labels(2)) for part in z.split(2))),
    "chunks": (DEEP, lambda z: F.cross_entropy(z.chunk(2, 1)[1].reshape(-1, 5), labels(6))),
    "expanded": (
        FLAT,
        lambda z: F.cross_entropy(z.unsqueeze(0).expand(2, 6, 5).flatten(0, 1), labels(12)),
    ),
    "mixed up": (
        FLAT,
        lambda z: 0.4 * F.cross_entropy(z, labels(6)) + 0.6 * F.cross_entropy(z, labels(6).flip(0)),
    ),
    "distilled": (FLAT, distilled),
    "confident only": (FLAT, confident_only),
    "negative": (FLAT, lambda z: -F.cross_entropy(z, labels(6))),
    "squeezed": (FLAT, lambda z: F.cross_entropy(z[None, :, None].squeeze(), labels(6))),
}


def written_into(z):
    z = z.clone()
    with torch.no_grad():
        z[:, 0] = -3.0  # no graph shows it
    return F.cross_entropy(z, labels(6))


def data_written_into(z):
    z = z.clone()
    z.data.mul_(0.5)
    return F.cross_entropy(z, labels(6))


def in_place(z):
    z = z.clone()
    z /= 2
    return F.cross_entropy(z, labels(6))


def filled(z):
    return F.cross_entropy(z.masked_fill(torch.arange(5) == 4, -9.0), labels(6))


def focal(z):
    each = F.cross_entropy(z, labels(6), reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def weighted_by_probability(z):
    each = F.cross_entropy(z, labels(6), reduction="none")
    return (each * z.softmax(1)[:, 0]).mean()


def parts_detached(z):
    return F.cross_entropy(torch.cat([z[:3], z[3:].detach()]), labels(6))


def columns(z):
    return F.cross_entropy(z[:, :3], labels(6) % 3)


OTHERS = {
    "warmer": (FLAT, lambda z: F.cross_entropy(z / 2, labels(6))),
    "squared": (FLAT, lambda z: z.square().mean()),
    "square of it": (FLAT, lambda z: F.cross_entropy(z, labels(6)).square()),
    "inverse": (FLAT, lambda z: 1 / F.cross_entropy(z, labels(6))),
    "perplexity": (FLAT, lambda z: F.cross_entropy(z, labels(6)).exp()),
    "flooded": (FLAT, lambda z: (F.cross_entropy(z, labels(6)) - 0.1).abs() + 0.1),
    "z-loss": (FLAT, lambda z: F.cross_entropy(z, labels(6)) + z.logsumexp(1).square().mean()),
    "linear besides": (FLAT, lambda z: F.cross_entropy(z, labels(6)) + 0.1 * z.mean()),
    "linear besides, of a view": (
        DEEP,
        lambda z: (lambda x: F.cross_entropy(x, labels(12)) + 0.1 * x.mean())(z.view(-1, 5)),
    ),
    "confidence": (
        FLAT,
        lambda z: (
            F.cross_entropy(z, labels(6))
            - 0.1 * torch.distributions.Categorical(logits=z).entropy().mean()
        ),
    ),
    "twice": (FLAT, lambda z: F.cross_entropy(z + z.flip(0), labels(6))),
    "log_softmax twice": (FLAT, lambda z: F.nll_loss(z.log_softmax(0).log_softmax(1), labels(6))),
    "some classes": (FLAT, columns),
    "classes and rows mixed": (DEEP, lambda z: F.cross_entropy(z.view(-1, 4), labels(15) % 4)),
    "a learnt factor": (
        FLAT,
        lambda z: F.cross_entropy(z, labels(6)) * (1 + torch.ones(1, requires_grad=True)).sum(),
    ),
    "targets of its own": (FLAT, lambda z: F.cross_entropy(z, z.softmax(1))),
    "written into": (FLAT, written_into),
    "data written into": (FLAT, data_written_into),
    "in place": (FLAT, in_place),
    "filled": (FLAT, filled),
    "focal": (FLAT, focal),
    "weighted by probability": (FLAT, weighted_by_probability),
    "parts detached": (FLAT, parts_detached),
    "cast": (FLAT, lambda z: F.cross_entropy(z.float(), labels(6)).double()),
    "square, both ways": (
        (5, 5),
        lambda z: F.cross_entropy(z, labels(5)) + F.cross_entropy(z.t(), labels(5)),
    ),
}


def outputs(shape, leaf=True):
    z = torch.randn(shape).double().requires_grad_()
    return z if leaf else z.clone()


def compare(function, shape, leaf, *, written_out):
    torch.manual_seed(0)
    z, beside = outputs(shape, leaf), outputs((2,), leaf)
    d = [torch.randn(shape).double(), torch.randn(2).double()]
    loss = function(z)
    ours = Curvature(loss, [z, beside])
    assert (ours._softmax is not None) is written_out
    found = ours.along([2 * part for part in d], [0 * part for part in d], z.new_tensor(2.0))
    (g,) = torch.autograd.grad(loss, z, create_graph=True)
    (h,) = torch.autograd.grad((g * d[0]).sum(), z, create_graph=True)
    q = (h * d[0]).sum()
    third = torch.zeros_like(h)
    if q.requires_grad:
        (third,) = torch.autograd.grad(q, z, materialize_grads=True)
    torch.testing.assert_close(found.value, q.detach())
    torch.testing.assert_close(found.pulls, [h.detach(), torch.zeros(2).double()])
    torch.testing.assert_close(found.third, [third, torch.zeros(2).double()])
    torch.testing.assert_close(ours.slopes(), [g.detach(), torch.zeros(2).double()])


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("name", MATCHED)
def test_written_out(name, leaf):
    shape, function = MATCHED[name]
    compare(function, shape, leaf, written_out=True)


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_goes_the_general_way(name):
    shape, function = OTHERS[name]
    compare(function, shape, True, written_out=False)


def test_rows_by_the_stretch(monkeypatch):
    """Several stretches, in order and by index."""
    monkeypatch.setattr("seht.curvature.cross_entropy._AT_HAND", (10, 10))
    for name in ("plain", "smoothed", "shifted", "mixed up", "image, all of it"):
        shape, function = MATCHED[name]
        compare(function, shape, True, written_out=True)


@pytest.mark.parametrize("form", ["scalar", "lean"])
@pytest.mark.parametrize("two_sided", [False, True])
def test_the_penalty_takes_it(form, two_sided, monkeypatch):
    """Value and gradient are those of the general way."""
    found = []
    for general in (False, True):
        if general:
            monkeypatch.setattr(SoftmaxCurvature, "match", classmethod(lambda *_: None))
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
        model.double()
        x = torch.randn(6, 4).double()
        penalty = seht.HessianTrace(model, weight=0.1, curvature="ggn", seed=0, two_sided=two_sided)
        closure = lambda: F.cross_entropy(model(x)[1:], labels(5), label_smoothing=0.1)
        if form == "lean":
            penalty.backward(closure)
        else:
            penalty(closure).backward()
        found.append([torch.tensor(penalty.last.trace), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
