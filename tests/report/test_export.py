"""The table of a comparison as LaTeX, Markdown and CSV."""

import csv
import io
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from fedstill.report.export import FORMS, csv_table, latex_table, latex_text, markdown_table
from fedstill.report.table import MethodSummary, plain_table, reference_rows

NASTY = r"own_f.py:m&m(a='50%', b=\"$x^2$\", c=#1|{z}~<y>)"


def summary(method, *last):
    return MethodSummary(method, last, last, 1.25, 1_500_000, 999)


ROWS = [
    summary("fedavg", 0.501, 0.502, 0.503, 0.504),
    summary(NASTY, 0.802, 0.801, 0.803, 0.806),
    summary("fedprox", 0.503, 0.5, 0.504, 0.505),
]


def body(latex):
    return [line for line in latex.splitlines() if line.endswith("\\\\")]


def test_latex_has_the_best_in_bold_the_second_underlined_and_a_star_where_fedavg_differs():
    heading, first, second, third = body(latex_table(ROWS))
    assert r"\textbf{80.30 $\pm$ 0.22}$^{*}$" in first
    assert r"\underline{50.30 $\pm$ 0.22} &" in second
    assert second.startswith("fedprox ")
    assert "textbf" not in heading + second + third
    assert "underline" not in heading + first + third
    assert {line.count(" & ") for line in (heading, second, third)} == {7}
    assert "% * differs from fedavg." in latex_table(ROWS)


def test_latex_is_balanced_and_every_special_letter_of_a_name_is_escaped():
    text = latex_table([*ROWS])
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 1
    for rule in ("\\toprule", "\\midrule", "\\bottomrule"):
        assert text.splitlines().count(rule) == 1
    for letter in "&%$#_{}":  # in the printed name each stands behind a backslash
        assert re.search(rf"\\{re.escape(letter)}", latex_text(NASTY))
    unescaped = re.sub(r"\\(text[a-z]+\{\}|[&%$#_{}])", "", latex_text(NASTY))
    assert not re.search(r"[&%$#_{}~^<>|\\\"]", unescaped)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed (Debian: texlive-latex-base)")
def test_a_paper_with_the_table_compiles(tmp_path):
    rows = [*ROWS, summary("evil\n\\end{tabular}\n| x |", 0.4, 0.41, 0.42, 0.43)]
    paper = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n" + latex_table(rows)
    (tmp_path / "paper.tex").write_text(paper + "\n\\end{document}\n", encoding="utf-8")
    words = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "-no-shell-escape", "paper.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
    if "booktabs.sty' not found" in done.stdout:
        pytest.skip("LaTeX has no booktabs (Debian: texlive-latex-recommended)")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Missing character" not in done.stdout
    assert (tmp_path / "paper.pdf").stat().st_size > 5_000


@pytest.mark.parametrize("form", ["latex", "markdown"])
def test_a_name_with_line_breaks_adds_no_row(form):
    wild, tame = (
        [summary(name, 0.5, 0.6), summary("b", 0.1, 0.2)]
        for name in ("evil\n\\end{tabular}\n| x |", "evil \\end{tabular} | x |")
    )
    assert FORMS[form](wild) == FORMS[form](tame)


def test_a_heading_of_somebody_else_is_neither_a_formula_nor_html_nor_a_line_of_its_own():
    heading = "=1+1\n# <img src=x onerror=alert(1)> `a`|"
    rows = [replace(row, method=f"={row.method}", metrics={heading: 1.0}) for row in ROWS]
    for cells in csv.reader(io.StringIO(csv_table(rows))):
        assert not any(cell.startswith("=") for cell in cells)
    assert next(csv.DictReader(io.StringIO(csv_table(rows))))["'" + heading] == "1.0"
    first = markdown_table(rows).splitlines()[0]
    assert r"\<img src=x onerror=alert(1)\> \`a\`\| |" in first
    assert len(plain_table(rows).splitlines()) == 4


def test_markdown_rows_have_as_many_cells_as_headings():
    heading, rule, *rows = [line for line in markdown_table(ROWS).splitlines() if line.startswith("|")]
    for row in (rule, *rows):
        assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"\|", heading)) == 9
    assert "**80.30 ± 0.22**" in rows[0]


def test_csv_holds_the_unrounded_numbers_of_every_method():
    rows = list(csv.DictReader(io.StringIO(csv_table(ROWS))))
    assert [row["method"] for row in rows] == [NASTY, "fedprox", "fedavg"]
    assert [float(value) for value in rows[0]["accuracies"].split()] == list(ROWS[1].last)
    assert float(rows[0]["from_fedavg_mean"]) == pytest.approx(0.803 - 0.5025)
    assert rows[0]["from_fedavg_verdict"] == "better"
    assert rows[2]["from_fedavg_mean"] == ""


def test_one_method_with_one_seed_has_every_form():
    for form in FORMS.values():
        assert "fedavg" in form([summary("fedavg", 0.5)])


def test_reference_points_stand_below_a_line_of_their_own():
    from fedstill.loop.references import References

    rows = ({"accuracy": value} for value in (0.1, 0.9))
    point = References("yes", *rows, alone=({"accuracy": 0.3},), clients=(0,), rounds=1, budget=())
    lines = latex_table([*ROWS, *reference_rows([point] * 4)]).splitlines()
    assert lines.count("\\midrule") == 2
    assert lines[len(lines) - lines[::-1].index("\\midrule")].startswith("pooled")
