"""Every method has a page: a generated head that is up to date and a body that somebody wrote."""

import functools
import importlib.util
import sys

import pytest
from doc_pages import ROOT

from fedstill.methods import METHODS

SECTIONS = ("The idea", "When to use it", "Differs from the paper", "Reference")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_method_pages", ROOT / "tools" / "make_method_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.head = functools.cache(module.head)  # it plays each method's rounds, and the same ones each time
    return module


def check(tool, monkeypatch):
    """Exit code of the tool with --check."""
    monkeypatch.setattr(sys, "argv", ["make_method_pages.py", "--check"])
    try:
        tool.main()
    except SystemExit as stop:
        return stop.code
    return 0


def test_generated_parts_are_up_to_date(tool, monkeypatch, capsys):
    assert check(tool, monkeypatch) == 0, f"{capsys.readouterr().out} run: make pages"


def test_a_page_that_was_edited_in_its_generated_part_is_noticed_and_mended(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(sys, "argv", ["make_method_pages.py"])
    tool.main()
    page = tmp_path / "docs" / "methods" / "scaffold.md"
    fresh = page.read_text()
    page.write_text(fresh.replace("2 models", "3 models") + "\n## The idea\n\nkept\n")
    assert check(tool, monkeypatch) != 0
    assert "scaffold.md" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["make_method_pages.py"])
    tool.main()
    assert page.read_text() == fresh + "\n## The idea\n\nkept\n"
    assert check(tool, monkeypatch) == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_page_has_a_written_body(method, tool):
    text = (ROOT / "docs" / "methods" / f"{method}.md").read_text(encoding="utf-8")
    body = text.partition(tool.END)[2]
    assert [section for section in SECTIONS if f"\n## {section}\n" not in body] == []
    assert "$$" in body, "the equation is missing"
    assert len(body.split()) > 100


def test_there_is_no_page_without_a_method():
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")}
    assert pages == {*METHODS, "README"}


def test_costs_are_those_of_the_papers(tool):
    """Models sent and kept, from the papers: FedAvg 1 / 1 / 0 / 0, SCAFFOLD 2 / 2 / 1 / 1, FedDyn 1 / 1 / 1 / 1."""

    def found(method):
        price = tool.cost(method)
        keys = ("sent by a client", "sent to a client", "kept by a client between rounds")
        return [price[key] for key in (*keys, "kept by the server beside the model")]

    assert found("fedavg") == ["1 model", "1 model", "nothing", "nothing"]
    assert found("scaffold") == ["2 models", "2 models", "1 model", "1 model"]
    assert found("feddyn") == ["1 model", "1 model", "1 model", "1 model"]
    assert found("fedadam") == ["1 model", "1 model", "nothing", "2 models"]
    assert "1 frozen model" in tool.cost("fedntd")["a client's step"]


def test_costs_name_what_the_server_keeps_for_its_data_though_no_model_is_as_large(tool):
    kept = {method: tool.cost(method)["kept by the server beside the model"] for method in ("feddf", "fedaux", "d2cfl")}
    assert kept["feddf"] == "what was taught last, M x K"
    assert "a score of each of the N clients" in kept["fedaux"]
    assert kept["d2cfl"].startswith("1 model; ")
    assert tool.kept_by_server({"0": {}, "1": {"unheard": {}}}, 8) == "unheard"
