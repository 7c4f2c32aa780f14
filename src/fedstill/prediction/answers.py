"""Answers about unlabeled data, by a trained model or the server's targets, and how well each is calibrated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.data.contract import Contract, federation_without_rows
from fedstill.engine import build_engine
from fedstill.experiment.bundle import Trained
from fedstill.experiment.config import DataSection, Experiment
from fedstill.experiment.model import Network, build_network, check_given_network, form_differences
from fedstill.experiment.run_folder import is_local
from fedstill.loop.calibrate import CALIBRATION_FILE, Calibration, Reliability, calibration_from, log_scores
from fedstill.loop.checkpoint import WEIGHTS_FILE, content_digest, list_checkpoints, load_model, load_tensors
from fedstill.loop.resume import TARGETS_FILE, rows_digest
from fedstill.methods.lookup import label
from fedstill.storage.files import from_json, read_bytes

MODELS = ("last", "best")
TARGETS = "targets"


class Samples(NamedTuple):
    """Rows to be labeled."""

    x: Tensor
    ids: tuple[str, ...]
    truth: Tensor | None  # (M,); below 0 where it is not known
    skipped: tuple[str, ...] = ()  # rows and files that could not be read


class Measured(NamedTuple):
    """How well confidences agree with true labels, before and after calibration."""

    on: str  # which rows
    before: Reliability
    after: Reliability | None = None  # None: not calibrated
    how: str = ""  # how far these rows may judge the temperature


class Answer(NamedTuple):
    """A way to score samples, and how far the scores can be trusted."""

    score: Callable[[Samples], Tensor]  # (M, K) float64, before calibration
    calibration: Calibration
    why: str  # who answers, in words
    round: int | None  # None when the folder does not hold it
    measured: Measured | None = None  # on other rows, for predicted rows whose truth nobody knows
    kept: Tensor | None = None  # (M,) of targets: the rows that the server learnt from


def last_round(folder: Path) -> int | None:
    """Return the round after which the model in last/ was written; None where the file does not say it."""
    path = folder / "last" / WEIGHTS_FILE
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
        return int(about["round"]) if "round" in about else None
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise FedstillError(f"'{path}' cannot be read ({error}): restore it from a copy of the run") from error


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
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise FedstillError(f"--from targets: {path} cannot be read ({error}); {instead}") from error
    form = (kept.numel(), len(run.contract.data.classes))
    kinds = (probabilities.is_floating_point(), kept.dtype == torch.bool)
    if probabilities.shape != form or kept.shape != form[:1] or not all(kinds):
        raise FedstillError(f"--from targets: {path} holds no targets for this run's classes; {instead}")
    if contract != run.seal:
        raise FedstillError(f"--from targets: {path} was written by another run: restore it from a copy; {instead}")
    if len(kept) != len(samples.x) or rows != rows_digest(samples.x, samples.ids):
        raise FedstillError(
            f"--from targets: {path} is about other rows: the unlabeled data have changed since the run; {instead}"
        )
    learnt = int(kept.sum())
    part = "" if learnt == len(kept) else f"; the server learnt from {learnt} of these rows (column kept)"
    return Answer(
        lambda _: log_scores(probabilities),
        Calibration(None, "not calibrated: there are targets for the predicted rows only, none for rows with labels"),
        f"the server's targets of round {number}{part}",
        number,
        kept=kept,
    )


def trained_model(run: Opened, which: str) -> Trained:
    """Return the run's last or best model with the temperatures that the run fitted for it."""
    weights, about = load_model(run.folder / which)
    _check_model(run, which, about)
    return Trained(
        run.experiment,
        label(run.experiment.method.name),
        run.contract,
        weights,
        which,
        stored_calibrations(run, which, about["calibration"]),
        int(about["round"]),
        place=str(run.folder / which),
    )


def _check_model(run: Opened, which: str, about: Mapping[str, str]) -> None:
    """Refuse a model that the run did not write, or that it wrote in an earlier round or as another one."""
    path, cure = f"'{run.folder / which / WEIGHTS_FILE}'", "restore it from a copy of the run"
    newest = max((number for number, _ in list_checkpoints(run.folder / "checkpoints")), default=0)
    if about.get("contract") != run.seal:
        raise FedstillError(f"{path} was not written by this run: {cure}")
    if not about.get("round", "").isdecimal() or not {"model", "calibration"} <= about.keys():
        raise FedstillError(f"{path} does not say of which round it is: {cure}")
    if about["model"] != which:
        raise FedstillError(f"{path} holds the run's {about['model']} model: {cure}")
    if int(about["round"]) < newest:
        raise FedstillError(
            f"{path} is the model after round {about['round']}, and the run has played {newest}: {cure}, or write it "
            f"again with `fedstill resume {run.folder}`"
        )


def stored_calibrations(run: Opened, which: str, digest: str) -> list[Calibration]:
    """Return the temperatures that the run fitted for a model, in the order in which they are to be used.

    digest: of the file that the run wrote for its models; empty while the run has not ended.
    """
    path = run.folder / CALIBRATION_FILE
    if not digest:
        why = f"not calibrated: the run has not ended; finish it with: fedstill resume {run.folder}"
        return [Calibration(None, why)]
    content = read_bytes(path) if path.is_file() else b""
    if content_digest(content) != digest:
        happened = "does not belong to the run's models" if content else "is gone"
        raise FedstillError(
            f"'{path}' {happened}: restore it from a copy of the run, or write it again with "
            f"`fedstill resume {run.folder}`"
        )
    try:
        return [calibration_from(tree) for tree in from_json(content)[which]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedstillError(
            f"'{path}' cannot be read ({' '.join(str(error).split())[:200]}): restore it from a copy of the run"
        ) from error


def scorer(trained: Trained, model: Network | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function from samples in storage form to scores (M, K) in float64; on the CPU without a GPU.

    model: the network of a run that was started with a network in Python.
    """
    federation, options = federation_without_rows(trained.contract), trained.experiment.engine
    network = build_network(trained.experiment, federation, model)
    if model is not None:
        check_given_network(trained.experiment, network, reads_ids=federation.train.text)
    present = {"cpu", *(["cuda"] if (count := torch.cuda.device_count()) else []), *(f"cuda:{n}" for n in range(count))}
    device = options.device if options.device in present else "auto"  # a bundle may come from a larger machine
    precision = "auto" if options.precision == "bf16" else options.precision  # three digits are little for confidences
    name = "auto" if ":" in options.name else options.name  # an engine of one's own trains cohorts, and no more
    engine = build_engine(name, device, model=network, federation=federation, chunk=options.chunk, precision=precision)
    stored, wanted = (
        {name: leaf.dtype.is_floating_point for name, leaf in flatten(weights).items()}
        for weights in (trained.weights, network.init(0))
    )
    if next(form_differences(trained.weights, network.init(0)), None) or stored != wanted:
        raise FedstillError(f"'{trained.place}' holds no {trained.experiment.model.name} of this run: restore its copy")
    weights = trained.weights.__class__(
        *({name: leaf.to(engine.device) for name, leaf in part.items()} for part in trained.weights)
    )
    return lambda x: engine.outputs(weights, x, features=False, keep=False).logits.double().cpu()


def model_answer(trained: Trained, place: str, model: Network | None = None) -> Answer:
    """Answer with a trained model, at the temperature that its run fitted.

    place: the file, folder or dataset that the samples are read from; empty: rows of the run's own data.
    """
    score = scorer(trained, model)
    calibration, measured = chosen_calibration(trained.calibrations, trained.experiment.data, place), None
    if calibration.before is not None and calibration.fitted_on is not None:
        how = "the rows that chose the temperature, so the error after it is a little too small"
        measured = Measured(calibration.fitted_on, calibration.before, calibration.after, how)
    owner = "the bundle's" if trained.card else "the run's"
    why = f"{owner} {trained.which} model"
    return Answer(lambda samples: score(samples.x), calibration, why, trained.round, measured)


def chosen_calibration(calibrations: Sequence[Calibration], data: DataSection, place: str) -> Calibration:
    """Return the run's first temperature whose labeled rows cannot be among the predicted ones."""
    why = ""
    for calibration in calibrations:
        tested = calibration.fitted_on == "the test set"
        if tested and not place and data.unlabeled == "test":
            why = "the rows are the test set itself, and the run has no validation set (data.validation = 0)"
        elif shares_rows(place, data.test if tested and data.test is not None else data.source):
            why = f"the labeled rows may be among the predicted ones, which are read from '{place}' too"
        else:
            return calibration
    return Calibration(None, f"not calibrated: {why}")


def shares_rows(place: str, other: str) -> bool:
    """Return whether two places may hold the same samples: they are equal, or one lies in the other."""
    if not place or not (is_local(place) and is_local(other)):
        return bool(place) and place == other
    first, second = Path(place).resolve(), Path(other).resolve()
    return first.is_relative_to(second) or second.is_relative_to(first)
