"""Finding a paper's folder, its recipe and the paper's own numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from fedstill import toml_io
from fedstill.bench.form import Expected, Recipe, Table
from fedstill.core.errors import FedstillError, suggest

RECIPE_FILE, EXPECTED_FILE = "recipe.py", "expected.toml"
_PACKAGE = Path(__file__).resolve().parents[1]


def places() -> list[Path]:
    """Folders that hold a folder a paper: here, beside the installed package, in the repository of the package."""
    return [Path("benchmarks"), _PACKAGE / "benchmarks", _PACKAGE.parents[1] / "benchmarks"]


def papers() -> list[str]:
    return sorted({recipe.parent.name for place in places() for recipe in place.glob(f"*/{RECIPE_FILE}")})


def find_paper(paper: str) -> Path:
    """The folder of a paper: a path to it, or its name."""
    candidates = [Path(paper), *(place / paper for place in places())]
    for folder in candidates:
        if (folder / RECIPE_FILE).is_file():
            return folder
    if Path(paper).is_dir() and "/" in paper:
        raise FedstillError(f"'{paper}' has no {RECIPE_FILE}: see docs/bench.md for the form of a paper")
    known = papers()
    told = suggest(paper, known) if known else "no paper is here: give the path of its folder"
    raise FedstillError(f"no benchmark '{paper}': {told}")


def load_recipe(folder: Path) -> Recipe:
    """RECIPE of the folder's recipe.py; the file is code and is trusted like any script that you run."""
    file = (folder / RECIPE_FILE).resolve()
    spec = importlib.util.spec_from_file_location(f"_fedstill_recipe_{folder.resolve().name.replace('-', '_')}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of a recipe look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        kind = "" if isinstance(error, FedstillError) else f"{type(error).__name__}: "
        raise FedstillError(f"{folder / RECIPE_FILE}{_line_of(error, file)}: {kind}{error}") from error
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise FedstillError(f"{folder / RECIPE_FILE} defines no RECIPE: write RECIPE = Recipe(...), see docs/bench.md")
    _check(recipe, folder)
    return recipe


def _line_of(error: BaseException, file: Path) -> str:
    trace, line = error.__traceback__, None
    while trace is not None:
        line = trace.tb_lineno if Path(trace.tb_frame.f_code.co_filename) == file else line
        trace = trace.tb_next
    return "" if line is None else f", line {line}"


def _check(recipe: Recipe, folder: Path) -> None:
    where = folder / RECIPE_FILE
    if not recipe.presets or set(recipe.presets) != set(recipe.tables):
        raise FedstillError(f"{where}: presets and tables must have the same names, at least one")
    for preset, tables in recipe.tables.items():
        for name, table in tables.items():
            if name != table.name:
                raise FedstillError(f"{where}: table '{table.name}' of preset '{preset}' stands under '{name}'")
            places = [(cell.column, cell.row) for cell in table.cells]
            twice = sorted({place for place in places if places.count(place) > 1})
            if twice:
                raise FedstillError(f"{where}: table '{name}' has {twice[0][1]} twice in column {twice[0][0]}")


def load_expected(folder: Path) -> Expected:
    """The paper's numbers; a folder without the file has none."""
    file = folder / EXPECTED_FILE
    if not file.is_file():
        return {}
    found = toml_io.read_toml(file)
    for table, columns in found.items():
        for column, rows in _items(columns, f"{file}: [{table}]"):
            for row, numbers in _items(rows, f'{file}: ["{table}"."{column}"]'):
                for name, value in _items(numbers, f'{file}: ["{table}"."{column}"] {row}'):
                    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                        raise FedstillError(f"{file}: {table}, {column}, {row}: {name} = {value!r} is no number")
    return found


def _items(value: object, where: str) -> list[tuple[str, object]]:
    if not isinstance(value, dict):
        raise FedstillError(f'{where} must be a table: ["3"."cifar10"] then fedavg = {{ best = 33.02 }}')
    return list(value.items())


def find_preset(recipe: Recipe, preset: str | None) -> str:
    """The preset asked for, or the recipe's first."""
    if preset is None:
        return next(iter(recipe.presets))
    if preset not in recipe.presets:
        raise FedstillError(f"--preset: {recipe.paper} has no preset '{preset}': {suggest(preset, recipe.presets)}")
    return preset


def find_table(recipe: Recipe, preset: str, name: str) -> Table:
    tables = recipe.tables[preset]
    if name not in tables:
        raise FedstillError(
            f"--table: {recipe.paper} has no table '{name}' in preset '{preset}': {suggest(name, tables)}"
        )
    return tables[name]
