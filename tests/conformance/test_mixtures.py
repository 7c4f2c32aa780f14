"""Mixtures, named ones and ten drawn at random from all methods, keep the promises that single methods keep."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import running
import torch
from method_rows import (
    COHORT,
    FEATURES_INVENTED,
    HARD_SAMPLES,
    ROUNDS,
    ROWS,
    SIZES,
    TRAINING,
    bytes_of_counts,
    distance,
    federation,
    first_broadcast,
    network,
    run,
)
from quick import EITHER_ENGINE, first_quick
from test_conformance import CLOSE, padded_plan, poisoned
from toy import same_bits

from fedstill.compose.combine import bound_to
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import byte_size, rows, stack
from fedstill.core.types import Stage
from fedstill.engine import build_engine
from fedstill.engine import engine as engine_module
from fedstill.loop.federate import check_built
from fedstill.methods import METHODS
from fedstill.methods.lookup import Part, build_method, parse, write
from fedstill.server import AGGREGATES

NAMED = (
    "fedlmd+fedprox(mu=0.01)+fedavgm",
    "fedlmd+scaffold",
    "moon+kd",
    "fedcurv+fedlmd_tf+fednova",
    "mrtf(student.steps=5, student.batch_size=8)+fedlmd",
    "d2cfl(past=1, threshold=0.3, student.epochs=2, student.batch_size=4, mix_alpha=0.5)+scaffold+average",
    "fedbe(samples=2, student.steps=5, student.batch_size=8)+moon+update_noise(sigma=0.01)",
    f"scaffold+fedlmd+{write('fedftg', HARD_SAMPLES)}",
    f"{write('fedgen', FEATURES_INVENTED)}+fedprox(mu=0.1)+scaffold+average",
)
ROBUST = (
    "fedlmd+median",
    "feddf(student.steps=5, student.batch_size=8)+krum(f=1, m=2)",
    "scaffold+trimmed_mean(share=0.25)",
    "mrtf(student.steps=5, student.batch_size=8)+geometric_median",
    "fedavgm+norm_bound(bound=0.5)",
)
DRAWN = 10


def drawn() -> list[str]:
    """Three parts each, options as in the conformance rows; those that clash are drawn again.

    So are those that refine the model twice, or change uploads twice: both happen in the order given.
    """
    generator = numpy_generator(seed_for(0, "mixtures"))
    toy = {"model": network(), "federation": federation(), "training": TRAINING}
    rows_of_tables = [row for row in ROWS if row.net == "mlp" and None not in row.options.values()]
    # FedFTG's row has a fast student that enlarges rounding: 1e-4 between the engines in one draw; NAMED has it
    rows_of_tables = [row for row in rows_of_tables if row.name != "fedftg"]
    found = list[str]()
    while len(found) < DRAWN:
        parts = [rows_of_tables[i] for i in generator.choice(len(rows_of_tables), size=3, replace=False)]
        text = "+".join(write(part.name, part.options) for part in parts)
        try:
            phases = build_method(text)
            check_built(running.built(method=phases, rounds=ROUNDS, cohort=COHORT, **toy))
        except FedstillError:
            continue
        method = phases[0].method
        refined = sum(step.stage in (Stage.REFINE, Stage.REPORT) for step in method.steps)
        changed = sum(mechanism.per_client is not None for mechanism in method.way)
        if refined < 2 and changed < 2:
            found.append(text)
    return found


MIXTURES = [*NAMED, *ROBUST, *drawn()]
every_mixture = pytest.mark.parametrize("text", first_quick(MIXTURES, 2))
every_engine = pytest.mark.parametrize("engine", EITHER_ENGINE)


@cache
def built(text: str):
    (phase,) = build_method(text)
    return phase.method


@cache
def plain(text: str, engine: str = "batched"):
    return run(built(text), engine=engine).weights


def test_the_draw_covers_client_and_server_parts():
    assert len(set(MIXTURES)) == len(NAMED) + len(ROBUST) + DRAWN
    used = {part.name for text in MIXTURES for part in parse(text)[0].parts}
    assert len(used) >= 12
    assert {name for name in used if ":" not in name} <= METHODS.keys() | AGGREGATES.keys()
    stages = {step.stage for text in MIXTURES for step in built(text).steps}
    assert stages == set(Stage)


@every_mixture
def test_batched_equals_looped(text):
    assert distance(plain(text, "looped"), network().init(seed_for(5, "model"))) > 1e-4
    assert distance(plain(text, "batched"), plain(text, "looped")) < CLOSE


@every_mixture
def test_every_part_matters(text):
    """Take one part away and the model is another one."""
    parts = parse(text)[0].parts
    for gone in parts:
        left = [part for part in parts if part is not gone]
        if all(part.name in AGGREGATES for part in left):
            left = [Part("fedavg"), *left]
        if gone.name != "fedavg":
            rest = "+".join(write(part.name, part.options) for part in left)
            assert not same_bits(plain(rest), plain(text)), gone.name


@every_mixture
def test_the_order_of_parts_changes_nothing_but_rounding(text):
    parts = parse(text)[0].parts
    backwards = "+".join(write(part.name, part.options) for part in parts[::-1])
    assert distance(plain(backwards), plain(text)) < CLOSE


@every_mixture
def test_the_size_of_a_chunk_changes_nothing(text):
    assert distance(run(built(text), engine_options={"chunk": 3}).weights, plain(text)) < CLOSE


@every_mixture
@every_engine
def test_padding_changes_nothing(monkeypatch, text, engine):
    wanted = plain(text, engine)
    monkeypatch.setattr(engine_module, "make_plan", padded_plan)
    assert distance(run(built(text), engine=engine).weights, wanted) < CLOSE


@every_mixture
@every_engine
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, text, engine):
    how = {"engine": engine, "checkpoint_every": 1}
    whole = run(built(text), rounds=4, run_dir=tmp_path / "whole", **how)
    run(built(text), rounds=2, run_dir=tmp_path / "cut", **how)
    resumed = run(built(text), rounds=4, run_dir=tmp_path / "cut", resume=True, **how)
    assert same_bits(resumed.weights, whole.weights)


@every_mixture
@every_engine
def test_what_is_not_declared_may_be_nan(text, engine):
    found = run(built(text), engine=engine, **poisoned(built(text))).weights
    assert same_bits(found, plain(text, engine))


@every_mixture
def test_as_many_bytes_travel_as_the_parts_declare(text):
    declared = {row.name: row for row in ROWS}  # options do not change what travels
    parts = [declared[part.name] for part in parse(text)[0].parts if part.name not in AGGREGATES]
    start = network().init(0)
    sends, receives = sum(part.sends for part in parts), sum(part.receives for part in parts)
    numbers, beside = 8 + 3 * 4 + bytes_of_counts(built(text)), sum(part.receives_bytes for part in parts)
    for line in run(built(text)).history.rows:
        assert line["bytes_up"] == COHORT * (byte_size(start) + sends * byte_size(start.params) + numbers)
        assert line["bytes_down"] == COHORT * (byte_size(start) + receives * byte_size(start.params) + beside)


@every_mixture
def test_any_order_of_clients_gives_each_client_the_same(text):
    method, start = bound_to(built(text), network()), network().init(1)
    runner = build_engine("batched", "cpu", model=network(), federation=federation())
    received = first_broadcast(built(text))
    states = stack([method.objective.init(start) for _ in SIZES])

    def trained(ids):
        work = LocalWork(method.objective, TRAINING, start, received, round=2, seed=5)
        return runner.train(work, np.array(ids), rows(states, torch.tensor(ids)))

    everybody, order = trained(list(range(len(SIZES)))), [5, 0, 3, 6, 1]
    assert distance(trained(order).uploads.weights, rows(everybody.uploads.weights, torch.tensor(order))) < CLOSE
