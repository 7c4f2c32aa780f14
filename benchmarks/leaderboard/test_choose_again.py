"""The repetitions of `fedstill choose`: the statistics are worked out by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("choose_again", HERE / "choose_again.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there for their names
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def record(repetition, chosen, single):
    """A repetition with two fresh seeds; FedAvg has 60 %."""
    seeds = [repetition * 10, repetition * 10 + 1]
    runs = [
        {"method": method, "seed": seed, "last_rounds": value}
        for method, values in (("best", chosen), ("scaffold", single), ("fedavg", (60.0, 60.0)))
        for seed, value in zip(seeds, values, strict=True)
    ]
    how = {"budget": "9rounds", "rounds": 4, "single": ["scaffold"], "chosen": "best", "fresh_seeds": seeds}
    spent = {"seconds_to_choice": 10.0, "seconds_of_choose": 20.0 + repetition, "side_by_side": 2}
    return {"seed": repetition, "runs": runs, **how, **spent, "processor": "toy", "cores": 2, "torch": "2"}


def test_repetitions_are_compared_by_the_means_of_their_fresh_seeds(script):
    # chosen less scaffold: 2, 0 and 4 by repetition; mean 2, deviation 2, 2 +- 4.3027 * 2 / sqrt(3)
    records = [
        record(0, (80.0, 82.0), (79.0, 79.0)),
        record(1, (70.0, 72.0), (72.0, 70.0)),
        record(2, (84.0, 84.0), (80.0, 80.0)),
    ]
    shown = script.show(records)
    assert "+2.0 points on average, 95 % interval over repetitions −3.0 to +7.0, standard deviation 2.0" in shown
    assert "At least as good in 3 of 3 repetitions and in 5 of 6 pairs of runs" in shown
    assert "took 22 s" in shown
