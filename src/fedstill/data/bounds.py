"""What a data file from elsewhere may ask for: the bounds are checked before memory is taken.

A few bytes can ask for gigabytes: by compression, by a number of rows, by a dictionary, by a picture of one colour. A
file of any size may become FLOOR bytes, because that fits everywhere, and a larger file RATIO times its own size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.data.source import first_line

FLOOR = 256 * 2**20  # bytes that any file may become
RATIO = 64  # a larger file may become so many times its size
OF_A_ROW = 64  # bytes that each row costs beside its cells: its label, its place, its name
MOST_COLUMNS = 100_000
LONGEST_LINE = 64 * 2**20  # bytes of a line of text
BLOCK = 2**20


def check_size(wanted: float, on_disk: int, subject: str, cure: str) -> None:
    """Refuse a file that asks for far more memory than its size lets expect."""
    most = max(FLOOR, RATIO * on_disk)
    if wanted > most:
        raise FedstillError(
            f"data.source: {subject} would take {_shown(wanted)} of memory, and a file of {_shown(on_disk)} may take "
            f"{_shown(most)}: {cure}"
        )


def check_columns(count: int, subject: str) -> None:
    if count > MOST_COLUMNS:
        raise FedstillError(
            f"data.source: {subject} has {count:,} columns, and at most {MOST_COLUMNS:,} are read: write the numbers "
            "of a row as one array (x in an npz file), or keep fewer columns"
        )


def check_file(file: Path, folder: Path) -> None:
    """Refuse what is no plain file, because a pipe never ends, and a link that leads out of the data's folder."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise FedstillError(f"data.source: '{file}' is a pipe or a device, not a file: remove it, or name a file")
    if not is_inside(file, folder):
        raise FedstillError(
            f"data.source: '{file}' is a link to a place outside of the data's folder '{folder}': put a copy of the "
            "file in its place"
        )


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path, with all links followed, lies in a folder.

    A snapshot of the Hugging Face hub holds links into the folder of its dataset, and counts as that folder.
    """
    home = os.path.realpath(folder)
    parts = Path(home).parts
    if "snapshots" in parts[1:]:
        home = str(Path(*parts[: len(parts) - 1 - parts[::-1].index("snapshots")]))
    return os.path.realpath(path).startswith(os.path.join(home, ""))


def check_lines(file: Path) -> None:
    """Refuse a text file with a line that is longer than LONGEST_LINE; the file is read in small blocks."""
    length = 0
    with file.open("rb") as blocks:
        while block := blocks.read(BLOCK):
            first = block.find(b"\n")
            length = length + len(block) if first < 0 else len(block) - 1 - block.rfind(b"\n")
            if length > LONGEST_LINE:
                raise FedstillError(
                    f"data.source: '{file}' has a line of more than {_shown(LONGEST_LINE)}: is it a text file?"
                )


@contextmanager
def readable(file: Path | str, kind: str) -> Iterator[None]:
    """Turn every failure of a reader into one line; of a file that the system does not give, its own reason stays."""
    try:
        yield
    except FedstillError:
        raise
    except MemoryError as error:
        raise FedstillError(f"data.source: '{file}' does not fit into the memory of this machine") from error
    except Exception as error:  # a damaged file makes the readers of zip, npy, parquet and pictures raise nearly any
        if isinstance(error, OSError) and error.errno is not None:
            raise
        cure = ": save it as UTF-8, in a spreadsheet 'CSV UTF-8'" if isinstance(error, UnicodeDecodeError) else ""
        raise FedstillError(f"data.source: '{file}' is not {kind} ({first_line(error)}){cure}") from error


def _shown(size: float) -> str:
    """Return bytes in words.

    >>> _shown(14_800_000_000), _shown(300)
    ('14.8 GB', '300 bytes')
    """
    for name, unit in (("GB", 1e9), ("MB", 1e6)):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} bytes"
