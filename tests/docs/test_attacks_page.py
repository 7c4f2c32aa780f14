"""The page about hostile clients says what the record says, and the record keeps what the page promises."""

import importlib.util
import sys

import pytest
from doc_pages import ROOT


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("attacks", ROOT / "benchmarks" / "storm" / "attacks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_tables_are_those_of_the_record(script):
    page = script.PAGE.read_text()
    assert script.with_tables(page, script.tables(script.recorded())) == page


def test_a_table_without_a_place_on_the_page_is_a_mistake(script):
    with pytest.raises(AssertionError, match="0 places"):
        script.with_tables("# A page", {"methods": ""})


def test_every_run_of_the_script_is_on_record_and_no_other(script):
    assert {script.case_of(row) for row in script.recorded()} == set(script.cases())


@pytest.mark.parametrize("method", ["FedAvg", "FedDF", "FedAUX"])
def test_the_recommended_setting_keeps_nine_tenths_of_the_accuracy_and_closes_the_backdoor(script, method):
    table = script.Table(script.recorded())
    plain, safe = script.METHODS[method]
    for name in ("sign x4", "sign x20", "noise x4", "label flip", "adaptive", "backdoor x5", "adaptive backdoor"):
        assert table.mean(safe, script.ATTACKS[name]) >= 0.9 * table.mean(plain, ""), name
    assert table.mean(safe, script.ATTACKS["backdoor x5"], "backdoor_success") <= 30
    assert table.mean(safe, script.ATTACKS["adaptive backdoor"], "backdoor_success") <= 45


def test_clients_that_are_sure_of_everything_do_not_decide_where_shares_are_bounded(script):
    table = script.Table(script.recorded(), alpha=0.1)
    assert table.mean(script.ODDS["no bound"], "sure") < 70 <= table.mean(script.ODDS["largest_share=2.0"], "sure")
