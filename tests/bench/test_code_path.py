"""A record names the modules that its run entered, so a later change of one of them is noticed."""

import sys

import pytest
from bench_cases import run_of, small

from fedstill.bench import Cell
from fedstill.bench.code_path import UNKNOWN, CodeWatch, changed_modules, code_lines, digests
from fedstill.bench.plan import make_jobs
from fedstill.bench.workers import do_jobs
from fedstill.core.seeds import seed_for

HERE = digests(["loop/round.py", "methods/fedavg.py"])


def record(**code):
    return run_of(small(), [1.0] * 4, **({"code": code["code"]} if code else {}))


def test_a_run_names_the_modules_that_it_entered_and_no_other_method(tmp_path):
    setting = {"model": {"name": "mlp", "hidden": [8]}, "cohort": 2, "rounds": 1}
    cells = [Cell(method, "digits", small(method=method, **setting)) for method in ("fedavg", "fedprox")]
    messages = []
    do_jobs(make_jobs(cells, preset="paper", seeds=1, device="cpu", out=tmp_path), messages.append, at_once=1)
    first, second = (set(message.run["code"]) for message in messages if message.run is not None)
    assert {"loop/round.py", "engine/engine.py", "methods/fedavg.py", "partition/common.py"} <= first
    assert "methods/fedprox.py" in second - first
    assert not {"methods/scaffold.py", "server/distill/student.py"} & (first | second)
    assert {path for path in first if path.startswith("data/")} <= second, "the second run shares the data of the first"
    assert not {path for path in first if path.startswith(("bench/", "cli/"))}
    assert sys.getprofile() is None


def test_a_part_that_begins_late_is_seen_in_a_tenth_round():
    with CodeWatch(rounds=200) as watch:
        for number in range(1, 60):
            watch.on_round({"round": number})
            if number + 1 == 50:
                seed_for(0, "test")
    assert "core/seeds.py" in watch.entered


def test_rounds_between_are_not_watched_because_watching_slows_them():
    with CodeWatch(rounds=200) as watch:
        for number in range(1, 60):
            watch.on_round({"round": number})
            if number + 1 in (51, 53):
                seed_for(0, "test")
    assert "core/seeds.py" not in watch.entered


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        (HERE, []),
        ({**HERE, "loop/round.py": "00000000"}, ["loop/round.py"]),
        ({**HERE, "loop/gone.py": "00000000"}, ["loop/gone.py"]),
    ],
)
def test_a_module_with_another_source_or_none_is_changed(code, changed):
    assert changed_modules(record(code=code)) == changed


def test_lines_group_runs_by_their_changes_and_leave_unchanged_ones_out():
    old = [{**record(), "seed": seed} for seed in range(4)]
    lines = code_lines([record(code=HERE), record(code={**HERE, "loop/round.py": "0"}), *old])
    assert lines == [
        "fedavg digits seed 0 recorded with other code: 1 module changed: loop/round.py",
        f"fedavg digits seed 0, fedavg digits seed 1, fedavg digits seed 2 and 1 more {UNKNOWN}",
    ]
