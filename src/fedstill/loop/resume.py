"""Stopping and going on: when a run is saved, what a resume takes up, and where the log goes."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.population import Population
from fedstill.core.tree import leaves
from fedstill.core.types import Targets, Weights
from fedstill.loop.checkpoint import (
    DIGEST_BYTES,
    RunState,
    list_checkpoints,
    load_newest,
    same_form,
    save_checkpoint,
    save_tensors,
    save_weights,
)
from fedstill.loop.history import History
from fedstill.loop.round import State
from fedstill.storage.files import appending

SAVE_SECONDS = 60.0  # without a checkpoint: a run that is stopped loses no more
SAVE_SHARE = 0.05  # of a run's time at most goes into checkpoints that only time asks for
TARGETS_FILE = "targets.safetensors"  # what the server believes about its unlabeled data: probabilities, kept
_log = logging.getLogger("fedstill.run")


@dataclass(frozen=True)
class Plan:
    """How long, how often, and where to."""

    method: str
    rounds: int
    evaluate_every: int
    checkpoint_every: int
    folder: Path | None
    target: float | None
    identity: dict[str, Any]
    unlabeled: str = ""  # digest of the rows that targets are about
    contract: str = ""  # seal of the run's contract: its models and targets carry it
    closable: bool = False  # the folder may be closed where the claim allows it: see loop/closed_folder.py
    secret: bytes = field(default=b"", repr=False)  # what its noise is drawn from; empty: its seed

    def evaluates(self, number: int) -> bool:
        return number % self.evaluate_every == 0 or number == self.rounds

    def checkpoints(self, number: int, *, due: bool) -> bool:
        return self.folder is not None and (due or number % self.checkpoint_every == 0)


class SaveClock:
    """Whether it is time to save although `checkpoint_every` rounds are not over; around a saving, what it costs."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def is_due(self) -> bool:
        cost = self._ended - self._began
        return time.perf_counter() - self._ended > max(SAVE_SECONDS, cost / SAVE_SHARE)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._ended = time.perf_counter()


def save(plan: Plan, state: State, population: Population, last: Weights, targets: Targets | None) -> None:
    """A checkpoint, and beside it the model that is reported (`last`), the best one, and the server's targets."""
    assert plan.folder is not None
    history = {"rows": state.history.rows, "audit": state.history.audit}
    whole = RunState(
        state.round,
        state.weights,
        state.server,
        population.snapshot(),
        history,
        state.best,
        plan.identity,
        state.targets_round,
    )
    save_checkpoint(whole, plan.folder / "checkpoints")
    save_models(plan, state, last, targets, durable=False)  # the checkpoint above is the durable copy


def save_models(
    plan: Plan, state: State, last: Weights, targets: Targets | None, *, calibration: str = "", durable: bool = True
) -> None:
    """The model that is reported (`last`), the best one, and the server's targets, each with the run it belongs to.

    calibration: digest of calibration.json, which a run writes when it ends; empty before.
    """
    assert plan.folder is not None
    about = {"contract": plan.contract, "round": str(state.round), "calibration": calibration}
    save_weights(plan.folder / "last", last, {**about, "model": "last"}, durable=durable)
    if state.best is not None:
        save_weights(plan.folder / "best", state.best, {**about, "model": "best"}, durable=durable)
    if targets is not None:
        about = {"contract": plan.contract, "round": str(state.targets_round), "rows": plan.unlabeled}
        save_tensors(plan.folder / TARGETS_FILE, targets._asdict(), about, durable=durable)


def rows_digest(x: Tensor, ids: Sequence[str] | None) -> str:
    """Return a digest that differs between unlabeled sets: of samples and their names, in their order."""
    hashed = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)} {json.dumps(ids)}".encode(), digest_size=DIGEST_BYTES)
    hashed.update(np.ascontiguousarray(x.cpu().numpy()).data)
    return hashed.hexdigest()


def restore(plan: Plan, state: State, population: Population, *, resume: bool) -> tuple[State, float]:
    """The state of the newest checkpoint, and the seconds that the run had taken; the population takes up its part.

    Without a checkpoint the state comes back as it is.
    """
    if plan.folder is None:
        if resume:
            raise FedstillError("resume needs run_dir: the folder of the run to go on with")
        return state, 0.0
    checkpoints = plan.folder / "checkpoints"
    if not resume:
        if list_checkpoints(checkpoints):
            raise FedstillError(f"{plan.folder} already holds a run: resume it or choose another run_dir")
        return state, 0.0
    saved = load_newest(checkpoints, next(leaves(state.weights)).device)
    if saved is None:
        _log.info("no checkpoint to resume from: starting at round 1")
        return state, 0.0
    _check_same_run(plan, state, saved)
    history = History(**saved.history, best_by=state.history.best_by)
    state = State(saved.round, saved.weights, saved.server, saved.best, history, targets_round=saved.targets_round)
    population.restore(saved.clients)
    _log.info("resuming after round %d", saved.round)
    return state, history.total("seconds")


def _check_same_run(plan: Plan, state: State, saved: RunState) -> None:
    if plan.identity.get("contract") != saved.identity.get("contract", plan.identity.get("contract")):
        raise FedstillError(
            f"cannot resume {plan.folder}: its checkpoints were written by another run: restore them from a copy"
        )
    for key, now in plan.identity.items():
        if key not in saved.identity:
            raise FedstillError(
                f"{plan.folder} was written by an older fedstill (no {key} in its checkpoint): run it again with this "
                "version"
            )
        if (then := saved.identity[key]) != now:
            raise FedstillError(
                f"cannot resume {plan.folder}: {_difference(key, then, now)}; use the same or another run_dir"
            )
    if not same_form(saved.weights, state.weights):
        raise FedstillError(f"cannot resume {plan.folder}: its model has other layers; use the same model")


def _difference(key: str, then: Any, now: Any) -> str:
    if key == "fingerprint":
        return "its noise belongs to other data, another split, other options or another secret"
    if not (isinstance(then, dict) and isinstance(now, dict)):
        return f"{key} was {then} and is {now} now"
    other = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{key}.{name} was {then.get(name)} and is {now.get(name)} now" for name in other)


class _LogFile(logging.FileHandler):
    """A log that follows no link. A full disk ends it without a traceback, because the run reports the disk."""

    def _open(self) -> TextIO:  # type: ignore[override]
        return appending(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def log_to(folder: Path | None) -> Iterator[None]:
    """Send the run's log to log.txt of its folder, too."""
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(folder / "log.txt", encoding="utf-8")
    except OSError as error:
        raise FedstillError(
            f"cannot write into '{folder}' ({error.strerror or error}): choose another folder"
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)
        handler.close()
