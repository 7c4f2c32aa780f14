"""Answers about unlabeled data, by a run's last model or the server's targets, and how well each is calibrated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.data.contract import Contract, federation_without_rows
from fedstill.engine import build_engine
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import Network, build_network
from fedstill.experiment.run_folder import is_local
from fedstill.loop.calibrate import (
    CALIBRATION_FILE,
    Calibration,
    Reliability,
    at_temperature,
    calibration_from,
    log_scores,
    reliability,
)
from fedstill.loop.checkpoint import WEIGHTS_FILE, content_digest, list_checkpoints, load_model, load_tensors
from fedstill.loop.resume import TARGETS_FILE, rows_digest


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
    """Return the round after which the model in last/ was written; None where the file does not say it."""
    with safetensors.safe_open(folder / "last" / WEIGHTS_FILE, framework="pt") as file:
        about = file.metadata() or {}
    return int(about["round"]) if "round" in about else None


class Opened(NamedTuple):
    """A run that can answer: its folder, the experiment and the data that it began with, and the contract's seal."""

    folder: Path
    experiment: Experiment
    contract: Contract
    seal: str  # of the contract: every file of the run carries it
    model: Network | None = None  # of a run whose network was handed over in Python


def targets_answer(run: Opened, samples: Samples) -> Answer:
    """Answer with the server's last targets for its unlabeled data; refuse targets for other rows."""
    path, instead = run.folder / TARGETS_FILE, "use --from last"
    try:
        tensors, about = load_tensors(path)
        probabilities, kept = tensors["probabilities"], tensors["kept"]
        number, rows, contract = int(about["round"]), about["rows"], about["contract"]
    except FileNotFoundError:
        raise FedstillError(
            f"--from targets: '{run.folder}' has no {TARGETS_FILE}, because its method forms no targets or has formed "
            f"none yet; {instead}"
        ) from None
    except (safetensors.SafetensorError, KeyError, TypeError, OSError) as error:
        raise FedstillError(f"--from targets: {path} cannot be read ({error}); {instead}") from error
    if contract != run.seal:
        raise FedstillError(f"--from targets: {path} was written by another run: restore it from a copy; {instead}")
    if len(kept) != len(samples.x) or rows != rows_digest(samples.x, samples.ids):
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


def model_answer(run: Opened, samples: Samples, which: str) -> Answer:
    """Answer with the run's last or best model, at the temperature that the run fitted; on the CPU without a GPU."""
    federation, options = federation_without_rows(run.contract), run.experiment.engine
    network = build_network(run.experiment, federation, run.model)
    device = options.device if torch.cuda.is_available() or options.device == "auto" else "cpu"
    precision = "auto" if options.precision == "bf16" else options.precision  # three digits are little for confidences
    name = "auto" if ":" in options.name else options.name  # an engine of one's own trains cohorts, and no more
    engine = build_engine(name, device, model=network, federation=federation, chunk=options.chunk, precision=precision)
    weights, about = load_model(run.folder / which, engine.device)
    _check_model(run, which, about)
    stored, wanted = ({name: leaf.shape for name, leaf in x.params.items()} for x in (weights, network.init(0)))
    if stored != wanted:
        raise FedstillError(
            f"'{run.folder / which}' holds no {run.experiment.model.name} of this run: restore its copy"
        )
    scores = engine.outputs(weights, samples.x, features=False).logits.double().cpu()
    calibration = stored_calibration(run, samples, which, about["calibration"])
    measured = _measure_known(scores, samples, calibration.temperature)
    if measured is None and calibration.before is not None and calibration.fitted_on is not None:
        how = "the rows that chose the temperature, so the error after it is a little too small"
        measured = Measured(calibration.fitted_on, calibration.before, calibration.after, how)
    return Answer(scores, calibration, measured, f"the run's {which} model", round=last_round(run.folder))


def _check_model(run: Opened, which: str, about: Mapping[str, str]) -> None:
    """Refuse a model that the run did not write, or that it wrote in an earlier round or as another one."""
    path, cure = f"'{run.folder / which / WEIGHTS_FILE}'", "restore it from a copy of the run"
    newest = max((number for number, _ in list_checkpoints(run.folder / "checkpoints")), default=0)
    if about.get("contract") != run.seal:
        raise FedstillError(f"{path} was not written by this run: {cure}")
    if about["model"] != which:
        raise FedstillError(f"{path} holds the run's {about['model']} model: {cure}")
    if int(about["round"]) < newest:
        raise FedstillError(
            f"{path} is the model after round {about['round']}, and the run has played {newest}: {cure}, or write it "
            f"again with `fedstill resume {run.folder}`"
        )


ANSWERS = {
    "last": lambda run, samples: model_answer(run, samples, "last"),
    "best": lambda run, samples: model_answer(run, samples, "best"),
    "targets": targets_answer,
}


def stored_calibration(run: Opened, samples: Samples, which: str, digest: str) -> Calibration:
    """Return the run's first temperature whose labeled rows cannot be among the predicted ones.

    digest: of the file that the run wrote for its models; empty while the run has not ended.
    """
    path, data = run.folder / CALIBRATION_FILE, run.experiment.data
    if not digest:
        return Calibration(None, f"not calibrated: the run has not ended; finish it with: fedstill resume {run.folder}")
    content = path.read_bytes() if path.is_file() else b""
    if content_digest(content) != digest:
        happened = "does not belong to the run's models" if content else "is gone"
        raise FedstillError(
            f"'{path}' {happened}: restore it from a copy of the run, or write it again with "
            f"`fedstill resume {run.folder}`"
        )
    calibrations = [calibration_from(tree) for tree in json.loads(content)[which]]
    why = ""
    for calibration in calibrations:
        tested = calibration.fitted_on == "the test set"
        if tested and not samples.place and data.unlabeled == "test":
            why = "the rows are the test set itself, and the run has no validation set (data.validation = 0)"
        elif shares_rows(samples.place, data.test if tested and data.test is not None else data.source):
            among = f"which are read from '{samples.place}' too"
            why = f"the labeled rows may be among the predicted ones, {among}"
        else:
            return calibration
    return Calibration(None, f"not calibrated: {why}")


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
