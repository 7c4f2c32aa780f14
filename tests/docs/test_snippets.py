"""What the documentation shows works: Python snippets run, experiment files load, commands are accepted and run."""

import re
import shlex
import shutil
import tomllib

import pytest
from doc_pages import PAGES, ROOT, blocks, name_of, pages_with
from typer.testing import CliRunner

from fedstill import Experiment
from fedstill.cli import app
from fedstill.methods import own_code

LANGUAGES = {"python", "py", "toml", "sh", "text"}  # py: an excerpt, see test_reference_pages
SHORTER = {
    "run": ["--rounds", "1", "--set", "local.steps=2"],
    "compare": ["--rounds", "1", "--set", "local.steps=2", "--seeds", "1"],
    "sweep": ["--rounds", "1", "--set", "local.steps=2", "--seeds", "1"],
}


@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_python_snippets_of_a_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippet"}
    for block in blocks(page, "python"):
        source = "\n" * (block.line - 1) + block.text  # so that a traceback names the line of the page
        exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", pages_with("toml"), ids=name_of)
def test_experiment_files_of_a_page_load(page):
    for block in blocks(page, "toml"):
        table = tomllib.loads(block.text)
        assert Experiment.model_validate(table).model_dump(exclude_unset=True)


SMALL = ["--set", "model.name=mlp", "--set", "model.hidden=[8]", "--set", "local.steps=1"]  # tells as much of privacy


def run_block(text, folder, *settings):
    (folder / "shown.toml").write_text(text)
    words = ["run", str(folder / "shown.toml"), "--out", str(folder / "run"), *SMALL, *settings]
    return CliRunner().invoke(app, words)


def test_the_privacy_page_shows_what_its_experiment_tells(tmp_path):
    page = ROOT / "docs" / "privacy.md"
    told = [line.strip() for line in run_block(blocks(page, "toml")[0].text, tmp_path).stdout.splitlines()]
    shown = [line.strip() for line in blocks(page, "text")[0].text.splitlines()]
    assert shown[0].startswith("privacy ")
    assert [line for line in shown if line not in told] == []


def test_the_experiment_on_the_page_of_dp_fedavg_runs(tmp_path):
    (block,) = (one for one in blocks(ROOT / "docs" / "methods" / "dp_fedavg.md", "toml") if "cohort" in one.text)
    done = run_block(block.text, tmp_path, "--set", "rounds=1")
    assert done.exit_code == 0, done.output


def commands():
    found = [
        line
        for page in PAGES
        for block in blocks(page, "sh")
        for line in block.text.splitlines()
        if line.startswith("fedstill ")
    ]
    assert len(found) > 10
    return sorted(set(found))


@pytest.fixture
def experiment_folder(tmp_path, monkeypatch):
    """A folder with the experiment file that the documentation writes first, and the examples."""
    first = blocks(ROOT / "docs" / "experiment-file.md", "toml")[0].text
    (tmp_path / "experiment.toml").write_text(first)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", commands())
def test_commands_work(line, experiment_folder):
    words = shlex.split(line)[1:]
    short = [] if "--help" in words else SHORTER.get(words[0], [])
    own_code.forget()  # each command is a process of its own
    answer = CliRunner().invoke(app, [*words, *short])
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.strip()


def test_other_shell_lines_name_targets_and_extras_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.text.splitlines():
                if found := re.match(r"make ([\w-]+)", line):
                    assert re.search(rf"^{found[1]}:", makefile, re.MULTILINE), f"{name_of(page)}: {line}"
                elif found := re.match(r"pip install '\.\[([\w,]+)\]'", line):
                    assert set(found[1].split(",")) <= extras.keys(), f"{name_of(page)}: {line}"
                else:
                    assert line.startswith("fedstill ") or not line, f"{name_of(page)}: what is '{line}'?"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page):
    fences = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[::2]) <= LANGUAGES
    assert not any(fences[1::2]), "a block is not closed"


def test_scripts_that_the_text_names_exist():
    for page in PAGES:
        for script in re.findall(r"python ((?:benchmarks|examples|tools)/\S+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{name_of(page)}: {script}"
