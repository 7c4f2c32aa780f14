"""Methods with a generator side by side: each has its own, and says its own; and what they refuse."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from server_rounds import LOCAL, run
from toy import furthest, same_bits
from whole_server import as_one, whole

from fedstill.core.errors import FedstillError
from fedstill.core.types import Phase
from fedstill.methods.lookup import build_method

HARD = "fedftg(iterations=2, student.steps=2, batch_size=4, generator.noise=3, student.lr=0.3)"
TAUGHT = "feddf_gen(generator.steps=2, student.steps=2, batch_size=4, generator.noise=3)"
SENT = "fedgen(generator.steps=2, generator.batch_size=4, generator.noise=3)"


def overheard(text, seen):
    """The method; `seen` gets the states of its refinements before and after each round, by slot."""
    method, slots = build_method(text)[0].method, ({}, {})

    def heard(step):
        def apply(candidate, state, round):
            after, new = step.apply(candidate, state, round)
            for kept, own in zip(slots, (state, new), strict=True):
                kept.update({slot: value for slot, value in own.items() if slot.endswith("_generator")})
            return after, new

        return dataclasses.replace(step, apply=apply)

    seen.append(slots)
    return dataclasses.replace(method, server=tuple(map(heard, method.server)))


def test_two_generators_start_unlike_and_each_goes_on_as_itself_in_the_next_phase():
    """In whatever order the next phase has them."""
    seen = []
    phases = (Phase(overheard(f"{HARD}+{TAUGHT}", seen), 1), Phase(overheard(f"fedprox+{TAUGHT}+{HARD}", seen)))
    run(phases, rounds=2)
    (first, trained), (second, _) = seen
    assert set(first) == {"hard_generator", "teaching_generator"}
    assert not same_bits(first["hard_generator"]["params"], first["teaching_generator"]["params"])
    for slot in first:
        assert furthest(trained[slot], first[slot]) > 1e-3
        assert same_bits(second[slot], trained[slot])


def test_of_two_generators_the_last_shows_what_it_invents():
    found = {text: run(build_method(text)[0].method, rounds=1).samples for text in (f"{HARD}+{TAUGHT}", HARD)}
    assert {samples.x.shape for samples in found.values()} == {(30, 4)}
    both, alone = found.values()
    assert not torch.equal(both.x, alone.x)


REFINERS = (
    HARD,
    TAUGHT,
    "feddf(student.steps=2)",
    "mrtf(student.steps=2)",
    "d2cfl(threshold=0.0, warm_up=0, student.epochs=1, feedback=true)",
)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(REFINERS, 2)))
def test_what_is_called_aggregated_is_the_average_before_all_refinements(first, second):
    method, gaps = build_method(f"{first}+{second}")[0].method, []

    def apply(candidate, state, round):
        plain, _ = method.aggregate.apply(candidate, {}, round)
        after, new = whole(method).apply(candidate, state, round)
        gaps.append((furthest(round.models["aggregated"], plain), furthest(after, plain)))
        return after, new

    run(as_one(method, apply=apply), rounds=2)
    assert all(gap == 0 for gap, _ in gaps)
    assert gaps[-1][1] > 1e-6


def test_every_generator_reports_under_a_name_of_its_own():
    (row,) = run(build_method(f"{SENT}+{HARD}+{TAUGHT}")[0].method, rounds=1).history.rows
    losses = [row[f"server/{name}"] for name in ("feature_generator_loss", "generator_loss", "teaching_generator_loss")]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("text", [HARD, TAUGHT, f"{SENT}+{HARD}"])
def test_clients_that_train_heads_alone_are_refused_where_the_server_would_move_the_extractor(text):
    heads = dataclasses.replace(LOCAL, part="head")
    with pytest.raises(FedstillError, match=r"local\.part = 'head' .* use fedftg\(input='feature'\)"):
        run(build_method(text)[0].method, rounds=1, training=heads)


@pytest.mark.parametrize("text", [SENT, "fedftg(iterations=0)", "feddf_gen(student.steps=0)"])
def test_they_may_train_heads_alone_where_it_does_not(text):
    heads = dataclasses.replace(LOCAL, part="head")
    found, base = (run(build_method(one)[0].method, rounds=2, training=heads).weights for one in (text, "fedavg"))
    for name, leaf in base.params.items():
        assert torch.equal(found.params[name], leaf) or name.startswith("head.")


@pytest.mark.parametrize("method", ["fedftg", "feddf_gen", "fedgen"])
def test_an_unknown_generator_is_told_before_the_phases_in_front_of_it_are_played(method):
    with pytest.raises(FedstillError, match=r"method\.generator\.network = 'cnv' is unknown.*conv"):
        build_method(f'fedavg until 500 then {method}(generator.network="cnv")')


@pytest.mark.parametrize(
    "text",
    ['fedftg(generator.network="deconv")', 'feddf_gen(generator.network="conv")', 'fedgen(generator.network="small")'],
)
def test_a_generator_that_does_not_fit_is_told_before_the_phases_in_front_of_it_are_played(text):
    seen = []
    first = build_method("fedavg")[0].method

    def apply(candidate, state, round):
        seen.append(round.number)
        return whole(first).apply(candidate, state, round)

    watched = as_one(first, apply=apply)
    phases = (Phase(watched, until=2), Phase(build_method(text)[0].method))
    with pytest.raises(FedstillError, match=r"generator\.network = "):
        run(phases, rounds=3)
    assert seen == []


MRTF = "mrtf(student.steps=2, student.batch_size=8)"


def test_a_model_that_is_only_reported_is_refined_last_wherever_it_is_written():
    first, last = (run(build_method(text)[0].method, rounds=2) for text in (f"{MRTF}+{HARD}", f"{HARD}+{MRTF}"))
    assert same_bits(first.weights, last.weights)
    alone = run(build_method(MRTF)[0].method, rounds=2)
    assert furthest(first.weights, alone.weights) > 1e-6, "it starts from the fine-tuned model"


AVERAGE = HARD.replace(")", ', report="average")')


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        (f"{AVERAGE}+{MRTF}", "fedftg", "mrtf"),
        (f"{MRTF}+{AVERAGE}", "mrtf", "fedftg"),
        (f"{MRTF}+feddf(student.steps=2, feedback=false)", "mrtf", "feddf"),
    ],
)
def test_of_two_models_to_report_none_is_lost_without_a_word(text, first, second):
    with pytest.raises(FedstillError, match=rf"{first}.* reports a model before {second}.* works on it"):
        build_method(text)


def test_the_model_before_fine_tuning_may_be_another_ones_student():
    student = run(build_method("feddf(student.steps=2)+fedavg")[0].method, rounds=1)
    for text in (f"feddf(student.steps=2)+{AVERAGE}", f"{AVERAGE}+feddf(student.steps=2)"):
        assert same_bits(run(build_method(text)[0].method, rounds=1).weights, student.weights)
