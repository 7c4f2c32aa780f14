"""A paper's benchmark: its tables and cells, how its folder is read, and how cells are chosen."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from pydantic import InstanceOf, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fedstill.bench.results import first_fault, name_of_data
from fedstill.core.errors import FedstillError, suggest
from fedstill.data import describe_datasets
from fedstill.experiment.config import DataSection, Experiment
from fedstill.experiment.overrides import apply_settings
from fedstill.methods.lookup import split_methods
from fedstill.methods.own_code import load_file
from fedstill.storage import toml as toml_io

Number = float | str  # a word where the paper prints one instead of a number: "failed"
# table -> column -> row -> {"best": percent, "last": percent, "speedup": times, "gain": points, "rounds": to the
# target of the column's experiments}: see expected.toml
Expected = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Number]]]]


@dataclass(frozen=True)
class Cell:
    """One cell of a paper's table: a method in a setting."""

    row: str  # name that --methods selects and the table shows: "fedlmd"
    column: str  # name that --columns selects: "cifar10-lda-0.05"
    experiment: InstanceOf[Experiment]  # without a seed of its own: the bench sets seed 0, 1, ...


@dataclass(frozen=True)
class Table:
    """One table or figure of the paper."""

    name: str  # name that --table selects: "3", "figure-8"
    title: str
    cells: tuple[Cell, ...]
    note: str = ""  # shown with the table

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.row for cell in self.cells))


@dataclass(frozen=True)
class Recipe:
    """The tables of one paper that are reproduced; benchmarks/<paper>/recipe.py defines one as RECIPE."""

    paper: str
    title: str
    presets: Mapping[str, str]  # name -> meaning; the first is the default
    tables: Mapping[str, Mapping[str, Table]]  # preset -> name -> table


RECIPE_FILE, EXPECTED_FILE = "recipe.py", "expected.toml"
CLAIM = "claim"  # of expected.toml: the paper's main claims, which claims.py reads
FIGURES = ("best", "last", "speedup", "gain", "rounds")  # numbers that a paper may print in a cell
_PACKAGE = Path(__file__).resolve().parents[1]
_NUMBERS = TypeAdapter(dict[str, dict[str, dict[str, dict[str, StrictInt | StrictFloat | StrictStr]]]])


def find_paper(paper: str) -> Path:
    """Find the folder of a paper by its path, or by its name here, in the installed package or in its repository."""
    places = [Path("benchmarks"), _PACKAGE / "benchmarks", _PACKAGE.parents[1] / "benchmarks"]
    for folder in [Path(paper), *(place / paper for place in places)]:
        if (folder / RECIPE_FILE).is_file():
            return folder
    if Path(paper).is_dir():
        raise FedstillError(f"'{paper}' has no {RECIPE_FILE}: see docs/bench.md for the form of a paper")
    known = sorted({recipe.parent.name for place in places for recipe in place.glob(f"*/{RECIPE_FILE}")})
    cure = suggest(paper, known) if known else "no paper is here: give the path of its folder"
    raise FedstillError(f"no benchmark '{paper}': {cure}")


def load_recipe(folder: Path) -> Recipe:
    """Run the folder's recipe.py and return its RECIPE; the file is code, and trusted like any script that you run."""
    file = (folder / RECIPE_FILE).resolve()
    try:
        module = load_file(file)
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
        line = f", line {frames[-1].lineno}" if frames else ""
        kind = "" if isinstance(error, FedstillError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}"
        if isinstance(error, ValidationError):
            form = {"Cell": Cell, "Table": Table, "Recipe": Recipe}.get(error.title)
            reason = f"{error.title}.{first_fault(error, [field.name for field in fields(form)] if form else ())}"
        raise FedstillError(f"{folder / RECIPE_FILE}{line}: {reason}") from error
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise FedstillError(f"{folder / RECIPE_FILE} defines no RECIPE: write RECIPE = Recipe(...), see docs/bench.md")
    if (fault := next(_faults(recipe), None)) is not None:
        raise FedstillError(f"{folder / RECIPE_FILE}: {fault}, see docs/bench.md")
    return recipe


def _faults(recipe: Recipe) -> Iterator[str]:
    """Yield the mistakes of a recipe that its types do not show."""
    if not recipe.presets or set(recipe.presets) != set(recipe.tables):
        yield "presets and tables must have the same names, at least one"
    for preset, tables in recipe.tables.items():
        if not tables:
            yield f"preset '{preset}' has no table: give it at least one"
        for name, table in tables.items():
            if name != table.name:
                yield f"table '{table.name}' of preset '{preset}' stands under '{name}'"
            if not table.cells:
                yield f"table '{table.name}' has no cell: give it at least one"
            places = Counter((cell.column, cell.row) for cell in table.cells)
            for column, row in (place for place, count in places.items() if count > 1):
                yield f"table '{table.name}' has {row} twice in column {column}"


def load_expected(folder: Path, recipe: Recipe) -> Expected:
    """Read the paper's numbers, and refuse numbers for no cell of the recipe; a folder without the file has none."""
    file = folder / EXPECTED_FILE
    if not file.is_file():
        return {}
    try:
        tables = {name: table for name, table in toml_io.read_toml(file).items() if name != CLAIM}
        expected = _NUMBERS.validate_python(tables)
    except ValidationError as error:
        form = '["3"."cifar10"] then fedavg = { best = 33.02 }'
        raise FedstillError(f"{file}: {first_fault(error)}: write {form}") from None
    cells: dict[str, dict[str, dict[str, None]]] = {}  # rows by table and column, of all presets together
    for table in (table for tables in recipe.tables.values() for table in tables.values()):
        for cell in table.cells:
            cells.setdefault(table.name, {}).setdefault(cell.column, {})[cell.row] = None
    for name, columns in expected.items():
        check_known(name, cells, f"{file}: the recipe has no table")
        for column, rows in columns.items():
            check_known(column, cells[name], f"{file}: table '{name}' of the recipe has no column")
            where = f'{file}: ["{name}"."{column}"]'
            for row, numbers in rows.items():
                check_known(row, cells[name][column], f"{where}: the recipe has no row")
                for figure in numbers:
                    check_known(figure, FIGURES, f"{where} {row}: no figure is called")
    return expected


def check_known(word: str, known: Collection[str], problem: str) -> None:
    """Refuse a word that is not among the known ones; the error suggests the nearest."""
    if word not in known:
        raise FedstillError(f"{problem} '{word}': {suggest(word, known)}")


def find_preset(recipe: Recipe, preset: str | None) -> str:
    """Return the named preset, or the recipe's first; refuse an unknown name."""
    if preset is None:
        return next(iter(recipe.presets))
    check_known(preset, recipe.presets, f"--preset: {recipe.paper} has no preset")
    return preset


def find_table(recipe: Recipe, preset: str, name: str) -> Table:
    check_known(name, recipe.tables[preset], f"--table: preset '{preset}' of {recipe.paper} has no table")
    return recipe.tables[preset][name]


OWN_SETS = ("none", "test", "central")  # words of data.unlabeled that name no data set


def choose(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """Return the known words that a comma list names, in their order; all of them when the option is not set."""
    if text is None:
        return tuple(known)
    words = split_methods(text)
    if not words:
        raise FedstillError(f"{option} is empty: name some, e.g. {option} {','.join(known[:2])}")
    for word in words:
        check_known(word, known, f"{option}: the table has no")
    return tuple(word for word in known if word in words)


def select(table: Table, columns: Sequence[str], rows: Sequence[str]) -> list[Cell]:
    """Return the cells of these columns and rows; a row that a column does not have is left out there."""
    cells = [cell for cell in table.cells if cell.column in columns and cell.row in rows]
    if not cells:
        raise FedstillError(f"table {table.name} has no {', '.join(rows)} in {', '.join(columns)}: choose others")
    return cells


def with_settings(table: Table, settings: Sequence[str], chosen: Iterable[Cell]) -> Table:
    """Return the table with `--set` in every cell; only a chosen cell that a setting does not fit is an error."""
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


def with_data(experiment: Experiment, folder: Path | None) -> Experiment:
    """Return the experiment with its data taken from `folder`; the error names a set that is missing there."""
    if folder is None:
        return experiment
    data = experiment.data
    places = {"source": _place(data.source, folder)}
    if isinstance(data.unlabeled, str) and data.unlabeled not in OWN_SETS:
        places["unlabeled"] = _place(data.unlabeled, folder)
    if data.test is not None:
        places["test"] = _place(data.test, folder)
    moved = DataSection.model_validate({**data.model_dump(), **places})
    return experiment.replace(data=moved.model_dump())


def _place(name: str, folder: Path) -> str:
    if name in {entry.name for entry in describe_datasets() if entry.rows is not None}:
        return name
    place = folder / name_of_data(name)
    if not place.exists():
        raise FedstillError(f"no '{place.name}' in {folder}: put it there, or leave --data out to load it from the hub")
    return str(place)
