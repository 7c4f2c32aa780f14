"""A tournament over methods: who takes part, who goes on, what is written down, and how a killed one goes on."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from fedstill import Experiment, FedstillError, choose
from fedstill.core.types import Need
from fedstill.experiment import candidates
from fedstill.experiment import choose as room
from fedstill.experiment.candidates import PROVEN
from fedstill.experiment.choose import CHOICE_FILE, CHOSEN_FILE, LEVELS, Budget, choose_again
from fedstill.experiment.run import run_built

SMALL = Experiment(
    rounds=4,
    cohort=2,
    partition={"scheme": "lda", "clients": 4, "alpha": 0.5},
    model={"name": "mlp", "hidden": [8]},
    local={"epochs": 1, "batch_size": 50, "lr": 0.1},
    data={"source": "digits", "test_limit": 60},
    engine={"threads": 1},
)
METHODS = ["fedprox", "fedavgm", "label_smoothing"]
ROUNDS = "120rounds"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choose") / "trial"
    return choose(SMALL, ROUNDS, run_dir=folder, methods=METHODS)


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("90s", 90, "seconds"), ("1.5h", 5400, "seconds"), ("5 GB", 5e9, "bytes"), ("8epsilon", 8, "epsilon")],
)
def test_a_budget_is_a_number_and_a_unit(text, amount, unit):
    assert Budget.parse(text) == Budget(amount, unit)


@pytest.mark.parametrize("text", ["", "30", "m", "-3m", "0m", "3 days", "1e3rounds"])
def test_a_budget_without_a_number_or_a_known_unit_is_refused_with_examples(text):
    with pytest.raises(FedstillError, match="30m, 2h, 2000rounds"):
        Budget.parse(text)


def test_the_winner_has_the_best_mean_score_of_the_last_level(finished):
    last = [line for line in finished.record["played"] if line["level"] == len(LEVELS) - 1]
    means = {
        method: sum(line["score"] for line in last if line["method"] == method) / LEVELS[-1].seeds
        for method in {line["method"] for line in last}
    }
    assert means[finished.method] == max(means.values())


def test_scores_come_from_rows_that_clients_hold_back_and_final_figures_from_test_rows_and_fresh_seeds(finished):
    first = next(line for line in finished.record["played"] if line["method"] == "fedavg")
    data = {**SMALL.data.model_dump(), "client_test_share": room.HELD_BACK}
    alike = SMALL.replace(rounds=first["rounds"], evaluate="client_rows", data=data, method={"name": "fedavg"})
    result = run_built(alike, room.build(alike, room.build_federation(alike)), pictures=False)
    assert first["score"] == result.history.rows[-1]["accuracy"]
    for results in finished.comparison.results.values():
        for result in results:
            assert sum(map(sum, result.history.last["confusion"])) == 60
    final = json.loads((finished.run_dir / "results.json").read_text())
    assert {run["seed"] for run in final["runs"]}.isdisjoint(line["seed"] for line in finished.record["played"])


def test_a_tournament_keeps_its_budget_in_rounds_and_states_each_decision(finished):
    record = finished.record
    spent = sum(line["rounds"] for line in record["played"])
    assert spent == record["spent"]
    assert spent + record["final_cost"] <= record["amount"]
    for step in record["decisions"]:
        played = {line["method"] for line in record["played"] if line["level"] == step["level"] - 1}
        assert set(step["played"]) <= played
        assert not played & set(step["not_afforded"])
    mixtures = {line["method"] for line in record["played"] if line["method"].count("+")}
    assert mixtures


def test_the_written_file_runs_the_winner(finished):
    written = Experiment.from_toml(finished.run_dir / CHOSEN_FILE)
    assert (written.seed, written.rounds, written.data) == (SMALL.seed, SMALL.rounds, SMALL.data)
    assert written.method.phases == Experiment(method={"name": finished.method}).method.phases


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 9])
def test_a_killed_tournament_goes_on_to_the_same_choice(finished, tmp_path, monkeypatch, runs):
    left = iter(range(runs))

    def killed(*values, **words):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return run_built(*values, **words)

    monkeypatch.setattr(room, "run_built", killed)
    with pytest.raises(KeyboardInterrupt):
        choose(SMALL, ROUNDS, run_dir=tmp_path / "trial", methods=METHODS)
    before = json.loads((tmp_path / "trial" / CHOICE_FILE).read_text())["played"]
    assert len(before) == runs
    monkeypatch.setattr(room, "run_built", run_built)
    choice = choose_again(tmp_path / "trial")
    assert choice.method == finished.method
    assert choice.record["played"] == finished.record["played"]
    assert choice.record["decisions"] == finished.record["decisions"]


@pytest.mark.slow
def test_a_candidate_whose_run_fails_does_not_end_the_tournament(tmp_path, monkeypatch):
    def broken(experiment, built, **words):
        if "fedprox" in experiment.method.name:
            raise ValueError("broken")
        return run_built(experiment, built, **words)

    monkeypatch.setattr(room, "run_built", broken)
    choice = choose(SMALL, ROUNDS, run_dir=tmp_path / "trial", methods=["fedprox", "fedavgm"])
    assert "fedprox" not in choice.method
    failures = [line["failure"] for line in choice.record["played"] if line["method"] == "fedprox"]
    assert failures
    assert all("ValueError: broken" in failure for failure in failures)


def test_banned_needs_and_missing_data_are_refused_with_their_reason():
    methods = ["fedavgm", "scaffold", "feddf"]
    candidates = room.Candidates(SMALL, room.build_federation(SMALL), methods, [Need.CLIENT_STATE])
    assert candidates.alone() == ["fedavg", "fedavgm"]
    assert "memory on each client" in candidates.refused["scaffold"]
    assert "data.unlabeled" in candidates.refused["feddf"]


def test_compositions_of_the_leaderboard_take_part_where_the_experiment_allows_them():
    federation = room.build_federation(SMALL)
    assert room.Candidates(SMALL, federation).proven() == [], "all distil on unlabeled rows, and there are none"
    unlabeled = SMALL.replace(data={**SMALL.data.model_dump(), "unlabeled": 50})
    federation = room.build_federation(unlabeled)
    assert room.Candidates(unlabeled, federation).proven() == list(PROVEN)
    assert room.Candidates(unlabeled, federation, ["fedprox"]).proven() == [], "who names methods has these alone"
    assert room.Candidates(unlabeled, federation, banned=[Need.CLIENT_STATE]).proven() == [], "SCAFFOLD, FedDyn"


@pytest.mark.slow
def test_a_composition_of_the_leaderboard_plays_level_2_without_level_1(tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, "PROVEN", ("scaffold+label_smoothing",))
    monkeypatch.setattr(room.Candidates, "alone", lambda self: ["fedavg", "fedprox", "fedavgm"])
    record = choose(SMALL, "100rounds", run_dir=tmp_path / "trial").record
    first, second = ({line["method"] for line in record["played"] if line["level"] == level} for level in (0, 1))
    assert "scaffold+label_smoothing" in second - first
    assert second & first, "the best of level 1 goes on beside it"
    assert "1 composition of our leaderboard" in record["decisions"][3]["step"]


def test_noise_takes_part_only_where_the_file_has_a_privacy_budget():
    federation = room.build_federation(SMALL)
    open_ = room.Candidates(SMALL, federation)
    assert "dp_fedavg" not in open_.alone()
    assert "privacy.epsilon" in open_.refused["dp_fedavg"]
    private = SMALL.replace(privacy={"epsilon": 50.0}, sampling="poisson")
    texts = room.Candidates(private, federation, ["fedprox", "scaffold", "fedavgm"]).alone()
    assert texts[0] == "dp_fedavg"
    assert all("dp_fedavg" in text for text in texts)
    assert "dp_fedavg+fedprox" in texts


def test_methods_of_the_experiment_file_take_part_with_their_options():
    experiment = SMALL.replace(method={"name": "fedprox", "mu": 0.3}, compare={"methods": ["fedavgm(beta=0.7)"]})
    texts = room.Candidates(experiment, room.build_federation(experiment)).alone()
    assert {"fedprox(mu=0.3)", "fedavgm(beta=0.7)", "fedavgm"} <= set(texts)
    assert "fedprox" not in texts


def test_mixtures_hold_every_part_once_and_neighbours_change_one_thing():
    candidates = room.Candidates(SMALL, room.build_federation(SMALL))
    assert candidates.pairs(["fedprox", "fedavgm", "fedadam"]) == ["fedprox+fedavgm", "fedprox+fedadam"]
    assert "both decide the server's step" in candidates.refused["fedavgm+fedadam"]
    assert candidates.pairs(["fedavg+median", "fedprox"]) == ["median+fedprox"]
    near = candidates.neighbours(["fedprox(mu=0.1)+fedavgm"], ["scaffold"])
    assert "fedprox(mu=0.1)+fedavgm+scaffold" in near
    assert "fedprox(mu=0.1)+fedavgm" not in near
    changed = [text for text in near if "scaffold" not in text]
    assert changed
    for text in changed:
        assert ("fedprox(mu=0.1)" in text) != text.endswith("fedavgm"), text


@pytest.mark.slow
def test_runs_side_by_side_have_the_same_scores(finished, tmp_path):
    jobs = SMALL.replace(compare={"jobs": 2})
    choice = choose(jobs, ROUNDS, run_dir=tmp_path / "trial", methods=["fedprox"])
    scores = {(line["level"], line["method"], line["seed"]): line["score"] for line in finished.record["played"]}
    shared = [line for line in choice.record["played"] if (line["level"], line["method"], line["seed"]) in scores]
    assert len(shared) >= 4
    for line in shared:
        assert math.isclose(line["score"], scores[line["level"], line["method"], line["seed"]], rel_tol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": "20rounds"}, "too small"),
        ({"without": ["unlabelled"]}, "did you mean 'unlabeled'"),
        ({"budget": "3epsilon"}, "privacy.epsilon"),
        ({"methods": ["feddf"]}, "fewer than two methods"),
    ],
)
def test_mistakes_are_one_line(tmp_path, changes, message):
    with pytest.raises(FedstillError, match=message):
        choose(SMALL, **{"budget": ROUNDS, "run_dir": tmp_path / "trial", "methods": METHODS, **changes})


def test_another_tournament_and_damaged_records_are_refused(finished, tmp_path):
    folder = tmp_path / "trial"
    shutil.copytree(finished.run_dir, folder)
    with pytest.raises(FedstillError, match="another tournament"):
        choose(SMALL, "240rounds", run_dir=folder, methods=METHODS)
    for content in ("", "[]", '{"played": 3}', '{"experiment": "rounds = "}'):
        (folder / CHOICE_FILE).write_text(content)
        with pytest.raises(FedstillError):
            choose_again(folder)
