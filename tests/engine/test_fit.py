"""Training one model on the server with the clients' own loop."""

from __future__ import annotations

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
    network,
    reads_images,
    train,
)
from torch import nn

from fedstill.core.seeds import seed_for
from fedstill.core.tree import clone
from fedstill.core.types import Training
from fedstill.engine.engine import FEEDS
from fedstill.engine.plan import make_plan
from fedstill.local.terms import cross_entropy
from fedstill.server.student import soft_target_loss

ENGINES = ("batched", "looped")
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


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_fit_equals_a_plain_pytorch_loop_towards_soft_targets(name, net):
    engine, x, y = engine_for(name, net), dataset(COUNT, images=False).x, soft_targets()
    found = engine.fit(soft_target_loss(), engine.model.init(0), x, y, DISTILLING, 5)
    assert_close(found.params, in_torch(net, x, y, DISTILLING, 5))


@pytest.mark.parametrize("net", ["mlp", "cnn", "norm", "convnorm", "drop"])
def test_both_engines_fit_alike(net):
    x, y = dataset(COUNT, images=reads_images(net)).x, soft_targets()
    batched, looped = (
        engine_for(name, net).fit(soft_target_loss(), network(net).init(0), x, y, DISTILLING, 5) for name in ENGINES
    )
    assert_same_bits(batched, looped)


@pytest.mark.parametrize("name", ENGINES)
def test_a_set_that_comes_back_with_new_targets_is_fitted_to_the_new_ones(name):
    used, x = engine_for(name), dataset(COUNT, images=False).x
    objective, start = soft_target_loss(), network().init(0)
    for seed in range(3):
        again = used.fit(objective, start, x, soft_targets(seed), DISTILLING, seed)
        fresh = engine_for(name).fit(objective, start, x, soft_targets(seed), DISTILLING, seed)
        assert_same_bits(again, fresh)
    hard = torch.arange(COUNT) % CLASSES
    again = used.fit(cross_entropy(), start, x, hard, DISTILLING, 1)
    assert_same_bits(again, engine_for(name).fit(cross_entropy(), start, x, hard, DISTILLING, 1))


@pytest.mark.parametrize("name", ENGINES)
def test_fitting_disturbs_neither_what_is_lent_nor_the_clients(name):
    engine, x, y = engine_for(name), dataset(COUNT, images=False).x, soft_targets()
    training = Training(batch_size=4, lr=0.1)
    lent = {"start": engine.model.init(0), "x": x, "y": y}
    kept = clone(lent)
    before = train(engine, training).uploads.weights
    engine.fit(soft_target_loss(), lent["start"], x, y, DISTILLING, 5)
    assert_same_bits(lent, kept)
    assert_same_bits(train(engine, training).uploads.weights, before)


def test_the_seed_chooses_the_batches():
    engine, x, y = engine_for("looped"), dataset(COUNT, images=False).x, soft_targets()
    one, same, other = (
        engine.fit(soft_target_loss(), network().init(0), x, y, DISTILLING, seed).params["head.bias"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ENGINES)
def test_no_steps_leave_the_model_as_it_is(name):
    engine, start = engine_for(name, "norm"), network("norm").init(0)
    found = engine.fit(soft_target_loss(), start, dataset(COUNT, images=False).x, soft_targets(), Training(steps=0), 5)
    assert_same_bits(found, start)


def test_a_server_that_trains_on_new_samples_every_round_does_not_fill_the_memory():
    engine = engine_for("batched")
    objective, start = soft_target_loss(), network("mlp").init(0)
    for round in range(3 * FEEDS):
        x = dataset(COUNT, images=False, seed=round).x
        engine.fit(objective, start, x, soft_targets(round), DISTILLING, seed=0)
    assert len(engine.feeds) <= FEEDS
    assert len(engine.programs) <= FEEDS
