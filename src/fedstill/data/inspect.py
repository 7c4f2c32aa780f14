"""Look at a table, at images or at texts before the first run: everything that it would stumble over, at once.

`inspect_data` reads the files as a run does and changes nothing. `fedstill init` prints what it returns.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedstill.core.data import InputColumn
from fedstill.core.errors import FedstillError, suggest
from fedstill.data.files import FILE, TABLE_SUFFIXES, are_joined, files_of, folder_columns, read_files
from fedstill.data.images import IMAGE_SUFFIXES, image_pixels
from fedstill.data.source import Reading, missing_rows, require_extra
from fedstill.data.tables import (
    LABEL_NAMES,
    MAX_WORDS,
    TEXT_FILE,
    Frame,
    choose_splits,
    complete_rows,
    encode_column,
    encode_labels,
    kind_of,
    may_name_rows,
    stack,
    with_rows,
)

OWNER_NAMES = frozenset(
    {"owner", "client", "hospital", "clinic", "centre", "center", "site", "institution", "bank", "branch", "party"}
)
MOST_CLASSES = 50  # different values in a column that is proposed as the label
WORDS_OF_TEXT = 4  # on average in a cell of text; names and codes have fewer
TABLES = tuple(suffix for kind in TABLE_SUFFIXES for suffix in kind)
LEAK = 0.99  # share of the rows whose label a single column tells; such a column is rarely known before the label
MOST_OWNERS = 100  # whose numbers are looked at one by one
FEWEST_CELLS = 10  # of an owner, to see that its numbers lie apart
FEWEST_ROWS = 30  # among fewer, chance makes leak suspects
DATE = re.compile(r"\s*\d{1,4}([-./])\d{1,2}\1\d{1,4}([ T].*)?")
LONG_TEXT = 0.95  # of the texts are read whole
MIXER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that a product modulo 2^64 keeps different numbers apart


@dataclass(frozen=True)
class ColumnFacts:
    """One column of a table, and why it is left out; an empty reason: the network learns from it."""

    name: str
    kind: str  # numbers, words, text, images or arrays
    values: int  # different ones
    gaps: int  # cells without a value
    use: str  # input, label, owner, or left out
    reason: str = ""


@dataclass(frozen=True)
class Findings:
    """Everything that a look at the data tells."""

    place: str
    kind: str  # table, images or texts
    rows: int
    label: str
    classes: Mapping[str, int]  # rows of each
    columns: tuple[ColumnFacts, ...] = ()
    owner: str = ""
    owners: Mapping[str, int] = field(default_factory=dict)  # rows of each
    sizes: Mapping[tuple[int, int], int] = field(default_factory=dict)  # images of each (height, width)
    broken: tuple[str, ...] = ()  # images and text files that cannot be read
    incomplete: int = 0  # images without a label or an owner
    text_words: int = 0  # nearly all texts have at most so many words
    notes: tuple[str, ...] = ()

    @property
    def dropped(self) -> tuple[ColumnFacts, ...]:
        return tuple(column for column in self.columns if column.use == "left out")

    @property
    def gaps(self) -> int:
        """Cells without a value in columns that matter."""
        return sum(column.gaps for column in self.columns if column.use != "left out")

    def lines(self) -> list[str]:
        """Return the findings for people, a fact a line."""
        lines = [f"{self.place}: {self.rows:,} {'rows' if self.kind == 'table' else self.kind}"]
        most = sorted(self.classes.items(), key=lambda entry: -entry[1])
        shown = ", ".join(f"{name} {count / sum(self.classes.values()):.0%}" for name, count in most[:10])
        more = f", and {len(most) - 10} more" if len(most) > 10 else ""
        lines.append(f"label '{self.label}': {len(most)} classes ({shown}{more})")
        if self.owner:
            sizes = sorted(self.owners.values())
            counted = "rows" if self.kind == "table" else self.kind
            lines.append(f"owner '{self.owner}': {len(sizes)} owners of {sizes[0]:,} to {sizes[-1]:,} {counted}")
        if self.columns:
            width = max(6, *(len(column.name) for column in self.columns))
            lines.append(f"{'column':<{width}}  type     different     gaps  use")
            for column in self.columns:
                use = f"{column.use}: {column.reason}" if column.reason else column.use
                lines.append(f"{column.name:<{width}}  {column.kind:<7} {column.values:>10,} {column.gaps:>8,}  {use}")
        if self.sizes:
            sides = sorted(self.sizes)
            extremes = [f"{width} x {height}" for height, width in dict.fromkeys((sides[0], sides[-1]))]
            lines.append(f"images of {' to '.join(extremes)} pixels ({len(sides)} sizes)")
        if self.text_words:
            lines.append(f"95 % of the texts have at most {self.text_words:,} words")
        if self.broken:
            shown = ", ".join(self.broken[:5]) + (" and more" if len(self.broken) > 5 else "")
            lines.append(f"{len(self.broken)} files cannot be read: {shown}")
        if self.incomplete:
            lines.append(f"{self.incomplete:,} images have no label or no owner and are left out (data.missing)")
        return [*lines, *self.notes]


def inspect_data(place: str, *, label: str | None = None, owner: str | None = None) -> Findings:
    """Read a table, a folder of images by class or texts, and return everything that a first run would stumble over.

    label, owner: the columns of the classes and of the parties that hold the rows; None: their names decide. The
    levels of folders above images and texts are the columns folder1, folder2, ..., and the name of a table in a folder
    of tables is the column file.
    """
    root = Path(place).expanduser()
    if not root.exists():
        raise FedstillError(f"DATA: no such file or folder: '{place}'")
    reading = Reading(text=_holds_only_texts(root), missing="skip", keys=[FILE] if owner == FILE else [])
    files = files_of(root.resolve(), reading)
    frames, notes = read_files(files, root.resolve(), reading)
    frames = with_rows(frames, place)
    train_name, test_name, new_notes = choose_splits(frames)
    used = [frames[name] for name in (train_name, test_name) if name is not None]
    common = [name for name in used[0].columns if all(name in frame.columns for frame in used)]
    table = stack(used, common, place)
    remarks = (*notes, *new_notes)
    if len(files) > 1 and files[0].suffix.lower() in TABLES and are_joined(files):
        names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
        hint = f". If each file belongs to one party, call init again with --owner {FILE}" if owner is None else ""
        remarks = (*remarks, f"the rows of {len(files)} files are joined into one table: {names}{hint}")
    levels = folder_columns(table) if files[0].suffix.lower() in {*IMAGE_SUFFIXES, ".txt"} else []
    if label is None and owner is not None and owner == next(iter(levels), ""):
        label = _level_of_classes(levels, owner, place)
    chosen = _choose_label(table, label, place)
    taken = {chosen, TEXT_FILE, *(["label"] if levels else []), *(levels[:1] if chosen == "label" else [])}
    owner = _checked_owner(table, owner, taken, place)
    if owner is None and len(levels) > 1:
        shown = ", ".join(f"{name} ({_examples(table.columns[name])})" for name in levels)
        remarks = (
            *remarks,
            f"the files lie in folders of {len(levels)} levels: {shown}; the classes are {levels[0]}. If a level says "
            f"who holds a file, call init again with --owner, e.g. --owner {levels[0]} --label {levels[1]}",
        )
    pictures = [name for name, column in table.columns.items() if kind_of(column) == "images"]
    if pictures:
        owner = owner or _column_of_owners(table, chosen)
        return _inspect_images(place, table, chosen, pictures[0], owner=owner, notes=remarks)
    if TEXT_FILE in table.columns:
        texts = table.columns[TEXT_FILE]
        return Findings(
            place,
            "texts",
            table.rows,
            chosen,
            _class_sizes(table, chosen, place),
            owner=owner or "",
            owners=_owner_sizes(table, owner),
            broken=tuple(str(files[row].relative_to(root.resolve())) for row in missing_rows(texts)),
            text_words=_words(texts),
            notes=remarks,
        )
    return _inspect_table(place, table, chosen, owner, notes=remarks)


def _holds_only_texts(root: Path) -> bool:
    try:
        files_of(root.resolve())
    except FedstillError:
        return root.is_dir() and any(root.rglob("*.txt"))
    return False


def _choose_label(table: Frame, label: str | None, place: str) -> str:
    """Return the label column: the given one, else one with class names or called label, target, class or y."""
    plain = [name for name, column in table.columns.items() if kind_of(column) in ("numbers", "words")]
    if label is not None:
        if label not in plain:
            raise FedstillError(f"--label: '{place}' has no column '{label}'; {suggest(label, plain)}")
        return label
    stated = [name for name in plain if name in table.names]
    called_so = [name for name in plain if name.lower() in LABEL_NAMES]
    for names in (stated, called_so):
        if len(names) == 1:
            return names[0]
    few = {name: len(set(table.columns[name].tolist())) for name in called_so or plain}
    listed = [f"{name} ({count} values)" for name, count in few.items() if 2 <= count <= MOST_CLASSES or name in stated]
    raise FedstillError(
        f"--label: which column of '{place}' holds the classes? Give it with --label COLUMN; "
        f"{'columns with few values: ' + ', '.join(listed) if listed else 'columns: ' + ', '.join(plain)}"
    )


def _level_of_classes(levels: list[str], owner: str, place: str) -> str:
    """Return the level of folders that holds the classes, where the first level holds the owners."""
    if len(levels) == 2:
        return levels[1]
    if len(levels) == 1:
        raise FedstillError(
            f"--owner: '{owner}' holds the classes of '{place}', because there is one level of folders: arrange the "
            "files as owner/class/file"
        )
    raise FedstillError(
        f"--label: which level of folders of '{place}' holds the classes, {' or '.join(levels[1:])}? Give it with "
        "--label"
    )


def _checked_owner(table: Frame, owner: str | None, taken: set[str], place: str) -> str | None:
    """Return the owner column, and refuse a column that is not there or that has another use already."""
    plain = [name for name, column in table.columns.items() if kind_of(column) in ("numbers", "words")]
    others = [name for name in plain if name not in taken]
    if owner is not None and owner not in others:
        cure = suggest(owner, others) if others else "it has no other column"
        raise FedstillError(f"--owner: '{place}' has no column '{owner}' beside the label; {cure}")
    return owner


def _column_of_owners(table: Frame, label: str) -> str | None:
    """Return a column whose name is that of owners, if each owner may have at least five rows; None without one."""
    for name, column in table.columns.items():
        if name.lower() in OWNER_NAMES and name != label and kind_of(column) in ("numbers", "words"):
            return name if 2 <= _codes(column).max() + 1 <= table.rows / 5 else None
    return None


def _owner_sizes(table: Frame, owner: str | None) -> dict[str, int]:
    """Return the rows of each owner, without rows that nobody owns."""
    if owner is None:
        return {}
    column = table.columns[owner]
    names, sizes = np.unique(np.delete(column, missing_rows(column)).astype(np.str_), return_counts=True)
    return dict(zip(names.tolist(), sizes.tolist(), strict=True))


def _examples(words: np.ndarray) -> str:
    names = sorted(set(words.tolist()))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _class_sizes(table: Frame, label: str, place: str) -> dict[str, int]:
    """Return the rows of each class, without rows that have no label."""
    column = table.columns[label]
    y, classes = encode_labels(np.delete(column, missing_rows(column)), table.names.get(label), label, place)
    if len(classes) < 2:
        raise FedstillError(f"--label: column '{label}' of '{place}' holds one class; there is nothing to learn")
    return dict(zip(classes, np.bincount(y, minlength=len(classes)).tolist(), strict=True))


def _words(texts: np.ndarray) -> int:
    return int(np.quantile([len(text.split()) for text in texts.tolist()], LONG_TEXT))


def _inspect_images(
    place: str, table: Frame, label: str, column: str, *, owner: str | None, notes: tuple[str, ...]
) -> Findings:
    blobs = table.columns[column]

    def size(row: int) -> tuple[int, int] | None:
        try:
            height, width = image_pixels(blobs[row], row, None, place).shape[:2]
        except FedstillError:
            return None
        return height, width

    require_extra("PIL")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sizes = list(pool.map(size, range(len(blobs))))
    root = Path(place).expanduser().resolve()
    broken = [
        str(blob.relative_to(root)) if isinstance(blob, Path) else f"row {row}"
        for row, blob in enumerate(blobs)
        if sizes[row] is None
    ]
    counts = Counter(size for size in sizes if size is not None)
    if not counts:
        raise FedstillError(f"DATA: '{place}' holds no readable image ({len(blobs)} tried)")
    return Findings(
        place,
        "images",
        table.rows,
        label,
        _class_sizes(table, label, place),
        owner=owner or "",
        owners=_owner_sizes(table, owner),
        sizes=counts,
        broken=tuple(broken),
        incomplete=table.rows - len(complete_rows(table, (label, *([owner] if owner else [])))),
        notes=notes,
    )


def _inspect_table(place: str, table: Frame, label: str, owner: str | None, *, notes: tuple[str, ...]) -> Findings:
    classes, new_notes = _class_sizes(table, label, place), []
    labelled = np.delete(np.arange(table.rows), missing_rows(table.columns[label]))
    known = table.take(labelled)
    y = encode_labels(known.columns[label], known.names.get(label), label, place)[0]
    owner = owner or _column_of_owners(known, label)
    columns = []
    mixed = np.zeros(len(y), np.uint64)  # a number for each row, alike in rows that agree in all columns but ids
    for name, column in known.columns.items():
        gaps, kind = len(missing_rows(table.columns[name])), kind_of(column)
        codes = _codes(column) if column.ndim == 1 else None
        values = len(column) if codes is None else int(codes.max()) + 1
        use, reason = {label: "label", owner: "owner"}.get(name, "input"), ""
        if use == "input":
            many = values > MAX_WORDS or values == len(column)  # a few texts differ in every row, as ids do
            kind = "text" if kind == "words" and many and _is_text(column) else kind
            reason = _why_not(name, column, codes, y, kind, place)
        if codes is not None and not reason.startswith("an id"):
            mixed = (mixed ^ (mixed >> np.uint64(29))) * MIXER + codes.astype(np.uint64)
        columns.append(ColumnFacts(name, kind, values, gaps, "left out" if reason else use, reason))
    texts = [column.name for column in columns if column.kind == "text"]
    if owner is None:
        new_notes += [
            f"column '{column.name}' may name who holds a row: then call init again with --owner {column.name}"
            for column in columns
            if column.reason.startswith("names somebody")
        ]
    new_notes += [
        f"column '{column.name}' holds another whole number in every row: if it names the rows, add it to data.drop"
        for column in columns
        if column.use == "input" and column.values == len(y) > 1 and known.columns[column.name].dtype.kind in "iu"
    ]
    for facts in columns:
        if facts.use == "input" and facts.kind == "words":
            new_notes += _spellings(facts.name, known.columns[facts.name])
        elif facts.use == "input" and facts.kind == "numbers" and owner is not None:
            new_notes += _other_units(facts.name, known.columns[facts.name], known.columns[owner])
    if len(labelled) < table.rows:
        new_notes.append(f"{table.rows - len(labelled):,} rows have no label and are left out (data.missing)")
    if (rare := [name for name, count in classes.items() if count < 5]) and len(classes) < len(y):
        new_notes.append(
            f"{len(rare)} classes have fewer than 5 rows, e.g. '{rare[0]}': hardly anything can learn them"
        )
    if repeated := len(mixed) - len(np.unique(mixed)):
        new_notes.append(f"{repeated:,} rows repeat another row, so that train and test rows may be the same")
    suspects = [column for column in columns if column.reason.startswith("leak suspect")]
    if suspects and not texts and all(column.use != "input" for column in columns):
        columns = [replace(column, use="input", reason="") if column in suspects else column for column in columns]
        new_notes.append("every column tells the label on its own, so none is left out for it: is the task that easy?")
    findings = Findings(
        place,
        "table",
        table.rows,
        label,
        classes,
        columns=tuple(columns),
        owner=owner or "",
        owners=_owner_sizes(known, owner),
        notes=(*notes, *new_notes),
    )
    if any(column.use == "input" for column in columns):
        return findings
    if not texts:
        raise FedstillError(
            f"DATA: '{place}' has no column to learn from: "
            + "; ".join(f"{column.name}: {column.reason}" for column in columns if column.reason)
        )
    longest = max(texts, key=lambda name: sum(map(len, known.columns[name].tolist())))
    columns = [replace(column, use="input", reason="") if column.name == longest else column for column in columns]
    words = _words(known.columns[longest])
    return replace(findings, kind="texts", columns=tuple(columns), text_words=words)


def _spellings(name: str, column: np.ndarray) -> list[str]:
    """Return a line if words of a column differ in capitals alone."""
    spelt = Counter(word.casefold() for word in set(column.tolist()))
    alike = sorted(word for word in set(column.tolist()) if spelt[word.casefold()] > 1)
    shown = ", ".join(f"'{word}'" for word in alike[:4]) + (" and more" if len(alike) > 4 else "")
    return [f"column '{name}' holds {shown}, each an input of its own: spell them alike"] if alike else []


def _other_units(name: str, column: np.ndarray, owners: np.ndarray) -> list[str]:
    """Return a line if the numbers of one owner lie apart from all others'; of two owners the smaller one is named."""
    filled = np.delete(np.arange(len(column)), missing_rows(column))
    names, sizes = np.unique(owners[filled].astype(np.str_), return_counts=True)
    if len(names) > MOST_OWNERS:
        return []
    for owner in names[np.argsort(sizes, kind="stable")].tolist():
        here = owners[filled].astype(np.str_) == owner
        own, others = column[filled][here], column[filled][~here]
        if min(len(own), len(others)) < FEWEST_CELLS:
            continue
        (low, middle, high), (others_low, others_middle, others_high) = (
            np.quantile(cells, (0.1, 0.5, 0.9)) for cells in (own, others)
        )
        if high < others_low or low > others_high:
            return [
                f"column '{name}' looks different at '{owner}': half of its cells lie below {middle:.4g}, elsewhere "
                f"below {others_middle:.4g}: is it in another unit?"
            ]
    return []


def _codes(column: np.ndarray) -> np.ndarray:
    """Return a number from 0 for each different value; a cell without a value has the last one."""
    codes: np.ndarray = require_extra("pandas").factorize(column, use_na_sentinel=True)[0]
    return np.where(codes < 0, codes.max() + 1, codes)


def _is_text(column: np.ndarray) -> bool:
    cells = [cell for cell in column[:1000].tolist() if cell]
    return bool(cells) and sum(len(cell.split()) for cell in cells) / len(cells) >= WORDS_OF_TEXT


def _why_not(name: str, column: np.ndarray, codes: np.ndarray | None, y: np.ndarray, kind: str, place: str) -> str:
    """Return the reason to leave a column out; "" if a network may learn from it."""
    if kind == "text":
        return "text; a table learns from numbers and words"
    if kind == "words" and _are_dates(column):
        return "dates; turn them into numbers, such as the days since one day"
    refused = ""
    try:
        encode_column(column, None, InputColumn(name, 0, missing="mean"), place)
    except FedstillError as error:
        refused = str(error).partition(": ")[2]
    if "must hold numbers" in refused:  # a mistyped cell makes words of numbers, and these may differ in every row
        return refused
    if codes is not None:
        values = int(codes.max()) + 1
        if values < 2:
            return "the same in every row" if len(missing_rows(column)) < len(column) else "empty in every row"
        if values == len(column) and (kind == "words" or may_name_rows(name, Reading()) or _counts_up(column)):
            return "an id, differs in every row"
        if may_name_rows(name, Reading()):
            return f"names somebody ({values:,} different)"
        majority = np.bincount(y).max() / len(y)
        share = _share_that_follows(column, codes, y)
        if len(y) >= FEWEST_ROWS and share >= LEAK and 1 - share <= (1 - majority) / 20:
            return f"leak suspect, it alone tells the label of {share:.1%} of the rows"
        if kind == "words" and values > MAX_WORDS:
            return f"{values:,} different words, more than {MAX_WORDS}"
    return refused


def _are_dates(column: np.ndarray) -> bool:
    """Return whether the first cells with a value are days such as 2021-10-11 or 11.10.2021, also with a time."""
    cells = [cell for cell in column[:1000].tolist() if cell]
    return bool(cells) and all(DATE.fullmatch(cell) for cell in cells)


def _counts_up(column: np.ndarray) -> bool:
    """Return whether a column numbers its rows."""
    return column.dtype.kind in "iu" and bool((np.diff(column) == 1).all())


def _share_that_follows(column: np.ndarray, codes: np.ndarray, y: np.ndarray) -> float:
    """Return the share of rows whose label follows from this column alone.

    Of few values each tells the most frequent label of its rows. Of many numbers, thresholds tell: 1 if the rows in the
    order of the column change their label only once for each further class, else 0.
    """
    values, classes = int(codes.max()) + 1, int(y.max()) + 1
    if values <= len(y) / 5:
        counts = np.bincount(codes * classes + y, minlength=values * classes).reshape(values, classes)
        return float(counts.max(axis=1).sum() / len(y))
    if column.dtype == object:
        return 0.0
    order = np.argsort(column, kind="stable")
    changes = np.flatnonzero(np.diff(y[order]))
    apart = np.diff(column[order])[changes] != 0
    return 1.0 if len(changes) == len(np.unique(y)) - 1 and bool(apart.all()) else 0.0
