"""Pieces of a cohort, deaths of workers, mistakes in them, and questions."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from crews import in_turn, over
from elsewhere import RUNS, RecipeOf, a_run
from toy import same_bits

from fedstill.core.errors import FedstillError
from fedstill.core.types import Mechanism
from fedstill.loop import federate as loop
from fedstill.methods.lookup import build_method
from fedstill.population import scattered as module
from fedstill.population.scattered import MOST_DEATHS, WorkerError, pieces_of, scattered

SCAFFOLD = RecipeOf("scaffold")


def played(recipe=SCAFFOLD, seen=None, **crew):
    return loop.federate(over(recipe, partial(in_turn, seen=seen, **crew)))


def test_pieces_cost_about_the_same_and_hold_everybody_once():
    costs = np.array([9, 1, 1, 1, 5, 1])
    pieces = pieces_of(costs, 3)
    assert sorted(np.concatenate(pieces).tolist()) == list(range(6))
    assert [int(costs[piece].sum()) for piece in pieces] == [9, 5, 4]


def test_a_small_cohort_has_no_empty_pieces():
    assert [piece.tolist() for piece in pieces_of(np.array([1, 1]), 5)] == [[0], [1]]


def test_every_worker_gets_a_piece_of_a_round():
    seen = []
    played(seen=seen, count=3)
    assert seen[0].done_by == [0, 1, 2] * 3


@pytest.mark.parametrize("deadly", [{1}, {2, 4}, {1, 2, 3}, {5, 6, 7}])
def test_the_piece_of_a_worker_that_dies_is_done_by_another_with_the_same_bits(deadly, caplog):
    caplog.set_level(logging.WARNING)
    seen = []
    spread = played(seen=seen, count=2, deadly=deadly)
    plain = loop.federate(SCAFFOLD.run())
    assert same_bits(spread.weights, plain.weights)
    assert [row["train_loss"] for row in spread.history.rows] == [row["train_loss"] for row in plain.history.rows]
    assert seen[0].tasks == 6 + len(deadly)
    assert caplog.text.count("another worker does it again") == len(deadly)


def test_clients_that_cost_every_worker_its_life_end_the_run_with_one_line():
    with pytest.raises(FedstillError, match=f"{MOST_DEATHS} workers died of the same clients .*cluster.actors"):
        played(count=1, deadly=set(range(1, 99)))


def test_a_run_without_any_worker_ends_with_one_line(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    with pytest.raises(FedstillError, match="no worker has begun"):
        loop.federate(over(SCAFFOLD, partial(in_turn, count=0)))


def test_a_question_is_answered_by_workers_and_a_plain_function_here():
    fedaux = RecipeOf("fedaux")
    task, seen = [], []

    def caught(given, first, **how):
        task.append(given)
        return scattered(given, first, crew=partial(in_turn, seen=seen), recipe=fedaux, device="cpu", threads=1, **how)

    loop.federate(replace(fedaux.run(), population=caught))
    with scattered(task[0], {}, crew=partial(in_turn, seen=seen), recipe=fedaux, device="cpu", threads=1) as here:
        answers = dict(here.ask(lambda data: {"rows": torch.tensor(len(data.y))}, [2, 0], round=1, sent=None))
    assert seen[0].tasks > 2 * fedaux.run().schedule.rounds  # the question took tasks of its own
    assert seen[1].tasks == 0
    assert [int(answers[client]["rows"]) for client in (2, 0)] == [4, 1]


class Mistaken(RecipeOf):
    """A run whose workers raise an error in place of training."""

    def __call__(self, federation, device):
        def breaks(uploads, start, seed):
            raise ERRORS[self.case]

        run = a_run(build_method("fedavg")[0].method)
        method = replace(run.method, way=(Mechanism(per_client=breaks),))
        return replace(run, method=method, federation=federation)

    def run(self):
        return a_run(build_method("fedavg")[0].method)


ERRORS = {"mistake": FedstillError("this is the user's mistake"), "bug": ZeroDivisionError("this is a bug")}


def test_a_mistake_in_a_worker_is_the_run_s_error_and_a_bug_has_its_traceback():
    with pytest.raises(FedstillError, match=r"^this is the user's mistake$"):
        played(Mistaken("mistake"))
    with pytest.raises(WorkerError, match=r"(?s)in breaks.*ZeroDivisionError: this is a bug"):
        played(Mistaken("bug"))


def test_a_resumed_run_on_workers_ends_with_the_bits_of_one_process(tmp_path):
    mixture = RecipeOf("mixture")
    short = replace(mixture.run(), schedule=replace(mixture.run().schedule, rounds=2, checkpoint_every=1))
    loop.federate(short, run_dir=tmp_path)
    again = loop.federate(over(mixture, in_turn), run_dir=tmp_path, resume=True)
    assert same_bits(again.weights, loop.federate(mixture.run()).weights)
    assert RUNS["mixture"]["method"].startswith("fedlmd+scaffold+mrtf")
