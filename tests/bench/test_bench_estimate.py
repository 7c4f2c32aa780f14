"""How long it will take, how many at a time, and in which order."""

from pathlib import Path

import pytest
from bench_cases import run_of, small

from fedstill.bench import plan, workers
from fedstill.bench.estimate import Estimate, estimate, estimate_line, longest_first, step_cost
from fedstill.bench.plan import choose_jobs, device_name, make_orders, room_for, threads_for
from fedstill.bench.recipe import Cell


class Prober:
    """Answers every probe with the same seconds and remembers what it was asked."""

    def __init__(self, first=5.0, later=2.0, error=""):
        self.asked = []
        self.answer = {"kind": "failed", "error": error} if error else {"kind": "done", "answer": [first, later]}

    def do(self, kind, orders, hear):
        assert kind == "probe"
        self.asked += [order.row for order in orders]
        for number in range(len(orders)):
            hear({**self.answer, "number": number})


def orders(*methods, seeds=1, rounds=11, column="digits", **changes):
    cells = [Cell(method, column, small(method=method, rounds=rounds, **changes)) for method in methods]
    return make_orders(cells, preset="paper", seeds=seeds, device="cpu", out=Path("out"))


def test_a_step_costs_a_third_more_for_every_frozen_model():
    assert step_cost(small(method="fedavg")) == 1.0
    assert step_cost(small(method="fedntd")) == pytest.approx(4 / 3)
    switched = small(rounds=10, method="fedavg until 4 then fedntd")
    assert step_cost(switched) == pytest.approx((4 + 6 * 4 / 3) / 10)


def test_a_run_is_a_first_round_and_the_others_at_the_cost_of_its_method():
    some, prober = orders("fedavg", "fedntd"), Prober(first=5.0, later=2.0)
    known = estimate(some, some, [], prober, jobs=1)
    assert [known.of(order) for order in some] == pytest.approx([5 + 10 * 2, 5 + 10 * 2 * 4 / 3])
    assert prober.asked == ["fedavg"], "one cell a group"


def test_the_probed_method_s_own_cost_is_taken_out():
    some = orders("fedntd", "fedavg")
    known = estimate(some, some, [], Prober(first=5.0, later=4.0), jobs=1)
    assert [known.of(order) for order in some] == pytest.approx([5 + 10 * 4, 5 + 10 * 3])


class Preparing(Prober):
    """Pre-trains before it answers."""

    def do(self, kind, orders, hear):
        for epoch in (1, 2):
            hear({"kind": "prepare", "number": 0, "what": f"simclr: epoch {epoch}/2"})
        super().do(kind, orders, hear)


def test_what_a_probe_prepares_is_told_now_and_then_and_is_no_failure():
    lines, some = [], orders("fedavg")
    known = estimate(some, some, [], Preparing(), jobs=1, tell=lines.append)
    assert lines == ["measuring a few rounds of 1 setting ...", "fedavg digits, simclr: epoch 1/2"]
    assert (known.failures, known.of(some[0])) == ((), 5 + 10 * 2)


def test_a_probe_leaves_out_what_the_method_prepares_and_says_what_it_is(tmp_path, monkeypatch):
    """Pre-training is done once for many runs, and the probe has done it."""
    experiment = small(
        method="simclr(epochs=2, batch_size=32, neighbours=0)", data={"source": "digits", "unlabeled": 400},
        model={"name": "mlp", "hidden": [8]}, rounds=2, cohort=1, engine={"device": "cpu"},
    )  # fmt: skip
    heard = []
    prepared = workers.Clock(heard.append)
    prepared.on_start(None)
    prepared.on_prepare("simclr: epoch 1/2", 0.5)
    prepared.on_round({"round": 1, "seconds_prepared": 100.0})
    assert prepared.seconds[0] == pytest.approx(-100.0, abs=1.0)
    assert heard == [{"kind": "prepare", "what": "simclr: epoch 1/2"}]
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    found = workers.Worker().probe(experiment, heard.append)
    assert found.first > 0
    assert heard[1]["what"].startswith("simclr: epoch 1/2, loss ")


def test_a_run_of_one_round_is_not_run_twice_to_see_how_long_it_takes(monkeypatch):
    """Forty epochs of a hundred clients took as long to measure as to run. Their data are looked at all the same."""
    monkeypatch.setattr(workers, "run", None)
    assert workers.Worker().probe(small(rounds=1), print) is None
    with pytest.raises(workers.NoData):
        workers.Worker().probe(small(rounds=1, data={"source": "no/such/folder"}), print)
    once, prober = orders("fedavg", rounds=1), Prober()
    prober.answer = {"kind": "done", "answer": None}
    known = estimate(once, once, [], prober, jobs=1)
    assert (known.failures, estimate_line(once, known, jobs=1, device="cpu")) == (
        (), "1 run of 1 round, time unknown, one at a time on cpu",
    )  # fmt: skip


def test_of_short_and_long_runs_of_a_kind_a_long_one_is_measured():
    some, prober = orders("fedavg", rounds=1) + orders("fedntd", rounds=20), Prober(first=5.0, later=4.0)
    known = estimate(some, some, [], prober, jobs=1)
    assert prober.asked == ["fedntd"]
    assert [known.of(order) for order in some] == pytest.approx([5.0, 5 + 19 * 4])


def test_a_first_round_that_compiles_does_not_stand_for_all(monkeypatch):
    """It took 25 s where later ones took 5, and a hundred of them were said to take 35 minutes."""
    now = iter([0.0, 25.0, 30.0, 35.0])
    monkeypatch.setattr(workers.time, "perf_counter", lambda: next(now))
    clock = workers.Clock(lambda message: None)
    clock.on_start(None)
    assert [clock.on_round({"round": number}) for number in (1, 2)] == [False, True]
    assert clock.seconds == [25.0, 5.0]


def test_other_data_splits_and_networks_are_probed_apart_and_by_all_workers_at_once():
    some = orders("fedavg") + orders("fedavg", column="net", model="mlp") + orders("fedprox", column="net", model="mlp")
    prober = Prober()
    estimate(some, some, [], prober, jobs=3)
    assert prober.asked == ["fedavg"] * 6


def test_a_server_that_learns_is_measured_apart():
    some, prober = orders("fedavg", "fedprox", "feddf", data={"source": "digits", "unlabeled": "test"}), Prober()
    estimate(some, some, [], prober, jobs=1)
    assert prober.asked == ["fedavg", "feddf"]


def test_earlier_runs_on_this_device_replace_the_probe():
    some, prober = orders("fedavg", "fedntd", seeds=2), Prober()
    device = device_name("cpu")
    done = run_of(some[0].experiment, [1.0], seconds=110.0, device=device)
    known = estimate(some[1:], some, [done], prober, jobs=1)
    assert prober.asked == []
    found = {(order.row, order.experiment.seed): known.of(order) for order in some[1:]}
    assert found == pytest.approx({("fedavg", 1): 110.0, ("fedntd", 0): 110 * 4 / 3, ("fedntd", 1): 110 * 4 / 3})
    others = {"device": "cuda NVIDIA H200"}, {"at_once": 4}, {"engine": {"precision": "bf16"}}
    for changes in others:
        estimate(some[1:], some, [{**done, **changes}], prober, jobs=1)
    assert prober.asked == ["fedntd"] * 3, "another device, engine, or number at a time says little"


def test_what_was_prepared_before_the_first_round_is_no_part_of_a_round():
    """A second of rounds and a minute of pre-training for all runs: thirty rounds of others are not half an hour."""
    some = orders("fedavg", "fedntd") + orders("fedavg", rounds=22)
    done = run_of(some[0].experiment, [1.0], seconds=71.0, prepared=60.0, device=device_name("cpu"))
    known = estimate(some, some, [done], Prober(), jobs=1)
    assert [known.of(order) for order in some] == pytest.approx([11.0, 11 * 4 / 3, 22.0])


def test_each_engine_is_estimated_from_its_own_runs():
    plain, other = orders("fedavg", "fedntd"), orders("fedavg", "fedntd", engine={"name": "looped"})
    device, prober = device_name("cpu"), Prober()
    done = run_of(plain[0].experiment, [1.0], seconds=11.0, device=device)
    slow = {**done, "seconds": 110.0, "engine": {"name": "looped"}}
    some = [plain[1], other[1]]
    known = estimate(some, plain + other, [done, slow], prober, jobs=1)
    assert [known.of(order) for order in some] == pytest.approx([11 * 4 / 3, 110 * 4 / 3])
    assert prober.asked == []
    estimate(some, plain + other, [done], prober, jobs=1)
    assert prober.asked == ["fedntd"], "of one engine nothing is known"


def test_where_nothing_is_measured_nothing_is_said_to_be():
    once, told = orders("fedavg", rounds=1) + orders("fedavg", rounds=1, column="net", model="mlp"), []
    prober = Prober()
    prober.answer = {"kind": "done", "answer": None}
    estimate(once, once, [], prober, jobs=1, tell=told.append)
    assert told == ["looking at the data of 2 settings ...", "looked at 1 of 2", "looked at 2 of 2"]
    told.clear()
    both = once + orders("fedavg", cohort=2)
    estimate(both, both, [], prober, jobs=1, tell=told.append)
    assert told[0] == "measuring a few rounds of 1 setting, looking at the data of 2 more ..."
    assert told[-1] == "measured or looked at 3 of 3"


def test_the_line_says_how_many_how_long_and_where():
    some = orders(*(f"fedprox(mu={number}.0)" for number in range(1, 13)), seeds=3, rounds=200)
    known = Estimate({order.run_id: 70.0 for order in some})
    line = estimate_line(some, known, jobs=3, device="cuda")
    assert line == "36 runs of 200 rounds, about 14 min with 3 at a time on cuda"


def test_the_longest_run_is_the_least_that_it_takes():
    some = orders("fedavg", "fedntd")
    known = Estimate({some[0].run_id: 10.0, some[1].run_id: 50.0})
    assert estimate_line(some, known, jobs=2, device="cpu").endswith("about 50 s with 2 at a time on cpu")


def test_a_probe_that_fails_is_told_and_costs_only_the_estimate():
    some = orders("fedavg") + orders("fedavg", column="other", rounds=5, cohort=2)
    known = estimate(some, some, [], Prober(error="no such data"), jobs=1)
    assert known.failures == ("fedavg digits: no such data", "fedavg other: no such data")
    line = estimate_line(some, known, jobs=1, device="cpu")
    assert line == "2 runs of 5 to 11 rounds, time unknown, one at a time on cpu"


def test_cells_without_data_are_known_before_anything_is_run():
    some = orders("fedavg", "fedntd", seeds=2)
    prober = Prober(error="the hub did not give it")
    prober.answer["no_data"] = True
    known = estimate(some, some, [], prober, jobs=1)
    assert known.failures == ()
    assert {known.lacks_data(order) for order in some} == {"the hub did not give it"}
    assert known.lacks_data(orders("fedavg", cohort=2)[0]) is None


def test_measuring_is_told_with_a_count_of_settings_not_of_workers():
    some, told = orders("fedavg") + orders("fedavg", column="net", model="mlp"), []
    estimate(some, some, [], Prober(), jobs=3, tell=told.append)
    assert told == ["measuring a few rounds of 2 settings ...", "measured 1 of 2", "measured 2 of 2"]
    told.clear()
    estimate(some[:1], some, [], Prober(), jobs=1, tell=told.append)
    assert told == ["measuring a few rounds of 1 setting ..."]


def test_one_run_of_one_round_is_no_plural():
    (one,) = orders("fedavg", rounds=1)
    assert estimate_line([one], Estimate({}), jobs=1, device="cpu").startswith("1 run of 1 round, ")


def test_seeds_come_in_turn_and_within_one_the_longest_first():
    some = orders("fedavg", "fedntd", "fedprox", seeds=2)
    seconds = {"fedavg": 10.0, "fedntd": 30.0, "fedprox": 20.0}
    known = Estimate({order.run_id: seconds[order.row] for order in some})
    found = [(order.experiment.seed, order.row) for order in longest_first(some, known)]
    assert found == [(seed, row) for seed in (0, 1) for row in ("fedntd", "fedprox", "fedavg")]


@pytest.mark.parametrize(
    ("runs", "gigabytes", "cores", "jobs"),
    [(36, 139, 16, 8), (36, 139, 6, 3), (2, 139, 16, 2), (36, 20, 16, 2), (36, 4, 16, 1), (36, 139, 1, 1)],
)
def test_a_gpu_takes_as_many_as_memory_cores_and_runs_allow(runs, gigabytes, cores, jobs):
    assert room_for(runs, free_bytes=gigabytes << 30, cores=cores) == jobs


def test_a_cpu_takes_one_at_a_time_unless_asked_and_shares_its_cores(monkeypatch):
    assert choose_jobs("auto", device="cpu", runs=10) == 1
    assert choose_jobs("4", device="cpu", runs=10) == 4
    assert choose_jobs("4", device="cpu", runs=3) == 3
    monkeypatch.setattr(plan, "cores", lambda: 8)
    monkeypatch.setattr(plan.torch, "get_num_threads", lambda: 8)
    assert [threads_for(jobs) for jobs in (1, 3, 20)] == [8, 2, 1]
