"""Which engine is chosen, and what a mistake is told."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_cases import engine_for, federation, network, paper_cnn, train
from quick import EITHER_ENGINE

from fedstill.core.errors import FedstillError
from fedstill.core.types import Training, Traits
from fedstill.engine import ENGINES, PRECISIONS, _stacked, build_engine, choose_device
from fedstill.models import build_model


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
