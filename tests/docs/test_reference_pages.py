"""Pages that list things list all of them: keys, commands, options, schemes, networks, types."""

import ast
import re
import runpy
import sys
import tomllib
from dataclasses import fields, is_dataclass
from enum import Enum

import pytest
from doc_pages import ROOT, blocks
from typer.main import get_command

from fedstill import Experiment
from fedstill.cli import app
from fedstill.core import types
from fedstill.experiment.config_errors import keys_of
from fedstill.experiment.run_folder import write_description
from fedstill.methods.options import parameters
from fedstill.models import MODELS
from fedstill.partition import PARTITIONS
from fedstill.report.table import COLUMNS

DOCS = ROOT / "docs"


def test_the_experiment_page_shows_every_default():
    shown = tomllib.loads(blocks(DOCS / "experiment-file.md", "toml")[1].text)
    assert Experiment.model_validate(shown) == Experiment()


def test_the_experiment_page_names_every_key():
    text = blocks(DOCS / "experiment-file.md", "toml")[1].text
    shown = {line.removeprefix("# ").partition(" =")[0] for line in text.splitlines() if " = " in line}
    sections = set(tomllib.loads(text))
    assert {key.rpartition(".")[2] for key in keys_of(Experiment)} - sections == shown - sections


def rows(page: str) -> list[list[str]]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]


@pytest.mark.parametrize(
    ("page", "kind", "known"), [("partitions.md", "partition", PARTITIONS), ("models.md", "model", MODELS)]
)
def test_tables_name_everything_with_its_own_keys(page, kind, known):
    listed = {name.strip("`"): row[-1] for row in rows(page) for name in row[0].split(", ")}
    assert listed.keys() == known.keys()
    for name, keys in listed.items():
        assert {key.strip("` ") for key in keys.split(",")} - {""} == parameters(kind, name).keys(), name


def test_the_command_page_has_every_command_and_option():
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    for name, command in get_command(app).commands.items():
        assert f"\n## {name}\n" in text
        for option in command.params:
            if option.param_type_name == "option":
                assert option.opts[0] in text, f"{name} {option.opts[0]}"


def type_excerpts() -> list[ast.ClassDef]:
    trees = [ast.parse(block.text) for block in blocks(DOCS / "concepts.md", "py")]
    return [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("excerpt", type_excerpts(), ids=lambda node: node.name)
def test_types_in_the_concepts_are_those_of_the_code(excerpt):
    real = getattr(types, excerpt.name)
    if issubclass(real, Enum):
        shown = [node.value.id for node in excerpt.body]
        assert shown == [member.name for member in real]
        return
    shown = [node.target.id for node in excerpt.body]
    assert shown == ([field.name for field in fields(real)] if is_dataclass(real) else list(real._fields))


def test_the_concepts_show_the_types_that_methods_are_written_in():
    shown = {node.name for node in type_excerpts()}
    assert shown >= {
        "Weights",
        "Output",
        "Batch",
        "Model",
        "Local",
        "Objective",
        "Uploads",
        "Round",
        "ServerStep",
        "Method",
        "Training",
        "Need",
    }


def test_the_table_that_is_shown_is_that_of_the_present_quick_start():
    tool = runpy.run_path(str(ROOT / "tools" / "show_quick_start.py"))
    shown = {tool["SHOWN"].search(page.read_text(encoding="utf-8")).groups() for page in tool["PAGES"]}
    ((fingerprint, table),) = shown  # the same on both pages
    assert fingerprint == tool["fingerprint"](), "make run, then tools/show_quick_start.py with the folder it names"
    header, *lines = table.splitlines()
    assert tuple(re.split(r"  +", header)) == COLUMNS
    assert {line.split("  ")[0] for line in lines} == set(Experiment.quickstart().compare.methods)


def test_the_outcome_of_another_experiment_is_not_shown(tmp_path, monkeypatch):
    write_description(Experiment.quickstart().replace(rounds=1), tmp_path)
    monkeypatch.setattr(sys, "argv", ["show_quick_start.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="not a run of the present"):
        runpy.run_path(str(ROOT / "tools" / "show_quick_start.py"), run_name="__main__")
