"""Who labels: a run's last model or the server's targets, and how far the confidence of each can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedstill.calibrate import (
    Calibration,
    Reliability,
    at_temperature,
    calibrate,
    cross_fitted,
    log_scores,
    reliability,
)
from fedstill.checkpoint import load_weights
from fedstill.config import Experiment
from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation, Targets
from fedstill.engine import build_engine
from fedstill.experiment import build_network
from fedstill.expression import label
from fedstill.resume import TARGETS_FILE

ANSWERS = ("auto", "model", "targets")
LEARNT = 0.9  # of the rows; above it at most a tenth of the labels, and so of the accuracy, hangs on the choice
Scores = Callable[[Tensor], Tensor]  # samples in storage form -> logits (n, K) in float64


class Samples(NamedTuple):
    """What is to be labeled."""

    x: Tensor
    ids: tuple[str, ...]
    truth: Tensor | None  # (M,); below 0 where it is not known
    what: str  # in words
    own: bool  # the run's unlabeled set
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """Confidence against truth, on rows that the temperature was not fitted on."""

    on: str
    before: Reliability
    after: Reliability | None = None  # None: not calibrated
    how: str = ""  # why these rows may judge the temperature


class Answer(NamedTuple):
    """What a labeler says about the samples."""

    source: str  # "model" or "targets"
    scores: Tensor  # (M, K) float64, before calibration
    calibration: Calibration
    measured: Measured | None
    why: str = ""  # it was chosen
    kept: Tensor | None = None  # (M,) of targets: the rows that the server learnt from


def label_samples(folder: Path, experiment: Experiment, federation: Federation, samples: Samples, asked: str) -> Answer:
    """The answer that was asked for, or the better founded one, with a sentence that says why.

    "auto" takes the model, whose confidence can be calibrated, unless it names another class than the server's targets
    for more than a tenth of the rows: then it has not learnt them, and they were the better labels in nearly all of our
    runs (docs/predict.md).
    """
    method = label(experiment.algorithm.name)
    targets = find_targets(folder, method, len(samples.x), asked) if samples.own and asked != "model" else None
    if asked == "targets" and targets is not None:
        return _targets_answer(targets, samples, "as asked for")
    model = _model_answer(folder, experiment, federation, samples)
    if asked == "model":
        return model._replace(why="the run's last model, as asked for")
    if not samples.own:
        return model._replace(why="the run's last model: the server's targets cover the run's own unlabeled set only")
    if targets is None:
        return model._replace(why=f"the run's last model: {method} left no targets for these rows")
    same = float((model.scores.argmax(dim=1) == targets.probabilities.argmax(dim=1)).double().mean())
    if same < LEARNT:
        other = f"it names another class for {100 * (1 - same):.1f} % of the rows"
        return _targets_answer(targets, samples, f"the last model has not learnt them, {other}")
    why = f"it has learnt the server's targets, with the same class for {100 * same:.1f} % of the rows"
    return model._replace(why=f"the run's last model: {why}")


def find_targets(folder: Path, method: str, rows: int, asked: str) -> Targets | None:
    """What the server's last step believed about its unlabeled data; None when that is not known and not asked for."""
    try:
        return load_targets(folder / TARGETS_FILE, rows)
    except FileNotFoundError:
        problem = f"'{folder}' holds none: {method} forms none, or the run has not ended (`fedstill resume {folder}`)"
    except (safetensors.SafetensorError, TypeError) as error:
        problem = f"{folder / TARGETS_FILE} cannot be read ({error})"
    except ValueError as error:
        problem = str(error)
    if asked == "targets":
        raise FedstillError(f"--from targets: {problem}; use --from model")
    return None


def load_targets(path: Path, rows: int) -> Targets:
    targets = Targets(**safetensors.torch.load(path.read_bytes()))
    count = len(targets.probabilities)
    if count != rows:
        raise ValueError(f"{path} has {count} rows, the unlabeled set {rows}: the data have changed since the run")
    return targets


def _targets_answer(targets: Targets, samples: Samples, why: str) -> Answer:
    scores, kept = log_scores(targets.probabilities), int(targets.kept.sum())
    some = f"; the server learnt from {kept} of these rows (column kept)" if kept < len(targets.kept) else ""
    return Answer(
        "targets",
        scores,
        Calibration(None, "not calibrated: there are targets for the predicted rows only, none for rows with labels"),
        _measure_known(scores, samples, None),
        f"the server's targets of its last step: {why}{some}",
        targets.kept,
    )


def _model_answer(folder: Path, experiment: Experiment, federation: Federation, samples: Samples) -> Answer:
    ask = model_scores(folder, experiment, federation)
    scores = ask(samples.x)
    labeled, where = calibration_set(experiment, federation, samples)
    if labeled is None:
        return Answer(
            "model", scores, Calibration(None, f"not calibrated: {where}"), _measure_known(scores, samples, None)
        )
    known, y = ask(labeled[0]), labeled[1].cpu()
    calibration = calibrate(known, y, where)
    measured = _measure_known(scores, samples, calibration.temperature)
    if measured is None:
        measured = Measured(where, reliability(at_temperature(known, 1.0), y))
        if calibration.temperature is not None:
            after = reliability(cross_fitted(known, y, seed=experiment.seed), y)
            measured = Measured(where, measured.before, after, "each half of it at the temperature of the other")
    return Answer("model", scores, calibration, measured)


def model_scores(folder: Path, experiment: Experiment, federation: Federation) -> Scores:
    """The run's last model as a function; on the CPU where the run's GPU is not at hand."""
    network, options = build_network(experiment, federation), experiment.engine
    device = options.device if torch.cuda.is_available() or options.device == "auto" else "cpu"
    engine = build_engine(
        options.name, device, model=network, federation=federation, chunk=options.chunk, precision=options.precision
    )
    weights = load_weights(folder / "last", engine.device)
    shapes = [{name: leaf.shape for name, leaf in one.params.items()} for one in (weights, network.init(0))]
    if shapes[0] != shapes[1]:
        raise FedstillError(
            f"'{folder / 'last'}' does not fit {experiment.model.name} on {federation.train.name}: "
            "the data have changed since the run"
        )
    return lambda x: engine.outputs(weights, x, features=False).logits.double().cpu()


def calibration_set(
    experiment: Experiment, federation: Federation, samples: Samples
) -> tuple[tuple[Tensor, Tensor] | None, str]:
    """Labeled rows that are not what is predicted, and their name; or None and why there are none."""
    if federation.validation is not None:
        return federation.validation, "the validation set"
    if samples.own and experiment.data.unlabeled == "test":
        return None, "the rows are the test set itself, and the run has no validation set (data.validation = 0)"
    return (federation.test.x, federation.test.y), "the test set"


def _measure_known(scores: Tensor, samples: Samples, temperature: float | None) -> Measured | None:
    """On the predicted rows themselves, where somebody knows the truth about them."""
    if samples.truth is None or not bool((samples.truth >= 0).any()):
        return None
    rows = (samples.truth >= 0).nonzero().flatten()
    y, some, on = samples.truth[rows].cpu(), scores[rows], "the predicted rows, whose true labels are known"
    before = reliability(at_temperature(some, 1.0), y)
    if temperature is None:
        return Measured(on, before)
    return Measured(on, before, reliability(at_temperature(some, temperature), y), "their labels had no part in it")
