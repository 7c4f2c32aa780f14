"""Which cells of a table: by column and row, with settings of the command line and data from a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fedstill.bench.form import Cell, Table
from fedstill.bench.results import name_of_data
from fedstill.config import DataSection
from fedstill.core.errors import FedstillError, suggest
from fedstill.data import describe_datasets
from fedstill.expression import split_methods
from fedstill.settings import apply_settings

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
