"""Evaluation and teachers: outputs over whole sets, of one model or of many."""

from __future__ import annotations

import pytest
import torch
from engine_cases import CLASSES, IMAGE, MEAN, STD, assert_close, dataset, engine_for, federation, network, reads_images

from fedstill.core.tree import stack
from fedstill.engine import forward as forward_module
from fedstill.engine.feed import Feed
from fedstill.engine.forward import forward, forward_many

NETWORKS = ("mlp", "cnn", "norm", "convnorm", "drop")


def feed_for(net: str, count: int = 23) -> Feed:
    data = dataset(count, images=reads_images(net))
    return Feed(data.x, data.y, data, torch.device("cpu"), torch.float32)


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


@pytest.mark.parametrize("name", ["batched", "looped"])
@pytest.mark.parametrize("net", ["mlp", "cnn", "norm"])
def test_stacked_outputs_are_each_models_own(name, net):
    engine = engine_for(name, net)
    x = dataset(9, images=reads_images(net), seed=4).x
    several = [engine.model.init(seed) for seed in range(3)]
    together = engine.outputs(stack(several), x, stacked=True)
    for row, weights in enumerate(several):
        assert_close({"z": together.logits[row]}, {"z": engine.outputs(weights, x).logits})


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
