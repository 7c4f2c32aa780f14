"""The files of run folders as plain data, for a report: everything that can be read, and a line on all that cannot."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.report.partition import COUNTS_FILE
from fedstill.storage.files import from_json, leads_out, read_text

METRICS_FILE, AUDIT_FILE, RESULTS_FILE, CONFIG_FILE = "metrics.jsonl", "audit.jsonl", "results.json", "config.toml"
DEEPEST = 3  # levels of folders below a comparison's folder
MOST_BYTES = 2**28  # of one file: a larger one is no file of a run
LARGEST = 1e15  # of a number: beyond it sums lose their last digits
MOST_KEYS = 3  # settings beside a method's name
FREE = ("seed", "track", "compare", "checkpoint_every", "engine")  # settings in which runs of one method may differ

Row = Mapping[str, Any]


def number(value: Any) -> float | None:
    """Return a number; None for everything else that a file may hold there, and for numbers beyond all measure."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -LARGEST < value < LARGEST else None  # false for NaN


def numbers(value: Any) -> list[float | None]:
    return [number(item) for item in value] if isinstance(value, list) else []


def table_of(value: Any) -> Mapping[str, Any]:
    """Return a table as it is, and an empty one for everything else."""
    return value if isinstance(value, Mapping) else {}


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(frozen=True)
class Run:
    """One run: one method, one seed. A file that is missing or damaged is an empty table here and a line in `gaps`."""

    folder: Path
    name: str  # of its method
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()  # one a round, ascending
    audit: Sequence[Row] = ()
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the tables of its JSON files by their names
    log: str = ""
    gaps: tuple[str, ...] = ()

    @cached_property
    def seed(self) -> int:
        seed, place = self.config.get("seed"), re.fullmatch(r"seed-(\d{1,18})", self.folder.name)
        return seed if isinstance(seed, int) else int(place[1]) if place else 0

    @cached_property
    def evaluated(self) -> list[Row]:
        return [row for row in self.rows if number(row.get("accuracy")) is not None]

    @property
    def last(self) -> Row | None:
        return self.evaluated[-1] if self.evaluated else None

    @property
    def accuracy(self) -> float | None:
        """The accuracy of the last evaluated round."""
        return None if self.last is None else float(self.last["accuracy"])

    @property
    def is_whole(self) -> bool:
        """Whether all its rounds are there."""
        return bool(self.rows) and self.rows[-1]["round"] == self.config.get("rounds")

    @property
    def measured(self) -> str:
        """The accuracy of its rounds in words."""
        held_back = self.config.get("evaluate") == "client_rows"
        return "accuracy on rows that clients hold back" if held_back else "test accuracy"

    @property
    def classes(self) -> list[str]:
        data = table_of(self.files["contract.json"].get("data"))
        return [str(name) for name in list_of(data.get("classes") or self.files[COUNTS_FILE].get("classes"))]

    @property
    def data_name(self) -> str:
        named = table_of(self.files["contract.json"].get("data")).get("name")
        return str(named or table_of(self.config.get("data")).get("source") or "unknown data")

    @cached_property
    def split(self) -> str:
        """How its rows are split in words; empty where its file says nothing."""
        partition = table_of(self.config.get("partition"))
        options = [f"{key} = {value}" for key, value in partition.items() if key not in ("scheme", "clients")]
        return ", ".join([str(partition["scheme"]), *options]) if partition.get("scheme") else ""

    def series(self, key: str) -> dict[int, float]:
        """Return round -> number, of the rounds that have the number."""
        return {row["round"]: value for row in self.rows if (value := number(row.get(key))) is not None}

    def summed(self, *keys: str) -> dict[int, float]:
        """Return round -> the sum of some numbers of all rounds up to this one."""
        total, sums = 0.0, {}
        for row in self.rows:
            total += sum(number(row.get(key)) or 0.0 for key in keys)
            sums[row["round"]] = total
        return sums

    def reached(self, target: float) -> int | None:
        """Return the first round with at least this accuracy."""
        return next((row["round"] for row in self.evaluated if row["accuracy"] >= target), None)


UP = ("bytes_up", "bytes_prepared")
DOWN = ("bytes_down", "bytes_prepared_down")


@dataclass(frozen=True)
class Runs:
    """The runs of a report by their methods' names, the best mean of the last accuracies first."""

    by_method: Mapping[str, Sequence[Run]]
    folders: Sequence[Path]  # as the user gave them
    references: Sequence[Mapping[str, Any]] = ()  # references.json, one table a seed
    gaps: Sequence[str] = ()
    reveals: Mapping[str, Sequence[str]] = field(default_factory=dict)  # method -> everything that leaves a client

    @property
    def all(self) -> list[Run]:
        return [run for runs in self.by_method.values() for run in runs]

    @property
    def first(self) -> Run:
        return next(run for runs in self.by_method.values() for run in runs)

    @property
    def is_sweep(self) -> bool:
        """Whether the runs are points of a sweep, which differ in settings rather than in methods."""
        return bool(self.all) and all(table_of(run.config.get("compare")).get("over") for run in self.all)

    @property
    def thing(self) -> str:
        """The word for a line of the charts and for a row of the tables."""
        return "point" if self.is_sweep else "method"

    @property
    def target(self) -> float | None:
        return next((target for run in self.all if (target := number(run.config.get("target")))), None)

    def last(self, method: str) -> dict[int, float]:
        """Return seed -> accuracy of the last evaluated round."""
        return {run.seed: run.accuracy for run in self.by_method[method] if run.accuracy is not None}


def read_runs(folders: Sequence[str | Path], *, read: Callable[[Path, str], Run] | None = None) -> Runs:
    """Return every run in some folders; each folder holds a run, or runs below it, as a comparison's does.

    read: reads the run in a folder, given the name of its method or an empty text; `read_run` by default.
    """
    read = read_run if read is None else read
    places: dict[Path, str] = {}
    references, gaps = [], []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise FedstillError(
                f"no folder '{folder}': give the folder that `fedstill run` or `fedstill compare` named"
            )
        if not (below := run_folders(folder)):
            raise FedstillError(f"'{folder}' holds no run: give the folder that `fedstill run` or `compare` named")
        names, about = _names_in(folder, below)
        places |= names
        gaps += about
        for file in sorted(folder.glob("references/seed-*.json")):
            references.append(_json(file, gaps))
    runs = [read(place, name) for place, name in places.items()]
    for run in runs:
        if run.files["references.json"]:
            references.append(run.files["references.json"])
    gaps += [line for run in runs for line in gap_lines(run, folders)]
    grouped = _grouped(runs)
    by_method = {method: sorted(same, key=lambda run: run.seed) for method, same in grouped.items()}
    return Runs(
        best_first(by_method), [Path(folder) for folder in folders], [table for table in references if table], gaps
    )


def best_first(by_method: Mapping[str, Sequence[Run]]) -> dict[str, Sequence[Run]]:
    """Return the methods in the order of the means of their runs' last accuracies."""
    return dict(sorted(by_method.items(), key=lambda entry: -_mean(run.accuracy for run in entry[1])))


def gap_lines(run: Run, given: Sequence[str | Path]) -> list[str]:
    """Return the gaps of a run behind the name of its folder.

    The name begins at the folder that the user gave, because a page that is sent to others shows no path of this
    machine.
    """
    parent = next((Path(place).parent for place in given if run.folder.is_relative_to(place)), run.folder.parent)
    return [f"{run.folder.relative_to(parent)}: {gap}" for gap in run.gaps]


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else -1.0


def run_folders(folder: Path) -> list[Path]:
    """Return the folder itself where it holds a run, else the folders below it that do."""
    if (folder / METRICS_FILE).exists() or (folder / "contract.json").exists():
        return [folder]
    folders = []
    for place, below, files in os.walk(folder):
        inside = Path(place)
        if len(inside.relative_to(folder).parts) >= DEEPEST:
            below.clear()
        if inside != folder and (METRICS_FILE in files or "contract.json" in files):
            folders.append(inside)
            below.clear()
        below.sort()
    return folders or ([folder] if (folder / CONFIG_FILE).is_file() else [])


def _names_in(folder: Path, below: Sequence[Path]) -> tuple[dict[Path, str], list[str]]:
    """Return each run's name, empty where no results.json names its method, and the runs that results.json lacks."""
    gaps: list[str] = []
    names: dict[Path, str] = dict.fromkeys(below, "")
    if folder in names or not (folder / RESULTS_FILE).exists():
        no_table = (
            f"{folder.resolve().name}: no {RESULTS_FILE}: a comparison goes on, or the folder holds runs of several"
        )
        return names, [] if folder in names else [no_table]
    for entry in list_of(_json(folder / RESULTS_FILE, gaps).get("runs")):
        place = folder / str(table_of(entry).get("run_dir"))
        if place in names:
            names[place] = str(entry.get("method"))
        else:
            gaps.append(
                f"{folder.name}: {RESULTS_FILE} names the run '{table_of(entry).get('run_dir')}', which is not there"
            )
    return names, gaps


EXPECTED = ("contract.json", COUNTS_FILE, "calibration.json", "env.json")  # in the folder of every finished run
JSON_FILES = (*EXPECTED, "parties.json", "privacy.json", "references.json", "generated.json")


def read_run(folder: Path, name: str) -> Run:
    """Return the run in a folder; `name` is its method's name, and empty where the run's own file has it."""
    gaps: list[str] = []
    files = {}
    for file in JSON_FILES:
        there = (folder / file).exists()
        files[file] = _json(folder / file, gaps) if there or file in EXPECTED else {}
    config: Mapping[str, Any] = {}
    try:
        config = tomllib.loads(_text(folder / CONFIG_FILE))
    except (OSError, ValueError) as error:
        gaps.append(f"{CONFIG_FILE} cannot be read ({_why(error)})")
    rows = {row["round"]: row for row in _lines(folder / METRICS_FILE, gaps)}
    audit = _lines(folder / AUDIT_FILE, gaps)
    log = ""
    try:
        log = _text(folder / "log.txt")
    except (OSError, ValueError) as error:
        gaps.append(f"log.txt cannot be read ({_why(error)})")
    planned = config.get("rounds")
    if isinstance(planned, int) and len(rows) < planned:
        gaps.append(f"{len(rows)} of {planned} rounds: the run goes on, was stopped, or ended early")
    method = str(table_of(config.get("method")).get("name") or folder.name)
    name = name or re.sub(r"[^+()>,\"' ]*[/\\](?=[^/\\+()>,\"' ]*\.py:)", "", method)
    return Run(folder, name, config, [rows[at] for at in sorted(rows)], audit, files, log, tuple(gaps))


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _text(path: Path) -> str:
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES:,} bytes")
    if path.exists() and not path.is_file():
        raise ValueError("not a file")
    if leads_out(path):  # a page that is sent to others shows no file beside the run's
        raise ValueError("a link to a place outside of its folder")
    return read_text(path)


def _json(path: Path, gaps: list[str]) -> Mapping[str, Any]:
    """Return the table in a JSON file; an empty one, and a line in `gaps`, where there is none."""
    try:
        tree = from_json(_text(path))
        if not isinstance(tree, dict):
            raise ValueError("it holds no table")
        return tree
    except (OSError, ValueError) as error:
        gaps.append(f"{path.name} cannot be read ({_why(error)})")
        return {}


def _lines(path: Path, gaps: list[str]) -> list[dict[str, Any]]:
    """Return the records of a file with one JSON table a line, without damaged lines, which `gaps` counts."""
    try:
        lines = _text(path).splitlines()
    except (OSError, ValueError) as error:
        gaps.append(f"{path.name} cannot be read ({_why(error)})")
        return []
    records, damaged = [], 0
    for line in lines:
        try:
            record = from_json(line)
            if not isinstance(record, dict) or not isinstance(record.get("round"), int):
                raise ValueError
            if not 0 <= record["round"] < LARGEST:
                raise ValueError
            records.append(record)
        except ValueError:
            damaged += 1
    if damaged:
        gaps.append(f"{path.name}: {damaged} of {len(lines)} lines are damaged and left out")
    return records


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the keys of nested tables as one level: {"local.lr": 0.1}."""
    keys: dict[str, Any] = {}
    for key, value in table.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return keys


def _grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs by name; runs of one method with other settings are told apart by the keys that differ."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    groups: dict[str, list[Run]] = {}
    for name, same in by_name.items():
        settings = [
            {key: value for key, value in flat(run.config).items() if key.partition(".")[0] not in FREE} for run in same
        ]
        readable = [table for table in settings if table]
        keys = {key for table in readable for key in table if any(other.get(key) != table[key] for other in readable)}
        kinds: dict[str, str] = {}
        for run, table in zip(same, settings, strict=True):
            values = [f"{key}={table.get(key, 'unset')}" for key in sorted(keys)] if table else []
            more = f" and {len(values) - MOST_KEYS} more" if len(values) > MOST_KEYS else ""
            short = f"{name} [{', '.join(values[:MOST_KEYS])}{more}]" if values else name
            if (kind := repr(values)) not in kinds:
                kinds[kind] = short if short not in groups else f"{short} ({len(kinds) + 1})"
            groups.setdefault(kinds[kind], []).append(run)
    for name, same in list(groups.items()):
        if len({run.seed for run in same}) < len(same):  # the same experiment twice: each is a run of its own
            del groups[name]
            for run in same:
                twin = f"{name} ({run.folder.name})"
                while twin in groups:
                    twin += "'"
                groups[twin] = [run]
    return groups
