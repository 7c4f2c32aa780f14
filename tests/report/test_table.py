"""Tables and learning curves."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.loop.references import References
from fedstill.report import human_bytes
from fedstill.report.curves import learning_curves, spread_apart
from fedstill.report.table import MethodSummary, best_first, plain_table, reference_lines, reference_rows, rich_table


def summary(method, *last):
    return MethodSummary(method, last, tuple(value + 0.01 for value in last), 1.25, 1_500_000, 999)


def test_the_worked_table():
    text = plain_table([summary("b", 0.5, 0.6, 0.7), summary("a", 0.8, 0.8, 0.9)])
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == ["a", "83.33", "±", "5.77", "84.33", "1.2", "1.5", "MB", "999", "B"]
    assert lines[2][:4] == ["b", "60.00", "±", "10.00"]


def test_columns_line_up():
    lines = plain_table([summary("short", 0.5, 0.6), summary("a-much-longer-name", 0.1, 0.2)]).splitlines()
    assert len({line.rindex(" B") for line in lines[1:]}) == 1


def test_the_best_mean_comes_first_and_what_is_no_number_last():
    rows = best_first([summary("nan", math.nan), summary("low", 0.1), summary("high", 0.9)])
    assert [row.method for row in rows] == ["high", "low", "nan"]


def references(*, alone=(0.25, 0.75), pooled=0.9, majority=0.4):
    rows = ({"accuracy": value} for value in (majority, pooled))
    own = tuple({"accuracy": value} for value in alone)
    return References("yes", *rows, alone=own, clients=tuple(range(len(alone))), rounds=1, budget=("a budget",))


def test_reference_points_stand_below_all_methods_however_good_they_are():
    rows = [summary("low", 0.1, 0.1), *reference_rows([references(), references(alone=(0.5, 0.9), pooled=1.0)])]
    _, *lines = plain_table(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["low", "pooled", "alone", "majority"]
    assert lines[1].split()[1] == "95.00"
    assert lines[2].split()[2] == "60.00"


def test_the_answer_names_every_reference_and_counts_whom_the_federation_serves_better():
    parties = [place / 100 for place in range(20)]
    answer, whom, budget = reference_lines("m", [0.105], [references(alone=parties)])
    assert answer == (
        "federated (m) 10.5 %, alone 9.5 % on average (best party 19.0 %), pooled 90.0 %, majority class 40.0 %"
    )
    assert "of 11 of 20 parties" in whom
    assert "worst tenth 0.5 %, best tenth 18.5 %" in whom
    assert budget == "a budget"


def test_one_seed_shows_no_spread():
    assert summary("a", 0.5).std is None
    assert "±" not in plain_table([summary("a", 0.5)])


def test_the_terminal_table_has_the_same_cells_and_one_bold_row():
    table = rich_table([summary("low", 0.1, 0.2), summary("high[x]", 0.8, 0.9)])
    assert table.row_count == 2
    assert [row.style for row in table.rows] == ["bold green", None]
    assert [str(cell) for cell in table.columns[0].cells] == ["high[x]", "low"]


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (40_700_000, "40.7 MB"), (5e12, "5.0 TB")]
)
def test_bytes_are_for_people(count, told):
    assert human_bytes(count) == told


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.01, 0.2))
def test_labels_are_kept_in_order_and_apart(places, gap):
    ordered = sorted(places)
    moved = spread_apart(ordered, gap)
    assert len(moved) == len(ordered)
    assert all(after - before >= gap - 1e-9 for before, after in pairwise(moved))
    assert sum(moved) == pytest.approx(sum(ordered))


def test_labels_that_do_not_touch_stay_where_they_are():
    assert spread_apart([0.1, 0.5, 0.9], 0.05) == pytest.approx([0.1, 0.5, 0.9])


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("rounds", [1, 30])
def test_curves_are_a_picture_for_many_methods_even_of_one_round(tmp_path, seeds, rounds):
    numbers = list(range(1, rounds + 1))
    curves = {f"method{m}": [(numbers, [(m + s) / 40 for _ in numbers]) for s in range(seeds)] for m in range(10)}
    path = learning_curves(curves, tmp_path / "curves.png", title="a title", target=0.2)
    from PIL import Image

    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] > 1000
    colours = {tuple(colour) for colour in pixels.reshape(-1, 3)[::7]}
    assert (0x00, 0x72, 0xB2) in colours  # the first method's line or label is really drawn
