"""Methods in turn: each round has one, what both know goes over, and a switch at either end is no switch."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_rows import network, run
from papers import BENCHMARKS
from quick import EITHER_ENGINE, first_quick
from students import student_of
from toy import same_bits
from whole_server import watched

from fedstill.compose.phases import method_at, phases_of, share_states
from fedstill.core.errors import FedstillError
from fedstill.core.tree import clone, flatten
from fedstill.core.types import Phase
from fedstill.methods import fedavg, fedavgm, feddf, fedprox, scaffold
from fedstill.methods.lookup import build_method

REFINED = "student.steps=5, student.batch_size=8, student.lr=3e-3"
LABELS = "past=2, threshold=0.4, student.epochs=2, student.batch_size=4, student.lr=0.05"


def without_clock(result):
    return [
        {name: value for name, value in row.items() if not name.startswith("seconds")} for row in result.history.rows
    ]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4).map(sorted))
def test_every_round_belongs_to_the_first_phase_that_has_not_ended(ends):
    methods = [fedprox(mu=float(n)) for n in range(len(ends) + 1)]
    phases = phases_of([Phase(m, end) for m, end in zip(methods, [*ends, None], strict=True)])
    for number in range(1, 20):
        expected = methods[sum(end < number for end in ends)]
        assert method_at(phases, number) is expected


def test_phases_must_have_ends_that_do_not_run_backwards():
    with pytest.raises(FedstillError, match="phase 1 has no end"):
        phases_of([Phase(fedavg()), Phase(fedprox())])
    with pytest.raises(FedstillError, match="phase 2 ends in round 3, before"):
        phases_of([Phase(fedavg(), 5), Phase(fedprox(), 3), Phase(fedavg())])
    with pytest.raises(FedstillError, match="no phase"):
        phases_of([])


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_a_switch_before_the_first_or_after_the_last_round_is_no_switch(engine):
    first, second = fedprox(mu=0.5), scaffold()
    for until, alone in ((0, second), (3, first), (99, first)):
        found = run((Phase(first, until), Phase(second)), engine=engine)
        assert same_bits(found.weights, run(alone, engine=engine).weights)
    middle = run((Phase(first, 1), Phase(second)), engine=engine).weights
    assert not any(same_bits(middle, run(one, engine=engine).weights) for one in (first, second))


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize(
    "text",
    first_quick(
        [
            "scaffold+fedavgm",
            f"{BENCHMARKS}/mrtf/released.py:mrtf({REFINED})",
            f'd2cfl({LABELS}, rule="max", student_start="carried", beta=0.7, rollback="fixed", feedback=true)',
            "scaffold",
            "fedavgm",
            "feddyn",
            f"feddf({REFINED})",
            f"feddf({REFINED}, feedback=false)",
            f"mrtf({REFINED}, warm_up=1)",
            f"mrtf({REFINED}, feedback=true)",
            f"mrtf({REFINED}, every=3)",
            f"d2cfl({LABELS})",
            f"d2cfl({LABELS}, feedback=true)",
        ],
        3,
    ),
)
@pytest.mark.parametrize("until", first_quick([3, 1]))
def test_switching_to_the_same_method_changes_nothing(text, until, engine):
    """States of clients and server go over; learning rate and cohorts never knew of phases."""
    (whole,) = build_method(text)
    found, wanted = (
        run(method, engine=engine, rounds=5)
        for method in (build_method(f"{text} until {until} then {text}"), whole.method)
    )
    assert same_bits(found.weights, wanted.weights)
    assert without_clock(found) == without_clock(wanted)


def test_a_model_that_was_reported_in_one_phase_is_not_reported_in_the_next():
    """Which only warms up, and so has none of its own."""
    first, second = f"mrtf({REFINED})", f"feddf({REFINED}, feedback=false, warm_up=5)"
    found, plain = (
        run(build_method(f"{first} until 2 then {one}"), rounds=4)
        for one in (second, "fedavg+average(weighting=uniform)")
    )
    told, wanted = ([row["loss"] for row in result.history.rows] for result in (found, plain))
    assert told == wanted
    assert len(set(told)) == 4


def test_a_server_that_labels_by_another_rule_collects_its_teachers_anew():
    """What two rules remember of a teacher are two things: the label, and all probabilities."""
    other = f'd2cfl({LABELS}, rule="max")'
    for first, second in ((f"d2cfl({LABELS})", other), (other, f"d2cfl({LABELS})")):
        rows = run(build_method(f"{first} until 4 then {second}"), rounds=8).history.rows
        assert [row["pseudo_labels"] > 0 for row in rows] == [False, False, True, True, False, False, True, True]


def test_after_a_switch_to_fewer_teachers_only_the_newest_count():
    """At alpha = 1 the teachers are FedAvg's models, whoever learns from them."""
    many, few = (f'd2cfl({LABELS.replace("past=2", f"past={past}")}, mix_alpha=1.0, rule="mean")' for past in (3, 1))
    found, wanted = (run(build_method(text), rounds=5).targets for text in (f"{many} until 4 then {few}", few))
    assert torch.equal(found.probabilities, wanted.probabilities)


def test_past_teachers_wait_while_another_method_runs():
    text = f"d2cfl({LABELS}) until 2 then fedavg until 4 then d2cfl({LABELS})"
    rows = run(build_method(text), rounds=5).history.rows
    assert [row.get("pseudo_labels", 0) > 0 for row in rows] == [False, False, False, False, True]


def test_a_client_keeps_its_control_through_a_phase_that_does_not_know_it():
    kept: dict[int, list] = {1: [], 3: []}

    def watched(number):
        method = scaffold()

        def finish(local, measured):
            state, extra = method.objective.finish(local, measured)
            kept[number].append(clone(state["control"] if number == 1 else local.state["control"]))
            return state, extra

        return dataclasses.replace(method, objective=dataclasses.replace(method.objective, finish=finish))

    run((Phase(watched(1), 1), Phase(fedprox(), 2), Phase(watched(3))), engine="looped", rounds=3, cohort=7)
    assert len(kept[1]) == len(kept[3]) == 8  # the first one is of the look at what will leave, before round 1
    for before, later in zip(kept[1][1:], kept[3][1:], strict=True):
        assert same_bits(later, before)
        assert any(bool(leaf.any()) for leaf in before.values())


def means_agree(text: str, *, server: str, client: str, total: bool = False) -> float:
    """Largest distance between a server slot and the mean (or sum) of the clients' after a run of everybody."""
    last: dict = {}

    def watch(phase):
        def finish(local, measured):
            state, extra = phase.method.objective.finish(local, measured)
            last.setdefault("clients", []).append(clone(state.get(client, local.state.get(client))))
            return state, extra

        def look(candidate, state, round):
            last["server"], last["sent"] = state, last.pop("clients", [])

        objective = dataclasses.replace(phase.method.objective, finish=finish)
        return phase._replace(method=watched(dataclasses.replace(phase.method, objective=objective), look))

    run(tuple(watch(phase) for phase in build_method(text)), engine="looped", rounds=6, cohort=7)
    flat = {
        name.rpartition(f"{server}/")[2]: leaf for name, leaf in flatten(last["server"]).items() if f"{server}/" in name
    }
    gaps = []
    for name, leaf in flat.items():
        theirs = torch.stack([sent[name] for sent in last["sent"]])
        gaps.append(float((leaf - (theirs.sum(0) if total else theirs.mean(0))).abs().max()))
        assert bool(leaf.any())
    return max(gaps)


@pytest.mark.parametrize(
    "text",
    first_quick(
        [
            "fedavgm until 2 then {0} until 4 then fedavgm until 5 then {0}",
            "{0}",
            "{0} until 2 then fedprox until 3 then {0}",
            "{0} until 2 then {0}+fedprox until 4 then {0}",
        ]
    ),
)
@pytest.mark.parametrize(
    ("method", "server", "client", "total"),
    [
        ("scaffold", "control", "control", False),
        ("feddyn", "dyn_mean", "dyn_gradient", False),
        ("fedcurv", "fisher", "fisher", True),
    ],
)
def test_after_any_switch_the_server_holds_the_mean_of_what_its_clients_hold(text, method, server, client, total):
    """Everybody takes part: c = mean c_k, h = mean g_k, U = sum u_k, whatever phases lay in between."""
    gap = means_agree(text.format(method), server=server, client=client, total=total)
    assert gap < 1e-5


def test_a_longer_chain_does_not_lose_the_control():
    gap = means_agree("scaffold until 3 then scaffold+fedavgm(beta=0.0)", server="control", client="control")
    assert gap < 1e-5


def test_two_phases_with_one_slot_in_two_forms_cannot_follow():
    weights = network().init(0)
    other = scaffold()
    odd = dataclasses.replace(other.objective, init=lambda w: {"control": {"x": torch.zeros(1)}})
    phases = phases_of([Phase(other, 2), Phase(dataclasses.replace(other, objective=odd))])
    with pytest.raises(FedstillError, match="'control' on a client in different forms"):
        share_states(phases, weights)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("cut", first_quick([2, 1, 3]))
def test_a_run_in_phases_resumes_bit_for_bit(tmp_path, engine, cut):
    text = "scaffold until 2 then fedprox(mu=0.3)+fedavgm until 3 then scaffold"
    how = {"engine": engine, "checkpoint_every": 1}
    whole = run(build_method(text), rounds=5, run_dir=tmp_path / "whole", **how)
    run(build_method(text), rounds=cut, run_dir=tmp_path / "cut", **how)
    resumed = run(build_method(text), rounds=5, run_dir=tmp_path / "cut", resume=True, **how)
    assert same_bits(resumed.weights, whole.weights)


def test_unlabeled_data_are_passed_only_in_the_phase_that_declares_them():
    seen = []

    def spying(method):
        return watched(method, lambda _, __, round: seen.append((round.number, round.unlabeled is not None)))

    run(
        (
            Phase(spying(fedavg()), 1),
            Phase(spying(feddf(student=student_of(feddf, steps=1))), 2),
            Phase(spying(fedavgm())),
        ),
        rounds=3,
    )
    assert seen == [(1, False), (2, True), (3, False)]
