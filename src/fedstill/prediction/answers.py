"""Answers about unlabeled data, by a run's last model or the server's targets, and how well each is calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation
from fedstill.engine import build_engine
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import build_network
from fedstill.experiment.run_folder import is_local
from fedstill.loop.checkpoint import list_checkpoints, load_weights
from fedstill.loop.resume import TARGETS_FILE, rows_digest
from fedstill.prediction.calibrate import Calibration, Reliability, at_temperature, calibrate, log_scores, reliability


class Samples(NamedTuple):
    """Rows to be labeled."""

    x: Tensor
    ids: tuple[str, ...]
    truth: Tensor | None  # (M,); below 0 where it is not known
    what: str  # the data in words
    skipped: tuple[str, ...] = ()
    place: str = ""  # file, folder or dataset that they were read from; empty: rows of the run's own data


class Measured(NamedTuple):
    """How well confidences agree with true labels, before and after calibration."""

    on: str  # which rows
    before: Reliability
    after: Reliability | None = None  # None: not calibrated
    how: str = ""  # how far these rows may judge the temperature


class Answer(NamedTuple):
    """Scores for the samples, and how far they can be trusted."""

    scores: Tensor  # (M, K) float64, before calibration
    calibration: Calibration
    measured: Measured | None
    why: str  # who answered, in words
    kept: Tensor | None = None  # (M,) of targets: the rows that the server learnt from
    round: int | None = None  # None when the folder does not hold it


def last_round(folder: Path) -> int | None:
    """Return the round of the model in last/, which is the round of the newest checkpoint; None without one."""
    return next((number for number, _ in list_checkpoints(folder / "checkpoints")), None)


def targets_answer(folder: Path, experiment: Experiment, federation: Federation, samples: Samples) -> Answer:
    """Answer with the server's last targets for its unlabeled data; refuse targets for other rows."""
    path, instead = folder / TARGETS_FILE, "use --from model"
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            probabilities, kept, about = file.get_tensor("probabilities"), file.get_tensor("kept"), file.metadata()
        number, rows = int(about["round"]), about["rows"]
    except FileNotFoundError:
        raise FedstillError(
            f"--from targets: '{folder}' has no {TARGETS_FILE}, because its method forms no targets or has formed none "
            f"yet; {instead}"
        ) from None
    except (safetensors.SafetensorError, KeyError, TypeError, OSError) as error:
        raise FedstillError(f"--from targets: {path} cannot be read ({error}); {instead}") from error
    if len(kept) != len(samples.x) or rows != rows_digest(samples.x, federation.unlabeled_ids):
        raise FedstillError(
            f"--from targets: {path} is about other rows: the unlabeled data have changed since the run; {instead}"
        )
    scores, learnt = log_scores(probabilities), int(kept.sum())
    part = "" if learnt == len(kept) else f"; the server learnt from {learnt} of these rows (column kept)"
    return Answer(
        scores,
        Calibration(None, "not calibrated: there are targets for the predicted rows only, none for rows with labels"),
        _measure_known(scores, samples, None),
        f"the server's targets of round {number}{part}",
        kept,
        number,
    )


def model_answer(folder: Path, experiment: Experiment, federation: Federation, samples: Samples) -> Answer:
    """Answer with the run's last model, at a temperature that labeled rows choose; on the CPU where there is no GPU."""
    network, options = build_network(experiment, federation), experiment.engine
    device = options.device if torch.cuda.is_available() or options.device == "auto" else "cpu"
    precision = "auto" if options.precision == "bf16" else options.precision  # three digits are little for confidences
    engine = build_engine(
        options.name, device, model=network, federation=federation, chunk=options.chunk, precision=precision
    )
    weights = load_weights(folder / "last", engine.device)
    stored, wanted = ({name: leaf.shape for name, leaf in x.params.items()} for x in (weights, network.init(0)))
    if stored != wanted:
        raise FedstillError(
            f"'{folder / 'last'}' does not fit {experiment.model.name} on {federation.train.name}: "
            "the data have changed since the run"
        )

    def ask(x: Tensor) -> Tensor:
        return engine.outputs(weights, x, features=False).logits.double().cpu()

    scores = ask(samples.x)
    labeled, where = calibration_set(experiment, federation, samples)
    if labeled is None:
        calibration = Calibration(None, f"not calibrated: {where}")
        measured = _measure_known(scores, samples, None)
    else:
        known, y = ask(labeled[0]), labeled[1].cpu()
        calibration = calibrate(known, y, where)
        measured = _measure_known(scores, samples, calibration.temperature)
        if measured is None:
            how = "the rows that chose the temperature, so the error after it is a little too small"
            measured = _measure(known, y, calibration.temperature, where, how)
    return Answer(scores, calibration, measured, "the run's last model", round=last_round(folder))


ANSWERS = {"model": model_answer, "targets": targets_answer}


def calibration_set(
    experiment: Experiment, federation: Federation, samples: Samples
) -> tuple[tuple[Tensor, Tensor] | None, str]:
    """Return labeled rows that are not among the predicted ones, and their name; or None and why there are none."""
    data, among = experiment.data, f"may be among the predicted ones, which are read from '{samples.place}' too"
    if federation.validation is not None and not shares_rows(samples.place, data.source):
        return federation.validation, "the validation set"
    if not samples.place and data.unlabeled == "test":
        return None, "the rows are the test set itself, and the run has no validation set (data.validation = 0)"
    if shares_rows(samples.place, data.source if data.test is None else data.test):
        return None, f"the labeled rows {among}"
    return (federation.test.x, federation.test.y), "the test set"


def shares_rows(place: str, other: str) -> bool:
    """Return whether two places may hold the same samples: they are equal, or one lies in the other."""
    if not place or not (is_local(place) and is_local(other)):
        return bool(place) and place == other
    first, second = Path(place).resolve(), Path(other).resolve()
    return first.is_relative_to(second) or second.is_relative_to(first)


def _measure_known(scores: Tensor, samples: Samples, temperature: float | None) -> Measured | None:
    """Measure the calibration on the predicted rows whose true labels are known; None if there are none."""
    if samples.truth is None or not bool((samples.truth >= 0).any()):
        return None
    rows = (samples.truth >= 0).nonzero().flatten()
    on, how = "the predicted rows, whose true labels are known", "their labels had no part in it"
    return _measure(scores[rows], samples.truth[rows].cpu(), temperature, on, how)


def _measure(scores: Tensor, y: Tensor, temperature: float | None, on: str, how: str) -> Measured:
    before = reliability(at_temperature(scores, 1.0), y)
    if temperature is None:
        return Measured(on, before)
    return Measured(on, before, reliability(at_temperature(scores, temperature), y), how)
