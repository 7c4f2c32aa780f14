"""Faults at every door of a run: uploads, answers before the first round, and orders to clients.

    python benchmarks/storm/doors.py --faults 10000 --seed 1

A fault is harmless if the run ends with the bits that it has when the struck messages never come. So each composition
is played once with silence in these places, and then again and again with faults there, several in a run. Clients stand
behind the wire (`Loopback`) or in the server's process, where uploads are a stack of tensors. Every row of the
conformance table is played, and mixtures, phases, heads alone and clients of two networks.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / room) for room in ("support", "conformance")]

import mixed_runs  # noqa: E402
from elsewhere import REFINED, RUNS, a_run  # noqa: E402
from method_rows import ROWS  # noqa: E402
from toy import same_bits  # noqa: E402

from fedstill.compose.moving import moving  # noqa: E402
from fedstill.core.trainer import Messages  # noqa: E402
from fedstill.core.tree import as_tree, select  # noqa: E402
from fedstill.core.types import Weights  # noqa: E402
from fedstill.loop.federate import Built, federate  # noqa: E402
from fedstill.loop.here import Here  # noqa: E402
from fedstill.loop.message import template_of, with_digest  # noqa: E402
from fedstill.methods.lookup import build_method  # noqa: E402
from fedstill.population import Loopback, over_loopback  # noqa: E402
from fedstill.population.wire import pack_tree, seal, unpack_tree, unseal  # noqa: E402

ROUNDS, STRUCK = 5, 2  # clients whose message is struck, of the seven of each round
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
        said = unseal(desk.answer(*damaged), limit=LIMIT).facts
        if said["kind"] != "refused" or "\n" in str(said["reason"]):
            raise AssertionError(f"a client took a damaged order ({fault.__name__}): {said}")


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


# ---- runs


def compositions() -> dict[str, Callable[[], Built]]:
    """Return a maker of a small run for each composition."""
    made: dict[str, Callable[[], Built]] = {}
    for row in ROWS:
        if not any(release.multiplier is not None for release in row.build().releases) and row.name != "update_noise":
            made[row.id.rpartition("/")[2][:60]] = partial(a_run, row.build(), row.net, rounds=ROUNDS, cohort=7)
    for name, changes in RUNS.items():
        rest = {key: value for key, value in changes.items() if key != "method"}
        made[f"mixture {name}"] = partial(_mixture, changes["method"], rest)
    for text in (f"fedaux({REFINED})", "scaffold", f"feddf({REFINED})"):
        made[f"two networks {text.partition('(')[0]}"] = partial(_two_networks, text)
    return made


def _mixture(text: str, changes: dict[str, Any]) -> Built:
    return a_run(build_method(text), **{"rounds": ROUNDS, "cohort": 7, **changes})


def _two_networks(text: str) -> Built:
    settings = {"model": mixed_runs.mixed(), "federation": mixed_runs.federation(), "cohort": 6, "rounds": ROUNDS}
    return a_run(build_method(text), **settings)


def over_the_wire(built: Built, folder: Path, struck: Struck) -> Built:
    wired = over_loopback(built, folder)
    make = wired.population
    assert isinstance(make, partial)
    options = {**make.keywords, "transport": StruckWire(make.keywords["transport"], struck)}
    return replace(wired, population=partial(make.func, **options))


def in_the_process(built: Built, folder: Path, struck: Struck) -> Built:
    return replace(built, population=partial(StruckHere, struck=struck))


WAYS = {"over the wire": over_the_wire, "in the process": in_the_process}


def played(make: Callable[[], Built], way: str, chance: Random | None) -> tuple[Weights, Struck]:
    """Play a run, struck by faults or by silence."""
    struck = Struck(chance)
    with tempfile.TemporaryDirectory() as folder:
        result = federate(WAYS[way](make(), Path(folder), struck))
    if len(result.history.rows) != ROUNDS or any(row["accepted"] == 0 for row in result.history.rows):
        raise AssertionError("a round was lost")
    return result.weights, struck


def storm(faults: int, seed: int, names: list[str] | None = None) -> Iterator[tuple[str, str, Counter[str], str]]:
    """Yield (composition, way, faults by kind, "" or the failure) for runs until `faults` faults were made."""
    made, references = compositions(), {}
    cases = [(name, way) for name in (names or sorted(made)) for way in WAYS]
    count, turn = 0, 0
    while count < faults:
        name, way = cases[turn % len(cases)]
        chance = Random(f"{seed} {turn} {name} {way}")
        turn += 1
        if (name, way) not in references:
            references[name, way] = played(made[name], way, None)[0]
        try:
            weights, struck = played(made[name], way, chance)
            failure, counts = "" if same_bits(weights, references[name, way]) else "other bits", struck.counts
        except Exception as error:
            failure, counts = f"{type(error).__name__}: {error}", Counter({"unknown": 1})
        count += counts.total()
        yield name, way, counts, failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="a composition")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # a line for each refusal
    began, counts, runs, failures = time.monotonic(), Counter[str](), 0, []
    for name, way, made, failure in storm(options.faults, options.seed, options.only):
        counts, runs = counts + made, runs + 1
        if failure:
            failures.append(f"{name} {way}: {failure}")
            print(failures[-1], flush=True)
        if runs % 50 == 0:
            print(
                f"{runs} runs, {counts.total()} faults, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
            )
    for kind, count in sorted(counts.items()):
        print(f"{count:6}  {kind}")
    print(f"{counts.total()} faults in {runs} runs, seed {options.seed}: {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
