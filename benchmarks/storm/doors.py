"""Faults at every door of a run: uploads, answers before the first round, orders to clients, and workers that die.

    python benchmarks/storm/doors.py --faults 10000 --seed 1
    python benchmarks/storm/doors.py --way "on spawned workers" --faults 300 --seed 1

A fault is harmless if the run ends with the bits that it has when the struck messages never come. So each composition
is played once with silence in these places, and then again and again with faults there, several in a run. Clients stand
behind the wire (`Loopback`), in the server's process, or on two workers: spawned processes, or Ray actors. Workers are
trusted, and their clients are not: what these send comes back in the stack of a worker's piece, and some workers are
killed at work. Every row of the conformance table is played, and mixtures, phases, heads alone and clients of two
networks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / room) for room in ("support", "conformance")]

from elsewhere import REFINED, RUNS, RecipeOf  # noqa: E402
from killing import LINE  # noqa: E402
from method_rows import ROWS  # noqa: E402
from on_ray import ROOM_FOR_TWO, local_ray  # noqa: E402
from toy import same_bits  # noqa: E402

from fedstill.compose.moving import moving  # noqa: E402
from fedstill.core.setup import Question  # noqa: E402
from fedstill.core.trainer import Messages  # noqa: E402
from fedstill.core.tree import as_tree, select, tree_map  # noqa: E402
from fedstill.core.types import Weights  # noqa: E402
from fedstill.loop.federate import Built, federate  # noqa: E402
from fedstill.loop.here import Here  # noqa: E402
from fedstill.loop.message import template_of, with_digest  # noqa: E402
from fedstill.population import Loopback, over_loopback  # noqa: E402
from fedstill.population.on_ray import ray_crew  # noqa: E402
from fedstill.population.scattered import Crew, MakeCrew, Up, scattered  # noqa: E402
from fedstill.population.spawned import spawned_crew  # noqa: E402
from fedstill.population.wire import pack_tree, seal, unpack_tree, unseal  # noqa: E402
from fedstill.population.worker import Arrays, Kit, arrays_of, tensors_of  # noqa: E402

ROUNDS, STRUCK = 5, 2  # clients whose message is struck, of the seven of each round
KILLED = 0.06  # chance of a worker to be killed at a piece
LIMIT = 1 << 30
Random = random.Random
Tensors = dict[str, torch.Tensor]


# ---- faults of a message: (chance, the message, messages of the past) -> another message, an error, or None: silence


def _garbage(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    return chance.randbytes(chance.choice([0, 1, 7, 46, 500, len(message)]))


def _cut(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    return message[: chance.randrange(len(message))]


def _flipped(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    changed = bytearray(message)
    for _ in range(chance.choice([1, 1, 2, 9])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed) if bytes(changed) != message else _cut(chance, message, past)


def _longer(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    return message + chance.randbytes(chance.choice([1, 64]))


def _zeroed(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    first = chance.randrange(len(message) - 1)
    last = chance.randrange(first + 1, len(message))
    changed = message[:first] + bytes(last - first) + message[last:]
    return changed if changed != message else _cut(chance, message, past)


def _another(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    """A message of another client or another round, as it was."""
    return chance.choice(past) if past else b""


def _error(chance: Random, message: bytes, past: list[bytes]) -> Exception:
    return chance.choice([TimeoutError("late"), OSError(28, "no space"), MemoryError(), RuntimeError("CUDA\x1b[31m\n")])


def _silence(chance: Random, message: bytes, past: list[bytes]) -> None:
    return None


def _facts(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    """Other facts under a right checksum."""
    facts, body = unseal(message, limit=LIMIT)
    name = chance.choice(["kind", "client", "order"])
    values = [None, -1, "x" * 4000, 1e308, True, 10**40, "ask", "refused", "\x1b[2J", "play"]
    facts[name] = chance.choice([value for value in values if value != facts[name]])
    if chance.random() < 0.2:
        del facts[name]
    return seal(facts, body)


def _body(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    """Other bytes as the body, under a right checksum."""
    facts, body = unseal(message, limit=LIMIT)
    damage = chance.choice([_garbage, _cut, _longer, _zeroed_header])
    return seal(facts, damage(chance, body, past))


def _zeroed_header(chance: Random, body: bytes, past: list[bytes]) -> bytes:
    return bytes(8) + body[8:]


def _tensors(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    """Tensors that no client may send, in a message that is whole otherwise."""
    facts, body = unseal(message, limit=LIMIT)
    if facts["kind"] == "answer":
        return seal(facts, pack_tree(_damaged_answer(chance, unpack_tree(body))))
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    tensors = safetensors.torch.load(body)
    damaged = chance.choice(UPLOADS)(chance, dict(tensors))
    return seal(facts, with_digest(safetensors.torch.save(damaged, metadata=header["__metadata__"])))


BYTES: tuple[Callable[..., Any], ...] = (
    _garbage, _cut, _flipped, _longer, _zeroed, _another, _error, _silence, _facts, _body, _tensors, _tensors, _tensors,
)  # fmt: skip


# ---- faults of the tensors of an upload, by flat names


def _floats(tensors: Tensors) -> list[str]:
    return [name for name, leaf in tensors.items() if name.startswith("params/") and leaf.numel()]


def _not_finite(chance: Random, tensors: Tensors) -> Tensors:
    name, value = chance.choice(_floats(tensors)), chance.choice([float("nan"), float("inf"), float("-inf")])
    leaf = tensors[name].clone()
    leaf.view(-1)[chance.randrange(leaf.numel())] = value
    return {**tensors, name: leaf}


def _huge(chance: Random, tensors: Tensors) -> Tensors:
    factor = chance.choice([1e6, 1e12, -1e9, 1e30])
    return {name: leaf * factor + factor if name in _floats(tensors) else leaf for name, leaf in tensors.items()}


def _wrong_number(chance: Random, tensors: Tensors) -> Tensors:
    name = chance.choice(["size", "steps", "travel"])
    values = {"size": [-1.0, 0.0, float("nan"), float("inf"), 1e30]}.get(name, [float("nan"), float("inf"), 1e30])
    return {**tensors, name: torch.full_like(tensors[name], chance.choice(values))}


def _lacking(chance: Random, tensors: Tensors) -> Tensors:
    gone = chance.choice(sorted(tensors))
    return {name: leaf for name, leaf in tensors.items() if name != gone}


def _surplus(chance: Random, tensors: Tensors) -> Tensors:
    return {**tensors, chance.choice(["params/evil", "extra/x", "ids", "__class__", "a" * 300]): torch.zeros(3)}


def _other_shape(chance: Random, tensors: Tensors) -> Tensors:
    name = chance.choice(sorted(tensors))
    return {**tensors, name: torch.zeros((*tensors[name].shape, 2), dtype=tensors[name].dtype)}


def _other_type(chance: Random, tensors: Tensors) -> Tensors:
    name = chance.choice(sorted(tensors))
    return {**tensors, name: tensors[name].to(torch.float16 if tensors[name].dtype != torch.float16 else torch.int8)}


UPLOADS: tuple[Callable[[Random, Tensors], Tensors], ...] = (
    _not_finite, _not_finite, _huge, _wrong_number, _lacking, _surplus, _other_shape, _other_type,
)  # fmt: skip


def _damaged_answer(chance: Random, tree: dict[str, Any]) -> dict[str, Any]:
    """An answer to a question, in another form or far too large."""
    name = chance.choice(sorted(tree))
    leaf = tree[name]
    if not isinstance(leaf, torch.Tensor):
        return {**tree, name: _damaged_answer(chance, leaf)} if leaf else {**tree, name: {"x": torch.zeros(1)}}
    damaged: list[Any] = [{**tree, "more": torch.ones(2)}, {}, {**tree, name: torch.zeros((*leaf.shape, 2))}]
    if leaf.is_floating_point() and leaf.numel():
        damaged += [{**tree, name: leaf * float("nan")}, {**tree, name: leaf * 1e9 + 1e9}]
    return chance.choice(damaged)


# ---- where faults strike


@dataclass
class Struck:
    """Says whose message is struck in which round, and strikes it.

    chance: None strikes with silence, which is the reference.
    """

    chance: Random | None
    counts: Counter[str] = field(default_factory=Counter)

    def strikes(self, round: int, ids: list[int]) -> set[int]:
        """Return the struck clients; equal in all runs of a composition."""
        return set(Random(1000 * round + len(ids)).sample(sorted(ids), STRUCK)) if len(ids) > STRUCK + 2 else set()

    def answered(self, chance: Random, answer: Any, where: str) -> Any:
        """Return what a struck client answers to a question: another form, huge numbers, or an error."""
        kind = "an error" if isinstance(answer, str) or chance.random() < 0.2 else "tensors"
        self.counts[f"answer before round 1 {where}: {kind}"] += 1
        return "RuntimeError: CUDA" if kind == "an error" else _damaged_answer(chance, answer)


@dataclass
class StruckWire:
    """A Loopback between whose ends messages are struck; clients also get damaged orders before the right one."""

    inner: Loopback
    struck: Struck
    past: list[bytes] = field(default_factory=list)
    asked: int = 0

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, bytes | Exception]]:
        self.asked += 1
        chance, hit = self.struck.chance, self.struck.strikes(self.asked, list(each))
        for client, answer in self.inner.exchange(common, each):
            if chance is not None and client not in hit and chance.random() < 0.3:
                self._strike_order(client, common, each[client], chance)
                # the client that got a damaged order trains by the right one as if nothing had been
                ((_, answer),) = self.inner.exchange(common, {client: each[client]})
            if client in hit:
                if chance is None:
                    continue
                fault = chance.choice(BYTES)
                door = "answer before round 1" if b'"question"' in common[:4000] else "upload"
                self.struck.counts[f"{door} on the wire: {fault.__name__.strip('_')}"] += 1
                struck = fault(chance, answer, self.past)
                if struck is not None:
                    yield client, struck
                continue
            if isinstance(answer, bytes):
                self.past = [*self.past[-20:], answer]
            yield client, answer

    def _strike_order(self, client: int, common: bytes, own: bytes, chance: Random) -> None:
        fault = chance.choice([_garbage, _cut, _flipped, _longer, _zeroed, _facts_of_order])
        self.struck.counts[f"order: {fault.__name__.strip('_')}"] += 1
        desk = self.inner.desks[client]
        damaged = (fault(chance, common, self.past), own) if chance.random() < 0.7 else (common, fault(chance, own, []))
        facts = unseal(desk.answer(*damaged), limit=LIMIT).facts
        if facts["kind"] != "refused" or "\n" in str(facts["reason"]):
            raise AssertionError(f"a client took a damaged order ({fault.__name__}): {facts}")


def _facts_of_order(chance: Random, message: bytes, past: list[bytes]) -> bytes:
    facts, body = unseal(message, limit=LIMIT)
    name = chance.choice(sorted(facts))
    facts[name] = chance.choice([None, -7, "\x1b", 10**30, [1], 0.5])
    return seal(facts, body)


class StruckHere(Here):
    """A population of this process in whose uploads faults are made; silence is an error in a client's place."""

    def __init__(self, task: Any, first: Any, *, struck: Struck, **options: Any) -> None:
        super().__init__(task, first, **options)
        self.struck = struck

    def play(self, order: Any, ids: np.ndarray) -> Messages:
        uploads = super().play(order, ids)
        moved = moving(uploads.weights, self.task.model, self.task.training.part)  # as a client would send it
        uploads = uploads._replace(weights=moved)
        chance, hit = self.struck.chance, self.struck.strikes(order.round, ids.tolist())
        messages: dict[int, Any] = {}
        for place, client in enumerate(ids.tolist()):
            messages[client] = as_tree(select(uploads, place))
            if client in hit:
                messages[client] = TimeoutError() if chance is None else self._fault(chance, messages[client])
        return Messages(messages, template_of(uploads))

    def ask(self, question: Any, ids: Collection[int], *, round: int, sent: Any) -> Iterator[tuple[int, Any]]:
        answers = super().ask(question, ids, round=round, sent=sent)
        chance, hit = self.struck.chance, self.struck.strikes(round, list(ids))
        for client, answer in answers:
            if client not in hit or not isinstance(question, Question):
                yield client, answer
            else:
                yield client, "silence" if chance is None else self.struck.answered(chance, answer, "in the process")

    def _fault(self, chance: Random, tree: dict[str, Any]) -> Any:
        kind = chance.choice(["not a mapping", "an error", "tensors", "tensors", "tensors"])
        self.struck.counts[f"upload in the process: {kind}"] += 1
        if kind == "not a mapping":
            return chance.choice([None, 3, "x", [tree], {"params": {"w": "x"}}, {}, {1: 2}])
        if kind == "an error":
            return chance.choice([ValueError("x\ny"), MemoryError(), KeyboardInterrupt.__name__])
        flat = {f"params/{name}": leaf for name, leaf in tree["params"].items()}
        numbers = {name: tree[name] for name in ("size", "steps", "travel")}
        damaged = chance.choice(UPLOADS)(chance, {**flat, **numbers})
        params = {name.removeprefix("params/"): leaf for name, leaf in damaged.items() if name not in numbers}
        return (
            {**tree, **{name: damaged[name] for name in numbers if name in damaged}, "params": params}
            if all(name in damaged for name in numbers)
            else {name: leaf for name, leaf in tree.items() if name in damaged or name not in numbers}
        )


class StruckCrew:
    """A crew some of whose workers are killed at work, and whose struck clients send and answer something else."""

    def __init__(self, inner: Crew, struck: Struck, where: str) -> None:
        self.inner, self.size, self.struck, self.where = inner, inner.size, struck, where
        self.hit: set[int] = set()  # struck clients of the cohort at work
        self._ids: dict[int, Sequence[int]] = {}  # of the piece of each worker
        self._processes: dict[int, int] = {}
        self.share, self.ready = inner.share, inner.ready

    def hand(self, worker: int, task: str, shared: Any, *piece: Any) -> None:
        self._ids[worker] = [int(client) for client in piece[0]]
        self.inner.hand(worker, task, shared, *piece)
        chance = self.struck.chance
        if chance is not None and worker in self._processes and chance.random() < KILLED:
            self.struck.counts[f"worker {self.where}: kill -9"] += 1
            threading.Timer(chance.uniform(0.0, 0.05), _kill, [self._processes.pop(worker)]).start()

    def next(self, patience: float) -> tuple[int, Any] | None:
        event = self.inner.next(patience)
        if event is None:
            return None
        worker, result = event
        if isinstance(result, Up):
            match = LINE.search(f"worker 0 is {result.name}")
            assert match is not None
            self._processes[worker] = int(match[2])
        chance = self.struck.chance
        if chance is None:
            return event
        if isinstance(result, dict):
            return worker, {client: self._answered(chance, client, answer) for client, answer in result.items()}
        if type(result) is tuple:
            return worker, self._sent(chance, self._ids[worker], *result)
        return event

    def _answered(self, chance: Random, client: int, answer: Any) -> Any:
        if client not in self.hit:
            return answer
        tree = answer if isinstance(answer, str) else tensors_of(answer, "cpu")
        damaged = self.struck.answered(chance, tree, self.where)
        return damaged if isinstance(damaged, str) else arrays_of(damaged)

    def _sent(self, chance: Random, ids: Sequence[int], sent: Arrays, after: Arrays) -> tuple[Arrays, Arrays]:
        """Damage the rows of struck clients in a piece, in what they send and sometimes in their memories."""
        sent, after = tree_map(np.copy, sent), tree_map(np.copy, after)
        numbers = {name: sent[name] for name in ("size", "steps", "travel")}
        rows = {**{f"params/{name}": array for name, array in sent["params"].items()}, **numbers}
        for place, client in enumerate(ids):
            if client not in self.hit:
                continue
            fault = chance.choice([_not_finite, _not_finite, _huge, _wrong_number])
            self.struck.counts[f"upload {self.where}: {fault.__name__.strip('_')}"] += 1
            tensors = {name: torch.from_numpy(np.array(array[place])) for name, array in rows.items()}
            for name, leaf in fault(chance, tensors).items():
                rows[name][place] = leaf.numpy()
            if chance.random() < 0.3:
                tree_map(partial(_spoil, place), after)
        return sent, after


def _spoil(place: int, array: np.ndarray) -> None:
    if np.issubdtype(array.dtype, np.floating):
        array[place] = np.nan


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


class StruckHost:
    """Says to a crew who is struck, cohort by cohort."""

    def __init__(self, inner: Any, crew: StruckCrew) -> None:
        self.inner, self.crew = inner, crew

    def play(self, order: Any, ids: np.ndarray, states: Any, noise_seed: int) -> Any:
        self.crew.hit = self.crew.struck.strikes(order.round, ids.tolist())
        return self.inner.play(order, ids, states, noise_seed)

    def answers(self, question: Any, ids: Collection[int], sent: Any, *, round: int, noise_seed: int) -> Any:
        self.crew.hit = self.crew.struck.strikes(round, list(ids))
        return self.inner.answers(question, ids, sent, round=round, noise_seed=noise_seed)


# ---- runs


def compositions() -> dict[str, RecipeOf]:
    """Return the recipe of a small run for each composition."""
    made, changes = {}, {"rounds": ROUNDS, "cohort": 7}
    for row in ROWS:
        if not any(release.multiplier is not None for release in row.build().releases) and row.name != "update_noise":
            made[row.id.rpartition("/")[2][:60]] = RecipeOf(row.id, changes)
    made |= {f"mixture {name}": RecipeOf(name, changes) for name in RUNS}
    for text in (f"fedaux({REFINED})", "scaffold()", f"feddf({REFINED})"):
        made[f"two networks {text.partition('(')[0]}"] = RecipeOf(text, {"rounds": ROUNDS})
    return made


def over_the_wire(recipe: RecipeOf, folder: Path, struck: Struck) -> Built:
    wired = over_loopback(recipe.run(), folder)
    make = wired.population
    assert isinstance(make, partial)
    options = {**make.keywords, "transport": StruckWire(make.keywords["transport"], struck)}
    return replace(wired, population=partial(make.func, **options))


def in_the_process(recipe: RecipeOf, folder: Path, struck: Struck) -> Built:
    return replace(recipe.run(), population=partial(StruckHere, struck=struck))


def on_workers(recipe: RecipeOf, folder: Path, struck: Struck, *, crew: MakeCrew, where: str) -> Built:
    crews: list[StruckCrew] = []

    @contextmanager
    def make_crew(kit: Kit, rows: Arrays) -> Iterator[StruckCrew]:
        with crew(kit, rows) as inner:
            crews.append(StruckCrew(inner, struck, where))
            yield crews[0]

    @contextmanager
    def population(task: Any, first: Any, **options: Any) -> Iterator[Here]:
        with scattered(task, first, crew=make_crew, recipe=recipe, device="cpu", threads=1, **options) as here:
            here.host = StruckHost(here.host, crews[0])
            yield here

    return replace(recipe.run(), population=population)


SPAWNED, ON_RAY = "on spawned workers", "on Ray"
WAYS = {
    "over the wire": over_the_wire,
    "in the process": in_the_process,
    SPAWNED: partial(on_workers, crew=partial(spawned_crew, count=2), where=SPAWNED),
    ON_RAY: partial(on_workers, crew=partial(ray_crew, count=2), where=ON_RAY),
}
REFERENCES = {SPAWNED: "in the process", ON_RAY: "in the process"}  # where silence is played, if not in the same place
USUAL = ("over the wire", "in the process")


def played(recipe: RecipeOf, way: str, chance: Random | None) -> tuple[Weights, Struck]:
    """Play a run, struck by faults or by silence."""
    struck = Struck(chance)
    with tempfile.TemporaryDirectory() as folder:
        result = federate(WAYS[way](recipe, Path(folder), struck))
    if len(result.history.rows) != ROUNDS or any(row["accepted"] == 0 for row in result.history.rows):
        raise AssertionError("a round was lost")
    return result.weights, struck


def storm(
    faults: int, seed: int, names: list[str] | None = None, *, ways: Sequence[str] = USUAL, first: int = 0
) -> Iterator[tuple[str, str, Counter[str], str]]:
    """Yield (composition, way, faults by kind, "" or the failure) for runs until `faults` faults were made.

    first: the number of the first run, to go on where another call has ended.
    """
    made, references = compositions(), {}
    cases = [(name, way) for name in (names or sorted(made)) for way in ways]
    count, turn = 0, first
    while count < faults:
        name, way = cases[turn % len(cases)]
        chance = Random(f"{seed} {turn} {name} {way}")
        turn += 1
        reference = name, REFERENCES.get(way, way)
        if reference not in references:
            references[reference] = played(made[name], reference[1], None)[0]
        try:
            weights, struck = played(made[name], way, chance)
            failure, counts = "" if same_bits(weights, references[reference]) else "other bits", struck.counts
        except Exception as error:
            failure, counts = f"{type(error).__name__}: {error}", Counter({"unknown": 1})
        count += counts.total()
        yield name, way, counts, failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="a composition")
    parser.add_argument("--way", action="append", choices=WAYS, help="where clients stand; by default the first two")
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to go on with another call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # a line for each refusal
    began, counts, runs, failures = time.monotonic(), Counter[str](), 0, []
    ways = options.way or USUAL
    cluster: AbstractContextManager[Any] = local_ray(**ROOM_FOR_TWO) if ON_RAY in ways else nullcontext()
    with cluster:
        for name, way, made, failure in storm(
            options.faults, options.seed, options.only, ways=ways, first=options.first
        ):
            counts, runs = counts + made, runs + 1
            if failure:
                failures.append(f"{name} {way}: {failure}")
                print(failures[-1], flush=True)
            if runs % 50 == 0 or ways != USUAL:
                spent = time.monotonic() - began
                print(f"{runs} runs, {counts.total()} faults, {spent:.0f} s", file=sys.stderr, flush=True)
    for kind, count in sorted(counts.items()):
        print(f"{count:6}  {kind}")
    print(f"{counts.total()} faults in {runs} runs, seed {options.seed}: {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
