"""The commands that answer: list, explain, doctor; as data and as text."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from fedstill.about.doctor import Check, is_healthy
from fedstill.about.explain import first_line
from fedstill.core.errors import FedstillError, suggest
from fedstill.data import describe_datasets
from fedstill.methods.options import defaults, find, parameters, registry

KINDS = {"methods": "method", "partitions": "partition", "models": "model"}


def listing(what: str) -> list[dict[str, Any]]:
    """Everything of a kind by name, with one line on each and its own keys."""
    if what == "datasets":
        return [
            {
                "name": entry.name,
                "summary": entry.summary,
                "rows": entry.rows,
                "shape": entry.shape,
                "classes": entry.classes,
            }
            for entry in describe_datasets()
        ]
    if what not in KINDS:
        raise FedstillError(f"list '{what}' is unknown: {suggest(what, [*KINDS, 'datasets'])}")
    kind = KINDS[what]
    return [
        {
            "name": name,
            "summary": first_line(find(kind, name)),
            "options": {key: defaults(kind, name).get(key) for key in parameters(kind, name)},
        }
        for name in registry(kind)
    ]


def list_text(entries: list[dict[str, Any]]) -> str:
    """Names in a column; own keys with their defaults stand under what they belong to."""
    indent = 2 + max(len(entry["name"]) for entry in entries)
    lines: list[str] = []
    for entry in entries:
        details = [entry["summary"], _details(entry)]
        for text in filter(None, details):
            head = "" if lines and text is details[1] else entry["name"]
            lines += textwrap.wrap(
                text, max(_width(), indent + 30), initial_indent=head.ljust(indent), subsequent_indent=" " * indent
            )
    return "\n".join(lines)


def _details(entry: dict[str, Any]) -> str:
    if "options" in entry:
        pairs = [key if value is None else f"{key}={_toml(value)}" for key, value in entry["options"].items()]
        return "own keys: " + " ".join(pairs) if pairs else ""
    if entry["rows"] is None:
        return ""
    train, test = entry["rows"]
    shape = "x".join(str(side) for side in entry["shape"])
    return f"{train} train, {test} test, {entry['classes']} classes, {shape}"


def _toml(value: Any) -> str:
    return (
        f"[{','.join(str(item) for item in value)}]"
        if isinstance(value, (list, tuple))
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _width() -> int:
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def explain_text(facts: dict[str, Any]) -> str:
    """One screen on a method."""
    lines = [*textwrap.wrap(facts["summary"], _width()), "", textwrap.indent(facts["equation"], "    "), ""]
    lines += ["Options"]
    lines += [
        line
        for option in facts["options"]
        for line in _hang(f"{option['name']} = {option['default']}", option["meaning"])
    ]
    lines += ["Parts"]
    lines += [line for part in facts["parts"] for line in _hang(f"{part['part']} ({part['where']})", part["does"])]
    for title, key in (
        ("Needs", "needs"),
        ("Leaves a client each round", "leaves_a_client"),
        ("Leaves a client once, before the first round", "leaves_a_client_once"),
        ("Stays on a client", "stays_on_a_client"),
        ("Sent to a client", "sent_to_a_client"),
    ):
        if key != "leaves_a_client_once" or facts[key]:
            lines += [
                title,
                *(line for item in facts[key] or ["nothing beyond models and sizes"] for line in _wrap(item)),
            ]
    if facts["privacy"]:
        lines += ["Privacy", *(line for told in facts["privacy"] for line in _wrap(told))]
    for title, key in (("Differs from the paper", "differs_from_the_paper"), ("Reference", "reference")):
        lines += [title, *_wrap(facts[key])] if facts[key] else []
    return "\n".join(lines)


def _hang(head: str, text: str) -> list[str]:
    first = f"  {head}: "
    return textwrap.wrap(text, _width(), initial_indent=first, subsequent_indent="      ") or [first.rstrip(": ")]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _width(), initial_indent="  ", subsequent_indent="  ")


def doctor_text(checks: list[Check]) -> str:
    """A line a check; advice stands under what it is for."""
    lines = []
    for check in checks:
        mark = "ok  " if check.ok else "FAIL" if check.required else "-   "
        lines.append(f"{mark} {check.name:<15} {check.found}")
        if check.advice:
            lines.append(f"{'':21}{check.advice}")
    ready = "Ready. Try: fedstill compare" if is_healthy(checks) else "Not ready: see FAIL above."
    return "\n".join([*lines, ready])
