"""FedAvg on both engines equals an independent loop of nn.Module and torch.optim over the same batches.

Tolerance everywhere: 1e-6 times (1 + the largest weight of the tensor), after two or three rounds in float32.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_cases import (
    CLASSES,
    IMAGE,
    MEAN,
    MODULES,
    STD,
    UNEVEN,
    assert_close,
    engine_for,
    federation,
    network,
    reads_images,
    train,
)
from quick import first_quick
from running import federate
from torch import nn
from torch.optim import lr_scheduler

from fedstill.core.seeds import seed_for
from fedstill.core.types import Federation, Training, Weights
from fedstill.engine.plan import make_plan
from fedstill.methods import fedavg
from fedstill.models import build_model
from fedstill.models.zoo.small import cnn

ENGINES = ("batched", "looped")
EVEN = (
    8,
    4,
    12,
    7,
)  # no batch of one or two samples: torch's BatchNorm refuses the one, blows up rounding in the other
SEED = 11


def optimizer_for(training: Training, module: nn.Module) -> torch.optim.Optimizer:
    rate = {"lr": training.lr, "weight_decay": training.weight_decay}
    if training.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), momentum=training.momentum, nesterov=training.nesterov, **rate)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[training.optimizer](module.parameters(), **rate)


def schedulers_for(training: Training, optimizer: torch.optim.Optimizer, *, round: int, steps: int, per_epoch: int):
    """torch's schedulers for one client's round, each stepped once a local step."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = training.lr * training.lr_decay ** (round - 1)
    chosen = [lr_scheduler.StepLR(optimizer, per_epoch, training.lr_epoch_decay)]
    if training.lr_schedule == "cosine":
        chosen.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps))
    return chosen


def normalised(data: Federation) -> torch.Tensor:
    if data.train.x.dtype != torch.uint8:
        return data.train.x
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (MEAN, STD))
    return (data.train.x.float() / 255.0 - mean) / std


def client_loop(module: nn.Module, data: Federation, plan, client: int, training: Training, round: int) -> None:
    """Train `module` on the batches of one column of the plan."""
    x, y = normalised(data).to(next(module.parameters()).dtype), data.train.y
    optimizer = optimizer_for(training, module)
    steps = int(plan.steps[client])
    size = int(data.offsets[client + 1] - data.offsets[client])
    schedulers = schedulers_for(
        training, optimizer, round=round, steps=steps, per_epoch=-(-size // training.batch_size)
    )
    for step in range(steps):
        rows = torch.from_numpy(plan.index[step, client][plan.weight[step, client] > 0])
        optimizer.zero_grad()
        out = module(x[rows])
        F.cross_entropy(out[-1] if isinstance(out, tuple) else out, y[rows]).backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def fedavg_in_torch(module: nn.Module, data: Federation, training: Training, *, rounds: int) -> Weights:
    """All clients, every round, averaged by size in float64; integer buffers take the maximum."""
    sizes, ids = data.offsets.diff().numpy(), np.arange(data.population)
    share = torch.from_numpy(sizes / sizes.sum())
    for round in range(1, rounds + 1):
        plan = make_plan(data.indices.numpy(), sizes, ids, training=training, round=round, seed=SEED)
        finished = []
        for client in range(data.population):
            local = copy.deepcopy(module).train()
            client_loop(local, data, plan, client, training, round)
            finished.append(local.state_dict())
        averaged = {}
        for name, leaf in module.state_dict().items():
            rows = torch.stack([state[name] for state in finished])
            mean = torch.tensordot(share, rows.double(), dims=1)
            averaged[name] = mean.to(leaf.dtype) if leaf.is_floating_point() else rows.amax(0)
        module.load_state_dict(averaged)
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    return Weights(params, dict(module.named_buffers()))


def ours(engine: str, model, data: Federation, training: Training, *, rounds: int, **options) -> Weights:
    return federate(
        method=fedavg(), model=model, federation=data, training=training, rounds=rounds, cohort=data.population,
        seed=SEED, engine=engine, device="cpu", evaluate_every=99, engine_options=options,
    ).weights  # fmt: skip


def theirs(net: str, data: Federation, training: Training, *, rounds: int) -> Weights:
    module = MODULES[net]()
    start = network(net).init(seed_for(SEED, "model"))
    module.load_state_dict({**start.params, **start.buffers})
    return fedavg_in_torch(module, data, training, rounds=rounds)


def compare(engine: str, net: str, training: Training, *, sizes=UNEVEN, rounds: int = 2) -> None:
    data = federation(sizes, images=reads_images(net))
    found = ours(engine, network(net), data, training, rounds=rounds)
    start = network(net).init(seed_for(SEED, "model"))
    moved = max(float((found.params[name] - leaf).abs().max()) for name, leaf in start.params.items())
    assert moved > 1e-3, "a run that moves nothing proves nothing"
    assert_close(found, theirs(net, data, training, rounds=rounds))


MOMENTUM = Training(batch_size=4, epochs=2, lr=0.02, momentum=0.9)
ADAM = Training(batch_size=4, epochs=2, lr=2e-3, optimizer="adam")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("net", ["mlp", "cnn", "norm", "convnorm"])
@pytest.mark.parametrize("training", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_fedavg_equals_a_plain_pytorch_loop(engine, net, training):
    compare(engine, net, training, sizes=EVEN if "norm" in net else UNEVEN)


@pytest.mark.parametrize("engine", first_quick(ENGINES))
@pytest.mark.parametrize(
    "training",
    [
        Training(batch_size=4, epochs=2, lr=0.05),
        Training(batch_size=4, epochs=2, lr=0.05, momentum=0.9, nesterov=True),
        Training(batch_size=4, epochs=2, lr=0.05, momentum=0.5, weight_decay=0.05),
        Training(batch_size=4, epochs=2, lr=5e-3, optimizer="adam", weight_decay=0.05),
        Training(batch_size=4, epochs=2, lr=5e-3, optimizer="adamw", weight_decay=0.05),
        Training(batch_size=4, epochs=2, lr=0.1, momentum=0.9, clip=0.1),
        Training(batch_size=4, epochs=2, lr=5e-3, optimizer="adam", clip=0.1),
        Training(batch_size=4, epochs=2, lr=0.1, lr_decay=0.5),
        Training(batch_size=4, epochs=3, lr=0.1, lr_epoch_decay=0.5),
        Training(batch_size=4, epochs=3, lr=0.1, momentum=0.9, lr_schedule="cosine"),
        Training(batch_size=4, epochs=3, lr=5e-3, optimizer="adam", lr_schedule="cosine"),
        Training(batch_size=4, steps=7, lr=0.05, momentum=0.9),
        Training(batch_size=64, epochs=3, lr=0.1),
        Training(batch_size=1, epochs=1, lr=0.02),
    ],
    ids=[
        "sgd", "nesterov", "weight-decay", "adam-decay", "adamw", "clip", "adam-clip", "lr-decay", "epoch-decay",
        "cosine", "adam-cosine", "steps", "whole-data", "one-by-one",
    ],
)  # fmt: skip
def test_every_way_to_train_is_that_of_torch(engine, training):
    compare(engine, "mlp", training, rounds=3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("net", ["mlp", "norm"])
@pytest.mark.parametrize("training", [replace(MOMENTUM, lr_schedule="cosine"), ADAM], ids=["momentum", "adam"])
def test_in_float64_a_run_equals_torchs_to_twelve_digits(engine, net, training):
    """Weights, inputs and learning rates: one of them in float32 would leave eight."""
    data, model = federation(EVEN), network(net)
    module, start = MODULES[net](), model.init(seed_for(SEED, "model"))
    module.load_state_dict({**start.params, **start.buffers})
    found = ours(engine, model, data, training, rounds=2, precision="float64")
    assert_close(found, fedavg_in_torch(module.double(), data, training, rounds=2), tolerance=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_papers_cnn_equals_a_plain_pytorch_loop(engine):
    data = federation((5, 8), images=True)
    training = Training(batch_size=4, lr=0.02, momentum=0.9)
    model = build_model("cnn", input_shape=IMAGE, classes=CLASSES)
    module = cnn(IMAGE, CLASSES)
    start = model.init(seed_for(SEED, "model"))
    module.load_state_dict({**start.params, **start.buffers})
    assert_close(ours(engine, model, data, training, rounds=2), fedavg_in_torch(module, data, training, rounds=2))


@torch.no_grad()
def losses_on(module: nn.Module, data: Federation, plan, client: int) -> torch.Tensor:
    batches = [
        torch.from_numpy(plan.index[step, client][plan.weight[step, client] > 0])
        for step in range(int(plan.steps[client]))
    ]
    return torch.stack([F.cross_entropy(module(data.train.x[rows]), data.train.y[rows]) for rows in batches])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_reported_loss_is_the_mean_over_the_steps_before_each_step(engine):
    """With rate zero nothing moves, so it is the mean over batches of the start model's loss."""
    data, training = federation(), Training(batch_size=4, epochs=2, lr=0.0)
    runner = engine_for(engine, "mlp", data)
    start = runner.model.init(3)
    loss = train(runner, training, start=start).uploads.loss
    sizes = data.offsets.diff().numpy()
    plan = make_plan(data.indices.numpy(), sizes, np.arange(5), training=training, round=1, seed=7)
    module = MODULES["mlp"]()
    module.load_state_dict(start.params)
    for client in range(5):
        wanted = float(losses_on(module, data, plan, client).mean())
        assert float(loss[client]) == pytest.approx(wanted, rel=1e-5)
