"""Training one model on the server with the clients' own loop."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_cases import (
    CLASSES,
    MODULES,
    assert_close,
    assert_same_bits,
    dataset,
    engine_for,
    federation,
    network,
    paper_cnn,
    reads_images,
    train,
)
from quick import EITHER_ENGINE
from torch import nn

from fedstill.compose.combine import combine
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import Lesson
from fedstill.core.tree import clone, flatten
from fedstill.core.types import Training, Traits
from fedstill.engine import ENGINES, PRECISIONS, _stacked, build_engine, build_engines, choose_device
from fedstill.engine.engine import FEEDS
from fedstill.engine.plan import make_plan
from fedstill.local.distillation import plain_distillation
from fedstill.local.terms import cross_entropy
from fedstill.models import build_model
from fedstill.server.distill.student import soft_target_loss

DISTILLING = Training(steps=9, batch_size=8, optimizer="adam", lr=5e-3, lr_schedule="cosine", clip=0.5)
COUNT = 21


def soft_targets(seed: int = 0) -> torch.Tensor:
    logits = torch.randn(COUNT, CLASSES, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(3 * logits, 1)


def in_torch(net: str, x: torch.Tensor, y: torch.Tensor, training: Training, seed: int) -> dict[str, torch.Tensor]:
    """Adam, cosine and clipping of torch on the batches of the plan, towards soft targets."""
    module, start = MODULES[net](), network(net).init(0)
    module.load_state_dict({**start.params, **start.buffers})
    plan = make_plan(
        np.arange(len(x)), np.array([len(x)]), np.zeros(1, np.int64), training=training, round=1,
        seed=seed_for(seed, "fit"),
    )  # fmt: skip
    optimizer = torch.optim.Adam(module.parameters(), lr=training.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(plan.index))
    for index, weight in zip(plan.index[:, 0], plan.weight[:, 0], strict=True):
        rows = torch.from_numpy(index[weight > 0])
        optimizer.zero_grad()
        log_student = F.log_softmax(module(x[rows]), 1)
        F.kl_div(log_student, y[rows], reduction="batchmean").backward()
        nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
        schedule.step()
    return {name: leaf.detach() for name, leaf in module.named_parameters()}


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_fit_equals_a_plain_pytorch_loop_towards_soft_targets(name, net):
    engine, x, y = engine_for(name, net), dataset(COUNT, images=False).x, soft_targets()
    found = engine.fit(Lesson(soft_target_loss(), x, y, DISTILLING), engine.model.init(0), 5).weights
    assert_close(found.params, in_torch(net, x, y, DISTILLING, 5))


@pytest.mark.parametrize("net", ["mlp", "cnn", "norm", "convnorm", "drop"])
def test_both_engines_fit_alike(net):
    x, y = dataset(COUNT, images=reads_images(net)).x, soft_targets()
    batched, looped = (
        engine_for(name, net).fit(Lesson(soft_target_loss(), x, y, DISTILLING), network(net).init(0), 5).weights
        for name in ("batched", "looped")
    )
    assert_same_bits(batched, looped)


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_a_set_that_comes_back_with_new_targets_is_fitted_to_the_new_ones(name):
    used, x = engine_for(name), dataset(COUNT, images=False).x
    objective, start = soft_target_loss(), network().init(0)
    for seed in range(3):
        again = used.fit(Lesson(objective, x, soft_targets(seed), DISTILLING), start, seed).weights
        fresh = engine_for(name).fit(Lesson(objective, x, soft_targets(seed), DISTILLING), start, seed).weights
        assert_same_bits(again, fresh)
    hard = torch.arange(COUNT) % CLASSES
    again = used.fit(Lesson(cross_entropy(), x, hard, DISTILLING), start, 1).weights
    assert_same_bits(again, engine_for(name).fit(Lesson(cross_entropy(), x, hard, DISTILLING), start, 1).weights)


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_fitting_disturbs_neither_what_is_lent_nor_the_clients(name):
    engine, x, y = engine_for(name), dataset(COUNT, images=False).x, soft_targets()
    training = Training(batch_size=4, lr=0.1)
    lent = {"start": engine.model.init(0), "x": x, "y": y}
    kept = clone(lent)
    before = train(engine, training).uploads.weights
    engine.fit(Lesson(soft_target_loss(), x, y, DISTILLING), lent["start"], 5)
    assert_same_bits(lent, kept)
    assert_same_bits(train(engine, training).uploads.weights, before)


def test_the_seed_chooses_the_batches():
    engine, x, y = engine_for("looped"), dataset(COUNT, images=False).x, soft_targets()
    one, same, other = (
        engine.fit(Lesson(soft_target_loss(), x, y, DISTILLING), network().init(0), seed).weights.params["head.bias"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_no_steps_leave_the_model_as_it_is(name):
    engine, start = engine_for(name, "norm"), network("norm").init(0)
    found = engine.fit(
        Lesson(soft_target_loss(), dataset(COUNT, images=False).x, soft_targets(), Training(steps=0)), start, 5
    ).weights
    assert_same_bits(found, start)


def test_a_server_that_trains_on_new_samples_every_round_does_not_fill_the_memory():
    engine = engine_for("batched")
    objective, start = soft_target_loss(), network("mlp").init(0)
    for round in range(3 * FEEDS):
        x = dataset(COUNT, images=False, seed=round).x
        engine.fit(Lesson(objective, x, soft_targets(round), DISTILLING), start, 0)
    assert len(engine.feeds) <= FEEDS
    assert len(engine.programs) <= FEEDS


PLAIN = Training(
    steps=7, batch_size=4, lr=0.1
)  # at a constant rate the first steps of a plan are those of a shorter one
CHOSEN = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 20])


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "cnn", "norm", "drop"])
@pytest.mark.parametrize("training", [DISTILLING, Training(epochs=2, batch_size=4, lr=0.05)], ids=["steps", "epochs"])
def test_some_rows_of_a_set_are_fitted_like_a_set_of_their_own(name, net, training):
    x, y = dataset(COUNT, images=reads_images(net)).x, soft_targets()
    objective, start = soft_target_loss(), network(net).init(0)
    some = engine_for(name, net).fit(Lesson(objective, x, y, training, CHOSEN), start, 5).weights
    alone = engine_for(name, net).fit(Lesson(objective, x[CHOSEN], y[CHOSEN], training), start, 5).weights
    assert_same_bits(some, alone)


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_rows_may_change_from_call_to_call_and_other_targets_do_not_count(name):
    used, x, y = engine_for(name), dataset(COUNT, images=False).x, soft_targets()
    objective, start = soft_target_loss(), network().init(0)
    elsewhere = y.clone()
    elsewhere[[0, 1, 4]] = 1 / CLASSES
    for rows in (CHOSEN, CHOSEN[:1], torch.arange(COUNT)):
        found = used.fit(Lesson(objective, x, y, DISTILLING, rows), start, 5).weights
        assert_same_bits(found, engine_for(name).fit(Lesson(objective, x[rows], y[rows], DISTILLING), start, 5).weights)
        if len(rows) < COUNT:
            assert_same_bits(found, used.fit(Lesson(objective, x, elsewhere, DISTILLING, rows), start, 5).weights)


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("watched", [False, True])
def test_no_rows_leave_the_model_as_it_is(name, watched):
    engine, start = engine_for(name, "norm"), network("norm").init(0)
    how = {"watch": lambda done, now: False} if watched else {}
    none = torch.zeros(0, dtype=torch.int64)
    x = dataset(COUNT, images=False).x
    assert_same_bits(
        engine.fit(Lesson(soft_target_loss(), x, soft_targets(), DISTILLING, none), start, 5, **how).weights, start
    )


def watched_fit(name, net, training, *, until=None, rows=None):
    """(the result, {step: the weights that the watcher saw})."""
    engine, seen = engine_for(name, net), {}

    def watch(done, now):
        seen[done] = clone(now)
        return done == until

    x, y = dataset(COUNT, images=reads_images(net)).x, soft_targets()
    found = engine.fit(Lesson(soft_target_loss(), x, y, training, rows), network(net).init(0), 5, watch=watch).weights
    return found, seen


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "cnn", "norm", "drop"])
def test_a_watcher_sees_the_weights_after_every_step(name, net):
    x, y = dataset(COUNT, images=reads_images(net)).x, soft_targets()
    found, seen = watched_fit(name, net, PLAIN)
    assert list(seen) == list(range(1, 8))
    for steps, weights in seen.items():
        training = Training(steps=steps, batch_size=4, lr=0.1)
        shorter = engine_for(name, net).fit(Lesson(soft_target_loss(), x, y, training), network(net).init(0), 5).weights
        assert_same_bits(weights, shorter)
    assert_same_bits(found, seen[7])


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "cnn", "norm"])
@pytest.mark.parametrize("training", [DISTILLING, Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9)])
def test_being_watched_changes_nothing(name, net, training):
    x, y = dataset(COUNT, images=reads_images(net)).x, soft_targets()
    plain = (
        engine_for(name, net).fit(Lesson(soft_target_loss(), x, y, training, CHOSEN), network(net).init(0), 5).weights
    )
    found, _ = watched_fit(name, net, training, rows=CHOSEN)
    assert_same_bits(found, plain)


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_a_watcher_may_stop_and_the_result_is_what_it_saw_then(name):
    found, seen = watched_fit(name, "norm", PLAIN, until=3)
    assert list(seen) == [1, 2, 3]
    assert_same_bits(found, seen[3])
    _, all_of_them = watched_fit(name, "norm", PLAIN)
    assert_same_bits(seen, {step: all_of_them[step] for step in seen})


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_the_weights_that_a_watcher_sees_are_one_tree_of_views(name):
    engine, seen = engine_for(name, "norm"), []

    def watch(done, now):
        seen.append(now)
        return False

    x, y = dataset(COUNT, images=False).x, soft_targets()
    engine.fit(Lesson(soft_target_loss(), x, y, PLAIN), network("norm").init(0), 5, watch=watch)
    assert len(seen) == 7
    assert all(now is seen[0] for now in seen)


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_a_watcher_may_run_the_model_it_sees(name):
    """As early stopping does: the set it looks at comes and goes between the steps."""
    engine, x, y = engine_for(name), dataset(COUNT, images=False).x, soft_targets()
    others = [dataset(9, images=False, seed=seed).x for seed in range(2 * FEEDS)]
    answers = []

    def watch(done, now):
        answers.append([engine.outputs(now, other).logits for other in others])
        return False

    start = network().init(0)
    found = engine.fit(Lesson(soft_target_loss(), x, y, PLAIN), start, 5, watch=watch).weights
    assert_same_bits(found, engine_for(name).fit(Lesson(soft_target_loss(), x, y, PLAIN), start, 5).weights)
    last = {str(i): logits for i, logits in enumerate(answers[-1])}
    assert_same_bits(last, {str(i): engine.outputs(found, other).logits for i, other in enumerate(others)})


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_a_watched_student_that_also_learns_from_its_start_learns_from_this_start(name):
    """Outputs of the start are kept by the engine: they must not be those of an earlier call."""
    engine, x = engine_for(name), dataset(COUNT, images=False).x
    hard, objective = torch.arange(COUNT) % CLASSES, combine(cross_entropy(), plain_distillation(2.0))
    for seed in range(2):
        start = network().init(seed)
        plain = engine.fit(Lesson(objective, x, hard, PLAIN), start, 5).weights
        other = engine.fit(Lesson(objective, x, hard, PLAIN), network().init(9), 5).weights
        watched = engine.fit(Lesson(objective, x, hard, PLAIN), start, 5, watch=lambda done, now: False).weights
        assert_same_bits(watched, plain)
        assert not torch.equal(other.params["head.bias"], plain.params["head.bias"])


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_a_cyclic_rate_is_followed_step_by_step(name):
    """Plain gradient steps with the rate 0.3, 0.2, 0.1, 0.3, ... on the batches of the plan."""
    training = Training(steps=7, batch_size=8, lr=0.3, lr_schedule="cyclic", lr_cycle=3, lr_low=0.1)
    x, y = dataset(COUNT, images=False).x, soft_targets()
    module, start = MODULES["mlp"](), network("mlp").init(0)
    module.load_state_dict(start.params)
    one_client = np.array([COUNT]), np.zeros(1, np.int64)
    plan = make_plan(np.arange(COUNT), *one_client, training=training, round=1, seed=seed_for(5, "fit"))
    for step, (index, weight) in enumerate(zip(plan.index[:, 0], plan.weight[:, 0], strict=True)):
        rows = torch.from_numpy(index[weight > 0])
        loss = F.kl_div(F.log_softmax(module(x[rows]), 1), y[rows], reduction="batchmean")
        pulls = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for leaf, pull in zip(module.parameters(), pulls, strict=True):
                leaf -= (0.3, 0.2, 0.1)[step % 3] * pull
    found = engine_for(name).fit(Lesson(soft_target_loss(), x, y, training), start, 5).weights
    assert_close(found.params, {name: leaf.detach() for name, leaf in module.named_parameters()})


# A training in parts: the optimiser goes on where the part before left it.

ADAM = Training(epochs=2, batch_size=8, optimizer="adam", lr=5e-3, weight_decay=1e-2)

MOMENTUM = Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9)


def in_parts_by_torch(net, data, training, seeds):
    """One optimiser of torch over the batches of all parts."""
    module, start = MODULES[net](), network(net).init(0)
    module.load_state_dict({**start.params, **start.buffers})
    if training.optimizer == "adam":
        optimizer = torch.optim.Adam(module.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=training.lr, momentum=training.momentum)
    losses = []
    for seed in seeds:
        plan = make_plan(
            np.arange(COUNT), np.array([COUNT]), np.zeros(1, np.int64), training=training, round=1,
            seed=seed_for(seed, "fit"),
        )  # fmt: skip
        for index, weight in zip(plan.index[:, 0], plan.weight[:, 0], strict=True):
            rows = torch.from_numpy(index[weight > 0])
            optimizer.zero_grad()
            loss = F.cross_entropy(module(data.x[rows]), data.y[rows])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return dict(module.state_dict()), losses


def in_parts(engine, net, data, training, seeds, *, forget=False, objective=None):
    objective = objective or cross_entropy()
    weights, optimizer = network(net).init(0), {}
    for seed in seeds:
        fitted = engine.fit(Lesson(objective, data.x, data.y, training), weights, seed, optimizer=optimizer)
        weights, optimizer = fitted.weights, {} if forget else fitted.optimizer
    return fitted


@pytest.mark.parametrize("net", ["mlp", "norm"])
@pytest.mark.parametrize("training", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_parts_are_one_training_of_torch(net, training):
    engine, data = engine_for("looped", net), dataset(COUNT, images=reads_images(net))
    found = in_parts(engine, net, data, training, (1, 2, 3))
    wanted, losses = in_parts_by_torch(net, data, training, (1, 2, 3))
    assert_close({**found.weights.params, **found.weights.buffers}, wanted)
    assert float(found.loss) == pytest.approx(np.mean(losses[-6:]), rel=1e-5)  # two epochs of three steps
    forgetful = in_parts(engine, net, data, training, (1, 2, 3), forget=True)
    gap = max(float((leaf - wanted[name]).abs().max()) for name, leaf in forgetful.weights.params.items())
    assert gap > 1e-3


def test_a_part_is_a_function_of_what_it_is_given():
    """A fresh engine, and optimiser state that came back from a file, end with the same bits."""
    data = dataset(COUNT, images=False)
    whole = in_parts(engine_for("looped", "mlp"), "mlp", data, ADAM, (1, 2))
    first = in_parts(engine_for("looped", "mlp"), "mlp", data, ADAM, (1,))
    stored = {name: leaf.numpy().copy() for name, leaf in flatten(first.optimizer).items()}
    engine = engine_for("looped", "mlp")
    engine.fit(Lesson(cross_entropy(), data.x, data.y, ADAM), network("mlp").init(3), 9, optimizer={})
    assert all(np.array_equal(stored[name], leaf.numpy()) for name, leaf in flatten(first.optimizer).items())
    second = engine.fit(Lesson(cross_entropy(), data.x, data.y, ADAM), first.weights, 2, optimizer=first.optimizer)
    assert_same_bits(second.weights, whole.weights)
    assert_same_bits(second.optimizer, whole.optimizer)


def test_the_first_part_is_a_fit():
    engine, data, objective = engine_for("looped", "mlp"), dataset(COUNT, images=False), cross_entropy()
    wanted = engine.fit(Lesson(objective, data.x, data.y, ADAM), network("mlp").init(0), 1).weights
    assert_same_bits(in_parts(engine, "mlp", data, ADAM, (1,), objective=objective).weights, wanted)


def test_an_optimiser_without_memory_leaves_nothing():
    data = dataset(COUNT, images=False)
    assert in_parts(engine_for("looped", "mlp"), "mlp", data, Training(lr=0.1), (1,)).optimizer == {}


@pytest.mark.gpu
def test_captured_steps_go_on_with_the_optimiser_too():
    engine, data = engine_for("looped", "norm", device="cuda", precision="float32"), dataset(COUNT, images=False)
    weights, optimizer, objective = network("norm").init(0), {}, cross_entropy()
    weights = type(weights)(*({name: leaf.cuda() for name, leaf in part.items()} for part in weights))
    for seed in (1, 2, 3):
        fitted = engine.fit(Lesson(objective, data.x.cuda(), data.y.cuda(), ADAM), weights, seed, optimizer=optimizer)
        weights, optimizer = fitted.weights, fitted.optimizer
    wanted, _ = in_parts_by_torch("norm", data, ADAM, (1, 2, 3))
    for name, leaf in weights.params.items():
        assert float((leaf.cpu() - wanted[name]).abs().max()) < 1e-4


# Which engine is chosen, and what a mistake is told.


def unbatchable():
    return dataclasses.replace(network("mlp"), name="odd", traits=Traits(unbatchable="layer 3 keeps its own counter"))


@pytest.mark.parametrize(("net", "chosen"), [("mlp", "batched"), ("norm", "batched"), ("cnn", "looped")])
def test_on_a_cpu_dense_nets_are_batched_and_convolutions_looped(net, chosen):
    assert engine_for("auto", net).name == chosen


@pytest.mark.parametrize(("name", "chosen"), [("shufflenet", True), ("mobilenet_v2", True), ("resnet18", False)])
def test_on_a_gpu_convolutions_are_batched_where_all_of_them_are_faster_so(name, chosen):
    model = build_model(name, input_shape=(3, 32, 32), classes=4)
    assert _stacked("auto", torch.device("cuda"), model) is chosen
    assert not _stacked("auto", torch.device("cpu"), model)
    stubborn = dataclasses.replace(model, traits=model.traits._replace(unbatchable="it keeps a counter"))
    assert not _stacked("auto", torch.device("cuda"), stubborn)


def test_a_model_that_vmap_cannot_run_is_looped_and_refused_by_the_batched_engine():
    data = federation()
    engine = build_engine("auto", "cpu", model=unbatchable(), federation=data)
    assert engine.name == "looped"
    train(engine, Training(batch_size=4))
    with pytest.raises(FedstillError, match=r"'batched' cannot run odd: layer 3 keeps its own counter$"):
        build_engine("batched", "cpu", model=unbatchable(), federation=data)


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_a_name_that_is_given_is_obeyed(name):
    data = federation(images=True)
    for model in (network("cnn"), paper_cnn()):
        engine = build_engine(name, "cpu", model=model, federation=data)
        assert engine.name == name
        assert engine.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"name": "batchd"}, r"engine\.name: unknown engine 'batchd'; did you mean 'batched'\?"),
        ({"precision": "bf32"}, r"engine\.precision: unknown precision 'bf32'; did you mean"),
        ({"device": "gpu"}, r"engine\.device: 'gpu' is no device; did you mean 'cpu'\?"),
        ({"device": "meta"}, r"engine\.device: 'meta' is not supported; choose auto, cpu or cuda"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_word(options, told):
    with pytest.raises(FedstillError, match=told) as error:
        build_engine(
            options.get("name", "auto"), options.get("device", "cpu"), model=network(), federation=federation(),
            precision=options.get("precision", "auto"),
        )  # fmt: skip
    assert "\n" not in str(error.value)


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(FedstillError, match="'cuda' asked for, but torch sees no GPU; use 'auto' or 'cpu'"):
        choose_device("cuda")


def test_auto_precision_on_a_cpu_is_float32_and_the_setting_of_torch_is_given_back():
    engine = engine_for("auto", precision="auto")
    assert engine.precision == "float32"
    assert {"auto", "float32", "bf16"} <= set(PRECISIONS)
    assert {"auto", "batched", "looped"} == set(ENGINES)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for precision in PRECISIONS:
        train(engine_for("batched", precision=precision), Training(batch_size=4))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_augmenting_what_are_no_images_is_refused_before_training():
    with pytest.raises(FedstillError, match="crop need images"):
        train(engine_for("auto"), Training(augment=("crop",)))
    with pytest.raises(FedstillError, match=r"unknown augmentation 'crops'"):
        train(engine_for("looped", "cnn"), Training(augment=("crops",)))


class Deaf:
    def __init__(self, model, federation):
        pass


class Idle:
    name = "idle"

    def __init__(self, device, **options):
        self.device = torch.device(device)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (Deaf, r"Deaf \(test_engine.py, line \d+\) cannot be called as an engine, \(device, \*\*options\): "),
        (Idle, r"Idle \(test_engine.py, line \d+\) makes no engine: its Idle has no train$"),
        (lambda device, **options: None, "its NoneType has no name and no device and no train"),
    ],
)
def test_an_engine_that_cannot_be_built_or_cannot_train_is_told_with_its_line(engine, told):
    with pytest.raises(FedstillError, match=told):
        build_engines(engine, "cpu", model=None, federation=None)
