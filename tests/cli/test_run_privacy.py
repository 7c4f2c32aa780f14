"""What `run`, `explain` and a run's folder say about privacy, and what a budget that cannot be kept says."""

import json

import pytest
from cli_runs import SMALL, fedstill, mistake

FILE = SMALL + 'rounds = 4\ncohort = 6\nmethod = {name = "dp_fedavg", noise_multiplier = 8.0}\n'


@pytest.fixture
def words(tmp_path):
    """Words of a command on the small experiment, which writes into the folder `run`."""
    (tmp_path / "small.toml").write_text(FILE)
    return lambda command, *more: (command, tmp_path / "small.toml", "--out", tmp_path / "run", *more)


def test_a_run_says_in_a_few_lines_what_is_protected_and_what_is_not(words, tmp_path):
    """Multiplier 4 a round, four rounds: one Gaussian of multiplier 2, by dp-accounting 1.9931 at 1e-5, rounded up."""
    done = fedstill(*words("run"))
    lines = [line.strip() for line in done.stdout.splitlines()]
    (claim,) = (line for line in lines if line.startswith("privacy"))
    assert "epsilon = 1.994 at delta = 1e-05 for all that one client holds" in claim
    assert any(line.startswith("NOT protected from the server: trained models") for line in lines)
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert written["claims"][0]["epsilon"] == pytest.approx(1.9931, abs=1e-4)
    assert written["rounds"] == 4
    assert written["assumptions"]


def test_a_run_with_a_budget_ends_before_it_is_exceeded_and_says_why(words, tmp_path):
    done = fedstill(*words("run", "--set", "privacy.epsilon=1.5"))  # two rounds cost 1.3565, three 1.6980
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "privacy.epsilon = 1.5 allows 2 of 4 rounds: one more would exceed it" in done.stdout
    fedstill("resume", tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_predict_of_a_run_that_its_budget_ended_proposes_no_resuming(words, tmp_path):
    fedstill(*words("run", "--set", "privacy.epsilon=1.5", "--set", "data.unlabeled=20"))
    done = fedstill("predict", tmp_path / "run")
    told = "the model is that of round 2 of 4, the last one: privacy.epsilon = 1.5 allows 2 of 4 rounds: one more"
    assert told in done.stderr
    assert "fedstill resume" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["method.name=fedavg", "privacy.epsilon=1"], "privacy.epsilon = 1"),
        (["privacy.epsilon=0.1"], "too small for the first round alone"),
        (["privacy.epsilon=0"], "privacy.epsilon"),
        (["privacy.delta=1"], "privacy.delta"),
        (["privacy.delta=0.5"], "privacy.delta = 0.5: to publish one client of 2 outright would keep that"),
        (["method.noise_multiplier=1e200"], "it must be from 0.0001 to 1e+06 (usual are 0.5 to 20), or 0"),
        (["method.noise_multiplier=1e-160"], "it must be from 0.0001 to 1e+06"),
        (["privacy.unit=person"], "privacy.unit"),
        (["sampling=often"], "sampling"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_one_line_and_exit_code_two(words, tmp_path, settings, told):
    assert told in mistake(*words("run", *(word for setting in settings for word in ("--set", setting))))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_explain_of_methods_in_turn_says_from_when_on_nothing_is_protected():
    told = " ".join(fedstill("explain", "dp_fedavg until 3 then fedavg").stdout.split())
    assert "model updates until round 3 (nothing else that leaves is covered)" in told
    assert "NOT protected from anybody from round 4 on: trained models; numbers" in told
    assert "NOT protected from the server: trained models; numbers" in told


def test_explain_says_what_is_claimed_after_one_round():
    """z = 1: multiplier 1/2, epsilon 9.9973 at 1e-5 (dp-accounting: 9.9973), shown rounded up."""
    told = fedstill("explain", "dp_fedavg").stdout
    assert "epsilon = 9.998" in told.split("Privacy\n")[1]
    assert "Privacy\n" not in fedstill("explain", "fedavg").stdout


def test_a_comparison_under_a_budget_names_the_method_that_cannot_keep_it_before_anything_runs(words, tmp_path):
    methods = "dp_fedavg(noise_multiplier=8),fedavg"
    line = mistake(*words("compare", "--methods", methods, "--set", "privacy.epsilon=9"))
    assert ": fedavg: privacy.epsilon = 9 for all that one client holds" in line
    assert not (tmp_path / "run").exists()


def test_a_comparison_names_a_method_that_a_trusted_server_cannot_serve_before_anything_runs(words, tmp_path):
    line = mistake(*words("compare", "--methods", "dp_fedavg,scaffold+dp_fedavg"))
    assert ": scaffold+dp_fedavg: a server that is trusted" in line
    assert not (tmp_path / "run").exists()


def test_after_a_run_with_a_budget_nothing_is_advised_that_the_budget_refuses(words, tmp_path):
    done = fedstill(*words("run", "--set", "privacy.epsilon=2"))
    (advice,) = (line for line in done.stdout.splitlines() if "Next" in line)
    assert advice == "Next: fedstill explain 'dp_fedavg(noise_multiplier=8.0)'"
    again = fedstill("run", tmp_path / "small.toml", "--out", tmp_path / "free")
    assert "--methods 'dp_fedavg(noise_multiplier=8.0),fedavg'" in again.stdout
