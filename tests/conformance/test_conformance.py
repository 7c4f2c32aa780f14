"""Every method on every engine keeps the promises that the library makes for all of them.

Distances are relative to 1 + the largest weight of a tensor, after three rounds in float32.
"""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from method_rows import (
    COHORT,
    ROWS,
    SIZES,
    TRAINING,
    UNLABELED,
    Row,
    bytes_of_counts,
    distance,
    federation,
    first_broadcast,
    form_of,
    is_first,
    network,
    poisoned,
    relabelled,
    row_of,
    run,
    run_row,
)
from quick import EITHER_ENGINE, first_quick, quick_if
from running import changed_on_the_way
from toy import same_bits
from weighed import weighed
from whole_server import as_one, whole

from fedstill.compose.combine import bound_to, on_the_way
from fedstill.core.needs import needs_of
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import byte_size, rows, stack, tree_map
from fedstill.core.types import Need, Training, Weights
from fedstill.engine import build_engine
from fedstill.engine import engine as engine_module
from fedstill.engine.plan import Plan, make_plan
from fedstill.loop.history import Result
from fedstill.methods import METHODS, fedavg

ENGINES = ("batched", "looped")
CLOSE = 1e-5

# slots of a server's state that its preparation and first rounds fill
FILLED_LATER = {"targets", "reported", "past", "past_labels", "past_probabilities", "distilled", "scores", "optimizer"}
FILLED_LATER |= {"samples", "hard_generator", "teaching_generator", "feature_generator"}


def named(value: Any) -> str:
    return value.id if isinstance(value, Row) else str(value)


def each_row(rows: list[Row] | tuple[Row, ...] = ROWS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", quick_if(is_first, rows), ids=named)


every_row = each_row()
every_engine = pytest.mark.parametrize("engine", EITHER_ENGINE)


def stands_for_itself(row: Row) -> bool:
    """Variants of a server's step train as FedAvg does: the first row of such a method stands for the others."""
    objective = row.build().objective
    return bool(objective.terms) or objective.risk != "cross_entropy" or row is row_of(row.name)


every_row_and_engine = pytest.mark.parametrize(
    ("row", "engine"),
    quick_if(
        lambda case: case[1] == "batched" and is_first(case[0]),
        [(row, engine) for row in ROWS for engine in ENGINES if engine == "batched" or stands_for_itself(row)],
    ),
    ids=named,
)


@cache
def ordinary(index: int, engine: str) -> Result:
    """The row's ordinary run, computed once for all tests that compare with it."""
    return run_row(ROWS[index], engine=engine)


def plain_run(row: Row, engine: str = "batched") -> Weights:
    return ordinary(ROWS.index(row), engine).weights


def test_every_registered_method_has_a_row():
    assert {row.name for row in ROWS if ":" not in row.name} == set(METHODS)
    assert len({row.id for row in ROWS}) == len(ROWS)


@every_row
def test_batched_equals_looped(row):
    start = network(row.net).init(seed_for(5, "model"))
    assert distance(plain_run(row, "looped"), start) > 1e-4, "a run that moves nothing proves nothing"
    assert distance(plain_run(row, "batched"), plain_run(row, "looped")) < CLOSE


@pytest.mark.parametrize(
    ("name", "net"),
    quick_if(
        lambda case: case in (("fedcurv", "cnn"), ("moon", "norm")),
        [
            *((name, "cnn") for name in ("fedavg", "scaffold", "moon", "fedcurv")),
            *((name, "norm") for name in ("fedavg", "feddyn", "fedntd", "feddf", "moon", "fedcurv", "fedmmd")),
        ],
    ),
)
def test_batched_equals_looped_with_convolutions_and_batchnorm(name, net):
    row = row_of(name)
    how = {"net": net, "rounds": 2, "training": dataclasses.replace(TRAINING, lr=0.02)}
    batched, looped = (run_row(row, engine=engine, **how).weights for engine in ENGINES)
    assert distance(batched, looped) < CLOSE


@every_row
@pytest.mark.parametrize("chunk", first_quick([3, 1]))
def test_the_size_of_a_chunk_changes_nothing(row, chunk):
    assert distance(run_row(row, engine_options={"chunk": chunk}).weights, plain_run(row)) < CLOSE


def padded_plan(*args, **how) -> Plan:
    """Three more samples in every batch, and samples of other clients in all padding."""
    plan = make_plan(*args, **how)
    longer = ((0, 0), (0, 0), (0, 3))
    weight = np.pad(plan.weight, longer)
    strange = np.arange(weight.size).reshape(weight.shape) % UNLABELED
    index = np.where(weight > 0, np.pad(plan.index, longer), strange)
    return dataclasses.replace(plan, index=index, weight=weight, bits=np.pad(plan.bits, longer))


@every_row_and_engine
def test_padding_changes_nothing(monkeypatch, row, engine):
    wanted = plain_run(row, engine)
    monkeypatch.setattr(engine_module, "make_plan", padded_plan)
    found = run_row(row, engine=engine).weights
    assert distance(found, wanted) < CLOSE
    if engine == "looped":  # a client alone is cut to its real samples
        assert same_bits(found, wanted)


@each_row([row for row in ROWS if row.is_fedavg_with is not None])
@every_engine
def test_with_its_knob_at_zero_a_method_is_fedavg_bit_for_bit(row, engine):
    training = Training(batch_size=4, steps=5, lr=0.1, momentum=0.5) if row.equal_steps else TRAINING
    found, wanted = (
        run(method, engine=engine, training=training, net=row.net).weights
        for method in (row.build(**row.is_fedavg_with), fedavg())
    )
    assert same_bits(found, wanted)
    if row.name != "fedavg":  # and with its knob on, or unequal steps, it is not
        assert not same_bits(plain_run(row, engine), run_row(ROWS[0], engine=engine, net=row.net).weights)


@every_engine
@pytest.mark.parametrize("option", first_quick(["II", "I"]))
def test_the_first_round_of_scaffold_is_uniform_fedavg_bit_for_bit(engine, option):
    methods = (METHODS["scaffold"](option=option), weighed(fedavg(), "uniform"))
    for rounds, equal in ((1, True), (2, False)):
        found, wanted = (run(method, engine=engine, rounds=rounds).weights for method in methods)
        assert same_bits(found, wanted) == equal


@every_row_and_engine
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, row, engine):
    how = {"engine": engine, "checkpoint_every": 1, "evaluate_every": 2}
    whole = run_row(row, rounds=3, run_dir=tmp_path / "whole", **how)
    run_row(row, rounds=2, run_dir=tmp_path / "cut", **how)
    resumed = run_row(row, rounds=3, run_dir=tmp_path / "cut", resume=True, **how)
    assert same_bits(resumed.weights, whole.weights)
    assert same_bits(resumed.best_weights, whole.best_weights)
    timeless = [
        [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in r.history.rows]
        for r in (whole, resumed)
    ]
    assert timeless[0] == timeless[1]


@every_row
def test_the_same_seed_gives_the_same_bits_and_another_seed_another_model(row):
    assert same_bits(run_row(row).weights, plain_run(row))
    assert not same_bits(run_row(row, seed=6).weights, plain_run(row))


@every_row_and_engine
def test_no_global_random_stream_is_touched(row, engine):
    plain_run(row, engine)  # imports what it needs: a module of another library may draw when it is imported
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    run_row(row, engine=engine, rounds=1)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    np.testing.assert_equal(np.random.get_state(), before[1])
    assert random.getstate() == before[2]


@every_row_and_engine
def test_what_is_not_declared_may_be_nan(row, engine):
    method = row.build()
    assert same_bits(run(method, engine=engine, **poisoned(method, row.net)).weights, plain_run(row, engine))


@each_row([row for row in ROWS if Need.UNLABELED in needs_of(row.build())])
def test_declared_unlabeled_data_are_really_used(row):
    data = federation(row.net)
    rows = data.unlabeled
    other = dataclasses.replace(data, unlabeled=2.0 * rows if rows.is_floating_point() else rows.flip(1))  # texts
    assert distance(run_row(row, federation=other).weights, plain_run(row)) > 1e-4


@every_row
def test_label_counts_and_memory_are_there_only_where_they_are_declared(row):
    method = bound_to(row.build(), network(row.net))
    declared = needs_of(method)
    first = method.objective.init(network(row.net).init(0))
    assert (Need.CLIENT_STATE in declared) == bool(first)
    seen = []

    def loss(output, batch, local):
        seen.append((local.label_counts, local.state))
        return method.objective.loss(output, batch, local)

    def look(uploads, start, seed):
        seen.append(uploads)
        return uploads

    watched = changed_on_the_way(
        dataclasses.replace(method, objective=dataclasses.replace(method.objective, loss=loss)), look
    )
    run(watched, engine="looped", rounds=1, net=row.net)
    *steps, uploads = seen
    assert steps
    for counts, state in steps:
        assert bool(counts.isnan().all()) == (Need.LABEL_COUNTS not in declared)
        assert bool(state) == (Need.CLIENT_STATE in declared)
    assert (uploads.label_counts is None) == (Need.LABEL_COUNTS_UPLOADED not in declared)


def in_the_null_space(uploads):
    """Coefficients (C,) that vanish in every weighted sum the server may take: by size, evenly, per travel."""
    size, travel = uploads.size.double().cpu(), uploads.travel.double().cpu()
    known = torch.stack([size, torch.ones_like(size), size / travel, 1 / travel])
    return torch.linalg.svd(known).Vh[-1]


def disguise(uploads, start, seed):
    """Every client's upload changes by much, no weighted sum over the cohort does (as secure aggregation would)."""
    coefficient = in_the_null_space(uploads)

    def shifted(leaf):
        direction = torch.sin(torch.arange(leaf[0].numel(), dtype=torch.float64)).reshape(leaf.shape[1:])
        return (leaf + coefficient.reshape(-1, *[1] * (leaf.ndim - 1)) * direction).to(leaf.dtype)

    params = {name: shifted(leaf) for name, leaf in uploads.weights.params.items()}
    extra = {slot: {name: shifted(leaf) for name, leaf in tree.items()} for slot, tree in uploads.extra.items()}
    return uploads._replace(weights=uploads.weights._replace(params=params), extra=extra)


@every_row
def test_a_server_that_does_not_declare_it_looks_at_no_client_alone(row):
    method, how = row.build(), {"cohort": 6, "rounds": row.shows_in_round, "net": row.net}

    def transmit(uploads, start, seed):
        return disguise(on_the_way(method, uploads, start, seed), start, seed)

    found = run(changed_on_the_way(method, transmit), **how).weights
    gap = distance(found, run(method, **how).weights)
    if Need.INDIVIDUAL_UPLOADS in needs_of(method):
        assert gap > 1e-3
    else:
        assert gap < CLOSE


@every_row_and_engine
def test_one_client_with_all_data_in_one_step_sends_one_step_of_centralised_sgd(row, engine):
    model, training = network(row.net), Training(batch_size=12, lr=0.3)
    method, data = bound_to(row.build(), model), federation(row.net, sizes=(12,))
    start = model.init(1)
    first = stack([method.objective.init(start)])
    runner = build_engine(engine, "cpu", model=model, federation=data)
    work = LocalWork(method.objective, training, start, first_broadcast(row.build(), row.net), seed=5)
    uploads = runner.train(work, np.array([0]), first).uploads
    x, y = data.train.x[data.indices], data.train.y[data.indices]

    def risk(params):
        return F.cross_entropy(model.apply(Weights(params, start.buffers), x)[0].logits, y)

    gradient = torch.func.grad(risk)(start.params)
    wanted = {name: leaf - 0.3 * gradient[name] for name, leaf in start.params.items()}
    gap = distance(rows(uploads.weights, 0).params, wanted)
    assert gap > 1e-4 if row.own_first_step else gap < 1e-6
    if row.is_fedavg_with == {}:
        result = run(method, engine=engine, federation=data, training=training, rounds=1, cohort=1, seed=5).weights
        assert distance(result, _centralised(model, model.init(seed_for(5, "model")), x, y)) < 1e-6


def _centralised(model, start: Weights, x, y) -> Weights:
    params = {name: leaf.clone().requires_grad_() for name, leaf in start.params.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.3)
    F.cross_entropy(model.apply(Weights(params, {}), x)[0].logits, y).backward()
    optimizer.step()
    return Weights({name: leaf.detach() for name, leaf in params.items()}, start.buffers)


@every_row_and_engine
def test_any_order_of_clients_gives_each_client_the_same(row, engine):
    data, model = federation(row.net), network(row.net)
    method = bound_to(row.build(), model)
    runner = build_engine(engine, "cpu", model=model, federation=data)
    start = model.init(1)
    generator = torch.Generator().manual_seed(0)
    several = [method.objective.init(start) for _ in SIZES]
    states = stack([_noisy(state, generator) for state in several])
    received = _noisy(first_broadcast(row.build(), row.net), generator)

    def trained(ids):
        work = LocalWork(method.objective, TRAINING, start, received, round=2, seed=5)
        return runner.train(work, np.array(ids), rows(states, torch.tensor(ids)))

    everybody, order = trained(list(range(len(SIZES)))), [5, 0, 3, 6, 1]
    some = trained(order)
    for found, wanted in ((some.uploads.weights, everybody.uploads.weights), (some.states, everybody.states)):
        assert distance(found, rows(wanted, torch.tensor(order))) < CLOSE
    assert distance(some.uploads.extra, rows(everybody.uploads.extra, torch.tensor(order))) < CLOSE


CUTS = ([[0, 1, 2, 3, 4, 5, 6]], [[6, 2, 4], [0, 5], [3, 1]], [[k] for k in range(len(SIZES))])


def trained_in_pieces(row, cut, *, net=None, training=TRAINING, data=None, engine="looped", precision="float32"):
    """What each client of the second round uploads and keeps; every piece of a cut trains in an engine of its own."""
    data, model = data or federation(net or row.net), network(net or row.net)
    method, start = bound_to(row.build(), model), model.init(1)
    generator = torch.Generator().manual_seed(0)
    states = stack([_noisy(method.objective.init(start), generator) for _ in SIZES])
    received = _noisy(first_broadcast(row.build(), net or row.net), generator)
    if precision == "float64":
        start, states, received = tree_map(torch.Tensor.double, (start, states, received))
    found = {}
    for ids in cut:
        runner = build_engine(engine, "cpu", model=model, federation=data, precision=precision)
        for round in (1, 2):  # the second call finds what the first one kept
            work = LocalWork(method.objective, training, start, received, round=round, seed=5)
            trained = runner.train(work, np.array(ids), rows(states, torch.tensor(ids)))
        for place, client in enumerate(ids):
            uploads = trained.uploads
            told = {"weights": uploads.weights, "loss": uploads.loss, "extra": uploads.extra, "state": trained.states}
            found[client] = tree_map(torch.clone, rows(told, place))
    return found


def shared_rows(net):
    """The federation of a network in which each client also holds two rows of the next one."""
    data = federation(net)
    clients = [data.indices[a:b].tolist() for a, b in pairwise(data.offsets.tolist())]
    held = [own + after[:2] for own, after in zip(clients, clients[1:] + clients[:1], strict=True)]
    offsets = torch.tensor([0, *accumulate(map(len, held))])
    return dataclasses.replace(data, indices=torch.tensor([row for own in held for row in own]), offsets=offsets)


def differs_on_clients(row: Row) -> bool:
    """Whether clients train otherwise than FedAvg's; FedAvg's own row stands for the others."""
    return is_first(row) and (bool(row.build().objective.terms) or row.name == "fedavg")


each_kind_of_client = pytest.mark.parametrize(
    "row", quick_if(differs_on_clients, [row for row in ROWS if stands_for_itself(row)]), ids=named
)


@each_kind_of_client
def test_a_client_has_the_same_bits_in_any_cohort_that_trains_one_by_one(row):
    whole, *cuts = (trained_in_pieces(row, cut) for cut in CUTS)
    for cut in cuts:
        assert all(same_bits(cut[client], whole[client]) for client in whole)


@pytest.mark.parametrize(
    ("name", "net", "changes"),
    [
        ("fedntd", "cnn", {}),
        pytest.param("moon", "cnn", {}, marks=pytest.mark.matrix),
        ("fedlmd", "norm", {"steps": 2}),  # fewer steps than rows: teachers answer in the steps of some clients only
        ("kd", "mlp", {"part": "head"}),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_client_has_the_same_bits_whatever_is_kept_of_its_teachers(name, net, changes, shared):
    how = {"net": net, "training": dataclasses.replace(TRAINING, lr=0.02, **changes)}
    data = shared_rows(net) if shared else None
    whole, *cuts = (trained_in_pieces(row_of(name), cut, data=data, **how) for cut in CUTS)
    for cut in cuts:
        assert all(same_bits(cut[client], whole[client]) for client in whole)


@each_kind_of_client
def test_a_stack_of_clients_may_be_cut_in_any_way(row):
    whole, *cuts = (trained_in_pieces(row, cut, engine="batched", precision="float64") for cut in CUTS)
    for cut in cuts:
        assert max(distance(cut[client], whole[client]) for client in whole) < 1e-8


def _noisy(tree, generator):
    if isinstance(tree, dict):
        return {name: _noisy(part, generator) for name, part in tree.items()}
    return tree + 0.01 * torch.randn(tree.shape, generator=generator)


NEW_NAMES = [2, 0, 3, 1]


def renamed_model(model):
    """The same network whose head puts out class c in place NEW_NAMES[c]."""
    places = torch.argsort(torch.tensor(NEW_NAMES))

    def init(seed):
        weights = model.init(seed)
        return weights._replace(params=_with_head(weights.params, places))

    return dataclasses.replace(model, init=init)


def _with_head(params, places):
    return {name: leaf[places] if name.startswith("head.") else leaf for name, leaf in params.items()}


@each_row([row for row in ROWS if not row.noise_by_place])
def test_calling_the_classes_by_other_names_changes_nothing_else(row):
    found = run_row(
        row, model=renamed_model(network(row.net)), federation=relabelled(federation(row.net), NEW_NAMES)
    ).weights
    assert distance(_with_head(found.params, torch.tensor(NEW_NAMES)), plain_run(row).params) < CLOSE


@every_row_and_engine
def test_as_many_bytes_travel_as_the_row_declares(row, engine):
    """The model, the row's slots, and four numbers: size (8 bytes), steps, travel and loss (4 each); label counts."""
    result = ordinary(ROWS.index(row), engine)
    start = network(row.net).init(0)
    model, slot = byte_size(start), byte_size(start.params)
    for line in result.history.rows:
        assert line["bytes_up"] == COHORT * (model + row.sends * slot + 8 + 3 * 4 + bytes_of_counts(row.build()))
        assert line["bytes_down"] == COHORT * (model + row.receives * slot + row.receives_bytes)


def lasting(state):
    """The form of a server's state without what the first rounds have yet to fill."""
    return {name: form for name, form in form_of(state).items() if not FILLED_LATER & set(name.split("/"))}


@every_row_and_engine
@pytest.mark.parametrize("net", first_quick(["norm", "mlp"]))
def test_states_keep_their_names_shapes_dtypes_and_device(row, engine, net):
    net = row.net if row.net != "mlp" else net
    model, data = network(net), federation(net)
    method, start = bound_to(row.build(), model), model.init(1)
    server, seen = whole(method), []

    def apply(candidate, state, round):
        moved, new = server.apply(candidate, state, round)
        seen.append((lasting(state), lasting(new), form_of(moved)))
        return moved, new

    run(as_one(method, apply=apply), net=net, engine=engine)
    for before, after, moved in seen:
        assert before == after == lasting(server.init(start))
        assert moved == form_of(start)
    first = method.objective.init(start)
    work = LocalWork(method.objective, TRAINING, start, first_broadcast(row.build(), net), seed=5)
    runner = build_engine(engine, "cpu", model=model, federation=data)
    trained = runner.train(work, np.arange(len(SIZES)), stack([first] * len(SIZES)))
    assert form_of(trained.states) == form_of(stack([first] * len(SIZES)))
    assert form_of(trained.uploads.weights) == form_of(stack([start] * len(SIZES)))
