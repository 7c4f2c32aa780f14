"""The table of a comparison for papers, pages and programs: LaTeX, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedstill.core.errors import printable
from fedstill.report.statistics import BASELINE
from fedstill.report.table import GROUP, MethodSummary, judge_methods, plain_table, table_json, table_legend, table_rows
from fedstill.storage.spreadsheet import as_cell

LAST = "last %"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedblright{}",  # LaTeX without fontenc has no straight one
    "±": r"$\pm$",
    "–": "--",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def latex_text(text: str) -> str:
    r"""Return a text as LaTeX prints it, in one line.

    >>> latex_text("own_method.py:f(mu=50%)")
    'own\\_method.py:f(mu=50\\%)'
    """
    return "".join(_LATEX.get(letter, letter) for letter in printable(" ".join(text.split())))


def latex_table(summaries: Sequence[MethodSummary]) -> str:
    """Return a tabular for the package booktabs: best mean bold, second underlined, a star where FedAvg differs.

    The lines below the table on a terminal are comments above it, because a paper has a caption.
    """
    headings, *rows = table_rows(summaries)
    judgement = judge_methods(summaries)
    shown = {} if judgement is None else judgement.from_baseline
    marked = {name for name, each in shown.items() if each.is_shown}
    points = {row.method for row in summaries if row.is_reference}
    methods = [row[0] for row in rows if row[0] not in points]
    lines = [f"% {printable(' '.join(line.split()))}" for line in table_legend(summaries)]
    lines += [f"% * differs from {BASELINE}."] if marked else []
    lines += ["% In the preamble: \\usepackage{booktabs}"]
    aligned = "".join("l" if name == "method" else "c" if name == GROUP else "r" for name in headings)
    lines += [f"\\begin{{tabular}}{{{aligned}}}", "\\toprule", _latex_row(map(latex_text, headings)), "\\midrule"]
    for row in rows:
        if row[0] in points and row[0] == next(each[0] for each in rows if each[0] in points):
            lines.append("\\midrule")
        texts = dict(zip(headings, map(latex_text, row), strict=True))
        place = methods.index(row[0]) if row[0] in methods else None
        if place is not None and place < 2 and len(methods) > 1:
            texts[LAST] = f"\\{'textbf' if place == 0 else 'underline'}{{{texts[LAST]}}}"
        texts[LAST] += "$^{*}$" if row[0] in marked and row[0] not in points else ""
        lines.append(_latex_row(texts.values()))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def _latex_row(cells: Any) -> str:
    return " & ".join(cells) + " \\\\"


def markdown_table(summaries: Sequence[MethodSummary]) -> str:
    """Return a table for GitHub and most other readers of Markdown, the best mean bold, and the lines below it."""
    headings, *rows = table_rows(summaries)
    lines = [
        _markdown_row(map(markdown_text, headings)),
        _markdown_row("---" if name == "method" else "---:" for name in headings),
    ]
    for place, (name, last, *others) in enumerate(rows):
        marked = f"**{last}**" if place == 0 and len(rows) > 1 else last
        lines.append(_markdown_row((markdown_code(name), marked, *others)))
    return "\n".join([*lines, "", *(f"{markdown_text(line)}  " for line in table_legend(summaries))]).rstrip()


def _markdown_row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_code(name: str) -> str:
    """Return a name as code; a bar would end the cell, and a backtick the code."""
    name = printable(" ".join(name.split())).replace("|", "\\|")
    return f"`` {name} ``" if "`" in name else f"`{name}`"


def markdown_text(line: str) -> str:
    """Return a line whose signs are shown, not obeyed."""
    return "".join(f"\\{letter}" if letter in "\\`*_<>|[]#" else letter for letter in printable(" ".join(line.split())))


def csv_table(summaries: Sequence[MethodSummary]) -> str:
    """Return a row for each method with every number of the JSON form, unrounded; accuracies are shares of 1."""
    rows = [_flat(row) for row in table_json(summaries)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(as_cell, names))
    cells = ([row.get(name, "") for name in names] for row in rows)
    writer.writerows([as_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in cells)
    return text.getvalue().rstrip("\n")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of one level: {"interval": (1, 2), "from_best": {"p": 3}} -> interval_low, .._high, from_best_p."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key == "interval":
            flat["interval_low"], flat["interval_high"] = value or (None, None)
        elif isinstance(value, Mapping):
            flat |= {f"{key}_{name}": number for name, number in value.items()}
        else:
            flat[key] = " ".join(map(repr, value)) if isinstance(value, list) else value
    return flat


def text_table(summaries: Sequence[MethodSummary]) -> str:
    return "\n".join([plain_table(summaries), *table_legend(summaries)])


def json_table(summaries: Sequence[MethodSummary]) -> str:
    return json.dumps(table_json(summaries), indent=2, allow_nan=False)


FORMS: dict[str, Callable[[Sequence[MethodSummary]], str]] = {
    "text": text_table,
    "markdown": markdown_table,
    "csv": csv_table,
    "latex": latex_table,
    "json": json_table,
}
