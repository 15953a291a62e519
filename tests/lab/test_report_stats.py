"""Means, errors and paired intervals against another library and against known tables."""

import math
import random
import statistics

import pytest
from scipy import stats as reference

from seht.lab.report.stats import Difference, Mean, holm, mean, paired, seeds_needed, student


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
    test = reference.ttest_rel(list(b.values()), list(a.values()))
    assert found.p == pytest.approx(test.pvalue, rel=1e-9)
    assert found.spread == pytest.approx(statistics.stdev(b[k] - a[k] for k in a))


def test_differences_without_spread():
    same = dict.fromkeys(range(3), 1.0)
    assert paired(same, same).p == 1.0
    # Steps of one test example: their spread is unknown, and three signs say little.
    for step in (1.0, 100 / 114):
        base = {k: 90 + 0.1 * k for k in range(3)}
        found = paired({k: value + step for k, value in base.items()}, base)
        assert found == Difference(pytest.approx(step), None, None, 3, p=0.25)


def test_accuracies_of_few_examples_do_not_make_a_table_certain():
    """Ten methods without an effect, two seeds, a test set of 50: differences are often equal."""
    draw, called = random.Random(5), 0
    for _ in range(300):
        right = [[sum(draw.random() < 0.9 for _ in range(50)) for _ in "ab"] for _ in range(11)]
        runs = [{seed: 2.0 * count for seed, count in enumerate(counts)} for counts in right]
        ps = {str(k): paired(ours, runs[0]).p for k, ours in enumerate(runs[1:])}
        called += min(holm(ps).values()) < 0.05
    assert called / 300 < 0.08


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


def test_figures_are_written_with_the_digits_they_have():
    assert str(Mean(97.314, 0.123, 3)) == "97.31 ± 0.12"
    assert str(Mean(97.314, None, 1)) == "97.31"
    assert Mean(1234.56, 56.78, 3).measured == "1,235 ± 57"
    assert Mean(0.012345, 0.00067, 3).measured == "0.01235 ± 0.00067"
    assert Mean(-0.5, None, 1).measured == "\u22120.500"
    assert Mean(math.nan, None, 2).measured == "not finite"
    assert str(Difference(0.42, -0.1, 0.94, 3)) == "+0.42 [\u22120.10, +0.94]"
    assert str(Difference(-0.42, None, None, 1)) == "\u22120.42"
    assert Mean(7982.0, 234.0, 1).measured == "7,980 ± 230"


# --- several methods --------------------------------------------------------------------------


def rejected_step_by_step(found, level):
    """Holm's procedure as he describes it: the smallest first, until one is kept."""
    names, out = sorted(found, key=found.get), set()
    for done, name in enumerate(names):
        if found[name] >= level / (len(names) - done):
            break
        out.add(name)
    return out


def test_holm_is_his_procedure_at_every_level():
    draw = random.Random(2)
    for _ in range(200):
        found = {f"m{i}": draw.random() ** 4 for i in range(draw.randint(1, 7))}
        corrected = holm(found)
        assert list(corrected) == list(found)
        for level in (0.01, 0.05, 0.3):
            out = {name for name, p in corrected.items() if p < level}
            assert out == rejected_step_by_step(found, level)
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert holm({}) == {}


def test_a_table_without_effects_makes_a_mistake_in_one_of_twenty():
    """Ten methods against one baseline, so that the comparisons depend on each other."""
    draw, plain, corrected = random.Random(3), 0, 0
    for _ in range(1000):
        base = {seed: draw.gauss(0, 1) for seed in range(5)}
        found = {}
        for method in range(10):
            ours = {seed: draw.gauss(0, 1) for seed in base}
            found[str(method)] = paired(ours, base).p
        plain += min(found.values()) < 0.05
        corrected += min(holm(found).values()) < 0.05
    assert corrected / 1000 < 0.065 < 0.2 < plain / 1000


@pytest.mark.parametrize("effect, seeds", [(2.0, 5), (1.0, 10), (0.8, 15), (0.5, 34), (0.2, 199)])
def test_the_number_of_seeds_of_the_printed_tables(effect, seeds):
    """Cohen's, for a paired t-test at 5 % with a power of 80 %."""
    assert seeds_needed(effect, 1.0) == seeds
    assert seeds_needed(3 * effect, 3.0) == seeds


def test_more_methods_need_more_seeds_and_no_spread_needs_two():
    assert seeds_needed(1.0, 1.0, tests=10) > seeds_needed(1.0, 1.0)
    assert seeds_needed(1.0, 0.0) == 2
    assert seeds_needed(1e-6, 1.0) is None


def test_so_many_seeds_do_show_it_four_times_in_five():
    draw, seen, n = random.Random(4), 0, seeds_needed(1.0, 1.3)
    for _ in range(1500):
        ours = {seed: draw.gauss(1.0, 1.3) for seed in range(n)}
        seen += paired(ours, dict.fromkeys(range(n), 0.0)).p < 0.05
    assert 0.77 < seen / 1500 < 0.86
