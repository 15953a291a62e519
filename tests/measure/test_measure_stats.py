"""The error of a mean over strata: Student's t, degrees of freedom, and what is no error."""

import math

import pytest
import torch
from scipy import stats as scipy_stats

from seht.measure.stats import Visit, pool, sampling_error, student


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("dof", [1, 1.7, 2, 5, 30, 400.5])
def test_student_is_scipys(level, dof):
    assert student(level, dof) == pytest.approx(scipy_stats.t.ppf((1 + level) / 2, dof), rel=1e-6)


def test_student_refuses_a_level_that_is_none():
    for level in (0, 1, 95, -1):
        with pytest.raises(ValueError, match="level must lie between 0 and 1"):
            student(level, 3)
    assert math.isnan(student(0.95, 0))


def visits(spread, strata=16, replicates=2, between=0.0, seed=0, readings=1):
    draw = torch.Generator().manual_seed(seed)
    centres = between * torch.randn(strata, generator=draw, dtype=torch.float64)
    return [
        Visit(k, 4, c + spread * torch.randn(replicates, 1, generator=draw, dtype=torch.float64))
        for k in range(readings)
        for c in centres
    ]


@pytest.mark.parametrize(
    ("strata", "replicates", "readings"), [(1, 2, 1), (1, 5, 2), (8, 2, 1), (20, 2, 2), (3, 4, 1)]
)
def test_the_interval_holds_the_mean_and_ignores_the_spread_between_strata(
    strata, replicates, readings
):
    inside, dofs = 0, []
    for seed in range(200):
        found = visits(1.0, strata, replicates, 100.0, seed, readings)
        draw = torch.Generator().manual_seed(seed)
        truth = 100 * float(torch.randn(strata, generator=draw, dtype=torch.float64).mean())
        pooled = pool(found)
        half = student(0.95, pooled.dof) * math.sqrt(float(pooled.variance[0]))
        inside += abs(float(pooled.mean[0]) - truth) <= half
        dofs.append(pooled.dof)
    assert 0.915 <= inside / 200 <= 0.985
    most = strata * (replicates - 1) * readings
    assert max(dofs) <= most and sum(dofs) / 200 > 0.6 * most


def test_one_replicate_has_no_error():
    pooled = pool(visits(1.0, replicates=1))
    assert math.isnan(float(pooled.variance[0])) and pooled.dof == 0


def test_weights_are_the_numbers_of_examples():
    two = [Visit(0, 1, torch.tensor([[1.0], [1.0]])), Visit(0, 3, torch.tensor([[5.0], [5.0]]))]
    assert float(pool(two).mean[0]) == 4.0


def test_sampling_error_is_the_spread_between_without_that_of_the_probes():
    expected = 3.0 / math.sqrt(50)
    found = [sampling_error(visits(1.0, 50, 2, 3.0, seed)) for seed in range(40)]
    assert sum(found) / 40 == pytest.approx(expected, rel=0.05)
    none = [sampling_error(visits(1.0, 50, 2, 0.0, seed)) for seed in range(40)]
    assert sum(none) / 40 < 0.07
    assert math.isnan(sampling_error(visits(1.0, 1)))
