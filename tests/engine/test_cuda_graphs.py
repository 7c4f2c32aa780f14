"""What surrounds a captured step, without a GPU: a replay here is the step itself, run again on the static tensors.

Widths that are kept while clients finish, plans that grow, lanes with queues, static copies of model and broadcast.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from engine_cases import assert_close, assert_same_bits, dataset, federation, in_dtype, network, reads_images, train
from quick import first_quick

from fedstill.compose.combine import combine, weighted_mean
from fedstill.core.trainer import Lesson
from fedstill.core.tree import clone, rows, stack, tree_map
from fedstill.core.types import Objective, Training, Weights
from fedstill.engine import Engine
from fedstill.engine import cuda_graphs as graph
from fedstill.engine.cuda_graphs import WARM_UPS, CapturedGroup, capture, ladder, no_collection
from fedstill.engine.plan import make_plan
from fedstill.engine.runners import _balance
from fedstill.engine.stack import Stack, View, first_memory
from fedstill.engine.step import Program
from fedstill.local.distillation import not_true_distillation
from fedstill.local.terms import control_variates, cross_entropy
from fedstill.server.distill.student import soft_target_loss

SIZES = (5, 0, 9, 1, 16, 4, 12, 7, 3, 28)
COHORTS = [[3, 2], [0, 4, 9, 1], list(range(10)), [7, 8], [9, 4, 6, 5, 3]]
TRAININGS = {
    "momentum": Training(batch_size=4, epochs=2, lr=0.02, momentum=0.9, lr_decay=0.9),
    "adam-cosine": Training(batch_size=4, epochs=2, lr=1e-3, optimizer="adam", lr_schedule="cosine", clip=0.5),
    "steps": Training(batch_size=4, steps=3, lr=0.02),
    "head": Training(batch_size=4, epochs=2, lr=0.02, momentum=0.9, part="head"),
}


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


class Replay:
    """One step of a captured group, with the width and branch it was captured with."""

    def __init__(self, group: CapturedGroup, width: int, *branch: bool) -> None:
        self.group, self.branch = group, branch
        self.view = View(group.stack, width, stacked=group.stacked)

    def replay(self) -> None:
        self.group._once(self.view, *self.branch)


@pytest.fixture(autouse=True)
def _steps_run_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(graph.CapturedGroup, "_capture", lambda group, *key: Replay(group, *key))


def engine_of(net: str, *, stacked: bool, graphs: bool, **options) -> Engine:
    data = federation(SIZES, images=reads_images(net))
    return Engine(network(net), data, stacked=stacked, device=torch.device("cpu"), graphs=graphs, **options)


def rounds_on(engine: Engine, training: Training, objective, received, cohorts) -> list:
    results = []
    for number, ids in enumerate(cohorts, 1):
        start = in_dtype(engine.model.init(number), engine.dtype)
        states = _states(objective, start, ids)
        slots = {} if received is None else received(start, number)
        how = {"objective": objective, "start": start, "ids": ids, "round": number}
        trained = train(engine, training, states=states, received=slots, **how)
        results.append({"w": trained.uploads.weights, "loss": trained.uploads.loss, "states": trained.states})
    return results


def _states(objective, start, ids):
    first = objective.init(start)
    return {
        slot: {name: torch.stack([leaf + 0.01 * client for client in ids]) for name, leaf in tree.items()}
        for slot, tree in first.items()
    }


def compare(
    net: str, training: Training, *, stacked: bool, objective=None, received=None, cohorts=COHORTS, **options
) -> None:
    how = (training, objective or cross_entropy(), received, cohorts)
    replayed = rounds_on(engine_of(net, stacked=stacked, graphs=True, **options), *how)
    stepped = rounds_on(engine_of(net, stacked=False, graphs=False), *how)
    for found, wanted in zip(replayed, stepped, strict=True):
        assert_close(found, wanted)


either = pytest.mark.parametrize("stacked", first_quick([True, False]), ids=["batched", "looped"])


@either
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("net", first_quick(["mlp", "drop", "norm"]))
def test_replayed_rounds_are_stepped_rounds(net, name, stacked):
    compare(net, TRAININGS[name], stacked=stacked)


@either
@pytest.mark.parametrize("name", first_quick(TRAININGS))
def test_replayed_rounds_in_float64_are_stepped_rounds_to_thirteen_digits(name, stacked):
    how = (TRAININGS[name], cross_entropy(), None, COHORTS)
    replayed = rounds_on(engine_of("mlp", stacked=stacked, graphs=True, precision="float64"), *how)
    stepped = rounds_on(engine_of("mlp", stacked=False, graphs=False, precision="float64"), *how)
    for found, wanted in zip(replayed, stepped, strict=True):
        assert_close(found, wanted, tolerance=1e-13)


@pytest.mark.matrix
@either
def test_replayed_convolutions_are_stepped_convolutions(stacked):
    compare("convnorm", TRAININGS["momentum"], stacked=stacked)


@pytest.mark.parametrize("chunk", first_quick([1, 3, 4]))
def test_a_stack_serves_chunks_of_different_widths(chunk):
    compare("mlp", TRAININGS["momentum"], stacked=True, chunk=chunk)


def control(start, number):
    return {"control": {name: torch.full_like(leaf, 0.01 * number) for name, leaf in start.params.items()}}


@either
def test_models_broadcasts_and_states_of_the_new_round_reach_the_static_copies(stacked):
    objective, cohorts = combine(cross_entropy(), control_variates()), [[3, 2], [0, 4, 9], [7, 8], [9, 4, 6, 5, 3]]
    training = Training(batch_size=4, epochs=2, lr=0.02)
    compare("mlp", training, stacked=stacked, objective=objective, received=control, cohorts=cohorts)


def test_a_client_without_data_is_not_moved_by_terms_that_need_no_data():
    objective, training = combine(cross_entropy(), control_variates()), Training(batch_size=4, lr=0.02)
    compare("mlp", training, stacked=True, objective=objective, received=control, cohorts=[[1, 2], [0, 1, 4]])


@either
@pytest.mark.parametrize("name", first_quick(["momentum", "steps"]))
def test_remembered_teachers_follow_the_model(stacked, name):
    compare("mlp", TRAININGS[name], stacked=stacked, objective=combine(cross_entropy(), not_true_distillation(2.0)))


@either
def test_remembered_outputs_of_each_clients_own_teacher_follow_its_state(monkeypatch, stacked):
    def loss(output, batch, local):
        return 0.05 * weighted_mean((output.logits - local.frozen["own"].logits).square().sum(1), batch.weight)

    imitation = Objective(
        loss,
        frozen={"own": lambda local: Weights(local.state["past"], {})},
        init=lambda weights: {"past": weights.params},
        finish=lambda local, measured: ({"past": local.params}, {}),
    )
    how = (TRAININGS["momentum"], combine(cross_entropy(), imitation), None, [[3, 2], [0, 4, 9], [9, 4, 6, 5, 3]])
    replayed = rounds_on(engine_of("cnn", stacked=stacked, graphs=True), *how)
    monkeypatch.setattr(Program, "cacheable", lambda self, client: [])
    for found, wanted in zip(replayed, rounds_on(engine_of("cnn", stacked=False, graphs=False), *how), strict=True):
        assert_close(found, wanted)


def test_a_captured_step_never_loses_the_tensors_it_reads():
    """With a few steps a round the teacher is worth caching for small cohorts only; its cache must stay in place."""
    objective, training = combine(cross_entropy(), not_true_distillation()), Training(batch_size=4, steps=2, lr=0.02)
    engine = engine_of("mlp", stacked=True, graphs=True)
    addresses = set()
    for ids in ([3, 8], list(range(10)), [3]):
        train(engine, training, objective=objective, ids=ids)
        ((program, _),) = engine.programs.values()
        addresses.add((program.cache["start"].logits.data_ptr(), program.start.params["head.bias"].data_ptr()))
    assert len(addresses) == 1


def test_lanes_share_the_work():
    """Longest first to the lane with the least: nobody has more than the mean and one client on top."""
    sizes = np.array(sorted(SIZES, reverse=True))
    training = Training(batch_size=1)
    plan = make_plan(np.arange(sum(SIZES)), sizes, np.arange(10), training=training, round=1, seed=0)
    queues = _balance(plan, 3)
    assert sorted(column for queue in queues for column in queue) == list(range(10))
    work = [int(plan.steps[queue].sum()) for queue in queues]
    assert max(work) <= sum(work) / 3 + int(plan.steps.max())


@pytest.mark.parametrize("width", [1, 2, 3, 10, 100])
def test_few_widths_are_captured_and_little_is_wasted(width):
    widths = ladder(width)
    assert widths[0] == width
    assert widths[-1] == 1
    assert sorted(set(widths), reverse=True) == widths
    assert len(widths) <= 16
    for active in range(1, width + 1):
        assert min(w for w in widths if w >= active) <= max(active + 1, active / 0.65)


def test_steps_captured_for_another_kind_of_targets_are_dropped():
    """They would go on reading the targets that were there when they were captured."""
    engine, x = engine_of("mlp", stacked=True, graphs=True), dataset(12, images=False).x
    start, training = engine.model.init(0), Training(batch_size=4, steps=2, lr=0.1)
    soft, hard = torch.softmax(x[:, :4], 1), torch.arange(12) % 4
    distilling, supervised = soft_target_loss(), cross_entropy()
    kept = []
    for objective, y in ((distilling, soft), (distilling, soft.flip(0)), (supervised, hard), (distilling, soft)):
        engine.fit(Lesson(objective, x, y, training), start, 1)
        ((program, _),) = engine.programs.values()
        kept.append(program)
    assert kept[0] is kept[1]
    assert len({id(program) for program in kept[1:]}) == 3


@either
def test_heads_on_augmented_images_are_replayed(stacked):
    training = Training(batch_size=4, epochs=1, lr=0.02, part="head", augment=("flip",))
    compare("convnorm", training, stacked=stacked, cohorts=COHORTS[:2])


def test_the_head_that_a_replayed_student_learns_is_its_own_after_the_next_call():
    """The extractor that is handed out must not be the static copy that the next call overwrites."""
    engine, objective = engine_of("norm", stacked=True, graphs=True), soft_target_loss()
    x, y = dataset(20, images=False).x, torch.softmax(torch.arange(80.0).reshape(20, 4).sin(), 1)
    training = Training(steps=3, batch_size=4, lr=0.1, part="head")
    first = engine.fit(Lesson(objective, x, y, training), network("norm").init(0), 5).weights
    before = clone(first)
    engine.fit(Lesson(objective, x, y, training), network("norm").init(1), 5)
    assert_same_bits(first, before)
    ids = [2, 3]
    cross = cross_entropy()
    sent = train(engine, TRAININGS["head"], objective=cross, start=network("norm").init(0), ids=ids).uploads.weights
    before = clone(sent)
    train(engine, TRAININGS["head"], objective=cross, start=network("norm").init(1), ids=ids)
    assert_same_bits(sent, before)


def test_kept_optimisers_go_on_in_lanes():
    """Five rounds in which clients come and go, each with the moments and the count that it left with."""
    training = Training(batch_size=4, epochs=2, lr=1e-3, optimizer="adam", keep_optimizer=True)
    memories = {}
    for graphs in (True, False):
        engine, objective = engine_of("mlp", stacked=True, graphs=graphs), cross_entropy()
        memory = stack([first_memory(training, engine.model.init(0).params)] * len(SIZES))
        for number, ids in enumerate(COHORTS, 1):
            states = {"optimizer": rows(memory, torch.tensor(ids))}
            how = {"objective": objective, "start": engine.model.init(number), "ids": ids, "round": number}
            new = train(engine, training, states=states, **how).states["optimizer"]
            places = torch.tensor(ids)
            memory = tree_map(lambda old, now, at=places: old.index_copy(0, at, now), memory, new)
        memories[graphs] = memory
    assert_close(memories[True], memories[False])
    taken = [sum(2 * -(-SIZES[k] // 4) for ids in COHORTS for k in ids if k == client) for client in range(len(SIZES))]
    assert memories[True]["count"].tolist() == taken


# Capturing a step: nothing may be freed while it goes on, and buffers of several kinds arrive whole.


@pytest.fixture
def collector():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def test_nothing_is_collected_inside_and_the_collector_goes_on_afterwards(collector):
    gc.enable()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_collection():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_a_user_switched_off_stays_off(collector):
    gc.disable()
    with no_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("stacked", [False, True])
def test_buffers_of_two_kinds_are_written_into_the_stack(stacked):
    buffers = {"mean": torch.zeros(2, 3), "count": torch.zeros(2, dtype=torch.int64), "variance": torch.ones(2, 3)}
    stack = Stack(Weights({"w": torch.zeros(2, 4)}, buffers), 2, Training(steps=1))
    width = 2 if stacked else 1
    new = {"mean": torch.full((2, 3), 5.0), "count": torch.full((2,), 7), "variance": torch.full((2, 3), 2.0)}
    View(stack, width, stacked=stacked).keep({name: b if stacked else b[0] for name, b in new.items()})
    for name, buffer in new.items():
        assert torch.equal(stack.buffers[name][:width], buffer[:width])
    if not stacked:
        assert stack.buffers["count"][1] == 0
        assert stack.buffers["mean"][1].eq(0).all()


@pytest.mark.gpu
def test_a_graph_that_nobody_holds_any_more_does_not_break_the_next_capture():
    cursor, total = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))

    class Lost:
        def __init__(self, held: list[torch.cuda.CUDAGraph]) -> None:
            self.graphs, self.myself = held, self

    def step() -> None:
        total.add_(cursor)
        cursor.add_(1)

    old, calls = [capture(step, cursor, [total])], []

    def once() -> None:
        step()
        calls.append(1)
        if len(calls) == WARM_UPS + 1:  # the one that is captured: the old graph is garbage from now on
            Lost([old.pop()])
        for _ in range(2000):  # enough objects in cycles for the collector to run, if it may
            Lost([])

    graph = capture(once, cursor, [total])
    for _ in range(4):
        graph.replay()
    assert (int(total), int(cursor)) == (0 + 1 + 2 + 3, 4)
