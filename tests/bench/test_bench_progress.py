"""What is shown while many runs go by."""

from pathlib import Path

import pytest
from bench_cases import run_of, small

from fedstill.bench.estimate import Estimate
from fedstill.bench.plan import make_orders
from fedstill.bench.recipe import Cell
from fedstill.cli import bench_progress as module
from fedstill.cli.bench_progress import BenchProgress

CELLS = [Cell("fedavg", "digits", small(rounds=100)), Cell("fedntd", "digits", small(rounds=100, method="fedntd"))]
ORDERS = make_orders(CELLS, preset="paper", seeds=1, device="cpu", out=Path("out"))
KNOWN = Estimate({ORDERS[0].run_id: 100.0, ORDERS[1].run_id: 300.0})


@pytest.fixture
def now(monkeypatch):
    """The clock, to be moved by hand."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    return clock


def done(number, **changes):
    run = run_of(ORDERS[number].experiment, [10.0, 20.0], rounds=2, **changes)
    return {"kind": "done", "number": number, "answer": run}


def test_a_finished_run_is_a_line_with_its_numbers_and_the_time_left(now, capsys):
    with BenchProgress(ORDERS, KNOWN, terminal=False) as progress:
        now[0] = 50.0
        progress.hear(done(0, seconds=50.0))
        progress.hear({"kind": "failed", "number": 1, "error": "out of memory"})
    first, second = capsys.readouterr().err.splitlines()
    # a quarter of the estimated work took 50 s
    assert first == "1/2 runs  fedavg digits seed 0: best 20.00 %, last 10 15.00 %, 50 s  2 min left"
    assert second == "2/2 runs, 1 failed  fedntd digits seed 0 failed: out of memory"


def test_rounds_of_an_earlier_start_do_not_count_as_speed(now):
    with BenchProgress(ORDERS[:1], KNOWN, terminal=False) as progress:
        progress.hear({"kind": "round", "number": 0, "round": 50})
        assert progress.left == ""
        now[0] = 10.0
        progress.hear({"kind": "round", "number": 0, "round": 75})
        assert progress.left == "10 s left"


def test_without_an_estimate_rounds_are_the_measure(now):
    with BenchProgress(ORDERS, Estimate({}), terminal=False) as progress:
        progress.hear({"kind": "round", "number": 0, "round": 0})
        now[0] = 10.0
        progress.hear({"kind": "round", "number": 0, "round": 20})
        assert progress.done == pytest.approx(0.1)
        assert progress.left == "90 s left" or progress.left == "2 min left"


def test_silence_is_broken_once_in_a_while(now, capsys):
    with BenchProgress(ORDERS, KNOWN, terminal=False) as progress:
        for number in range(1, 61):
            now[0] += 5.0
            progress.hear({"kind": "round", "number": 0, "round": number})
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 5
    assert "0/2 runs  fedavg digits seed 0, round 13/100" in lines[0]


def test_a_terminal_gets_one_bar_and_a_line_a_run(now, capsys):
    with BenchProgress(ORDERS, KNOWN, terminal=True) as progress:
        progress.hear({"kind": "round", "number": 0, "round": 50})
        task = progress.screen._bar.tasks[0]
        assert (task.completed, task.total) == (0.125, 1.0)
        assert task.fields["label"] == "fedavg digits seed 0, round 50/100"
        assert task.fields["count"] == "0/2 runs"
        progress.hear(done(0))
        assert task.fields["count"] == "1/2 runs"
    shown = capsys.readouterr()
    assert "fedavg digits seed 0: best 20.00 %" in shown.err
    assert shown.out == ""


def test_what_a_method_prepares_is_shown_where_rounds_are(now, capsys):
    told = {"kind": "prepare", "number": 0, "what": "simclr: epoch 3/100, loss 5.9000"}
    with BenchProgress(ORDERS, KNOWN, terminal=True) as progress:
        progress.hear(told)
        assert progress.screen._bar.tasks[0].fields["label"] == "fedavg digits seed 0, simclr: epoch 3/100, loss 5.9000"
        assert progress.done == 0
    capsys.readouterr()
    with BenchProgress(ORDERS, KNOWN, terminal=False) as progress:
        progress.hear(told)
        now[0] = 61.0
        progress.hear(told)
    assert capsys.readouterr().err == "0/2 runs  fedavg digits seed 0, simclr: epoch 3/100, loss 5.9000\n"


def test_runs_that_take_no_time_at_all_are_counted_too(now):
    nothing = Estimate({order.run_id: 0.0 for order in ORDERS})
    with BenchProgress(ORDERS, nothing, terminal=False) as progress:
        progress.hear(done(0, seconds=0.0))
        assert progress.done == 0.5


def test_the_same_reason_is_told_once(now, capsys):
    with BenchProgress(ORDERS, KNOWN, terminal=False) as progress:
        for number in (0, 1):
            progress.hear({"kind": "failed", "number": number, "error": "no such data"})
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("fedavg digits seed 0 failed: no such data")
    assert second.endswith("fedntd digits seed 0 failed: for the same reason")
