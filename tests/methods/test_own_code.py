"""Code of one's own runs at the user's word, and at nobody else's."""

from __future__ import annotations

import importlib
import os
import sys

import pytest
from cli_runs import fedstill, mistake
from code_attacks import HARMLESS, ONE_LINE, RAN, WENT_ON, Attacker, attempts, command

import fedstill as library
from fedstill.core.errors import FedstillError
from fedstill.methods import own_code

MINE = '''
from fedstill.methods.fedavg import fedavg

def mine(mu: float = {mu}):
    """Mine."""
    return fedavg()
'''
EXPERIMENT = """
rounds = 1
cohort = 2
method = "mine.py:mine"
model = {name = "mlp", hidden = [3]}
partition = {scheme = "iid", clients = 2}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an experiment file that names code, which nobody has allowed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_CONFIG", str(tmp_path / "config"))
    (tmp_path / "mine.py").write_text(MINE.format(mu=0.5))
    (tmp_path / "own.toml").write_text(EXPERIMENT)
    own_code.forget()
    return tmp_path


def test_no_file_that_is_data_runs_code(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CONFIG", str(tmp_path / "config"))
    (tmp_path / "world").mkdir()
    outcomes = dict(attempts(tmp_path / "world", 0))
    assert len(outcomes) >= 40
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in HARMLESS} == {}
    went_on = {name for name, outcome in outcomes.items() if outcome == WENT_ON}
    readers = {"show their run", "report their run", "list their runs"}
    bytecode = {"bytecode beside an allowed file", "bytecode beside the neighbour of one"}
    assert went_on == readers | bytecode | {f"a {kind} of their repository" for kind in ("filter", "monitor")}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_no_choice_of_names_runs_code(tmp_path, monkeypatch, seed):
    monkeypatch.setenv("FEDSTILL_CONFIG", str(tmp_path / "config"))
    (tmp_path / "world").mkdir()
    assert {name: what for name, what in attempts(tmp_path / "world", seed) if what not in HARMLESS} == {}


def test_the_attempts_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    them = Attacker(tmp_path, 0)
    file = them.file(f'method = "{them.module}.py:{them.function}"', "model = 'mlp'")
    assert them.came_of(lambda: command("run", file)) == ONE_LINE
    assert them.came_of(lambda: command("run", file, "--allow-code")) == RAN


def test_the_refusal_says_what_to_type_and_it_works(here):
    line = mistake("run", "own.toml")
    assert "names code, 'mine.py:mine' (digest " in line
    assert "`fedstill allow mine.py`" in line
    shown = fedstill("allow", "mine.py").stdout
    assert own_code.file_digest(here / "mine.py") in shown
    fedstill("run", "own.toml", "--quiet", "--out", "first")
    assert "mine.py:mine" in fedstill("resume", "first", "--quiet").stdout


def test_the_word_holds_for_a_content_and_not_for_a_file(here):
    fedstill("allow", "mine.py")
    (here / "mine.py").write_text(MINE.format(mu=0.25))
    assert "`fedstill allow mine.py`" in mistake("run", "own.toml")


def test_the_word_for_one_command_names_file_and_digest_and_is_forgotten(here):
    told = fedstill("run", "own.toml", "--quiet", "--allow-code", "--out", "first").stderr
    assert told.count("--allow-code: mine.py:mine") == 1
    assert own_code.file_digest(here / "mine.py")[:8] in told
    mistake("run", "own.toml")
    assert "names code" in mistake("resume", "first")
    fedstill("resume", "first", "--quiet", "--allow-code")


def test_a_name_on_the_command_line_is_the_users_word(here):
    small = ["--set", "model=mlp", "--set", "partition.clients=2", "--set", "cohort=2", "--rounds", "1", "--quiet"]
    fedstill("run", "--set", "method=mine.py:mine", *small)
    fedstill("run", "own.toml", "--set", "method=mine.py:mine", "--quiet")
    fedstill("compare", "--methods", "fedavg,mine.py:mine", "--seeds", 1, "--out", "table", *small)
    fedstill("compare", "--methods", "fedavg,mine.py:mine", "--seeds", 2, "--out", "table", *small)
    fedstill("explain", "mine.py:mine")


def test_a_name_in_python_is_the_users_word_for_the_folder_of_its_run(here):
    made = library.Experiment(
        rounds=1, cohort=2, method="mine.py:mine", model="mlp", partition={"scheme": "iid", "clients": 2}
    )
    library.run(made, run_dir="first", pictures=False)
    assert library.load_run("first").experiment.method.name.endswith("mine.py:mine")
    own_code.forget()
    with pytest.raises(FedstillError, match=r"fedstill\.allow\('.*mine\.py'\)"):
        library.load_run("first")
    library.allow("mine.py")
    library.load_run("first")


def test_a_neighbour_that_a_file_imports_is_allowed_with_it(here):
    (here / "beside.py").write_text("WIDTH = 3\n")
    (here / "mine.py").write_text(f"import beside\n{MINE.format(mu=0.5)}")
    assert [line.split()[0] for line in own_code.allow("mine.py")] == [str(here / "beside.py"), str(here / "mine.py")]
    (here / "beside.py").write_text("WIDTH = 4\n")
    with pytest.raises(FedstillError, match="names code"):
        library.Experiment.from_toml("own.toml")


def test_code_of_an_allowed_file_imports_its_neighbours_and_nothing_else_of_the_folder(here, monkeypatch):
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (here / "mine.py").write_text(MINE.format(mu=0.5).replace("    return", "    import late_neighbour\n    return"))
    (here / "late_neighbour.py").write_text("")
    (here / "library_of_theirs").mkdir()
    (here / "library_of_theirs" / "__init__.py").write_text("raise SystemExit('the code of a stranger ran')")
    fedstill("allow", "mine.py")
    fedstill("run", "own.toml", "--quiet")
    assert "late_neighbour" in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("library_of_theirs")


@pytest.mark.parametrize("name", ["mine.py:getoutput", "mine:getoutput"])
def test_a_neighbour_that_defines_a_function_allows_none_of_that_name(here, name):
    (here / "mine.py").write_text(f"from subprocess import getoutput\nimport beside\n{MINE.format(mu=0.5)}")
    (here / "beside.py").write_text("def getoutput():\n    return 1\n")
    fedstill("allow", "mine.py")
    (here / "own.toml").write_text(EXPERIMENT.replace('"mine.py:mine"', f"'{name}(cmd=\"touch ran\")'"))
    assert "which is no function of that file's own" in mistake("run", "own.toml")
    assert not (here / "ran").exists()


def test_files_of_a_name_are_found_without_an_import(here):
    package = here / "package"
    (package / "inner").mkdir(parents=True)
    for file in ("__init__.py", "inner/__init__.py", "other.py"):
        (package / file).write_text("raise RuntimeError")
    (package / "inner" / "part.py").write_text("from ..other import x\nfrom . import missing\n")
    found = own_code.own_files(["package.inner.part:f"])
    names = ["__init__.py", "inner/__init__.py", "inner/part.py", "other.py"]
    assert found == [str(package / name) for name in names]


def test_a_cluster_of_somebody_elses_file_is_not_asked(here):
    """Its processes send pickles, which run code where they are opened."""
    small = EXPERIMENT.replace("mine.py:mine", "fedavg")
    (here / "own.toml").write_text(small + 'engine = "ray"\ncluster = {address = "127.0.0.1:9"}\n')
    assert "names code, '127.0.0.1:9', a module or a cluster" in mistake("run", "own.toml")
    assert "names code" not in mistake("run", "own.toml", "--set", "cluster.address=127.0.0.1:9")


def test_a_folders_name_adds_no_line_to_the_list(here, monkeypatch):
    wanted = own_code.file_digest(here / "mine.py")
    folder = here / f"a\n{wanted}  b"
    folder.mkdir()
    (folder / "other.py").write_text("")
    monkeypatch.chdir(folder)
    assert "cannot be printed" in mistake("allow", "other.py")
    monkeypatch.chdir(here)
    assert "names code" in mistake("run", "own.toml")


def test_a_list_that_others_can_write_allows_nothing(here):
    before = os.umask(0o002)
    fedstill("allow", "mine.py")
    os.umask(before)
    fedstill("run", "own.toml", "--quiet", "--out", "first")
    (here / "config" / "allowed.txt").chmod(0o620)
    assert "can be written by other users" in mistake("run", "own.toml")


@pytest.mark.parametrize("name", ["nothing.py", "mine.txt"])
def test_only_a_python_file_can_be_allowed(here, name):
    (here / "mine.txt").write_text("")
    assert f"no file '{name}'" in mistake("allow", name)
