"""The package's source as syntax trees, and the names that calls and imports spell out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedstill"


@cache
def files() -> dict[str, ast.Module]:
    """Path below the package -> its syntax tree."""
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def unit_of(path: str) -> str:
    """The folder or top-level module that a file belongs to."""
    return path.split("/")[0].removesuffix(".py")


def dotted(node: ast.AST) -> str:
    """'a.b.c' for a chain of attributes on a name; what hangs on a call or a subscript starts with a dot."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it stands for: np -> numpy, F -> torch.nn.functional, load -> torch.load."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update(
                {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
            )
        elif isinstance(node, ast.ImportFrom) and node.module:
            known.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return known


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """(full name of what is called, the call): `np.load(...)` is numpy.load whatever numpy is called here."""
    known = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, _, rest = dotted(node.func).partition(".")
            name = known.get(first, first)
            yield (f"{name}.{rest}" if rest else name), node


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported, wherever it is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_at_once(tree: ast.Module) -> Iterator[str]:
    """What is imported when the module is: not inside functions, not only for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.If) and dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield from imports(node)


def keywords(call: ast.Call) -> dict[str, object]:
    """Keyword arguments; constants by value, anything else by its source text."""
    return {
        word.arg: word.value.value if isinstance(word.value, ast.Constant) else ast.unparse(word.value)
        for word in call.keywords
        if word.arg is not None
    }
