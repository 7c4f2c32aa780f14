"""benchmarks/fedftg/ablation.py compares FedFTG's parts on the same splits, and tells the gain over FedAvg."""

import json
import runpy
import statistics

import pytest
from doc_pages import ROOT

from fedstill.methods.lookup import build_method

PATH = ROOT / "benchmarks" / "fedftg"


@pytest.fixture(scope="module")
def ablation():
    return runpy.run_path(str(PATH / "ablation.py"))


@pytest.fixture
def seen(ablation, monkeypatch):
    """Runs that take no time: accuracies by row, a point more for each seed; and what was asked for."""
    asked = []

    def run(experiment, *, federation, pictures):
        asked.append((experiment, federation))
        level = {"fedavg": 0.50}.get(experiment.method.name, 0.60) + 0.01 * experiment.seed
        rows = [{"accuracy": level + 0.2}, *[{"accuracy": level}] * 5]
        return type("Result", (), {"history": type("History", (), {"rows": rows})})

    monkeypatch.setitem(ablation["study"].__globals__, "run", run)
    monkeypatch.setitem(ablation["study"].__globals__, "build_federation", lambda setting: f"of seed {setting.seed}")
    return asked


def test_rows_share_a_split_and_are_told_as_mean_spread_and_gain_over_fedavg(ablation, seen, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert ablation["main"](["--seeds", "3", "--rows", "fedavg,no-hsm", "--json", str(file)]) == 0
    assert [(one.method.name, federation) for one, federation in seen] == [
        (name, f"of seed {seed}") for seed in range(3) for name in ("fedavg", f"{PATH / 'released.py'}:fedftg")
    ]
    assert seen[1][0].method.options == {"discrepancy": "none"}
    _, base, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert base[:8] == ["fedavg", "51.0", "±", "1.0", "-", "71.0", "±", "1.0"]
    assert row[:10] == ["no-hsm", "61.0", "±", "1.0", "+10.0", "±", "0.0", "81.0", "±", "1.0"]
    found = json.loads(file.read_text())
    assert found["no-hsm"]["last"] == pytest.approx([60.0, 61.0, 62.0])
    assert statistics.fmean(found["no-hsm"]["best"]) == pytest.approx(81.0)


def test_a_real_run_of_one_round(ablation, monkeypatch, capsys):
    tiny = ablation["SCENES"]["norm"].replace(model={"name": "mlp", "hidden": [8]}, local={"steps": 1})
    monkeypatch.setitem(ablation["SCENES"], "norm", tiny)
    assert ablation["main"](["--scene", "norm", "--rows", "fedavg,default", "--seeds", "1", "--rounds", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "row"
    assert [line.split()[0] for line in lines] == ["fedavg", "default"]


def test_every_row_is_a_method_and_those_of_table_4_are_the_recipes(ablation):
    for text in ablation["ROWS"].values():
        build_method(text)
    recipe = runpy.run_path(str(PATH / "recipe.py"))
    forms = ablation["FORMS"]
    for name, options in recipe["GONE"].items():
        assert forms[f"no-{name}"] == options
    for name, options in recipe["LOSSES"].items():
        assert forms[name] == options


def test_an_unknown_row_is_refused_with_those_there_are(ablation, capsys):
    with pytest.raises(SystemExit):
        ablation["main"](["--rows", "fedavg,no-hms"])
    assert "no row no-hms: there are fedavg, default, no-hsm" in capsys.readouterr().err
