"""Label unlabeled data with a finished run: a class, its confidence, and how far the confidence can be trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Dataset
from fedstill.data import Source
from fedstill.data.contract import contract_of, differences, rows_of, task_differences
from fedstill.data.load import load as load_data
from fedstill.data.source import Unlabeled
from fedstill.data.split import split_unlabeled
from fedstill.experiment.build import build_federation
from fedstill.experiment.bundle import Trained, is_bundle, read_bundle
from fedstill.experiment.code_names import code_names
from fedstill.experiment.compare import RESULTS_FILE
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import Network
from fedstill.experiment.run_folder import CONFIG_FILE, check_files, read_contract, read_description, unlabeled_place
from fedstill.loop.calibrate import Calibration, at_temperature, reliability_of
from fedstill.loop.checkpoint import WEIGHTS_FILE
from fedstill.loop.privacy_plan import STATEMENT_FILE
from fedstill.methods.lookup import label
from fedstill.methods.own_code import own_files
from fedstill.prediction.answers import (
    MODELS,
    TARGETS,
    Answer,
    Measured,
    Opened,
    Samples,
    last_round,
    model_answer,
    targets_answer,
    trained_model,
)
from fedstill.prediction.files import Part, write_summary, writing_tables
from fedstill.prediction.stream import new_samples
from fedstill.storage.files import read_json

NO_ANSWER = "the model's answer is no finite number"


@dataclass(frozen=True)
class Outcome:
    """Who labeled what, how many rows got each label, and how far the confidence can be trusted."""

    count: int  # rows that were labeled
    label_counts: Mapping[str, int]  # by class
    mean_confidence: float
    mean_confidence_raw: float  # before calibration
    learnt: int | None  # only from targets: how many of the rows the server learnt from
    classes: tuple[str, ...]
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
        counts = ", ".join(f"{name} {count:,}" for name, count in Counter(self.label_counts).most_common(5) if count)
        more = ", ..." if sum(map(bool, self.label_counts.values())) > 5 else ""
        return f"{type(self).__name__}({self.count:,} rows by {self.why}: {counts}{more})"

    def summary(self) -> dict[str, Any]:
        """Return the content of predictions.json: who answered, counts, temperature and calibration error."""
        chosen, measured = self.calibration, self.measured
        before, after = (None, None) if measured is None else (measured.before, measured.after)
        return {
            "data": self.what,
            "count": self.count,
            "skipped": list(self.skipped),
            "from": self.source,
            "why": self.why,
            "method": self.method,
            "round": self.round,
            "notes": list(self.notes),
            "labels": dict(self.label_counts),
            "kept": self.learnt,
            "confidence": self.mean_confidence,
            "confidence_raw": self.mean_confidence_raw,
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


@dataclass(frozen=True, repr=False)
class Predictions(Outcome):
    """A class for every sample that could be read, in the order they were read."""

    ids: tuple[str, ...]
    labels: tuple[str, ...]  # the most probable class
    probabilities: Tensor  # (M, K) float32, calibrated where that was possible
    confidence: Tensor  # (M,) of the label
    confidence_raw: Tensor  # (M,) before calibration
    kept: Tensor | None  # (M,) only from targets: the rows that the server learnt from


def predict(
    run_dir: str | Path,
    inputs: Any = None,
    *,
    from_: str | None = None,
    out: str | Path | None = None,
    model: Network | None = None,
) -> Predictions:
    """Label the unlabeled set of a run, or new data, and return a class and a confidence for each sample.

    run_dir: the folder of a run, or a bundle that `fedstill export` wrote.
    inputs: the path of a folder of images or of a table; a DataFrame, an array or a list of texts; None is the run's
        own unlabeled set.
    from_: "last" (the default) or "best": that model answers; "targets": the server's last targets for the run's own
    unlabeled set. A bundle holds one model.
    out: a folder for predictions.csv, .parquet, .json and reliability.png; None writes nothing.
    model: the network of a run that was started with a network in Python.
    """
    return _collected(partial(_label, _asked(run_dir, inputs, from_, out, model), out))


def predict_to_files(run_dir: str | Path, inputs: Any = None, *, from_: str | None = None, out: str | Path) -> Outcome:
    """Do as `predict`, but keep no row in memory: the rows are in the files of the folder `out`."""
    return _label(_asked(run_dir, inputs, from_, out), out, lambda part: None)


class Predictor:
    """A trained model that labels new data without the training data and without the folder of its run."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def __repr__(self) -> str:
        about = self.trained
        return f"Predictor({about.which} model of {about.method}, {len(self.classes)} classes)"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.trained.contract.data.classes

    @property
    def card(self) -> str:
        """The model card, in Markdown."""
        return self.trained.card

    def predict(self, inputs: Any, *, out: str | Path | None = None) -> Predictions:
        """Label a file or folder, a DataFrame, an array or a list of texts, as the function `predict` does."""
        _check_places(inputs, out)
        return _collected(partial(_label, _new_data(self.trained, inputs), out))


def load(source: str | Path, *arguments: Any, **options: Any) -> Any:
    """Return the Predictor in a bundle (a file FILE.safetensors), or else the data that `fedstill.data.load` reads."""
    if is_bundle(source):
        return Predictor(read_bundle(Path(source)))
    return load_data(source, *arguments, **options)


class _Work(NamedTuple):
    """Samples to label, and everything that their labels follow from."""

    samples: Iterable[Samples]
    answer: Answer
    data: Dataset
    data_name: str
    source: str
    method: str
    notes: Sequence[str]


def _asked(
    run_dir: str | Path, inputs: Any, from_: str | None, out: str | Path | None, model: Network | None = None
) -> _Work:
    if from_ is not None and from_ not in (*MODELS, TARGETS):
        raise FedstillError(f"--from '{from_}' is unknown: {suggest(from_, (*MODELS, TARGETS))}")
    if from_ == TARGETS and inputs is not None:
        raise FedstillError("--from targets: they exist for the run's own unlabeled set only; use --from last")
    _check_places(inputs, out)
    if is_bundle(run_dir):
        return _from_bundle(read_bundle(Path(run_dir)), inputs, from_)
    run = open_run(Path(run_dir), model)
    unlabeled, place = run.experiment.data.unlabeled, unlabeled_place(run.experiment)
    if out is not None and place is not None and _would_be_read(Path(out), Path(place)):
        raise FedstillError(f"--out: '{out}' lies in data.unlabeled '{place}': give a folder outside of the data")
    if from_ == TARGETS:
        samples = own_samples(run)
        answer, method = targets_answer(run, samples), label(run.experiment.method.name)
        notes = _notes(run.folder, run.experiment)
        return _Work([samples], answer, run.contract.data, _unlabeled_words(unlabeled), TARGETS, method, notes)
    trained = trained_model(run, from_ or "last")
    notes = _notes(run.folder, run.experiment)
    trained = replace(trained, notes=notes)
    if inputs is not None:
        return _new_data(trained, inputs, model)
    answer, data_name = model_answer(trained, place or "", model), _unlabeled_words(unlabeled)
    return _Work([own_samples(run)], answer, run.contract.data, data_name, trained.which, trained.method, notes)


def _unlabeled_words(choice: str | int) -> str:
    return f"the run's unlabeled set (data.unlabeled = {choice!r})"


def _from_bundle(trained: Trained, inputs: Any, from_: str | None) -> _Work:
    if inputs is None:
        raise FedstillError("a bundle holds no data: name the data to label, `fedstill predict BUNDLE INPUTS`")
    if from_ not in (None, trained.which):
        raise FedstillError(
            f"--from {from_}: this bundle holds the {trained.which} model; write another one with "
            f"`fedstill export RUN --from {from_}`"
        )
    return _new_data(trained, inputs)


def _new_data(trained: Trained, inputs: Any, model: Network | None = None) -> _Work:
    in_file = isinstance(inputs, str | Path)
    name = f"'{inputs}'" if in_file else f"the given {type(inputs).__name__}"
    answer, data = model_answer(trained, str(Path(inputs).resolve()) if in_file else name, model), trained.contract.data
    return _Work(new_samples(inputs, data), answer, data, name, trained.which, trained.method, trained.notes)


def _collected(label_rows: Callable[[Callable[[Part], None]], Outcome]) -> Predictions:
    """Label rows, and return them all."""
    parts: list[Part] = []
    outcome = label_rows(parts.append)
    ids, labels = (
        tuple(chain.from_iterable(column)) for column in zip(*((p.ids, p.labels) for p in parts), strict=True)
    )
    probabilities, sure, raw = (torch.cat(column) for column in zip(*(part[2:5] for part in parts), strict=True))
    return Predictions(**vars(outcome), **Part(ids, labels, probabilities, sure, raw, parts[0].kept)._asdict())


def _label(work: _Work, out: str | Path | None, take: Callable[[Part], None]) -> Outcome:
    """Label samples piece by piece, hand every piece to `take` and to the files in `out`, and return the counts."""
    answer, classes, skipped, counts = work.answer, work.data.classes, list[str](), Counter[str]()
    temperature, sums, checked = answer.calibration.temperature, np.zeros(2), list[Tensor]()
    pieces = iter(work.samples)
    first = next(pieces)  # inputs that cannot be read leave the files of an earlier call
    with nullcontext(take) if out is None else writing_tables(Path(out), classes) as write:
        for samples in chain([first], pieces):
            skipped += samples.skipped
            if not samples.ids:
                continue
            scores = answer.score(samples)
            if not (known := scores.isfinite().all(dim=1)).all():  # e.g. of a cell that is larger than all others
                skipped += [
                    f"{name} ({NO_ANSWER})" for name, ok in zip(samples.ids, known.tolist(), strict=True) if not ok
                ]
                samples, scores = _taken(samples, known), scores[known]
                if not samples.ids:
                    continue
            best = scores.argmax(dim=1, keepdim=True)  # of float64: rounding makes no ties
            raw, calibrated = (at_temperature(scores, t).gather(1, best)[:, 0] for t in (1.0, temperature or 1.0))
            part = Part(
                samples.ids,
                tuple(classes[number] for number in best[:, 0].tolist()),
                at_temperature(scores, temperature or 1.0).float(),
                calibrated.float(),
                raw.float(),
                answer.kept,
            )
            write(part)
            if write is not take:
                take(part)
            counts.update(part.labels)
            sums += [part.confidence.double().sum().item(), part.confidence_raw.double().sum().item()]
            if samples.truth is not None:
                rows = (samples.truth >= 0).nonzero().flatten()
                right = (best[rows, 0] == samples.truth[rows].cpu()).double()
                checked.append(torch.stack([raw[rows], calibrated[rows], right]))
        if not (count := counts.total()):
            raise FedstillError(f"{work.data_name}: no row has an answer: {skipped[0]}")
        outcome = Outcome(
            count=count,
            label_counts={name: counts.get(name, 0) for name in classes},
            mean_confidence=float(sums[0] / count),
            mean_confidence_raw=float(sums[1] / count),
            learnt=None if answer.kept is None else int(answer.kept.sum()),
            classes=classes,
            source=work.source,
            why=answer.why,
            what=work.data_name,
            method=work.method,
            round=answer.round,
            skipped=tuple(skipped),
            notes=tuple(work.notes),
            calibration=answer.calibration,
            measured=_measured(checked, temperature) or answer.measured,
        )
    if out is not None:
        write_summary(outcome, Path(out), title=f"{work.data.name}: {work.source} of {work.method}")
    return outcome


def _taken(samples: Samples, rows: Tensor) -> Samples:
    """Return the samples whose mark in `rows` is true."""
    ids = tuple(name for name, wanted in zip(samples.ids, rows.tolist(), strict=True) if wanted)
    truth = None if samples.truth is None else samples.truth[rows.to(samples.truth.device)]
    return samples._replace(x=samples.x[rows.to(samples.x.device)], ids=ids, truth=truth)


def _measured(checked: list[Tensor], temperature: float | None) -> Measured | None:
    """Measure the calibration on the predicted rows whose true labels are known; None if there are none."""
    raw, calibrated, right = torch.cat(checked, dim=1) if checked else torch.zeros(3, 0)
    if not len(right):
        return None
    on, how = "the predicted rows, whose true labels are known", "their labels had no part in it"
    before = reliability_of(raw, right)
    return Measured(on, before) if temperature is None else Measured(on, before, reliability_of(calibrated, right), how)


def _check_places(inputs: Any, out: str | Path | None) -> None:
    in_file = isinstance(inputs, str | Path)
    if in_file and not Path(inputs).exists():  # otherwise the Hugging Face hub would be asked
        raise FedstillError(f"INPUTS: no such file or folder: '{inputs}'")
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise FedstillError(f"--out: '{out}' is a file: give a folder")
    if out is not None and in_file and _would_be_read(Path(out), Path(inputs)):
        raise FedstillError(f"--out: '{out}' lies in INPUTS '{inputs}': give a folder outside of the data")


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
    network = agreed.experiment.model.model_dump()  # no other code of the experiment has a part in an answer
    check_files(agreed.files, own_files(code_names({"model": network})))
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
    return Samples(unlabeled.x, unlabeled.ids, unlabeled.truth, unlabeled.skipped)


def _notes(folder: Path, experiment: Experiment) -> tuple[str, ...]:
    """Return a note where the run did not play all rounds: how to go on, or the privacy budget that ended it."""
    done = last_round(folder)
    if done is None or done >= experiment.rounds:
        return ()
    try:
        statement = read_json(folder / STATEMENT_FILE)
        ended = statement["stopped"] if statement["rounds"] == done else ""
    except (OSError, ValueError, KeyError, TypeError):
        ended = ""
    note = f"the model is that of round {done} of {experiment.rounds}"
    return (f"{note}, the last one: {ended}" if ended else f"{note}; go on with: fedstill resume {folder}",)
