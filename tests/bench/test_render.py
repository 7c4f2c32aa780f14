"""Tables with ours beside the paper's, from hand-made runs."""

import pytest
from bench_cases import FEDAVG, FIGURES, LMD, RUNS, recipe_of, small, summary_rows

from fedstill.bench import Cell
from fedstill.bench.render import render_table, text_table
from fedstill.bench.summary import summarize_table


def test_markdown_has_the_papers_number_beside_ours_and_says_which_is_which():
    text = render_table(recipe_of(FEDAVG, LMD), "paper", "1", RUNS, FIGURES)
    header, _, first, second = (line for line in text.splitlines() if line.startswith("|"))
    names = [cell.strip() for cell in header.strip("|").split("|")]
    found = dict(zip(names, (cell.strip() for cell in second.strip("|").split("|")), strict=True))
    assert found == {
        "method": "fedntd",
        "best over rounds": "55.00 ± 7.07",
        "mean of last 10 rounds": "35.00 ± 7.07",
        "paper (best)": "50.00",
        "best - paper": "+5.00",
        "last 10 - paper": "-15.00",
        "speed-up": "1.50x ± 0.71",
        "paper's speed-up": "2.47x",
        "FedAvg's rounds / ours": "2.00x (1 of 2)",
        "seeds": "2",
    }
    assert "| 33.02 |" in first
    assert text.startswith("**digits**, 4 rounds\n")
    assert "Mean over seeds ± standard deviation" in text
    assert "over the seeds that reach it" in text
    assert "1.00x ± 0.00 |" in first, "no count where all seeds reach it"


@pytest.mark.parametrize(
    ("engines", "told"),
    [
        ([{}, {}, {}, {}], ""),
        ([{"precision": "bf16"}] * 4, ", precision = bf16"),
        ([{}, {}, *[{"precision": "bf16", "compile": True}] * 2], ", precision = bf16, compile = true (fedntd)"),
        ([{"chunk": 2}, {}, {}, {}], ", chunk = 2 (fedavg, 1 of 2 seeds)"),
        ([{"chunk": 2}, {}, *[{"chunk": 2}] * 2], ", chunk = 2 (fedavg, 1 of 2 seeds; fedntd)"),
    ],
)
def test_a_column_says_which_of_its_runs_had_another_engine(engines, told):
    runs = [{**run, "engine": engine} for run, engine in zip(RUNS, engines, strict=True)]
    text = render_table(recipe_of(FEDAVG, LMD), "paper", "1", runs, FIGURES)
    assert text.splitlines()[0] == f"**digits**, 4 rounds{told}"


def test_one_round_is_no_plural():
    lengths = {"a": (1,), "b": (1, 4), "c": (4,)}
    cells = [Cell(f"row{rounds}", column, small(rounds=rounds)) for column, some in lengths.items() for rounds in some]
    text = render_table(recipe_of(*cells), "paper", "1", [], {})
    assert [line for line in text.splitlines() if line.startswith("**")] == [
        "**a**, 1 round", "**b**, 1 or 4 rounds", "**c**, 4 rounds",
    ]  # fmt: skip


def test_what_was_not_run_and_what_is_not_printed_are_dashes():
    text = render_table(recipe_of(FEDAVG, LMD), "paper", "1", RUNS[:2], {})
    line = next(line for line in text.splitlines() if line.startswith("| fedntd"))
    assert set(line.replace("|", " ").split()) == {"fedntd", "–", "0"}
    empty = render_table(recipe_of(FEDAVG), "paper", "1", [], {})
    assert "speed-up" not in empty
    assert "Nothing run yet" in empty


def test_a_word_that_the_paper_prints_is_shown_as_it_is():
    expected = {"1": {"digits": {"fedntd": {"best": 50.0, "speedup": "failed"}}}}
    assert "| failed |" in render_table(recipe_of(FEDAVG, LMD), "paper", "1", RUNS, expected)
    only_last = {"1": {"digits": {"fedntd": {"last": 50.0}}}}
    assert "| paper (last rounds) |" in render_table(recipe_of(FEDAVG, LMD), "paper", "1", RUNS, only_last)


def cells_of(text: str, row: str) -> dict[str, str]:
    """Header and line of one row of a Markdown table."""
    header, line = (
        next(line for line in text.splitlines() if line.startswith(f"| {name} |")) for name in ("method", row)
    )
    names, values = ([cell.strip() for cell in line.strip("|").split("|")] for line in (header, line))
    return dict(zip(names, values, strict=True))


def test_where_the_paper_has_the_last_round_ours_stands_beside_it():
    """Last rounds 40 and 40 of FedNTD, 50 and 40 of FedAvg."""
    last = {"1": {"digits": {"fedntd": {"last": 42.5}}}}
    text = render_table(recipe_of(FEDAVG, LMD), "paper", "1", RUNS, last)
    fedntd = cells_of(text, "fedntd")
    assert (fedntd["last round"], fedntd["last round - paper"]) == ("40.00 ± 0.00", "-2.50")
    assert cells_of(text, "fedavg")["last round"] == "45.00 ± 7.07"
    assert "last round" not in cells_of(render_table(recipe_of(FEDAVG, LMD), "paper", "1", RUNS, FIGURES), "fedntd")
    assert summary_rows(expected=last)["fedntd"].as_json()["last_round"]["mean"] == 40.0


def test_a_gain_is_the_last_ten_rounds_less_those_of_the_best_other():
    """Means over four rounds and two seeds: FedAvg 27.5 and 35, FedNTD 40 and 30."""
    gains = {"1": {"digits": {"fedntd": {"gain": "at most 4"}}}}
    text = render_table(recipe_of(FEDAVG, LMD), "paper", "1", RUNS, gains)
    fedntd = cells_of(text, "fedntd")
    assert (fedntd["last 10 above the best other"], fedntd["paper's gain"]) == ("+3.75", "at most 4")
    assert cells_of(text, "fedavg")["last 10 above the best other"] == "-3.75"
    assert "paper" not in fedntd, "it prints no accuracy"
    assert summary_rows(RUNS[2:], expected=gains)["fedntd"].gain is None, "nobody else was run"


def test_what_runs_log_beside_their_accuracy_is_shown_where_somebody_has_it():
    logged = [{"pseudo_label_accuracy": [None, 70.0, 80.0, 90.0], "pseudo_labels": [0, 10, 20, 30]}, {}]
    runs = [*RUNS[:2], *({**run, "beside": beside} for run, beside in zip(RUNS[2:], logged, strict=True))]
    text = render_table(recipe_of(FEDAVG, LMD), "paper", "1", runs, FIGURES)
    fedntd = cells_of(text, "fedntd")
    assert (fedntd["pseudo-label accuracy"], fedntd["pseudo-labels"]) == ("80.00", "15.00")
    assert "before distillation" not in fedntd
    assert cells_of(text, "fedavg")["pseudo-labels"] == "–"
    assert "pseudo-label" in text.splitlines()[-1], "the legend says what it is"
    assert summary_rows(runs)["fedntd"].as_json()["beside"]["pseudo_labels"] == {"mean": 15.0, "std": None, "seeds": 1}


def test_plain_text_has_the_same_numbers_within_a_terminal():
    table = recipe_of(FEDAVG, LMD).tables["paper"]["1"]
    text = text_table(summarize_table(table, RUNS, FIGURES))
    assert "55.00 ± 7.07" in text
    assert max(len(line) for line in text.splitlines()) < 120


def with_target(cell, target, column):
    return Cell(cell.row, column, cell.experiment.replace(target=target))


def test_a_column_with_a_target_tells_in_which_round_it_is_reached():
    """FedAvg has 50 % in rounds 4 and 2, FedNTD in rounds 2 and 3; 60 % FedAvg once, in round 2, FedNTD once, in 3."""
    cells = [with_target(cell, t, f"to-{t}") for t in (0.5, 0.6, 0.7) for cell in (FEDAVG, LMD)]
    expected = {"1": {"to-0.5": {"fedntd": {"rounds": 2.67}}}}
    half, more, most = summarize_table(recipe_of(*cells).tables["paper"]["1"], RUNS, expected)
    assert [row.reached.mean for row in half.rows] == [3.0, 2.5]
    assert [(row.reached.mean, row.reached.seeds) for row in more.rows] == [(2.0, 1), (3.0, 1)]
    assert [row.reached for row in most.rows] == [None, None]
    assert half.as_json()["target"] == 50.0
    assert half.as_json()["rows"][1]["rounds_to_target"]["mean"] == 2.5
    first, second, third = render_table(recipe_of(*cells), "paper", "1", RUNS, expected).split("**to-")[1:]
    assert first.startswith("0.5**, 4 rounds, target 50 %")
    assert cells_of(first, "fedntd")["rounds to the target"] == "2.50 ± 0.71"
    assert cells_of(first, "fedntd")["paper's rounds"] == "2.67"
    assert cells_of(second, "fedntd")["rounds to the target"] == "3.00 (1 of 2)"
    assert "rounds to the target" not in cells_of(third, "fedntd"), "nobody has anything"
    assert "first evaluated round with that accuracy" in third
    alone = render_table(recipe_of(*cells[-2:]), "paper", "1", RUNS, {})
    assert "rounds to the target" not in alone.lower(), "no word about a column that is not shown"
