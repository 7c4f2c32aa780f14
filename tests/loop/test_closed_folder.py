"""A folder whose claim is complete holds nothing beside the release, and a run's secret is not in it."""

import dataclasses
import json

import pytest
import torch
from running import run_on_trial

import fedstill
from fedstill.about.toy import trial_federation
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import Secret, draw_cohort
from fedstill.experiment.build import build_federation
from fedstill.experiment.config import Experiment
from fedstill.experiment.overrides import parse_method
from fedstill.loop.closed_folder import OF_CLIENTS
from fedstill.methods import dp_fedavg, fedavg, moon
from fedstill.methods.lookup import build_method
from fedstill.privacy.plan import Privacy
from fedstill.privacy.statement import FOLDER, OPEN_FOLDER
from fedstill.storage.secrets import ID_FILE, secret_of

LOUD = dp_fedavg(noise_multiplier=8.0)
REPEATED = Privacy(reproducible=True)
SETTING = {
    "rounds": 2, "cohort": 3, "engine": {"device": "cpu"}, "model": {"name": "mlp", "hidden": [8]},
    "partition": {"scheme": "lda", "clients": 6, "alpha": 0.5},
    "method": {"name": "dp_fedavg", "clip": 0.5, "noise_multiplier": 8.0},
}  # fmt: skip


def same(one, other) -> bool:
    return all(torch.equal(leaf, other.weights.params[name]) for name, leaf in one.weights.params.items())


def test_two_runs_of_one_seed_have_other_noise_unless_they_are_to_be_reproducible():
    assert not same(run_on_trial(LOUD), run_on_trial(LOUD))
    assert same(run_on_trial(LOUD, privacy=REPEATED), run_on_trial(LOUD, privacy=REPEATED))
    assert same(run_on_trial(fedavg()), run_on_trial(fedavg()))


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_resumed_run_repeats_its_noise_and_cohorts_from_its_secret(tmp_path, sampling):
    how = {"sampling": sampling, "checkpoint_every": 1}
    run_on_trial(LOUD, rounds=2, run_dir=tmp_path / "cut", **how)
    whole = run_on_trial(LOUD, rounds=4, secret=secret_of(tmp_path / "cut"), **how)
    assert same(run_on_trial(LOUD, rounds=4, run_dir=tmp_path / "cut", resume=True, **how), whole)


def test_a_run_is_not_resumed_without_its_secret(tmp_path, monkeypatch):
    run_on_trial(LOUD, run_dir=tmp_path / "run", checkpoint_every=1)
    monkeypatch.setenv("FEDSTILL_STATE", str(tmp_path / "elsewhere"))
    with pytest.raises(FedstillError, match="is not on this machine"):
        run_on_trial(LOUD, rounds=5, run_dir=tmp_path / "run", resume=True)


def test_a_run_without_noise_that_protects_has_no_secret(tmp_path):
    run_on_trial(fedavg(), run_dir=tmp_path / "plain")
    run_on_trial(LOUD, privacy=REPEATED, run_dir=tmp_path / "repeated")
    assert not list(tmp_path.rglob(ID_FILE))


def test_private_cohorts_do_not_follow_from_the_seed_and_have_the_same_chances():
    clients = torch.arange(50).numpy()
    public = [draw_cohort(clients, 10, seed=3, round=number, sampling="poisson").tolist() for number in range(40)]
    hidden = [
        draw_cohort(clients, 10, seed=Secret.of(b"one"), round=number, sampling="poisson").tolist()
        for number in range(40)
    ]
    assert sum(one == other for one, other in zip(public, hidden, strict=True)) == 0
    assert 8 < sum(map(len, hidden)) / 40 < 12
    some = draw_cohort(clients[5:9], 2, seed=Secret.of(b"one"), round=0, sampling="poisson")
    assert set(some.tolist()) <= {5, 6, 7, 8}


def test_a_public_seed_claims_nothing_and_says_what_a_secret_would(tmp_path):
    made = run_on_trial(LOUD, privacy=REPEATED, run_dir=tmp_path).privacy
    claim, secret, *_ = made.text().split("\n")
    assert claim.startswith("no claim: the seed is public (privacy.reproducible = true)")
    assert secret.startswith("with a secret seed: epsilon = ")
    written = json.loads((tmp_path / "privacy.json").read_text())
    assert written["claims"] == written["spent"] == []
    assert written["with_a_secret"][0]["epsilon"] == run_on_trial(LOUD).privacy.claims[0].epsilon


def test_a_closed_folder_has_no_measurement_of_clients_data(tmp_path):
    made = run_on_trial(LOUD, sampling="poisson", rounds=6, run_dir=tmp_path)
    assert FOLDER in made.privacy.assumptions
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == made.history.rows
    for row in rows:
        assert row["train_loss"] is None
        assert row.keys().isdisjoint({*OF_CLIENTS} - {"train_loss"})
        assert row["cohort"] == row["accepted"] == 2  # the expected size, whoever came
    assert len({(row["bytes_up"], row["bytes_down"]) for row in rows}) == 1
    assert (tmp_path / "audit.jsonl").read_text() == ""
    assert "not kept" in (tmp_path / "log.txt").read_text()


def test_a_closed_folder_shows_generated_samples_and_no_training_sample_beside_them(tmp_path):
    """Of a generator that learnt from noisy models the samples are covered. Training samples near to them are not."""
    method = "dp_fedavg(trust='nobody', noise_multiplier=8)+fedftg(iterations=1, labels='uniform', ensemble='uniform')"
    experiment = Experiment.model_validate({**SETTING, "data": {"source": "digits"}, "method": {"name": "fedavg"}})
    experiment = experiment.model_copy(update={"method": parse_method(method, experiment)})
    made = fedstill.run(experiment, run_dir=tmp_path / "run")
    assert FOLDER in made.privacy.assumptions
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert "generated.png" in written
    assert written.isdisjoint({"generated.json", "generated_closest.png", "partition.png"})
    assert "not kept" in (tmp_path / "run" / "log.txt").read_text()
    assert made.generated is None


@pytest.mark.parametrize(
    "how",
    [
        {"privacy": REPEATED},
        {"method": build_method("dp_fedavg(noise_multiplier=8) until 1 then fedavg")},
        {"method": build_method("dp_fedavg(trust='nobody', noise_multiplier=8)+moon")},
        {"best": "client_worst"},
    ],
    ids=["public seed", "rounds without noise", "memories on clients", "best by clients"],
)
def test_a_folder_that_cannot_be_closed_holds_all_and_says_so(tmp_path, how):
    made = run_on_trial(**{"method": LOUD, **how}, run_dir=tmp_path)
    assert made.history.rows[0]["train_loss"] is not None
    assert OPEN_FOLDER in made.privacy.assumptions or (not made.privacy.with_a_secret and not made.privacy.claims)
    assert (tmp_path / "log.txt").read_text().count("round 1") == 1


def test_moon_does_keep_memories_on_clients():
    """Else the case above would say nothing."""
    assert moon().objective.init(run_on_trial(fedavg(), rounds=1).weights)


def test_digests_of_a_closed_folder_cannot_be_compared_with_other_data(tmp_path):
    experiment = Experiment.model_validate(SETTING)
    federation = build_federation(experiment)
    contracts = []
    for name in ("one", "other"):
        fedstill.run(experiment, federation=federation, run_dir=tmp_path / name, pictures=False)
        contracts.append(json.loads((tmp_path / name / "contract.json").read_text()))
    rows = [contract["data"]["rows"] for contract in contracts]
    assert rows[0]["train"]["inputs"] != rows[1]["train"]["inputs"]
    assert rows[0]["test"] == rows[1]["test"]  # nobody's data
    assert contracts[0]["data"]["owners"] != contracts[1]["data"]["owners"]
    assert rows[0]["train"]["count"] == 0
    assert json.loads((tmp_path / "one" / "partition.json").read_text())["counts"] == []


def test_a_closed_run_is_resumed_with_its_own_data_only(tmp_path):
    experiment = Experiment.model_validate({**SETTING, "checkpoint_every": 1})
    federation = build_federation(experiment)
    fedstill.run(experiment, federation=federation, run_dir=tmp_path, pictures=False)
    longer = experiment.replace(rounds=3)
    assert len(fedstill.run(longer, federation=federation, run_dir=tmp_path, resume=True).history.rows) == 3
    federation.train.x[0, 0, 0, 0] += 1
    with pytest.raises(FedstillError, match="began with other data: train: its rows differ"):
        fedstill.run(longer, federation=federation, run_dir=tmp_path, resume=True)


def test_rows_that_several_clients_hold_are_named():
    plain = trial_federation()
    indices = plain.indices.clone()
    indices[30] = indices[60] = indices[0]
    indices[31] = indices[1]
    shared = dataclasses.replace(plain, indices=indices)
    text = run_on_trial(LOUD, federation=shared).privacy.text()
    assert "NOT hidden as well: 2 rows that several clients hold" in text
    assert "for a row with 3 clients it is 3 times as large" in text
    assert "several clients hold" not in run_on_trial(LOUD).privacy.text()


def test_a_first_model_that_was_trained_before_is_named(tmp_path):
    first = run_on_trial(fedavg(), rounds=1).weights
    assert "(model.start) tells of the data" in run_on_trial(LOUD, start=first).privacy.text()
    assert "model.start" not in run_on_trial(LOUD).privacy.text()


def test_accuracies_on_rows_of_clients_are_named():
    data = {"source": "digits", "client_test_share": 0.2}
    experiment = Experiment.model_validate(SETTING | {"evaluate": "client_rows", "data": data})
    text = fedstill.run(experiment, pictures=False).privacy.text()
    assert "NOT hidden as well: how well models do on rows that clients hold" in text
    assert "how well models do" not in fedstill.run(Experiment.model_validate(SETTING), pictures=False).privacy.text()


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"best": "train_loss"}, "train_loss, by which"),
        ({"best": "client_worst"}, "client_worst, by which"),
        (
            {"best": "client_worst", "early_stop": {"patience": 1, "metric": "train_loss"}},
            "client_worst, train_loss, by",
        ),
        ({"best": "loss", "early_stop": {"patience": 1, "metric": "macro_f1"}}, ""),
    ],
)
def test_a_choice_by_numbers_of_clients_own_data_is_named(metrics, told):
    text = fedstill.run(Experiment.model_validate(SETTING | metrics), pictures=False).privacy.text()
    assert ("by which the best model is chosen" in text) == bool(told)
    assert told in text


def test_numbers_of_clients_own_data_do_not_end_a_closed_run():
    watched = {"early_stop": {"patience": 1, "metric": "train_loss", "margin": 100.0}}
    made = fedstill.run(Experiment.model_validate(SETTING | watched | {"rounds": 3}), pictures=False)
    assert len(made.history.rows) == 3
    assert "by which the best model is chosen" not in made.privacy.text()
