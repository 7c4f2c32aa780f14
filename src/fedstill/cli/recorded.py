"""The commands that read runs from disk and run nothing: table, figure, runs, show, diff."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.about.explain import explain
from fedstill.cli.app import print_json, say, tell
from fedstill.cli.run import print_table
from fedstill.core.errors import FedstillError, printable
from fedstill.experiment.recorded import (
    BEGAN_FILE,
    Record,
    find_records,
    legible,
    read_curves,
    read_record,
    read_summaries,
)
from fedstill.experiment.run_folder import flat
from fedstill.loop.privacy_plan import STATEMENT_FILE
from fedstill.report import counted, human_bytes
from fedstill.report.curves import paper_curves
from fedstill.report.export import FORMS
from fedstill.report.table import MethodSummary, align, table_json, table_legend
from fedstill.storage.files import read_json

PICTURES = (".pdf", ".svg", ".png")
WIDTHS = (2.0, 20.0)  # inches between which names and numbers can be read
HEADINGS = ("began (UTC)", "method", "data", "split", "result", "state", "size", "folder")
PERCENT = ("accuracy_last", "accuracy_best")
POINTS = 4  # of two learning curves that `diff` shows side by side
LINE = 100  # letters at most


def table_command(folder: Path, form: str) -> None:
    if form not in FORMS:
        raise FedstillError(f"--format {form}: use {', '.join(FORMS)}")
    with legible(folder):
        summaries = read_summaries(folder)
        if form == "text" and sys.stdout.isatty():
            _print_summaries(summaries)
        else:
            say(FORMS[form](summaries))


def _print_summaries(summaries: Sequence[MethodSummary]) -> None:
    print_table(summaries)
    say("\n".join(table_legend(summaries)))


def figure_command(folder: Path, *, out: Path | None, width: float) -> None:
    path = folder / "curves.pdf" if out is None else out
    if path.suffix.lower() not in PICTURES:
        raise FedstillError(f"--out: '{path}' has no ending that names a picture: use {', '.join(PICTURES)}")
    low, high = WIDTHS
    if not low <= width <= high:
        raise FedstillError(f"--width {width:g}: use {low:g} to {high:g} inches")
    try:
        with legible(folder):
            curves = read_curves(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            paper_curves(curves, path, width=width)
    except OSError as error:
        raise FedstillError(f"--out: cannot write '{path}' ({error.strerror or error})") from error
    say(f"Learning curves, {width:g} inches wide: {path}")


def runs_command(root: Path, *, as_json: bool) -> None:
    records, broken = find_records(root)
    if as_json:
        print_json([record.as_json() for record in records])
    elif records:
        _print_columns(HEADINGS, [_line(record, root) for record in records])
    else:
        say(f"No run in {root}.")
    for line in broken:
        tell(line)


def _line(record: Record, root: Path) -> tuple[str, ...]:
    place = record.folder.relative_to(root) if record.folder != root else record.folder
    words = (record.method, record.data, record.split, record.result, record.state, human_bytes(record.size))
    return (record.when.strftime("%Y-%m-%d %H:%M"), *words, str(place))


def _print_columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; on a terminal long texts take several lines, so that a row fits."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        say(align([headings, *rows], left=len(headings)))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("state", "size"))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def show_command(folder: Path, *, as_json: bool) -> None:
    with legible(folder):
        record = read_record(folder)
        facts = {**record.as_json(), "left_the_parties": _left_the_parties(record), "privacy": _privacy(folder)}
        if record.is_comparison:
            facts["table"] = table_json(record.summaries)
        else:
            facts |= {"numbers": _numbers(record), "audit": record.history.audit}
        if as_json:
            print_json(facts)
            return
        _print_facts(
            {
                record.settings["name"]: record.about,
                "method": record.method if record.is_comparison else record.methods[record.method],
                **({} if record.is_comparison else {"seed": str(record.settings["seed"])}),
                "state": f"{record.state}, began {record.when:%Y-%m-%d %H:%M} UTC, {human_bytes(record.size)} on disk",
                **({} if record.is_comparison else _as_words(facts["numbers"])),
                **({"audit": f"{counted(len(facts['audit']), 'record')} in audit.jsonl"} if facts.get("audit") else {}),
                **({"privacy": facts["privacy"]} if facts["privacy"] else {}),
            }
        )
        if record.is_comparison and record.summaries:
            _print_summaries(record.summaries)
        say("Left a party:")
        _print_facts({method: "; ".join(parts) for method, parts in facts["left_the_parties"].items()}, indent="  ")


def _print_facts(facts: Mapping[str, str], *, indent: str = "") -> None:
    """Print a line for each fact, broken at the width of the terminal; long names have a line of their own."""
    width = min(LINE, shutil.get_terminal_size((LINE, 24)).columns)
    column = min(max(map(len, facts)), width // 3)
    for name, text in facts.items():
        short = printable(name) if len(name) <= column else ""
        if not short:
            say(f"{indent}{printable(name)}")
        first = f"{indent}{short:<{column}}  "
        for line in text.splitlines():
            wrapper = textwrap.TextWrapper(
                width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
            )
            say(wrapper.fill(printable(line)))
            first = " " * len(first)


def _left_the_parties(record: Record) -> dict[str, list[str]]:
    """Say for each method which things left a client; the code of somebody's own method is not run for it."""
    left = {}
    for name, text in record.methods.items():
        if ":" in text:
            left[name] = [f"a method of your own: `fedstill explain {text}` lists it"]
            continue
        facts = explain(text)
        once = [f"once: {part}" for part in facts["leaves_a_client_once"]]
        left[name] = [*facts["leaves_a_client"], *once] or ["nothing"]
    return left


def _privacy(folder: Path) -> str:
    """Return the statement in privacy.json; no text where there is none."""
    try:
        return str(read_json(folder / STATEMENT_FILE)["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _numbers(record: Record) -> dict[str, Any]:
    """Return the numbers of a run's last evaluated round, its best accuracy and its costs."""
    history = record.history
    last, best = history.last or {}, history.best or {}
    measured = {key: value for key, value in last.items() if isinstance(value, float) and not key.startswith("seconds")}
    return {
        "rounds": len(history.rows),
        "accuracy_last": measured.pop("accuracy", None),
        "accuracy_best": best.get("accuracy"),
        **measured,
        "bytes_up": history.bytes_up,
        "bytes_down": history.bytes_down,
        "seconds": round(history.total("seconds"), 3),
    }


def _as_words(numbers: Mapping[str, Any]) -> dict[str, str]:
    return {key.replace("_", " "): _word(key, value) for key, value in numbers.items()}


def _word(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key in PERCENT:
        return f"{100 * value:.2f} %"
    if key.startswith("bytes"):
        return human_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def diff_command(first: Path, second: Path, *, as_json: bool) -> None:
    with legible(first, second):
        record_a, record_b = read_record(first), read_record(second)
        parts = {
            "settings": _differing_settings(record_a, record_b),
            "environment": _differing(_environment(first), _environment(second)),
            "results": _results(record_a, record_b),
        }
        if as_json:
            print_json({"a": str(first), "b": str(second), **parts})
            return
        same = {"settings": "The settings are the same.", "environment": "Versions and machine are the same."}
        for title, rows in parts.items():
            if not rows:
                say(same.get(title, "There are no results yet."))
                continue
            words = [(key, *(_shown(key, value) for value in pair)) for key, pair in rows.items()]
            _print_columns((title, f"A {first}", f"B {second}"), words)


def _shown(key: str, value: Any) -> str:
    if isinstance(value, float | int | None) and not isinstance(value, bool):
        return _word(key, value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = dict.fromkeys((*a, *b))
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def _differing_settings(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ; two runs of different methods differ in their method, with its options."""
    pairs = _differing(flat(a.settings), flat(b.settings))
    if a.is_comparison or b.is_comparison:
        return pairs
    pairs = {key: pair for key, pair in pairs.items() if not key.startswith("compare.")}  # no round depends on it
    if "method.name" not in pairs:
        return pairs
    methods = a.methods[a.method], b.methods[b.method]
    return {"method": methods, **{key: pair for key, pair in pairs.items() if not key.startswith("method.")}}


def _environment(folder: Path) -> dict[str, Any]:
    """Return versions, device and commit that a run was made with; nothing where its file cannot be read."""
    try:
        table = read_json(folder / BEGAN_FILE)
        return {**{key: value for key, value in table.items() if key != "packages"}, **table["packages"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _results(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """Return results side by side: numbers and points of the curves of two runs, else the methods' accuracies."""
    if a.is_comparison or b.is_comparison:
        tables = [_accuracies(record) for record in (a, b)]
        return {method: (tables[0].get(method), tables[1].get(method)) for method in {**tables[0], **tables[1]}}
    numbers = _numbers(a), _numbers(b)
    rows = {key: (numbers[0].get(key), numbers[1].get(key)) for key in {**numbers[0], **numbers[1]}}
    curves = [{row["round"]: row["accuracy"] for row in record.history.evaluated} for record in (a, b)]
    shared = sorted(curves[0].keys() & curves[1].keys())
    steps = [shared[(len(shared) - 1) * place // (POINTS - 1)] for place in range(POINTS)] if shared else []
    for number in dict.fromkeys(steps):
        pair = [f"{100 * curve[number]:.2f} %" for curve in curves]
        rows[f"accuracy after round {number}"] = (pair[0], pair[1])
    return rows


def _accuracies(record: Record) -> dict[str, str]:
    if not record.is_comparison:
        last = record.history.last
        return {} if last is None else {record.method: f"{100 * last['accuracy']:.2f} %"}
    spread = {row.method: "" if row.std is None else f" ± {100 * row.std:.2f}" for row in record.summaries}
    return {row.method: f"{100 * row.mean:.2f}{spread[row.method]} %" for row in record.summaries}
