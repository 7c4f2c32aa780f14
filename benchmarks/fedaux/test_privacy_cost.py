"""The picture of what privacy costs, and the script that makes its numbers."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from pictures import assert_no_label_is_clipped, saved_figures
from privacy_picture import best_lambda, epsilons_of, privacy_cost_picture

from fedstill.core.errors import FedstillError
from fedstill.methods.lookup import build_method

SCRIPT = Path(__file__).parent / "privacy_cost.py"
COSTS = {
    0.1: {math.inf: [0.40, 0.42], 8.0: [0.40, 0.42], 1.0: [0.40, 0.40]},
    0.001: {math.inf: [0.68, 0.72], 8.0: [0.5, 0.7], 1.0: [0.3, 0.4]},
}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw a picture and return its axes."""
    figures = saved_figures(monkeypatch)

    def draw(costs=COSTS, levels=None):
        path = privacy_cost_picture(costs, tmp_path / "cost.png", title="a study", levels=levels or {})
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def heights(figure, label):
    (line,) = [line for line in figure.axes[0].get_lines() if line.get_label() == label]
    return line.get_ydata().tolist()


def test_the_best_lambda_is_another_one_for_every_epsilon():
    assert epsilons_of(COSTS) == [1.0, 8.0, math.inf]
    assert [best_lambda(COSTS, epsilon) for epsilon in (1.0, 8.0, math.inf)] == [0.1, 0.001, 0.001]
    with pytest.raises(FedstillError, match="no run has epsilon = 3"):
        best_lambda(COSTS, 3.0)


def test_a_line_a_lambda_and_the_best_of_them_from_the_strongest_promise_to_none(drawn):
    figure = drawn()
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "8", "no noise"]
    assert heights(figure, "best lambda") == pytest.approx([40.0, 60.0, 70.0])
    flat, steep = (line.get_ydata().tolist() for line in axes.get_lines()[:2])
    assert flat == pytest.approx([40.0, 41.0, 41.0])
    assert steep == pytest.approx([35.0, 60.0, 70.0])
    assert "one standard deviation" in axes.get_title(loc="left")
    assert_no_label_is_clipped(figure, at_least=8)


def test_what_has_no_epsilon_is_a_level_with_its_name_and_number(drawn):
    figure = drawn(levels={"sum, no claim": [0.75, 0.77], "FedDF": [0.36]})
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"76.0  sum, no claim", "36.0  FedDF", "70.0  lambda = 0.001"} <= texts
    assert_no_label_is_clipped(figure, at_least=8)


def test_a_lambda_without_runs_is_left_out_and_no_run_at_all_is_an_error(drawn):
    figure = drawn({**COSTS, 0.01: {1.0: []}})
    assert not any("0.01" in text.get_text() for text in figure.axes[0].texts)
    with pytest.raises(FedstillError, match=r"cannot draw cost\.png"):
        drawn({0.1: {1.0: []}})


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPT))


def test_the_script_says_in_words_of_methods_what_the_recipe_s_rows_mean(script):
    method = script["method"]
    head = 'fedaux(student.steps=100, student.lr=0.001, score="probability", lam=0.01'
    assert method("sum", 0.01, "probability") == f'{head}, form="sum")'
    assert method("mean-epsilon-8", 0.01, "probability") == f'{head}, form="mean", epsilon=8.0)'


def test_its_feddf_is_fedaux_with_equal_scores(script):
    """The same part of the unlabeled rows, and the same average: only the scores are missing."""
    ours = script["baseline"]()
    assert ours == "feddf(student.steps=100, student.lr=0.001, distill_share=0.8)+average"
    (feddf,), (fedaux,) = build_method(ours), build_method(script["method"]("sum", 0.01, "probability"))
    assert feddf.method.aggregate == fedaux.method.aggregate


def run_of(row, column, accuracy):
    return {"row": row, "column": column, "accuracy": accuracy, "seed": 0}


def test_the_script_draws_what_the_bench_has_found(script, tmp_path, capsys):
    runs = [
        run_of("sum", "tiny-lambda-0.1", [10.0, 70.0]), run_of("mean", "tiny-lambda-0.1", [20.0, 30.0]),
        run_of("mean", "tiny-lambda-0.001", [50.0, 60.0]), run_of("mean-epsilon-8", "tiny-lambda-0.001", [55.0, 54.0]),
        run_of("mean", "stl10-lambda-0.1", [1.0, 1.0]), run_of("fedavg", "tiny-alpha-0.01-c-0.4", [2.0]),
    ]  # fmt: skip
    file, picture = tmp_path / "results.json", tmp_path / "cost.png"
    file.write_text(json.dumps({"paper": "fedaux", "runs": runs}))
    assert script["main"](["--results", str(file), "--out", str(picture), "--measure", "best"]) == 0
    lines = {line.split("  ")[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert lines["mean, no noise"] == "60.0"
    assert lines["mean, epsilon 8"] == "55.0"
    assert lines["mean, epsilon 1"] == "-"
    assert picture.exists()
    with pytest.raises(SystemExit, match="no run of table privacy with svhn"):
        script["main"](["--results", str(file), "--auxiliary", "svhn"])


@pytest.mark.slow
def test_scores_help_much_and_true_privacy_costs_most_of_it(script, tmp_path):
    """The page's claim at one seed: the sum far above FedDF, the mean at epsilon 8 between, at 0.1 nothing is left."""
    file = tmp_path / "numbers.json"
    script["main"](["--seeds", "1", "--out", "", "--json", str(file)])
    best: dict[str, float] = {}
    for cell in json.loads(file.read_text()):
        best[cell["row"]] = max(best.get(cell["row"], 0.0), *cell["accuracy"])
    assert best["sum"] > best["feddf"] + 0.2
    assert best["sum"] - 0.1 < best["mean"]
    assert best["mean"] - 0.05 > best["mean-epsilon-8"] > best["feddf"] + 0.1
    assert abs(best["mean-epsilon-0.1"] - best["feddf"]) < 0.1
