"""The commands that answer: list, explain, doctor; as data and as text."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from fedstill.about.doctor import Check, is_healthy
from fedstill.about.explain import first_line
from fedstill.core.errors import FedstillError, suggest
from fedstill.data import describe_datasets
from fedstill.engine import ENGINES
from fedstill.loop.evaluate import EVALUATIONS, METRICS
from fedstill.methods.options import defaults, find, parameters, registry
from fedstill.storage.toml import toml_value

KINDS = {
    "methods": "method",
    "aggregates": "aggregate",
    "partitions": "partition",
    "models": "model",
    "attacks": "attack",
}


def listing(group: str) -> list[dict[str, Any]]:
    """Return everything of a kind by name, with one line on each and its options."""
    if group == "datasets":
        return [entry._asdict() for entry in describe_datasets()]
    lines = {
        "engines": {name: first_line(make) for name, make in ENGINES.items()},
        "evaluations": {name: first_line(function) for name, function in EVALUATIONS.items()},
        "metrics": {
            name: f"{metric.means or 'your own'}; {'lower' if metric.lower_is_better else 'higher'} is better"
            for name, metric in METRICS.items()
        },
    }
    if group in lines:
        return [{"name": name, "summary": summary, "options": {}} for name, summary in lines[group].items()]
    if group not in KINDS:
        raise FedstillError(f"list '{group}' is unknown: {suggest(group, [*KINDS, *lines, 'datasets'])}")
    kind = KINDS[group]
    return [
        {
            "name": name,
            "summary": first_line(find(kind, name)),
            "options": {key: defaults(kind, name).get(key) for key in parameters(kind, name)},
        }
        for name in registry(kind)
    ]


def list_text(entries: list[dict[str, Any]]) -> str:
    """Write names in a column, and options with their defaults under the name they belong to."""
    indent = 2 + max(len(entry["name"]) for entry in entries)
    lines: list[str] = []
    for entry in entries:
        head = entry["name"]
        for text in filter(None, (entry["summary"] or "(without a docstring)", _details(entry))):
            wide, below = max(_width(), indent + 30), " " * indent
            lines += textwrap.wrap(
                text, wide, initial_indent=head.ljust(indent), subsequent_indent=below, break_on_hyphens=False
            )
            head = ""
    return "\n".join(lines)


def _details(entry: dict[str, Any]) -> str:
    if "options" in entry:
        pairs = [key if value is None else f"{key}={_toml(value)}" for key, value in _flat(entry["options"]).items()]
        return "options: " + " ".join(pairs) if pairs else ""
    if entry["rows"] is None:
        return ""
    train, test = entry["rows"]
    shape = "x".join(str(side) for side in entry["shape"])
    return f"{train} train, {test} test, {entry['classes']} classes, {shape}"


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options with dotted names; of a table only the fields that are set."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, dict):
            fields = {field: chosen for field, chosen in value.items() if chosen not in ("none", (), False)}
            flat |= _flat(fields, f"{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(str(item) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _width() -> int:
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def explain_text(facts: dict[str, Any]) -> str:
    """Write one screen on a method."""
    helps = [f"When it helps: {facts['helps']}"] if facts["helps"] else []
    head = [facts["summary"], *helps, *facts["with_defaults"]]
    lines = [line for text in head for line in textwrap.wrap(text, _width())]
    lines += ["", textwrap.indent(facts["equation"], "    ")] if facts["equation"] else []
    lines += ["", "Options", *([] if facts["options"] else ["  none"])]
    for option in facts["options"]:
        lines += _hang(_option(option), option["meaning"])
    lines += ["Worth trying (fedstill sweep)"] if facts["tries"] else []
    lines += [f"  {name} = {', '.join(map(_toml, values))}" for name, values in facts["tries"].items()]
    lines.append("Parts")
    for part in facts["parts"]:
        lines += _hang(f"{part['part']} ({part['where']})", part["does"])
    nothing = ["nothing beyond models and sizes"]
    for title, items in {
        "Needs": facts["needs"] or nothing,
        "Leaves a client each round": facts["leaves_a_client"] or nothing,
        "Leaves a client once, before the first round": facts["leaves_a_client_once"],
        "Stays on a client": facts["stays_on_a_client"] or nothing,
        "Sent to a client": facts["sent_to_a_client"] or nothing,
        "Hiding single models from the server (server.sealed = true)": [
            f"not possible: {'; '.join(facts['sealed'])}"
            if facts["sealed"]
            else "possible: the server's steps need only sums over a cohort"
        ],
        "Privacy": facts["privacy"],
        "Differs from the paper": [facts["differs_from_the_paper"]],
        "Reference": [facts["reference"]],
    }.items():
        lines += [title] if any(items) else []
        for item in items:
            lines += textwrap.wrap(item, _width(), initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _option(option: dict[str, Any]) -> str:
    """Name, default and limits of an option, as a file has them; a table has no default of its own."""
    value = option["default"]
    default = "" if value == {} else f" = {'none' if value is None else toml_value(value)}"
    return f"{option['name']}{default}" + (f" ({option['limits']})" if option["limits"] else "")


def _hang(head: str, text: str) -> list[str]:
    first = f"  {head}: "
    return textwrap.wrap(text, _width(), initial_indent=first, subsequent_indent="      ") or [first.rstrip(": ")]


def doctor_text(checks: list[Check]) -> str:
    """Write a line a check, and advice under the check it is for."""
    lines = []
    for check in checks:
        mark = "ok  " if check.ok else "FAIL" if check.required else "-   "
        lines.append(f"{mark} {check.name:<15} {check.found}")
        if check.advice:
            lines.append(f"{'':21}{check.advice}")
    ready = "Ready. Try: fedstill compare" if is_healthy(checks) else "Not ready: see FAIL above."
    return "\n".join([*lines, ready])
