"""Records of finished runs in a JSON file, one line a run, and the key that says which runs are the same."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment
from fedstill.methods import lookup as expression
from fedstill.methods.options import defaults
from fedstill.storage.files import lock, write_whole

# Numbers that a record keeps beside the accuracy of a round, each times this factor: shares become percent.
BESIDE = {"accuracy_aggregated": 100.0, "accuracy_sent": 100.0, "pseudo_label_accuracy": 100.0, "pseudo_labels": 1.0}
# Keys that change neither the data, nor the method, nor (but for rounding) the numbers.
NOT_THE_CELL = {"seed", "name", "engine", "cluster", "checkpoint_every", "track", "target", "compare"}
# Defaults that have changed after runs were recorded, and their former values; a field of a table has a dotted name.
FORMER_DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("method", "mrtf"): {"refine_sharpness": 4.0, "refine_share": "all", "student.lr_schedule": "constant"},
    ("method", "d2cfl"): {
        "threshold": 0.75,
        "rule": "max",
        "labels": "hard",
        "student_start": "carried",
        "student_share": "fixed",
        "feedback": True,
        "student.lr": 1e-3,
        "student.lr_schedule": "constant",
        "student.lr_epoch_decay": 0.95,
    },
    **{("model", name): {"init": "paper"} for name in ("mlp", "lenet", "fecnn", "convnet", "vgg8", "char_lstm")},
}
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Curve(NamedTuple):
    """Accuracy in percent at the evaluated rounds of one run."""

    rounds: int  # T, of the whole run
    evaluated: int  # every so many rounds, and in the last
    accuracy: Sequence[float]

    @property
    def at(self) -> list[int]:
        """The evaluated rounds.

        >>> Curve(5, 2, [10.0, 20.0, 30.0]).at
        [2, 4, 5]
        """
        every = range(1, self.rounds + 1)
        return [number for number in every if number % self.evaluated == 0 or number == self.rounds]


class Run(TypedDict):
    """The record of one finished run, with all accuracies in percent, from which every figure can be computed again."""

    key: str  # of its cell: see cell_key
    row: str
    column: str
    preset: str
    method: str
    seed: Annotated[int, Field(ge=0)]
    rounds: Count
    evaluated: Count  # every so many rounds
    accuracy: list[Finite]
    seconds: Annotated[Finite, Field(ge=0)]
    at_once: Count  # runs that shared the device
    device: str
    torch: str
    fedstill: str
    date: str
    beside: NotRequired[dict[str, list[Finite | None]]]  # other numbers of the evaluated rounds (see BESIDE)
    engine: NotRequired[dict[str, Any]]  # see engine_of; left out: the default
    prepared: NotRequired[Annotated[Finite, Field(ge=0)]]  # of the seconds, those before the first round
    commit: NotRequired[str]  # of the working folder, with '+' if files differed from it; left out outside of git
    code: NotRequired[dict[str, str]]  # digests of the modules that the run entered: see code_path


_RECORD = TypeAdapter(Run)


def cell_key(experiment: Experiment) -> str:
    """Return ten letters for everything that decides a cell's numbers; the same cell in two tables is the same run.

    Values equal to a section's default are left out, because new keys must not change old names. An option whose
    default has changed is left out at its former default and written otherwise, because a record keeps its name. The
    folders of data and of users' files are left out, too, and that noise follows from the seed.
    """
    table = experiment.model_dump(mode="json", exclude_defaults=True, exclude=NOT_THE_CELL)
    data, privacy = table.get("data", {}), table.get("privacy", {})
    privacy.pop("reproducible", None)  # every recorded run is
    if "privacy" in table and not privacy:
        del table["privacy"]
    if "method" in table:
        table["method"] = _method_as_recorded(experiment, table["method"])
        table["method"]["name"] = expression.label(table["method"]["name"])
    if "model" in table:
        table["model"] = _as_recorded("model", experiment.model.name, table["model"])
    if "evaluate" in table:
        table["evaluate"] = expression.label(table["evaluate"])
    for place in ("source", "unlabeled", "test"):
        if isinstance(data.get(place), str):
            data[place] = name_of_data(data[place])
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:10]


def _method_as_recorded(experiment: Experiment, section: dict[str, Any]) -> dict[str, Any]:
    """Return a cell's section [method] as `_as_recorded` writes it; a mixture has its options inside its name."""
    if experiment.method.is_single:
        return _as_recorded("method", experiment.method.name, section)
    phases = experiment.method.phases
    if not any(("method", part.name) in FORMER_DEFAULTS for phase in phases for part in phase.parts):
        return section
    mixtures = []
    for phase in phases:
        texts = [expression.write(part.name, _as_recorded("method", part.name, part.options)) for part in phase.parts]
        mixtures.append("+".join(texts) + ("" if phase.until is None else f" until {phase.until}"))
    return {"name": " then ".join(mixtures)}


def _as_recorded(kind: str, name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section or its options: one whose default has changed is left out at its former default, else written.

    >>> _as_recorded("model", "mlp", {"hidden": [8], "init": "paper"})
    {'hidden': [8]}
    >>> _as_recorded("model", "mlp", {"hidden": [8]})
    {'hidden': [8], 'init': 'torch'}
    """
    written = {key: dict(value) if isinstance(value, Mapping) else value for key, value in section.items()}
    for option, former in FORMER_DEFAULTS.get((kind, name), {}).items():
        key, _, field = option.partition(".")
        now = written.get(key, defaults(kind, name)[key])
        if field:
            now = {**defaults(kind, name)[key], **now}[field]
        place = written.setdefault(key, {}) if field else written
        place[field or key] = now
        if now == former:
            del place[field or key]
        if written.get(key) == {}:
            del written[key]
    return written


def engine_of(experiment: Experiment) -> dict[str, Any]:
    """Return the keys of `engine` that are not at their default, without device and threads.

    >>> engine_of(Experiment(engine={"device": "cuda", "precision": "bf16"}))
    {'precision': 'bf16'}
    """
    return experiment.engine.model_dump(mode="json", exclude_defaults=True, exclude={"device", "threads"})


def engine_text(engine: Mapping[str, Any]) -> str:
    """Return an engine as one text to compare and sort by; an empty text for the default.

    >>> engine_text({"precision": "bf16", "chunk": 2}), engine_text({})
    ('{"chunk": 2, "precision": "bf16"}', '')
    """
    return json.dumps(engine, sort_keys=True) if engine else ""


def cell_id(experiment: Experiment) -> tuple[str, str]:
    """Return the key and the engine of a cell, which is run once for each seed."""
    return cell_key(experiment), engine_text(engine_of(experiment))


def run_id(run: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return key, seed and engine; two records with equal ones are of the same run."""
    return run["key"], run["seed"], engine_text(run.get("engine", {}))


def name_of_data(place: str) -> str:
    """Return the name of a data set's folder: the last part of a path or a hub id, without a configuration.

    >>> name_of_data("ufldl-stanford/svhn:cropped_digits"), name_of_data("data/cifar10")
    ('svhn', 'cifar10')
    """
    return Path(place).name.partition(":")[0]


def method_text(experiment: Experiment) -> str:
    """Return the method as it is written: fedprox(mu=0.1)."""
    return expression.label(expression.write(experiment.method.name, experiment.method.options))


def curve_of(run: Mapping[str, Any]) -> Curve:
    return Curve(run["rounds"], run["evaluated"], run["accuracy"])


def read_runs(path: Path, paper: str | None = None) -> list[Run]:
    """Return the runs of a results file, and refuse a file of another paper; no runs when there is no file yet."""
    if not os.path.exists(path):  # nor where its folder may not be read
        return []
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        runs: list[Run] = list(table["runs"])
        owner = table.get("paper")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise FedstillError(f"--results: '{path}' is no file of results: move it away, or name another") from None
    if paper is not None and owner != paper:
        raise FedstillError(f"--results: '{path}' holds runs of {owner!r}, not of {paper!r}: name another file")
    for number, run in enumerate(runs, 1):
        if (fault := fault_of(run)) is not None:
            name = " ".join(str(run.get(key)) for key in ("row", "column", "seed")) if isinstance(run, dict) else run
            raise FedstillError(f"--results: '{path}': run {number} ({name}): {fault}: move the file away")
    return runs


def fault_of(run: Any) -> str | None:
    """Return why a record is unusable; None for a good one."""
    try:
        _RECORD.validate_python(run, strict=True)
    except ValidationError as error:
        return first_fault(error)
    wanted = len(curve_of(run).at)
    for name, values in {"accuracy": run["accuracy"], **run.get("beside", {})}.items():
        if len(values) != wanted:
            return f"{name} has {len(values)} values for {wanted} evaluated rounds"
    return None


def first_fault(error: ValidationError, positions: Sequence[str] = ()) -> str:
    """Return pydantic's first complaint as one line, such as: rounds = None: Input should be a valid integer.

    positions: names of a call's positional arguments.
    """
    first = error.errors(include_url=False)[0]
    start, *deeper = first["loc"] or ("",)
    place = ".".join(map(str, [positions[start] if positions and isinstance(start, int) else start, *deeper]))
    value = "" if first["type"] == "missing" else f" = {reprlib.repr(first['input'])}"
    return f"{place}{value}: {first['msg']}"


def merge(*groups: Iterable[Run]) -> list[Run]:
    """Return one run for each key, seed and engine, the latest one, in an order that does not depend on their ends."""
    runs = {run_id(run): run for group in groups for run in group}
    return sorted(runs.values(), key=lambda run: (run["preset"], run["column"], run["row"], *run_id(run)))


class Records:
    """Runs by key, seed and engine."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs: dict[str, dict[int, dict[str, Run]]] = {}  # key -> seed -> engine
        for run in runs:
            key, seed, engine = run_id(run)
            self._runs.setdefault(key, {}).setdefault(seed, {})[engine] = run

    def of(self, experiment: Experiment) -> dict[int, Run]:
        """Return the run of a cell for each seed, with the cell's engine.

        A cell with the default engine takes a run of another engine, the first in order, where it has none of its own.
        """
        key, engine = cell_id(experiment)
        by_seed: dict[int, Run] = {}
        for seed, engines in sorted(self._runs.get(key, {}).items()):
            if engine in engines or not engine:
                by_seed[seed] = engines[engine if engine in engines else min(engines)]
        return by_seed


def write_runs(path: Path, paper: str, runs: Sequence[Run]) -> None:
    """Write runs as a line each, whole, so that no reader and no crash sees half of the file."""
    lines = ",\n".join(json.dumps(run, ensure_ascii=False, allow_nan=False) for run in merge(runs))
    try:
        write_whole(path, f'{{"paper": {json.dumps(paper)}, "runs": [\n{lines}\n]}}\n')
    except OSError as error:
        raise FedstillError(f"--results: cannot write '{path}' ({error.strerror}): name another file") from None


def add_run(path: Path, paper: str, run: Run) -> None:
    """Put one run into the file, beside the runs that other processes have put there since."""
    with holding(path):
        write_runs(path, paper, merge(read_runs(path, paper), [run]))


@contextmanager
def holding(results: Path) -> Iterator[None]:
    """Hold the lock of the results file while the block runs; another process waits for it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(results.with_name(f".{results.name}.lock"), wait=True))
        except OSError as error:
            raise FedstillError(f"--results: cannot write '{results}' ({error.strerror}): name another file") from None
        yield
