"""Capturing a step: nothing may be freed while it goes on, and buffers of several kinds arrive whole."""

from __future__ import annotations

import gc

import pytest
import torch

from fedstill.core.types import Training, Weights
from fedstill.engine.cuda_graphs import WARM_UPS, capture, no_collection
from fedstill.engine.stack import Stack, View


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
