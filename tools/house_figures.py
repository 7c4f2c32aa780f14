"""Measure how large the package is and how much one run does twice, and hold the figures against their limits.

    python tools/house_figures.py               print the figures; list the things of each that is above its limit
    python tools/house_figures.py --markdown    print the table of docs/concepts.md
    python tools/house_figures.py --check       exit with 1 if a figure is above its limit

The script measures the fedstill that Python imports, so PYTHONPATH decides. It counts lines and parameters in the
source, and it counts calls while `fedstill run` works on a small experiment.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import io
import os
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import fedstill.cli
from fedstill.methods import METHODS
from fedstill.methods.lookup import parse
from fedstill.models import MODELS

PACKAGE = Path(fedstill.__file__).parent
MOST_PARAMETERS = 8
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
EXPERIMENT = """
rounds = 2
cohort = 3
data = {source = "digits", unlabeled = 100}
partition = {scheme = "lda", clients = 5, alpha = 0.5}
model = {name = "mlp", hidden = [8]}
method = {name = "feddf", student.steps = 2}
"""


class Figure(NamedTuple):
    """A measured number, the largest that is allowed, and the counted things where a list helps."""

    name: str
    value: int
    limit: int
    counted: tuple[str, ...] = ()


class Function(NamedTuple):
    """A function of a module, how many parameters a caller sees, and whether it is a GPU kernel.

    A kernel may have many parameters, because a GPU takes neither records nor dicts.
    """

    name: str
    parameters: int
    on_device: bool


def main() -> None:
    """Read the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/concepts.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure is above its limit")
    arguments = parser.parse_args()
    figures = measure()
    print(as_markdown(figures) if arguments.markdown else as_text(figures))
    too_large = [figure.name for figure in figures if figure.value > figure.limit]
    if arguments.check and too_large:
        sys.exit(f"above the limit: {', '.join(too_large)}")


def measure() -> list[Figure]:
    """Return all figures of the tree, in the order in which docs/concepts.md shows them."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    root = tuple(path for path in sources if os.sep not in path)
    factories = [inspect.unwrap(factory) for factory in METHODS.values()]
    options = sum(len(inspect.signature(factory).parameters) for factory in factories)
    # the parameters of a method or a network are the options of its section in an experiment's file
    allowed = {
        (Path(factory.__code__.co_filename).relative_to(PACKAGE), factory.__qualname__)
        for factory in (*factories, *MODELS.values())
    }
    long = tuple(
        f"{path}: {function.name} ({function.parameters})"
        for path, source in sources.items()
        for function in functions(source)
        if function.parameters > MOST_PARAMETERS
        and (Path(path), function.name) not in allowed
        and not function.on_device
    )
    step_fields, method_fields = (
        tuple(field.name for field in dataclasses.fields(kind)) for kind in (fedstill.ServerStep, fedstill.Method)
    )
    calls, validations = observe_run()
    entered = tuple(sorted({str(Path(code.co_filename).relative_to(PACKAGE)) for code in calls}))
    return [
        Figure("modules at the root of the package", len(root), 3, root),
        Figure("modules", len(sources), 300),
        Figure("lines of code (neither blank, comment nor docstring)", sum(map(code_lines, sources.values())), 36_000),
        Figure("options of all methods together", options, 200),
        Figure(f"functions with more than {MOST_PARAMETERS} parameters", len(long), 0, long),
        Figure("fields of `ServerStep`", len(step_fields), 8, step_fields),
        Figure("fields of `Method`", len(method_fields), 5, method_fields),
        Figure("modules that one `fedstill run` enters", len(entered), 90, entered),
        Figure("times that a run parses the method's text", calls[parse.__wrapped__.__code__], 1),
        Figure("times that a run builds the method", calls[inspect.unwrap(METHODS["feddf"]).__code__], 1),
        Figure("times that a run validates the experiment", len(validations), 1),
    ]


# ---- Counting in the source -----------------------------------------------------------------------------------------


def code_lines(source: str) -> int:
    """Count the lines of a module that are neither blank nor comment nor docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and ast.get_docstring(node)]
    places = [node.body[0] for node in nodes]
    docstrings = [((place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)) for place in places]
    texts, lines = source.splitlines(), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or any(first <= token.start < last for first, last in docstrings):
            continue
        lines.update(line for line in range(token.start[0], token.end[0] + 1) if texts[line - 1].strip())
    return len(lines)


def functions(source: str) -> list[Function]:
    """List the functions of a module, without the `__init__` of dataclasses; `self` and `cls` are no parameters."""
    listed: list[Function] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                if not (child.name == "__init__" and "dataclass" in _decorators(node)):
                    listed.append(Function(name, _parameters(child, within=node), "jit" in _decorators(child)))
                visit(child, f"{name}.")
            else:
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    visit(ast.parse(source), "")
    return listed


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, within: ast.AST) -> int:
    names = function.args
    count = len(names.posonlyargs) + len(names.args) + len(names.kwonlyargs)
    count += (names.vararg is not None) + (names.kwarg is not None)
    bound = isinstance(within, ast.ClassDef) and "staticmethod" not in _decorators(function)
    return count - bound


def _decorators(node: ast.AST) -> set[str]:
    """Return the last word of each decorator: `@dataclasses.dataclass(frozen=True)` is dataclass."""
    decorators = [part.func if isinstance(part, ast.Call) else part for part in getattr(node, "decorator_list", [])]
    return {ast.unparse(part).rpartition(".")[2] for part in decorators}


# ---- Counting calls -------------------------------------------------------------------------------------------------


class CallCounter:
    """A profile function that counts calls of functions in a folder, without the calls that an import makes."""

    def __init__(self, folder: Path) -> None:
        self.calls: Counter[CodeType] = Counter()
        self._folder = f"{folder}{os.sep}"
        self._importing: dict[int, int] = {}  # by thread, because each thread has a stack of its own

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._folder):
            return
        thread = threading.get_ident()
        if code.co_name == "<module>":
            self._importing[thread] = self._importing.get(thread, 0) + (1 if event == "call" else -1)
        elif event == "call" and not self._importing.get(thread):
            self.calls[code] += 1


def observe_run() -> tuple[Counter[CodeType], list[str]]:
    """Run `fedstill run FILE`; return how often each function was called, and one word for each validation."""
    counter, validations, printed = CallCounter(PACKAGE), count_validations(fedstill.Experiment), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDSTILL_CACHE"] = folder
        file = Path(folder) / "experiment.toml"
        file.write_text(EXPERIMENT, "utf-8")
        sys.argv = ["fedstill", "run", str(file), "--out", f"{folder}/run"]
        threading.setprofile(counter)
        sys.setprofile(counter)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                fedstill.cli.main()
        except SystemExit as end:
            if end.code:
                sys.exit(f"the observed run failed:\n{printed.getvalue()}")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return counter.calls, validations


def count_validations(model: Any) -> list[str]:
    """Let a pydantic model append a word to the returned list whenever it validates anything."""
    calls: list[str] = []
    inner = model.__pydantic_validator__

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("validate"):
                calls.append(name)
            return getattr(inner, name)

    model.__pydantic_validator__ = Counting()
    return calls


# ---- Printing -------------------------------------------------------------------------------------------------------


def as_text(figures: list[Figure]) -> str:
    """Return a table for the terminal; below a figure above its limit stand the things that it counts."""
    lines = [f"{'figure':<58}{'is':>8}{'limit':>8}"]
    for name, value, limit, counted in figures:
        lines.append(f"{name:<58}{value:>8,}{limit:>8,}{'' if value <= limit else '  ABOVE'}")
        lines += [f"    {thing}" for thing in counted if value > limit]
    return "\n".join(lines)


def as_markdown(figures: list[Figure]) -> str:
    """Return the table of docs/concepts.md."""
    rows = [f"| {figure.name} | {figure.value:,} | {figure.limit:,} |" for figure in figures]
    return "\n".join(["| figure | is | at most |", "|---|--:|--:|", *rows])


if __name__ == "__main__":
    main()
