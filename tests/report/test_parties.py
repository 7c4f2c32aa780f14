"""Results for each party, by hand on a federation of three, and from a run to its files."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
import torch
from pictures import saved_figures
from run_helpers import toy_federation

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.loop.evaluate import accuracy_by_party
from fedstill.report.parties import Party, party_picture, party_table, party_text, summary, write_parties

MODELS = {"federated": (0.5, 0.75, None), "pooled": (0.25, 1.0, None), "alone": (0.75, 0.5, None)}


def three() -> fedstill.Federation:
    """Clients of 4, 3 and 1 rows to train on; the first two hold back 2 and 4 rows."""
    federation = replace(toy_federation([4, 3, 1, 6]), names=("Ulm", "Aix", "Rom"))
    offsets, rows = torch.tensor([0, 2, 6, 6]), federation.indices[8:]
    return replace(
        federation, indices=federation.indices[:8], offsets=federation.offsets[:4], client_test=(rows, offsets)
    )


def test_a_line_for_each_party_the_worst_first():
    parties = party_table(three(), MODELS)
    assert parties == [Party("Ulm", 4, 2, 0.5, 0.25, 0.75), Party("Aix", 3, 4, 0.75, 1.0, 0.5), Party("Rom", 1, 0)]
    assert [party.gain for party in parties] == [-0.25, 0.25, None]


def test_parties_without_names_are_numbered_and_equals_stand_by_name():
    nameless = replace(three(), names=())
    assert [party.name for party in party_table(nameless, {"federated": (0.5, 0.5, 0.5)})] == [
        "client 0",
        "client 1",
        "client 2",
    ]


def test_the_summary_by_hand():
    facts = summary(party_table(three(), MODELS))
    assert facts["federated"] == {"parties": 2, "mean": 0.625, "worst_decile": 0.5, "best_decile": 0.75}
    assert facts["gain"] == {"parties": 2, "mean": 0.0, "worst_decile": -0.25, "best_decile": 0.25}
    assert (facts["parties"], facts["better_off"], facts["worse_off"]) == (3, 1, 1)


def test_a_decile_of_eleven_parties_is_the_mean_of_two():
    facts = summary([Party(str(number), 1, 10, number / 10) for number in range(11)])
    assert facts["federated"]["worst_decile"] == pytest.approx(0.05)
    assert facts["federated"]["best_decile"] == pytest.approx(0.95)


def test_models_that_nobody_trained_leave_their_columns_empty(tmp_path):
    write_parties(party_table(three(), {"federated": MODELS["federated"]}), tmp_path)
    lines = list(csv.DictReader((tmp_path / "parties.csv").read_text(encoding="utf-8").splitlines()))
    assert [(line["name"], line["federated"], line["alone"], line["gain"]) for line in lines] == [
        ("Ulm", "0.5", "", ""),
        ("Aix", "0.75", "", ""),
        ("Rom", "", "", ""),
    ]
    tree = json.loads((tmp_path / "parties.json").read_text(encoding="utf-8"))
    assert set(tree["summary"]) == {"parties", "federated"}
    assert tree["parties"][1] == {
        "name": "Aix", "rows": 3, "test_rows": 4, "federated": 0.75, "pooled": None, "alone": None, "gain": None,
    }  # fmt: skip


def test_a_terminal_shows_the_five_worst_and_the_five_best():
    text = party_text([Party(f"p{number:02}", 1, 100, number / 100) for number in range(30)])
    assert [line.split()[0] for line in text.splitlines()[2:]] == [
        *(f"p{number:02}" for number in range(5)), "...", *(f"p{number:02}" for number in range(25, 30)),
    ]  # fmt: skip
    assert "... 20 more" in text
    assert "mean 14.50 %, worst tenth 1.00 %, best tenth 28.00 %" in text


def test_a_terminal_shows_a_gain_where_there_is_one():
    head, titles, ulm, aix = party_text(party_table(three(), MODELS)).splitlines()
    assert head.endswith("Better off than alone: 1, worse off: 1.")
    assert titles.split("  ")[-1].strip() == "gain %"
    assert ulm.split() == ["Ulm", "4", "2", "50.00", "25.00", "75.00", "-25.00"]
    assert aix.split()[-1] == "25.00"


def test_nobody_has_test_rows():
    with pytest.raises(FedstillError, match=r"set data\.client_test_share, e\.g\. 0\.2"):
        party_table(toy_federation(), {})
    assert "No party has rows enough" in party_text([Party("Rom", 1, 0)])


@pytest.mark.parametrize("count", [2, 200])
def test_the_picture_names_parties_while_there_is_room(count, tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    parties = [
        Party(f"a rather long name of party {number}", 1, 9, number / count, 0.5, 0.4) for number in range(count)
    ]
    assert party_picture(parties, tmp_path / "parties.png", title="a title").is_file()
    (axes,) = figures[0].axes
    names = [label for label in axes.get_yticklabels() if label.get_text()]
    assert len(names) == (2 if count == 2 else 0)
    assert all(name.get_window_extent().x0 >= 0 for name in names)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["federated", "pooled", "alone"]


class Answering:
    """A trainer whose model takes every row for class 1."""

    def outputs(self, weights, x, **_):
        return fedstill.core.types.Output(torch.tensor([0.0, 1.0, 0.0]).expand(len(x), 3), x)


def test_accuracy_is_counted_on_a_party_s_own_rows():
    federation = three()
    labels = federation.train.y.clone()
    labels[federation.client_test[0]] = torch.tensor([1, 0, 1, 1, 1, 2])
    federation = replace(federation, train=replace(federation.train, y=labels))
    assert accuracy_by_party(None, federation, Answering()) == (0.5, 0.75, None)
    assert accuracy_by_party(None, toy_federation(), Answering()) == ()


def visits(tmp_path, **changes) -> fedstill.Experiment:
    lines = ["clinic,a,b,ill"]
    for clinic, count in (("north", 20), ("south", 10), ("new / one", 5)):
        lines += [f"{clinic},{row % 7},{row % 3},{'yes' if row % 7 > 3 else 'no'}" for row in range(count)]
    (tmp_path / "visits.csv").write_text("\n".join(lines))
    return fedstill.Experiment(
        rounds=2,
        cohort=3,
        data={"source": str(tmp_path / "visits.csv"), "label": "ill", "client_test_share": 0.25},
        partition={"scheme": "natural", "keys": "clinic", "clients": 0},
        model={"name": "mlp", "hidden": [4]},
        **changes,
    )


def test_a_run_writes_what_its_model_says_to_each_owner(tmp_path):
    experiment = visits(tmp_path)
    result = fedstill.run(experiment, run_dir=tmp_path / "run")
    assert (tmp_path / "run" / "parties.png").is_file()
    parties = json.loads((tmp_path / "run" / "parties.json").read_text())["parties"]
    assert {party["name"] for party in parties} == {"north", "south", "new / one"}
    federation = fedstill.build_federation(experiment)
    rows, offsets = federation.client_test
    assert len(result.party_accuracy) == 3
    for client, name in enumerate(federation.names):
        own = rows[offsets[client] : offsets[client + 1]]
        (line,) = [party for party in parties if party["name"] == name]
        assert (line["federated"], line["test_rows"]) == (result.party_accuracy[client], len(own))
        right = line["federated"] * len(own)
        assert right == pytest.approx(round(right))


def test_a_comparison_with_references_says_what_each_party_gains(tmp_path):
    experiment = visits(tmp_path, compare={"methods": ["fedavg"], "seeds": 2, "references": True})
    comparison = fedstill.compare(experiment, run_dir=tmp_path / "runs")
    for result, known in zip(comparison.results["fedavg"], comparison.references, strict=True):
        parties = json.loads((result.run_dir / "parties.json").read_text())["parties"]
        gains = [
            federated - alone for federated, alone in zip(result.party_accuracy, known.alone_by_party, strict=True)
        ]
        assert sorted(party["gain"] for party in parties) == sorted(gains)
