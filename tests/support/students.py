"""Methods whose server trains a student: their defaults with some fields changed, and the forms that papers ran."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from papers import BENCHMARKS

from fedstill.bench.recipe import Recipe, load_recipe
from fedstill.core.types import Method
from fedstill.methods.lookup import Part, PhaseText, aggregate_part, build_phases, check_phase_texts, parse
from fedstill.server.distill.student import Student

FIELDS = {field.name for field in dataclasses.fields(Student)}
FORMS = {  # (method, form) -> the table's cell that has it (paper, preset, table, row), or the method's text
    ("feddf", "correct"): "feddf",
    ("feddf", "paper"): "feddf(student.steps=10000, student.patience=1000)",
    ("feddf", "released"): f"{BENCHMARKS}/feddf/released.py:feddf",
    ("feddf", "mrtf"): ("mrtf", "correct", "3", "feddf"),
    ("feddf", "mrtf_released"): ("mrtf", "released", "3", "feddf"),
    ("feddf", "fedaux"): ("fedaux", "paper", "1", "feddf"),
    ("feddf", "fedaux_released"): ("fedaux", "released", "1", "feddf"),
    ("feddf", "d2cfl"): ("d2cfl", "correct", "figure-5", "feddf"),
    ("fedbe", "correct"): "fedbe",
    ("fedbe", "released"): f"{BENCHMARKS}/fedbe/released.py:fedbe",
    ("fedbe", "d2cfl"): ("d2cfl", "correct", "figure-5", "fedbe"),
    ("d2cfl", "correct"): "d2cfl",
    ("d2cfl", "paper"): ("d2cfl", "correct", "figure-5", "d2cfl"),
    ("mrtf", "correct"): "mrtf",
    ("mrtf", "paper"): ("mrtf", "paper", "3", "mrtf"),
    ("mrtf", "released"): f"{BENCHMARKS}/mrtf/released.py:mrtf",
}


@cache
def recipe_of(paper: str) -> Recipe:
    """Read once in a process, because a recipe of hundreds of experiments takes seconds."""
    return load_recipe(BENCHMARKS / paper)


def student_of(method: Callable[..., Method], **changes: Any) -> Student:
    """The student that the method has by default, laid over with `changes`; epochs alone count instead of steps.

    >>> from fedstill.methods import feddf
    >>> student_of(feddf, epochs=3).steps is None
    True
    """
    if "epochs" in changes and "steps" not in changes:
        changes["steps"] = None
    return dataclasses.replace(inspect.signature(method).parameters["student"].default, **changes)


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the fields of a student gathered under "student"."""
    student = {key: value for key, value in options.items() if key in FIELDS}
    others = {key: value for key, value in options.items() if key not in FIELDS}
    return {**others, "student": student} if student else others


def form(name: str, preset: str = "correct", **changes: Any) -> Method:
    """A method as a paper ran it, with some options and fields of its student changed.

    >>> form("feddf", "mrtf", steps=5).aggregate.weighting
    'uniform'
    """
    aggregate, buffers = "", "average"
    place = FORMS.get((name, preset), name)
    if isinstance(place, tuple):
        paper, of_paper, table, row = place
        cells = recipe_of(paper).tables[of_paper][table].cells
        experiment = next(cell for cell in cells if cell.row == row).experiment
        text, options = experiment.method.name, experiment.method.options
        aggregate, buffers = experiment.server.aggregate, experiment.server.buffers
    else:
        part = parse(place)[0].parts[0]
        text, options = part.name, part.options
    changed = nested(changes)
    if "student" in changed:
        student = options.get("student", {})
        kept = student if "steps" not in changed["student"] else {k: v for k, v in student.items() if k != "epochs"}
        changed["student"] = {**kept, **changed["student"]}
    texts = check_phase_texts((PhaseText((Part(text, {**options, **changed}),)),), {})
    return build_phases(texts, aggregate=aggregate_part(aggregate), buffers=buffers)[0].method
