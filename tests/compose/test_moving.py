"""Clients (and the server's student) train the head or adapters, and the other tensors stay h_0 to the last bit."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import toy
from quick import EITHER_ENGINE, first_quick
from server_rounds import CLASSES, FEATURES, LOCAL, clients_models, federation, in_float64, network, run, server_round
from torch import nn
from toy import furthest, same_bits
from weighed import weighed

from fedstill.compose.combine import on_the_way
from fedstill.compose.join import join
from fedstill.compose.moving import head_names, head_of, moving_only
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.seeds import seed_for
from fedstill.core.tree import byte_size
from fedstill.core.types import Need, Training, Weights
from fedstill.methods import METHODS, fedavg
from fedstill.methods.lookup import build_method
from fedstill.models import from_module
from fedstill.models.mixed import mixed_model
from fedstill.server.aggregate import average
from fedstill.server.distill.student import Student

THREE = {"net": "norm", "cohort": 3}  # thirds: a sum of three is not what it was
HEAD_ONLY = dataclasses.replace(LOCAL, part="head", weight_decay=0.01)
SHORT = {"steps": 6, "batch_size": 8}
STUDENTS = {
    name
    for name, method in METHODS.items()
    if (option := inspect.signature(method).parameters.get("student")) and isinstance(option.default, Student)
} - {"d2cfl"}
# the server of these trains or mixes whole models, and has no option for a part
WHOLE = {name for name in METHODS if name not in STUDENTS and Need.UNLABELED in needs_of(build_method(name)[0].method)}
WHOLE.add("feddf_gen")  # which is refused


def options_of(name: str) -> dict:
    found = {"student": {**SHORT, "part": "head"}} if name in STUDENTS else {}
    known = inspect.signature(METHODS[name]).parameters
    found |= {"input": "feature"} if "input" in known else {}
    return {**found, **{key: value for key, value in SHORT.items() if key in known}}


def extractor_of(weights: Weights, net: str) -> Weights:
    kept = {name: leaf for name, leaf in weights.params.items() if name not in network(net).head_names}
    return Weights(kept, weights.buffers)


def first_weights(net: str) -> Weights:
    return network(net).init(seed_for(3, "model"))


def test_the_methods_that_refine_a_model_have_the_option():
    assert {"feddf", "fedbe", "mrtf"} <= STUDENTS


@pytest.mark.parametrize("name", first_quick(sorted(set(METHODS) - WHOLE), 9))
def test_every_bit_of_the_extractor_survives_a_run(name):
    """T6.10, in the model that is sent and in the one that is reported."""
    found = run(build_method(name, options_of(name))[0].method, training=HEAD_ONLY, **THREE).weights
    start = first_weights("norm")
    assert same_bits(extractor_of(found, "norm"), extractor_of(start, "norm"))
    assert not torch.equal(found.params["head.weight"], start.params["head.weight"])


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize(
    "local", first_quick([{"optimizer": "adam", "momentum": 0.0}, {"nesterov": True}, {"clip": 0.1}])
)
def test_so_it_does_with_other_optimisers(engine, local):
    found = run(fedavg(), **THREE, engine=engine, training=dataclasses.replace(HEAD_ONLY, **local)).weights
    assert same_bits(extractor_of(found, "norm"), extractor_of(first_weights("norm"), "norm"))


def test_so_it_does_in_a_mixture_with_momentum_and_noise():
    parts = {name: build_method(name)[0].method for name in ("fedprox", "fedavgm", "update_noise")}
    mixture = join(
        {**parts, "feddf": build_method("feddf", {"student": {**SHORT, "part": "head"}})[0].method}, average()
    )
    found = run(mixture, training=HEAD_ONLY, **THREE).weights
    assert same_bits(extractor_of(found, "norm"), extractor_of(first_weights("norm"), "norm"))


@pytest.mark.parametrize("name", sorted(STUDENTS))
def test_a_student_that_trains_everything_moves_the_extractor(name):
    """So the tests above can fail."""
    options = {**options_of(name), "student": SHORT}
    found = run(build_method(name, options)[0].method, net="norm", training=HEAD_ONLY).weights
    assert not same_bits(extractor_of(found, "norm"), extractor_of(first_weights("norm"), "norm"))


@pytest.mark.parametrize("net", ["mlp", "norm"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_head_only_feddf_is_head_only_fedavg(net, optimizer):
    """T3.8: the average of heads on one extractor has the averaged logits, so there is nothing left to learn."""
    student = {"steps": 20, "batch_size": 8, "lr": 1e-3, "optimizer": optimizer, "part": "head"}
    options = {"student": student}
    how = {"net": net, "training": HEAD_ONLY, "engine_options": {"precision": "float64"}}
    feddf = run(build_method("feddf", options)[0].method, **how)
    plain = run(weighed(fedavg(), "uniform"), **how)
    assert all(abs(row["server/distill_loss_before"]) < 1e-14 for row in feddf.history.rows)
    assert all(row["server/teacher_agreement"] < 1.0 for row in feddf.history.rows), "the clients differ"
    if optimizer == "sgd":  # Adam makes steps of a gradient that is rounding
        assert furthest(feddf.weights, plain.weights) < 1e-12
    other = run(weighed(build_method("feddf", options)[0].method, "size"), **how)
    assert same_bits(extractor_of(other.weights, net), extractor_of(feddf.weights, net))


def test_with_whole_models_there_is_something_to_learn():
    found = run(build_method("feddf", {"student": SHORT})[0].method, training=LOCAL)
    assert all(row["server/distill_loss_before"] > 1e-4 for row in found.history.rows)


def test_a_client_sends_its_head():
    """4 uploads of a head with 6 x 3 + 3 numbers, and of size (8 bytes), steps, travel and loss (4 each)."""
    for part, numbers in (("head", 21), ("all", 21 + 6 * FEATURES + 6)):
        training = dataclasses.replace(LOCAL, part=part)
        rows = run(fedavg(), training=training).history.rows
        assert {row["bytes_up"] for row in rows} == {4 * (4 * numbers + 8 + 3 * 4)}
        assert {row["bytes_down"] for row in rows} == {4 * byte_size(network().init(0))}


def test_noise_is_added_to_what_is_sent():
    model, start = network("norm"), in_float64(network("norm").init(0))
    uploads = server_round(clients_models(model, 3, only="head."), model).uploads
    noisy = moving_only(build_method("update_noise", {"sigma": 0.5})[0].method, model, "head")
    sent = on_the_way(noisy, uploads, start, 1)
    assert same_bits(extractor_of(sent.weights, "norm"), extractor_of(uploads.weights, "norm"))
    assert not torch.equal(sent.weights.params["head.bias"], uploads.weights.params["head.bias"])
    plain = on_the_way(build_method("update_noise", {"sigma": 0.5})[0].method, uploads, start, 1)
    assert same_bits(head_of(sent.weights, head_names(model)), head_of(plain.weights, head_names(model)))


def test_the_move_that_is_clipped_is_the_heads():
    model = network()
    models = clients_models(model, 2, only="head.")
    start, uploads = models[0], server_round(models, model).uploads
    clipped = moving_only(build_method("update_noise", {"sigma": 0.0, "clip": 0.1})[0].method, model, "head")
    sent = on_the_way(clipped, uploads, start, 1)
    moved = torch.cat([(sent.weights.params[n][1] - start.params[n]).flatten() for n in model.head_names])
    assert float(moved.norm()) == pytest.approx(0.1)


@pytest.mark.parametrize("broken", ["body.0.weight", "body.1.running_mean"])
def test_what_a_client_says_about_the_extractor_does_not_count(broken):
    """Whoever sends another extractor than it was sent changes nothing."""
    model = network("norm")
    models = clients_models(model, 3, only="head.")
    this = server_round(models, model)
    for tree in this.uploads.weights:
        if broken in tree:
            tree[broken] = tree[broken] + 100.0
    made, _ = moving_only(fedavg(), model, "head").aggregate.apply(this.start, {}, this)
    assert same_bits(extractor_of(made, "norm"), extractor_of(this.start, "norm"))
    mean = torch.stack([one.params["head.bias"] for one in models]).mean(0)
    torch.testing.assert_close(made.params["head.bias"], mean)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    method = build_method("feddf", {"student": {**SHORT, "part": "head"}})[0].method
    how = {"net": "norm", "training": HEAD_ONLY, "checkpoint_every": 1}
    whole = run(method, rounds=4, run_dir=tmp_path / "whole", **how)
    run(method, rounds=2, run_dir=tmp_path / "cut", **how)
    resumed = run(method, rounds=4, run_dir=tmp_path / "cut", resume=True, **how)
    assert same_bits(resumed.weights, whole.weights)
    with pytest.raises(FedstillError, match="cannot resume"):
        run(method, rounds=5, run_dir=tmp_path / "cut", resume=True, net="norm", training=LOCAL)


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))


@pytest.mark.parametrize(
    ("name", "training", "told"),
    [
        (
            "fedavg",
            HEAD_ONLY,
            r"^method\.name = 'fedavg' with local\.part = 'head' needs a model whose last layer can be called alone \(",
        ),
        ("feddf", LOCAL, r"^method\.name = 'feddf' needs .*a model whose last layer can be called alone \(use a model"),
    ],
)
def test_a_model_without_a_head_is_told_before_the_first_round(name, training, told):
    model = from_module(Headless, input_shape=(FEATURES,), classes=CLASSES)
    with pytest.raises(FedstillError, match=told):
        run(build_method(name, options_of(name))[0].method, model=model, training=training, label=name)


def test_the_student_declares_that_it_needs_a_head():
    for name in STUDENTS:
        assert Need.HEAD in needs_of(build_method(name, {"student": {"part": "head"}})[0].method)
        assert Need.HEAD not in needs_of(build_method(name)[0].method)


def test_the_head_is_trained_to_the_optimum_of_a_linear_model():
    """One client with everything, full batches: the stationary point of logistic regression on fixed features."""
    data = federation()
    alone = dataclasses.replace(data, offsets=torch.tensor([0, len(data.train.y)]))
    training = Training(steps=400, batch_size=len(data.train.y), lr=2.0, weight_decay=0.05, part="head")
    how = {"federation": alone, "cohort": 1, "rounds": 1, "training": training}
    found = run(fedavg(), engine_options={"precision": "float64"}, **how).weights
    features = network().apply(in_float64(first_weights("mlp")), data.train.x.double())[0].features
    head = {name: leaf.clone().requires_grad_() for name, leaf in found.params.items() if name.startswith("head.")}
    logits = features @ head["head.weight"].T + head["head.bias"]
    loss = nn.functional.cross_entropy(logits, data.train.y)
    loss = loss + 0.025 * sum(leaf.square().sum() for leaf in head.values())
    for gradient in torch.autograd.grad(loss, list(head.values())):
        assert float(gradient.abs().max()) < 1e-6


@pytest.mark.parametrize("name", ["fedavg", "feddf"])
def test_clients_with_different_architectures_keep_every_extractor(name):
    """Five clients: a dense net and one with BatchNorm in turn; each head is trained, and only that."""
    model = mixed_model({"mlp": network(), "norm": network("norm")}, 5)
    training = dataclasses.replace(HEAD_ONLY, keep_optimizer=True)
    found = run(build_method(name, options_of(name))[0].method, model=model, cohort=5, training=training)
    start = model.init(seed_for(3, "model"))
    heads = set(head_names(model))
    assert heads == {f"mlp/{name}" for name in network().head_names} | {"norm/head.weight", "norm/head.bias"}
    for leaf, value in found.weights.params.items():
        assert torch.equal(value, start.params[leaf]) == (leaf not in heads), leaf
    assert same_bits(found.weights.buffers, start.buffers)
    numbers = 21  # 6 x 3 + 3, of either head
    assert found.history.rows[0]["bytes_up"] == 5 * (4 * numbers + 8 + 3 * 4)


ADAPTED = ("fedavg", "fedprox", "scaffold", "feddf", "fedlmd")
OTHER_DATA = {"simclr"} | {name for name in METHODS if Need.TOKENS in needs_of(build_method(name)[0].method)}


def with_adapters(name: str, **how):
    options = {"student": SHORT} if name in STUDENTS else {}
    return run(build_method(name, options)[0].method, net="adapted", **{"cohort": 3, **how})


def base_of(weights: Weights) -> Weights:
    return Weights({}, {name: weights.buffers[name] for name in network("adapted").frozen_names})


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("name", first_quick([*ADAPTED, *sorted(set(METHODS) - {*ADAPTED, *OTHER_DATA})], len(ADAPTED)))
def test_every_bit_of_the_base_survives_a_run_of_adapters(name, engine):
    found, start = with_adapters(name, engine=engine).weights, first_weights("adapted")
    assert same_bits(base_of(found), base_of(start))
    moved = [leaf for leaf, value in start.params.items() if not torch.equal(value, found.params[leaf])]
    assert moved == ["encoder.1.down", "encoder.1.up", "head.weight", "head.bias"]


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_a_stack_of_clients_are_those_of_one_after_another(name):
    exact = {"engine_options": {"precision": "float64"}}
    stacked, alone = (with_adapters(name, engine=engine, **exact).weights for engine in ("batched", "looped"))
    assert furthest(stacked, alone) < 1e-10


def test_clients_send_receive_and_keep_adapters_alone():
    """Of the 4-6-3 network 4 x 2 + 2 x 6 + 6 x 3 + 3 = 41 numbers train; SCAFFOLD sends and receives as many again."""
    numbers = 41
    for name, copies in (("fedavg", 1), ("scaffold", 2)):
        for row in with_adapters(name, cohort=4).history.rows:
            assert row["bytes_up"] == 4 * (4 * copies * numbers + 8 + 3 * 4), name
            assert row["bytes_down"] == 4 * 4 * copies * numbers, name
    memory = build_method("scaffold")[0].method.objective.init(first_weights("adapted"))
    assert byte_size(memory) == 4 * numbers


def test_noise_and_its_clip_reach_adapters_alone():
    model, start = network("adapted"), in_float64(network("adapted").init(0))
    moved = {name: leaf + 1.0 for name, leaf in start.params.items()}
    uploads = server_round([start, Weights(moved, start.buffers)], model).uploads
    options = {"clip": 0.1, "noise_multiplier": 0.0, "trust": "nobody"}
    clipped = moving_only(build_method("dp_fedavg", options)[0].method, model, "all")
    sent = on_the_way(clipped, uploads, start, 1)
    assert same_bits(sent.weights.buffers, uploads.weights.buffers)
    length = torch.cat([(leaf[1] - start.params[name]).flatten() for name, leaf in sent.weights.params.items()])
    assert float(length.norm()) == pytest.approx(0.1)


def test_a_network_of_ones_own_keeps_its_frozen_parameters_to_the_last_bit():
    def frozen_body() -> nn.Module:
        module = toy.NormNet(FEATURES, 6, CLASSES)
        module.body[0].requires_grad_(False)
        return module

    model = from_module(frozen_body, input_shape=(FEATURES,), classes=CLASSES)
    found, start = run(fedavg(), model=model, **{**THREE, "net": "norm"}), model.init(seed_for(3, "model"))
    assert torch.equal(found.weights.buffers["body.0.weight"], start.buffers["body.0.weight"])
    assert not torch.equal(found.weights.buffers["body.1.running_mean"], start.buffers["body.1.running_mean"])
    assert found.history.rows[0]["bytes_down"] == 3 * (byte_size(start) - byte_size(start.buffers["body.0.weight"]))
