"""The last lines of `run` and `compare`: all that was sent, incidents by their kind, privacy, several architectures."""

import json

import pytest
from cli_runs import SMALL, fedstill

FILE = SMALL + "rounds = 4\ncohort = 6\ndata.unlabeled = 40\n"
MIXED = FILE.replace('model.name = "mlp"\nmodel.hidden = [8]', 'model.name = "mixed"')
QUIET, LOUD = "dp_fedavg(noise_multiplier=8.0)", "dp_fedavg(noise_multiplier=100.0)"


@pytest.fixture
def played(tmp_path):
    """Runs a command on the small experiment with these settings, into the folder `run`."""
    (tmp_path / "small.toml").write_text(FILE)

    def play(command: str, *settings: str, words: tuple[str, ...] = ()):
        changes = [word for setting in settings for word in ("--set", setting)]
        return fedstill(command, tmp_path / "small.toml", "--out", tmp_path / "run", *changes, *words)

    return play


def line(done, start: str) -> str:
    return next((one.strip() for one in done.stdout.splitlines() if one.strip().startswith(start)), "")


def rows(tmp_path) -> list[dict]:
    return [json.loads(one) for one in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_what_is_sent_before_the_first_round_counts(played, tmp_path):
    """FedAUX's scores in their mean form: 64 pixels into 8 features, 4 bytes each, from each of 6 clients."""
    done = played("run", "method.name=fedaux", "method.form=mean", "method.student.steps=1", "rounds=1")
    (first,) = rows(tmp_path)
    assert first["bytes_prepared"] == 6 * 8 * 4
    up, down = (first[f"bytes_{way}"] + first[f"bytes_prepared{end}"] for way, end in (("up", ""), ("down", "_down")))
    told = line(done, "sent")
    assert told.startswith(f"sent           {up / 1000:.1f} kB up, {down / 1000:.1f} kB down")
    assert "(before the first round 192 B up, " in told


def test_the_features_of_a_pretraining_are_judged_by_their_neighbours(played, tmp_path):
    done = played("run", "method.name=simclr", "method.training.epochs=1", "rounds=1")
    (first,) = rows(tmp_path)
    after, before = (100 * first[f"prepare/knn_accuracy{end}"] for end in ("", "_before"))
    assert f"knn_accuracy {after:.2f} % (before {before:.2f} %)" in line(done, "prepared")


def test_a_method_that_prepares_nothing_has_no_such_line(played):
    assert line(played("run", "method.name=fedavg", "rounds=1"), "prepared") == ""


def test_a_comparison_notes_the_mean_of_a_pretraining_over_seeds(played, tmp_path):
    words = ("--methods", "fedavg,simclr(training.epochs=1)", "--seeds", "2")
    done = played("compare", "rounds=1", words=words)
    files = sorted(tmp_path.glob("run/simclr*/seed-*/metrics.jsonl"))
    values = [json.loads(file.read_text())["prepare/knn_accuracy"] for file in files]
    assert len(values) == 2
    told = line(done, "simclr(training.epochs=1) prepared")
    assert f"knn_accuracy {50 * sum(values):.2f} % (before" in told
    assert "fedavg prepared" not in done.stdout


def test_parties_with_test_rows_stand_in_a_table_and_the_best_model_names_its_metric(played, tmp_path):
    done = played("run", "data.client_test_share=0.3", "best=loss", "rounds=2")
    parties = json.loads((tmp_path / "run" / "parties.json").read_text())["parties"]
    assert line(done, "Parties:").startswith(f"Parties: {len(parties)}. Accuracy on their own test rows: mean ")
    for party in (parties[0], parties[-1]):
        assert line(done, party["name"]).split()[-1] == f"{100 * party['federated']:.2f}"
    least = min(rows(tmp_path), key=lambda row: row["loss"])
    assert line(done, "best accuracy").endswith(f"(round {least['round']}, the best by loss: {least['loss']:.4f})")


def test_what_a_later_method_asks_is_told_with_its_own_first_round(played):
    done = played("run", "method.name=fedavg until 2 then fedaux(student.steps=1)", "rounds=3")
    assert "(before round 3: 192 B up, " in line(done, "sent")


def test_rounds_that_draw_nobody_are_not_uploads_that_were_turned_away(played, tmp_path):
    done = played(
        "run", "method.name=dp_fedavg", "privacy.reproducible=true", "sampling=poisson", "cohort=1", "rounds=12"
    )
    empty = sum(row["cohort"] == 0 for row in rows(tmp_path))
    assert empty > 0
    assert line(done, "nobody drawn").startswith(f"nobody drawn   {empty} round")
    assert not line(done, "turned away")


def test_a_comparison_shows_an_epsilon_where_there_is_one_and_says_what_it_is_about(played, tmp_path):
    """Multiplier 4 a round, four rounds: one Gaussian of multiplier 2, by dp-accounting epsilon 1.9931 at 1e-5."""
    done = played("compare", words=("--methods", f"{QUIET},fedavg", "--seeds", "1"))
    table = {one.split()[0]: one.split() for one in done.stdout.splitlines()[:3]}
    assert table["method"][-1] == "epsilon"
    assert table[QUIET][-1] == "1.994"
    assert table["fedavg"][-1] == "none"
    assert f"epsilon of {QUIET}: at delta = 1e-05 for all that one client holds" in done.stdout
    assert "runs on the same data add up" in done.stdout
    written = {one["method"]: one for one in json.loads((tmp_path / "run" / "results.json").read_text())["methods"]}
    assert written[QUIET]["epsilon"] == pytest.approx(1.9931, abs=1e-4)
    assert "epsilon" not in written["fedavg"]


def test_a_comparison_without_noise_says_nothing_of_privacy(played):
    assert "epsilon" not in played("compare", words=("--methods", "fedavg,fedprox", "--seeds", "1")).stdout


def test_a_comparison_names_the_runs_that_their_budget_ended(played):
    words = ("--methods", f"{QUIET},{LOUD}", "--seeds", "2")
    done = played("compare", "privacy.epsilon=1.5", words=words)  # two rounds cost 1.3565, three 1.6980
    assert line(done, f"{QUIET}, 2 of 2 runs:").endswith(
        "privacy.epsilon = 1.5 allows 2 of 4 rounds: one more would exceed it"
    )
    assert not line(done, f"{LOUD}, ")
    assert "round 1/2" in done.stderr
    assert "round 1/4" in done.stderr


def test_a_run_of_several_architectures_names_them_and_shows_each(played, tmp_path):
    words = ('model.prototypes=["cnn", "mlp(hidden=[8])"]', "model.report=mlp")
    (tmp_path / "small.toml").write_text(MIXED)
    done = played("run", *words, "rounds=1", "method.name=fedavg")
    assert done.stderr.startswith("mixed(cnn, mlp; reported: mlp) on digits")
    (row,) = rows(tmp_path)
    assert line(done, "reported") == "reported       mlp"
    told = ", ".join(f"{name} {100 * row[f'accuracy_{name}']:.2f} %" for name in ("cnn", "mlp"))
    assert line(done, "prototypes") == f"prototypes     {told}"


def test_the_curves_of_several_architectures_show_each_beside_the_reported_one(played, tmp_path, monkeypatch, pictures):
    drawn = {}
    monkeypatch.setattr(
        "fedstill.experiment.run.learning_curves", lambda curves, path, **how: drawn.update(how, of=curves)
    )
    (tmp_path / "small.toml").write_text(MIXED)
    played("run", 'model.prototypes=["cnn", "mlp(hidden=[8])"]', "rounds=2", "method.name=fedavg")
    assert drawn["title"] == "digits: lda(alpha=0.5) over 6 clients; mixed(cnn, mlp; reported: ensemble)"
    assert list(drawn["of"]) == ["fedavg", "fedavg: cnn", "fedavg: mlp"]
    assert drawn["of"]["fedavg: cnn"] == [([1, 2], [row["accuracy_cnn"] for row in rows(tmp_path)])]
