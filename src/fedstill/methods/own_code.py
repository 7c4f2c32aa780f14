"""A user's own functions, FILE.py:function or module:function, and the user's word that they may run.

A name that somebody wrote on the command line or in Python is that user's word. A name in a file or a folder is data:
its code runs only if the user has allowed the content of every Python file that it needs, or said --allow-code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any

from fedstill.core.errors import FedstillError, suggest
from fedstill.storage.files import default_config_dir, write_whole

ALLOWED_FILE = "allowed.txt"  # in the user's configuration folder: a digest and a path in each line
SHOWN = 16  # letters of a digest in a message

_spoken: set[str] = set()  # digests of files that the user of this process has named
_tell: Callable[[str], None] | None = None  # set while --allow-code holds


def own_function(name: str, key: str) -> Callable[..., Any]:
    """Return the user's function that FILE.py:function or module:function names; errors name the setting `key`.

    This runs the file. A name from a file or a folder must have passed `refusals` before.
    """
    file = Path(name.rpartition(":")[0])
    written = file.stat().st_mtime_ns if os.path.isfile(file) else 0
    function = _imported(name, key, file.resolve(), written)
    _spoken.update(_digests_of(name, file.resolve(), written))
    return function


@cache
def _imported(name: str, key: str, full: Path, written: int) -> Callable[..., Any]:
    """Import a user's function once; `full` and `written` tell apart equal names in other folders and edited files."""
    place, _, function = name.rpartition(":")
    module = _module_of(place, f"{key} = '{name}'")
    factory: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(factory):
        known = [
            key
            for key, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
        ]
        hint = suggest(function, known) if known else "it defines no functions"
        raise FedstillError(f"{key} = '{name}': no function '{function}' in {place}: {hint}")
    return factory


@cache
def _digests_of(name: str, full: Path, written: int) -> frozenset[str]:
    return frozenset(file_digest(Path(path)) for path in own_files([name]))


def _module_of(place: str, setting: str) -> Any:
    path = Path(place)
    if place.endswith(".py") and not os.path.isfile(path):
        raise FedstillError(f"{setting}: no file '{place}': give FILE.py:function")
    folder = path.resolve().parent if place.endswith(".py") else Path.cwd()
    let_import(own_files([f"{place}:"]), folder)
    try:
        return load_file(path) if place.endswith(".py") else importlib.import_module(place)
    except FedstillError:
        raise
    except Exception as error:
        raise FedstillError(f"{setting}: {place} cannot be loaded: {type(error).__name__}: {error}") from error


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles the file itself, because bytecode beside it may be of another text."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


class _Neighbours:
    """Finds the neighbours of a user's file for the code in it, as `python FILE.py` would, and compiles their text.

    Nothing else of their folder can be imported. It may be somebody else's, who put a package there with the name of
    one that a library imports later.
    """

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}  # of modules, by their folder; the one named last comes first

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        for folder, names in self.names.items():
            if name.partition(".")[0] in names:
                spec = importlib.machinery.PathFinder.find_spec(name, [folder] if path is None else path)
                if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                    spec.loader = _FromSource(name, spec.loader.path)
                return spec
        return None


_neighbours_known = _Neighbours()


def let_import(files: Iterable[str], folder: Path) -> None:
    """Let code import the modules of a folder that these files below it are."""
    inside = (Path(file).relative_to(folder) for file in files if Path(file).is_relative_to(folder))
    names, others = {place.parts[0].partition(".")[0] for place in inside}, dict(_neighbours_known.names)
    _neighbours_known.names = {str(folder): names | others.pop(str(folder), set()), **others}
    if _neighbours_known not in sys.meta_path:
        sys.meta_path.insert(0, _neighbours_known)


def load_file(path: Path) -> Any:
    """Import a user's file as a module, under a name that no other file has."""
    mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"fedstill_own_{path.stem}_{mark}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def own_files(names: Iterable[str]) -> list[str]:
    """Return the Python files that names need (FILE.py:function or module:function), by their full paths.

    Neighbours that these files import are among them. Nothing is imported for it.
    """
    files: dict[str, None] = {}
    for name in names:
        place = name.rpartition(":")[0]
        folder = Path(place).resolve().parent if place.endswith(".py") else Path.cwd()
        queue = [str(Path(place).resolve())] if place.endswith(".py") else _files_of_module(place)
        while queue:
            if (path := queue.pop()) not in files:
                files[path] = None
                queue += _neighbours(Path(path), folder)
    return sorted(files)


def _files_of_module(module: str) -> list[str]:
    """Return the files that an import of a.b runs, a/__init__.py among them; none where it cannot be found."""
    first, *rest = module.split(".")
    if here := _candidates(Path.cwd(), module):
        return here
    try:
        spec = importlib.util.find_spec(first)  # of a name without dots, which runs nothing
    except (ImportError, ValueError):
        return []
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return []
    inside = [_candidates(Path(place), ".".join(rest)) for place in spec.submodule_search_locations or () if rest]
    return [spec.origin, *(path for paths in inside for path in paths)]


def _neighbours(path: Path, folder: Path) -> list[str]:
    """Return the files below the folder of a user's code that a file of it imports; binary modules are among them."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # the import itself reports it
    files = []
    for node in nodes:
        if isinstance(node, ast.Import):
            files += [file for alias in node.names for file in _candidates(folder, alias.name)]
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            files += [file for name in (node.module or "", *names) for file in _candidates(base, name)]
    return files


def _candidates(folder: Path, module: str) -> list[str]:
    """Return the files in a folder that the import of a module may run, those of its packages among them."""
    parts = [part for part in module.split(".") if part and part != "*"]
    places = [folder.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
    stems = [stem for place in places for stem in (place, place / "__init__")]
    files = (stem.with_name(stem.name + suffix) for stem in stems for suffix in importlib.machinery.all_suffixes())
    return [str(file) for file in files if os.path.isfile(file)]


def file_digest(path: Path) -> str:
    """Return a digest of a file; of a model's file only its tensors count, because its header has no fixed order."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        content = content[8 + int.from_bytes(content[:8], "little") :]
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def speak(names: Iterable[str]) -> None:
    """Take names as the word of this process's user: their files may run, whoever names them later."""
    _spoken.update(file_digest(Path(path)) for path in own_files(names) if os.path.isfile(path))


def forget() -> None:
    """Take back every word of this process's user."""
    _spoken.clear()


def allow(file: str | Path) -> list[str]:
    """Let this process run the functions of a Python file, as it and the neighbours that it imports are now.

    Runs, bundles and experiment files may name them afterwards. Return a line for each file, with its digest.
    `fedstill allow FILE.py` does the same for all later commands.
    """
    path = Path(str(file).partition(".py:")[0] + ".py" if ".py:" in str(file) else file)
    if path.suffix != ".py" or not os.path.isfile(path):
        raise FedstillError(f"allow: no file '{path}': give the Python file whose functions may run, FILE.py")
    files = own_files([f"{path}:"])
    if strange := [needed for needed in files if not needed.isprintable()]:  # a line break would begin a new line
        raise FedstillError(f"allow: '{strange[0]}' has signs in its path that cannot be printed: rename that folder")
    _spoken.update(file_digest(Path(needed)) for needed in files)
    return [f"{needed}  digest {file_digest(Path(needed))}" for needed in files]


def allow_always(file: str | Path) -> list[str]:
    """Allow a file as `allow` does, in all later commands of this user, too."""
    lines = allow(file)
    record = default_config_dir() / ALLOWED_FILE
    new = [f"{digest}  {path}" for path, digest in (line.split("  digest ") for line in lines)]
    try:
        old = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        write_whole(record, "\n".join(dict.fromkeys([*old, *new])) + "\n")
        record.chmod(0o600)
    except OSError as error:
        raise FedstillError(f"allow: cannot write '{record}' ({error.strerror or error}): use --allow-code") from error
    return lines


def _allowed() -> set[str]:
    record = default_config_dir() / ALLOWED_FILE
    try:
        about, lines = record.stat(), record.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return set(_spoken)
    if os.name == "posix" and (about.st_uid not in (0, os.getuid()) or about.st_mode & 0o022):
        raise FedstillError(f"'{record}' can be written by other users, who could allow their code: chmod 600 {record}")
    return {line.split()[0] for line in lines if line.strip()} | _spoken


@contextmanager
def allowing_code(tell: Callable[[str], None]) -> Iterator[None]:
    """Let all code run that files and folders name while the block runs; `tell` gets a line about each name."""
    global _tell
    shown: set[str] = set()

    def once(line: str) -> None:
        if line not in shown:
            shown.add(line)
            tell(line)

    before, _tell = _tell, once
    try:
        yield
    finally:
        _tell = before


def refusals(names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each name, from a file or a folder, whose code the user has not allowed."""
    allowed = _allowed()
    for name in dict.fromkeys(names):
        place, _, function = name.rpartition(":")
        digests = {path: file_digest(Path(path)) for path in own_files([name]) if os.path.isfile(path)}
        fine = bool(digests) and allowed.issuperset(digests.values())
        if place.endswith(".py") and not os.path.isfile(place):
            continue  # there is nothing to run, and the line about the missing file says more
        if _tell is not None:
            files = ", ".join(f"{path}, digest {digest[:SHOWN]}" for path, digest in digests.items())
            _tell(f"--allow-code: {name} ({files or 'a module without a file'})")
        elif fine and function not in _definitions(place):
            yield f"'{name}', which is no function of that file's own: name one that '{place}' defines"
        elif not fine and place.endswith(".py"):
            yield (
                f"'{name}' (digest {digests[str(Path(place).resolve())][:SHOWN]}): if you trust this code, type "
                f"`fedstill allow {place}` once, or add --allow-code (in Python: fedstill.allow({place!r}))"
            )
        elif not fine:
            yield f"'{name}', a module or a cluster: if you trust this code, add --allow-code"


def _definitions(place: str) -> set[str]:
    """Return the names that FILE.py or a module gives to its own functions, classes and values, not to imported ones.

    Those of its neighbours do not count, because it may import something else of such a name.
    """
    names: set[str] = set()
    path = Path(place if place.endswith(".py") else _files_of_module(place)[-1])
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return names
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
