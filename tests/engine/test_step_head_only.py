"""Where only the head is trained (linear evaluation), a step is one of the head, on features that stay as they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_cases import (
    CLASSES,
    FEATURES,
    MODULES,
    assert_close,
    assert_same_bits,
    dataset,
    engine_for,
    federation,
    in_dtype,
    network,
    reads_images,
    train,
)
from quick import EITHER_ENGINE
from torch import nn

from fedstill.compose.combine import combine
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import Lesson
from fedstill.core.tree import rows
from fedstill.core.types import Objective, Training, Weights
from fedstill.engine import build_engine
from fedstill.engine import engine as engine_module
from fedstill.engine import forward as features_module
from fedstill.engine.plan import make_plan
from fedstill.local.distillation import plain_distillation
from fedstill.local.terms import control_variates, cross_entropy, dynamic_regularization, proximal
from fedstill.models import from_module
from fedstill.server.distill.student import soft_target_loss

ENGINES = ("batched", "looped")
SIZES = (5, 0, 9, 1, 16, 4)  # nobody, a client of one sample, a last batch of one, full batches
NETWORKS = ("mlp", "cnn", "norm", "convnorm", "drop")
HEAD = ("head.bias", "head.weight")
TRAININGS = {
    "sgd": Training(batch_size=4, epochs=2, lr=0.1, weight_decay=0.1, part="head"),
    "momentum": Training(batch_size=4, epochs=2, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, part="head"),
    "adam": Training(batch_size=4, epochs=2, lr=2e-3, optimizer="adam", weight_decay=0.1, part="head"),
    "adamw": Training(batch_size=4, epochs=2, lr=2e-3, optimizer="adamw", weight_decay=0.1, part="head"),
    "clipped": Training(batch_size=4, steps=5, lr=0.5, clip=0.05, lr_schedule="cosine", part="head"),
}


def cohort(engine: str, net: str, training: Training, **how):
    options = {name: how.pop(name) for name in ("chunk",) if name in how}
    data = federation(SIZES, images=reads_images(net))
    return train(engine_for(engine, net, data, **options), training, **how).uploads


def split(params) -> tuple[dict, dict]:
    head = {name: leaf for name, leaf in params.items() if name.startswith("head.")}
    return head, {name: leaf for name, leaf in params.items() if name not in head}


def assert_only_the_head_moved(weights: Weights, start: Weights) -> None:
    """Of each client that has data: bit for bit, parameters and BatchNorm's statistics."""
    for client, size in enumerate(SIZES):
        mine = rows(weights, client)
        head, rest = split(mine.params)
        assert_same_bits(rest, split(start.params)[1])
        assert_same_bits(mine.buffers, start.buffers)
        assert torch.equal(head["head.weight"], start.params["head.weight"]) == (size == 0)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("name", TRAININGS)
def test_every_bit_of_the_extractor_stays_whatever_trains_the_head(engine, net, name):
    """T6.10."""
    assert_only_the_head_moved(cohort(engine, net, TRAININGS[name]).weights, network(net).init(3))


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_augmented_images_leave_the_extractor_too(engine):
    training = dataclasses.replace(TRAININGS["momentum"], augment=("crop", "flip"))
    found, plain = (cohort(engine, "convnorm", how) for how in (training, TRAININGS["momentum"]))
    assert_only_the_head_moved(found.weights, network("convnorm").init(3))
    assert not torch.allclose(found.weights.params["head.weight"], plain.weights.params["head.weight"], atol=1e-4)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("net", NETWORKS)
def test_batched_equals_looped(net, name):
    found, wanted = (cohort(engine, net, TRAININGS[name]) for engine in ENGINES)
    assert_close(found._asdict() | {"label_counts": {}}, wanted._asdict() | {"label_counts": {}})


def test_batched_equals_looped_on_augmented_images():
    training = dataclasses.replace(TRAININGS["momentum"], augment=("crop", "cutout"))
    found, wanted = (cohort(engine, "convnorm", training).weights for engine in ENGINES)
    assert_close(found, wanted)


@pytest.mark.parametrize("net", ["mlp", "convnorm"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_size_of_a_chunk_changes_nothing(net, chunk):
    whole = cohort("batched", net, TRAININGS["momentum"], chunk=len(SIZES))
    assert_close(cohort("batched", net, TRAININGS["momentum"], chunk=chunk).weights, whole.weights)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("augment", [(), ("flip",)])
def test_padding_changes_nothing(monkeypatch, engine, augment):
    training = dataclasses.replace(TRAININGS["momentum"], augment=augment)
    plain = cohort(engine, "convnorm", training)

    def padded(*args, **how):
        """Every batch is three samples longer, and all padding holds samples of others."""
        plan = make_plan(*args, **how)
        weight = np.pad(plan.weight, ((0, 0), (0, 0), (0, 3)))
        strange = np.arange(weight.size).reshape(weight.shape) % sum(SIZES)
        index = np.where(weight > 0, np.pad(plan.index, ((0, 0), (0, 0), (0, 3))), strange)
        bits = np.pad(plan.bits, ((0, 0), (0, 0), (0, 3)))
        return dataclasses.replace(plan, index=index, weight=weight, bits=bits)

    monkeypatch.setattr(engine_module, "make_plan", padded)
    found = cohort(engine, "convnorm", training)
    assert_close(found.weights, plain.weights)
    assert_close({"loss": found.loss}, {"loss": plain.loss})


def linear_probe(net: str, training: Training, x, y, plan, client: int) -> nn.Linear:
    """nn.Linear and torch.optim on features that were computed beforehand, batch by batch of the plan."""
    start, module = network(net).init(3), MODULES[net]()
    module.load_state_dict({**start.params, **start.buffers})
    with torch.no_grad():
        seen = module.eval().body(x)
    rates = {"lr": training.lr, "weight_decay": training.weight_decay}
    optimizer = (
        torch.optim.SGD(module.head.parameters(), momentum=training.momentum, nesterov=training.nesterov, **rates)
        if training.optimizer == "sgd"
        else {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[training.optimizer](
            module.head.parameters(), **rates
        )
    )
    for index, weight in zip(plan.index[:, client], plan.weight[:, client], strict=True):
        if weight.any():
            batch = torch.from_numpy(index[weight > 0])
            optimizer.zero_grad()
            F.cross_entropy(module.head(seen[batch]), y[batch]).backward()
            optimizer.step()
    return module.head


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "norm", "drop"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_it_is_a_linear_probe_on_features_in_eval_mode(engine, net, name):
    training, data = TRAININGS[name], federation(SIZES)
    found = train(engine_for(engine, net, data), training).uploads.weights.params
    ids = np.arange(len(SIZES))
    plan = make_plan(data.indices.numpy(), np.array(SIZES), ids, training=training, round=1, seed=7)
    for client in ids:
        probe = linear_probe(net, training, data.train.x, data.train.y, plan, client)
        wanted = {f"head.{leaf}": value.detach() for leaf, value in probe.named_parameters()}
        assert_close({name: found[name][client] for name in HEAD}, wanted)


def pulls_everywhere() -> Objective:
    """A term whose gradient on the extractor is large."""

    def loss(output, batch, local):
        return sum((leaf * (1.0 + leaf)).sum() for leaf in local.params.values())

    return Objective(loss)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_terms_that_look_at_all_parameters_do_not_move_the_extractor(engine, net):
    start = network(net).init(3)
    control = {"control": {name: torch.ones_like(leaf) for name, leaf in start.params.items()}}
    own = {name: torch.stack([k * leaf for k in range(len(SIZES))]) for name, leaf in control["control"].items()}
    dyn = {name: 2.0 * leaf for name, leaf in own.items()}
    objective = combine(
        cross_entropy(), proximal(0.5), control_variates(), dynamic_regularization(0.1), pulls_everywhere()
    )
    states = {"control": own, "dyn_gradient": dyn}
    how = {"objective": objective, "received": control, "states": states}
    data = federation(SIZES)
    trained = train(engine_for(engine, net, data), TRAININGS["sgd"], **how)
    assert_only_the_head_moved(trained.uploads.weights, start)
    # c_k+ = c_k - c + (w_start - w_k) / travel: an extractor that did not move shows no gradient
    extractor = next(name for name in start.params if name not in HEAD)
    assert torch.equal(trained.states["control"][extractor][2], own[extractor][2] - 1.0)
    assert not torch.equal(trained.states["control"]["head.bias"][2], own["head.bias"][2] - 1.0)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_a_term_moves_the_head_as_if_the_extractor_were_not_there(engine):
    """FedProx's pull on the head alone, written as a loss of the head."""

    def on_the_head(output, batch, local):
        return sum(0.25 * (local.params[name] - local.start.params[name]).square().sum() for name in HEAD)

    data = federation(SIZES)
    found, wanted = (
        train(engine_for(engine, "norm", data), TRAININGS["sgd"], objective=combine(cross_entropy(), term))
        for term in (proximal(0.5), Objective(on_the_head))
    )
    assert_close(found.uploads.weights, wanted.uploads.weights)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "convnorm"])
def test_frozen_models_answer_as_they_do_when_everything_is_trained(engine, net):
    """Distillation from the start: at lr 0 the mean loss is the same but for dropout and batch statistics."""
    objective = combine(cross_entropy(), plain_distillation(2.0))
    still = dataclasses.replace(TRAININGS["sgd"], lr=0.0)
    data = federation(SIZES, images=reads_images(net))
    found = train(engine_for(engine, net, data), still, objective=objective).uploads.loss
    plain = train(engine_for(engine, net, data), still, objective=cross_entropy()).uploads.loss
    assert_close({"loss": found}, {"loss": plain})  # the student says what its start says: KL is 0


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("changes", [False, True])
def test_a_frozen_model_with_another_extractor_reads_the_samples(engine, changes):
    """changes: from step to step, so that its outputs cannot be kept."""
    other = network("norm").init(9)

    def loss(output, batch, local):
        return (output.logits - local.frozen["other"].logits).square().sum(-1).mul(batch.weight).sum()

    def frozen(local):
        return other if not changes or local.seed is not None else other._replace(buffers=None)

    objective = Objective(loss, frozen={"other": frozen})
    data = federation(SIZES)
    still = dataclasses.replace(TRAININGS["sgd"], epochs=1, lr=0.0, batch_size=16)
    found = train(engine_for(engine, "norm", data), still, objective=objective).uploads.loss
    gap = [network("norm").apply(w, data.train.x)[0].logits for w in (network("norm").init(3), other)]
    squares = (gap[0] - gap[1]).square().sum(1)[data.indices]
    wanted = torch.stack([part.sum() for part in torch.split(squares, list(SIZES))])
    assert_close({"loss": found}, {"loss": wanted}, tolerance=1e-5)


def forwards(monkeypatch) -> list[int]:
    """How many rows the extractor has been asked about, call by call."""
    counted = []

    def counting(model, weights, feed, rows=None, **how):
        counted.append(len(rows))
        return forward(model, weights, feed, rows, **how)

    forward = features_module.forward
    monkeypatch.setattr(features_module, "forward", counting)
    return counted


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_features_are_computed_once_for_each_row_until_the_extractor_changes(monkeypatch, engine):
    counted, runner, objective = forwards(monkeypatch), engine_for(engine, "norm", federation(SIZES)), cross_entropy()
    start = network("norm").init(3)
    first = train(runner, TRAININGS["sgd"], start=start, ids=[0, 2], objective=objective)
    assert sum(counted) == 1 + 14  # one row to see how long features are
    moved = start._replace(params={**start.params, "head.bias": start.params["head.bias"] + 1.0})
    train(runner, TRAININGS["sgd"], start=moved, ids=[0, 2, 3], objective=objective, round=2)
    assert sum(counted) == 1 + 14 + 1
    for changed in ("params", "buffers"):
        del counted[:]
        tree = {name: leaf + 1 if name not in HEAD else leaf for name, leaf in getattr(start, changed).items()}
        other = start._replace(**{changed: tree})
        found = train(runner, TRAININGS["sgd"], start=other, ids=[0, 2], objective=objective)
        assert sum(counted) == 14
        fresh = train(engine_for(engine, "norm", federation(SIZES)), TRAININGS["sgd"], start=other, ids=[0, 2])
        assert_same_bits(found.uploads.weights, fresh.uploads.weights)
    again = train(runner, TRAININGS["sgd"], start=start, ids=[0, 2], objective=objective)
    assert_same_bits(again.uploads.weights, first.uploads.weights)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_features_that_do_not_fit_are_computed_step_by_step(monkeypatch, engine):
    kept = cohort(engine, "convnorm", TRAININGS["sgd"]).weights
    monkeypatch.setattr("fedstill.engine.device_data.Feed.fits", lambda feed, numbers: False)
    assert_close(cohort(engine, "convnorm", TRAININGS["sgd"]).weights, kept)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("watched", [False, True])
def test_a_student_on_the_server_trains_its_head_alone(engine, steps, watched):
    x, start = dataset(40, images=False).x, network("norm").init(3)
    y = torch.softmax(torch.sin(torch.arange(40.0 * CLASSES)).reshape(40, CLASSES), 1)
    training = Training(steps=steps, batch_size=8, lr=1e-2, optimizer="adam", weight_decay=0.1, part="head")
    seen = []

    def watch(done, now):
        seen.append(now)
        return False

    how = {"watch": watch} if watched else {}
    found = engine_for(engine, "norm").fit(Lesson(soft_target_loss(), x, y, training), start, 5, **how).weights
    assert_same_bits(split(found.params)[1], split(start.params)[1])
    assert_same_bits(found.buffers, start.buffers)
    assert torch.equal(found.params["head.weight"], start.params["head.weight"]) == (steps == 0)
    assert all(now.params.keys() == start.params.keys() for now in seen)
    assert len(seen) == steps * watched
    if seen:
        assert_same_bits(found, seen[-1])
    plan = make_plan(
        np.arange(40), np.array([40]), np.zeros(1, np.int64), training=training, round=1, seed=seed_for(5, "fit")
    )
    module = MODULES["norm"]()
    module.load_state_dict({**start.params, **start.buffers})
    module.eval()
    optimizer = torch.optim.Adam(module.head.parameters(), lr=1e-2, weight_decay=0.1)
    for index in plan.index[:, 0]:
        optimizer.zero_grad()
        F.kl_div(F.log_softmax(module(x[index]), 1), y[index], reduction="batchmean").backward()
        optimizer.step()
    assert_close(
        {n: found.params[n] for n in HEAD}, {f"head.{n}": p.detach() for n, p in module.head.named_parameters()}
    )


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["norm", "cnn"])
def test_models_that_share_an_extractor_run_it_once_and_say_the_same(monkeypatch, engine, net):
    uploads = cohort(engine, net, TRAININGS["sgd"])
    runner, x = engine_for(engine, net), dataset(30, images=reads_images(net)).x
    found = runner.outputs(uploads.weights, x, stacked=True)
    each = [runner.outputs(rows(uploads.weights, k), x) for k in range(len(SIZES))]
    assert_close({"logits": found.logits}, {"logits": torch.stack([one.logits for one in each])})
    assert_close({"features": found.features}, {"features": torch.stack([one.features for one in each])})
    apart = Weights(*({name: leaf.clone() for name, leaf in tree.items()} for tree in uploads.weights))
    assert_close({"logits": runner.outputs(apart, x, stacked=True, features=False).logits}, {"logits": found.logits})


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_in_double_precision_all_digits_are_kept(engine):
    runner = engine_for(engine, "norm", federation(SIZES), precision="float64")
    start = in_dtype(network("norm").init(3), torch.float64)
    found = train(runner, TRAININGS["adam"], start=start).uploads.weights
    assert found.params["head.weight"].dtype == torch.float64
    assert_only_the_head_moved(found, start)


class Tied(nn.Module):
    """The head is another layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, CLASSES)
        self.middle = nn.Linear(CLASSES, CLASSES)
        self.head = nn.Linear(CLASSES, CLASSES)
        self.head.weight = self.middle.weight

    def forward(self, x):
        return self.head(self.middle(self.body(x)))


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return torch.tanh(self.body(x))


@pytest.mark.parametrize("module", [Tied, Headless])
def test_a_head_that_cannot_be_trained_alone_is_told(module):
    model = from_module(module, input_shape=(FEATURES,), classes=CLASSES)
    runner = build_engine("looped", "cpu", model=model, federation=federation(SIZES))
    with pytest.raises(FedstillError, match=r"part = 'head' cannot train \w+: use a model whose last layer is one"):
        train(runner, TRAININGS["sgd"])


def test_an_unknown_part_is_told():
    with pytest.raises(FedstillError, match=r"local\.part = 'tail' is impossible"):
        cohort("looped", "mlp", Training(part="tail"))
