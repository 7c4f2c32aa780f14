"""Texts of a sweep become points, and all mistakes come at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill import Experiment, FedstillError
from fedstill.experiment.points import Axis, best_experiment, points_of, read_axes, united


def swept(*over, search=0, **settings):
    return Experiment(compare={"over": list(over), "search": search, "seeds": 2}, **settings)


def test_a_grid_has_every_combination_and_each_point_is_an_experiment():
    points = points_of(swept("local.lr=0.01,0.1", "method=fedavg,fedprox(mu=0.5)"))
    assert list(points) == [
        "local.lr=0.01, method=fedavg",
        "local.lr=0.01, method=fedprox(mu=0.5)",
        "local.lr=0.1, method=fedavg",
        "local.lr=0.1, method=fedprox(mu=0.5)",
    ]
    last = points["local.lr=0.1, method=fedprox(mu=0.5)"]
    assert (last.local.lr, last.method.name, last.method.options) == (0.1, "fedprox", {"mu": 0.5})


def test_points_are_scored_on_held_back_rows_and_the_best_experiment_is_not():
    experiment = swept("local.lr=0.01,0.1")
    point = points_of(experiment)["local.lr=0.1"]
    assert (point.evaluate, point.data.client_test_share) == ("client_rows", 0.2)
    best = best_experiment(experiment, point)
    assert (best.evaluate, best.data, best.local.lr) == (experiment.evaluate, experiment.data, 0.1)
    assert not best.compare.over
    share = swept("local.lr=0.01,0.1", data={"client_test_share": 0.3})
    assert points_of(share)["local.lr=0.1"].data.client_test_share == 0.3


def test_all_mistakes_come_at_once_with_their_cure():
    with pytest.raises(FedstillError) as error:
        points_of(swept("seed=1,2", "local.lr=", "local.momentum=0.1,0.1", "local.epochs=0.5..2", "cohort"))
    for words in ("use --seeds N", "a value is missing", "stands there twice", "add --search N", "name its values"):
        assert words in str(error.value)


def test_a_wrong_value_names_its_key():
    with pytest.raises(FedstillError, match=r"local\.lr = -1"):
        points_of(swept("local.lr=0.1,-1"))


def test_a_range_needs_two_positive_numbers():
    for text in ("local.lr=0..1", "local.lr=1..0.1", "local.lr=a..b"):
        with pytest.raises(FedstillError, match="two numbers above 0"):
            read_axes(swept(text, search=3))


def test_a_method_proposes_its_own_values():
    experiment = swept("method.mu", method={"name": "fedprox"})
    (axis,) = read_axes(experiment)
    from fedstill.methods.options import tries

    assert axis == Axis("method.mu", tuple(str(value) for value in tries("fedprox")["mu"]))
    (searched,) = read_axes(swept("method", search=5, method={"name": "fedprox"}))
    assert searched.is_range
    assert [float(end) for end in searched.values] == [min(tries("fedprox")["mu"]), max(tries("fedprox")["mu"])]


def test_too_large_a_grid_is_refused():
    many = ",".join(str(number) for number in range(1, 16))
    with pytest.raises(FedstillError, match="more than 200 points"):
        points_of(swept(f"cohort={many}", f"local.steps={many}"))


def test_two_sweeps_over_the_same_keys_are_united_and_others_are_refused():
    old = swept("local.lr=0.01,0.1", "cohort=2,4")
    grown = united(old, swept("cohort=4,8", "local.lr=1.0"), where="x")
    assert grown["over"] == ["local.lr=0.01,0.1,1.0", "cohort=2,4,8"]
    with pytest.raises(FedstillError, match=r"a sweep over local\.lr, cohort"):
        united(old, swept("local.lr=1.0"), where="x")
    searched = swept("local.lr=0.01..0.1", search=5)
    assert united(searched, swept("local.lr=0.01..0.1", search=9), where="x")["search"] == 9
    with pytest.raises(FedstillError, match="only --search may grow"):
        united(searched, swept("local.lr=0.01..1.0", search=9), where="x")


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5, unique=True))
def test_the_text_of_an_axis_is_read_back_to_the_same_axis(values):
    (axis,) = read_axes(swept("local.lr=" + ",".join(map(repr, values))))
    assert read_axes(swept(axis.text)) == (axis,)
    assert [float(value) for value in axis.values] == values
