"""benchmarks/cost.py holds every method against its card and fails when a promise is not kept."""

import json
import runpy

import pytest
from doc_pages import ROOT

TINY = ["--clients", "1", "--samples", "4", "--epochs", "1", "--repeats", "1"]


@pytest.fixture
def cost():
    return runpy.run_path(str(ROOT / "benchmarks" / "cost.py"))


def test_cards_are_those_of_the_papers(cost):
    """A step is three forward passes, so a frozen model is a third more; FedCurv looks at all data once more."""
    wanted = {"fedmmd": 1.33, "kd": 1.33, "fedntd": 1.33, "fedlmd": 1.33, "moon": 1.67, "fedcurv": 1.2}
    found = {method: round(card.factor("augmented", 5), 2) for method, card in cost["CARDS"].items()}
    assert found == {method: wanted.get(method, 1.0) for method in found}
    assert round(cost["CARDS"]["fedlmd"].factor("plain", 5), 3) == 1.067  # one run over the data in five epochs
    assert cost["limit_of"]("fedlmd", "plain", 5) == 1.15
    assert cost["limit_of"]("moon", "augmented", 5) == pytest.approx(1.15 * 5 / 3)


@pytest.mark.slow
def test_every_method_is_measured_in_both_settings(cost, tmp_path, capsys):
    file = tmp_path / "cost.json"
    assert cost["main"]([*TINY, "--methods", "fedlmd,moon,fedrs", "--json", str(file)]) == 0
    lines = json.loads(file.read_text())["lines"]
    methods = ["fedavg", "fedlmd", "moon", "fedrs"]
    assert [(line["setting"], line["method"]) for line in lines] == [
        (setting, method) for setting in ("augmented", "plain") for method in methods
    ]
    assert all(line["factor"] > 0 for line in lines)
    assert lines[0]["factor"] == 1.0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 + 1 + len(lines)


@pytest.mark.parametrize(("method", "code"), [("fedlmd", 1), ("fedprox", 0)])
def test_a_promise_that_is_not_kept_fails_the_check_and_other_lines_do_not(cost, method, code):
    cost["main"].__globals__["LIMITS"] = {(method, "plain"): 0.0}
    options = [*TINY, "--settings", "plain", "--methods", method]
    assert cost["main"]([*options, "--check"]) == code
    assert cost["main"](options) == 0
