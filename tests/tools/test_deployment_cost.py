"""benchmarks/deployment_cost.py measures a round, and docs/scale.md shows what follows from its record."""

from __future__ import annotations

import json
import runpy

import pytest
from doc_pages import ROOT

from fedstill import build_model, federate
from fedstill.population import over_loopback

PAGE = ROOT / "docs" / "scale.md"


@pytest.fixture(scope="module")
def cost():
    return runpy.run_path(str(ROOT / "benchmarks" / "deployment_cost.py"))


@pytest.fixture
def record(cost):
    return json.loads(cost["RECORD"].read_text())


def test_the_page_has_the_tables_of_the_record(cost, record):
    page = PAGE.read_text()
    assert cost["written"](page, record) == page


def test_the_page_changes_with_the_record(cost, record):
    record["wire"][-1]["pack_order"] *= 2
    page = PAGE.read_text()
    assert cost["written"](page, record) != page


def test_the_cost_of_a_round_in_worked_numbers(cost):
    """Two clients, a million parameters: 4 MB + 1,000 bytes + one name a message."""
    constants = cost["Constants"](
        order_bytes=1000, answer_bytes=1000, pack_order=1.0, open_order=1.0, pack_answer=1.0, open_answer=2.0,
        guard=0.004, aggregate=0.001, memory=5.0,
    )  # fmt: skip
    found = cost["cost_of"](cost["Shape"]("two", 2, 1_000_000, 1, "device_bits"), constants)
    assert found.message == 4_001_100
    assert found.server_bytes == 8_002_200
    assert found.client_seconds == pytest.approx(2 * 8 * 4_001_100 / 10e6)
    assert found.work_seconds == pytest.approx(0.004 + 2 * 2 * 0.004 + 2 * 0.005)
    assert found.memory == 5 * 2 * 4_000_000
    hours = (found.client_seconds + 3 + found.work_seconds) / 3600
    assert found.dollars == pytest.approx(100 * (0.0080022 * 0.09 + hours * 0.05))


def test_the_sizes_of_the_shapes_are_those_of_the_networks(cost):
    def count(name, **options):
        params = build_model(name, **options).init(0).params
        return sum(leaf.numel() for leaf in params.values()), len(params)

    shapes = {shape.name: (shape.parameters, shape.tensors) for shape in cost["SHAPES"]}
    text = {"input_shape": (64,), "classes": 4, "vocabulary": 30522}
    assert shapes["100 organisations, BERT, all of it"] == count("bert", **text)
    assert shapes["100 organisations, BERT, adapters of rank 4"] == count("bert", **text, adapters=4)
    assert shapes["100 organisations, CNN for 32x32 images"] == count("cnn", input_shape=(3, 32, 32), classes=10)
    dense = count("mlp", input_shape=(784,), classes=10, hidden=(64,))
    assert shapes["10,000 devices, 100 a round, MLP 784-64-10"] == dense


def test_bytes_of_order_and_answer_are_those_of_a_run_over_the_wire(cost, tmp_path):
    """The measured overhead is what a desk of a real run notes in its audit, up to the length of facts."""
    model = build_model("mlp", input_shape=(20,), classes=10, hidden=(8,))
    built = cost["a_run"](cost["points"](2, 20), model, rounds=1, cohort=2)
    federate(over_loopback(built, tmp_path))
    (line,) = (json.loads(text) for text in (tmp_path / "client-0" / "audit.jsonl").read_text().splitlines())
    size = 4 * sum(leaf.numel() for leaf in model.init(0).params.values())
    constants = cost["Constants"].of(json.loads(cost["RECORD"].read_text()))
    assert line["bytes_in"] - size < 3 * constants.order_bytes
    assert line["bytes_out"] - size < 3 * constants.answer_bytes


def test_a_server_is_measured_with_clients_that_are_made_up(cost):
    found = cost["ghost_round"](10_000, 3)
    assert found["cohort"] == 3
    assert found["peak_bytes"] >= 0
    assert found["server_seconds"] > 0


@pytest.mark.slow
def test_the_small_runs_have_every_client_behind_the_wire(cost, tmp_path):
    found = dict(cost["small_runs"](tmp_path, 0.02))
    assert found["10,000 devices, 100 a round"]["clients"] == 200
    assert all(run["bytes_up"] > 0 for run in found.values())
