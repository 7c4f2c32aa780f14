"""The round loop: draw a cohort, train it, check what it sends, let the server step, look, remember."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.combine import bound_to
from fedstill.compose.groups import as_it_is, check_fits, check_groups, grouped, reported_name, share_states_of
from fedstill.compose.head_only import heads_only
from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError
from fedstill.core.needs import check_phases, needs_of
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import CohortEngine, Trainer
from fedstill.core.tree import to_device, tree_map
from fedstill.core.types import Cache, Federation, Method, Model, Need, Phase, Seed, Targets, Training
from fedstill.engine.client_store import ClientStore
from fedstill.engine.engine import keep_optimizers
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.evaluate import answered_in_train_mode, label_counts, make_exam
from fedstill.loop.guard import AuditRecord, Guard
from fedstill.loop.history import Journal, Result, Row
from fedstill.loop.privacy_plan import (
    Promise,
    fingerprint,
    make_promise,
    noise_of,
    noise_seed,
    settings_of,
    warn_of_kept_statistics,
    write_statement,
)
from fedstill.loop.resume import Plan, SaveClock, log_to, restore, rows_digest, save, save_last
from fedstill.loop.round import Sampling, State, Tamper, Task, look_at, play_round, reported
from fedstill.privacy.plan import Privacy
from fedstill.privacy.statement import PrivacyStatement

_ANY = "this method"
_log = logging.getLogger("fedstill.run")


def federate(
    *,
    method: Method | Sequence[Phase],
    model: Model,
    federation: Federation,
    training: Training,
    rounds: int,
    cohort: int | float,
    seed: Seed = 0,
    engine: str | CohortEngine = "auto",
    device: str = "auto",
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint_every: int = 10,
    evaluate_every: int = 1,
    evaluate_batch: int | None = None,
    guard: Guard | None = None,
    target: float | None = None,
    label: str = "",
    resume: bool = False,
    tamper: Tamper | None = None,
    engine_options: Mapping[str, Any] | None = None,
    state_budget: int | None = None,
    cache: Cache | None = None,
    sampling: Sampling = "fixed",
    privacy: Privacy | None = None,
    settings: str = "",
) -> Result:
    """Train one model over `rounds` rounds.

    method: a method, or several in turn: (Phase(first, until=50), Phase(second)).
    cohort: clients a round, a number (int) or a share below 1 of the population.
    resume: go on from the newest checkpoint of `run_dir` that verifies; the result equals an uninterrupted run.
    evaluate_batch: evaluate in train mode, so many test rows at a time (BatchNorm by the batch); None: in eval mode.
    tamper: sends every upload through its wire form and this function (fault injection).
    state_budget: bytes of client states kept in memory, beyond which they live in a sparse file; None: see ClientStore.
    cache: where what a method prepares (a pre-trained extractor) is kept for other runs; None: nowhere.
    sampling: "fixed" draws cohorts of one size; with "poisson" each client takes part by its own coin.
    privacy: a budget, before which the run ends, and what may be sent for it; None: no limit.
    settings: options of the method and the model in any words: runs that differ in them do not share their noise.
    """
    began = time.perf_counter()
    phases = _suited(_as_phases(method, model, federation, training), model, federation, training, label or _ANY)
    engine, trainer = _built(engine, device, model, federation, engine_options or {})
    task = _make_task(
        phases, federation, engine, cohort, trainer=trainer,
        evaluate_batch=evaluate_batch, model=model, training=training, seed=seed,
        guard=guard or Guard(), tamper=tamper, tell=_teller(callbacks), cache=cache, sampling=sampling,
        privacy=privacy or Privacy(),
    )  # fmt: skip
    _warn_of_small_cohorts(task, cohort_size(cohort, federation.population))
    plan = _make_plan(task, label, rounds, evaluate_every, checkpoint_every, run_dir, target, settings)
    return _run(task, plan, callbacks, resume=resume, state_budget=state_budget, began=began)


def check_promise(
    *,
    method: Method | Sequence[Phase],
    model: Model,
    federation: Federation,
    training: Training,
    rounds: int,
    cohort: int | float,
    seed: Seed = 0,
    guard: Guard | None = None,
    sampling: Sampling = "fixed",
    privacy: Privacy | None = None,
) -> None:
    """What `federate` would refuse about privacy with these settings, found without an engine."""
    privacy, phases = privacy or Privacy(), phases_of(method)
    if privacy == Privacy() and not any(phase.method.releases for phase in phases):
        return
    phases, nowhere = _suited(phases, model, federation, training, _ANY), cast(Any, _Nowhere())
    task = _make_task(
        phases, federation, nowhere, cohort, trainer=nowhere,
        model=model, training=training, seed=seed, guard=guard or Guard(),
        tamper=None, sampling=sampling, privacy=privacy,
    )  # fmt: skip
    make_promise(task, model.init(0), rounds)


class _Nowhere:
    """In place of an engine where nothing is trained: only where tensors are."""

    device = torch.device("cpu")


def _as_phases(
    method: Method | Sequence[Phase], model: object, federation: object, training: object
) -> tuple[Phase, ...]:
    """The methods in turn; what is of another type is told in words, with what to write instead."""
    in_turn = isinstance(method, Sequence) and all(isinstance(part, Phase) for part in method)
    named = method if isinstance(method, str) else "fedavg"
    network = "from_module(model, input_shape=...)" if callable(model) else "build_model('mlp', input_shape=..., ...)"
    wanted = (
        ("method", method, in_turn or isinstance(method, Method), f"build_method({named!r})"),
        ("model", model, isinstance(model, Model), network),
        ("federation", federation, isinstance(federation, Federation), "build_federation(experiment)"),
        ("training", training, isinstance(training, Training), "Training(epochs=1, lr=0.1)"),
    )
    for key, given, fine, cure in wanted:
        if not fine:
            kind = "Method or sequence of Phase" if key == "method" else key.title()
            raise FedstillError(f"{key}: {type(given).__name__} is no fedstill.{kind}: give fedstill.{cure}")
    return phases_of(method)


def _suited(
    phases: tuple[Phase, ...], model: Model, federation: Federation, training: Training, label: str
) -> tuple[Phase, ...]:
    """The methods as this model and training take them: for heads alone, for each of several architectures."""
    check_phases(phases, model=model, federation=federation, training=training, label=label)
    check_fits(model, len(federation.train.classes), tuple(federation.train.x.shape[1:]))
    if model.groups is None:
        phases = tuple(phase._replace(method=bound_to(phase.method, model)) for phase in phases)
    phases = keep_optimizers(phases, training) if training.keep_optimizer else phases
    suit = heads_only if training.part == "head" else as_it_is
    if model.groups is not None:
        check_groups(model.groups, federation)
        return grouped(phases, model.groups, suit)
    return tuple(phase._replace(method=suit(phase.method, model)) for phase in phases)


def _teller(callbacks: Sequence[Callback]) -> Callable[[str, float], None]:
    def tell(what: str, share: float) -> None:
        _log.info("%s", what)
        for callback in callbacks:
            callback.on_prepare(what, share)

    return tell


def _run(
    task: Task, plan: Plan, callbacks: Sequence[Callback], *, resume: bool, state_budget: int | None, began: float
) -> Result:
    state, population = _first_state(task), task.federation.population
    task = dataclasses.replace(task, noise_seed=noise_seed(task.seed, plan.identity.get("fingerprint", "")))
    warn_of_kept_statistics(task)
    task, promise = make_promise(task, state.weights, plan.rounds)
    plan = dataclasses.replace(plan, rounds=promise.rounds)
    template, phases = share_states_of(task.phases, state.weights, task.model.groups)
    task = dataclasses.replace(task, phases=phases)
    with ExitStack() as stack:
        stack.enter_context(log_to(plan.folder))
        store = ClientStore(template, population, device=task.engine.device, budget=state_budget, folder=plan.folder)
        stack.enter_context(store)
        earlier = restore(plan, state, store, resume=resume)
        journal = None if plan.folder is None else stack.enter_context(Journal(plan.folder, state.history))
        _loop(task, plan, state, store, journal, callbacks, promise)
        stated = _state_privacy(plan, promise, state)
        last, targets = reported(task, state), _targets(task, state)
        save_last(plan, state, store, last, targets)
        best = state.best if state.best is not None else last
        seconds = earlier + time.perf_counter() - began
        result = Result(state.history, last, best, plan.method, seconds, plan.folder, plan.target, targets)
        samples = task.method(max(state.round, 1)).server.samples(state.server, task.model)
        result = dataclasses.replace(result, privacy=stated, samples=samples)
        if task.model.groups is not None:
            names = tuple(task.model.groups.models)
            result = dataclasses.replace(result, reported=reported_name(task.model.groups), prototypes=names)
        for callback in callbacks:
            callback.on_end(result)
    return result


def _targets(task: Task, state: State) -> Targets | None:
    return task.method(max(state.round, 1)).server.targets(state.server)


def cohort_size(cohort: int | float, population: int) -> int:
    """A share R < 1 of K clients is max(1, round(R K)); a whole number is itself."""
    if isinstance(cohort, float) and cohort == 1.0:
        raise FedstillError(f"cohort = 1.0: write 1 for one client, or {population} for everybody")
    if 0 < cohort < 1:
        return max(1, round(cohort * population))
    if not 1 <= cohort <= population or cohort != int(cohort):
        raise FedstillError(
            f"cohort = {cohort}: use a number from 1 to {population} (the population) or a share between 0 and 1"
        )
    return int(cohort)


def _built(
    engine: str | CohortEngine, device: str, model: Model, federation: Federation, options: Mapping[str, Any]
) -> tuple[CohortEngine, Trainer]:
    from fedstill.engine import build_engines

    return build_engines(engine, device, model=model, federation=federation, **options)


def _make_task(
    phases: tuple[Phase, ...],
    federation: Federation,
    engine: CohortEngine,
    cohort: int | float,
    *,
    evaluate_batch: int | None = None,
    **given: Any,
) -> Task:
    """given: what a task takes as it is."""
    clients = np.flatnonzero(federation.offsets.diff().cpu().numpy() > 0)
    if len(clients) == 0:
        raise FedstillError("no client holds any data: check the partition")
    wanted = cohort_size(cohort, federation.population)
    counts = label_counts(federation)
    needs = frozenset().union(*(needs_of(phase.method) for phase in phases))
    unlabeled = federation.unlabeled if Need.UNLABELED in needs else None
    return Task(
        phases=phases,
        federation=federation,
        engine=engine,
        clients=clients,
        cohort=min(wanted, len(clients)),
        exam=answered_in_train_mode(make_exam(federation, engine.device, counts), evaluate_batch),
        counts=counts.to(engine.device) if Need.LABEL_COUNTS_UPLOADED in needs else None,
        unlabeled=None if unlabeled is None else unlabeled.to(engine.device),
        validation=_on_device(federation.validation, engine) if Need.VALIDATION in needs else None,
        truth=federation.unlabeled_truth if Need.UNLABELED in needs else None,
        **given,
    )


def _warn_of_small_cohorts(task: Task, wanted: int) -> None:
    count = len(task.clients)
    if wanted > count:
        _log.warning("only %d clients hold data: the cohort is %d instead of %d", count, count, wanted)


def _on_device(pair: tuple[Tensor, Tensor] | None, engine: CohortEngine) -> tuple[Tensor, Tensor] | None:
    return None if pair is None else (pair[0].to(engine.device), pair[1].to(engine.device))


def _make_plan(
    task: Task,
    method: str,
    rounds: int,
    evaluate_every: int,
    checkpoint_every: int,
    run_dir: str | Path | None,
    target: float | None,
    settings: str,
) -> Plan:
    for key, value in (("rounds", rounds), ("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if value < 1:
            raise FedstillError(f"{key} = {value}: use at least 1")
    identity = {
        "method": method,
        "model": task.model.name,
        "seed": task.seed,
        "population": task.federation.population,
        "cohort": task.cohort,
        "sampling": task.sampling,
        "training": dataclasses.asdict(task.training),
        "noise": noise_of(task.phases),
        "privacy": settings_of(task.privacy),
    }
    if found := fingerprint(task, identity, settings):
        identity["fingerprint"] = found
    folder = None if run_dir is None else Path(run_dir)
    rows, named = task.unlabeled, task.federation.unlabeled_ids
    return Plan(
        method,
        rounds,
        evaluate_every,
        checkpoint_every,
        folder,
        target,
        identity=json.loads(json.dumps(identity)),
        unlabeled="" if folder is None or rows is None else rows_digest(rows, named),
    )


def _first_state(task: Task) -> State:
    weights = to_device(task.model.init(seed_for(task.seed, "model")), task.engine.device)
    dtype = getattr(task.trainer, "dtype", torch.float32)
    weights = tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, weights)
    return State(0, weights, task.method(1).server.init(weights))


def _loop(
    task: Task,
    plan: Plan,
    state: State,
    store: ClientStore,
    journal: Journal | None,
    callbacks: Sequence[Callback],
    promise: Promise,
) -> None:
    info = _describe(task, plan, state)
    answers = [callback.on_start(info) for callback in callbacks]
    if promise.cut:
        task.tell(promise.cut, 1.0)
    clock = SaveClock()
    while state.round < plan.rounds and not any(answers):
        began = time.perf_counter()
        state.round += 1
        row, records = play_round(task, state, store)
        if plan.evaluates(state.round):
            look_at(task, state, row)
        row["seconds"] = time.perf_counter() - began
        answers = [callback.on_round(row) for callback in callbacks]
        if any(answers) and "accuracy" not in row:
            look_at(task, state, row)
        state.history.rows.append(row)
        state.history.audit.extend(records)
        if journal is not None:
            journal.add(row, records)
        _tell(row, records)
        if plan.checkpoints(state.round, due=clock.is_due()):
            with clock:
                _state_privacy(plan, promise, state)
                save(plan, state, store, reported(task, state), _targets(task, state))


def _state_privacy(plan: Plan, promise: Promise, state: State) -> PrivacyStatement | None:
    """Before the models that it is about: a folder never holds models of more rounds than it speaks of."""
    made = promise.statement(state.history, state.round)
    write_statement(made, plan.folder)
    return made


def _describe(task: Task, plan: Plan, state: State) -> RunInfo:
    return RunInfo(
        method=plan.method,
        rounds=plan.rounds,
        population=task.federation.population,
        cohort=task.cohort,
        engine=task.engine.name,
        device=str(task.engine.device),
        model=task.model.name,
        parameters=sum(leaf.numel() for leaf in state.weights.params.values()),
        run_dir=plan.folder,
        past=tuple(state.history.rows),
    )


def _tell(row: Row, records: list[AuditRecord]) -> None:
    for record in records[:3]:
        who = "server" if record["client"] is None else f"client {record['client']}"
        _log.warning("round %d: %s: %s", record["round"], who, record["reason"])
    if len(records) > 3:
        _log.warning("round %d: and %d more, see audit.jsonl", row["round"], len(records) - 3)
    if "accuracy" in row:
        _log.info("round %d: accuracy %.4f, %.3f s", row["round"], row["accuracy"], row["seconds"])
