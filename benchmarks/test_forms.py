"""The tables of the pages are those of the records, and the records are of today's forms."""

import json
from pathlib import Path

import forms
import pytest

from fedstill.methods.lookup import build_method

DOCS = Path(__file__).parents[1] / "docs"
RUNS = json.loads((DOCS / "results" / "forms.json").read_text(encoding="utf-8"))["runs"]
PAPERS = list(forms.STUDIES)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_page_shows_the_table_of_the_records(paper):
    table = forms.table(paper, RUNS)
    study = forms.STUDIES[paper]
    assert len(table.splitlines()) == 2 + len(study.splits) * len(study.local) * len(study.seeds)
    assert table in (DOCS / "methods" / f"{paper}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_record_is_of_a_form_of_the_study_and_every_run_is_on_record_once(paper):
    study = forms.STUDIES[paper]
    wanted = {
        (*where[:4], method, where[4])
        for where in forms.places([paper], list(study.seeds))
        for method in study.forms.values()
    }
    places = [forms.place(run) for run in RUNS if run["paper"] == paper]
    assert set(places) == wanted
    assert len(places) == len(wanted)
    for method in study.forms.values():
        build_method(method)


def test_a_gain_is_paired_by_seed_as_worked_by_hand():
    """Differences 2, 4 and 3: mean 3, deviation 1, standard error 1 / sqrt(3) = 0.577."""
    assert forms.gain([52.0, 64.0, 43.0], [50.0, 60.0, 40.0]) == "+3.0 ± 0.6"
    assert forms.gain([48.0, 56.0], [50.0, 60.0]) == "-3.0 ± 1.0"


@pytest.mark.parametrize(("paper", "worst"), [("mrtf", 1.0), ("d2cfl", 1.0)])
def test_no_default_is_more_than_a_standard_error_below_fedavg(paper, worst):
    study = forms.STUDIES[paper]
    for data in study.seeds:
        for split in study.splits:
            where = (paper, data, split, "sgd")
            plain, ours = (
                forms.paired(RUNS, where, study.forms[name], study.counted) for name in ("FedAvg", "default")
            )
            mean, _, error = forms.gain(ours, plain).partition(" ± ")
            assert float(mean) >= -worst * float(error)


def test_runs_on_record_are_not_run_again_and_new_ones_are_added(tmp_path, monkeypatch, capsys):
    study = forms.STUDIES["d2cfl"]._replace(rounds=6, splits=("iid",), seeds={"digits": 1}, forms={"FedAvg": "fedavg"})
    monkeypatch.setattr(forms, "STUDIES", {"d2cfl": study})
    file = tmp_path / "records.json"
    forms.measure(["d2cfl"], ["digits"], file)
    (run,) = json.loads(file.read_text())["runs"]
    assert run["best"] >= run["last"] > 20
    assert forms.place(run) == ("d2cfl", "digits", "iid", "sgd", "fedavg", 0)
    capsys.readouterr()
    forms.measure(["d2cfl"], ["digits"], file)
    assert capsys.readouterr().out == ""
