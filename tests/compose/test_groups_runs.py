"""Whole runs with clients of different architectures: each group a federation, distillation across all of them."""

import logging

import numpy as np
import pytest
import torch
from mixed_runs import LOCAL, MEMBER, NETS, federation, first, mixed, run, without
from quick import first_quick
from safetensors.torch import load as read_tensors
from toy import same_bits

from fedstill.compose.groups import grouped, merge, part_of, split
from fedstill.compose.phases import phases_of
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import byte_size, clone, flatten
from fedstill.core.types import Round, Training
from fedstill.engine import build_engine
from fedstill.engine.client_store import ClientStore
from fedstill.loop.federate import share_states_of
from fedstill.loop.guard import Guard
from fedstill.loop.message import HEADER_LIMIT
from fedstill.methods.lookup import build_method
from fedstill.models import mixed_model


def numbers(result):
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in result.history.rows]


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


@pytest.fixture(autouse=True)
def _quiet():
    yield
    logging.getLogger("fedstill.run").handlers.clear()
