"""`fedstill report`: from the command to a page."""

from __future__ import annotations

import json

import pytest
from run_folders import write_comparison, write_run
from typer.testing import CliRunner

from fedstill.cli import app

pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")


def report(*words: object):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_several_folders_make_one_page(tmp_path):
    folders = [write_run(tmp_path / name, [0.5], method=name) for name in ("fedavg", "feddf")]
    answer = report(*folders, "--out", tmp_path / "page.html", "--format", "json")
    assert answer.exit_code == 0, answer.output
    told = json.loads(answer.stdout)
    assert (told["report"], told["runs"], told["gaps"]) == (str(tmp_path / "page.html"), 2, [])
    assert told["bytes"] == (tmp_path / "page.html").stat().st_size < 5_000_000


def test_the_page_lists_everything_that_leaves_a_client(tmp_path):
    folder = write_comparison(tmp_path / "all", {"fedavg": [[0.5]]})
    assert report(folder).exit_code == 0
    assert "a client sends: the trained model; its number of samples" in (folder / "report.html").read_text()


def test_no_code_that_a_run_names_is_imported(tmp_path):
    mark = tmp_path / "imported"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    folder = write_run(tmp_path / "run", [0.5], method=f"{tmp_path / 'own.py'}:method")
    answer = report(folder)
    assert answer.exit_code == 0, answer.output
    assert not mark.exists()


def test_missing_files_are_told(tmp_path):
    folder = write_run(tmp_path / "run", [0.5])
    (folder / "env.json").unlink()
    answer = report(folder)
    assert answer.exit_code == 0
    assert "run: env.json cannot be read" in answer.stderr


def test_a_folder_without_a_run_is_one_line_and_exit_code_2(tmp_path):
    answer = report(tmp_path)
    assert answer.exit_code == 2
    assert answer.stderr.count("\n") == 1
    assert "holds no run" in answer.stderr
