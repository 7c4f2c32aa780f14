"""Tables and learning curves."""

import io
import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import ttest_rel

from fedstill.loop.references import References
from fedstill.report import human_bytes
from fedstill.report.curves import learning_curves, spread_apart
from fedstill.report.table import (
    MethodSummary,
    best_first,
    plain_table,
    reference_lines,
    reference_rows,
    rich_table,
    table_json,
    table_legend,
    table_rows,
)


def summary(method, *last):
    return MethodSummary(method, last, tuple(value + 0.01 for value in last), 1.25, 1_500_000, 999)


def test_the_worked_table():
    text = plain_table([summary("b", 0.5, 0.6, 0.7), summary("a", 0.8, 0.8, 0.9)])
    lines = [line.split() for line in text.splitlines()]
    # t of 2 degrees of freedom at 97.5 % is 4.303: 83.33 ± 4.303 · 5.774 / √3, 60 ± 4.303 · 10 / √3
    assert lines[1] == ["a", "83.33", "±", "5.77", "69.0–97.7", "a", "84.33", "1.2", "1.5", "MB", "999", "B"]
    assert lines[2][:5] == ["b", "60.00", "±", "10.00", "35.2–84.8"]


def test_an_interval_of_accuracies_ends_at_0_and_1():
    assert summary("a", 0.0, 0.9).interval == (0.0, 1.0)


def test_methods_that_differ_in_every_seed_have_other_letters_and_reference_points_none():
    high = [0.9 + noise for noise in (0.001, 0.003, -0.002, 0.0)]
    rows = [summary("low", 0.5, 0.51, 0.5, 0.5), summary("high", *high)]
    _, first, second, *points = plain_table([*rows, *reference_rows([references()] * 4)]).splitlines()
    assert (first.split()[5], second.split()[5]) == ("a", "b")
    assert all("none" in point for point in points)
    assert table_legend(rows)[2] == "high is better than every other method."


def test_a_table_survives_as_json():
    rows = [replace(summary("low", 0.5, 0.6), epsilon=2.0, metrics={"wrong %": 3.0}), summary("high", 0.8, 0.9)]
    rows += reference_rows([references(), references(pooled=0.7)])
    again = [MethodSummary.from_json(row) for row in json.loads(json.dumps(table_json(rows)))]
    assert plain_table(again) == plain_table(rows)


def test_a_table_read_again_shows_the_seconds_that_were_printed():
    """0.4497 s is 0.4 s, and 0.5 s if it is rounded to 0.450 before."""
    row = replace(summary("fedavg", 0.5, 0.6), seconds=0.4497)
    again = MethodSummary.from_json(json.loads(json.dumps(row.as_json())))
    assert plain_table([again]) == plain_table([row])


def test_the_data_of_a_table_say_how_a_method_differs_from_the_best_and_from_fedavg():
    best, fedavg = table_json([summary("fedavg", 0.5, 0.6, 0.7), summary("top", 0.8, 0.81, 0.9)])
    assert best["method"] == "top"
    assert "from_best" not in best
    assert best["from_fedavg"]["mean"] == pytest.approx(0.71 / 3)
    assert best["from_fedavg"]["p"] == pytest.approx(ttest_rel([0.8, 0.81, 0.9], [0.5, 0.6, 0.7]).pvalue)  # 0.018
    assert (best["from_fedavg"]["verdict"], fedavg["from_best"]["verdict"]) == ("better", "worse")
    assert (best["group"], fedavg["group"]) == ("a", "b")


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
    answer, whom, budget = reference_lines("m", [0.105], [references(alone=parties, majority=0.1)])
    assert answer == (
        "federated (m) 10.5 %, alone 9.5 % on average (best party 19.0 %), pooled 90.0 %, majority class 10.0 %"
    )
    assert "of 11 of 20 parties" in whom
    assert "worst tenth 0.5 %, best tenth 18.5 %" in whom
    assert budget == "a budget"


def test_a_model_that_always_answering_one_class_equals_is_called_no_better():
    said = [" ".join(reference_lines("m", [value], [references(majority=0.4)])) for value in (0.39, 0.4, 0.41)]
    assert ["no more often" in text for text in said] == [True, True, False]


def test_one_seed_shows_no_spread():
    assert summary("a", 0.5).std is None
    assert "±" not in plain_table([summary("a", 0.5)])


def test_the_terminal_table_has_the_same_cells_and_one_bold_row():
    table = rich_table([summary("low", 0.1, 0.2), summary("high[x]", 0.8, 0.9)])
    assert table.row_count == 2
    assert [row.style for row in table.rows] == ["bold green", None]
    assert [str(cell) for cell in table.columns[0].cells] == ["high[x]", "low"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_fits_and_cuts_no_number(width):
    name = "fedftg(iterations=4, generator.lam_cls=20.0, generator.lam_dis=20.0)"
    rows = [summary(name, 0.61, 0.72, 0.73), summary("fedavgm(beta=0.7)", 0.61, 0.62, 0.73)]
    console = Console(width=width, file=io.StringIO())
    console.print(rich_table(rows, width=width))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    printed = {word for line in text.splitlines() for word in line.split()}
    assert {word for row in table_rows(rows)[1:] for cell in row[1:] for word in cell.split()} <= printed
    assert "fedavgm(beta=0.7)" in text
    assert all(piece in text for piece in ("fedftg(iterations=4,", "generator.lam_cls=20.", "generator.lam_dis=20."))


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
