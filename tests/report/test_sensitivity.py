"""How much each key of a sweep matters, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from fedstill.report.sensitivity import in_letters, in_sentences, sensitivity

# accuracy = 0.5 + 0.2 * (a is 2) + 0.1 * (b is y), so a explains 0.04 / (0.04 + 0.01) of the variance
EXACT = {"a=1, b=x": [0.5], "a=1, b=y": [0.6], "a=2, b=x": [0.7], "a=2, b=y": [0.8]}


def test_the_effect_of_a_key_is_the_range_of_its_means_and_its_share_of_the_variance():
    found = sensitivity(EXACT)
    a, b = found.effects
    assert (a.key, a.best, a.worst, b.key, b.best) == ("a", "2", "1", "b", "y")
    assert (a.range, b.range) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (a.share, b.share) == (pytest.approx(0.8), pytest.approx(0.2))
    assert a.values["2"] == (pytest.approx(0.75), 0.7, 0.8)
    assert found.best == "a=2, b=y"
    assert found.cells == {("1", "x"): 0.5, ("1", "y"): 0.6, ("2", "x"): 0.7, ("2", "y"): 0.8}


def test_a_third_key_leaves_the_best_of_its_points_in_the_map():
    scores = {f"{name}, c={c}": [score - 0.01 * c] for name, (score,) in EXACT.items() for c in (0, 1)}
    found = sensitivity(scores)
    assert found.cells == {("1", "x"): 0.5, ("1", "y"): 0.6, ("2", "x"): 0.7, ("2", "y"): 0.8}
    assert "the best over c" in found.map_title


def test_sentences_name_the_best_point_and_a_value_at_the_end_of_its_range():
    lines = in_sentences(sensitivity({"lr=0.1": [0.5], "lr=1": [0.7], "lr=10": [0.6]}))
    assert lines[0] == "lr=1 is best, with 70.0 %."
    assert not any("that was tried" in line for line in lines)
    lines = in_sentences(sensitivity({"lr=0.1": [0.5], "lr=1": [0.6], "lr=10": [0.7]}))
    assert lines[-1] == "Its lr is the largest that was tried: try larger ones, too."


def test_a_difference_is_shown_only_if_all_seeds_agree():
    (same,) = sensitivity({"a=1": [0.5, 0.6, 0.7, 0.5], "a=2": [0.6, 0.5, 0.7, 0.6]}).effects
    (other,) = sensitivity({"a=1": [0.5, 0.6, 0.7, 0.5], "a=2": [0.71, 0.8, 0.92, 0.7]}).effects
    (unknown,) = sensitivity({"a=1": [0.5], "a=2": [0.6]}).effects
    assert (same.is_shown, other.is_shown, unknown.is_shown) == (False, True, None)


def test_numbers_that_no_two_points_share_are_put_into_three_groups():
    names = [f"lr={lr}, mu={mu}" for lr, mu in zip((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (6, 5, 4, 3, 2, 1), strict=True)]
    found = sensitivity({name: [0.5 + place / 10] for place, name in enumerate(names)})
    assert [list(effect.values) for effect in found.effects] == [
        ["0.1 to 0.2", "0.3 to 0.4", "0.5 to 0.6"],
        ["1 to 2", "3 to 4", "5 to 6"],
    ]
    (alone,) = sensitivity({f"lr={lr}": [lr] for lr in (0.1, 0.2, 0.3, 0.4, 0.5)}).effects
    assert list(alone.values) == ["0.1", "0.2", "0.3", "0.4", "0.5"]


def test_a_table_of_methods_is_no_sweep():
    assert sensitivity({"fedavg": [0.5], "fedprox(mu=0.1)": [0.6]}) is None
    assert sensitivity({"lr=1": [0.5]}) is None


def test_the_terminal_shows_the_map_and_the_longest_bar_at_the_best_mean():
    text = in_letters(sensitivity(EXACT))
    assert "b \\ a     1     2\nx      50.0  70.0\ny      60.0  80.0" in text
    bars = {line.split()[-3 + (line.count("█") == 0)]: line.count("█") for line in text.splitlines() if "█" in line}
    assert bars["2"] == max(bars.values()) == 24
    assert bars["1"] == round(24 * 0.55 / 0.75)
