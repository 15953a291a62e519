"""Eigenvalues, density and stability against the whole matrix of a small network."""

import math

import pytest
import torch
import torch.nn.functional as F
from curved_problems import data, exact_hessian, loss_fn, network
from torch import nn

from seht import measure
from seht.measure.krylov import lanczos


@pytest.fixture(scope="module")
def problem():
    model, batch = network(nn.Tanh), data()
    return model, batch, torch.linalg.eigvalsh(exact_hessian(model, batch))


def big(activation=nn.ReLU):
    """Past the size at which the matrix is made whole."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 24), activation(), nn.Linear(24, 3)).double()


@pytest.mark.parametrize("micro_batch", [None, 10])
@pytest.mark.parametrize("make", [network, big])
def test_eigenvalues_are_those_of_the_matrix(make, micro_batch):
    model, batch = make(), data()
    exact = torch.linalg.eigvalsh(exact_hessian(model, batch))
    found = measure.eigenvalues(
        model, loss_fn, batch, largest=4, smallest=2, micro_batch=micro_batch, tol=1e-8
    )
    assert found.converged and found.samples == 48 and found.weights == len(exact)
    assert found.largest == pytest.approx(exact.flip(0)[:4].tolist(), abs=1e-7)
    assert found.smallest == pytest.approx(exact[:2].tolist(), abs=1e-7)
    assert max(*found.largest_residuals, *found.smallest_residuals) < 1e-6


def test_eigenvectors():
    model, batch = big(), data()
    matrix = exact_hessian(model, batch)
    found = measure.eigenvalues(model, loss_fn, batch, largest=2, smallest=1, vectors=True)
    for value, vector in zip([*found.largest, *found.smallest], found.vectors, strict=True):
        assert float((matrix @ vector - value * vector).norm()) < 1e-3 * abs(value)


def test_the_gauss_newton_matrix_is_positive():
    model, (x, y) = big(), data()
    found = measure.eigenvalues(model, loss_fn, (x, y), curvature="ggn", largest=3)
    jacobian = torch.autograd.functional.jacobian
    weights = [p for p in model.parameters() if p.dim() >= 2]

    def outputs(*w):
        h = F.relu(x @ w[0].T + model[0].bias)
        return h @ w[1].T + model[2].bias

    parts = jacobian(outputs, tuple(w.detach() for w in weights))
    j = torch.cat([p.flatten(2) for p in parts], 2)
    p = model(x).softmax(1).detach()
    h = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(x)
    exact = torch.linalg.eigvalsh(torch.einsum("nia,nij,njb->ab", j, h, j))
    assert found.largest == pytest.approx(exact.flip(0)[:3].tolist(), rel=1e-4)
    assert found.converged and abs(found.smallest[0]) < 1e-3 * found.largest[0]


def test_what_does_not_converge_is_told():
    found = measure.eigenvalues(
        big(), loss_fn, data(), largest=8, smallest=0, tol=1e-14, max_products=10
    )
    assert not found.converged and found.products <= 60


def test_one_space_for_both_ends():
    """In fewer products than ARPACK, which looks first and builds a space for each end."""
    model, batch = big(), data()
    exact = torch.linalg.eigvalsh(exact_hessian(model, batch))
    options = {"largest": 2, "smallest": 2, "tol": 1e-6}
    found = measure.eigenvalues(model, loss_fn, batch, solver="lanczos", **options)
    assert found.converged
    assert found.largest == pytest.approx(exact.flip(0)[:2].tolist(), abs=1e-8)
    assert found.smallest == pytest.approx(exact[:2].tolist(), abs=1e-8)
    assert max(*found.largest_residuals, *found.smallest_residuals) < 1e-6
    assert found.products < measure.eigenvalues(model, loss_fn, batch, **options).products
    with pytest.raises(ValueError, match="did you mean 'lanczos'"):
        measure.eigenvalues(model, loss_fn, batch, solver="lanczso")


@pytest.mark.parametrize("products", [1, 3, 6])
def test_a_search_that_gives_up_has_bounds(products):
    model, batch = big(nn.Tanh), data()
    exact = torch.linalg.eigvalsh(exact_hessian(model, batch))
    found = measure.eigenvalues(
        model, loss_fn, batch, solver="lanczos", largest=1, smallest=1, max_products=products
    )
    assert not found.converged and found.products == products + 2
    assert exact[0] < found.smallest[0] <= found.largest[0] < exact[-1]
    # However bad the vector, the residual says how near an eigenvalue is.
    for value, residual in ((found.largest[0], found.largest_residuals[0]),
                            (found.smallest[0], found.smallest_residuals[0])):  # fmt: skip
        assert (exact - value).abs().min() <= residual


def test_products_without_second_derivatives():
    """A custom Function without a double backward, of which autograd.grad silently makes 0."""
    model, batch = big(nn.Tanh), data()
    exact = torch.linalg.eigvalsh(exact_hessian(model, batch))

    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad / ctx.saved_tensors[0].cosh() ** 2

    def loss(model, batch):
        h = Tanh.apply(model[0](batch[0]))
        return F.cross_entropy(model[2](h), batch[1])

    wrong = torch.linalg.eigvalsh(exact_hessian(model, batch, loss))
    assert (wrong - exact).abs().max() > 0.01 * exact.max()
    found = measure.eigenvalues(model, loss, batch, largest=2)
    assert found.differences
    assert found.largest == pytest.approx(exact.flip(0)[:2].tolist(), rel=1e-4)


def test_dropout_does_not_change_between_products():
    model = nn.Sequential(nn.Linear(5, 24), nn.Dropout(0.5), nn.Tanh(), nn.Linear(24, 3)).double()
    found = measure.eigenvalues(model.train(), loss_fn, data(), largest=2, smallest=0)
    assert found.converged and max(found.largest_residuals) < 1e-3


# --- density ----------------------------------------------------------------------------------


def test_lanczos_sees_every_moment():
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 30, generator=draw, dtype=torch.float64)
    matrix = matrix + matrix.T
    start = torch.randn(30, generator=draw, dtype=torch.float64)
    nodes, weights = lanczos(lambda v: matrix @ v, start, 10)
    assert len(nodes) == 10 and float(weights.sum()) == pytest.approx(1)
    v = start / start.norm()
    for power in range(20):  # a Gauss rule of m nodes is exact up to degree 2m - 1
        exact = float(v @ torch.linalg.matrix_power(matrix, power) @ v)
        assert float((weights * nodes**power).sum()) == pytest.approx(exact, rel=1e-8)


def test_lanczos_has_no_ghosts():
    """Without reorthogonalisation large eigenvalues come again and again."""
    values = torch.cat([torch.tensor([100.0, 50.0]), torch.linspace(0, 1, 98)]).double()
    nodes, _ = lanczos(lambda v: values * v, torch.ones(100).double(), 60)
    assert (nodes > 40).sum() == 2


def test_lanczos_stops_in_an_invariant_subspace():
    values = torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0]).double()
    nodes, weights = lanczos(lambda v: values * v, torch.ones(5).double(), 5)
    assert nodes.tolist() == pytest.approx([1, 3]) and weights.tolist() == pytest.approx([0.6, 0.4])


def test_density(problem):
    model, batch, exact = problem
    found = measure.density(model, loss_fn, batch, probes=20, steps=20)
    area = sum(found.density) * (found.grid[1] - found.grid[0])
    assert area == pytest.approx(1, abs=1e-3)
    assert abs(found.trace - float(exact.sum())) < 4 * found.trace_stderr
    share = float((exact > 0.05).double().mean())
    assert found.share(0.05, 99) == pytest.approx(share, abs=0.05)
    one = measure.density(model, loss_fn, batch, probes=1, steps=5)
    assert math.isnan(one.trace_stderr) and one.as_dict()["trace_stderr"] is None


# --- stability --------------------------------------------------------------------------------


class Bowl(nn.Module):
    """A quadratic with known curvatures and minimum."""

    def __init__(self, curvatures, at=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((1, len(curvatures)), at, dtype=torch.float64))
        self.h = torch.tensor(curvatures, dtype=torch.float64)

    def forward(self, x):
        return (self.h * self.w**2).sum() / 2 + 0 * x.sum()


@pytest.mark.parametrize(
    ("curvatures", "verdict"),
    [([4.0, 1.0], "stable"), ([4.0, -1.0], "unstable"), ([4.0, 0.0], "marginal")],
)
def test_verdicts(curvatures, verdict):
    found = measure.stability(Bowl(curvatures, 1e-6), lambda m, x: m(x), torch.zeros(2, 1))
    assert found.verdict == verdict
    assert found.largest_rate == pytest.approx(0.5)
    low, high = found.largest_rate_interval
    assert low <= 0.5 <= high
    assert sorted(found.jacobian) == pytest.approx(sorted(-c for c in curvatures))
    said = str(found)  # one verdict, and no learning rate is called stable beside "unstable"
    assert f"flow is {verdict};" in said and said.count("stable") == verdict.count("stable")
    assert "diverges above a learning rate of 0.5" in said
    assert ("no learning rate makes gradient descent settle" in said) == (verdict == "unstable")


def test_a_negative_bound_is_enough_for_a_verdict():
    torch.manual_seed(0)
    curvatures = torch.linspace(-1, 4, 200).tolist()
    found = measure.stability(
        Bowl(curvatures, 1e-6), lambda m, x: m(x), torch.zeros(2, 1), largest=1, smallest=1,
        solver="lanczos", max_products=6,
    )  # fmt: skip
    assert not found.eigenvalues.converged and -1 < found.eigenvalues.smallest[0] < 0
    assert found.verdict == "unstable"
    above = [c + 1 for c in curvatures]
    found = measure.stability(
        Bowl(above, 1e-6), lambda m, x: m(x), torch.zeros(2, 1), largest=1, smallest=1,
        solver="lanczos", max_products=6,
    )  # fmt: skip
    assert found.verdict == "undecided"


def test_equilibrium():
    far = measure.stability(Bowl([4.0, 1.0], 1.0), lambda m, x: m(x), torch.zeros(2, 1))
    assert not far.equilibrium and "no equilibrium" in str(far)
    assert far.gradient_norm == pytest.approx(math.sqrt(17))
    here = Bowl([4.0, 1.0], 0.0)
    here.w.data[0, 1] = 1e-9
    near = measure.stability(here, lambda m, x: 1 + m(x) + 0 * m.w.sum(), torch.zeros(2, 1))
    assert near.gradient_norm < 1e-8
    zero = measure.stability(Bowl([4.0, 1.0], 0.0), lambda m, x: m(x), torch.zeros(2, 1))
    assert zero.equilibrium and zero.distance == 0


def test_the_largest_rate_is_where_gradient_descent_breaks(problem):
    model, batch, exact = problem
    found = measure.stability(model, loss_fn, batch)
    assert found.largest_rate == pytest.approx(2 / float(exact.max()), rel=1e-6)
    bowl = Bowl([8.0, 1.0], 0.1)
    rate = measure.stability(bowl, lambda m, x: m(x), torch.zeros(2, 1)).largest_rate
    for factor, shrinks in ((0.98, True), (1.02, False)):
        w = torch.tensor([0.1, 0.1]).double()
        for _ in range(200):
            w = w - factor * rate * bowl.h * w
        assert (float(w.norm()) < 0.1) is shrinks
