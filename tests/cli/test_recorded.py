"""The commands that read runs from disk."""

import csv
import io
import re

import pytest
from cli_runs import SMALL, answer, fedstill, mistake


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
