"""What SEHT-S takes for a sum over examples is one: functions, places and kinds of arguments.

Of a linear layer's outputs z a function f(z) is a sum over examples exactly where its second
derivative between the outputs of different examples vanishes, which nested autograd tells. Each
function is tried in every place with every kind of argument; it is refused, or there is no such
derivative. No probe is drawn for the verdict, so there is nothing random in it.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht

N, K = 5, 3


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1


X = rand(N, K, seed=1)
A, ROWS = rand(N, N, seed=2), rand(N, K, seed=3)
SPARSE = (A * (A > 0.5)).to_sparse()
EDGE = torch.eye(N, dtype=torch.float64)
EDGE[1, 3] = 0.5  # one pair alone meets
TO = torch.tensor([1, 0, 0, 2, 1])
MASK = X[:, 0] > 0.5


class Model(nn.Module):
    """A linear layer, and a weight that the loss may use."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(K, K), nn.Parameter(rand(K, seed=4))
        self.mixing = nn.Parameter(torch.zeros(N, N))

    def forward(self, x):
        return torch.sigmoid(self.layer(x))


def make():
    torch.manual_seed(0)
    return Model().double()


def coupled(model, function):
    """Whether a function of the outputs has a second derivative between two examples."""
    z = model(X).detach().requires_grad_()
    value = function(z, model)
    if not value.requires_grad:
        return False
    (slope,) = torch.autograd.grad(value, z, create_graph=True, materialize_grads=True)
    if not slope.requires_grad:
        return False
    rows = [
        torch.autograd.grad(s, z, retain_graph=True, materialize_grads=True)[0]
        for s in slope.flatten()
    ]
    blocks = torch.stack(rows).view(N, K, N, K).abs().sum((1, 3))
    return bool((blocks - blocks.diag().diag()).max() > max(1e-12, 1e-12 * blocks.max()))


def refused(model, function):
    estimator = seht.SehtS(batch_dim=0)
    try:
        seht.hessian_trace(model, lambda: function(model(X), model), estimator=estimator, seed=1)
    except RuntimeError:  # in words; or by a kink without a rule; or by PyTorch
        return True
    return False


def verdict(function, model=None):
    """'sum', 'refused', 'too careful' or 'WRONG'; None where the function takes no such thing."""
    model = model or make()
    try:
        value = function(model(X), model)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not isinstance(value, torch.Tensor) or not value.requires_grad or not value.isfinite():
        return None
    try:
        mixed = coupled(model, function)
    except (RuntimeError, NotImplementedError):  # no second derivative
        return None
    no = refused(model, function)
    return {(0, 0): "sum", (1, 1): "refused", (0, 1): "too careful", (1, 0): "WRONG"}[mixed, no]


def weighed(y):
    """A scalar that is linear in what a call returned, with a weight for each entry."""
    parts = y if isinstance(y, (tuple, list)) else [y]
    parts = [p for p in parts if isinstance(p, torch.Tensor) and p.requires_grad]
    parts = [torch.view_as_real(p) if p.is_complex() else p for p in parts]
    return sum((p * rand(*p.shape, seed=7)).sum() for p in parts)


# --- kinds of arguments ---------------------------------------------------------------------------

KINDS = {
    "examples": lambda z, m: z,
    "turned": lambda z, m: z.roll(1, 0),
    "mixed": lambda z, m: A @ z,
    "running": lambda z, m: z.cumsum(0),
    "mean": lambda z, m: z.mean(0, keepdim=True),
    "total": lambda z, m: z.sum(),
    "weight": lambda z, m: m.other * 0.5,
    "constant": lambda z, m: ROWS,
}

MIXERS = {
    "matmul": lambda z, m: A @ z,
    "mm": lambda z, m: torch.mm(A, z),
    "from the right": lambda z, m: (z.T @ A).T,
    "linear": lambda z, m: F.linear(z.T, A).T,
    "einsum": lambda z, m: torch.einsum("nm,mk->nk", A, z),
    "one edge": lambda z, m: EDGE @ z,
    "a mixing weight, zero": lambda z, m: z + m.mixing @ z,
    "sparse": lambda z, m: torch.sparse.mm(SPARSE, z),
    "sparse operator": lambda z, m: SPARSE @ z,
    "cumsum": lambda z, m: z.cumsum(0),
    "flipped": lambda z, m: z + z.flip(0),
    "rolled": lambda z, m: z + 0.5 * z.roll(1, 0),
    "mean taken off": lambda z, m: z - z.mean(0),
    "index_add": lambda z, m: z.index_add(0, TO, z),
    "index_add, new": lambda z, m: torch.zeros(N, K).double().index_add(0, TO, z),
    "scatter_add": lambda z, m: torch.zeros(N, K).double().scatter_add(
        0, TO.view(-1, 1).expand(-1, K), z),
    "index_put": lambda z, m: torch.zeros(N, K).double().index_put((TO,), z, accumulate=True),
    "gathered": lambda z, m: z + z.gather(0, TO.view(-1, 1).expand(-1, K)),
    "indexed": lambda z, m: z + z[TO],
    "embedding": lambda z, m: z + F.embedding(TO, z),
    "conv": lambda z, m: F.conv1d(z.T.unsqueeze(1), rand(1, 1, 3), padding=1).squeeze(1).T,
    "conv, batch as channels": lambda z, m: F.conv1d(z.unsqueeze(0), A.unsqueeze(-1))[0],
    "fft": lambda z, m: torch.fft.fft(z, dim=0).real,
    "irfft": lambda z, m: torch.fft.irfft(torch.fft.rfft(z, dim=0), n=N, dim=0) + z.mean(0),
    "addmm": lambda z, m: torch.addmm(z, A, z),
    "addmm, total": lambda z, m: torch.addmm(z.mean(0), z, A[:K, :K]),
    "bias": lambda z, m: F.linear(z, m.layer.weight, z.mean(0)),
    "similarity and a bias": lambda z, m: F.linear(z, z[:K], m.layer.bias),
    "batch norm": lambda z, m: F.batch_norm(z, None, None, training=True),
    "batch norm of a sum": lambda z, m: F.batch_norm(A @ z, None, None, training=True),
    "in place": lambda z, m: (z * 1).add_(z.mean(0)),
    "through a view": lambda z, m: _through_a_view(z),
    "behind a view": lambda z, m: _behind_a_view(z),
    "written": lambda z, m: _written(z),
    "lerp": lambda z, m: torch.lerp(z, z.roll(1, 0), 0.3),
    "interpolated": lambda z, m: F.interpolate(z.T.unsqueeze(0), size=N + 1)[0].T[:N]
    + F.avg_pool1d(z.T, 3, 1, 1).T,
    "kron": lambda z, m: torch.kron(torch.ones(1, 1).double(), z) + z.mean(0),
    "tensordot": lambda z, m: torch.tensordot(A, z, 1),
    "diff": lambda z, m: torch.cat([z[:1], z.diff(dim=0)]),
    "cov": lambda z, m: z @ torch.cov(z.T),
    "trapezoid": lambda z, m: z + torch.trapezoid(z, dim=0),
    "stack": lambda z, m: torch.stack([z, z.roll(1, 0)]).sum(0),
    "triangle": lambda z, m: torch.ones(N, N).double().tril() @ z,
    "gradient": lambda z, m: torch.gradient(z, dim=0)[0],
}  # fmt: skip


def _through_a_view(z):
    h = z * 1
    h[:, 0].copy_((A @ z)[:, 0])
    return h


def _behind_a_view(z):
    h = z * 1
    view = h[:, :2]
    h.copy_(A @ z)
    return view


def _written(z):
    h = z * 1
    h[1] = h[1] + h[0]
    return h


LOSSES = {
    "cross_entropy": lambda y: F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]),
    "soft cross_entropy": lambda y: F.cross_entropy(y, torch.softmax(y.detach() * 2, 1)),
    "mse": lambda y: F.mse_loss(y, torch.zeros_like(y)),
    "mse, target": lambda y: F.mse_loss(torch.zeros_like(y), y),
    "bce": lambda y: F.binary_cross_entropy(torch.sigmoid(y), torch.ones_like(y) * 0.3),
    "logits": lambda y: F.binary_cross_entropy_with_logits(y, torch.ones_like(y) * 0.3),
    "kl": lambda y: F.kl_div(y.log_softmax(1), torch.full_like(y, 0.3)),
    "poisson": lambda y: F.poisson_nll_loss(y, torch.ones_like(y)),
    "huber": lambda y: F.huber_loss(y, torch.zeros_like(y)),
    "soft margin": lambda y: F.soft_margin_loss(y, torch.ones_like(y)),
    "gaussian": lambda y: F.gaussian_nll_loss(y, torch.zeros_like(y), torch.ones_like(y)),
    "squares": lambda y: y.pow(2).mean(),
    "logsumexp": lambda y: y.logsumexp(1).mean(),
    "relu in place": lambda y: (F.silu(y * 1, inplace=True)).mean(),
}


@pytest.mark.parametrize("name", MIXERS)
def test_examples_mixed_before_the_loss(name):
    """All of them are refused: no sum over the examples may go through a loss."""
    losses = LOSSES if name == "matmul" else ("cross_entropy", "mse, target", "logits", "squares")
    found = {loss: verdict(lambda z, m, of=LOSSES[loss]: of(MIXERS[name](z, m))) for loss in losses}
    assert not {"WRONG", "sum"} & {*found.values()}, found
    assert "refused" in found.values() or name == "a mixing weight, zero"  # it is not for long


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_examples_themselves(name):
    assert verdict(lambda z, m: LOSSES[name](z)) == "sum"


def test_what_is_linear_in_a_sum_is_one():
    sums = {
        "weighed": lambda z, m: (ROWS * (A @ z)).sum(),
        "divided": lambda z, m: (z.pow(2) * ROWS).sum() / ROWS.sum(),
        "masked mean": lambda z, m: (z.pow(2).sum(1) * MASK).sum() / MASK.sum(),
        "by a weight": lambda z, m: z.exp().mean() * m.other.pow(2).sum() / m.other[0],
        "of different examples": lambda z, m: (z.exp() + z.pow(3).roll(1, 0)).mean(),
        "of all and of each": lambda z, m: (z.exp() + z.pow(2).mean()).mean(),
        "chosen": lambda z, m: F.nll_loss(A @ z.log_softmax(1), TO),
        "where": lambda z, m: torch.where(ROWS > 0.5, A @ z.exp(), 0).sum(),
        "addcmul": lambda z, m: torch.addcmul(z.exp().mean(), ROWS, ROWS).sum(),
        "views": lambda z, m: (A @ z.exp()).T.reshape(-1)[3:].flip(0).view(1, -1).sum(),
        "a bank of constants": lambda z, m: (z.unsqueeze(1) - ROWS).pow(2).exp().mean(),
    }  # fmt: skip
    found = {name: verdict(of) for name, of in sums.items()}
    assert set(found.values()) == {"sum"}, found


def test_division_by_a_sum():
    quotients = {
        "one over": lambda z, m: 1 / z.sum(),
        "loss over outputs": lambda z, m: z.pow(2).sum() / z.sum(),
        "examples over all": lambda z, m: (z / z.sum()).pow(2).sum(),
        "by name": lambda z, m: torch.div(other=z.sum(), input=ROWS).sum(),
        "in place": lambda z, m: (z * 1).div_(z.sum()).pow(2).sum(),
        "power": lambda z, m: z.sum() ** 2,
        "power of": lambda z, m: 2 ** z.sum(),
        "root of the loss": lambda z, m: F.mse_loss(z, ROWS).sqrt(),
        "root, turned round": lambda z, m: F.mse_loss(ROWS, z).sqrt(),
        "root of a smooth loss": lambda z, m: F.binary_cross_entropy(ROWS, z).sqrt(),
        "weights of the loss": lambda z, m: F.mse_loss(ROWS, X, weight=z),
        "old name": lambda z, m: F.mse_loss(z, ROWS, size_average=True, reduction="none").sqrt(),
        "largest": lambda z, m: z.sum(0).exp().max(),
        "logsumexp": lambda z, m: z.logsumexp(0).sum(),
        "norm, arguments by name": lambda z, m: F.layer_norm(
            weight=z.mean(0), input=z, normalized_shape=[K]).pow(2).sum(),
        "axis": lambda z, m: torch.softmax(z, axis=0).pow(2).sum(),
        "cat along": lambda z, m: torch.cat([z, z.roll(1, 0)], axis=1).pow(2).sum(1).exp().sum()
        + torch.cat([z.T, z.T], axis=1).softmax(1).pow(2).sum(),
    }  # fmt: skip
    found = {name: verdict(of) for name, of in quotients.items()}
    assert set(found.values()) == {"refused"}, found


def test_an_answer_holds_in_the_steps_to_come():
    """The graph has no edge today, and one tomorrow; the mixing weight is the identity today."""
    model = make()
    graphs = [torch.eye(N, dtype=torch.float64), EDGE]
    penalty = seht.HessianTrace(model, weight=1.0, estimator=seht.SehtS(batch_dim=0))
    step = lambda: penalty(lambda: F.mse_loss(graphs[0] @ model(X), ROWS))
    step()
    graphs.reverse()
    with pytest.raises(seht.ExampleError, match="adds examples up before mse_loss"):
        step()
    with torch.no_grad():
        model.mixing.copy_(torch.eye(N))
    assert verdict(lambda z, m: F.mse_loss(m.mixing @ z, ROWS), model) == "too careful"


# --- every function of the tables -----------------------------------------------------------------

UNARY = """
    relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus
    sigmoid tanh logsigmoid tanhshrink softshrink hardshrink exp expm1 log log1p log2 log10 sqrt
    rsqrt square sin cos tan erf erfc abs reciprocal nan_to_num softsign neg negative clone
    contiguous float double detach softmax log_softmax softmin sum mean nansum normalize layer_norm
    cumsum cumprod logsumexp std var norm prod amax amin flip sort logcumsumexp max median rms_norm
    instance_norm glu diag_embed triu tril trace det inverse exponent square_ exp_ sqrt_ tanh_
    sigmoid_ relu_ logdet slogdet matrix_exp cholesky rot90 diff aminmax
""".split()  # noqa: SIM905
BINARY = """
    add sub subtract rsub mul multiply div divide true_divide pow maximum minimum fmax fmin atan2
    xlogy logaddexp hypot where lerp addcdiv addcmul matmul mse_loss l1_loss smooth_l1_loss
    huber_loss kl_div poisson_nll_loss binary_cross_entropy binary_cross_entropy_with_logits
    cross_entropy nll_loss soft_margin_loss gaussian_nll_loss cosine_similarity pairwise_distance
    cdist cat stack dot inner outer kron einsum linear bilinear copy_ add_ sub_ mul_ div_ addcmul_
    masked_fill multilabel_soft_margin_loss hinge_embedding_loss margin_ranking_loss
    multi_margin_loss triplet_margin_loss cosine_embedding_loss addmm baddbmm tensordot
""".split()  # noqa: SIM905
QUICK = {"exp", "sum", "softmax", "add", "mul", "div", "mse_loss", "addcmul", "copy_"}
OPTIONS = ({}, {"dim": 0}, {"dim": 1}, {"dim": -1, "keepdim": True}, {"reduction": "none"},
           {"reduction": "sum"})  # fmt: skip


def forms(name):
    """The functions of that name: of torch, of F, and the method."""
    homes = (F, torch, torch.Tensor)
    found = [getattr(home, name) for home in homes if callable(getattr(home, name, None))]
    return list(dict.fromkeys(found))


def call(function, name, arguments, options):
    if name in ("cat", "stack"):
        return function(list(arguments), **options)
    if name == "einsum":
        return function("ij,ij->i", *arguments)
    if name == "where":
        return function(ROWS > 0.5, *arguments)
    if name in ("layer_norm", "rms_norm"):
        return function(arguments[0], [K])
    if name in ("nll_loss", "cross_entropy") and "reduction" not in options:
        return function(arguments[0], TO % K, **options) + function(*arguments, **options)
    return function(*arguments, **options)


def wrong(name, count, kinds):
    """Every case of a function with ``count`` arguments that is accepted and no sum."""
    found, tried = [], 0
    for function in forms(name):
        for places in itertools.product(kinds, repeat=count):
            for options in OPTIONS:

                def of(z, m, function=function, places=places, options=options):
                    given = [KINDS[kind](z, m) for kind in places]
                    given = [t * 1 for t in given] if name.endswith("_") else given
                    return weighed(call(function, name, given, options))

                said = verdict(of)
                tried += said is not None
                if said == "WRONG":
                    found.append((str(function), places, options))
    return found, tried


def some(names):
    return [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in sorted(names)]


@pytest.mark.parametrize("name", some({*UNARY}))
def test_functions_of_one_tensor(name):
    found, _ = wrong(name, 1, KINDS)
    assert not found, found


@pytest.mark.parametrize("name", some({*BINARY}))
def test_functions_of_two_tensors(name):
    kinds = KINDS if name not in QUICK else ("examples", "mixed", "total", "weight")
    found, _ = wrong(name, 2, kinds)
    assert not found, found


@pytest.mark.parametrize("name", some({"addcmul", "addcdiv", "where", "lerp", "addmm", "baddbmm",
    "triplet_margin_loss", "gaussian_nll_loss", "cosine_embedding_loss", "mse_loss", "linear",
    "binary_cross_entropy", "addcmul_", "huber_loss"}))  # fmt: skip
def test_functions_of_three_tensors(name):
    kinds = ("examples", "mixed", "total", "weight") if name not in QUICK else ("examples", "mixed")
    found, _ = wrong(name, 3, kinds)
    assert not found, found
