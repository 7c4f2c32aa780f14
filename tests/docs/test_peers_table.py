"""The table of other libraries is made from the record; numbers in these tests are done by hand."""

import importlib.util
import json

import pytest
from doc_pages import ROOT


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_peers_table", ROOT / "tools" / "make_peers_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, seconds, setting="as it comes", **changes):
    return {
        "case": "mlp-50", "name": name, "setting": setting, "turn": 0, "load": 0.5, "seconds": seconds,
        "start_cpu": 2.0, "start_wall": 3.0, "memory": 250e6, "torch": "2.13.0", **changes,
    }  # fmt: skip


@pytest.fixture
def record():
    names = {"fedstill": "1.0", "plain": "2.13.0", "pfl": "0.6.0"}
    return {
        "machine": "2 cores", "date": "2026-01-01", "versions": names, "checks": {},
        "import": dict.fromkeys(names, 0.25),
        "runs": [
            run("pfl", [90.0, 5.0, 7.0]),
            run("pfl", [90.0, 3.0, 4.0], "two processes"),
            run("fedstill", [9.0, 0.5, 0.5], turn=0),
            run("fedstill", [9.0, 0.3, 0.7], turn=1),
            run("plain", [2.0, 2.0]),
        ],
    }  # fmt: skip


def test_a_round_is_the_least_median_of_a_process_and_first_rounds_do_not_count(tool, record):
    assert tool.seconds(record, "mlp-50", ("fedstill", "as it comes")) == 0.5
    record["runs"].append(run("fedstill", [0.1, 0.9, 0.3, 0.4], turn=2))
    assert tool.seconds(record, "mlp-50", ("fedstill", "as it comes")) == 0.4
    assert tool.seconds(record, "mlp-50", ("pfl", "as it comes")) == 6.0


def test_the_best_peer_is_the_fastest_library_in_its_best_setting_and_never_the_plain_loop(tool, record):
    row, times = tool.best_peer(record, "mlp-50")
    assert (row, times) == (("pfl", "two processes"), 7.0)


def test_a_row_has_the_seconds_and_how_many_times_those_of_fedstill_they_are(tool, record):
    lines = tool.render(record).splitlines()
    assert "| fedstill | as it comes | 0.50 |" in lines
    assert "| pfl-research | as it comes | 6.0 (12) |" in lines
    assert "| fedstill | as it comes | 0.25 | 2.0 | 3.0 | 250 |" in lines


def test_a_case_in_which_a_library_was_not_run_stays_empty(tool, record):
    record["runs"].append(run("fedstill", [9.0, 1.0], case="cnn-10"))
    record["runs"].append(run("plain", [9.0, 1.0], case="cnn-10"))
    record["runs"].append(run("pfl", [9.0, 2.0], "two processes", case="cnn-10"))
    assert "| pfl-research | as it comes | 6.0 (12) |  |" in tool.render(record).splitlines()


@pytest.mark.parametrize(("value", "text"), [(123.4, "123"), (5.25, "5.2"), (0.456, "0.46"), (0.0123, "0.012")])
def test_numbers_have_two_digits_or_more(tool, value, text):
    assert tool.digits(value) == text


def test_every_library_of_the_record_did_the_steps_of_its_case(tool):
    record = json.loads(tool.RECORD.read_text(encoding="utf-8"))
    wanted = {"mlp-50": 500, "mlp-1000": 10_000, "cnn-10": 100}
    assert record["checks"]
    for case, libraries in record["checks"].items():
        assert {found["steps"] for found in libraries.values()} == {wanted[case]}
        assert max(found["apart"] for found in libraries.values()) < 1e-5


def test_the_page_is_up_to_date(tool):
    record = json.loads(tool.RECORD.read_text(encoding="utf-8"))
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(text, record) == text, "run: make pages"
