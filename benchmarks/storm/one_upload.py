"""One finite hostile upload, once: what it costs each method at the end of a run.

    python benchmarks/storm/one_upload.py [--methods "fedavg;scaffold"] [--seed 0] [--outlier 20]

Ten clients hold the embedded digits. In round 4 of 20 one of them sends one of the KINDS; everything else is honest.
The guard has its defaults. A kind that the guard refuses is a run in which that client did not come, which is played
once. Kinds that pass are all played to the end. Prints the worst loss of each method beside a clean run, in points.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.population import Order
from fedstill.core.seeds import torch_generator
from fedstill.core.tree import as_tree, clone, from_tree, tree_map
from fedstill.core.types import Federation, Uploads
from fedstill.experiment.build import build, build_federation
from fedstill.experiment.config import Experiment
from fedstill.experiment.overrides import parse_method
from fedstill.loop.federate import federate
from fedstill.loop.guard import admit
from fedstill.loop.here import Here
from fedstill.storage.files import write_whole

RECORD = Path(__file__).resolve().parents[2] / "docs" / "results" / "one_upload.json"
ROUNDS, WHEN, WHO = 20, 4, 3
STUDENT = "student.steps=30"
METHODS = (
    "fedavg",
    "scaffold",
    "fedadam",
    "fednova",
    f"feddf({STUDENT})",
    f"mrtf({STUDENT}, warm_up=2)",
    f"fedaux({STUDENT})",
    "fedftg(iterations=4)",
    "d2cfl(student.epochs=1, past=3)",
)
FEDERATION: dict[str, Any] = {
    "rounds": ROUNDS,
    "cohort": 10,
    "evaluate_every": ROUNDS,
    "data": {"source": "digits", "unlabeled": 200},
    "partition": {"scheme": "lda", "clients": 10, "alpha": 0.5, "min_size": 10},
    "model": {"name": "mlp", "hidden": [32], "init": "torch"},
    "local": {"epochs": 2, "batch_size": 20, "lr": 0.1},
    "engine": {"device": "cpu", "threads": 1},
}
Change = Callable[[Uploads, Order], None]  # changes the upload at place WHO where it lies


def all_params(of: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """Each tensor of the hostile model becomes of(trained, sent)."""

    def change(uploads: Uploads, order: Order) -> None:
        for name, leaf in uploads.weights.params.items():
            leaf[WHO] = of(leaf[WHO], order.start.params[name])

    return change


def one_param(value: float, *, last: bool) -> Change:
    """One number of the first or the last tensor."""

    def change(uploads: Uploads, order: Order) -> None:
        leaf = list(uploads.weights.params.values())[-1 if last else 0]
        leaf[WHO].view(-1)[0] = value

    return change


def number(field: str, of: Callable[[Tensor], Tensor | float]) -> Change:
    def change(uploads: Uploads, order: Order) -> None:
        leaf = getattr(uploads, field)
        leaf[WHO] = of(leaf[WHO])

    return change


def slots(of: Callable[[Tensor], Tensor]) -> Change:
    """Everything that a method sends beside its model, such as SCAFFOLD's control."""

    def change(uploads: Uploads, order: Order) -> None:
        def leaf_of(leaf: Tensor) -> Tensor:
            leaf[WHO] = of(leaf[WHO])
            return leaf

        tree_map(leaf_of, uploads.extra)

    return change


def counts(of: Callable[[Tensor], Tensor]) -> Change:
    def change(uploads: Uploads, order: Order) -> None:
        if uploads.label_counts is not None:
            uploads.label_counts[WHO] = of(uploads.label_counts[WHO])

    return change


def both(*changes: Change) -> Change:
    def change(uploads: Uploads, order: Order) -> None:
        for change in changes:
            change(uploads, order)

    return change


def noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch_generator(7))


def moved(factor: float) -> Change:
    return all_params(lambda trained, sent: sent + factor * (trained - sent))


KINDS: dict[str, Change] = {
    **{
        f"params = {v:g}": all_params(lambda t, _, v=v: torch.full_like(t, v))
        for v in (1e3, -1e3, 1e20, 1e30, 10, 1, 0)
    },
    **{f"move x {factor:g}": moved(factor) for factor in (-1, -4, -10, -15, -19, -100, 0, 4, 10, 15, 19, 100, 1e6)},
    **{f"noise of {std:g}": all_params(lambda t, s, v=std: s + v * noise(t)) for std in (0.03, 0.3, 3, 30, 3e6)},
    **{f"first weight = {v:g}": one_param(v, last=False) for v in (10, 1e3, 1e6, -1e20)},
    **{f"last bias = {v:g}": one_param(v, last=True) for v in (10, 1e3, 1e6, -1e20)},
    "the negative of the model": all_params(lambda trained, _: -trained),
    "rows turned round": all_params(lambda trained, _: trained.flip(0)),
    **{f"size = {v:g}": number("size", lambda _, v=v: v) for v in (1e9, 1e6, 1.0, 1e-6)},
    **{f"size x {v:g}": number("size", lambda n, v=v: v * n) for v in (15, 100)},
    **{f"travel x {v:g}": number("travel", lambda n, v=v: v * n) for v in (1e20, 1e3, 15, 1 / 15, 1e-6)},
    **{f"steps x {v:g}": number("steps", lambda n, v=v: v * n) for v in (1e6, 15, 1 / 15, 1e-6)},
    **{f"loss = {v:g}": number("loss", lambda _, v=v: v) for v in (1e30, 1e3, -1e3)},
    **{f"slots x {v:g}": slots(lambda t, v=v: v * t) for v in (1e20, 1e3, 15, -15)},
    "one class alone": counts(lambda c: torch.zeros_like(c).index_fill(0, torch.tensor(0), float(c.sum()))),
    "counts x 15, size x 15": both(counts(lambda c: 15 * c), number("size", lambda n: 15 * n)),
    "move x -15, size x 15": both(moved(-15), number("size", lambda n: 15 * n), counts(lambda c: 15 * c)),
    "move x -15, travel / 15": both(moved(-15), number("travel", lambda n: n / 15)),
    "move x 15, slots x 15": both(moved(15), slots(lambda t: 15 * t)),
}


class OneUpload(Here):
    """Clients one of whom sends a kind, once. tried: hears of every kind whether the guard refuses it."""

    def __init__(self, *args: Any, kind: Change | None, tried: dict[str, bool] | None = None, **how: Any) -> None:
        super().__init__(*args, **how)
        self.kind, self.tried, self.past = kind, tried, list[Any]()

    def play(self, order: Order, ids: np.ndarray) -> Uploads:
        uploads = super().play(order, ids)
        assert isinstance(uploads, Uploads)
        if order.round == WHEN and self.tried is not None:
            for name, kind in KINDS.items():
                self.tried[name] = WHO not in self.admitted(changed(uploads, order, kind), order).kept
        self.past.insert(0, self.admitted(uploads, order).scale)
        return changed(uploads, order, self.kind) if order.round == WHEN and self.kind else uploads

    def admitted(self, uploads: Uploads, order: Order) -> Any:
        follows = self.task.method(order.round).objective.implied
        implied = None if follows is None else lambda opened: follows(opened, order.start, order.received)
        how = {"exact_counts": True, "past": self.past, "implied": implied}
        return admit(uploads, order.start, self.task.guard, round=order.round, **how)


def changed(uploads: Uploads, order: Order, kind: Change) -> Uploads:
    uploads = from_tree(clone(as_tree(uploads)))._replace(ids=uploads.ids)
    kind(uploads, order)
    return uploads


@cache
def federation(seed: int) -> Federation:
    return build_federation(Experiment.model_validate({**FEDERATION, "seed": seed}))


def accuracy(method: str, seed: int, kind: Change | None = None, tried: dict[str, bool] | None = None) -> float:
    experiment = Experiment.model_validate({**FEDERATION, "seed": seed})
    built = build(experiment.model_copy(update={"method": parse_method(method, experiment)}), federation(seed))
    result = federate(replace(built, population=partial(OneUpload, kind=kind, tried=tried)))
    assert result.history.last is not None
    return float(result.history.last["accuracy"])


def look_at(method: str, seed: int) -> dict[str, Any]:
    """Play a method cleanly, without the client in that round, and with every kind that passes."""
    refused: dict[str, bool] = {}
    clean = accuracy(method, seed, tried=refused)
    some = next(iter(name for name, is_refused in refused.items() if is_refused))
    without = accuracy(method, seed, KINDS[some])
    passed = {name: accuracy(method, seed, KINDS[name]) for name, is_refused in refused.items() if not is_refused}
    losses = {name: round(100 * (clean - value), 3) for name, value in passed.items()}
    worst = max(losses, key=lambda name: losses[name]) if losses else ""
    return {
        "method": method,
        "seed": seed,
        "outlier": FEDERATION["guard"]["outlier"],
        "clean": round(100 * clean, 3),
        "kinds": len(refused),
        "passed": len(passed),
        "without_the_client": round(100 * (clean - without), 3),
        "worst": worst,
        "worst_loss": max([*losses.values(), round(100 * (clean - without), 3)]),
        "losses": losses,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outlier", type=float, default=20.0, help="guard.outlier")
    asked = parser.parse_args()
    FEDERATION["guard"] = {"outlier": asked.outlier}
    logging.disable(logging.WARNING)
    rows = json.loads(RECORD.read_text())["runs"] if RECORD.exists() else []
    for text in asked.methods.split(";") if asked.methods else METHODS:
        rows = [
            row for row in rows if (row["method"], row["seed"], row["outlier"]) != (text, asked.seed, asked.outlier)
        ]
        rows.append(row := look_at(text, asked.seed))
        lines = ",\n".join(json.dumps(row) for row in rows)
        write_whole(RECORD, '{"script": "benchmarks/storm/one_upload.py", "runs": [\n' + lines + "\n]}\n")
        facts = {key: value for key, value in row.items() if key != "losses"}
        print(json.dumps(facts), flush=True)
