"""On a GPU: steps captured as CUDA graphs, for a cohort at once or client by client, give what the CPU gives.

Everything in strict float32. Captured steps replay the same kernels as eager ones: 1e-5 of the largest weight of a
tensor. The CPU sums in another order: 1e-4 after a few dozen steps.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_cases import (
    CLASSES,
    IMAGE,
    assert_close,
    dataset,
    engine_for,
    federation,
    in_dtype,
    network,
    paper_cnn,
    reads_images,
    train,
)
from running import federate

from fedstill.compose.combine import combine
from fedstill.core.trainer import Lesson
from fedstill.core.tree import clone, rows, stack, to_device
from fedstill.core.types import Training
from fedstill.engine import build_engine
from fedstill.local.distillation import not_true_distillation
from fedstill.local.terms import cross_entropy
from fedstill.methods import METHODS
from fedstill.models import build_model
from fedstill.server.distill.student import soft_target_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = "cuda"
ENGINES = ("batched", "looped")
SIZES = (5, 0, 9, 1, 16, 4, 12, 7, 3, 28)  # ten clients: several captured widths as they finish one by one
TRAININGS = {
    "momentum": Training(batch_size=4, epochs=2, lr=0.02, momentum=0.9, lr_decay=0.9),
    "nesterov": Training(batch_size=4, epochs=2, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": Training(batch_size=4, epochs=2, lr=1e-3, optimizer="adam"),
    "adamw-cosine": Training(batch_size=4, epochs=2, lr=1e-3, optimizer="adamw", lr_schedule="cosine", clip=0.5),
    "epoch-decay": Training(batch_size=4, epochs=2, lr=0.02, lr_epoch_decay=0.5, clip=0.5),
    "steps": Training(batch_size=4, steps=7, lr=0.02),
    "head": Training(batch_size=4, epochs=2, lr=0.02, momentum=0.9, part="head"),
}
ROUNDS = [[3, 2], [0, 4, 9, 1], list(range(10)), [7, 8], [9, 4, 6, 5, 3]]  # wider, longer, and back again


def rounds_on(engine, training: Training, *, objective=None, cohorts=ROUNDS) -> list:
    """Several rounds from different models on one engine: later ones replay what earlier ones captured."""
    objective = objective or cross_entropy()
    results = []
    for number, ids in enumerate(cohorts, 1):
        start = to_device(in_dtype(engine.model.init(number), engine.dtype), engine.device)
        trained = train(engine, training, objective=objective, start=start, ids=ids, round=number)
        results.append({"weights": trained.uploads.weights, "loss": trained.uploads.loss})
    return results


def compare(net: str, name: str, training: Training, **how) -> None:
    data = federation(SIZES, images=reads_images(net))
    options = {"device": GPU, "precision": "float32"}
    captured = rounds_on(engine_for(name, net, data, graphs=True, **options), training, **how)
    eager = rounds_on(engine_for(name, net, data, graphs=False, **options), training, **how)
    on_cpu = rounds_on(engine_for("looped", net, data), training, **how)
    for replayed, stepped, wanted in zip(captured, eager, on_cpu, strict=True):
        assert replayed["loss"].device.type == GPU
        assert_close(replayed, stepped, tolerance=1e-5)
        assert_close(replayed, wanted, tolerance=1e-4)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_every_way_to_train_is_captured_faithfully(name, training):
    compare("mlp", name, training)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("net", ["cnn", "norm", "convnorm", "drop"])
def test_every_kind_of_net_is_captured_faithfully(name, net):
    compare(net, name, TRAININGS["momentum"])


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("net", ["cnn", "convnorm"])
def test_augmented_images_are_those_of_the_cpu(name, net):
    compare(net, name, dataclasses.replace(TRAININGS["momentum"], augment=("crop", "flip", "cutout")))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("network_name", ["cnn", "resnet8"])
def test_networks_of_the_papers_give_what_the_cpu_gives(name, network_name):
    """Convolutions with kernels for many clients, and with cuDNN's."""
    data = federation((5, 9, 4), images=True)
    model = paper_cnn() if network_name == "cnn" else build_model(network_name, input_shape=IMAGE, classes=CLASSES)
    training = Training(batch_size=4, lr=0.01, momentum=0.9)
    results = [
        rounds_on(
            build_engine(kind, device, model=model, federation=data, precision="float32"),
            training,
            cohorts=[[0, 1], [2, 1, 0]],
        )
        for kind, device in ((name, GPU), ("looped", "cpu"))
    ]
    for found, wanted in zip(*results, strict=True):
        assert_close(found, wanted, tolerance=1e-4)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_in_float64_captured_steps_give_what_the_cpu_gives_to_twelve_digits(name, net):
    data = federation(SIZES, images=reads_images(net))
    on_gpu = rounds_on(engine_for(name, net, data, device=GPU, precision="float64"), TRAININGS["momentum"])
    on_cpu = rounds_on(engine_for("looped", net, data, precision="float64"), TRAININGS["momentum"])
    for found, wanted in zip(on_gpu, on_cpu, strict=True):
        assert_close(found, wanted, tolerance=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_the_size_of_a_chunk_changes_nothing(chunk):
    data, options = federation(SIZES), {"device": GPU, "precision": "float32"}
    found = rounds_on(engine_for("batched", "norm", data, chunk=chunk, **options), TRAININGS["momentum"])
    wanted = rounds_on(engine_for("looped", "norm", data), TRAININGS["momentum"])
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance=1e-4)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("training", [TRAININGS["momentum"], Training(batch_size=4, steps=2, lr=0.02)])
def test_remembered_teachers_are_those_of_this_round(name, training):
    """Two steps: for small cohorts all data are seen, for large ones not; a captured step must not notice."""
    compare("mlp", name, training, objective=combine(cross_entropy(), not_true_distillation(2.0)))


@pytest.mark.parametrize("name", ENGINES)
def test_fitting_follows_new_targets_and_new_kinds_of_targets(name):
    x = dataset(21, images=False).x
    soft = [
        torch.softmax(3 * torch.randn(21, CLASSES, generator=torch.Generator().manual_seed(seed)), 1)
        for seed in range(3)
    ]
    hard = torch.arange(21) % CLASSES
    training = Training(steps=9, batch_size=8, lr=0.05, momentum=0.9, lr_schedule="cosine", clip=0.5)
    tasks = [(soft_target_loss(), soft[0]), (cross_entropy(), hard)]
    tasks += [(tasks[0][0], soft[1]), (tasks[1][0], hard.flip(0)), (tasks[0][0], soft[2])]
    both = []
    for kind, device in ((name, GPU), ("looped", "cpu")):
        engine = engine_for(kind, "mlp", device=device, precision="float32")
        stored = x.to(engine.device)
        both.append(
            [
                engine.fit(
                    Lesson(objective, stored, y.to(engine.device), training),
                    to_device(network().init(number), engine.device),
                    number,
                ).weights
                for number, (objective, y) in enumerate(tasks)
            ]
        )
    for found, wanted in zip(*both, strict=True):
        assert_close(found, wanted, tolerance=1e-4)


@pytest.mark.parametrize("net", ["mlp", "cnn", "norm"])
def test_fitting_some_rows_under_watch_gives_what_the_cpu_gives(net):
    """Different rows and lengths in turn; the watcher ends the second one early and sees the same weights."""
    x = dataset(21, images=reads_images(net)).x
    y = torch.softmax(torch.randn(21, CLASSES, generator=torch.Generator().manual_seed(3)), 1)
    training = Training(epochs=3, batch_size=4, lr=0.02, optimizer="adam", lr_epoch_decay=0.9)
    pieces = [torch.arange(0, 21, 2), torch.arange(5, 21), torch.tensor([3])]
    both = []
    for device in (GPU, "cpu"):
        engine, objective, found = engine_for("looped", net, device=device, precision="float32"), soft_target_loss(), []
        stored, targets = x.to(engine.device), y.to(engine.device)
        for number, piece in enumerate(pieces):
            seen = []

            def watch(done, now, seen=seen, number=number):
                if done % 2:
                    return False
                seen.append(clone(now))
                return number == 1 and done == 4

            start = to_device(engine.model.init(number), engine.device)
            lesson = Lesson(objective, stored, targets, training, piece.to(engine.device))
            found += [engine.fit(lesson, start, number, watch=watch).weights, *seen]
        both.append(found)
    assert len(both[0]) == len(both[1]) == 3 + 4 + 2 + 1
    for one, other in zip(*both, strict=True):
        assert_close(one, other, tolerance=1e-3 if net == "norm" else 1e-4)


@pytest.mark.parametrize("net", ["mlp", "cnn", "norm", "drop"])
def test_teachers_and_their_statistics_are_those_of_the_cpu(net):
    x = dataset(37, images=reads_images(net)).x
    both = []
    for device in (GPU, "cpu"):
        engine = engine_for("batched", net, device=device, precision="float32")
        teachers = to_device(stack([engine.model.init(seed) for seed in range(19)]), engine.device)
        stored = x.to(engine.device)
        one = rows(teachers, 4)
        both.append({
            "together": engine.outputs(teachers, stored, stacked=True),
            "training": engine.outputs(teachers, stored, stacked=True, batch=8, seed=3),
            "statistics": engine.batch_statistics(one, stored, 8),
        })  # fmt: skip
    assert_close(both[0], both[1], tolerance=1e-4)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn", "fedntd"])
def test_a_run_on_the_gpu_is_the_run_on_the_cpu(name, method):
    """States, broadcasts and cached teachers over several rounds."""
    data, training = federation(SIZES), Training(batch_size=4, epochs=2, lr=0.02)
    found, wanted = (
        federate(
            method=METHODS[method](), model=network(), federation=data, training=training, rounds=4, cohort=4,
            engine=kind, device=device, engine_options={"precision": "float32"},
        ).weights
        for kind, device in ((name, GPU), ("looped", "cpu"))
    )  # fmt: skip
    assert_close(found, wanted, tolerance=1e-4)
