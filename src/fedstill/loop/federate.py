"""The round loop: draw a cohort, train it, check what it sends, let the server step, look, remember."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedstill.attack.kinds import Attack
from fedstill.compose.combine import bound_to, first_state, samples, targets
from fedstill.compose.groups import check_groups, grouped, only, reported_name, split
from fedstill.compose.moving import moving_only
from fedstill.compose.phases import phases_of, share_states
from fedstill.compose.sealed import why_not_sealed
from fedstill.core.errors import FedstillError
from fedstill.core.needs import check_fits, check_phases, needs_of
from fedstill.core.population import Population, Stay
from fedstill.core.seeds import Sampling, cohort_size, seed_for
from fedstill.core.trainer import CohortEngine, Trainer
from fedstill.core.tree import byte_size, to_device, tree_map
from fedstill.core.types import Cache, Federation, Method, Model, Need, Phase, Seed, Targets, Training, Tree, Weights
from fedstill.engine import Engines, build_engines
from fedstill.engine.engine import keep_optimizers
from fedstill.engine.workers import Workers
from fedstill.loop.attacked import Attacked
from fedstill.loop.calibrate import CALIBRATION_FILE, calibrate
from fedstill.loop.callbacks import Callback, EarlyStop, RunInfo
from fedstill.loop.cautions import Cautions
from fedstill.loop.checkpoint import content_digest, list_checkpoints
from fedstill.loop.closed_folder import OF_CLIENTS, closed_row, no_log
from fedstill.loop.evaluate import Evaluate, accuracy_by_party, global_test, label_counts, make_test_set
from fedstill.loop.guard import AuditRecord, Guard
from fedstill.loop.here import Here
from fedstill.loop.history import History, Journal, Result, Row
from fedstill.loop.privacy_plan import (
    CHOSEN,
    Promise,
    fingerprint,
    is_noisy,
    make_promise,
    noise_of,
    noise_seed,
    settings_of,
    warn_of_kept_statistics,
    write_statement,
)
from fedstill.loop.resume import Plan, SaveClock, log_to, restore, rows_digest, save, save_models
from fedstill.loop.round import State, Task, look_at, play_round, reported
from fedstill.privacy.plan import Privacy
from fedstill.privacy.statement import PrivacyStatement
from fedstill.storage.files import working_in, write_whole
from fedstill.storage.secrets import keep_secret, secret_of

MakeEngines = Callable[..., Engines]  # (model=..., federation=...)
MakePopulation = Callable[..., AbstractContextManager[Population]]  # (task, a client's first memory, folder=...)
ROWS_ANSWERED = 16  # test rows that the untrained model answers, to see that its answers are logits
_log = logging.getLogger("fedstill.run")


@dataclass(frozen=True)
class Schedule:
    """How long a run lasts, who takes part, and how often it is looked at and saved."""

    rounds: int = 100
    cohort: int | float = 10  # clients a round: a number, or a share below 1 of the population
    sampling: Sampling = "fixed"  # "poisson": each client takes part by its own coin; "cyclic": clients take turns
    seed: Seed = 0
    evaluate_every: int = 1
    checkpoint_every: int = 10
    target: float | None = None  # accuracy whose first round is reported
    best: str = "accuracy"  # the metric of a round by which the best model is kept

    def __post_init__(self) -> None:
        for key in ("rounds", "evaluate_every", "checkpoint_every"):
            if getattr(self, key) < 1:
                raise FedstillError(f"{key} = {getattr(self, key)}: use at least 1")


@dataclass(frozen=True)
class Built:
    """Everything that a run needs, built once; `experiment.build.build` makes it from an experiment.

    engines: makes the cohort's engine and the server's trainer for a model and a federation when the run starts.
    evaluate: measures a model; see loop/evaluate.py.
    cache: keeps what a method prepares (a pre-trained extractor) for other runs; None keeps nothing.
    label: the method's name for people.
    settings: options of the method and the model in any words. Two runs whose settings differ never share noise.
    contract: seal of the run's contract with its data (see experiment/run_folder.py); it binds files to their run.
    start: the model of round 0; None lets the seed decide it.
    population: makes the population where clients live elsewhere; None: they live here, in the federation.
    holders: the ids of clients that hold data elsewhere; None: the clients that have rows in the federation.
    stays: the rounds in which a client is a member, of those that are no members all the time. A resumed run may have
        others, which hold for the rounds that it plays.
    sealed: the server's steps see sums over a cohort and no upload; see compose/sealed.py.
    secret: what noise that protects is drawn from; empty: `federate` takes that of `run_dir`, or makes a new one.
    spare: how many clients elsewhere are drawn beyond the cohort. The first to answer fill the cohort, so that a run
        depends on the clock: a resumed one may take others in the rounds that it plays again.
    attack: what some clients of a simulation do instead of their part; None: all are honest.
    """

    method: Method | Sequence[Phase]
    model: Model
    federation: Federation
    training: Training = field(default_factory=Training)
    schedule: Schedule = field(default_factory=Schedule)
    engines: MakeEngines = build_engines
    guard: Guard = field(default_factory=Guard)
    privacy: Privacy = field(default_factory=Privacy)
    evaluate: Evaluate = global_test
    cache: Cache | None = None
    label: str = ""
    settings: str = ""
    contract: str = ""
    start: Weights | None = None
    population: MakePopulation | None = None
    holders: np.ndarray | None = None
    stays: Mapping[int, Stay] = field(default_factory=dict)
    spare: int = 0
    secret: bytes = field(default=b"", repr=False)
    sealed: bool = False
    attack: Attack | None = None

    def __post_init__(self) -> None:
        """Refuse a value of another type, with the call that makes the right one."""
        method = self.method if isinstance(self.method, str) else "fedavg"
        network = "from_module(model, ...)" if callable(self.model) else "build_model('mlp', input_shape=..., ...)"
        in_turn = isinstance(self.method, Sequence) and all(isinstance(part, Phase) for part in self.method)
        wanted = (
            (
                "method",
                in_turn or isinstance(self.method, Method),
                "Method or sequence of Phase",
                f"build_method({method!r})",
            ),
            ("model", isinstance(self.model, Model), "Model", network),
            ("federation", isinstance(self.federation, Federation), "Federation", "build_federation(experiment)"),
            ("training", isinstance(self.training, Training), "Training", "Training(epochs=1, lr=0.1)"),
        )
        for key, fine, kind, cure in wanted:
            if not fine:
                given = type(getattr(self, key)).__name__
                raise FedstillError(f"{key}: {given} is no fedstill.{kind}: give fedstill.{cure}")
        if self.attack is not None and self.population is not None:
            raise FedstillError("attack.name: these clients live elsewhere, and attacks are for simulations: remove it")


def federate(
    built: Built,
    *,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    state_budget: int | None = None,
) -> Result:
    """Train one model, round by round, and return it with its history.

    resume: go on from the newest checkpoint of `run_dir` that verifies; the result equals an uninterrupted run.
    state_budget: bytes of client states kept in memory, beyond which they live in a sparse file; None: see ClientStore.
    """
    began = time.perf_counter()
    phases = _suited(built)
    engines = built.engines(model=built.model, federation=built.federation)
    task = make_task(built, phases, engines, tell=_teller(callbacks))
    wanted, count = cohort_size(built.schedule.cohort, built.federation.population), len(task.clients)
    if wanted > count:
        _log.warning("only %d clients hold data: the cohort is %d instead of %d", count, count, wanted)
    folder, start = None if run_dir is None else Path(run_dir), first_weights(built, engines.trainer)
    secret = built.secret or secret_of(folder) if has_secret(task) else b""
    plan = _make_plan(task, built, folder, start, secret)
    if built.spare and built.population is None:
        raise FedstillError(f"spare = {built.spare}: in one process no client answers first: set spare = 0")
    task = dataclasses.replace(task, noise_seed=noise_seed(task.seed, plan.identity.get("fingerprint", ""), secret))
    state = _first_state(task, start, plan.identity["best"])
    here: MakePopulation = partial(Here, budget=state_budget)
    if built.attack is not None:
        here = partial(Attacked, attack=built.attack, engines=built.engines, budget=state_budget)
    make = here if built.population is None else built.population
    # an engine with workers of its own needs no threads of torch, which wait for each other in small operations
    workers: Workers | None = getattr(engines.cohort, "workers", None)
    with nullcontext() if workers is None else workers.quiet():
        return _run(task, plan, state, callbacks, make, resume=resume, began=began)


def closes_folder(built: Built) -> bool:
    """Return whether the run's folder will hold nothing that its claim of privacy does not cover."""
    task = make_task(built, _suited(built), Engines(cast(CohortEngine, _Nowhere()), cast(Trainer, _Nowhere())))
    if not has_secret(task):
        return False
    _, promise = _promised(task, built.label, built.model.init(0), built.schedule.rounds)
    return promise.closed and _closable(built)


def _closable(built: Built) -> bool:
    """Where clients live elsewhere, the folder is the server's own, and its audit says who was late or refused."""
    return built.population is None and built.schedule.best not in OF_CLIENTS


def _chosen_by(best: str, callbacks: Sequence[Callback], promise: Promise) -> tuple[str, ...]:
    """Say that numbers of clients' own data choose the best model or end the run; nothing where they do not.

    In a closed run nobody sees these numbers, so that none ends it.
    """
    watched = [best, *(one.metric for one in callbacks if isinstance(one, EarlyStop))]
    of_clients = dict.fromkeys(metric for metric in watched if metric in OF_CLIENTS)
    return (CHOSEN.format(", ".join(of_clients)),) if of_clients and not promise.closed else ()


def has_secret(task: Task) -> bool:
    """Return whether the run's noise is drawn from a secret, and not from its seed."""
    return is_noisy(task) and not task.privacy.reproducible


def check_built(built: Built) -> None:
    """Refuse, without an engine, everything that `federate` would refuse before round 1."""
    task = make_task(built, _suited(built), Engines(cast(CohortEngine, _Nowhere()), cast(Trainer, _Nowhere())))
    _promised(task, built.label, built.model.init(0), built.schedule.rounds)


def _promised(task: Task, label: str, weights: Weights, rounds: int) -> tuple[Task, Promise]:
    """The run's promise about privacy; a refusal names the method."""
    try:
        return make_promise(task, weights, rounds)
    except FedstillError as error:
        raise FedstillError(f"{label}: {error}" if label else str(error)) from None


class _Nowhere:
    """Stands in for an engine where nothing is trained; tensors stay on the CPU."""

    device = torch.device("cpu")


def share_states_of(phases: tuple[Phase, ...], weights: Weights, model: Model) -> tuple[Tree, tuple[Phase, ...]]:
    """`share_states`, with a client's first state under each prototype's name where there are several."""
    shared = {network: share_states(phases, part) for network, part in split(weights, model.networks).items()}
    kept = next(iter(shared.values()))[1]  # they differ by nothing: which slots are kept is up to the objectives
    return (shared[""][0] if "" in shared else {network: first for network, (first, _) in shared.items()}), kept


def suited(phases: tuple[Phase, ...], model: Model, training: Training) -> tuple[Phase, ...]:
    """The methods as this model and training take them: for the part that moves, for each of several architectures."""
    if model.groups is None:
        phases = tuple(phase._replace(method=bound_to(phase.method, model)) for phase in phases)
    phases = keep_optimizers(phases, training) if training.keep_optimizer else phases
    suit = partial(moving_only, part=training.part)
    if model.groups is not None:
        return grouped(phases, model.groups, suit)
    return tuple(phase._replace(method=suit(phase.method, model)) for phase in phases)


def _suited(built: Built) -> tuple[Phase, ...]:
    """Return the methods of a run as its model and training take them, once all checks have passed."""
    model, federation, training = built.model, built.federation, built.training
    phases = phases_of(built.method)
    label = f"method.name = '{built.label}'" if built.label else "this method"
    check_phases(phases, model=model, federation=federation, training=training, label=label)
    if built.sealed:
        _check_sealed(built, phases, label)
    check_fits(model, len(federation.train.classes), tuple(federation.train.x.shape[1:]))
    if model.groups is not None:
        check_groups(model.groups, federation.population, holders_of(built).tolist())
    return suited(phases, model, training)


def _check_sealed(built: Built, phases: Sequence[Phase], label: str) -> None:
    """Refuse a sealed run in which a part needs single uploads, and name the part."""
    where = f"server.sealed = true: {label} cannot run sealed"
    for phase in phases:
        if reasons := why_not_sealed(phase.method, len(built.model.networks)):
            raise FedstillError(f"{where}: {'; '.join(reasons)}: set it to false, or use another method")
    if built.population is not None:
        raise FedstillError(
            f"{where}: its clients live elsewhere, and their messages reach the server one by one: a deployment needs "
            "a protocol of secure aggregation, which fedstill does not have"
        )


def _teller(callbacks: Sequence[Callback]) -> Callable[[str, float], None]:
    def tell(line: str, share: float) -> None:
        _log.info("%s", line)
        for callback in callbacks:
            callback.on_prepare(line, share)

    return tell


def _run(
    task: Task,
    plan: Plan,
    state: State,
    callbacks: Sequence[Callback],
    make: MakePopulation,
    *,
    resume: bool,
    began: float,
) -> Result:
    warn_of_kept_statistics(task)
    if task.sealed and task.guard.norm_bound is None:
        _log.warning(
            "server.sealed: nobody looks at an upload before it is summed, so that one client can move the model as "
            "far as it likes: set guard.norm_bound, which each client then cuts its own move to"
        )
    task, promise = _promised(task, plan.method, state.weights, plan.rounds)
    promise = dataclasses.replace(promise, closed=promise.closed and plan.closable)
    promise = dataclasses.replace(
        promise, beside=(*promise.beside, *_chosen_by(state.history.best_by, callbacks, promise))
    )
    plan = dataclasses.replace(plan, rounds=promise.rounds)
    template, phases = share_states_of(task.phases, state.weights, task.model)
    task = dataclasses.replace(task, phases=phases)
    with ExitStack() as stack:
        if plan.folder is not None:
            stack.enter_context(working_in(plan.folder))
        if plan.folder is not None and plan.secret:
            keep_secret(plan.secret, plan.folder)
        stack.enter_context(no_log(plan.folder) if promise.closed else log_to(plan.folder))
        clients = stack.enter_context(make(task, template, folder=plan.folder))
        state, earlier = restore(plan, state, clients, resume=resume)
        journal = None if plan.folder is None else stack.enter_context(Journal(plan.folder, state.history))
        state = _loop(task, plan, state, clients, journal, callbacks, promise)
        stated = _state_privacy(plan, promise, state)
        last, belief = reported(task, state), _targets(task, state)
        best = state.best if state.best is not None else last
        if plan.folder is not None:
            if state.round not in dict(list_checkpoints(plan.folder / "checkpoints")):
                save(plan, state, clients, last, belief)
            calibration = _calibrate(task, {"last": last, "best": best}, plan.folder)
            save_models(plan, state, last, belief, calibration=calibration)
        seconds = earlier + time.perf_counter() - began
        result = Result(state.history, last, best, plan.method, seconds, plan.folder, plan.target, belief)
        invented = samples(task.method(max(state.round, 1)), state.server)
        parties = accuracy_by_party(last, task.federation, task.trainer)
        result = dataclasses.replace(result, privacy=stated, samples=invented, party_accuracy=parties)
        if task.model.groups is not None:
            names = tuple(task.model.groups.models)
            result = dataclasses.replace(result, reported=reported_name(task.model.groups), prototypes=names)
        for callback in callbacks:
            callback.on_end(result)
    return result


def _calibrate(task: Task, models: Mapping[str, Weights], folder: Path) -> str:
    """Write the temperatures of each model into calibration.json, one for each set of labeled rows; return a digest."""
    sets = {"the test set": (task.test.x, task.test.y)}
    if task.federation.validation is not None:
        sets = {"the validation set": task.federation.validation, **sets}
    table: dict[str, list[dict[str, Any]]] = {}
    for name, weights in models.items():
        for where, (x, y) in sets.items():
            scores = torch.zeros(0, len(task.federation.train.classes))  # of a server without labeled rows
            if len(y):
                scores = task.trainer.outputs(weights, x.to(task.engine.device), features=False).logits.double().cpu()
            table.setdefault(name, []).append(dataclasses.asdict(calibrate(scores, y.cpu(), where)))
    content = (json.dumps(table, indent=1) + "\n").encode()
    write_whole(folder / CALIBRATION_FILE, content)
    return content_digest(content)


def _targets(task: Task, state: State) -> Targets | None:
    return targets(task.method(max(state.round, 1)), state.server)


def holders_of(built: Built) -> np.ndarray:
    """Return the ids of the clients that hold data, here or elsewhere."""
    if built.holders is not None:
        return built.holders
    return np.flatnonzero(built.federation.offsets.diff().cpu().numpy() > 0)


def make_task(
    built: Built,
    phases: tuple[Phase, ...],
    engines: Engines,
    tell: Callable[[str, float], None] = lambda line, share: None,
) -> Task:
    federation, schedule, device = built.federation, built.schedule, engines.cohort.device
    clients = holders_of(built)
    if len(clients) == 0:
        raise FedstillError("no client holds any data: check the partition")
    if unknown := sorted(set(built.stays) - set(clients.tolist())):
        raise FedstillError(f"client {unknown[0]} has rounds to take part in and holds no data: check the roster")
    if built.spare and schedule.sampling == "poisson":
        raise FedstillError("spare clients and sampling = 'poisson': who answers first is no coin: set spare = 0")
    counts = label_counts(federation)
    needs = frozenset().union(*(needs_of(phase.method) for phase in phases))
    unlabeled = federation.unlabeled if Need.UNLABELED in needs else None
    validation = federation.validation if Need.VALIDATION in needs else None
    return Task(
        phases=phases,
        model=built.model,
        federation=federation,
        training=built.training,
        engine=engines.cohort,
        trainer=engines.trainer,
        seed=schedule.seed,
        guard=built.guard,
        clients=clients,
        cohort=min(cohort_size(schedule.cohort, federation.population), len(clients)),
        test=make_test_set(federation, device, counts),
        evaluate=built.evaluate,
        counts=counts.to(device) if Need.LABEL_COUNTS_UPLOADED in needs else None,
        unlabeled=None if unlabeled is None else unlabeled.to(device),
        validation=None if validation is None else (validation[0].to(device), validation[1].to(device)),
        truth=federation.unlabeled_truth if Need.UNLABELED in needs else None,
        tell=tell,
        cache=built.cache,
        sampling=schedule.sampling,
        privacy=built.privacy,
        spare=built.spare,
        stays=built.stays,
        sealed=built.sealed,
        warm=built.start is not None,
    )


def _make_plan(task: Task, built: Built, folder: Path | None, start: Weights, secret: bytes) -> Plan:
    identity = {
        "method": built.label,
        "model": task.model.name,
        "seed": task.seed,
        "population": task.federation.population,
        "cohort": task.cohort,
        "sampling": task.sampling,
        "training": dataclasses.asdict(task.training),
        "noise": noise_of(task.phases),
        "privacy": settings_of(task.privacy),
    }
    if mark := fingerprint(task, identity, built.settings, start=start, secret=secret):
        identity["fingerprint"] = mark
    if built.sealed:
        identity["sealed"] = True
    if built.contract:
        identity["contract"] = built.contract
    identity["best"] = built.schedule.best
    rows, schedule = task.unlabeled, built.schedule
    return Plan(
        built.label,
        schedule.rounds,
        schedule.evaluate_every,
        schedule.checkpoint_every,
        folder,
        schedule.target,
        identity=json.loads(json.dumps(identity)),
        unlabeled="" if folder is None or rows is None else rows_digest(rows, task.federation.unlabeled_ids),
        contract=built.contract,
        closable=_closable(built),
        secret=secret,
    )


def _first_state(task: Task, weights: Weights, best_by: str) -> State:
    weights = to_device(weights, task.engine.device)
    return State(0, weights, first_state(task.method(1), weights), history=History(best_by=best_by))


def first_weights(built: Built, trainer: Trainer) -> Weights:
    """Return the model that a run begins at, in the precision of its trainer."""
    dtype = getattr(trainer, "dtype", torch.float32)
    weights = built.model.init(seed_for(built.schedule.seed, "model")) if built.start is None else built.start
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, weights)


def _loop(
    task: Task,
    plan: Plan,
    state: State,
    population: Population,
    journal: Journal | None,
    callbacks: Sequence[Callback],
    promise: Promise,
) -> State:
    info = _describe(task, plan, state)
    answers = [callback.on_start(info) for callback in callbacks]
    if promise.cut:
        task.tell(promise.cut, 1.0)
    cautions = Cautions(plan.method, task.federation, task.training, state.history.rows)
    cautions.before(task.phases, plan.rounds, task.model, _first_answers(task, state.weights))
    clock = SaveClock()
    while state.round < plan.rounds and not any(answers):
        began = time.perf_counter()
        state, row, records = play_round(task, state, population)
        if plan.evaluates(state.round):
            state = look_at(task, state, row)
        row["seconds"] = time.perf_counter() - began
        if promise.closed:
            row, records = closed_row(row, task, byte_size(state.weights)), []
        answers = [callback.on_round(row) for callback in callbacks]
        if any(answers) and "accuracy" not in row:
            state = look_at(task, state, row)
        row = closed_row(row, task, byte_size(state.weights)) if promise.closed else row
        state.history.rows.append(row)
        state.history.audit.extend(records)
        if journal is not None:
            journal.add(row, records)
        _tell(row, records)
        cautions.after_round(row, records, task.engine.device)
        if plan.checkpoints(state.round, due=clock.is_due()):
            with clock:
                _state_privacy(plan, promise, state)
                save(plan, state, population, reported(task, state), _targets(task, state))
    cautions.at_end(state.history)
    return state


def _first_answers(task: Task, weights: Weights) -> list[Tensor]:
    """The answers of each network to some test rows; none where the server has no test rows."""
    rows = task.test.x[:ROWS_ANSWERED]
    if not len(rows):
        return []
    networks = [only(weights, network) for network in task.model.networks]
    return [task.trainer.outputs(network, rows, features=False, keep=False).logits for network in networks]


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
