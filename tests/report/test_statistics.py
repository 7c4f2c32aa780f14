"""Statistics of methods that share their seeds, against SciPy and against definitions."""

import math
from itertools import combinations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedstill.report.statistics import NO_DIFFERENCE, difference, estimate, holm, in_words, judge, letters


def test_intervals_and_tests_are_those_of_scipy_in_300_random_cases():
    draw = np.random.default_rng(0)
    for _ in range(300):
        seeds = int(draw.integers(2, 31))
        ours, other = draw.normal(draw.uniform(0, 1), draw.uniform(0.001, 0.2), (2, seeds))
        about = estimate(ours)
        expected = scipy.stats.ttest_1samp(ours, 0.0).confidence_interval(0.95)
        assert (about.low, about.high) == pytest.approx((expected.low, expected.high))
        assert about.std == pytest.approx(scipy.stats.tstd(ours))
        found, paired = difference("a", ours, "b", other), scipy.stats.ttest_rel(ours, other)
        interval = paired.confidence_interval(0.95)
        assert found.p == pytest.approx(paired.pvalue)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
        if seeds < 6:
            assert found.p_ranks is None
        else:
            assert found.p_ranks == pytest.approx(scipy.stats.wilcoxon(ours, other).pvalue)
        if seeds > 2:  # Hedges (1981), with the gamma function of SciPy
            gaps, freedom = ours - other, seeds - 1
            bias = scipy.special.gamma(freedom / 2) / scipy.special.gamma((freedom - 1) / 2) / math.sqrt(freedom / 2)
            assert found.effect == pytest.approx(bias * gaps.mean() / gaps.std(ddof=1))


def test_holm_is_the_closed_test_of_bonferroni_in_200_random_cases():
    """A hypothesis is rejected if every set of hypotheses with it is; a set's p is its size times its least p."""
    draw = np.random.default_rng(1)
    for _ in range(200):
        p = draw.uniform(0, 1, int(draw.integers(1, 8))) ** 3
        sets = [s for size in range(1, len(p) + 1) for s in combinations(range(len(p)), size)]
        by_definition = [max(min(1, len(s) * min(p[list(s)])) for s in sets if i in s) for i in range(len(p))]
        assert holm(p) == pytest.approx(by_definition)


def random_methods(draw, *, methods, seeds, lead=0.0):
    """Accuracies around 0.7: each seed moves all methods, and each run by noise of its own; one method leads.

    A lead of 1 is one standard deviation of the differences between two methods.
    """
    split, noise = draw.normal(0.7, 0.05, seeds), draw.normal(0, 0.01, (methods, seeds))
    values = {f"method{place}": split + row for place, row in enumerate(noise)}
    values["method0"] = values["method0"] + lead * 0.01 * math.sqrt(2)
    return values


@pytest.mark.parametrize(("methods", "seeds"), [(2, 3), (2, 5), (2, 15), (8, 5)])
def test_equal_methods_are_told_apart_in_at_most_6_of_100_repetitions(methods, seeds):
    draw = np.random.default_rng(2)
    repetitions = 2000 if methods == 2 else 300
    judged = [judge(random_methods(draw, methods=methods, seeds=seeds)) for _ in range(repetitions)]
    none_shown = sum(set(each.groups.values()) == {"a"} for each in judged)
    assert none_shown >= 0.94 * repetitions


def test_a_lead_of_one_standard_deviation_is_found_in_at_least_80_of_100_repetitions_of_15_seeds():
    draw = np.random.default_rng(3)
    judged = [judge(random_methods(draw, methods=2, seeds=15, lead=1.0)) for _ in range(1000)]
    found = sum(each.best == "method0" and each.from_best["method1"].verdict == "worse" for each in judged)
    assert found >= 800


def test_the_same_numbers_under_two_names_are_no_difference_shown():
    for seeds in (2, 3, 15):
        values = np.linspace(0.6, 0.7, seeds)
        judged = judge({"fedavg": values, "twin": values})
        assert judged.from_baseline["twin"].verdict == NO_DIFFERENCE
        assert judged.groups == {"fedavg": "a", "twin": "a"}


def test_a_constant_lead_has_the_p_value_of_the_sign_test():
    """0.712 - 0.7 and 0.812 - 0.8 differ by a rounding error, and the t-test would divide by it."""
    found = difference("a", [0.712, 0.812, 0.912], "b", [0.7, 0.8, 0.9])
    assert found.p == scipy.stats.binomtest(3, 3).pvalue
    assert found.verdict == NO_DIFFERENCE


def test_methods_are_paired_by_seed_and_not_pooled():
    """The seeds differ by far more than the methods, which only the pairing sees."""
    lucky, unlucky = [0.5, 0.9, 0.6, 0.8, 0.7], [0.481, 0.879, 0.58, 0.78, 0.68]
    assert difference("a", lucky, "b", unlucky).verdict == "better"
    assert scipy.stats.ttest_ind(lucky, unlucky).pvalue > 0.5


def test_only_seeds_that_both_methods_have_are_compared():
    found = difference("a", [0.5, 0.6, 0.9], "b", [0.4, 0.51])
    assert found.seeds == 2
    assert found.mean == pytest.approx(0.095)


def test_one_seed_says_nothing_and_few_seeds_say_that_intervals_are_wide():
    one = judge({"fedavg": [0.5], "fedprox": [0.9]})
    assert one.from_baseline["fedprox"].verdict == "nothing can be said from one seed"
    assert in_words(one) == [
        "One seed: nothing can be said about differences, because another seed may turn the order round."
    ]
    for seeds, wide in ((2, True), (4, True), (5, False)):
        words = in_words(judge({"a": [0.1 * place for place in range(seeds)], "b": [0.3] * seeds}))
        assert ("wide" in words[-1]) is wide


def test_the_words_name_who_is_better_and_who_cannot_be_told_from_the_best():
    draw = np.random.default_rng(4)
    values = {"fedavg": draw.normal(0.5, 0.01, 10), "low": draw.normal(0.3, 0.01, 10)}
    values |= {"top": draw.normal(0.8, 0.01, 10)}
    values["twin"] = values["top"] - draw.normal(0.0005, 0.01, 10)
    judged = judge(values)
    best, other = (judged.best, ({"top", "twin"} - {judged.best}).pop())
    assert in_words(judged) == [
        f"{best} is better than fedavg and low; no difference shown between it and {other}.",
        f"Compared with fedavg alone (3 tests instead of 6): better: {best} and {other}; worse: low.",
    ]
    assert dict(judged.groups) == {best: "a", other: "a", "fedavg": "b", "low": "c"}


def test_a_method_without_a_number_is_left_out():
    judged = judge({"broken": [math.nan, 0.5], "a": [0.5, 0.6], "b": [0.4, 0.7]})
    assert set(judged.groups) == {"a", "b"}
    assert judge({"broken": [math.nan], "a": [0.5]}) is None


@given(st.integers(1, 7), st.data())
def test_names_share_a_letter_exactly_if_they_are_not_apart(count, data):
    names = [f"n{place}" for place in range(count)]
    apart = [pair for pair in combinations(names, 2) if data.draw(st.booleans())]
    found = letters(names, apart)
    for pair in combinations(names, 2):
        assert bool(set(found[pair[0]]) & set(found[pair[1]])) is (pair not in apart)
    assert all(found.values())
