"""How long runs take, from recorded seconds, and in which order they come."""

from pathlib import Path

import pytest
from bench_cases import run_of, small

from fedstill.bench import Cell
from fedstill.bench.plan import Seconds, estimate_line, longest_first, make_jobs

DEVICE = "cpu x86_64"  # of run_of


def jobs(*methods, seeds=1, rounds=10, column="digits", **changes):
    cells = [Cell(method, column, small(method=method, rounds=rounds, **changes)) for method in methods]
    return make_jobs(cells, preset="paper", seeds=seeds, device="cpu", out=Path("out"))


def seconds(*runs, at_once=1):
    return Seconds(runs, device=DEVICE, at_once=at_once)


def test_a_cell_takes_as_long_as_its_other_seeds_did_and_others_of_its_column_as_long_by_the_round():
    fedavg, fedntd, other = *jobs("fedavg"), *jobs("fedntd", rounds=20), *jobs("fedntd", column="letters")
    known = seconds(*(run_of(fedavg.experiment, [1.0], seconds=spent) for spent in (90.0, 110.0)))
    assert [known.of(job) for job in (fedavg, fedntd, other)] == [100.0, 200.0, None]
    known.add(run_of(fedntd.experiment, [1.0], seconds=500.0))
    assert known.of(fedntd) == 500.0


@pytest.mark.parametrize("changes", [{"device": "cuda NVIDIA H200"}, {"at_once": 4}, {"engine": {"precision": "bf16"}}])
def test_runs_on_another_device_with_another_engine_or_in_other_company_say_nothing(changes):
    (job,) = jobs("fedavg")
    assert seconds(run_of(job.experiment, [1.0], **changes)).of(job) is None


def test_seconds_before_the_first_round_are_no_part_of_a_round():
    (job,) = jobs("fedavg")
    assert seconds(run_of(job.experiment, [1.0], seconds=71.0, prepared=60.0)).of(job) == 11.0


def test_the_line_says_how_many_where_and_how_long():
    some = jobs("fedavg", "fedprox", "fedntd", seeds=4, rounds=200)
    known = seconds(run_of(some[0].experiment, [1.0], seconds=210.0, at_once=3), at_once=3)
    assert estimate_line(some, known, "cuda") == "12 runs of 200 rounds, 3 at a time on cuda, about 14 min"
    some += jobs("fedavg", column="letters", rounds=1, cohort=2)
    assert estimate_line(some, known, "cuda").startswith("13 runs of 1 to 200 rounds, ")
    assert estimate_line(some, known, "cuda").endswith("about 14 min (1 not estimated)")
    line = estimate_line(jobs("fedavg", rounds=1), seconds(), "cpu")
    assert line == "1 run of 1 round, one at a time on cpu, time unknown (no such run is recorded)"


def test_the_longest_run_is_the_least_that_it_takes():
    short, long = jobs("fedavg"), jobs("fedntd")
    runs = [run_of(job.experiment, [1.0], seconds=spent, at_once=2) for (job,), spent in ((short, 10.0), (long, 50.0))]
    assert seconds(*runs, at_once=2).total(short + long) == 50.0


def test_seeds_come_in_turn_and_within_one_the_longest_first():
    some = jobs("fedavg", "fedntd", "fedprox", seeds=2)
    spent = {"fedavg": 10.0, "fedntd": 30.0, "fedprox": 20.0}
    known = seconds(*(run_of(job.experiment, [1.0], seconds=spent[job.row]) for job in some))
    found = [(job.experiment.seed, job.row) for job in longest_first(some, known)]
    assert found == [(seed, row) for seed in (0, 1) for row in ("fedntd", "fedprox", "fedavg")]
