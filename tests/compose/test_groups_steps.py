"""Plain server steps on each prototype's part of a union."""

from dataclasses import replace

import torch

from fedstill.compose.combine import on_the_way, reported, targets
from fedstill.compose.groups import grouped, per_group, rounds_of
from fedstill.compose.phases import carry_over
from fedstill.compose.wrappers import report_only
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.types import (
    Answers,
    Mechanism,
    Method,
    Model,
    Objective,
    Phase,
    Round,
    ServerStep,
    Stage,
    Targets,
    Uploads,
    Weights,
)
from fedstill.loop.federate import share_states_of
from fedstill.models import mixed_model

MEMBER = ("a", "b", "a", "b", "a")


class Engines:
    """A trainer that lends by name."""

    def __init__(self, name=""):
        self.name = name

    def lend(self, model):
        return Engines(model.name)


def model_of(name, value):
    return Model(name, lambda seed: Weights({"w": torch.tensor([value])}, {}), None)


MODEL = mixed_model({"a": model_of("a", 1.0), "b": model_of("b", 10.0)}, MEMBER)
GROUPS = MODEL.groups


def weights(a, b):
    return Weights({"a/w": torch.tensor([a]), "b/w": torch.tensor([b])}, {})


def round_of(*ids):
    """Client k moved its own prototype to 100 + k."""
    rows = torch.tensor([[100.0 + k] for k in ids])
    mine = torch.tensor([[MEMBER[k] == "a"] for k in ids])
    start = MODEL.init(0)
    params = {"a/w": torch.where(mine, rows, start.params["a/w"]), "b/w": torch.where(mine, start.params["b/w"], rows)}
    facts = {name: torch.ones(len(ids)) for name in ("size", "steps", "travel", "loss")}
    uploads = Uploads(Weights(params, {}), extra={}, label_counts=None, ids=torch.tensor(ids), **facts)
    return Round(1, start, uploads, MODEL, len(MEMBER), None, 7, Engines())


def mean(candidate, state, round):
    round.metrics["clients"] = float(len(round.uploads.ids))
    return Weights({"w": round.uploads.weights.params["w"].mean(0)}, {}), {"times": state["times"] + 1}


def add_one(candidate, state, round):
    round.models["before"] = candidate
    return Weights({"w": candidate.params["w"] + 1}, {}), state


MEAN = ServerStep("mean", mean, lambda _: {"times": torch.zeros(())}, stage=Stage.AGGREGATE)
REFINE = ServerStep("refine", add_one)


def in_groups(*steps, groups=GROUPS):
    """The step that runs these ones for every prototype."""
    return per_group(dict.fromkeys(groups.models, Method(Objective(None), steps[0], steps[1:])), groups)


def step_once(*steps, round):
    whole, start = in_groups(*steps), MODEL.init(0)
    found, state = whole.apply(start, whole.init(start), round)
    return found, state["each"]


def test_each_prototype_is_the_mean_of_its_own_clients():
    found, state = step_once(MEAN, round=round_of(0, 1, 2, 3))
    assert found == weights(101.0, 102.0)
    assert {name: own["mean"]["times"].item() for name, own in state.items()} == {"a": 1.0, "b": 1.0}


def test_a_prototype_without_an_upload_stays_as_it_was_but_is_still_refined():
    round = round_of(0, 4)
    found, state = step_once(MEAN, REFINE, round=round)
    assert found == weights(103.0, 11.0)  # b: 10 as it was sent, plus the refinement
    assert state["b"]["mean"]["times"] == 0
    assert round.metrics == {"a/clients": 2.0}
    assert round.models == {"before": weights(102.0, 10.0)}


def test_a_groups_round_is_that_of_a_federation_of_its_clients():
    rounds = rounds_of(round_of(0, 1, 4), GROUPS)
    assert {name: look.uploads.ids.tolist() for name, look in rounds.items()} == {"a": [0, 4], "b": [1]}
    assert {name: look.population for name, look in rounds.items()} == {"a": 3, "b": 2}
    assert {name: look.trainer.name for name, look in rounds.items()} == {"a": "a", "b": "b"}
    assert {name: look.model.name for name, look in rounds.items()} == {"a": "a", "b": "b"}
    assert rounds["a"].start.params["w"] == 1
    assert rounds["a"].groups["b"] is rounds["b"]
    assert rounds["a"].shared is rounds["b"].shared


def test_a_step_runs_on_all_prototypes_before_the_next_one_does():
    order = []

    def noting(name):
        def apply(candidate, state, round):
            order.append((name, round.model.name))
            return candidate, state

        return ServerStep(name, apply)

    step_once(noting("first"), noting("second"), noting("third"), round=round_of(0, 1))
    assert order == [(step, name) for step in ("first", "second", "third") for name in ("a", "b")]


def test_slots_that_are_broadcast_stand_under_the_prototypes_names():
    kept = ServerStep(
        "kept", init=lambda part: {"slot": 2 * part.params["w"]}, broadcast=lambda state: {"sent": state["slot"]}
    )
    whole = in_groups(kept)
    sent = whole.broadcast(whole.init(MODEL.init(0)))
    assert sent == {"a": {"sent": torch.tensor([2.0])}, "b": {"sent": torch.tensor([20.0])}}


def test_a_model_is_reported_once_every_prototype_has_one():
    def late(candidate, state, round):
        rests = round.number == 1 and round.model.name == "b"
        return (candidate, state) if rests else report_only(REFINE).apply(candidate, state, round)

    whole = in_groups(MEAN, ServerStep("late", late, stage=Stage.REPORT))
    state, as_method = whole.init(MODEL.init(0)), Method(Objective(None), whole)
    shown = []
    for number in (1, 2):
        sent, state = whole.apply(MODEL.init(0), state, replace(round_of(0, 1), number=number))
        assert sent == weights(100.0, 101.0)
        shown.append(reported(as_method, {whole.name: state}))
    assert shown == [None, weights(101.0, 102.0)]


def believed(beliefs, groups=GROUPS):
    """The targets of a round in which some prototypes formed these ones."""

    def form(candidate, state, round):
        belief = beliefs.get(round.model.name)
        return candidate, {} if belief is None else {"targets": belief._asdict()}

    whole = in_groups(ServerStep("form", form), groups=groups)
    _, state = whole.apply(MODEL.init(0), whole.init(MODEL.init(0)), round_of(0, 1))
    return targets(Method(Objective(None), whole), {whole.name: state})


def test_targets_are_those_of_the_first_prototype_that_has_some():
    belief = Targets(torch.ones(1, 1), torch.ones(1, dtype=torch.bool))
    assert believed({}) is None
    assert believed({"b": belief}) == belief


def test_targets_are_those_of_the_reported_prototype():
    beliefs = {name: Targets(torch.full((1, 1), value), torch.zeros(1, dtype=torch.bool)) for name, value in BELIEFS}
    for report in ("a", "b"):
        assert believed(beliefs, replace(GROUPS, report=report)) == beliefs[report]


BELIEFS = (("a", 0.25), ("b", 0.75))
SENT = []


def asking(question, /, among=None, sent=None, release=""):
    SENT.append(sent)
    ids = [k for k in range(len(MEMBER)) if among is None or k in among]
    return Answers(torch.tensor(ids), {})


def preparation(**changes):
    return replace(Preparation(1, MODEL, len(MEMBER), None, 3, Engines(), asking), **changes)


def test_a_prototype_prepares_with_its_own_clients_and_sees_what_the_others_are_by_now():
    seen, told = [], []

    def first(candidate, state, look):
        look.tell("pre-training", 0.5)
        return Weights({"w": candidate.params["w"] * 2}, {}), state

    def second(candidate, state, look):
        look.metrics["asked"] = float(len(look.ask(None).ids))
        seen.append({name: part.params["w"].item() for name, part in look.candidates.items()})
        return candidate, {"ids": look.ask(None, among=[0, 1, 2], sent=look.run_seed).ids}

    SENT.clear()
    look = preparation(tell=lambda what, share: told.append((what, share)), run_seed=5)
    whole = in_groups(ServerStep("first", prepare=first), ServerStep("second", prepare=second))
    found, state = whole.prepare(MODEL.init(0), whole.init(MODEL.init(0)), look)
    assert SENT == [None, 5, None, 5]  # what is sent for it is told, and every prototype knows the run's seed
    assert found == weights(2.0, 20.0)
    assert seen == [{"a": 2.0, "b": 20.0}] * 2
    assert told == [("a: pre-training", 0.5), ("b: pre-training", 0.5)]
    assert look.metrics == {"a/asked": 3.0, "b/asked": 2.0}
    assert {name: own["second"]["ids"].tolist() for name, own in state["each"].items()} == {"a": [0, 2], "b": [1]}


def method(**changes):
    return replace(Method(Objective(None), MEAN, (REFINE,)), **changes)


def test_the_same_method_in_two_phases_stays_one_method():
    plain = method()
    first, second = grouped((Phase(plain, 2), Phase(plain)), GROUPS)
    assert first.method is second.method
    assert first.method.per_client == ()


def test_what_happens_on_the_way_happens_to_a_clients_own_part_alone():
    def louder(uploads, start, seed):
        assert start.params.keys() == {"w"}
        return uploads._replace(weights=Weights({"w": uploads.weights.params["w"] * 10}, {}))

    (phase,) = grouped((Phase(method(way=(Mechanism(per_client=louder),))),), GROUPS)
    sent = on_the_way(phase.method, round_of(1, 0).uploads, MODEL.init(0), 3)
    assert sent.weights.params["a/w"].tolist() == [[1.0], [1000.0]]
    assert sent.weights.params["b/w"].tolist() == [[1010.0], [10.0]]


def test_a_method_may_differ_from_prototype_to_prototype():
    def suited(plain, model):
        return replace(plain, aggregate=MEAN if model.name == "a" else replace(MEAN, apply=add_one), server=())

    (phase,) = grouped((Phase(method()),), GROUPS, suited)
    server = phase.method.aggregate
    assert server.apply(MODEL.init(0), server.init(MODEL.init(0)), round_of(0, 1))[0] == weights(100.0, 11.0)


def keeping(slot, width):
    objective = Objective(None, init=lambda weights: {slot: torch.zeros(width)}, finish=lambda local, _: ({}, {}))
    return method(objective=objective, server=(ServerStep(slot, init=lambda weights: {slot: torch.ones(width)}),))


def test_clients_keep_the_slots_of_all_phases_for_each_prototype():
    phases = (Phase(keeping("control", 2), 1), Phase(keeping("previous", 3)))
    first, kept = share_states_of(phases, MODEL.init(0), MODEL)
    assert first.keys() == {"a", "b"}
    assert all(own.keys() == {"control", "previous"} for own in first.values())
    assert len(kept) == 2


def test_the_servers_slots_go_over_prototype_by_prototype():
    whole = in_groups(*keeping("control", 2).steps)
    old = {name: {"control": {"control": torch.full((2,), value)}} for name, value in (("a", 5.0), ("b", 6.0))}
    taken = carry_over({whole.name: {"each": old}}, {whole.name: whole.init(MODEL.init(0))})[whole.name]["each"]
    assert [taken[name]["control"]["control"][0].item() for name in ("a", "b")] == [5.0, 6.0]
    assert all(own.keys() == {"mean", "control"} for own in taken.values())


def test_a_method_that_prepares_nothing_prepares_nothing_in_groups():
    assert in_groups(MEAN, REFINE).prepare is no_preparation
