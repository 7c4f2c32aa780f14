"""benchmarks/bits_over_flower.py plays runs over Flower, and docs/flower.md shows what its record says."""

from __future__ import annotations

import runpy

import pytest
from doc_pages import ROOT

from fedstill.methods import METHODS


@pytest.fixture(scope="module")
def bits():
    return runpy.run_path(str(ROOT / "benchmarks" / "bits_over_flower.py"))


@pytest.fixture
def runs(bits):
    return bits["recorded"]()


def test_the_page_has_the_lists_of_the_record(bits, runs):
    page = bits["PAGE"].read_text()
    assert bits["written"](page, runs) == page


def test_a_run_that_ended_at_other_bits_is_said_to_be_wrong(bits, runs):
    runs["fedavg"]["different"] = ["params/w"]
    assert "Different, and should be equal: `fedavg`." in bits["lists"](runs)
    del runs["fedavg"]
    assert "Not played: `fedavg`" in bits["lists"](runs)


def test_in_no_run_of_the_record_a_site_was_left_out(runs):
    assert {tuple(run["accepted"]) for run in runs.values()} == {(3, 3)}


def test_every_method_is_a_run_and_the_record_has_the_runs_as_the_script_plays_them(bits, runs):
    assert bits["RUNS"].keys() >= METHODS.keys()
    assert {name: run["method"] for name, run in runs.items()} == {
        name: one.method for name, one in bits["RUNS"].items()
    }
