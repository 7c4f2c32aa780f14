"""What is shown while rounds go by."""

import re

import pytest

from fedstill.cli import progress as module
from fedstill.cli.progress import Progress, duration
from fedstill.loop.callbacks import RunInfo

ROW = {"accuracy": 0.5}


def info(past=0, rounds=600):
    rows = tuple({"round": number + 1} for number in range(past))
    return RunInfo("fedavg", rounds, 10, 5, "looped", "cpu", "mlp", 100, None, rows)


def play(progress, runs, rounds, past=0):
    for run in range(runs):
        progress.label = f"fedavg seed {run}"
        progress.on_start(info(past))
        for number in range(past, rounds):
            progress.on_round({"round": number + 1, "accuracy": 0.5 + number / 10_000})
        progress.on_end(None)


def test_a_long_run_is_told_in_about_ten_lines(capsys):
    with Progress("a title", runs=1, rounds=600, terminal=False) as progress:
        play(progress, 1, 600)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "a title"
    assert 8 <= len(lines) - 1 <= 12
    assert "round 600/600" in lines[-1]
    assert re.search(r"\d rounds/s  0 s left$", lines[-1])


def test_a_comparison_is_told_in_about_ten_lines_too(capsys):
    with Progress("a title", runs=21, rounds=40, terminal=False) as progress:
        play(progress, 21, 40)
    lines = capsys.readouterr().err.splitlines()
    assert 8 <= len(lines) - 1 <= 12
    assert lines[-1].startswith("run 21/21  fedavg seed 20  round 40/40")


def test_silence_is_broken_when_rounds_are_slow(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    with Progress("", runs=1, rounds=1000, terminal=False) as progress:
        progress.on_start(info())
        for number in range(3):
            now[0] += module.QUIET_SECONDS + 1
            progress.on_round({"round": number + 1, "accuracy": 0.5})
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_rounds_of_an_earlier_start_do_not_count_as_speed(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    with Progress("", runs=1, rounds=100, terminal=False) as progress:
        progress.on_start(info(past=90))
        now[0] += 5.0
        for number in range(90, 95):
            progress.on_round({"round": number + 1, "accuracy": 0.5})
        assert progress.rate == pytest.approx(1.0)
        assert progress.left == "5 s left"


def test_a_terminal_gets_one_bar_with_round_accuracy_speed_and_time_left(capsys):
    with Progress("a title", runs=1, rounds=4, terminal=True) as progress:
        progress.label = "fedavg[0]"
        progress.on_start(info())
        for number in range(3):
            progress.on_round({"round": number + 1, "accuracy": 0.25})
        task = progress.bar.tasks[0]
        assert (task.completed, task.total, task.description) == (3, 4, "fedavg[0]")
        assert task.fields["round"] == "round 3/4"
        assert task.fields["accuracy"] == "25.0 %"
        assert task.fields["rate"].endswith("rounds/s")
        assert task.fields["left"].endswith("left")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.2, "0 s"), (59.6, "1:00 min"), (3599.7, "1:00 h"), (90061, "25:01 h")]
)
def test_durations_are_for_people(seconds, told):
    assert duration(seconds) == told


def test_what_is_prepared_is_told_in_about_ten_lines_with_its_own_time_left(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    with Progress("", runs=1, rounds=10, terminal=False) as progress:
        progress.label = "fedavg+simclr"
        progress.on_start(info())
        for epoch in range(1, 101):
            now[0] += 0.1
            progress.on_prepare(f"simclr: epoch {epoch}/100", epoch / 100)
        now[0] += 1.0
        progress.on_round({"round": 1, "accuracy": 0.5})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fedavg+simclr  simclr: epoch 1/100"
    assert 10 <= len(lines) - 1 <= 12
    assert lines[5] == "fedavg+simclr  simclr: epoch 50/100  5 s left"
    assert lines[-1] == "fedavg+simclr  round 1/10  50.0 %  1.0 rounds/s  9 s left"  # 10 s before it do not count


def test_a_slow_preparation_breaks_the_silence_and_every_run_says_what_it_prepares(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    with Progress("", runs=2, rounds=1, terminal=False) as progress:
        for run in range(2):
            progress.label = f"simclr seed {run}"
            progress.on_start(info())
            progress.on_prepare("simclr: epoch 1/1000", 0.001)
            now[0] += module.QUIET_SECONDS + 1
            progress.on_prepare("simclr: epoch 2/1000", 0.002)
            progress.on_prepare("scores: client 1/2", 0.0)  # something else begins
            progress.on_end(None)
    lines = [line.split("  ")[2] for line in capsys.readouterr().err.splitlines() if "round" not in line]
    assert lines == ["simclr: epoch 1/1000", "simclr: epoch 2/1000", "scores: client 1/2"] * 2


def test_on_a_terminal_the_bar_shows_what_is_prepared_then_the_rounds(capsys):
    with Progress("", runs=1, rounds=4, terminal=True) as progress:
        progress.label = "fedavg+simclr"
        progress.on_start(info())
        progress.on_prepare("simclr: epoch 3/12", 0.25)
        task = progress.bar.tasks[0]
        assert (task.completed, task.total) == (0.25, 1.0)
        assert task.fields["round"] == "simclr: epoch 3/12"
        progress.on_round({"round": 1, "accuracy": 0.25})
        task = progress.bar.tasks[0]
        assert (task.completed, task.total) == (1, 4)
        assert task.fields["round"] == "round 1/4"


def test_a_run_that_its_budget_cuts_counts_to_its_own_end_and_says_it_once(capsys):
    with Progress("", runs=1, rounds=20, terminal=False) as progress:
        progress.label = "dp_fedavg"
        progress.on_start(info(rounds=2))
        for number in (1, 2):
            progress.on_round({"round": number, "accuracy": 0.5})
        progress.on_end(None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["round 1/2", "round 2/2"]
    assert lines[-1].endswith("0 s left")


def test_of_several_runs_a_cut_one_leaves_fewer_rounds_to_wait_for(capsys):
    with Progress("", runs=2, rounds=20, terminal=False) as progress:
        for rounds in (2, 20):
            progress.on_start(info(rounds=rounds))
            for number in range(rounds):
                progress.on_round({"round": number + 1, "accuracy": 0.5})
            progress.on_end(None)
    assert progress.done == progress.total == 22
    lines = capsys.readouterr().err.splitlines()
    assert len(set(lines)) == len(lines)
    assert lines[-1].split("  ")[:3] == ["run 2/2", "", "round 20/20"]


def test_runs_beside_each_other_count_together(capsys):
    with Progress("a title", runs=2, rounds=40, terminal=False) as progress:
        both = [progress.beside(f"fedavg seed {seed}") for seed in (0, 1)]
        both[0].on_start(info(past=20, rounds=40))
        both[1].on_start(info(rounds=40))
        for number in range(40):
            if number < 20:
                both[0].on_round({"round": 21 + number, "accuracy": 0.5})
            both[1].on_round({"round": 1 + number, "accuracy": 0.25})
        assert (progress.done, progress.total, progress.resumed, progress.finished) == (80, 80, 20, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("a title") == 1
    assert lines[-1].startswith("run 2/2  fedavg seed 1  round 40/40  25.0 %")
