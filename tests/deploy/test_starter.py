from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from deployments import NAMES, a_deployment, experiment, table

from fedstill.core.errors import FedstillError
from fedstill.deploy.folder import read_deployment, read_site
from fedstill.deploy.starter import Asked, write_deployment
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import run


def asked(folder, **changes):
    return Asked(**{"names": NAMES, "folder": folder, "address": "fed.example:9092", **changes})


def test_the_agreed_form_stands_in_the_file_and_no_place_and_no_row_does(tmp_path):
    deployment = a_deployment(tmp_path)
    table_ = tomllib.loads((deployment.folder / "experiment.toml").read_text())["data"]
    assert table_["classes"] == ["ill", "well"]
    assert table_["columns"] == {"sex": ["f", "m"], "age": "numbers", "glucose": "numbers"}
    assert len(table_["mean"]) == len(table_["std"]) == 4
    assert table_["label"] == "outcome"
    assert str(tmp_path) not in (deployment.folder / "experiment.toml").read_text()


def test_all_parties_get_the_same_experiment_and_each_its_own_files(tmp_path):
    deployment = a_deployment(tmp_path)
    texts = {path.read_bytes() for path in deployment.folder.rglob("experiment.toml")}
    assert len(texts) == 1
    for name in NAMES:
        files = {path.name for path in deployment.site_folder(name).iterdir()}
        assert {"site.toml", "start.sh", "README.md", f"fedstill-site-{name}.service"} <= files
        assert os.access(deployment.site_folder(name) / "start.sh", os.X_OK)
    assert {"server.toml", "start.sh", "fedstill-server.service"} <= {
        p.name for p in (tmp_path / "dep/server").iterdir()
    }
    texts = [path.read_text() for path in deployment.folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if re.search("@[a-z]+@", text)]  # a place that was to be filled


def test_a_server_without_test_rows_lets_the_sites_measure(tmp_path):
    pilot = table(tmp_path / "pilot.csv", 60, 0)
    plain = experiment(pilot, data={"source": str(pilot), "label": "outcome", "drop": ["patient_id"]})
    lines = write_deployment(plain, asked(tmp_path / "dep"))
    changed = read_deployment(tmp_path / "dep").experiment
    assert (changed.evaluate, changed.data.client_test_share) == ("client_rows", 0.2)
    assert any("each site holds back 20%" in line for line in lines)


def test_whose_words_the_vocabulary_has_is_said_and_every_party_gets_it(tmp_path, caplog):
    pilot, own = tmp_path / "pilot.csv", tmp_path / "own.txt"
    pilot.write_text("text,label\n" + "the team won,sport\nthe bank lent,money\n" * 8)
    own.write_text("the team and the bank\n" * 4)
    form = {"source": str(pilot), "label": "label", "inputs": ["text"], "tokens": 6, "vocabulary": 100}
    small = {"name": "bert", "layers": 1, "hidden": 8, "heads": 2, "inner": 8}
    for unlabeled, words in (("none", "if these texts are one party's, it tells of them"), (str(own), "server's own")):
        asks = experiment(pilot, "fedavg", data={**form, "unlabeled": unlabeled}, model=small)
        lines = write_deployment(asks, asked(tmp_path / words[:5]))
        (line,) = (line for line in lines if line.startswith("vocabulary: "))
        assert words in line
        deployment = read_deployment(tmp_path / words[:5])
        assert len({path.read_bytes() for path in deployment.folder.rglob("tokenizer.json")}) == 1
        assert all((deployment.site_folder(name) / "tokenizer.json").is_file() for name in NAMES)


def test_rows_of_the_servers_own_stay_with_the_server(tmp_path):
    pilot, test = table(tmp_path / "pilot.csv", 60, 0), table(tmp_path / "test.csv", 30, 9)
    own = {"source": str(pilot), "label": "outcome", "drop": ["patient_id"], "test": str(test), "unlabeled": str(test)}
    write_deployment(experiment(pilot, data=own), asked(tmp_path / "dep"))
    deployment = read_deployment(tmp_path / "dep")
    assert (deployment.test, deployment.unlabeled) == (str(test), str(test))
    assert deployment.experiment.evaluate == "global_test"
    site = read_site(deployment.site_folder("north"))
    assert (site.experiment.data.test, site.experiment.data.unlabeled) == (None, "none")


def test_the_contract_of_a_run_says_the_form_as_well_as_its_data_do(tmp_path):
    pilot = table(tmp_path / "pilot.csv", 60, 0)
    simulated = experiment(pilot, rounds=1)
    run(simulated, run_dir=tmp_path / "run", pictures=False)
    for name, contract in (("a", None), ("b", tmp_path / "run")):
        write_deployment(simulated, asked(tmp_path / name, contract=contract))
    first, second = (read_deployment(tmp_path / name).experiment.data for name in "ab")
    assert first == second


def test_keys_that_agree_already_are_taken_as_they_are_and_no_data_are_read(tmp_path):
    agreed = {
        "source": "(at the sites)", "label": "outcome", "classes": ["a", "b"], "columns": {"age": "numbers"},
        "mean": [60.0], "std": [9.0],
    }  # fmt: skip
    write_deployment(experiment("nowhere", data=agreed), asked(tmp_path / "dep"))
    data = read_deployment(tmp_path / "dep").experiment.data
    assert (data.classes, data.columns, data.mean) == (("a", "b"), {"age": "numbers"}, (60.0,))


def test_the_cohort_is_at_most_all_sites(tmp_path):
    lines = write_deployment(experiment(table(tmp_path / "p.csv", 60, 0)), asked(tmp_path / "dep", names=("a", "b")))
    assert read_deployment(tmp_path / "dep").experiment.cohort == 2
    assert any(line.startswith("cohort: 2 sites") for line in lines)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data": {"unlabeled": 10}}, "data.unlabeled takes rows away from clients"),
        ({"data": {"validation": 10}}, "data.validation takes rows away from clients"),
        ({"data": {"client_rows": 20}}, "data.client_rows takes rows away from clients"),
        ({"model": {"name": "mlp", "start": "runs/first"}}, "model.start: sites have no such file"),
        ({"evaluate": "mine.py:look"}, "code of your own does not travel"),
        (
            {"method": "dp_fedavg(trust='nobody')", "privacy": {"epsilon": 50.0}},
            "privacy.epsilon: the server has no rows",
        ),
        ({"method": "feddf"}, "unlabeled"),
        ({"method": "dp_fedavg"}, r"all sites know it: use a method .*dp_fedavg\(trust=.nobody.\)"),
    ],
)
def test_what_cannot_work_between_parties_is_refused_with_its_key(tmp_path, monkeypatch, changes, line):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def look(weights, test, trainer):\n    return {'accuracy': 0.0}\n")
    pilot = table(tmp_path / "pilot.csv", 60, 0)
    data = {"source": str(pilot), "label": "outcome", "drop": ["patient_id"], **changes.get("data", {})}
    with pytest.raises(FedstillError, match=line):
        write_deployment(experiment(pilot, **{**changes, "data": data}), asked(tmp_path / "dep"))


def test_a_folder_with_files_is_never_written_over(tmp_path):
    a_deployment(tmp_path)
    with pytest.raises(FedstillError, match="holds files"):
        write_deployment(experiment(tmp_path / "pilot.csv"), asked(tmp_path / "dep"))


def test_the_file_of_the_agreement_still_reads_as_an_experiment(tmp_path):
    deployment = a_deployment(tmp_path)
    assert Experiment.from_toml(deployment.folder / "experiment.toml") == deployment.experiment
    with pytest.raises(FedstillError, match="rows of this run are at its sites"):
        run(deployment.experiment)
