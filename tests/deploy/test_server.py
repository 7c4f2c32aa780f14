from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from deployments import Faulty, a_deployment, opened, set_line, table

from fedstill.core.errors import FedstillError
from fedstill.core.population import Stay
from fedstill.core.tree import flatten
from fedstill.deploy.folder import read_deployment, read_site
from fedstill.deploy.rehearsal import simulated
from fedstill.deploy.server import Sites, federate_over, measured
from fedstill.deploy.site import open_site
from fedstill.loop.callbacks import Callback


def same(first, second):
    one, two = flatten(first.weights._asdict()), flatten(second.weights._asdict())
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def rows_of(sites):
    return {client: site.rows.data for client, site in sites.items()}


def audit(deployment):
    path = deployment.run_dir / "audit.jsonl"
    return [(line["round"], line["client"], line["reason"]) for line in map(json.loads, path.read_text().splitlines())]


def numbers(name, value):
    return torch.tensor(value, dtype=torch.float64 if name == "loss" else None)


def own_rows(folder, **more):
    rows = {"source": str(folder / "pilot.csv"), "label": "outcome", "drop": ["patient_id"], "client_test_share": 0.2}
    return {**rows, "test": str(table(folder / "test.csv", 30, 9)), **more}


@pytest.mark.parametrize("method", ["scaffold", pytest.param("fedlmd+scaffold", marks=pytest.mark.matrix)])
def test_a_deployment_ends_at_the_bits_of_the_simulation(tmp_path, method):
    deployment = a_deployment(tmp_path, method)
    sites = opened(deployment)
    result, expected = federate_over(deployment, Faulty(sites)), simulated(deployment, rows_of(sites))
    assert same(result, expected)
    assert result.history.last["accuracy"] == expected.history.last["accuracy"]  # measured by the sites alone
    assert result.party_accuracy == expected.party_accuracy


@pytest.mark.slow
@pytest.mark.parametrize("method", ["feddf", "fedaux", "scaffold until 1 then feddf"])
def test_a_server_distils_on_its_own_unlabeled_rows(tmp_path, method):
    own = own_rows(tmp_path, unlabeled=str(table(tmp_path / "more.csv", 50, 8)))
    deployment = a_deployment(tmp_path, method, data=own, evaluate="global_test")
    sites = opened(deployment)
    result, expected = federate_over(deployment, Faulty(sites)), simulated(deployment, rows_of(sites))
    assert same(result, expected)
    assert result.history.rows[-1]["accuracy"] == expected.history.rows[-1]["accuracy"]


def test_the_runs_folder_is_an_ordinary_one_with_each_sites_result(tmp_path):
    deployment = a_deployment(tmp_path)
    federate_over(deployment, Faulty(opened(deployment)))
    files = {path.name for path in deployment.run_dir.iterdir()}
    assert {"config.toml", "contract.json", "metrics.jsonl", "audit.jsonl", "last", "best", "metrics.prom"} <= files
    lines = (deployment.run_dir / "parties.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in sorted(lines[1:])] == [
        ["north", "32", "8"], ["south", "24", "6"], ["west", "16", "4"],
    ]  # fmt: skip


def test_a_site_that_is_away_and_one_that_is_late_are_left_out_of_the_round_and_noted(tmp_path):
    deployment = a_deployment(tmp_path)

    def fault(order, client, answer):
        if client == 1 and order == 1:
            yield client, FedstillError("the site's service is not there")
        elif client != 2 or order != 1:  # 2 does not answer before the deadline
            yield client, answer()

    result = federate_over(deployment, Faulty(opened(deployment), fault))
    assert [row["accepted"] for row in result.history.rows] == [1, 3, 3]
    assert audit(deployment) == [(1, 1, "the site's service is not there"), (1, 2, "no answer before the deadline")]


def test_an_answer_that_comes_twice_counts_once_and_a_late_one_not_at_all(tmp_path):
    deployment = a_deployment(tmp_path)
    sites, late = opened(deployment), []

    def fault(order, client, answer):
        data = answer()
        yield client, data
        if client == 0:
            yield client, data
        if client == 1:
            yield from ((client, old) for old in late[-1:])
            late.append(data)

    result = federate_over(deployment, Faulty(sites, fault))
    assert same(result, simulated(deployment, rows_of(sites)))
    reasons = {reason for _, client, reason in audit(deployment) if client == 0}
    assert reasons == {"it answered twice: the first answer counts"}
    assert any("twice" in reason for _, client, reason in audit(deployment) if client == 1)


def test_a_site_that_lost_its_memory_is_left_out_unless_its_operator_lets_it_begin_anew(tmp_path):
    for begin_anew in ("false", "true"):
        (tmp_path / begin_anew).mkdir()
        deployment = a_deployment(tmp_path / begin_anew)
        site = deployment.site_folder("south")
        set_line(site / "site.toml", "begin_anew", begin_anew)

        def fault(order, client, answer, site=site):
            if client == 1 and order == 3:  # 1: round 1, 2: evaluation, 3: round 2
                for path in (site / "memory").glob("memory-*"):
                    path.unlink()
            yield client, answer()

        result = federate_over(deployment, Faulty(opened(deployment), fault))
        reasons = [(round, reason) for round, client, reason in audit(deployment) if client == 1]
        assert reasons[0][0] == 2
        if begin_anew == "true":
            assert result.history.rows[1]["accepted"] == 3
            assert "it began anew, as its operator allows" in reasons[0][1]
        else:
            assert result.history.rows[1]["accepted"] == 2
            assert "no memory of round 1: it was lost" in reasons[0][1]


def test_sites_join_and_leave_by_the_roster_with_a_line_in_the_audit(tmp_path):
    deployment = a_deployment(tmp_path, seats=4)
    first, second, third = deployment.members
    members = (first, replace(second, stay=Stay(2, None)), replace(third, stay=Stay(1, 2)))
    deployment = replace(deployment, members=members)
    asked = []

    def fault(order, client, answer):
        asked.append((order, client))
        yield client, answer()

    federate_over(deployment, Faulty(opened(deployment), fault))
    drawn = [sorted(client for order, client in asked if order == number) for number in (1, 3, 5)]
    assert drawn == [[0, 2], [0, 1, 2], [0, 1]]
    assert audit(deployment) == [
        (2, 1, "it joined: it may be drawn from this round on"),
        (3, 2, "it left: it is not drawn any more"),
    ]


def test_a_new_site_takes_an_empty_seat_of_a_run_that_goes_on(tmp_path):
    deployment = a_deployment(tmp_path, seats=4, checkpoint_every=1)

    class Stop(Callback):
        def on_round(self, row):
            return row["round"] == 1

    federate_over(deployment, Faulty(opened(deployment)), callbacks=[Stop()])
    old, new = deployment.site_folder("north"), deployment.site_folder("east")
    shutil.copytree(old, new, ignore=shutil.ignore_patterns("memory"))
    set_line(new / "site.toml", "client", "3")
    set_line(new / "site.toml", "name", '"east"')
    set_line(new / "site.toml", "data", f'"{table(tmp_path / "east.csv", 25, 7)}"')
    roster = deployment.folder / "roster.json"
    tree = json.loads(roster.read_text())
    tree["sites"].append({"client": 3, "name": "east", "first": 2})
    roster.write_text(json.dumps(tree))
    grown = read_deployment(deployment.folder)
    result = federate_over(grown, Faulty(opened(grown)), resume=True)
    assert [row["cohort"] for row in result.history.rows] == [3, 3, 3]
    assert (2, 3, "it joined: it may be drawn from this round on") in audit(grown)
    assert result.party_accuracy[3] is not None


def test_the_first_to_answer_fill_the_cohort_where_more_are_drawn(tmp_path):
    deployment = replace(a_deployment(tmp_path, cohort=2), spare=1)
    result = federate_over(deployment, Faulty(opened(deployment)))
    assert [(row["cohort"], row["accepted"]) for row in result.history.rows] == [(3, 2)] * 3
    assert all(reason == "not needed: enough clients answered before" for _, _, reason in audit(deployment))


def test_a_round_below_the_quorum_keeps_the_model(tmp_path):
    deployment = a_deployment(tmp_path, guard={"quorum": 3})

    def fault(order, client, answer):
        if client or order != 1:
            yield client, answer()

    result = federate_over(deployment, Faulty(opened(deployment), fault))
    assert deployment.quorum == 3
    assert [row["accepted"] for row in result.history.rows] == [0, 3, 3]
    assert any("quorum" in reason for round, client, reason in audit(deployment) if (round, client) == (1, None))


def test_a_server_that_was_killed_goes_on_to_the_same_bits(tmp_path):
    deployment = a_deployment(tmp_path, checkpoint_every=1)
    sites = opened(deployment)

    class Killed(BaseException):
        pass

    class Kill(Callback):
        def on_round(self, row):
            if row["round"] == 2:
                raise Killed

    with pytest.raises(Killed):
        federate_over(deployment, Faulty(sites), callbacks=[Kill()])
    result = federate_over(deployment, Faulty(opened(deployment)), resume=True)
    assert same(result, simulated(deployment, rows_of(sites)))


def test_a_site_with_another_version_or_another_file_is_refused_with_one_line(tmp_path):
    deployment = a_deployment(tmp_path)
    path = deployment.site_folder("west") / "experiment.toml"
    path.write_text(path.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))
    sites = opened(deployment)
    sites[0].desk.run["fedstill"] = "0.0.1"
    federate_over(deployment, Faulty(sites))
    reasons = {client: reason for round, client, reason in audit(deployment) if round == 1}
    assert "the server's fedstill is" in reasons[0]
    assert "this client's is '0.0.1': use the same at both" in reasons[0]
    assert "the server's experiment is" in reasons[2]
    assert 1 not in reasons


def test_a_site_may_decline_to_measure_and_the_others_are_enough(tmp_path):
    deployment = a_deployment(tmp_path)
    set_line(deployment.site_folder("north") / "site.toml", "evaluates", "false")
    result = federate_over(deployment, Faulty(opened(deployment)))
    assert (result.party_accuracy[0], result.history.last["measured_by"]) == (None, 2)


def test_a_run_that_nobody_measures_goes_on(tmp_path):
    deployment = a_deployment(tmp_path)
    sites = {client: open_site(replace(read_site(deployment.site_folder(name)), evaluates=False))
             for client, name in enumerate(("north", "south", "west"))}  # fmt: skip
    result = federate_over(deployment, Faulty(sites))
    assert [row["accepted"] for row in result.history.rows] == [3, 3, 3]
    assert (result.history.last, result.party_accuracy) == (None, ())


@pytest.mark.parametrize(
    "answer",
    [
        {"right": 5, "loss": 1.0, "count": 4},
        {"right": -1, "loss": 1.0, "count": 4},
        {"right": 1, "loss": float("nan"), "count": 4},
        {"right": 1, "loss": -1.0, "count": 4},
        {"right": 0, "loss": 1.0, "count": 0},
        {"right": 1, "count": 4},
        {"right": float("nan"), "loss": 1.0, "count": 4},
        {"right": 1, "loss": 1.0, "count": 4.5},
        {"right": [1, 1], "loss": 1.0, "count": 4},
    ],
)
def test_a_measurement_that_cannot_be_is_not_counted(answer):
    with pytest.raises(FedstillError):
        measured({name: numbers(name, value) for name, value in answer.items()})


@pytest.mark.parametrize("lie", [(10**15, 0.0, 10**15), (0, 1e300, 10)])
def test_one_site_does_not_decide_how_good_a_model_is(tmp_path, monkeypatch, lie):
    sites = Sites(a_deployment(tmp_path), Faulty({}))
    monkeypatch.setattr(sites, "measure", lambda weights: {0: (8, 2.0, 10), 1: (6, 10.0, 14), 2: lie})
    assert sites.evaluate(None, None, None) == {
        "accuracy": 14 / 24, "loss": 0.5, "measured_by": 2, "measured_on": 24,
    }  # fmt: skip


def test_a_measurement_is_three_numbers():
    sent = {"right": torch.tensor(3), "loss": numbers("loss", 2.0), "count": torch.tensor(4)}
    assert measured(sent) == (3, 2.0, 4)
    for other in ("away", {**sent, "more": torch.tensor(1)}, {**sent, "right": torch.tensor([1, 2])}):
        with pytest.raises(FedstillError):
            measured(other)


def test_a_server_needs_somebody_to_measure(tmp_path):
    deployment = a_deployment(tmp_path)
    blind = deployment.experiment.model_copy(update={"evaluate": "global_test"})
    with pytest.raises(FedstillError, match="needs test rows of the server's own"):
        federate_over(replace(deployment, experiment=blind), Faulty({}))
