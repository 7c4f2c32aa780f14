"""The engine: local training of a cohort behind one interface, on CPU or GPU, stacked or client by client."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.seeds import seed_for
from fedstill.core.trainer import Fitted, Lesson, LocalWork, Trained, Watch
from fedstill.core.tree import rows as row_of
from fedstill.core.types import (
    Dataset,
    Federation,
    Model,
    Need,
    Objective,
    Output,
    Params,
    Phase,
    Player,
    Seed,
    Training,
    Tree,
    Uploads,
    Weights,
)
from fedstill.engine.device_data import Feed, check_augmentations
from fedstill.engine.forward import (
    ROWS_AT_ONCE,
    batch_statistics,
    fill_features,
    forward,
    forward_many,
    forward_training,
)
from fedstill.engine.group import (
    Inputs,
    chunk_budget,
    columns_of,
    finish_clients,
    local_view,
    make_inputs,
    of_clients,
    probe,
)
from fedstill.engine.plan import Plan, check_training, make_plan
from fedstill.engine.runners import Batched, Looped, layout_alone
from fedstill.engine.stack import Finished, first_memory
from fedstill.engine.step import Program, autocast_to, precision_mode
from fedstill.engine.turns import Turns, turns_key
from fedstill.engine.workers import Workers

FEEDS = 4  # sets beside the train set that stay on the device
SMALL_NET = 50_000  # parameters up to which a call costs more than the work in it, on a CPU
OPTIMIZER = "optimizer"  # the slot of a client's state for what its optimiser remembers
TURNS = 4  # games of several models that keep what they captured: feddf_gen+fedftg plays three a round
Held = tuple[np.ndarray, np.ndarray]  # the data rows of some clients one after another, and how many each holds
LANES = 16  # clients in flight on a GPU when each runs alone


class Engine:
    """Trains cohorts of one federation with one model. Built by `build_engine`."""

    def __init__(
        self,
        model: Model,
        federation: Federation,
        *,
        stacked: bool,
        device: torch.device,
        chunk: int | None = None,
        precision: str = "float32",
        graphs: bool = False,
        compiled: bool = False,
    ) -> None:
        self.model, self.device, self.stacked = model, device, stacked
        self.chunk, self.precision, self.graphs, self.compiled = chunk, precision, graphs, compiled
        self.name = "batched" if stacked else "looped"
        self.dtype = torch.float64 if precision == "float64" else torch.float32  # of the weights it is given, too
        self.dataset: Dataset = federation.train
        self.indices, self.offsets = federation.indices.numpy(), federation.offsets.numpy()
        self.feed = Feed(federation.train.x, federation.train.y, self.dataset, device, self.dtype)
        self.programs: dict[object, tuple[Program, Batched | Looped]] = {}
        self.feeds: dict[int, tuple[Tensor, Feed]] = {}
        self.turns: dict[object, Turns] = {}
        self.workers = Workers(device)

    def train(self, work: LocalWork, ids: np.ndarray, states: Tree, *, starts: Weights | None = None) -> Trained:
        """Train the clients `ids`; see core.trainer.CohortEngine.

        starts: (C, ...) the model that each client begins at, where they do not all begin at `work.start`.
        """
        training = work.training
        check_training(training)
        check_augmentations(training.augment, tuple(self.dataset.x.shape[1:]))
        with self.workers.quiet(), precision_mode(self.precision):
            rows, sizes = self._rows(ids)
            plan = make_plan(rows, sizes, ids, training=training, round=work.round, seed=work.seed)
            counts = self._label_counts(work.objective, rows, sizes)
            program, runner = self._program(work.objective, training, self.feed, work.start, work.received)
            slots = {slot: value for slot, value in states.items() if slot != OPTIMIZER}
            inputs = make_inputs(plan, slots, counts, sizes, self.dtype, states.get(OPTIMIZER))
            inputs.starts = starts
            weights, loss, optimizer = self._run(program, runner, plan, inputs, (rows, sizes))
            seeds = torch.from_numpy(plan.finish_seeds).to(self.device)
            local = local_view(program, inputs, seeds, len(ids))
            local = local._replace(params=weights.params, buffers=weights.buffers)
            chunk = runner.chunk if isinstance(runner, Batched) else None
            new_states, extra = finish_clients(program, local, rows, sizes, chunk=chunk)
            size, steps, travel, _ = inputs.facts
            mean_loss, who = loss / steps.clamp_min(1), torch.from_numpy(np.asarray(ids, np.int64))
            uploads = Uploads(weights, size.double(), steps, travel, mean_loss, extra, None, who)
        return Trained(uploads, {**new_states, OPTIMIZER: optimizer} if optimizer else new_states)

    def fit(
        self, lesson: Lesson, start: Weights, seed: Seed, *, optimizer: Tree | None = None, watch: Watch | None = None
    ) -> Fitted:
        """Train one model with the loop of the clients; see core.trainer.Trainer."""
        training, x, y = lesson.training, lesson.x, lesson.y
        check_training(training)
        check_augmentations(training.augment, tuple(x.shape[1:]), "method.augment")
        feed = self._feed_of(x)
        if feed.y.shape == y.shape and feed.y.dtype == y.dtype:
            feed.y.copy_(y)
        else:
            feed.y = y.to(self.device).clone()
            # captured steps read the old targets in place
            self.programs = {key: pair for key, pair in self.programs.items() if pair[0].feed is not feed}
        places = np.arange(len(x)) if lesson.rows is None else lesson.rows.cpu().numpy()
        sizes = np.array([len(places)])
        plan = make_plan(places, sizes, np.zeros(1, np.int64), training=training, round=1, seed=seed_for(seed, "fit"))
        counts = torch.full((1, len(self.dataset.classes)), float("nan"), device=self.device, dtype=self.dtype)
        program, runner = self._program(lesson.objective, training, feed, start, {})
        assert isinstance(runner, Looped)
        inputs = make_inputs(plan, {}, counts, sizes, self.dtype)
        with self.workers.loud(), precision_mode(self.precision, alone=True):
            self._keep_outputs(program, plan, inputs, (places, sizes))
            return runner.run_alone(plan, inputs, watch, optimizer or {})

    def outputs(
        self,
        weights: Weights,
        x: Tensor,
        stacked: bool = False,
        *,
        features: bool = True,
        batch: int | None = None,
        seed: Seed = 0,
        rows: Tensor | None = None,
        keep: bool = True,
    ) -> Output:
        """Outputs for samples in storage form; stacked weights give (T, M, ...). See core.trainer.Trainer."""
        feed = self._feed_of(x) if keep else self._feed(x)
        rows = None if rows is None else rows.to(self.device)
        with precision_mode(self.precision), autocast_to(self.precision, self.device):
            if batch is not None:
                how = {"stacked": stacked, "features": features}
                answer = forward_training(self.model, weights, feed, batch, seed, rows, **how)
            elif stacked:
                samples = len(x) if rows is None else len(rows)
                loop = self.model.traits.unbatchable is not None or self._in_turn(weights, samples)
                answer = forward_many(
                    self.model, weights, feed, rows, loop=loop, features=features, workers=self.workers
                )
            else:
                answer = forward(self.model, weights, feed, rows, features=features, workers=self.workers)
        return Output(*(part.to(self.dtype) for part in answer))

    def _in_turn(self, teachers: Weights, samples: int) -> bool:
        """Whether models answer faster one after another than under vmap.

        On a CPU stacking saves calls, not work: it pays for small dense nets on sets of one piece (10 teachers, a
        64-64-10 MLP: 200 samples 0.6 ms instead of 1.0; an MLP on CIFAR-10: 33 instead of 27).
        On a GPU it saves calls as long as one model's call does not fill the device. A full piece does (H200, 10
        models, 10,000 CIFAR-10 images, in turn and together: `cnn` 55 and 66 ms, `mlp` 8.0 and 17.2, VGG8 146 and 496).
        """
        if self.device.type != "cpu":
            full = samples >= ROWS_AT_ONCE.get(self.device.type, ROWS_AT_ONCE["cuda"])
            return full or (self.model.traits.convolutional and not self.stacked)
        weight = sum(leaf[0].numel() for leaf in teachers.params.values())
        return self.model.traits.convolutional or samples > ROWS_AT_ONCE["cpu"] or weight > SMALL_NET

    def batch_statistics(self, weights: Weights, x: Tensor, batch: int = 128) -> Params:
        with precision_mode(self.precision):
            return batch_statistics(self.model, weights, self._feed_of(x), batch)

    def take_turns(
        self,
        players: Mapping[str, Player],
        start: Mapping[str, Weights],
        drawn: Tree,
        given: Tree,
        seed: Seed,
        *,
        optimizers: Mapping[str, Tree] | None = None,
    ) -> dict[str, Fitted]:
        """Several models, each step of one seeing all; see core.trainer.Trainer."""
        key = turns_key(players, drawn, given)
        with self.workers.loud(), precision_mode(self.precision):
            turns = self.turns.pop(key, None)
            if turns is None:
                if len(self.turns) >= TURNS:  # before the new one takes its memory
                    del self.turns[next(iter(self.turns))]
                for player in players.values():
                    check_training(player.training)
                layouts = {name: layout_alone(weights.params, self.graphs) for name, weights in start.items()}
                autocast = partial(autocast_to, self.precision, self.device)
                turns = Turns(players, start, self._each, layouts=layouts, autocast=autocast, graphs=self.graphs)
            self.turns[key] = turns  # the newest stands last
            return turns.run(players, start, drawn, given, seed, optimizers or {})

    def _each(self, weights: Weights, x: Tensor) -> Output:
        """Return the outputs of several models for the same inputs, (T, B, ...), with the gradient to the inputs."""
        if self.model.traits.unbatchable is None and not self._in_turn(weights, len(x)):
            return torch.func.vmap(lambda each: self.model.apply(each, x, training=False)[0])(weights)
        count = len(next(iter(weights.params.values())))
        outputs = [self.model.apply(row_of(weights, i), x, training=False)[0] for i in range(count)]
        return Output(torch.stack([each.logits for each in outputs]), torch.stack([each.features for each in outputs]))

    def lend(self, model: Model, *, stacked: bool | None = None) -> Engine:
        """An engine for another model of the same data; it keeps nothing in common that either could change."""
        other = copy.copy(self)
        other.model, other.programs, other.feeds, other.turns = model, {}, {}, {}
        if stacked is not None:
            other.stacked, other.name = stacked, "batched" if stacked else "looped"
        return other

    def _run(self, program: Program, runner: Batched | Looped, plan: Plan, inputs: Inputs, held: Held) -> Finished:
        if isinstance(runner, Batched):
            self._keep_outputs(program, plan, inputs, held)
        order = np.argsort(-plan.steps, kind="stable")
        columns: list[int] = order.tolist()
        if columns != list(range(len(columns))):
            plan, inputs = plan.columns(columns), columns_of(inputs, torch.from_numpy(order).to(self.device))
        if isinstance(runner, Batched):
            runner.chunk = self._auto_chunk(program, inputs)
            finished = runner.run(plan, inputs, columns)
        else:
            finished = runner.run(plan, inputs, columns, partial(self._keep_client, plan, inputs, held, columns))
        return finished._replace(weights=program.whole(finished.weights, width=len(columns)))

    def _keep_client(
        self, plan: Plan, inputs: Inputs, held: Held, clients: list[int], program: Program, column: int
    ) -> None:
        """Keep the outputs for the client in one column, which is `clients[column]` of the cohort.

        A frozen model sees the rows of one client at a time, because a matrix product rounds by its number of rows, and
        the bits of a client must not depend on its cohort.
        """
        rows, sizes = held
        client = clients[column]
        first, size = int(sizes[:client].sum()), int(sizes[client])
        piece = rows[first : first + size]
        if program.features is not None and not self.rows_have_one_owner:
            program.features.known[piece] = False  # another client's call has computed them among other rows
        alone = columns_of(inputs, slice(column, column + 1))
        self._keep_outputs(program, plan.columns([column]), alone, (piece, sizes[client : client + 1]), whole=True)

    def _keep_outputs(self, program: Program, plan: Plan, inputs: Inputs, held: Held, *, whole: bool = False) -> None:
        """Keep all that is the same for a row at every step of a plan.

        whole: compute the features of all held rows at once, and not of those only that the plan has and nobody knows.
        """
        with program.autocast():  # the teacher in the precision of the student
            self._fill_cache(program, plan, inputs, *held)
            fill_features(program, plan, held[0] if whole else None)

    def _fill_cache(self, program: Program, plan: Plan, inputs: Inputs, rows: np.ndarray, sizes: np.ndarray) -> None:
        """Outputs of frozen models that do not change in a round, once per round instead of once per epoch."""
        worth = program.static or plan.weight.sum() >= len(rows)  # a captured step goes on reading what it read first
        teachers = program.objective.frozen if worth and len(sizes) else {}
        if not teachers:
            program.cache = {}
            return
        clients = local_view(program, inputs, inputs.facts[1], len(sizes))
        first = of_clients(clients, 0)
        names = program.cacheable(first)
        alike = [name for name in names if teachers[name](first) is program.start]
        # A client's own teacher takes a call a client here: more than its share of a dense cohort's steps
        # (MOON, 1000 clients of a 64-64-10 MLP: 538 ms a round instead of 443; the CNN: 2.4 s instead of 3.0).
        # A row has one place in the cache, so it must have one owner, unless clients fill it in turn.
        in_turn = not (self.stacked or program.static)
        single = program.feed is not self.feed or (
            self.model.traits.convolutional and (in_turn or self.rows_have_one_owner)
        )
        per_client = [name for name in names if name not in alike] if single else []
        program.cache = {name: kept for name, kept in program.cache.items() if name in (*alike, *per_client)}
        places = torch.from_numpy(rows).to(self.device)
        if alike:
            output = forward(self.model, program.start, program.feed, places)
            for name in alike:
                program.remember(name, places, output)
        for k, piece in enumerate(torch.split(places, sizes.tolist()) if per_client else ()):
            for name in per_client:
                teacher = teachers[name](of_clients(clients, k))
                program.remember(name, piece, forward(self.model, teacher, program.feed, piece))

    @cached_property
    def rows_have_one_owner(self) -> bool:
        return len(np.unique(self.indices)) == len(self.indices)

    def _auto_chunk(self, program: Program, inputs: Inputs) -> int:
        cohort = max(1, inputs.index.shape[1])
        if not len(inputs.index):
            return cohort
        if not program.memory:
            probe(program, inputs)
            program.budget = chunk_budget(self.device, program)  # once: later, what we captured counts as used
        return self.chunk or max(1, min(cohort, program.budget // program.memory))

    def _program(
        self, objective: Objective, training: Training, feed: Feed, start: Weights, received: Tree
    ) -> tuple[Program, Batched | Looped]:
        key = id(objective), replace(training, lr=0.0, lr_decay=1.0), id(feed)
        if key not in self.programs:
            # clients without graphs are those of a CPU, where a trace saves little and takes longer than most cohorts
            compiled = self.compiled and (self.graphs or feed is not self.feed)
            how: dict[str, Any] = {"static": self.graphs, "precision": self.precision, "compiled": compiled}
            program = Program(self.model, objective, training, feed, **how)
            runner: Batched | Looped
            # A stack counts its clients' steps as one, and kept optimisers have taken different numbers of them.
            if self.stacked and feed is self.feed and not training.keep_optimizer:
                runner = Batched(program, self.workers, chunk=1, graphs=self.graphs)
            else:
                runner = Looped(program, self.workers, lanes=LANES, graphs=self.graphs)
            self.programs[key] = program, runner
        self.programs[key][0].load(start, received)
        return self.programs[key]

    def _rows(self, ids: np.ndarray) -> Held:
        """The data rows of some clients, one after another, and how many each has."""
        first, sizes = self.offsets[ids], self.offsets[ids + 1] - self.offsets[ids]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self.indices[np.repeat(first, sizes) + within], sizes

    def _label_counts(self, objective: Objective, rows: np.ndarray, sizes: np.ndarray) -> Tensor:
        classes = len(self.dataset.classes)
        if Need.LABEL_COUNTS not in objective.needs:  # what is not declared is not passed
            return torch.full((len(sizes), classes), float("nan"), device=self.device, dtype=self.dtype)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        labels = self.dataset.y.numpy()[rows]
        counts = np.bincount(owner * classes + labels, minlength=len(sizes) * classes)
        return torch.from_numpy(counts.reshape(len(sizes), classes)).to(self.device, self.dtype)

    def _feed(self, x: Tensor) -> Feed:
        return Feed(x, torch.zeros(len(x), dtype=torch.int64), self.dataset, self.device, self.dtype)

    def _feed_of(self, x: Tensor) -> Feed:
        """A feed for a set that comes back every round (test set, unlabeled set): moved once, the last few kept."""
        known = self.feeds.pop(id(x), None)
        if known is None or known[0] is not x:
            known = (x, self._feed(x))
        self.feeds[id(x)] = known  # the newest stands last
        if len(self.feeds) > FEEDS:
            _, dropped = self.feeds.pop(next(iter(self.feeds)))
            self.programs = {key: pair for key, pair in self.programs.items() if pair[0].feed is not dropped}
        return known[1]


def keep_optimizers(phases: tuple[Phase, ...], training: Training) -> tuple[Phase, ...]:
    """The same methods, whose clients keep their optimiser's moments and step count; through every phase, too."""

    def kept(objective: Objective) -> Objective:
        def init(weights: Weights) -> Tree:
            memory = first_memory(training, weights.params)
            return {**objective.init(weights), **({OPTIMIZER: memory} if memory else {})}

        return replace(objective, init=init)

    return tuple(
        phase._replace(method=replace(phase.method, objective=kept(phase.method.objective))) for phase in phases
    )
