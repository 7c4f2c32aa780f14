"""Runs and comparisons that are on disk: read without their data, their models, or another round."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import safetensors

from fedstill.core.errors import FedstillError
from fedstill.data.source import first_line
from fedstill.experiment.compare import BEST_FILE, RESULTS_FILE
from fedstill.experiment.config import MethodSection
from fedstill.experiment.model import describe_model
from fedstill.experiment.overrides import describe_split, without_defaults
from fedstill.experiment.run_folder import CONFIG_FILE, CONTRACT_FILE, read_settings
from fedstill.loop.checkpoint import WEIGHTS_FILE
from fedstill.loop.history import History, Row
from fedstill.loop.references import read_references
from fedstill.methods.lookup import label
from fedstill.report import counted
from fedstill.report.curves import Curve
from fedstill.report.sensitivity import point_of
from fedstill.report.table import MethodSummary, best_first, reference_rows
from fedstill.storage.files import RUNNING_FILE, from_json, is_held, read_json, read_text

BEGAN_FILE = "env.json"  # a run writes it once, before its first round
_MARKS = (CONTRACT_FILE, RESULTS_FILE, "metrics.jsonl", BEGAN_FILE)  # a config.toml beside none of them is no run's
_STAMP = re.compile(r"(\d{8}T\d{6})-")

State = Literal["finished", "running", "killed"]


@dataclass(frozen=True)
class Record:
    """A run or a comparison in a folder, without its data and its models."""

    folder: Path
    settings: dict[str, Any]  # config.toml, unchecked: code that it names is not run
    is_comparison: bool

    def __post_init__(self) -> None:
        """Refuse settings of something else than a run."""
        kinds = {"name": str, "rounds": int, "seed": int, "best": str, "method": dict, "model": dict, "data": dict}
        for key, kind in {**kinds, "partition": dict, "compare": dict}.items():
            if not isinstance(self.settings.get(key), kind):
                raise FedstillError(f"'{self.folder / CONFIG_FILE}' is not the file of a run: '{key}' is missing")

    @property
    def is_sweep(self) -> bool:
        return self.is_comparison and bool(self.settings["compare"].get("over"))

    @cached_property
    def rows(self) -> list[Row]:
        """The rounds of a run; a comparison has none of its own."""
        return [] if self.is_comparison else read_rows(self.folder)

    @property
    def history(self) -> History:
        return History(self.rows, read_lines(self.folder / "audit.jsonl"), self.settings["best"])

    @cached_property
    def summaries(self) -> list[MethodSummary]:
        """The finished methods of a comparison, best first, then its reference points."""
        return best_first(read_summaries(self.folder)) if read_results(self.folder)["methods"] else []

    @property
    def when(self) -> datetime:
        """When it began: by the name that fedstill gave the folder, else by its first file."""
        if stamp := _STAMP.match(self.folder.resolve().name):
            return datetime.strptime(stamp[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
        begun = self.folder / BEGAN_FILE
        file = begun if begun.exists() else self.folder / CONFIG_FILE
        return datetime.fromtimestamp(file.stat().st_mtime, UTC)

    @property
    def state(self) -> State:
        if is_held(self.folder / RUNNING_FILE):
            return "running"
        return "finished" if self._has_ended() else "killed"

    def _has_ended(self) -> bool:
        if self.is_sweep:
            return (self.folder / BEST_FILE).exists()  # written at the end
        if self.is_comparison:
            done = {(run["method"], run["seed"]) for run in read_results(self.folder)["runs"]}
            seeds = range(self.settings["seed"], self.settings["seed"] + self.settings["compare"]["seeds"])
            return done >= {(name, seed) for name in self.methods for seed in seeds}
        try:
            with safetensors.safe_open(self.folder / "last" / WEIGHTS_FILE, framework="pt") as file:
                about = file.metadata() or {}
        except (OSError, safetensors.SafetensorError):
            return False
        return bool(about.get("calibration"))  # the model of a checkpoint has none, because a run calibrates at its end

    @cached_property
    def methods(self) -> dict[str, str]:
        """The methods by their names in tables, each with the options that differ from their defaults."""
        section = self.settings["method"]
        if not self.is_comparison:
            return {label(section["name"]): _method_text(section)}
        if self.is_sweep:
            names = [point_of(row.method).get("method", section["name"]) for row in self.summaries]
            texts = dict.fromkeys(names or [section["name"]])
            return {label(text): _method_text(section if text == section["name"] else {"name": text}) for text in texts}
        texts = self.settings["compare"]["methods"]
        return {label(text): _method_text(section if text == section["name"] else {"name": text}) for text in texts}

    @property
    def method(self) -> str:
        if not self.is_comparison:
            return ", ".join(self.methods)
        names = ", ".join(self.methods) if len(self.methods) < 3 else f"{len(self.methods)} methods"
        if self.is_sweep:
            names = f"sweep over {', '.join(str(axis).partition('=')[0] for axis in self.settings['compare']['over'])}"
        return f"{names}, {counted(self.settings['compare']['seeds'], 'seed')}"

    @property
    def data(self) -> str:
        source = str(self.settings["data"]["source"])
        return source if source.startswith("(") else Path(source).name

    @property
    def split(self) -> str:
        return describe_split(self.settings["partition"])

    @property
    def about(self) -> str:
        """The experiment in a line: network, data, split, rounds."""
        network = describe_model(self.settings["model"]["name"], self.settings["model"])
        return f"{network} on {self.data}, {self.split}, {counted(self.settings['rounds'], 'round')}"

    @property
    def result(self) -> str:
        """The last accuracy of a run, or the best mean of a comparison; how far a run has come if it has not ended."""
        if self.is_comparison:
            best = next((row for row in self.summaries if not row.is_reference), None)
            return "" if best is None else f"{100 * best.mean:.1f} % {best.method}"
        last, done = self.history.last, len(self.rows)
        accuracy = "" if last is None else f"{100 * last['accuracy']:.1f} %"
        return accuracy if self._has_ended() else f"{accuracy} round {done}/{self.settings['rounds']}".strip()

    @property
    def size(self) -> int:
        """Bytes of all files in the folder."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*") if not path.is_dir())

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "kind": "comparison" if self.is_comparison else "run",
            "name": self.settings["name"],
            "when": self.when.isoformat(timespec="seconds"),
            "method": self.method,
            "data": self.data,
            "split": self.split,
            "seed": self.settings["seed"],
            "result": self.result,
            "state": self.state,
            "bytes": self.size,
        }


def _method_text(section: dict[str, Any]) -> str:
    """Return a method with its options; those of somebody's own method are left out, because only its code has them."""
    name = str(section["name"])
    return name if ":" in name else without_defaults(MethodSection.model_validate(section))


@contextmanager
def legible(*folders: Path) -> Iterator[None]:
    """Turn whatever goes wrong while the block reads and shows the files of runs into one line.

    Somebody else may have written the files, and each value in them may be of any kind.
    """
    try:
        yield
    except (FedstillError, OSError, MemoryError):
        raise
    except Exception as error:
        named = " or ".join(f"'{folder}'" for folder in folders)
        raise FedstillError(
            f"{named} holds something that no run writes ({type(error).__name__}: {first_line(error)}): restore it "
            "from a copy"
        ) from error


def read_record(folder: Path) -> Record:
    """Return the run or the comparison in a folder; files that cannot be read are refused in one line."""
    if not folder.is_dir():
        raise FedstillError(f"'{folder}' is no folder: give the folder of a run or a comparison")
    record = Record(folder, read_settings(folder), (folder / RESULTS_FILE).exists())
    if record.is_comparison:
        read_results(folder)
    return record


def find_records(root: Path) -> tuple[list[Record], list[str]]:
    """Return the runs and comparisons below a folder, newest first, and a line for each that cannot be read.

    A comparison is one entry, unless `root` is the folder of a comparison: then its runs are found. Other folders are
    passed over.
    """
    if not root.is_dir():
        raise FedstillError(f"'{root}' is no folder: give a folder that holds runs")
    records, broken = [], []
    for folder in _run_folders(root):
        try:
            with legible(folder):
                record = read_record(folder)
                record.as_json()  # so that broken numbers are found here, too
            records.append(record)
        except (FedstillError, OSError) as error:
            broken.append(f"'{folder}' cannot be read: {' '.join(str(error).split())}")
    return sorted(records, key=lambda record: record.when, reverse=True), broken


def _run_folders(root: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(root):
        folder = Path(place)
        is_run = any(mark in files for mark in _MARKS) and (CONFIG_FILE in files or CONTRACT_FILE in files)
        if is_run and not (folder == root and RESULTS_FILE in files):
            folders.clear()
            yield folder
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file with one JSON object in each line, as far as they can be read."""
    records = []
    try:
        for line in read_text(file).splitlines():
            records.append(from_json(line))
    except (OSError, ValueError):
        return records
    return records


def read_rows(folder: Path) -> list[Row]:
    """Return the rounds in metrics.jsonl of a run; a last line that a killed run has not finished is left out."""
    try:
        lines = read_text(folder / "metrics.jsonl").splitlines()
    except FileNotFoundError:
        return []
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = from_json(line)
            if not isinstance(row, dict):
                raise ValueError("no table")
            rows.append(row)
        except ValueError as error:
            if number < len(lines):
                raise FedstillError(f"'{folder / 'metrics.jsonl'}' cannot be read in line {number} ({error})") from None
    return rows


def read_results(folder: Path) -> dict[str, Any]:
    """Return results.json of a comparison; its keys "methods" and "runs" are lists of tables."""
    path = folder / RESULTS_FILE
    read_settings(folder)
    if not path.is_file():
        raise FedstillError(f"'{folder}' holds one run, no comparison (no {RESULTS_FILE}): give a folder of `compare`")
    try:
        results: dict[str, Any] = read_json(path)
        if not all(isinstance(row["method"], str) for key in ("methods", "runs") for row in results[key]):
            raise ValueError("a method without a name")
    except (ValueError, KeyError, TypeError) as error:
        raise FedstillError(f"'{path}' cannot be read ({error}): run `fedstill resume {folder}`") from None
    return results


def read_summaries(folder: Path) -> list[MethodSummary]:
    """Return the rows of a comparison's table, with its reference points."""
    results = read_results(folder)
    files = sorted((folder / "references").glob("seed-*.json"), key=lambda file: (len(file.name), file.name))
    try:
        methods = [MethodSummary.from_json(row) for row in results["methods"]]
        references = reference_rows([known for file in files if (known := read_references(file)) is not None])
    except KeyError as error:
        raise FedstillError(f"'{folder / RESULTS_FILE}' lacks {error}: run `fedstill resume {folder}`") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise FedstillError(
            f"'{folder / RESULTS_FILE}' cannot be read ({error}): run `fedstill resume {folder}`"
        ) from None
    if not methods:
        raise FedstillError(f"'{folder}' has no finished method yet: go on with `fedstill resume {folder}`")
    return [*methods, *references]


def read_curves(folder: Path) -> dict[str, list[Curve]]:
    """Return rounds and accuracies by method, a curve for each seed; of a run or of a comparison."""
    settings = read_settings(folder)
    if (folder / RESULTS_FILE).exists():
        places = [(run["method"], folder / str(run["run_dir"])) for run in read_results(folder)["runs"]]
        for _, place in places:
            if not place.resolve().is_relative_to(folder.resolve()):
                raise FedstillError(f"'{folder / RESULTS_FILE}' names '{place}', a place outside of '{folder}'")
    else:
        places = [(label(settings["method"]["name"]), folder)]
    curves: dict[str, list[Curve]] = {}
    for method, place in places:
        rows = [row for row in read_rows(place) if row.get("accuracy") is not None]
        if rows:
            curve = [int(row["round"]) for row in rows], [float(row["accuracy"]) for row in rows]
            curves.setdefault(method, []).append(curve)
    if not curves:
        raise FedstillError(f"'{folder}' has no evaluated round yet: go on with `fedstill resume {folder}`")
    return curves
