"""Measure how large the package is and how much one run does twice, and hold the figures against their limits.

    python tools/house_figures.py               print the figures
    python tools/house_figures.py --json        print them as JSON, with the modules that a run enters
    python tools/house_figures.py --markdown    print the table of docs/concepts.md
    python tools/house_figures.py --check       exit with 1 if a figure is above its limit

The script reads the tree that it stands in. It counts lines and parameters in the source, and it runs `fedstill run`
once in a second process, on a small experiment, to count the calls.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedstill"
MOST_PARAMETERS = 8
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
EXPERIMENT = """
rounds = 2
cohort = 3
data = {{source = "digits", unlabeled = 100}}
partition = {{scheme = "lda", clients = 5, alpha = 0.5}}
model = {{name = "mlp", hidden = [8]}}
{section} = {{name = "feddf", student.steps = 2}}
"""


class Figure(NamedTuple):
    """A measured number, the largest that is allowed, and the things that were counted where a list helps."""

    name: str
    value: int
    limit: int
    counted: tuple[str, ...] = ()


class Function(NamedTuple):
    """Where a function of the package is defined, how many parameters a caller sees, and whether it is a GPU kernel.

    A kernel may have many parameters, because a GPU takes neither records nor dicts.
    """

    path: str
    name: str
    line: int
    parameters: int
    on_device: bool = False


def code_lines(source: str) -> int:
    """Count the lines of a module that are neither blank nor comment nor docstring."""
    docstrings = [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in _docstrings(source)
    ]
    texts, lines = source.splitlines(), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or any(first <= token.start < last for first, last in docstrings):
            continue
        lines.update(line for line in range(token.start[0], token.end[0] + 1) if texts[line - 1].strip())
    return len(lines)


def _docstrings(source: str) -> Iterator[ast.expr]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(first := node.body[0], ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            yield first.value


def functions(source: str, path: str = "") -> list[Function]:
    """List the functions of a module, without the `__init__` of dataclasses; `self` and `cls` are no parameters."""
    listed: list[Function] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                if not (child.name == "__init__" and "dataclass" in _decorators(node)):
                    parameters, on_device = _parameters(child, within=node), "jit" in _decorators(child)
                    listed.append(Function(path, name, child.lineno, parameters, on_device))
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

    def modules(self) -> set[str]:
        """Return the files, below the folder, of which at least one function was called."""
        return {code.co_filename.removeprefix(self._folder) for code in self.calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the figures as JSON")
    form.add_argument("--markdown", action="store_true", help="print the table of docs/concepts.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure is above its limit")
    parser.add_argument("--observe-into", type=Path, help=argparse.SUPPRESS)  # what the second process is called with
    words = parser.parse_args()
    if words.observe_into:
        observe_run(words.observe_into)
        return
    figures = measure()
    print(as_json(figures) if words.json else as_markdown(figures) if words.markdown else as_text(figures))
    too_large = [figure.name for figure in figures if figure.value > figure.limit]
    if words.check and too_large:
        sys.exit(f"above the limit: {', '.join(too_large)}")


def measure() -> list[Figure]:
    """Return all figures of the tree, in the order in which docs/concepts.md shows them."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    roots = tuple(path for path in sources if os.sep not in path)
    run = observed()
    # the parameters of a method or a network are the options of its section in an experiment's file
    factories = {(path, line) for path, line in run["factories"]}
    long = tuple(
        f"{one.path}: {one.name} ({one.parameters})"
        for path, source in sources.items()
        for one in functions(source, path)
        if one.parameters > MOST_PARAMETERS and (one.path, one.line) not in factories and not one.on_device
    )
    return [
        Figure("modules at the root of the package", len(roots), 3, roots),
        Figure("modules", len(sources), 190),
        Figure("lines of code (neither blank, comment nor docstring)", sum(map(code_lines, sources.values())), 18_500),
        Figure("options of all methods together", run["options"], 200),
        Figure(f"functions with more than {MOST_PARAMETERS} parameters", len(long), 0, long),
        Figure("fields of `ServerStep`", len(run["step_fields"]), 8, tuple(run["step_fields"])),
        Figure(f"fields of `{run['method_type']}`", len(run["method_fields"]), 5, tuple(run["method_fields"])),
        Figure("modules that one `fedstill run` enters", len(run["entered"]), 70, tuple(run["entered"])),
        Figure("times that a run parses the method's text", run["parsed"], 1),
        Figure("times that a run builds the method", run["built"], 1),
        Figure("times that a run validates the experiment", run["validated"], 1),
    ]


def observed() -> dict[str, Any]:
    """Observe a run in a second process, which imports the package of this tree and nothing that was imported here."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "observed.json"
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "XDG_CACHE_HOME": folder}
        command = [sys.executable, __file__, "--observe-into", str(answer)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if not answer.exists():
            sys.exit(f"the observed run failed:\n{done.stdout}{done.stderr}")
        return json.loads(answer.read_text("utf-8"))


def observe_run(answer: Path) -> None:
    """Run `fedstill run FILE` in this process, count calls, and write the counts to `answer`."""
    import fedstill

    assert Path(fedstill.__file__).parent == PACKAGE, f"{fedstill.__file__} is another tree than {PACKAGE}"
    factories = [inspect.unwrap(factory) for factory in registered_methods().values()]
    method_type = getattr(fedstill, "Method", None) or fedstill.Algorithm
    section = "method" if "method" in fedstill.Experiment.model_fields else "algorithm"
    file = answer.with_name("experiment.toml")
    file.write_text(EXPERIMENT.format(section=section), "utf-8")

    counter, validated = CallCounter(PACKAGE), count_validations(fedstill.Experiment)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    module, _, name = project["scripts"]["fedstill"].partition(":")
    command_line = getattr(importlib.import_module(module), name)
    sys.argv = ["fedstill", "run", str(file), "--out", str(answer.with_name("run"))]
    threading.setprofile(counter)
    sys.setprofile(counter)
    try:
        command_line()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

    built_by = inspect.unwrap(registered_methods()["feddf"]).__code__
    counts = {
        "options": sum(len(inspect.signature(factory).parameters) for factory in factories),
        "factories": sorted({definition(factory) for factory in (*factories, *registered_networks())}),
        "step_fields": [field.name for field in dataclasses.fields(fedstill.ServerStep)],
        "method_type": method_type.__name__,
        "method_fields": [field.name for field in dataclasses.fields(method_type)],
        "entered": sorted(counter.modules()),
        "parsed": counter.calls[parser_of_methods().__code__],
        "built": counter.calls[built_by],
        "validated": len(validated),
    }
    answer.write_text(json.dumps(counts), "utf-8")


def registered_networks() -> list[Callable[..., Any]]:
    """Return the functions that build the networks of this tree."""
    return list(importlib.import_module("fedstill.models").MODELS.values())


def registered_methods() -> dict[str, Callable[..., Any]]:
    for home in ("fedstill.methods", "fedstill.algorithms"):
        try:
            methods = getattr(importlib.import_module(home), "METHODS", None)
        except ModuleNotFoundError:
            continue
        if methods:
            return dict(methods)
    sys.exit("no METHODS in fedstill.methods: say in tools/house_figures.py where methods are registered")


def parser_of_methods() -> Callable[..., Any]:
    """Find the one function of the package that is called `parse`: it reads the text of a method."""
    homes = [
        path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if any(function.name == "parse" for function in functions(path.read_text("utf-8")))
    ]
    if len(homes) != 1:
        sys.exit(f"`parse` is defined in {homes or 'no module'}: say in tools/house_figures.py which reads methods")
    return importlib.import_module(homes[0]).parse


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


def definition(function: Callable[..., Any]) -> tuple[str, int]:
    """Return the file of a function below the package and the line of its `def`, as `ast` gives it."""
    code = function.__code__
    path = Path(code.co_filename).relative_to(PACKAGE)
    lines = inspect.getsource(function).splitlines()
    before = next(i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def ")))
    return str(path), code.co_firstlineno + before


def as_text(figures: list[Figure]) -> str:
    lines = [f"{'figure':<58}{'is':>8}{'limit':>8}"]
    for name, value, limit, counted in figures:
        lines.append(f"{name:<58}{value:>8,}{limit:>8,}{'' if value <= limit else '  ABOVE'}")
        if name.startswith("functions") or (value > limit and len(counted) <= 50):
            lines += [f"    {thing}" for thing in counted]
    return "\n".join(lines)


def as_markdown(figures: list[Figure]) -> str:
    """Return a table without the lists."""
    rows = [f"| {figure.name} | {figure.value:,} | {figure.limit:,} |" for figure in figures]
    return "\n".join(["| figure | is | at most |", "|---|--:|--:|", *rows])


def as_json(figures: list[Figure]) -> str:
    return json.dumps([figure._asdict() for figure in figures], indent=2)


if __name__ == "__main__":
    main()
