"""Label unlabeled data with a finished run: a class, its confidence, and how far the confidence can be trusted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedstill.core.errors import FedstillError, suggest
from fedstill.data import Source
from fedstill.data.contract import contract_of, differences, rows_of, task_differences
from fedstill.data.source import Unlabeled
from fedstill.data.split import read_unlabeled, split_unlabeled
from fedstill.experiment.build import build_federation
from fedstill.experiment.compare import RESULTS_FILE
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import Network
from fedstill.experiment.run_folder import (
    CONFIG_FILE,
    check_files,
    own_files,
    read_contract,
    read_description,
    unlabeled_place,
)
from fedstill.loop.calibrate import Calibration, at_temperature
from fedstill.loop.checkpoint import WEIGHTS_FILE
from fedstill.loop.privacy_plan import STATEMENT_FILE
from fedstill.methods.lookup import label
from fedstill.prediction.answers import ANSWERS, Measured, Opened, Samples, last_round
from fedstill.prediction.files import write_predictions


@dataclass(frozen=True)
class Predictions:
    """A class for every sample that could be read, in the order they were read."""

    ids: tuple[str, ...]
    labels: tuple[str, ...]  # the most probable class
    probabilities: Tensor  # (M, K) float32, calibrated where that was possible
    confidence: Tensor  # (M,) of the label
    confidence_raw: Tensor  # (M,) before calibration
    classes: tuple[str, ...]
    kept: Tensor | None  # (M,) only from targets: the rows that the server learnt from
    source: str  # "last", "best" or "targets"
    why: str  # who answered, in words
    what: str  # the data that were labeled, in words
    method: str
    round: int | None  # of the model, or of the targets; None when the folder does not hold it
    skipped: tuple[str, ...]  # names of samples that could not be read
    notes: tuple[str, ...]
    calibration: Calibration
    measured: Measured | None

    def __repr__(self) -> str:
        """Without the rows, which would fill a notebook's page."""
        counts = ", ".join(f"{name} {count:,}" for name, count in Counter(self.labels).most_common(5))
        more = ", ..." if len(set(self.labels)) > 5 else ""
        return f"Predictions({len(self.ids):,} rows by {self.why}: {counts}{more})"

    def summary(self) -> dict[str, Any]:
        """Return the content of predictions.json: who answered, counts, temperature and calibration error."""
        chosen, measured, counts = self.calibration, self.measured, Counter(self.labels)
        before, after = (None, None) if measured is None else (measured.before, measured.after)
        return {
            "data": self.what,
            "count": len(self.ids),
            "skipped": list(self.skipped),
            "from": self.source,
            "why": self.why,
            "method": self.method,
            "round": self.round,
            "notes": list(self.notes),
            "labels": {name: counts.get(name, 0) for name in self.classes},
            "kept": None if self.kept is None else int(self.kept.sum()),
            "confidence": float(self.confidence.double().mean()),
            "confidence_raw": float(self.confidence_raw.double().mean()),
            "calibrated": chosen.temperature is not None,
            "calibration": chosen.why,
            "temperature": chosen.temperature,
            "fitted_on": chosen.fitted_on,
            "fitted_rows": chosen.rows,
            "measured_on": None if measured is None else ", ".join(filter(None, (measured.on, measured.how))),
            "accuracy": None if before is None else before.accuracy,
            "ece_before": None if before is None else before.ece,
            "ece_after": None if after is None else after.ece,
            "reliability_before": None if before is None else asdict(before),
            "reliability_after": None if after is None else asdict(after),
        }


def predict(
    run_dir: str | Path,
    inputs: Any = None,
    *,
    from_: str = "last",
    out: str | Path | None = None,
    model: Network | None = None,
) -> Predictions:
    """Label the unlabeled set of a run, or new data, and return a class and a confidence for each sample.

    inputs: the path of a folder of images or of a table; a DataFrame, an array or a list of texts; None is the run's
        own unlabeled set.
    from_: "last" or "best": that model answers; "targets": the server's last targets for the run's own unlabeled set.
    out: a folder for predictions.csv, .parquet, .json and reliability.png; None writes nothing.
    model: the network of a run that was started with a network in Python.
    """
    _check_arguments(inputs, from_, out)
    folder = Path(run_dir)
    run = open_run(folder, model)
    experiment, data = run.experiment, run.contract.data
    place = unlabeled_place(experiment)
    for name, samples_at in {"INPUTS": inputs, "data.unlabeled": place}.items():
        if out is not None and isinstance(samples_at, str | Path) and _would_be_read(Path(out), Path(samples_at)):
            raise FedstillError(f"--out: '{out}' lies in {name} '{samples_at}': give a folder outside of the data")
    samples = own_samples(run) if inputs is None else new_samples(inputs, Source(data, data))
    answer = ANSWERS[from_](run, samples)
    probabilities = at_temperature(answer.scores, answer.calibration.temperature or 1.0).float()
    best = answer.scores.argmax(dim=1, keepdim=True)  # of float64: rounding makes no ties
    classes = data.classes
    predictions = Predictions(
        ids=samples.ids,
        labels=tuple(classes[number] for number in best[:, 0].tolist()),
        probabilities=probabilities,
        confidence=probabilities.gather(1, best)[:, 0],
        confidence_raw=at_temperature(answer.scores, 1.0).float().gather(1, best)[:, 0],
        classes=classes,
        kept=answer.kept,
        source=from_,
        why=answer.why,
        what=samples.what,
        method=label(experiment.method.name),
        round=answer.round,
        skipped=samples.skipped,
        notes=_notes(folder, experiment),
        calibration=answer.calibration,
        measured=answer.measured,
    )
    if out is not None:
        title = f"{data.name}: {from_} of {predictions.method}"
        write_predictions(predictions, Path(out), title=title)
    return predictions


def _check_arguments(inputs: Any, from_: str, out: str | Path | None) -> None:
    if from_ not in ANSWERS:
        raise FedstillError(f"--from '{from_}' is unknown: {suggest(from_, ANSWERS)}")
    if from_ == "targets" and inputs is not None:
        raise FedstillError("--from targets: they exist for the run's own unlabeled set only; use --from last")
    if isinstance(inputs, str | Path) and not Path(inputs).exists():  # otherwise the Hugging Face hub would be asked
        raise FedstillError(f"INPUTS: no such file or folder: '{inputs}'")
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise FedstillError(f"--out: '{out}' is a file: give a folder")


def _would_be_read(out: Path, data: Path) -> bool:
    """Return whether the next call would read files in `out` as samples; readers skip folders that hold a run."""
    inside = data.is_dir() and out.resolve().is_relative_to(data.resolve())
    return inside and not (out / CONFIG_FILE).exists()


def open_run(folder: Path, model: Network | None = None) -> Opened:
    """Return the run in a folder that holds a trained model, with the experiment and the data that it began with."""
    read_description(folder)
    if (folder / RESULTS_FILE).exists():
        runs = sorted(path.parent.parent for path in folder.glob(f"*/seed-*/last/{WEIGHTS_FILE}"))
        example = f", e.g. {runs[0]}" if runs else ""
        raise FedstillError(f"'{folder}' holds a comparison, not one run: give the folder of one of its runs{example}")
    if not (folder / "last" / WEIGHTS_FILE).is_file():
        raise FedstillError(f"'{folder}' holds no trained model yet: finish the run with `fedstill resume {folder}`")
    agreed = read_contract(folder)
    network = agreed.experiment.model  # no other code of the experiment has a part in an answer
    check_files(agreed.files, own_files(network.name, *network.options.get("prototypes", ())))
    return Opened(folder, agreed.experiment, agreed.data, agreed.seal, model)


def own_samples(run: Opened) -> Samples:
    """Return the run's unlabeled set as it was; rows without names get their number."""
    choice = run.experiment.data.unlabeled
    if "unlabeled" not in run.contract.rows:
        raise FedstillError(
            "this run has no unlabeled set (data.unlabeled = 'none'): name the data to label, "
            "`fedstill predict RUN INPUTS` with a folder of images or a table"
        )
    then, place = run.contract, unlabeled_place(run.experiment)
    if place is None:
        federation = build_federation(run.experiment)
        now, x = contract_of(federation), federation.unlabeled
        assert x is not None
        ids = federation.unlabeled_ids or tuple(map(str, range(len(x))))
        unlabeled = Unlabeled(x, ids, federation.unlabeled_truth, federation.unlabeled_skipped)
    else:  # a place of its own, which is read without the training data
        limit = run.experiment.data.unlabeled_limit
        _, read = split_unlabeled(Source(then.data, then.data), place, seed=run.experiment.seed, limit=limit)
        assert read is not None
        unlabeled = read
        now = replace(then, rows={**then.rows, "unlabeled": rows_of(read.x)})
    if now.rows["unlabeled"] != then.rows["unlabeled"] or any(task_differences(then.data, now.data)):
        raise FedstillError(
            f"the run's unlabeled set (data.unlabeled = {choice!r}) is not as it was: "
            f"{'; '.join(differences(then, now))}: restore the data, or name the data to label, "
            "`fedstill predict RUN INPUTS`"
        )
    what = f"the run's unlabeled set (data.unlabeled = {choice!r})"
    return Samples(unlabeled.x, unlabeled.ids, unlabeled.truth, what, unlabeled.skipped, place or "")


def new_samples(inputs: Any, source: Source) -> Samples:
    """Read a folder of images, a table or texts into the task's storage form, from a path or from Python."""
    if not isinstance(inputs, str | Path):
        from fedstill.data.given import read_given

        what, given = f"the given {type(inputs).__name__}", read_given(inputs, source)
        return Samples(given.x, given.ids, None, what, given.skipped, what)
    place = str(Path(inputs).resolve())  # a full path, because a bare name may mean an embedded set
    try:
        samples = read_unlabeled(place, source)
    except FedstillError as error:
        raise FedstillError(str(error).replace("data.unlabeled:", "INPUTS:", 1)) from error
    return Samples(samples.x, samples.ids, samples.truth, f"'{inputs}'", samples.skipped, place)


def _notes(folder: Path, experiment: Experiment) -> tuple[str, ...]:
    """Return a note where the run did not play all rounds: how to go on, or the privacy budget that ended it."""
    done = last_round(folder)
    if done is None or done >= experiment.rounds:
        return ()
    try:
        statement = json.loads((folder / STATEMENT_FILE).read_text(encoding="utf-8"))
        ended = statement["stopped"] if statement["rounds"] == done else ""
    except (OSError, ValueError, KeyError, TypeError):
        ended = ""
    note = f"the model is that of round {done} of {experiment.rounds}"
    return (f"{note}, the last one: {ended}" if ended else f"{note}; go on with: fedstill resume {folder}",)
