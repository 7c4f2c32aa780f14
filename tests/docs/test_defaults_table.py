"""Methods with their defaults beside FedAvg: the table shows the runs, and no method hurts everywhere."""

import importlib.util
import json
import runpy
import statistics

import pytest
from doc_pages import ROOT

from fedstill.about.defaults import is_below_everywhere, measured, sentences, side_of
from fedstill.about.explain import explain
from fedstill.cli.info import explain_text
from fedstill.methods import METHODS

PAGE = ROOT / "docs" / "methods" / "README.md"
ADD_NOISE_ON_PURPOSE = {"update_noise", "dp_fedavg"}


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "leaderboard" / "run.py"))


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_method_pages", ROOT / "tools" / "make_method_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records(script):
    return script["read_records"](script["RESULTS"])


def test_every_method_was_run_with_the_defaults_that_it_has_today(script, records):
    missing = list(script["missing"](records, list(METHODS), script["SEEDS"], script["DEFAULTS"]))
    assert missing == [], "run: python benchmarks/leaderboard/run.py --federations defaults, then make pages"


def test_a_changed_default_makes_a_run_missing(script, records):
    def key(method):
        return script["key_of"](script["experiment_of"]("digits_strong", method, 0))

    assert key("fedprox") == key("fedprox(mu=0.01)") != key("fedprox(mu=0.02)")
    changed = [{**record, "key": "other"} if record["seed"] == 3 else record for record in records]
    missing = list(script["missing"](changed, ["fedprox"], script["SEEDS"], script["DEFAULTS"]))
    assert missing == [(federation, "fedprox", 3) for federation in script["DEFAULTS"]]


def test_no_method_is_more_than_one_standard_error_below_fedavg_on_all_three_federations(script, records):
    """Counted here from the records with the textbook's formula, not with the tool that writes the page."""
    accuracy = {
        (run["federation"], run["method"], run["seed"]): run["last_rounds"] for run in records if "last_rounds" in run
    }

    def is_below(method, federation):
        gains = [
            accuracy[federation, method, seed] - accuracy[federation, "fedavg", seed]
            for seed in script["SEEDS"]
            if (federation, method, seed) in accuracy
        ]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if gains else 0.0
        return bool(gains) and statistics.fmean(gains) < -error - 1e-6  # one loss among ties is exactly one error

    hurt = {method for method in METHODS if all(is_below(method, name) for name in script["DEFAULTS"])}
    assert hurt <= ADD_NOISE_ON_PURPOSE


def test_the_page_names_the_methods_that_may_be_below(tool):
    assert set(tool.NOISE) == ADD_NOISE_ON_PURPOSE
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{' and '.join(map(tool.title, tool.NOISE))} may be, because they add noise on purpose" in text


def test_the_table_on_the_page_shows_the_records(script, records):
    lines = PAGE.read_text(encoding="utf-8").partition("## With their defaults")[2].splitlines()
    rows = {line.partition("](")[2].partition(".md")[0]: line.split(" | ")[1:] for line in lines if "](" in line}
    shown = 0
    for method in METHODS:
        for column, federation in enumerate(script["DEFAULTS"]):
            runs = [run for run in records if (run["method"], run["federation"]) == (method, federation)]
            if "refused" in runs[0]:
                assert rows[method][column].startswith("does not apply")
                continue
            mean = statistics.fmean(run["last_rounds"] for run in runs if run["seed"] in script["SEEDS"])
            assert float(rows[method][column].split()[0]) == pytest.approx(mean, abs=0.051)
            shown += 1
    assert shown > 3 * len(METHODS) - 8


def test_differences_are_paired_by_seed(tool):
    """By hand: gains 1, 2, 3 have the mean 2, the deviation 1 and the error 1 / sqrt(3)."""
    runs = [{"method": "x", "seed": seed, "last_rounds": value} for seed, value in ((0, 51.0), (1, 72.0), (2, 93.0))]
    found = tool.figures_of(runs, {2: 90.0, 1: 70.0, 0: 50.0})
    assert found == {"accuracy": 72.0, "difference": 2.0, "error": 0.577}
    assert side_of(found) == "above"
    assert tool.figures_of([{"refused": "no images"}], {}) == {"refused": "no images"}


def test_explain_and_the_page_of_a_method_show_its_figures_in_their_first_lines():
    (line,) = sentences("fedprox")
    text = " ".join(explain_text(explain("fedprox")).split())
    assert line in text.partition("F_k")[0]
    page = (ROOT / "docs" / "methods" / "fedprox.md").read_text(encoding="utf-8")
    assert line in " ".join(page.partition("```toml")[0].split())
    for figures in measured()["methods"]["fedprox"].values():
        assert f"{abs(figures['difference']):.1f} ± {figures['error']:.1f}" in line


def test_a_method_that_is_below_everywhere_says_when_it_helps():
    below = [method for method in METHODS if is_below_everywhere(method)]
    assert "dp_fedavg" in below
    assert [method for method in below if not explain(method)["helps"]] == []


def test_other_functions_have_no_figures():
    assert sentences("median") == sentences("fedprox(mu=0.5)") == []


def test_the_experiment_files_have_three_different_skews(script):
    files = [(ROOT / "benchmarks" / "leaderboard" / f"{name}.toml").read_text() for name in script["DEFAULTS"]]
    assert len({file.partition("[partition]")[2].partition("[model]")[0] for file in files}) == len(files) == 3


def test_the_package_holds_the_figures_of_the_records(tool):
    assert json.loads(tool.FIGURES.read_text(encoding="utf-8")) == json.loads(tool.figures_text())
