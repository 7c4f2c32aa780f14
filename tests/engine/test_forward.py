"""Evaluation and teachers: outputs over whole sets, of one model or of many."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch
from engine_cases import (
    CLASSES,
    FEATURES,
    IMAGE,
    MEAN,
    MODULES,
    STD,
    assert_close,
    assert_same_bits,
    dataset,
    engine_for,
    federation,
    in_dtype,
    network,
    reads_images,
)
from largest_tensor import LargestTensor
from quick import EITHER_ENGINE
from torch import nn

from fedstill.core.trainer import Lesson
from fedstill.core.tree import clone, rows, stack
from fedstill.core.types import Training
from fedstill.engine import build_engine
from fedstill.engine import forward as forward_module
from fedstill.engine.device_data import Feed
from fedstill.engine.engine import FEEDS
from fedstill.engine.forward import TEACHERS_AT_ONCE, forward, forward_many
from fedstill.local.terms import cross_entropy
from fedstill.models import build_model, from_module

NETWORKS = ("mlp", "cnn", "norm", "convnorm", "drop")


def feed_for(net: str, count: int = 23) -> Feed:
    return feed_of(dataset(count, images=reads_images(net)).x, net)


def feed_of(x: torch.Tensor, net: str) -> Feed:
    like = dataset(len(x), images=reads_images(net))
    return Feed(x, like.y, like, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("net", NETWORKS)
def test_pieces_give_what_one_call_in_eval_mode_gives(monkeypatch, net):
    model, feed = network(net), feed_for(net)
    weights = model.init(0)
    wanted, buffers = model.apply(weights, feed.inputs(slice(None)), training=False)
    monkeypatch.setitem(forward_module.ROWS_AT_ONCE, "cpu", 5)
    assert_close(forward(model, weights, feed), wanted)
    assert_close(buffers, weights.buffers, tolerance=0.0)


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_some_rows_in_some_order(monkeypatch, net):
    model, feed = network(net), feed_for(net)
    weights, chosen = model.init(0), torch.tensor([7, 7, 0, 22])
    whole = forward(model, weights, feed)
    monkeypatch.setitem(forward_module.ROWS_AT_ONCE, "cpu", 3)
    assert_close({"z": forward(model, weights, feed, chosen).logits}, {"z": whole.logits[chosen]})


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_no_rows_are_no_outputs(net):
    model, feed = network(net), feed_for(net)
    out = forward(model, model.init(0), feed, torch.zeros(0, dtype=torch.int64))
    assert out.logits.shape == (0, CLASSES)
    assert out.features.shape[0] == 0


@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("loop", [True, False])
def test_many_models_are_each_model_alone(monkeypatch, net, loop):
    monkeypatch.setitem(forward_module.ROWS_AT_ONCE, "cpu", 12)
    monkeypatch.setattr(forward_module, "STACKED_ROWS_AT_ONCE", 12)
    model, feed = network(net), feed_for(net)
    several = [model.init(seed) for seed in range(3)]
    together = forward_many(model, stack(several), feed, loop=loop)
    assert together.logits.shape == (3, 23, CLASSES)
    for row, weights in enumerate(several):
        alone = forward(model, weights, feed)
        assert_close({"z": together.logits[row], "f": together.features[row]}, {"z": alone.logits, "f": alone.features})


def test_outputs_take_samples_as_they_are_stored():
    """Bytes in; the engine scales and normalises them as it does in training."""
    engine = engine_for("looped", "cnn", federation(images=True))
    x = dataset(4, images=True, seed=9).x
    weights = engine.model.init(0)
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (MEAN, STD))
    wanted = engine.model.apply(weights, (x.float() / 255 - mean) / std)[0].logits
    assert x.shape[1:] == IMAGE
    assert_close({"z": engine.outputs(weights, x).logits}, {"z": wanted})


@pytest.mark.parametrize("how", [{}, {"stacked": True}, {"batch": 4}, {"stacked": True, "batch": 4}], ids=str)
def test_in_bf16_models_answer_in_bf16_and_are_told_in_float32(how):
    """Eight bits of a number are kept, as in training; the code around never meets a half-precision tensor."""
    exact, rough = (engine_for("looped", "cnn", precision=precision) for precision in ("float32", "bf16"))
    x, weights = dataset(9, images=True, seed=4).x, exact.model.init(0)
    weights = stack([weights, weights]) if "stacked" in how else weights
    wanted, found = exact.outputs(weights, x, **how), rough.outputs(weights, x, **how)
    for true, told in zip(wanted, found, strict=True):
        assert told.dtype == torch.float32
        assert 0 < (told - true).abs().max() < 2**-6 * true.abs().max()


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "cnn", "norm"])
def test_stacked_outputs_are_each_models_own(name, net):
    engine = engine_for(name, net)
    x = dataset(9, images=reads_images(net), seed=4).x
    several = [engine.model.init(seed) for seed in range(3)]
    together = engine.outputs(stack(several), x, stacked=True)
    for row, weights in enumerate(several):
        assert_close({"z": together.logits[row]}, {"z": engine.outputs(weights, x).logits})


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "cnn", "norm"])
@pytest.mark.parametrize("stacked", [False, True])
def test_outputs_of_some_rows_are_those_rows_of_all_outputs(monkeypatch, name, net, stacked):
    monkeypatch.setattr(forward_module, "STACKED_ROWS_AT_ONCE", 6)
    engine = engine_for(name, net)
    x, chosen = dataset(9, images=reads_images(net), seed=4).x, torch.tensor([8, 0, 3, 3, 5])
    models = [engine.model.init(seed) for seed in range(3)]
    weights = stack(models) if stacked else models[0]
    whole, some = (engine.outputs(weights, x, stacked, rows=rows) for rows in (None, chosen))
    assert_close({"z": some.logits}, {"z": whole.logits[..., chosen, :]})
    assert_close({"f": some.features}, {"f": whole.features[..., chosen, :]})


def test_in_train_mode_a_batch_is_made_of_the_rows_that_are_asked_for():
    engine = engine_for("looped", "norm")
    x, chosen = dataset(9, images=False, seed=4).x, torch.tensor([8, 0, 3, 5])
    weights = engine.model.init(0)
    some = engine.outputs(weights, x, batch=4, rows=chosen).logits
    assert_close({"z": some}, {"z": engine.outputs(weights, x[chosen], batch=4).logits})
    assert not torch.allclose(some, engine.outputs(weights, x, batch=4).logits[chosen], atol=1e-3)


def test_outputs_carry_no_gradient_and_a_set_is_moved_once():
    engine = engine_for("batched")
    x, weights = dataset(9, images=False).x, engine.model.init(0)
    for leaf in weights.params.values():
        leaf.requires_grad_()
    assert not engine.outputs(weights, x).logits.requires_grad
    engine.outputs(weights, x)
    assert len(engine.feeds) == 1
    other = x.clone()
    assert not torch.equal(engine.outputs(weights, 2 * other).logits, engine.outputs(weights, other).logits)


def test_a_set_that_does_not_come_back_takes_no_place_and_gets_the_same_answer():
    engine = engine_for("batched")
    x, weights, others = dataset(9, images=False).x, engine.model.init(0), range(2 * FEEDS)
    kept = engine._feed_of(x)
    for seed in others:
        other = dataset(9, images=False, seed=seed).x
        assert torch.equal(engine.outputs(weights, other, keep=False).logits, forward_of(engine, weights, other))
    assert engine._feed_of(x) is kept
    assert len(engine.feeds) == 1


def forward_of(engine, weights, x):
    return forward(engine.model, weights, feed_of(x, "mlp")).logits


@pytest.mark.parametrize("net", ["mlp", "norm"])
@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_more_models_than_run_at_once_are_each_model_alone(monkeypatch, net, count):
    monkeypatch.setattr(forward_module, "STACKED_ROWS_AT_ONCE", 100)
    model, feed = network(net), feed_for(net)
    several = stack([model.init(seed) for seed in range(count)])
    assert_close(forward_many(model, several, feed, loop=False), forward_many(model, several, feed, loop=True))


def test_more_models_than_rows_at_once_still_get_a_row_each(monkeypatch):
    monkeypatch.setattr(forward_module, "STACKED_ROWS_AT_ONCE", 5)
    model, feed = network("mlp"), feed_for("mlp", 3)
    several = stack([model.init(seed) for seed in range(20)])
    assert_close(forward_many(model, several, feed, loop=False), forward_many(model, several, feed, loop=True))


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("batch", [None, 4])
def test_features_can_be_left_out(name, net, stacked, batch):
    engine, x = engine_for(name, net), dataset(9, images=reads_images(net)).x
    weights = stack([engine.model.init(seed) for seed in range(2)]) if stacked else engine.model.init(0)
    both = [engine.outputs(weights, x, stacked, features=kept, batch=batch) for kept in (True, False)]
    assert_same_bits({"z": both[1].logits}, {"z": both[0].logits})
    assert both[1].features.numel() == 0
    assert both[0].features.shape[:-1] == both[0].logits.shape[:-1]


def test_a_hundred_teachers_take_no_more_memory_than_sixteen():
    """Beside the outputs: the widest layer for as many rows, times models, as go at once."""
    teachers, hidden, samples = 100, 96, 400
    model = build_model("mlp", input_shape=(FEATURES,), classes=CLASSES, hidden=(hidden,))
    feed, several = feed_for("mlp", samples), stack([model.init(seed) for seed in range(teachers)])
    rows = []

    def spying(weights, x, **how):
        rows.append(len(x))
        return model.apply(weights, x, **how)

    with LargestTensor() as largest:
        forward_many(dataclasses.replace(model, apply=spying), several, feed, loop=False, features=False)
    at_once = forward_module.STACKED_ROWS_AT_ONCE
    assert sum(rows) == samples * math.ceil(teachers / TEACHERS_AT_ONCE)
    assert largest.numbers <= max(at_once * hidden, teachers * samples * CLASSES)
    assert largest.numbers < teachers * samples * hidden / 5


@pytest.mark.parametrize(("samples", "calls"), [(200, 2), (512, 4), (513, 2 * 30), (1100, 3 * 30)])
def test_on_a_cpu_teachers_run_together_where_that_saves_calls_and_else_in_turn(samples, calls):
    """30 teachers: 16 at once, 256 rows each; or each alone, 512 rows at a time."""
    engine, seen = engine_for("batched"), []
    several, apply = stack([engine.model.init(seed) for seed in range(30)]), engine.model.apply

    def spying(weights, x, **how):
        seen.append(len(x))
        return apply(weights, x, **how)

    engine.model = dataclasses.replace(engine.model, apply=spying)
    engine.outputs(several, dataset(samples, images=False).x, stacked=True, features=False)
    assert len(seen) == calls


@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_on_a_gpu_teachers_answer_in_turn_where_one_alone_fills_a_piece(net, name):
    engine = engine_for(name, net)
    teachers, engine.device = stack([engine.model.init(seed) for seed in range(2)]), torch.device("cuda")
    full = forward_module.ROWS_AT_ONCE["cuda"]
    assert engine._in_turn(teachers, full)
    assert engine._in_turn(teachers, full - 1) == (net == "cnn" and name == "looped")


def test_the_rows_that_are_asked_about_decide_and_not_the_whole_set(monkeypatch):
    engine, seen = engine_for("batched"), []
    monkeypatch.setattr(engine, "_in_turn", lambda teachers, samples: seen.append(samples) or True)
    teachers, x = stack([engine.model.init(seed) for seed in range(2)]), dataset(9, images=False).x
    for rows_asked in (None, torch.arange(4)):
        engine.outputs(teachers, x, stacked=True, rows=rows_asked)
    assert seen == [9, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "teachers"), [(50, 10), (200, 30), (3000, 10)])
@pytest.mark.parametrize("hidden", [64, 256])
def test_on_a_cpu_teachers_together_are_not_slower_than_in_turn(samples, teachers, hidden):
    """The best of many tries, and half as slow again is allowed, for a busy machine."""
    model = build_model("mlp", input_shape=(FEATURES,), classes=CLASSES, hidden=(hidden, hidden))
    engine = build_engine("batched", "cpu", model=model, federation=federation())
    x, several = dataset(samples, images=False).x, stack([model.init(seed) for seed in range(teachers)])

    def together():
        engine.outputs(several, x, stacked=True, features=False)

    def in_turn():
        torch.stack([engine.outputs(rows(several, i), x, features=False).logits for i in range(teachers)])

    spent = {call: [] for call in (together, in_turn)}
    for _ in range(40):
        for call, seconds in spent.items():
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    assert min(spent[together]) < 1.5 * min(spent[in_turn])


def in_train_mode(net: str, weights, x, batch: int):
    """(logits batch by batch, the module): BatchNorm of torch by the batch, b / (n + b) of each batch remembered."""
    module = MODULES[net]()
    module.load_state_dict({**weights.params, **weights.buffers})
    module.train()
    parts, seen = [], 0
    for at in range(0, len(x), batch):
        piece = x[at : at + batch]
        seen += len(piece)
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.momentum = len(piece) / seen
        parts.append(module(piece).detach())
    return torch.cat(parts), module


def trained_weights(engine, net: str, seed: int = 0):
    """Weights whose statistics are not those of a fresh network."""
    x, y = dataset(30, images=reads_images(net), seed=8).x, torch.arange(30) % CLASSES
    return engine.fit(
        Lesson(cross_entropy(), x, y, Training(steps=5, batch_size=8, lr=0.1)), engine.model.init(seed), 1
    ).weights


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "norm", "convnorm"])
def test_in_train_mode_outputs_are_those_of_a_module_in_train_mode_batch_by_batch(name, net):
    engine, x = engine_for(name, net), dataset(22, images=reads_images(net), seed=4).x
    inputs = feed_of(x, net).inputs(slice(None))
    several = [trained_weights(engine, net, seed) for seed in range(3)]
    before = clone(stack(several))
    together = engine.outputs(stack(several), x, stacked=True, batch=8)
    for row, weights in enumerate(several):
        wanted, _ = in_train_mode(net, weights, inputs, 8)
        assert_close({"z": engine.outputs(weights, x, batch=8).logits}, {"z": wanted})
        assert_close({"z": together.logits[row]}, {"z": wanted})
        if net != "mlp":
            assert not torch.allclose(engine.outputs(weights, x).logits, wanted, atol=1e-2)
    assert_same_bits(stack(several), before)


def test_in_train_mode_dropout_is_live_and_follows_the_seed_the_teacher_and_the_batch():
    engine, x = engine_for("looped", "drop"), dataset(5, images=False).x
    weights, repeated = engine.model.init(0), x.repeat(2, 1)
    one, same, other = (engine.outputs(weights, repeated, batch=5, seed=seed).logits for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other, atol=1e-3)
    assert not torch.allclose(one[:5], one[5:], atol=1e-3)
    twins = engine.outputs(stack([weights, weights]), x, stacked=True, batch=5, seed=1).logits
    assert not torch.allclose(twins[0], twins[1], atol=1e-3)
    assert not torch.allclose(one, engine.outputs(weights, repeated).logits, atol=1e-3)


def test_dropout_leaves_the_mean_of_a_linear_head_alone():
    engine, x, times = engine_for("looped", "drop"), dataset(3, images=False).x, 4000
    weights = engine.model.init(0)
    drawn = engine.outputs(weights, x.repeat(times, 1), batch=3 * times).logits.reshape(times, 3, CLASSES)
    off = drawn.mean(0) - engine.outputs(weights, x).logits
    assert (off.abs() < 5 * drawn.std(0) / times**0.5).all()


@pytest.mark.parametrize("name", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["norm", "convnorm"])
@pytest.mark.parametrize(("samples", "batch"), [(22, 8), (24, 8), (5, 8), (16, 16)])
def test_statistics_taken_anew_are_the_mean_over_batches_by_their_rows(name, net, samples, batch):
    engine, x = engine_for(name, net), dataset(samples, images=reads_images(net), seed=4).x
    weights = trained_weights(engine, net)
    before = clone(weights)
    found = engine.batch_statistics(weights, x, batch)
    _, module = in_train_mode(net, weights, feed_of(x, net).inputs(slice(None)), batch)
    wanted = dict(module.named_buffers())
    running = [key for key in found if "running" in key]
    assert running
    assert_close({key: found[key] for key in running}, {key: wanted[key] for key in running}, tolerance=2e-6)
    assert_same_bits({"n": found["body.1.num_batches_tracked"]}, {"n": weights.buffers["body.1.num_batches_tracked"]})
    assert_same_bits(weights, before)


def test_statistics_far_from_zero_keep_their_digits():
    engine = engine_for("looped", "norm")
    x = 3000.0 + dataset(40, images=False).x
    found = engine.batch_statistics(engine.model.init(0), x, 16)
    double = engine_for("looped", "norm", precision="float64")
    wanted = double.batch_statistics(in_dtype(double.model.init(0), torch.float64), x.double(), 16)
    torch.testing.assert_close(found["body.1.running_mean"].double(), wanted["body.1.running_mean"], rtol=2e-6, atol=0)
    torch.testing.assert_close(found["body.1.running_var"].double(), wanted["body.1.running_var"], rtol=2e-3, atol=0)


def test_a_batch_of_one_value_has_no_variance_and_says_nothing():
    engine, x = engine_for("looped", "norm"), dataset(17, images=False, seed=4).x
    weights = trained_weights(engine, "norm")
    assert_same_bits(engine.batch_statistics(weights, x, 8), engine.batch_statistics(weights, x[:16], 8))
    assert_same_bits(engine.batch_statistics(weights, x[:1], 8), weights.buffers)


def test_a_model_without_batch_statistics_keeps_its_buffers():
    engine = engine_for("batched", "mlp")
    assert engine.batch_statistics(engine.model.init(0), dataset(9, images=False).x) == {}


def test_a_layer_that_averages_over_all_its_batches_is_read_like_any_other():
    """momentum=None: after a million batches a further one moves it by a millionth."""

    class Patient(MODULES["norm"]):
        def __init__(self) -> None:
            super().__init__()
            self.body[1].momentum = None

    model = from_module(Patient, input_shape=(FEATURES,), classes=CLASSES, check=False)
    patient = build_engine("looped", "cpu", model=model, federation=federation())
    usual, x = engine_for("looped", "norm"), dataset(22, images=False, seed=4).x
    weights = model.init(0)
    weights.buffers["body.1.num_batches_tracked"] += 1_000_000
    assert_close(patient.batch_statistics(weights, x, 8), usual.batch_statistics(weights, x, 8), tolerance=2e-6)
