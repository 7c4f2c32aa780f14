"""The numbers on the page against the files of the runs."""

from __future__ import annotations

import json
import re
import statistics

import numpy as np
import pytest
from run_folders import row, write_comparison, write_run

import fedstill
import fedstill.loop.round
from fedstill.report.panels import PANELS, mean_line, panel_makers
from fedstill.report.panels.classes import cohort_shares
from fedstill.report.runs import Runs, read_runs


def made(name: str, runs: Runs):
    return panel_makers()[name](runs)


def drawn(chart, name: str = "") -> list[dict]:
    """Return the data of a chart, of the series with this name."""
    return [value for value in chart.spec["data"]["values"] if not name or value["n"] == name]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A real comparison of two methods with two seeds, with reference points and parties."""
    folder = tmp_path_factory.mktemp("compared") / "all"
    experiment = fedstill.Experiment(
        rounds=3,
        cohort=3,
        data={"source": "digits", "unlabeled": 100, "client_test_share": 0.2},
        partition={"scheme": "lda", "clients": 6, "alpha": 0.3},
        model={"name": "mlp", "hidden": [8]},
        local={"steps": 5},
        compare={"references": True},
    )
    comparison = fedstill.compare(experiment, ["fedavg", "feddf(student.steps=5)"], seeds=2, run_dir=folder)
    return folder, comparison


def test_every_panel_is_made_of_a_real_comparison_without_gaps(compared):
    runs = read_runs([compared[0]])
    assert not runs.gaps
    panels = {name: make(runs) for name, make in panel_makers().items()}
    assert [name for name, panel in panels.items() if panel is None] == [
        "tournament",
        "sensitivity",
        "teachers",
        "invented",
    ]  # no choice, no sweep, and FedDF weighs no teacher and has no generator
    assert tuple(panels) == PANELS


def test_the_answer_has_the_last_accuracies_of_the_comparison(compared):
    folder, comparison = compared
    table = made("answer", read_runs([folder])).table
    means = {line[0]: float(re.match(r"[\d.]+", line[2])[0]) for line in table.rows}
    expected = {summary.method: 100 * summary.mean for summary in comparison.summaries if not summary.is_reference}
    assert means == pytest.approx(expected, abs=0.005)


def test_the_curves_are_the_means_over_the_seeds(compared):
    folder, comparison = compared
    (chart,) = made("curves", read_runs([folder])).charts
    for method, results in comparison.results.items():
        lines = [[row["accuracy"] for row in result.history.rows] for result in results]
        points = drawn(chart, method)
        assert [point["x"] for point in points] == [1, 2, 3]
        assert [point["y"] for point in points] == pytest.approx(100 * np.mean(lines, axis=0), abs=0.01)


def test_the_reference_points_of_the_comparison_are_levels_of_the_curves(compared):
    folder, comparison = compared
    (chart,) = made("curves", read_runs([folder])).charts
    levels = {
        layer["mark"]["text"]: layer["data"]["values"][0]["v"]
        for layer in chart.spec["layer"]
        if layer["mark"]["type"] == "text"
    }
    pooled = statistics.fmean(each.pooled["accuracy"] for each in comparison.references)
    alone = statistics.fmean(statistics.fmean(each.accuracies_alone) for each in comparison.references)
    assert levels == pytest.approx({"pooled": 100 * pooled, "alone (mean)": 100 * alone}, abs=0.01)


def test_the_split_is_that_of_the_run(compared):
    folder, _ = compared
    runs = read_runs([folder])
    chart = made("holdings", runs).charts[0]
    written = json.loads((runs.first.folder / "partition.json").read_text())
    counts = np.array(written["counts"])
    shares = 100 * counts / counts.sum(axis=1, keepdims=True)
    for value in drawn(chart):
        place = written["classes"].index(value["r"])
        assert value["v"] == pytest.approx(shares[int(value["c"]), place], abs=0.01)
    federation = fedstill.build_federation(fedstill.Experiment.from_toml(runs.first.folder / "config.toml"))
    assert counts.sum(axis=1).tolist() == federation.offsets.diff().tolist()


def test_the_costs_are_the_bytes_of_the_rounds(compared):
    folder, comparison = compared
    by_bytes, by_seconds = made("cost", read_runs([folder])).charts
    for method, results in comparison.results.items():
        exchanged = statistics.fmean(result.history.bytes_up + result.history.bytes_down for result in results)
        assert drawn(by_bytes, method)[-1]["x"] == pytest.approx(exchanged / 1e6, rel=1e-4)
        seconds = statistics.fmean(result.history.total("seconds") for result in results)
        assert drawn(by_seconds, method)[-1]["x"] == pytest.approx(seconds, rel=1e-4)


def test_rounds_bytes_and_seconds_to_a_target_by_hand(tmp_path):
    folder = write_comparison(tmp_path / "all", {"fedavg": [[0.2, 0.6], [0.6, 0.7]], "feddf": [[0.1, 0.2]]}, target=0.5)
    table = made("cost", read_runs([folder])).table
    # fedavg reaches it after 2 rounds and 1 round, of 4 kB and half a second each
    assert list(table.rows) == [
        ("fedavg", "2 of 2", "1.5", "6.0 kB", "0.8"),
        ("feddf", "0 of 1", "never", "never", "never"),
    ]


def test_the_heat_map_of_classes_has_the_accuracies_of_the_best_run(compared):
    folder, _ = compared
    runs = read_runs([folder])
    chart = made("classes", runs).charts[1]
    cells = {(value["c"], value["r"]): value["v"] for value in drawn(chart)}
    for line in runs.first.rows:
        for name, accuracy in zip(runs.first.classes, line["class_accuracy"], strict=True):
            assert cells[str(line["round"]), name] == pytest.approx(100 * accuracy, abs=0.01)


def test_the_classes_of_a_round_are_those_of_the_clients_that_trained_in_it(tmp_path, monkeypatch):
    trained: dict[int, list[int]] = {}
    draw = fedstill.loop.round.draw_cohort

    def watched(clients, count, **settings):
        ids = draw(clients, count, **settings)
        trained[settings["round"]] = ids.tolist()
        return ids

    monkeypatch.setattr("fedstill.loop.round.draw_cohort", watched)
    experiment = fedstill.Experiment(
        rounds=4,
        cohort=2,
        partition={"scheme": "lda", "clients": 6, "alpha": 0.1},
        model={"name": "mlp", "hidden": [8]},
        local={"steps": 1},
    )
    fedstill.run(experiment, run_dir=tmp_path / "run")
    run = read_runs([tmp_path / "run"]).first
    counts = np.array(run.files["partition.json"]["counts"])
    shares = cohort_shares(run)
    assert len(trained) == len(shares) == 4
    for number, ids in trained.items():
        held = counts[ids].sum(axis=0)
        assert shares[number] == pytest.approx(100 * held / held.sum())


def test_parties_by_hand(tmp_path):
    folder = write_run(tmp_path / "run", [0.5], parties=("Ulm", "Aix"))
    panel = made("parties", read_runs([folder]))
    assert list(panel.table.rows) == [
        ("Ulm", "10", "5", "80.0", "90.0", "60.0", "+20.0"),
        ("Aix", "10", "5", "80.0", "90.0", "61.0", "+19.0"),
    ]
    assert "better than the model that a party trains alone for 2 of 2 parties" in " ".join(panel.sentences)


def test_a_party_whose_rows_are_of_one_class_is_named(tmp_path):
    folder = write_run(tmp_path / "run", [0.5], parties=("Ulm", "Aix"), counts=((8, 2), (0, 10)))
    assert "Aix has rows of one class only" in " ".join(made("parties", read_runs([folder])).sentences)
    both = write_run(tmp_path / "both", [0.5], parties=("Ulm", "Aix"), counts=((8, 2), (1, 10)))
    assert "of one class only" not in " ".join(made("parties", read_runs([both])).sentences)


@pytest.mark.parametrize(
    ("right", "says"),  # of 90 cats and 10 dogs; 90 % of all rows are cats
    [
        ((85, 4), "fedavg does no better by accuracy"),
        ((88, 9), "is right for 90.0 % of these rows."),
        ((90, 0), "no better"),
    ],
)
def test_the_answer_is_set_beside_always_answering_the_most_frequent_class(tmp_path, right, says):
    cats, dogs = right
    one = row(1, (cats + dogs) / 100, 2, confusion=[[cats, 90 - cats], [10 - dogs, dogs]])
    said = " ".join(made("answer", read_runs([write_run(tmp_path / "run", [], rows=[one])])).sentences)
    assert "Whoever always answers 'cat' is right for 90.0 %" in said
    assert says in said
    assert ("no better" in said) == (cats + dogs <= 90)


def test_balanced_test_rows_need_no_word_on_the_most_frequent_class(tmp_path):
    folder = write_run(tmp_path / "run", [0.7], classes=("a", "b", "c"), counts=((1, 2, 3), (1, 1, 1)))
    assert "always answers" not in " ".join(made("answer", read_runs([folder])).sentences)


def test_parties_of_a_real_run_are_those_of_its_file(compared):
    runs = read_runs([compared[0]])
    best = next(iter(runs.by_method.values()))
    files = [json.loads((run.folder / "parties.json").read_text())["parties"] for run in best]
    rows = {line[0]: line for line in made("parties", runs).table.rows}
    for name in {line["name"] for lines in files for line in lines}:
        found = [line["federated"] for lines in files for line in lines if line["name"] == name]
        known = [value for value in found if value is not None]
        if known:
            assert float(rows[name][3]) == pytest.approx(100 * statistics.fmean(known), abs=0.05)


def test_the_confusion_is_that_of_the_last_round(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.7])
    panel = made("confusion", read_runs([folder]))
    cells = {(value["r"], value["c"]): value["v"] for value in drawn(panel.charts[0])}
    assert cells == {("cat", "cat"): 70, ("cat", "dog"): 30, ("dog", "dog"): 70, ("dog", "cat"): 30}
    assert "cat is taken for dog 3 times" in panel.sentences[1]


def test_the_calibration_has_one_point_for_each_bin_with_rows(tmp_path):
    panel = made("calibration", read_runs([write_run(tmp_path / "run", [0.5])]))
    assert [(value["x"], value["y"]) for value in drawn(panel.charts[0], "as trained")] == [(50, 25), (90, 75)]
    assert "19.0 %" in panel.sentences[1]


def test_the_audit_counts_refused_uploads_and_resumes(tmp_path):
    folder = write_run(tmp_path / "run", [0.5, 0.6])
    records = [{"round": 1, "client": 3, "reason": "not finite"}, {"round": 2, "client": 4, "reason": "not finite"}]
    (folder / "audit.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    (folder / "log.txt").write_text("2026-01-01 10:00:00,000 INFO resuming after round 1\n")
    panel = made("audit", read_runs([folder]))
    assert list(panel.table.rows) == [("fedavg", "not finite", "2", "2")]
    assert "4 uploads in 2 rounds" in panel.sentences[0]
    assert panel.sentences[1] == "The logs name 1 resume."


def test_a_real_resume_is_in_the_audit(tmp_path):
    experiment = fedstill.Experiment(
        rounds=1, cohort=2, partition={"scheme": "iid", "clients": 3}, model={"name": "mlp", "hidden": [4]}
    )
    fedstill.run(experiment, run_dir=tmp_path / "run")
    fedstill.resume_run(tmp_path / "run", rounds=2)
    assert made("audit", read_runs([tmp_path / "run"])).sentences[1] == "The logs name 1 resume."


def test_a_private_run_shows_the_epsilon_of_its_statement(tmp_path):
    folder = write_run(tmp_path / "run", [0.5], method="dp_fedavg")
    claim = {"unit": "client", "epsilon": 3.0, "delta": 1e-5, "covered": ["model updates"]}
    statement = {"delta": 1e-5, "claims": [claim], "not_covered": ["trained models"]}
    (folder / "privacy.json").write_text(json.dumps(statement))
    runs = read_runs([folder])
    expected = ("dp_fedavg", "3", "1e-05", "one client: model updates", "trained models")
    assert list(made("method_numbers", runs).table.rows) == [expected]
    assert any("epsilon = 3 at delta = 1e-05" in sentence for sentence in made("answer", runs).sentences)


def test_the_epsilon_of_a_private_run_is_drawn_by_round(tmp_path):
    folder = write_run(tmp_path / "run", [0.5], method="dp_fedavg")
    claim = {"unit": "client", "epsilon": 3.0, "delta": 1e-5, "covered": ["model updates"]}
    spent = [[5, 1.5], [10, 3.0], [15, None]]
    (folder / "privacy.json").write_text(json.dumps({"claims": [claim], "spent": spent}))
    (chart,) = made("method_numbers", read_runs([folder])).charts
    assert [(value["x"], value["y"]) for value in drawn(chart)] == [(5, 1.5), (10, 3.0)]


def test_teachers_of_a_real_run_count_by_their_sizes(tmp_path):
    experiment = fedstill.Experiment(
        rounds=2,
        cohort=3,
        data={"source": "digits", "unlabeled": 20},
        partition={"scheme": "lda", "clients": 6, "alpha": 0.3},
        model={"name": "mlp", "hidden": [4]},
        local={"steps": 1},
        method={"name": "feddf", "teacher_weighting": "size", "student": {"steps": 1}},
    )
    fedstill.run(experiment, run_dir=tmp_path / "run")
    run = read_runs([tmp_path / "run"]).first
    sizes = np.array(run.files["partition.json"]["counts"]).sum(axis=1)
    for line in run.rows:
        taught = {int(client): share for client, share in line["teacher_weights"].items()}
        assert len(taught) == 3
        assert taught == pytest.approx({one: sizes[one] / sizes[list(taught)].sum() for one in taught}, abs=1e-6)


def test_the_weights_of_teachers_are_means_over_the_rounds_of_a_client(tmp_path):
    weights = [{"0": 0.75, "1": 0.25}, {"0": 0.5, "1": 0.5}, {"1": 1.0}]
    rows = [row(at, 0.5, 2, teacher_weights=shares) for at, shares in enumerate(weights, 1)]
    panel = made("teachers", read_runs([write_run(tmp_path / "run", [], rows=rows, parties=("Ulm", "Aix"))]))
    # in units of an equal share: Ulm 1.5 and 1, Aix 0.5, 1 and 1
    assert [(value["c"], value["v"]) for value in drawn(panel.charts[0])] == [("Ulm", 1.25), ("Aix", 0.83333)]
    assert list(panel.table.rows) == [("Ulm", "1.25", "2", "10", "2"), ("Aix", "0.83", "3", "10", "1")]


def test_the_table_has_the_claim_of_the_seed_that_has_spent_most(tmp_path):
    folder = write_comparison(tmp_path / "all", {"dp_fedavg": [[0.5], [0.6]]})
    for place, epsilon in enumerate((2.0, 4.0)):
        claim = {"unit": "client", "epsilon": epsilon, "delta": 1e-5, "covered": ["model updates"]}
        (folder / f"method-0/seed-{place}/privacy.json").write_text(json.dumps({"claims": [claim]}))
    assert [line[1] for line in made("method_numbers", read_runs([folder])).table.rows] == ["4"]


def test_numbers_of_server_steps_are_drawn(tmp_path):
    rows = [row(at, 0.5, 2, **{"server/u": at / 10, "server/kept": 7}) for at in (1, 2, 3)]
    panel = made("method_numbers", read_runs([write_run(tmp_path / "run", [], rows=rows)]))
    (chart,) = panel.charts
    assert [value["y"] for value in drawn(chart)] == [0.1, 0.2, 0.3]
    assert panel.sentences[0] == "kept: 7 in every round of fedavg."


def test_invented_samples_are_shown_with_the_words_of_their_file(tmp_path):
    folder = write_run(tmp_path / "run", [0.5], method="fedftg")
    (folder / "generated.json").write_text(json.dumps({"text": "no copies found"}))
    picture = b"\x89PNG\r\n\x1a\n and so on"
    (folder / "generated.png").write_bytes(picture)
    (folder / "generated_closest.png").write_bytes(b"<svg onload='window.hacked = 1'>")
    panel = made("invented", read_runs([folder]))
    assert panel.sentences[1] == "no copies found"
    assert [content for content, _ in panel.pictures] == [picture]


def test_no_file_outside_of_a_run_is_shown(tmp_path):
    folder = write_run(tmp_path / "run", [0.5], method="fedftg")
    for name, content in {"generated.png": b"\x89PNG\r\n\x1a\n private", "config.toml": b'token = "private"\n'}.items():
        (tmp_path / name).write_bytes(content)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / name)
    (folder / "generated.json").write_text(json.dumps({"text": "no copies found"}))
    runs = read_runs([folder])
    assert made("invented", runs).pictures == []
    assert not any("private" in str(text) for text in made("repeat", runs).texts)
    assert runs.all[0].config == {}


def test_the_words_on_chance(tmp_path):
    far = {"good": [[0.8], [0.81], [0.82], [0.8]], "bad": [[0.1], [0.11], [0.13], [0.12]]}
    near = {"one": [[0.5], [0.6], [0.4]], "two": [[0.52], [0.55], [0.44]]}
    panels = {
        name: made("answer", read_runs([write_comparison(tmp_path / name, methods)]))
        for name, methods in (("far", far), ("near", near), ("single", {"a": [[0.5]], "b": [[0.6]]}))
    }
    words = {name: " ".join(panel.sentences) for name, panel in panels.items()}
    assert "good is better than every other method" in words["far"]
    assert "no difference shown between it and any other method" in words["near"]
    assert "One seed: nothing can be said about differences" in words["single"]
    assert [[row[-1] for row in panels[name].table.rows] for name in ("far", "near")] == [["a", "b"], ["a", "a"]]
    assert "group" not in panels["single"].table.head


def test_runs_on_other_data_or_with_other_seeds_are_not_judged(tmp_path):
    places = [write_run(tmp_path / f"{seed}", [0.5], method=f"method {seed}", seed=seed) for seed in (0, 1)]
    assert "share no seed on the same data" in " ".join(made("answer", read_runs(places)).sentences)
    places = [write_run(tmp_path / name, [0.5], method=name, name=name) for name in ("cats", "dogs")]
    assert "share no seed on the same data" in " ".join(made("answer", read_runs(places)).sentences)


def test_methods_on_different_splits_are_judged_split_by_split(tmp_path):
    places = []
    for alpha, ahead in ((0.1, 0.4), (5.0, 0.0)):
        for name, accuracies in {"scaffold": (0.5, 0.51, 0.49), "fedavg": (0.1, 0.11, 0.12)}.items():
            for seed, accuracy in enumerate(accuracies):
                place = write_run(tmp_path / f"{alpha}-{name}-{seed}", [accuracy + ahead], method=name, seed=seed)
                text = (place / "config.toml").read_text()
                (place / "config.toml").write_text(text.replace('scheme = "lda"', f'scheme = "lda"\nalpha = {alpha}'))
                places.append(place)
    runs = read_runs(places)
    words = made("answer", runs).sentences
    assert "(2 splits: lda, alpha = 0.1; lda, alpha = 5.0)" in words[0]
    (mild,) = [line for line in words if line.startswith("On the split lda, alpha = 5.0: ")]
    assert "scaffold [partition.alpha=5.0] is better than fedavg [partition.alpha=5.0]" in mild or "every other" in mild
    assert "alpha=0.1" not in mild
    assert "group" not in made("answer", runs).table.head
    assert "other runs have other splits" in " ".join(made("holdings", runs).sentences)


def test_means_are_over_the_rounds_that_all_seeds_have():
    (point,) = mean_line([{1: 0.2, 2: 0.5}, {2: 0.7}], scale=100)
    assert (point.x, point.y) == pytest.approx((2, 60))
    assert point.high - point.y == pytest.approx(100 * statistics.stdev([0.5, 0.7]))


def places(tree, path=()):
    """Yield the path of every value in a JSON tree."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


def changed(tree, path, value):
    """Return a JSON tree with another value at a place."""
    if not path:
        return value
    copy = json.loads(json.dumps(tree))
    node = copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return copy


JUNK = (None, "x", [], {}, -1, 10**400, float("nan"), 1e308, [[1]], {"name": 3}, True, ["a", 5])


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "contract.json",
        "partition.json",
        "calibration.json",
        "parties.json",
        "privacy.json",
        "references.json",
    ],
)
def test_no_wrong_value_anywhere_stops_a_panel(tmp_path, name):
    folder = write_run(tmp_path / "run", [0.1, 0.6], parties=("Ulm", "Aix"))
    claim = {"unit": "client", "epsilon": 3.0, "delta": 1e-5, "covered": ["model updates"]}
    (folder / "privacy.json").write_text(json.dumps({"delta": 1e-5, "claims": [claim], "not_covered": ["sizes"]}))
    models = {"majority": {"accuracy": 0.1}, "alone": [{"accuracy": 0.2}], "pooled": {"accuracy": 0.9}}
    (folder / "references.json").write_text(json.dumps(models))
    first, *others = (folder / name).read_text().splitlines(keepends=True)
    tree = json.loads(first)
    for turn, path in enumerate(places(tree)):
        for junk in (JUNK[turn % len(JUNK)], JUNK[(turn + 5) % len(JUNK)]):
            (folder / name).write_text("".join([json.dumps(changed(tree, path, junk)), "\n", *others]))
            runs = read_runs([folder])
            for make in panel_makers().values():
                make(runs)


def test_an_older_run_without_its_split_has_no_panel_of_it(tmp_path):
    folder = write_run(tmp_path / "run", [0.5])
    (folder / "partition.json").unlink()
    runs = read_runs([folder])
    assert made("holdings", runs) is None
    assert any("partition.json" in sentence for sentence in made("audit", runs).sentences)
