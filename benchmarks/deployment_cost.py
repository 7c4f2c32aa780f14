"""Measure what a round costs a deployment, and compute from it what larger ones would cost.

    python benchmarks/deployment_cost.py --measure    measure again, and write docs/results/deployment.json
    python benchmarks/deployment_cost.py --write      write the tables of docs/scale.md from that file
    python benchmarks/deployment_cost.py --simulate   play small runs of the shapes that the tables are about

Every time is processor time of one thread, the shortest of several repeats, so other work on the machine changes it
little. Prices and networks are assumptions: they stand in ASSUMED and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from fedstill import Built, Callback, Dataset, Federation, Schedule, Training, build_method, build_model, federate
from fedstill.core.tree import as_tree, stack
from fedstill.core.types import Model, Round, Uploads, Weights
from fedstill.loop.guard import Guard, admit
from fedstill.loop.message import decode, encode, on_meta
from fedstill.population.desk import Desk, held_by
from fedstill.population.remote import Remote, without_rows
from fedstill.population.wire import digest_of, pack_tree, seal, unpack_tree, unseal
from fedstill.server.aggregate import average

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "docs" / "results" / "deployment.json", ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- tables of benchmarks/deployment_cost.py --write -->\n", "<!-- end of the tables -->"
LARGEST = 2**30  # bytes of the largest order and answer that fedstill reads; Flower's database broke at 1.05 GB
MEGABYTE, GIGABYTE = 10**6, 10**9
FEATURES, CLASSES = 1000, 10
RUN = {"run": "cost"}
WORKS = ("pack_order", "open_order", "pack_answer", "open_answer")

ASSUMED = {
    "price_a_gigabyte": 0.09,  # dollars for each gigabyte that leaves the server's data centre
    "price_a_core_hour": 0.05,  # dollars for one core of the server
    "server_bits": 10e9,  # bits a second that the server's network carries, in each direction
    "organisation_bits": 100e6,  # ... of an organisation
    "device_bits": 10e6,  # ... of a phone or a sensor
}
PROTOTYPE = {"poll_seconds": 3.0}  # of a prototype over Flower 1.41: a node asks for work so often


class Shape(NamedTuple):
    """A deployment that the tables are about."""

    name: str
    cohort: int
    parameters: int  # that travel, of 4 bytes each
    tensors: int
    bits: str  # the entry of ASSUMED that is a client's network
    base: int = 0  # parameters of 2 bytes that each client gets once, before the first round


# a BERT of 4 layers, 312 units, 30,522 tokens and 4 classes; its adapters: rank 4 beside 17 dense layers
BERT, BERT_ADAPTERS = 14_350_248 + 1_252, 4 * (4 * (4 * 312 + 2 * 312 + 2 * 1512) + 2 * 312) + 1_252
# seven billion: 32 blocks of 4096 units, dense layers of 11008; rank 8 beside four and three dense layers a block
SEVEN_BILLION, SEVEN_ADAPTERS = 6_738_415_616, 8 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
SHAPES = (
    Shape("100 organisations, CNN for 32x32 images", 100, 2_156_490, 8, "organisation_bits"),
    Shape("100 organisations, BERT, all of it", 100, BERT, 57, "organisation_bits"),
    Shape("100 organisations, BERT, adapters of rank 4", 100, BERT_ADAPTERS, 36, "organisation_bits", BERT),
    Shape("10,000 devices, 100 a round, MLP 784-64-10", 100, 50_890, 4, "device_bits"),
    Shape("10,000 devices, 1,000 a round, MLP 784-64-10", 1_000, 50_890, 4, "device_bits"),
    Shape("100 organisations, 7 billion, adapters of rank 8", 100, SEVEN_ADAPTERS, 448, "organisation_bits",
          SEVEN_BILLION),
    Shape("100 organisations, 7 billion, all of it", 100, SEVEN_BILLION, 291, "organisation_bits"),
)  # fmt: skip


# What a round is made of


def network(parameters: int) -> Model:
    """Return a dense network of about so many parameters."""
    return build_model("mlp", input_shape=(FEATURES,), classes=CLASSES, hidden=(max(1, parameters // 1011),))


def an_upload(weights: Weights, client: int = 0) -> Uploads:
    """Return what one client would send: the weights with a little noise."""
    generator = torch.Generator().manual_seed(client)
    params = {name: leaf + 1e-3 * torch.randn(leaf.shape, generator=generator) for name, leaf in weights.params.items()}
    one = torch.tensor(1.0)
    return Uploads(Weights(params, weights.buffers), one.double() * 20, one, one, one, {}, None, torch.tensor(client))


def cohort_of(weights: Weights, count: int) -> Uploads:
    trees = [as_tree(an_upload(weights, client)) for client in range(count)]
    joined = stack(trees)
    return Uploads(
        Weights(joined["params"], joined["buffers"]),
        *(joined[name] for name in ("size", "steps", "travel", "loss")),
        {}, None, torch.arange(count),
    )  # fmt: skip


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Return the shortest processor time of one call."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


@dataclass(frozen=True)
class Packed:
    """An order and an answer with a model of some size, as bytes."""

    weights: Weights
    order: bytes
    answer: bytes

    @classmethod
    def of(cls, parameters: int) -> Packed:
        weights = network(parameters).init(0)
        facts = {"kind": "play", "round": 1, "base": "", "fedstill": "0.0.0", **RUN}
        order = seal(facts, pack_tree({"start": weights._asdict(), "received": {}}))
        answer = seal({"order": digest_of(order), "client": 0, "kind": "upload"}, encode(an_upload(weights), round=1))
        return cls(weights, order, answer)

    @property
    def size(self) -> int:
        return 4 * sum(leaf.numel() for leaf in self.weights.params.values())


def measure_wire(parameters: int, repeats: int) -> dict[str, float]:
    """Return bytes, and processor seconds of packing and opening an order and an answer."""
    packed = Packed.of(parameters)
    upload = an_upload(packed.weights)
    template = on_meta(upload)

    def pack_order() -> None:
        digest_of(seal({"kind": "play"}, pack_tree({"start": packed.weights._asdict(), "received": {}})))

    def open_order() -> None:
        digest_of(packed.order)
        unpack_tree(unseal(packed.order, limit=LARGEST).body)

    def pack_answer() -> None:
        seal({"kind": "upload"}, encode(upload, round=1))

    def open_answer() -> None:
        decode(unseal(packed.answer, limit=LARGEST).body, template, client=0, round=1)

    works = {"pack_order": pack_order, "open_order": open_order, "pack_answer": pack_answer, "open_answer": open_answer}
    return {
        "model_bytes": packed.size,
        "order_bytes": len(packed.order),
        "answer_bytes": len(packed.answer),
        **{name: seconds_of(work, repeats) for name, work in works.items()},
    }


def measure_server(parameters: int, cohort: int, repeats: int) -> dict[str, float]:
    """Return processor seconds of the guard and of the aggregate for one round."""
    model = network(parameters)
    weights = model.init(0)
    uploads = cohort_of(weights, cohort)
    look = Round(
        number=1, start=weights, uploads=uploads, model=model, population=cohort, unlabeled=None, seed=0,
        trainer=None, validation=None,
    )  # fmt: skip
    return {
        "parameters": sum(leaf.numel() for leaf in weights.params.values()),
        "cohort": cohort,
        "guard": seconds_of(lambda: admit(uploads, weights, Guard(), round=1, past=[]), repeats),
        "aggregate": seconds_of(lambda: average().apply(weights, {}, look), repeats),
    }


# Rounds whose clients are bytes that somebody made up


class Ghosts:
    """A transport whose clients do not train: each answers an order with the model that it holds, and some noise."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of processor that making the answers took

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        order = unseal(common, limit=LARGEST)
        start = Weights(**unpack_tree(order.body)["start"])
        for client in each:
            began = time.process_time()
            body = encode(an_upload(start, client), round=order.facts["round"])
            answer = seal({"order": digest_of(common), "client": client, "kind": "upload"}, body)
            self.seconds += time.process_time() - began
            yield client, answer


def points(clients: int, features: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5 * clients, features, generator=generator)
    names = tuple(map(str, range(CLASSES)))
    y = x[:, :CLASSES].argmax(1)
    train, test = Dataset("points", x, y, names), Dataset("points", x[:20], y[:20], names)
    return Federation(train, test, torch.arange(len(x)), torch.arange(0, len(x) + 1, 5))


class Clock(Callback):
    """Notes wall-clock and processor seconds of each round."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.work: list[float] = []
        self._last = time.perf_counter(), time.process_time()

    def on_round(self, row: dict[str, object]) -> bool | None:
        now = time.perf_counter(), time.process_time()
        self.wall.append(now[0] - self._last[0])
        self.work.append(now[1] - self._last[1])
        self._last = now
        return None


def a_run(federation: Federation, model: Model, *, rounds: int, cohort: int) -> Built:
    return Built(
        method=build_method("fedavg")[0].method, model=model, federation=federation,
        training=Training(batch_size=5, lr=0.05), label="fedavg",
        schedule=Schedule(rounds=rounds, cohort=cohort, evaluate_every=rounds),
    )  # fmt: skip


def ghost_round(parameters: int, cohort: int) -> dict[str, float]:
    """Play rounds on a server whose clients are ghosts: its peak of memory above its start, and its seconds a round."""
    ghosts, clock = Ghosts(), Clock()
    built = a_run(points(cohort, FEATURES), network(parameters), rounds=3, cohort=cohort)
    make = partial(Remote, transport=ghosts, engines=built.engines, run=RUN)
    before = _status("VmRSS")
    built = replace(built, federation=without_rows(built.federation), population=make, holders=np.arange(cohort))
    result = federate(built, callbacks=[clock])
    assert all(row["accepted"] == cohort for row in result.history.rows), "ghosts were refused"
    each = (sum(clock.work[1:]) - ghosts.seconds * 2 / 3) / 2
    return {
        "parameters": sum(leaf.numel() for leaf in result.weights.params.values()),
        "cohort": cohort,
        "server_seconds": each,
        "peak_bytes": _status("VmHWM") - before,
    }


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def apart(name: str, *numbers: int) -> dict[str, float]:
    """Call a function of this script in a process of its own, whose peak of memory is its own."""
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import deployment_cost as cost; "
    code += f"print(json.dumps(cost.{name}(*{numbers})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    peaks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return peaks


# The record


def measure(repeats: int = 7) -> dict[str, Any]:
    """Return everything that is measured."""
    torch.set_num_threads(1)
    wire = [measure_wire(parameters, repeats) for parameters in (10_000, 100_000, 1_000_000, 10_000_000, 25_000_000)]
    sizes = [(10_000, 10), (10_000, 1_000), (100_000, 100), (1_000_000, 10), (1_000_000, 100), (10_000_000, 10)]
    server = [measure_server(parameters, cohort, repeats) for parameters, cohort in sizes]
    played = [(100_000, 100), (1_000_000, 20), (1_000_000, 100), (SEVEN_ADAPTERS, 10)]
    rounds = [apart("ghost_round", *size) for size in played]
    return {
        "machine": f"{_processor()}, one thread", "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "wire": wire, "server": server, "rounds": rounds,
    }  # fmt: skip


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.machine()


class Constants(NamedTuple):
    """What the tables are computed from: a few numbers that the record gives."""

    order_bytes: float  # of an order beside its tensors
    answer_bytes: float
    pack_order: float  # seconds a gigabyte
    open_order: float
    pack_answer: float
    open_answer: float
    guard: float  # seconds a client and a million parameters
    aggregate: float
    memory: float  # peak of the server's memory, in uploads of a cohort

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Constants:
        """Take rates from the largest sizes, where what a call costs by itself no longer shows."""
        wire, largest = record["wire"], record["wire"][-1]
        rates = {name: largest[name] / largest["model_bytes"] * GIGABYTE for name in WORKS}
        server = [row for row in record["server"] if row["parameters"] * row["cohort"] >= 10**7]
        each = {
            part: statistics.median(row[part] / row["cohort"] / row["parameters"] * MEGABYTE for row in server)
            for part in ("guard", "aggregate")
        }
        memory = max(row["peak_bytes"] / (4 * row["parameters"] * row["cohort"]) for row in record["rounds"])
        beside = {
            f"{part}_bytes": statistics.median(row[f"{part}_bytes"] - row["model_bytes"] for row in wire)
            for part in ("order", "answer")
        }
        return cls(**beside, **rates, **each, memory=memory)


class Cost(NamedTuple):
    """One round of a shape, and 100 of them."""

    message: float  # bytes of an order, and of an answer
    server_bytes: float  # that leave the server a round; as many reach it
    client_seconds: float  # on a client's network, both ways
    network_seconds: float  # on the server's network, both ways
    work_seconds: float  # of one core of the server
    memory: float  # bytes
    dollars: float  # of 100 rounds: bytes that leave the server, and its core
    once: float  # bytes of the base, to each client, before the first round


def cost_of(shape: Shape, constants: Constants) -> Cost:
    model = 4 * shape.parameters
    message = model + constants.order_bytes + 100 * shape.tensors
    server_bytes = shape.cohort * message
    rates = constants.pack_order + shape.cohort * constants.open_answer
    looks = shape.cohort * shape.parameters / MEGABYTE * (constants.guard + constants.aggregate)
    work = rates * model / GIGABYTE + looks
    client = 2 * 8 * message / ASSUMED[shape.bits]
    network_seconds = 2 * 8 * server_bytes / ASSUMED["server_bits"]
    hours = max(client + PROTOTYPE["poll_seconds"], network_seconds) + work
    sent = server_bytes / GIGABYTE * ASSUMED["price_a_gigabyte"]
    dollars = 100 * (sent + hours / 3600 * ASSUMED["price_a_core_hour"])
    return Cost(message, server_bytes, client, network_seconds, work, constants.memory * shape.cohort * model, dollars,
                2 * shape.base)  # fmt: skip


# The page


def tables(record: Mapping[str, Any]) -> str:
    """Return the tables of the page as Markdown."""
    constants = Constants.of(record)
    lines = [
        f"Measured on {record['date']} on {record['machine']}, torch {record['torch']}: processor time of one thread,",
        "the shortest of several repeats.",
        "",
        "| constant | |",
        "|---|--:|",
        f"| bytes of an order beside its tensors (four tensors) | {constants.order_bytes:,.0f} |",
        f"| bytes of an answer beside its tensors | {constants.answer_bytes:,.0f} |",
        f"| the server packs an order, and signs it with a checksum | {constants.pack_order:.1f} s a GB |",
        f"| a client opens and checks an order's form | {constants.open_order:.1f} s a GB |",
        f"| a client packs its answer | {constants.pack_answer:.1f} s a GB |",
        f"| the server opens an answer | {constants.open_answer:.1f} s a GB |",
        f"| the guard | {1000 * constants.guard:.2f} ms a client and million parameters |",
        f"| FedAvg's aggregate | {1000 * constants.aggregate:.2f} ms a client and million parameters |",
        f"| the server's peak of memory | {constants.memory:.1f} times the uploads of a cohort |",
        "",
        "By size (milliseconds; the model in MB):",
        "",
        "| model | pack an order | open it | pack an answer | open it |",
        "|--:|--:|--:|--:|--:|",
    ]
    for row in record["wire"]:
        times = " | ".join(f"{1000 * row[name]:,.2f}" for name in WORKS)
        lines.append(f"| {row['model_bytes'] / MEGABYTE:,.2f} | {times} |")
    lines += ["", "| parameters | cohort | guard, ms | aggregate, ms |", "|--:|--:|--:|--:|"]
    for row in record["server"]:
        times = " | ".join(f"{1000 * row[part]:,.1f}" for part in ("guard", "aggregate"))
        lines.append(f"| {row['parameters']:,} | {row['cohort']:,} | {times} |")
    lines += [
        "",
        "Whole rounds of a server whose clients are made up (`Ghosts` in the script):",
        "",
        "| parameters | cohort | seconds of the server a round | peak of memory |",
        "|--:|--:|--:|--:|",
    ]
    for row in record["rounds"]:
        lines.append(
            f"| {row['parameters']:,} | {row['cohort']:,} | {row['server_seconds']:.2f} | "
            f"{row['peak_bytes'] / MEGABYTE:,.0f} MB |"
        )
    lines += ["", "### What a round would cost", "", *_assumptions(), ""]
    lines += [
        "| | a message | server sends a round | a client's network | server's network | server's core "
        "| server's memory | 100 rounds | once to each client |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for shape in SHAPES:
        cost = cost_of(shape, constants)
        over = " (over the limit)" if cost.message > LARGEST else ""
        lines.append(
            f"| {shape.name} | {size_in_words(cost.message)}{over} | {size_in_words(cost.server_bytes)} | "
            f"{time_in_words(cost.client_seconds)} | {time_in_words(cost.network_seconds)} | "
            f"{time_in_words(cost.work_seconds)} | {size_in_words(cost.memory)} | ${cost.dollars:,.2f} | "
            f"{size_in_words(cost.once) if cost.once else 'nothing'} |"
        )
    return "\n".join(lines) + "\n"


def _assumptions() -> list[str]:
    server, organisation, device = (ASSUMED[f"{who}_bits"] / 1e6 for who in ("server", "organisation", "device"))
    return [
        f"Assumed, not measured: ${ASSUMED['price_a_gigabyte']:.2f} for a GB that leaves the server,",
        f"${ASSUMED['price_a_core_hour']:.2f} for an hour of its core; networks of {server / 1000:.0f} Gbit/s at the",
        f"server, {organisation:.0f} Mbit/s at an organisation and {device:.0f} Mbit/s at a device. A round waits for",
        f"a poll of {PROTOTYPE['poll_seconds']:.0f} s (Flower's, of the prototype). Local training is not in the",
        "table, because it depends on the clients' machines.",
    ]


def size_in_words(count: float) -> str:
    """Return bytes in the largest unit that leaves at least one.

    >>> [size_in_words(count) for count in (33_808, 1_466_896, 7.99e9)]
    ['34 kB', '1.5 MB', '8.0 GB']
    """
    for unit, name in ((10**12, "TB"), (GIGABYTE, "GB"), (MEGABYTE, "MB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1000:,.0f} kB"


def time_in_words(seconds: float) -> str:
    """Return seconds in a unit that people read.

    >>> [time_in_words(seconds) for seconds in (0.0042, 12.8, 128, 8600)]
    ['4 ms', '12.8 s', '2.1 min', '2.4 h']
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def written(page: str, record: Mapping[str, Any]) -> str:
    """Return the page with its tables renewed."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(record)}\n{END}{after}"


# Small runs of the same shapes


class Lazy:
    """A transport to desks of this process, each of which is made when its client is asked for the first time."""

    def __init__(self, built: Built, folder: Path) -> None:
        self.built, self.folder, self.made = built, folder, 0

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        for client, own in each.items():
            self.made += 1
            here = replace(self.built, federation=held_by(self.built.federation, client))
            yield client, Desk(here, client, self.folder / f"client-{client}", run=RUN).answer(common, own)


def simulate(clients: int, cohort: int, rounds: int, model: Model, folder: Path) -> dict[str, float]:
    """Play a run whose clients stand behind the wire; each desk lives for one answer, as on a device that sleeps."""
    built, clock = a_run(points(clients, model.input_shape[0]), model, rounds=rounds, cohort=cohort), Clock()
    transport = Lazy(built, folder)
    make = partial(Remote, transport=transport, engines=built.engines, run=RUN)
    wired = replace(built, federation=without_rows(built.federation), population=make, holders=np.arange(clients))
    rows = federate(wired, callbacks=[clock]).history.rows
    assert all(row["accepted"] == cohort for row in rows), "a client was refused"
    last = rows[-1]
    return {
        "clients": clients, "cohort": cohort, "rounds": rounds,
        "bytes_up": last["bytes_up"] / cohort, "bytes_down": last["bytes_down"] / cohort,
        "seconds": statistics.median(clock.work[1:]),
        "memory": _status("VmHWM"), "accuracy": last["accuracy"],
    }  # fmt: skip


def small_runs(folder: Path, share: float = 1.0) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield a name and the figures of each simulation; `share` of the clients and cohorts, for a test."""

    def part(count: int) -> int:
        return max(2, int(count * share))

    dense = partial(build_model, "mlp", input_shape=(20,), classes=CLASSES)
    organisations, devices, cohort = part(100), part(10_000), part(100)
    yield "100 organisations", simulate(organisations, organisations, 3, dense(hidden=(32,)), folder / "a")
    yield "10,000 devices, 100 a round", simulate(devices, cohort, 5, dense(hidden=(8,)), folder / "b")
    wide = dense(hidden=(part(1000), part(1000)), adapters=2)
    yield "100 organisations, adapters", simulate(organisations, organisations, 2, wide, folder / "c")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    if options.measure:
        RECORD.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    if options.simulate:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            for name, figures in small_runs(Path(folder)):
                shown = ", ".join(f"{key} {value:,.4g}" for key, value in figures.items())
                print(f"{name}: {shown}", flush=True)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    else:
        print(tables(record))


if __name__ == "__main__":
    main()
