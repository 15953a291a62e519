"""Means, errors and paired intervals against another library and against known tables."""

import math
import random

import pytest
from scipy import stats as reference

from seht.lab.report.numbers import duration, interval, measured, plain, significant
from seht.lab.report.stats import Difference, Mean, mean, paired, student


def test_mean_and_standard_error():
    found = mean([1.0, 2.0, 4.0])
    assert found.n == 3 and found.value == pytest.approx(7 / 3)
    assert found.error == pytest.approx(reference.sem([1.0, 2.0, 4.0]))


def test_of_one_seed_there_is_no_error():
    assert mean([3.0]) == Mean(3.0, None, 1)
    assert mean([]) is None


def test_a_value_that_is_not_finite_spoils_the_mean():
    for values in ([1.0, math.inf], [math.inf, -math.inf], [math.nan, 1.0]):
        found = mean(values)
        assert math.isnan(found.value) and found.error is None and found.n == 2


@pytest.mark.parametrize("freedom, quantile", [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042)])
def test_quantiles_of_the_printed_tables(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, abs=5e-4)


def test_paired_difference_is_that_of_a_paired_t_test():
    draw = random.Random(0)
    a = {seed: draw.gauss(95, 1) for seed in range(5)}
    b = {seed: value + draw.gauss(0.4, 0.3) for seed, value in a.items()}
    found = paired(b, a)
    wanted = reference.ttest_rel(list(b.values()), list(a.values())).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert found.value == pytest.approx((wanted.low + wanted.high) / 2)


def test_pairs_are_made_of_seeds_that_both_have():
    found = paired({0: 2.0, 1: 9.0, 3: 4.0}, {3: 1.0, 0: 1.0, 2: 100.0})
    assert found.n == 2 and found.value == 2.0
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert paired({0: 1.0}, {0: 3.0}) == Difference(-2.0, None, None, 1)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    draw, held = random.Random(1), 0
    for _ in range(2000):
        found = paired({seed: draw.gauss(1, 2) for seed in range(4)}, dict.fromkeys(range(4), 0.0))
        held += found.low < 1 < found.high
    assert 0.935 < held / 2000 < 0.965


def test_clear_means_without_zero():
    assert Difference(1.0, 0.5, 1.5, 3).clear and Difference(-1.0, -1.5, -0.5, 3).clear
    assert not Difference(1.0, -0.5, 2.5, 3).clear
    assert not Difference(1.0, None, None, 1).clear


def test_figures_are_written_with_the_digits_they_have():
    assert plain(Mean(97.314, 0.123, 3)) == "97.31 ± 0.12"
    assert plain(Mean(97.314, None, 1)) == "97.31"
    assert measured(Mean(1234.56, 56.78, 3)) == "1,235 ± 57"
    assert measured(Mean(0.012345, 0.00067, 3)) == "0.01235 ± 0.00067"
    assert measured(Mean(-0.5, None, 1)) == "\u22120.500"
    assert measured(Mean(math.nan, None, 2)) == "not finite"
    assert interval(Difference(0.42, -0.1, 0.94, 3)) == "+0.42 [\u22120.10, +0.94]"
    assert interval(Difference(-0.42, None, None, 1)) == "\u22120.42"
    assert [significant(v) for v in (0, 1, 123456, 1e9)] == ["0", "1.00", "123,456", "1.00e+09"]
    assert [duration(s) for s in (3.21, 45, 600, 9000)] == ["3.21 s", "45 s", "10.0 min", "2.5 h"]
