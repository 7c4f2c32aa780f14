"""Who labels: a run's last model or the server's targets, and how far the confidence of each can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation, Targets
from fedstill.engine import build_engine
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import build_network
from fedstill.experiment.run_folder import is_local
from fedstill.loop.checkpoint import list_checkpoints, load_weights
from fedstill.loop.resume import TARGETS_FILE, rows_digest
from fedstill.methods.lookup import label
from fedstill.prediction.calibrate import (
    Calibration,
    Reliability,
    at_temperature,
    calibrate,
    cross_fitted,
    log_scores,
    reliability,
)

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
    place: str = ""  # file, folder or dataset that they were read from; empty: rows of the run's own data


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
    round: int | None = None  # None when the folder does not tell


class Saved(NamedTuple):
    """Targets as a run left them."""

    targets: Targets
    round: int  # in which they were formed
    model_sent: bool  # the model beside them is the one that the clients get, and not only reported


def label_samples(folder: Path, experiment: Experiment, federation: Federation, samples: Samples, asked: str) -> Answer:
    """The answer that was asked for, or the better founded one, with a sentence that says why.

    "auto" takes the model, whose confidence can be calibrated, unless it names another class than the server's targets
    for more than a tenth of the rows that it was taught: then it has not learnt them, and they were the better labels
    in nearly all of our runs (docs/predict.md). Targets of another round, and those of a method that only reports its
    refined model, are no match for it.
    """
    saved, problem = None, ""
    if samples.own and asked != "model":
        saved, problem = find_targets(folder, experiment, federation)
    if asked == "targets":
        if saved is None:
            raise FedstillError(f"--from targets: {problem}; use --from model")
        return _targets_answer(saved, samples, "as asked for")
    model = _model_answer(folder, experiment, federation, samples)
    if asked == "model":
        return model._replace(why="the run's last model, as asked for")
    if not samples.own:
        targets = (folder / TARGETS_FILE).is_file()
        why = ": the server's targets cover the run's own unlabeled set only" if targets else ""
        return model._replace(why=f"the run's last model{why}")
    problem = problem if saved is None else _no_match(saved, model)
    if saved is None or problem:
        return model._replace(why=f"the run's last model, without targets: {problem}")
    kept, answers = saved.targets.kept, saved.targets.probabilities.argmax(dim=1)
    same = float((model.scores.argmax(dim=1) == answers)[kept].double().mean())
    rows = "the rows" if bool(kept.all()) else f"the {int(kept.sum())} rows that the server learnt from"
    if same < LEARNT:
        other = f"it names another class for {100 * (1 - same):.1f} % of {rows}"
        return _targets_answer(saved, samples, f"the last model has not learnt them, {other}")
    why = f"it has learnt the server's targets, with the same class for {100 * same:.1f} % of {rows}"
    return model._replace(why=f"the run's last model: {why}")


def last_round(folder: Path) -> int | None:
    """Of the model in last/, which is written with every checkpoint."""
    return next((number for number, _ in list_checkpoints(folder / "checkpoints")), None)


def _no_match(saved: Saved, model: Answer) -> str:
    """Why the targets cannot be better founded than the model; empty: they can."""
    if model.round is not None and saved.round != model.round:
        return f"they are of round {saved.round}, the model of round {model.round}"
    if not saved.model_sent:
        return "the model is refined by them and is not the one that clients get, whose models form them"
    return "" if bool(saved.targets.kept.any()) else f"the server learnt from none of them in round {saved.round}"


def find_targets(folder: Path, experiment: Experiment, federation: Federation) -> tuple[Saved | None, str]:
    """What the server last believed about its unlabeled data; or None and why that is not known."""
    assert federation.unlabeled is not None
    path = folder / TARGETS_FILE
    try:
        return load_targets(path, federation.unlabeled, federation.unlabeled_ids), ""
    except FileNotFoundError:
        return None, _why_missing(folder, experiment)
    except ValueError as error:
        return None, str(error)
    except (safetensors.SafetensorError, TypeError, OSError) as error:
        return None, f"{path} cannot be read ({error})"


def _why_missing(folder: Path, experiment: Experiment) -> str:
    method, done, log = label(experiment.method.name), last_round(folder), folder / "metrics.jsonl"
    if log.is_file() and '"pseudo_labels"' in log.read_text(encoding="utf-8"):
        return f"{TARGETS_FILE} is missing in '{folder}'"
    if done is not None and done < experiment.rounds:
        return f"{method} has formed none by round {done} of {experiment.rounds} (`fedstill resume {folder}`)"
    return f"{method} forms none"


def load_targets(path: Path, x: Tensor, ids: tuple[str, ...] | None) -> Saved:
    """Targets for just these rows."""
    with safetensors.safe_open(path, framework="pt") as file:
        targets, about = Targets(**{name: file.get_tensor(name) for name in file.keys()}), file.metadata() or {}  # noqa: SIM118
    if "rows" not in about:
        raise ValueError(f"{path} does not tell which rows it is about: it is of another version of fedstill")
    changed, count = "the data have changed since the run", len(targets.probabilities)
    if count != len(x):
        raise ValueError(f"{path} has {count} rows, the unlabeled set {len(x)}: {changed}")
    if about["rows"] != rows_digest(x, ids):
        raise ValueError(f"{path} is about other rows than those of the unlabeled set: {changed}")
    return Saved(targets, int(about["round"]), about["model_sent"] == "yes")


def _targets_answer(saved: Saved, samples: Samples, why: str) -> Answer:
    targets = saved.targets
    scores, kept = log_scores(targets.probabilities), int(targets.kept.sum())
    some = f"; the server learnt from {kept} of these rows (column kept)" if kept < len(targets.kept) else ""
    return Answer(
        "targets",
        scores,
        Calibration(None, "not calibrated: there are targets for the predicted rows only, none for rows with labels"),
        _measure_known(scores, samples, None),
        f"the server's targets of round {saved.round}: {why}{some}",
        targets.kept,
        saved.round,
    )


def _model_answer(folder: Path, experiment: Experiment, federation: Federation, samples: Samples) -> Answer:
    ask = model_scores(folder, experiment, federation)
    scores, done = ask(samples.x), last_round(folder)
    labeled, where = calibration_set(experiment, federation, samples)
    if labeled is None:
        known_rows = _measure_known(scores, samples, None)
        return Answer("model", scores, Calibration(None, f"not calibrated: {where}"), known_rows, round=done)
    known, y = ask(labeled[0]), labeled[1].cpu()
    calibration = calibrate(known, y, where)
    measured = _measure_known(scores, samples, calibration.temperature)
    if measured is None:
        measured = Measured(where, reliability(at_temperature(known, 1.0), y))
        if calibration.temperature is not None:
            after = reliability(cross_fitted(known, y, seed=experiment.seed), y)
            measured = Measured(where, measured.before, after, "each half of it at the temperature of the other")
    return Answer("model", scores, calibration, measured, round=done)


def model_scores(folder: Path, experiment: Experiment, federation: Federation) -> Scores:
    """The run's last model as a function; on the CPU where the run's GPU is not at hand."""
    network, options = build_network(experiment, federation), experiment.engine
    device = options.device if torch.cuda.is_available() or options.device == "auto" else "cpu"
    precision = "auto" if options.precision == "bf16" else options.precision  # three digits are little for confidences
    engine = build_engine(
        options.name, device, model=network, federation=federation, chunk=options.chunk, precision=precision
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
    data, among = experiment.data, f"may be among the predicted ones, which are read from '{samples.place}' too"
    if federation.validation is not None and not shares_rows(samples.place, data.source):
        return federation.validation, "the validation set"
    if samples.own and data.unlabeled == "test":
        return None, "the rows are the test set itself, and the run has no validation set (data.validation = 0)"
    if shares_rows(samples.place, data.source if data.test is None else data.test):
        return None, f"the labeled rows {among}"
    return (federation.test.x, federation.test.y), "the test set"


def shares_rows(place: str, other: str) -> bool:
    """Whether two places may hold the same samples: they are one, or one lies in the other."""
    if not place or not (is_local(place) and is_local(other)):
        return bool(place) and place == other
    first, second = Path(place).resolve(), Path(other).resolve()
    return first.is_relative_to(second) or second.is_relative_to(first)


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
