"""The commands that read runs from disk."""

import csv
import io
import json
import re
import shutil

import pytest
from cli_runs import SMALL, answer, fedstill, mistake
from typer.testing import CliRunner

from fedstill.cli import app


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "x.toml").write_text(SMALL)
    words = ("--methods", "fedavg,fedprox", "--seeds", 2, "--rounds", 2, "--set", "cohort=2", "--quiet")
    printed = fedstill("compare", folder / "x.toml", *words, "--out", folder / "both").stdout
    return folder / "both", printed


def test_table_prints_the_table_of_a_comparison_again(comparison):
    folder, printed = comparison
    again = fedstill("table", folder).stdout
    assert printed.startswith(again)
    assert [row["method"] for row in answer("table", folder)] == [line.split()[0] for line in again.splitlines()[1:3]]


def test_table_has_forms_for_papers_pages_and_programs(comparison):
    folder, _ = comparison
    assert "\\toprule" in fedstill("table", folder, "--format", "latex").stdout
    assert fedstill("table", folder, "--format", "markdown").stdout.startswith("| method | last % |")
    rows = csv.DictReader(io.StringIO(fedstill("table", folder, "--format", "csv").stdout))
    assert {row["method"] for row in rows} == {"fedavg", "fedprox"}
    assert "use text, markdown, csv, latex, json" in mistake("table", folder, "--format", "tex")
    assert "holds no run" in mistake("table", folder.parent)


@pytest.mark.parametrize("width", [3.25, 6.75])
def test_figures_have_the_width_of_a_column(comparison, tmp_path, width):
    folder, _ = comparison
    for ending, size in ((".pdf", rb"/MediaBox \[ 0 0 ([\d.]+)"), (".svg", rb'<svg [^>]*width="([\d.]+)pt"')):
        path = tmp_path / f"figure{ending}"
        fedstill("figure", folder, "--width", width, "--out", path)
        content = path.read_bytes()
        assert float(re.search(size, content)[1]) == pytest.approx(72 * width)
        fedstill("figure", folder, "--width", width, "--out", path)
        assert path.read_bytes() == content


def test_a_figure_of_one_run_and_mistakes_about_figures(comparison, tmp_path):
    folder, _ = comparison
    fedstill("figure", folder / "fedavg" / "seed-0", "--out", tmp_path / "one.svg")
    assert (tmp_path / "one.svg").stat().st_size > 0
    assert ".pdf, .svg, .png" in mistake("figure", folder, "--out", tmp_path / "x.doc")
    assert "2 to 20 inches" in mistake("figure", folder, "--width", "nan")
    assert "cannot write" in mistake("figure", folder, "--out", folder / "results.json" / "x.pdf")


def test_runs_lists_what_is_below_a_folder(comparison):
    folder, _ = comparison
    heading, line = fedstill("runs", folder.parent).stdout.splitlines()
    assert heading.split("  ")[0] == "began (UTC)"
    assert "fedavg, fedprox, 2 seeds" in line
    assert "lda(alpha=0.5) over 6 clients" in line
    assert line.endswith("both")
    assert [row["kind"] for row in answer("runs", folder)] == ["run"] * 4
    assert fedstill("runs", folder / "fedavg" / "seed-0" / "last").stdout.startswith("No run in ")
    assert "is no folder" in mistake("runs", folder / "nowhere")


def test_a_broken_run_is_named_on_stderr_and_the_others_are_listed(comparison, tmp_path):
    folder, _ = comparison
    shutil.copytree(folder / "fedavg" / "seed-0", tmp_path / "fine")
    shutil.copytree(folder / "fedavg" / "seed-0", tmp_path / "broken")
    (tmp_path / "broken" / "config.toml").write_text("x = [")
    outcome = fedstill("runs", tmp_path)
    assert len(outcome.stdout.splitlines()) == 2
    assert f"'{tmp_path / 'broken'}' cannot be read" in outcome.stderr


def test_show_says_what_a_run_is_its_result_and_what_left_the_parties(comparison):
    folder, printed = comparison
    text = fedstill("show", folder / "fedprox" / "seed-1").stdout
    rows = [json.loads(line) for line in (folder / "fedprox" / "seed-1" / "metrics.jsonl").read_text().splitlines()]
    assert "mlp on digits, lda(alpha=0.5) over 6 clients, 2 rounds" in text
    assert f"{100 * rows[-1]['accuracy']:.2f} %" in text
    assert "the trained model" in text.partition("Left a party:")[2]
    facts = answer("show", folder / "fedprox" / "seed-1")
    assert facts["numbers"]["accuracy_last"] == rows[-1]["accuracy"]
    assert facts["numbers"]["bytes_up"] == sum(row["bytes_up"] for row in rows)
    whole = fedstill("show", folder).stdout
    assert printed.splitlines()[1] in whole
    assert {row["method"] for row in answer("show", folder)["table"]} == {"fedavg", "fedprox"}
    assert "holds no run" in mistake("show", folder.parent)


def test_show_runs_no_code_of_the_run(comparison, tmp_path):
    folder, _ = comparison
    shutil.copytree(folder / "fedavg" / "seed-0", tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    (tmp_path / "own.py").write_text("raise SystemExit('code was run')\n")
    config.write_text(config.read_text().replace('name = "fedavg"', f'name = "{tmp_path / "own.py"}:mine"'))
    assert "mine" in config.read_text()
    assert "a method of your own" in fedstill("show", tmp_path / "run").stdout


def test_diff_shows_settings_that_differ_and_results_side_by_side(comparison):
    folder, _ = comparison
    one, other = folder / "fedavg" / "seed-0", folder / "fedprox" / "seed-1"
    found = answer("diff", one, other)
    assert found["settings"] == {"method": ["fedavg", "fedprox"], "seed": [0, 1]}
    last = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] for run in (one, other)]
    assert found["results"]["accuracy_last"] == last
    text = fedstill("diff", one, one).stdout
    assert "The settings are the same." in text
    assert "Versions and machine are the same." in text
    both = answer("diff", folder, one)
    assert both["results"]["fedavg"][1] == f"{100 * last[0]:.2f} %"
    assert both["results"]["fedprox"][1] is None


def test_names_of_others_steer_no_terminal(comparison, tmp_path):
    folder, _ = comparison
    shutil.copytree(folder / "fedavg" / "seed-0", tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('name = "small"', r'name = "\u001b[2Jsmall\u202e"'))
    for words in (("show", tmp_path / "run"), ("diff", tmp_path / "run", folder / "fedavg" / "seed-0")):
        text = fedstill(*words).stdout
        assert "?[2Jsmall?" in text
        assert not {"\x1b", "\u202e"} & set(text)


DEEP = "[" * 100_000
WRONG_TABLES = {
    "a number of words": lambda row: row.update(bytes_up=[1]),
    "an accuracy of words": lambda row: row.update(accuracies=["high"]),
    "no accuracy": lambda row: row.update(accuracies=[]),
    "accuracies of lists": lambda row: row.update(accuracies=[[0.5], [0.5, 0.5]]),
    "a metric of words": lambda row: row.update(ece="low"),
    "a number of a thousand digits": lambda row: row.update(bytes_up=10**1000),
    "bytes that are no number": lambda row: row.update(bytes_down=float("nan")),
}


@pytest.mark.parametrize("wrong", WRONG_TABLES.values(), ids=WRONG_TABLES)
def test_a_table_that_no_comparison_writes_is_one_line_in_every_form(comparison, tmp_path, wrong):
    shutil.copytree(comparison[0], tmp_path / "both")
    path = tmp_path / "both" / "results.json"
    tree = json.loads(path.read_text())
    wrong(tree["methods"][0])
    path.write_text(json.dumps(tree))
    for form in ("text", "markdown", "csv", "latex", "json"):
        assert "results.json' cannot be read" in mistake("table", tmp_path / "both", "--format", form)
    assert "results.json' cannot be read" in mistake("show", tmp_path / "both")


WRONG_FILES = {
    "deep rounds": ("metrics.jsonl", f'{DEEP}\n{{"round": 2}}\n'),
    "an accuracy of words": ("metrics.jsonl", '{"round": 1, "accuracy": "high"}\n'),
    "an endless accuracy": ("metrics.jsonl", '{"round": 1, "accuracy": 1e999}\n'),
    "a round of words": ("metrics.jsonl", '{"round": "first", "accuracy": 0.5}\n'),
    "rounds that are tables": ("metrics.jsonl", '{"round": [], "accuracy": {}}\n{}\n'),
    "bytes of words": ("metrics.jsonl", '{"round": 1, "accuracy": 0.5, "bytes_up": "all"}\n'),
    "an audit of numbers": ("audit.jsonl", "1\n"),
    "endless versions": ("env.json", '{"packages": {"torch": 1e999}}'),
    "deep versions": ("env.json", DEEP),
    "a deep statement": ("privacy.json", DEEP),
}


@pytest.mark.parametrize(("name", "content"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_files_that_no_run_writes_are_one_line_or_an_answer(comparison, tmp_path, name, content):
    run, folder = tmp_path / "run", comparison[0]
    shutil.copytree(folder / "fedavg" / "seed-0", run)
    (run / name).write_text(content)
    commands = [["figure", run, "--out", tmp_path / "x.svg"]]
    for words in (["show", run], ["diff", run, folder], ["diff", folder / "fedavg" / "seed-1", run]):
        commands += [words, [*words, "--format", "json"]]
    for words in commands:
        outcome = CliRunner().invoke(app, [str(word) for word in words])
        assert outcome.exit_code == 0 or (outcome.exit_code == 2 and len(outcome.stderr.splitlines()) == 1), words
    assert fedstill("runs", tmp_path).exit_code == 0


def test_reference_points_that_no_comparison_writes_are_left_out(comparison, tmp_path):
    shutil.copytree(comparison[0], tmp_path / "both")
    (tmp_path / "both" / "references").mkdir()
    for name, content in {"0": DEEP, "x": "{}", "1": '{"majority": 1}', "2": "[]"}.items():
        (tmp_path / "both" / "references" / f"seed-{name}.json").write_text(content)
    assert fedstill("table", tmp_path / "both").stdout == fedstill("table", comparison[0]).stdout


def test_nothing_outside_of_a_folder_is_shown(comparison, tmp_path):
    folder, _ = comparison
    shutil.copytree(folder, tmp_path / "both")
    run, audit = folder / "fedavg" / "seed-0", tmp_path / "both" / "fedavg" / "seed-0" / "audit.jsonl"
    path = tmp_path / "both" / "results.json"
    tree = json.loads(path.read_text())
    tree["runs"][0]["run_dir"] = str(run)
    path.write_text(json.dumps(tree))
    assert "a place outside of" in mistake("figure", tmp_path / "both", "--out", tmp_path / "x.svg")
    audit.unlink()
    audit.symlink_to(run / "audit.jsonl")
    for words in (["show", audit.parent], ["diff", run, audit.parent], ["table", tmp_path / "both"]):
        assert "is a link to a place outside of" in mistake(*words)
    assert "is a link to a place outside of" in fedstill("runs", audit.parents[1]).stderr
