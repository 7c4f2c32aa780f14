"""The form of a paper's benchmark, how its folder is read, and how cells of a table are chosen."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedstill.bench.results import name_of_data
from fedstill.core.errors import FedstillError, suggest
from fedstill.data import describe_datasets
from fedstill.experiment.config import DataSection, Experiment
from fedstill.experiment.overrides import apply_settings
from fedstill.methods.lookup import split_methods
from fedstill.storage import toml as toml_io

Number = float | str  # a word where the paper prints one instead of a number: "failed"
# table -> column -> row -> {"best": percent, "last": percent, "speedup": times, "gain": points, "rounds": to the
# target of the column's experiments}: see expected.toml
Expected = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Number]]]]


@dataclass(frozen=True)
class Cell:
    """One method in one setting."""

    row: str  # what --methods selects and the table shows: "fedlmd"
    column: str  # what --columns selects: "cifar10-lda-0.05"
    experiment: Experiment  # without a seed of its own: the bench sets seed 0, 1, ...


@dataclass(frozen=True)
class Table:
    """One table or figure of the paper."""

    name: str  # what --table selects: "3", "figure-8"
    title: str
    cells: tuple[Cell, ...]
    note: str = ""  # what a reader must know

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.row for cell in self.cells))


@dataclass(frozen=True)
class Recipe:
    """All that is reproduced of one paper; benchmarks/<paper>/recipe.py calls its own RECIPE."""

    paper: str
    title: str
    presets: Mapping[str, str]  # name -> what it means; the first is the default
    tables: Mapping[str, Mapping[str, Table]]  # preset -> name -> table


RECIPE_FILE, EXPECTED_FILE = "recipe.py", "expected.toml"
FIGURES = ("best", "last", "speedup", "gain", "rounds")  # what a paper prints of a cell
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
    if Path(paper).is_dir():
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
    except (Exception, SystemExit) as error:
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
    if (fault := next(_faults(recipe), None)) is not None:
        raise FedstillError(f"{folder / RECIPE_FILE}: {fault}, see docs/bench.md")


def _faults(recipe: Recipe) -> Iterator[str]:
    """What is wrong; nobody reads on after the first, so each may rely on those before it."""
    if not all(isinstance(text, str) for text in (recipe.paper, recipe.title)):
        yield "paper and title must be texts"
    if not isinstance(recipe.presets, Mapping) or not isinstance(recipe.tables, Mapping):
        yield 'presets and tables must be dicts: presets={"paper": "as printed"}, tables={"paper": {"1": Table(...)}}'
    if not recipe.presets or set(recipe.presets) != set(recipe.tables):
        yield "presets and tables must have the same names, at least one"
    for preset, tables in recipe.tables.items():
        if not isinstance(tables, Mapping) or not all(isinstance(table, Table) for table in tables.values()):
            yield f"preset '{preset}': its tables must be a dict of Table by name"
        if not tables:
            yield f"preset '{preset}' has no table: give it at least one"
        for name, table in tables.items():
            if name != table.name:
                yield f"table '{table.name}' of preset '{preset}' stands under '{name}'"
            yield from _table_faults(table)


def _table_faults(table: Table) -> Iterator[str]:
    if not isinstance(table.cells, (tuple, list)) or not all(isinstance(cell, Cell) for cell in table.cells):
        yield f"table '{table.name}': cells must be a tuple of Cell"
    if not table.cells:
        yield f"table '{table.name}' has no cell: give it at least one"
    for cell in table.cells:
        if not isinstance(cell.row, str) or not isinstance(cell.column, str):
            yield f"table '{table.name}': row {cell.row!r} and column {cell.column!r} must be texts"
        if not isinstance(cell.experiment, Experiment):
            yield f"table '{table.name}', {cell.row} in {cell.column}: {cell.experiment!r} is no Experiment(...)"
    places = [(cell.column, cell.row) for cell in table.cells]
    for column, row in sorted({place for place in places if places.count(place) > 1}):
        yield f"table '{table.name}' has {row} twice in column {column}"


def load_expected(folder: Path, recipe: Recipe) -> Expected:
    """The paper's numbers, each for a cell of the recipe; a folder without the file has none."""
    file = folder / EXPECTED_FILE
    if not file.is_file():
        return {}
    found = toml_io.read_toml(file)
    cells = _cells(recipe)
    for table, columns in found.items():
        _known(table, cells, f"{file}: the recipe has no table")
        for column, rows in _items(columns, f"{file}: [{table}]"):
            _known(column, cells[table], f"{file}: table '{table}' of the recipe has no column")
            where = f'{file}: ["{table}"."{column}"]'
            for row, numbers in _items(rows, where):
                _known(row, cells[table][column], f"{where}: the recipe has no row")
                for name, value in _items(numbers, f"{where} {row}"):
                    _known(name, FIGURES, f"{where} {row}: no figure is called")
                    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                        raise FedstillError(f"{file}: {table}, {column}, {row}: {name} = {value!r} is no number")
    return found


def _cells(recipe: Recipe) -> dict[str, dict[str, set[str]]]:
    """table -> column -> rows, of all presets together."""
    found: dict[str, dict[str, set[str]]] = {}
    for table in (table for tables in recipe.tables.values() for table in tables.values()):
        for cell in table.cells:
            found.setdefault(table.name, {}).setdefault(cell.column, set()).add(cell.row)
    return found


def _known(word: str, known: Collection[str], what: str) -> None:
    if word not in known:
        raise FedstillError(f"{what} '{word}': {suggest(word, sorted(known))}")


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


OWN_SETS = ("none", "test", "central")  # words of data.unlabeled that name no data set


def choose(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """The words of a comma list, each of them known; all that are known when the option is not given."""
    if text is None:
        return tuple(known)
    words = split_methods(text)
    if not words:
        raise FedstillError(f"{option} is empty: name some, e.g. {option} {','.join(known[:2])}")
    for word in words:
        if word not in known:
            raise FedstillError(f"{option}: the table has no '{word}': {suggest(word, known)}")
    return tuple(word for word in known if word in words)


def select(table: Table, columns: Sequence[str], rows: Sequence[str]) -> list[Cell]:
    """The cells at the crossings; a row that does not stand in a column is left out there."""
    found = [cell for cell in table.cells if cell.column in columns and cell.row in rows]
    if not found:
        raise FedstillError(f"table {table.name} has no {', '.join(rows)} in {', '.join(columns)}: choose others")
    return found


def with_settings(table: Table, settings: Sequence[str], chosen: Iterable[Cell]) -> Table:
    """The table with `--set` in every cell; a setting that does not fit counts only for the chosen ones."""
    if not settings:
        return table
    if any(setting.split("=")[0].strip() == "seed" for setting in settings):
        raise FedstillError("--set seed: seeds are 0, 1, ...: say how many with --seeds")
    asked, cells = {(cell.column, cell.row) for cell in chosen}, []
    for cell in table.cells:
        try:
            changed = apply_settings(cell.experiment.model_dump(), settings)
            cells.append(replace(cell, experiment=type(cell.experiment).model_validate(changed)))
        except FedstillError as error:
            if (cell.column, cell.row) in asked:
                raise FedstillError(f"{cell.row} in {cell.column}: {error}") from None
    return replace(table, cells=tuple(cells))


def with_data(cell: Cell, folder: Path | None) -> Cell:
    """The cell with its data taken from `folder`; a FedstillError says what is missing there."""
    if folder is None:
        return cell
    if not folder.is_dir():
        raise FedstillError(f"--data: no folder '{folder}': give the folder that holds cifar10/, mnist/, ...")
    data = cell.experiment.data
    places = {"source": _place(data.source, folder)}
    if isinstance(data.unlabeled, str) and data.unlabeled not in OWN_SETS:
        places["unlabeled"] = _place(data.unlabeled, folder)
    if data.test is not None:
        places["test"] = _place(data.test, folder)
    moved = DataSection.model_validate({**data.model_dump(), **places})
    return replace(cell, experiment=cell.experiment.replace(data=moved.model_dump()))


def _place(name: str, folder: Path) -> str:
    if name in {entry.name for entry in describe_datasets() if entry.rows is not None}:
        return name
    place = folder / name_of_data(name)
    if not place.exists():
        raise FedstillError(f"no '{place.name}' in {folder}: put it there, or leave --data out to load it from the hub")
    return str(place)
