"""The union of prototypes: taken apart and put together without losing a bit, and a client's own part of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixed_runs import LOCAL, MEMBER, NETS, federation, first, mixed, run, without
from quick import first_quick
from safetensors.torch import load as read_tensors
from toy import same_bits
from wire import own_upload, whole_upload

from fedstill.compose.combine import on_the_way, reported, targets
from fedstill.compose.groups import (
    bytes_received,
    bytes_sent,
    check_groups,
    grouped,
    merge,
    merge_uploads,
    only,
    part_of,
    per_group,
    places_of,
    reported_name,
    rounds_of,
    split,
    split_uploads,
    targets_together,
    together,
)
from fedstill.compose.phases import carry_over, phases_of
from fedstill.compose.wrappers import report_only
from fedstill.core.errors import FedstillError
from fedstill.core.needs import check_fits
from fedstill.core.seeds import seed_for, torch_generator
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import as_tree, byte_size, clone, flatten, select
from fedstill.core.types import (
    Answers,
    Groups,
    Mechanism,
    Method,
    Model,
    Objective,
    Output,
    Phase,
    Round,
    ServerStep,
    Stage,
    Targets,
    Training,
    Uploads,
    Weights,
)
from fedstill.engine import build_engine
from fedstill.engine.client_store import ClientStore
from fedstill.loop.federate import share_states_of
from fedstill.loop.guard import Guard
from fedstill.loop.message import HEADER_LIMIT
from fedstill.methods.lookup import build_method
from fedstill.models import build_model, mixed_model

# "a" is a part of the name of "a.b": a prefix is more than the first letters
NAMES = ("a", "a.b", "c")


def groups_of(member, report="ensemble", names=NAMES):
    return Groups({name: Model(name, lambda seed: None, None) for name in names}, tuple(member), report)


def weights_of(width, seed):
    generator = torch_generator(seed)
    params = {"w": torch.randn(width, 2, generator=generator), "body.b": torch.randn(width, generator=generator)}
    return Weights(params, {"mean": torch.randn(3, generator=generator), "count": torch.tensor(seed)})


def union(names=NAMES):
    return merge({name: weights_of(place + 1, seed=place) for place, name in enumerate(names)})


def uploads_of(ids, groups, *, label_counts=False, extra=True):
    """A cohort of a mixed federation: every client's own part has its own numbers."""
    start, places = union(tuple(groups.models)), places_of(ids, groups)
    parts = {}
    for place, (name, here) in enumerate(places.items()):
        if len(here):
            own = torch.tensor([float(ids[at]) for at in here])
            parts[name] = Uploads(
                weights=Weights(
                    {
                        "w": torch.ones(len(here), place + 1, 2) * own.reshape(-1, 1, 1),
                        "body.b": own.repeat(place + 1, 1).T,
                    },
                    {"mean": own.repeat(3, 1).T, "count": own.long()},
                ),
                size=own.double() + 1,
                steps=own + 2,
                travel=own + 3,
                loss=own + 4,
                extra={"delta": {"w": own.reshape(-1, 1) + 5}} if extra else {},
                label_counts=own.repeat(4, 1).T if label_counts else None,
                ids=own.long(),
            )
    return parts, start, places


def test_a_prototypes_tensors_are_named_after_it_and_come_back_under_their_own_names():
    parts = {name: weights_of(place + 1, seed=place) for place, name in enumerate(NAMES)}
    whole = merge(parts)
    assert sorted(whole.params) == sorted(f"{name}/{leaf}" for name in NAMES for leaf in ("w", "body.b"))
    assert split(whole, NAMES).keys() == parts.keys()
    for name, part in parts.items():
        assert same_bits(split(whole, NAMES)[name], part)
        assert same_bits(merge({name: part}), only(whole, name))


def test_a_prototype_that_is_not_there_is_empty():
    assert part_of(union(), "b") == Weights({}, {})


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8), st.booleans(), st.booleans(), st.data())
def test_uploads_split_by_group_are_what_was_merged_and_nobody_moves_another_prototype(member, counts, extra, data):
    groups = groups_of(member)
    ids = data.draw(st.lists(st.sampled_from(range(len(member))), min_size=1, unique=True))
    parts, start, places = uploads_of(ids, groups, label_counts=counts, extra=extra)
    whole = merge_uploads(parts, start, places)
    assert whole.ids.tolist() == ids
    assert whole.size.tolist() == [client + 1.0 for client in ids]
    found = split_uploads(whole, groups)
    assert [name for name in groups.models if len(found[name].ids)] == list(parts)
    for name, part in parts.items():
        assert same_bits(as_tree(found[name]), as_tree(part))
    for place, client in enumerate(ids):
        for name in groups.models:
            if name != member[client]:
                row = part_of(select(whole, place).weights, name)
                assert same_bits(row, part_of(start, name)), "a client sent a prototype that is not its own"


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6), st.booleans())
def test_what_one_client_sends_alone_is_its_row_again(member, extra):
    groups, ids = groups_of(member), list(range(len(member)))
    parts, start, places = uploads_of(ids, groups, extra=extra)
    whole = merge_uploads(parts, start, places)
    for place in ids:
        own = own_upload(whole, place, member[place])
        assert own.weights.params.keys() == {"w", "body.b"}
        assert same_bits(as_tree(whole_upload(own, member[place], start, whole)), as_tree(select(whole, place)))


def test_a_client_is_charged_for_its_own_prototype_alone():
    groups, ids = groups_of(["a", "c", "c"]), [0, 1, 2]
    parts, start, places = uploads_of(ids, groups, label_counts=True)
    whole, model = merge_uploads(parts, start, places), Model("mixed", lambda seed: None, None, groups=groups)
    # "a": 1x2 + 1 + 3 floats and an int64; "c": 3x2 + 3 + 3. Extra: a float. Beside: a double, three floats, 4 counts
    own = {"a": 4 * (2 + 1 + 3) + 8, "c": 4 * (6 + 3 + 3) + 8}
    assert bytes_sent(whole, model) == own["a"] + 2 * own["c"] + 3 * (4 + 8 + 3 * 4 + 4 * 4)
    received = {"a": {"control": torch.zeros(5)}, "c": {"control": torch.zeros(7)}, "a.b": {"control": torch.zeros(9)}}
    assert bytes_received(start, received, ids, model) == own["a"] + 20 + 2 * (own["c"] + 28)


def test_an_ensemble_is_the_mean_of_logits_and_a_reported_prototype_speaks_alone():
    said = {
        "a": Output(torch.tensor([[1.0, 5.0]]), torch.tensor([[1.0]])),
        "c": Output(torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 3.0]])),
    }
    both = together(said, "ensemble")
    assert both.logits.tolist() == [[2.0, 2.5]]
    assert both.features.tolist() == [[1.0, 2.0, 3.0]]
    assert together(said, "c") is said["c"]
    assert together({"a": said["a"]}, "ensemble") is said["a"]
    assert together(said, "gone").logits.tolist() == [[2.0, 2.5]]


def test_prototypes_that_tell_different_numbers_of_classes_apart_are_refused_in_words():
    said = {name: Output(torch.zeros(1, width), torch.zeros(1, 1)) for name, width in (("a", 2), ("c", 3))}
    with pytest.raises(FedstillError, match="a 2, c 3"):
        together(said, "ensemble")


def test_the_reported_model_has_a_name():
    assert reported_name(groups_of(NAMES)) == "ensemble of a, a.b, c"
    assert reported_name(groups_of(NAMES, report="c")) == "c"


@pytest.mark.parametrize(
    ("member", "told"),
    [(["a", "c"], "each of 2 clients runs, and there are 4"), (["a", "a", "c", "c"], "runs the prototype 'a.b'")],
)
def test_every_client_has_a_prototype_and_every_prototype_a_client(member, told):
    with pytest.raises(FedstillError, match=told):
        check_groups(groups_of(member), 4, range(4))


def beliefs(*rows):
    return Targets(torch.tensor(rows), torch.tensor([True, False, False]))


def test_where_nothing_was_taught_targets_are_what_the_reported_model_says():
    logits = {"a": [4.0, 0.0], "c": [-1.0, 0.0]}
    said = {name: torch.tensor(row).softmax(0).tolist() for name, row in logits.items()}
    taught, unsure = [0.3, 0.7], [1.0, 0.0]  # asked about, but not kept: hard labels below the threshold
    found = {name: beliefs(taught, unsure, own) for name, own in said.items()}
    assert targets_together(found, "c") is found["c"]
    for order in (found, dict(reversed(found.items()))):
        both = targets_together(order, "ensemble")
        assert both.probabilities[:2].tolist() == found["a"].probabilities[:2].tolist()
        torch.testing.assert_close(both.probabilities[2], torch.tensor([1.5, 0.0]).softmax(0))
        assert both.kept.tolist() == [True, False, False]
    assert targets_together({"c": found["c"]}, "a") is found["c"]
    assert targets_together({}, "ensemble") is None


def test_certain_prototypes_that_disagree_have_finite_targets():
    found = {"a": beliefs([0.5, 0.5], [0.5, 0.5], [1.0, 0.0]), "c": beliefs([0.5, 0.5], [0.5, 0.5], [0.0, 1.0])}
    assert targets_together(found, "ensemble").probabilities[2].tolist() == [0.5, 0.5]


def dense(classes, shape=(64,)):
    return build_model("mlp", input_shape=shape, classes=classes, hidden=(4,))


def test_a_model_fits_a_federation_of_its_classes_whose_samples_it_can_read():
    check_fits(dense(3), 3, (1, 8, 8))
    check_fits(dense(12), 10, (64,))  # a head as wide as another data set's
    check_fits(mixed_model({"a": dense(3), "b": dense(3, (1, 8, 8))}, 2), 3, (1, 8, 8))
    check_fits(Model("own", lambda seed: Weights({}, {}), None), 3, (5,))  # nothing is known of it
    characters = build_model("char_lstm", input_shape=(5,), classes=9)
    check_fits(characters, 9, (7,))


@pytest.mark.parametrize(
    ("model", "classes", "shape", "told"),
    [
        (dense(9), 10, (64,), "model 'mlp' tells 9 classes apart, and the federation has 10: .*classes=10"),
        (
            mixed_model({"a": dense(3)}, 2),
            4,
            (64,),
            "the prototype 'a' tells 3 classes apart, and the federation has 4",
        ),
        (dense(3), 3, (1, 6, 6), r"reads samples of shape \(64,\), and the federation's have \(1, 6, 6\): build it"),
    ],
    ids=["plain", "mixed", "shape"],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(model, classes, shape, told):
    with pytest.raises(FedstillError, match=told) as error:
        check_fits(model, classes, shape)
    assert "\n" not in str(error.value)


# Whole runs with clients of different architectures: each group a federation, distillation across all of them.


def numbers(result):
    """Return the rows without times, and without the sizes of uploads, which name a network in place of its slots."""
    rows = result.history.rows
    return [
        {key: value for key, value in row.items() if "seconds" not in key and key != "accepted_scale"} for row in rows
    ]


# T4.5, and the same for methods that distil nothing
@pytest.mark.parametrize(
    "method",
    first_quick(
        [
            "feddf(student.steps=5)",
            "feddf(student.steps=3, student.patience=2, student.look_every=1)",
            "feddf(student.steps=2)+scaffold",
            "fedaux(student.steps=2)",
            "update_noise",
        ]
    ),
)
def test_one_group_is_the_homogeneous_federation_bit_for_bit(method):
    alone = run(method, NETS["b"], cohort=4)
    one_group = run(method, mixed_model({"net": NETS["b"]}, 6), cohort=4)
    assert same_bits(part_of(one_group.weights, "net"), alone.weights)
    for found, wanted in zip(numbers(one_group), numbers(alone), strict=True):
        assert found.pop("accuracy_net") == wanted["accuracy"]
        assert {key.replace("/net/", "/"): value for key, value in found.items()} == wanted


@pytest.mark.parametrize(
    "method",
    first_quick([
        "fedavg", "fedprox(mu=0.1)", "scaffold", "moon", "feddyn", "fedavgm", "fednova", "fedlmd",
        "update_noise(clip=0.5)", "scaffold until 1 then moon",
    ], 3),
)  # fmt: skip
def test_the_first_group_is_the_federation_of_its_clients_bit_for_bit(method):
    alone = run(method, NETS["a"], federation=first(3), cohort=3)
    together = run(method)
    assert same_bits(part_of(together.weights, "a"), alone.weights)


def test_the_other_group_is_the_federation_of_its_clients_bit_for_bit():
    alone = run("fedavg", NETS["b"], federation=without(federation(), range(3)), cohort=3)
    assert same_bits(part_of(run("fedavg").weights, "b"), alone.weights)


def one_round(method="feddf(student.steps=4)", ids=(0, 1, 2, 3, 4, 5), sizes=None):
    """The server's step of one round, on what a cohort has really sent."""
    model, data = mixed(), federation()
    engine = build_engine("auto", "cpu", model=model, federation=data)
    (phase,) = _grouped(method, model)
    start, ids = model.init(0), np.array(ids)
    server = phase.method.aggregate
    state = server.init(start)
    states = ClientStore(share_states_of((phase,), start, model)[0], 6).read(ids)
    work = LocalWork(phase.method.objective, LOCAL, start, server.broadcast(state), seed=5)
    uploads = engine.train(work, ids, states).uploads
    if sizes is not None:
        uploads = uploads._replace(size=torch.tensor(sizes, dtype=torch.float64))
    look = Round(1, start, uploads, model, 6, data.unlabeled, 3, engine, validation=data.validation)
    return look, engine, server.apply(start, state, look)


def _grouped(method, model):
    return grouped(phases_of(build_method(method)), model.groups)


def teacher_logits(look, engine, x=None):
    """Every client's model on the unlabeled set (or x), one by one, in the order of the groups."""
    found = {"a": [], "b": []}
    for place, client in enumerate(look.uploads.ids.tolist()):
        name = MEMBER[client]
        one = part_of(look.uploads.weights, name)
        one = type(one)(*({key: leaf[place] for key, leaf in part.items()} for part in one))
        found[name].append(engine.engines[name].outputs(one, look.unlabeled if x is None else x).logits)
    return torch.stack([*found["a"], *found["b"]])


# T4.6
def test_two_architectures_are_taught_the_same_targets_the_mean_of_all_clients_logits():
    look, engine, (_, state) = one_round()
    targets = [state["each"][name]["distill"]["targets"]["probabilities"] for name in "ab"]
    assert torch.equal(*targets)
    wanted = torch.softmax(teacher_logits(look, engine).mean(0), dim=1)
    torch.testing.assert_close(targets[0], wanted, atol=1e-6, rtol=1e-5)


def test_teachers_of_all_groups_count_by_their_sizes():
    method = 'feddf(student.steps=1, teacher_weighting="size")'
    look, engine, (_, state) = one_round(method, ids=[5, 0, 3], sizes=[1.0, 2.0, 7.0])
    assert look.teachers == pytest.approx({0: 0.2, 5: 0.1, 3: 0.7})
    share = torch.tensor([2.0, 1.0, 7.0]) / 10  # client 0 of a, then 5 and 3 of b, as they stand in the cohort
    wanted = torch.softmax((teacher_logits(look, engine) * share.reshape(-1, 1, 1)).sum(0), dim=1)
    torch.testing.assert_close(state["each"]["b"]["distill"]["targets"]["probabilities"], wanted, atol=1e-6, rtol=1e-5)


def test_teachers_of_all_groups_count_by_their_accuracy_on_the_validation_set():
    look, engine, (_, state) = one_round(method='feddf(student.steps=1, teacher_weighting="validation")')
    x, y = look.validation
    accuracy = (teacher_logits(look, engine, x).argmax(-1) == y).double().mean(1)
    useful = torch.where(accuracy >= 1.2 / 3, accuracy, 0.0)
    assert bool(useful.any())
    share = (useful / useful.sum()).float().reshape(-1, 1, 1)
    wanted = torch.softmax((teacher_logits(look, engine) * share).sum(0), dim=1)
    torch.testing.assert_close(state["each"]["a"]["distill"]["targets"]["probabilities"], wanted, atol=1e-6, rtol=1e-5)


def test_teachers_answer_once_for_the_students_of_all_groups(monkeypatch):
    asked, model = [], mixed()
    engine = build_engine("auto", "cpu", model=model, federation=federation())
    for name, one in engine.engines.items():
        outputs = one.outputs

        def noted(weights, x, stacked=False, name=name, outputs=outputs, **how):
            asked.append(name) if stacked else None
            return outputs(weights, x, stacked, **how)

        monkeypatch.setattr(one, "outputs", noted)
    run("feddf(student.steps=2)", model, engine=engine, rounds=2)
    assert asked == ["a", "b"] * 2


# T4.7
def test_a_prototype_without_a_client_this_round_is_stale_under_fedavg_and_taught_under_feddf():
    for method, moves in (("fedavg", False), ("feddf(student.steps=4)", True)):
        look, _, (candidate, _) = one_round(method=method, ids=[0, 2])
        assert same_bits(part_of(candidate, "b"), part_of(look.start, "b")) is not moves
        assert all(bool(leaf.isfinite().all()) for leaf in flatten(candidate).values() if leaf.is_floating_point())


def test_one_client_a_round_leaves_a_run_of_two_architectures_finite():
    result = run("feddf(student.steps=2)+scaffold", cohort=1, rounds=4)
    assert [row["accepted"] for row in result.history.rows] == [1] * 4
    assert all(bool(leaf.isfinite().all()) for leaf in flatten(result.weights).values() if leaf.is_floating_point())


# T4.8
def test_distillation_leaves_the_teachers_as_they_were():
    look, engine, _ = one_round(method="feddf(student.steps=0)")
    before = clone(look.uploads.weights)
    (phase,) = _grouped("feddf(student.steps=5)", mixed())
    server = phase.method.aggregate
    server.apply(look.start, server.init(look.start), look)
    assert same_bits(look.uploads.weights, before)
    assert engine.name == "batched and looped"


def test_server_constants_are_those_of_the_groups_own_population():
    """SCAFFOLD: c = (|S| / N) mean of c_k+ in the first round; one of the three clients of a group came."""
    _, _, (_, state) = one_round(method="scaffold", ids=[1, 3, 4])
    assert state["each"]["a"].keys() == state["each"]["b"].keys()
    look, _, _ = one_round(method="scaffold", ids=[1, 3, 4])
    delta = look.uploads.extra["a"]["control_delta"]["head.bias"]
    torch.testing.assert_close(state["each"]["a"]["control"]["control"]["head.bias"], delta[0] / 3)
    delta = look.uploads.extra["b"]["control_delta"]["head.bias"]
    torch.testing.assert_close(state["each"]["b"]["control"]["control"]["head.bias"], (delta[1] + delta[2]) / 2 * 2 / 3)


@pytest.mark.parametrize(
    "method", first_quick(["feddf(student.steps=3)+scaffold", "fedavg until 1 then feddf(student.steps=2)"])
)
def test_a_resumed_run_equals_an_uninterrupted_one(method, tmp_path):
    how = {"cohort": 3, "checkpoint_every": 1}
    whole = run(method, rounds=4, **how)
    run(method, rounds=2, run_dir=tmp_path, **how)
    resumed = run(method, rounds=4, run_dir=tmp_path, resume=True, **how)
    assert same_bits(resumed.weights, whole.weights)
    assert numbers(resumed) == numbers(whole)


def test_batched_equals_looped():
    member = ("a", "c", "a", "c", "a", "c")
    first, second = (
        run("feddf(student.steps=3)+scaffold", mixed(member), engine=name) for name in ("batched", "looped")
    )
    for name, leaf in flatten(first.weights).items():
        torch.testing.assert_close(leaf, flatten(second.weights)[name], atol=1e-5, rtol=1e-4)


def test_a_broken_client_of_one_group_is_turned_away_and_the_rest_go_on():
    sent = {}

    def tamper(number, client, data):
        sent[client] = data
        return data[:-4] if client == 4 else data

    result = run("scaffold", tamper=tamper, rounds=1)
    (record,) = result.audit
    assert record["client"] == 4
    assert result.history.rows[0]["accepted"] == 5
    healthy = run("scaffold", federation=without(federation(), range(4, 5)), cohort=5, rounds=1)
    assert same_bits(result.weights, healthy.weights)
    own = {name: byte_size(net.init(0)) for name, net in NETS.items()}
    for client, data in sent.items():
        names = {name for name in read_tensors(data) if name.startswith("params/")}
        assert names == {f"params/{name}" for name in NETS[MEMBER[client]].init(0).params}
        assert len(data) < 2 * own[MEMBER[client]] + HEADER_LIMIT / 50


def test_a_client_that_fails_is_turned_away_and_so_is_one_that_moved_too_far():
    def tamper(number, client, data):
        if client == 2:
            raise ValueError("gone")
        return data

    (record,) = run("fedavg", tamper=tamper, rounds=1).audit
    assert (record["client"], record["reason"]) == (2, "client raised ValueError: gone")
    bounded = run("fedavg", guard=Guard(norm_bound=1e-6), rounds=1)
    assert [record["reason"][:11] for record in bounded.audit[:6]] == ["update norm"] * 6


def test_through_the_wire_nothing_changes():
    assert same_bits(run("scaffold", tamper=lambda number, client, data: data).weights, run("scaffold").weights)


def test_rows_name_the_prototypes_and_the_summary_the_reported_model():
    result = run("fedavg")
    last = result.history.rows[-1]
    assert {"accuracy_a", "accuracy_b"} <= last.keys()
    assert result.summary()["reported"] == "ensemble of a, b"
    alone = run("fedavg", mixed(report="b"))
    assert alone.summary()["reported"] == "b"
    assert alone.history.rows[-1]["accuracy"] == alone.history.rows[-1]["accuracy_b"] == last["accuracy_b"]
    assert same_bits(alone.weights, result.weights)
    assert "reported" not in run("fedavg", NETS["a"], rounds=1).summary()


def test_a_client_receives_and_sends_its_own_prototype():
    row = run("fedavg", rounds=1, cohort=6).history.rows[0]
    own = sum(3 * byte_size(net.init(0)) for net in (NETS["a"], NETS["b"]))
    assert row["bytes_down"] == own
    assert row["bytes_up"] == own + 6 * (8 + 3 * 4)  # size, and steps, travel and loss


def test_a_method_that_reports_another_model_reports_it_of_all_prototypes():
    result = run("feddf(student.steps=3, feedback=false)")
    assert result.weights.params.keys() == mixed().init(0).params.keys()
    sent = run('fedavg+average(weighting="uniform")')
    assert not same_bits(result.weights, sent.weights)


def test_only_heads_are_trained_in_every_group():
    result = run("fedavg", training=Training(batch_size=8, lr=0.05, part="head"))
    start = split(_first_weights(), mixed().networks)
    for name, part in split(result.weights, mixed().networks).items():
        moved = {key for key, leaf in part.params.items() if not torch.equal(leaf, start[name].params[key])}
        assert moved == set(NETS[name].head_names)
        assert same_bits(part.buffers, start[name].buffers)


@pytest.mark.parametrize("report", first_quick(["a", "b", "ensemble"]))
@pytest.mark.parametrize("method", ["fedaux(student.steps=3)", "feddf(student.steps=3, distill_share=0.8)"])
def test_rows_that_are_not_taught_are_labelled_by_the_reported_model_in_whatever_order_prototypes_stand(method, report):
    whole, found = federation(), {}
    for order in ("ab", "ba"):
        model = mixed_model({name: NETS[name] for name in order}, MEMBER, report)
        result = run(method, model)
        others, found[order] = ~result.targets.kept, result.targets.probabilities
        engine = build_engine("auto", "cpu", model=model, federation=whole)
        answer = engine.outputs(result.weights, whole.unlabeled, features=False).logits.softmax(1)
        assert 0 < int(others.sum()) < len(others)
        torch.testing.assert_close(found[order][others], answer[others], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["ab"], found["ba"], rtol=1e-4, atol=1e-5)


def _first_weights():
    return merge({name: NETS[name].init(seed_for(3, "model")) for name in "ab"})


# Plain server steps on each prototype's part of a union.


ALTERNATING = ("a", "b", "a", "b", "a")


class Engines:
    """A trainer that lends by name."""

    def __init__(self, name=""):
        self.name = name

    def lend(self, model):
        return Engines(model.name)


def model_of(name, value):
    return Model(name, lambda seed: Weights({"w": torch.tensor([value])}, {}), None)


MODEL = mixed_model({"a": model_of("a", 1.0), "b": model_of("b", 10.0)}, ALTERNATING)
GROUPS = MODEL.groups


def weights(a, b):
    return Weights({"a/w": torch.tensor([a]), "b/w": torch.tensor([b])}, {})


def round_of(*ids):
    """Client k moved its own prototype to 100 + k."""
    rows = torch.tensor([[100.0 + k] for k in ids])
    mine = torch.tensor([[ALTERNATING[k] == "a"] for k in ids])
    start = MODEL.init(0)
    params = {"a/w": torch.where(mine, rows, start.params["a/w"]), "b/w": torch.where(mine, start.params["b/w"], rows)}
    facts = {name: torch.ones(len(ids)) for name in ("size", "steps", "travel", "loss")}
    uploads = Uploads(Weights(params, {}), extra={}, label_counts=None, ids=torch.tensor(ids), **facts)
    return Round(1, start, uploads, MODEL, len(ALTERNATING), None, 7, Engines())


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
    ids = [k for k in range(len(ALTERNATING)) if among is None or k in among]
    return Answers(torch.tensor(ids), {})


def preparation(**changes):
    return replace(Preparation(1, MODEL, len(ALTERNATING), None, 3, Engines(), asking), **changes)


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
