"""Which columns may name rows, by what they are called, and whether values are names."""

from __future__ import annotations

import re

import numpy as np

from fedstill.data.cells import row_numbers

ID_NAMES = ("id", "file", "file_name", "filename", "path", "name")  # columns that may name rows, the best first
# patient_id, PATIENT-ID, id_patient, patientId, PatientID, idPatient; never acid, COVID, IDH1
ID_OF_SOMETHING = re.compile(r"(?i:.*[-_. ]id|id[-_. ].*)|.*[a-z0-9]I[dD]|[iI]d[A-Z].*", re.DOTALL)


def called_id(name: str) -> bool:
    """Whether a column is called as one that may name its rows."""
    return name.lower() in ID_NAMES or ID_OF_SOMETHING.fullmatch(name) is not None


def rank(name: str) -> int:
    """The smaller the better a column of this name names rows; ids of something are the last."""
    return ID_NAMES.index(name.lower()) if name.lower() in ID_NAMES else len(ID_NAMES)


def may_hold_ids(name: str, column: np.ndarray) -> bool:
    """False for fractions in a column that is called the id of something: they are measured."""
    return name.lower() in ID_NAMES or column.dtype.kind != "f" or np.array_equal(column, np.round(column))


def names_groups(name: str, ids: list[str]) -> bool:
    """An id of something that most rows share, such as clinic_id: nobody expects it to name rows."""
    return name.lower() not in ID_NAMES and 2 * len(set(ids)) <= len(ids)


def fault(ids: list[str]) -> str:
    """Why these are no names of rows; '' if they are."""
    if not ids:
        return "it does not hold words or whole numbers in every split"
    empty = [row for row, name in enumerate(ids) if not name.strip()]
    if empty:
        return f"it has no value in {row_numbers(np.array(empty))}"
    first: dict[str, int] = {}
    for row, name in enumerate(ids):
        if first.setdefault(name, row) != row:
            return f"'{name}' is in {row_numbers(np.array([first[name], row]))}"
    return ""


def order(ids: list[str]) -> np.ndarray:
    """Rows in the order of their names; whole numbers by size, whatever their length."""
    if all(name.isascii() and name.isdigit() for name in ids):
        return np.array(sorted(range(len(ids)), key=lambda row: (len(ids[row]), ids[row])))
    return np.array(sorted(range(len(ids)), key=ids.__getitem__))
