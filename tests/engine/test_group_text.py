"""Text and recurrent layers in both engines: ids reach the network as they are, clients at once equal one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import UNEVEN, assert_close, assert_same_bits, train

from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.tree import rows
from fedstill.core.types import Dataset, Federation, Model, Training
from fedstill.engine import build_engine
from fedstill.engine.device_data import Feed
from fedstill.models import build_model

LETTERS, WINDOW = 7, 5


def texts(sizes=UNEVEN, *, dtype: torch.dtype = torch.uint8) -> Federation:
    generator = numpy_generator(seed_for(0, "text"))
    x = torch.from_numpy(generator.integers(0, LETTERS, (sum(sizes), WINDOW))).to(dtype)
    y = (x.long().sum(1) + 1) % LETTERS
    data = Dataset("text", x, y, tuple("abcdefg"))
    return Federation(data, data, torch.arange(len(y)), torch.tensor([0, *np.cumsum(sizes)]))


def network() -> Model:
    return build_model("char_lstm", input_shape=(WINDOW,), classes=LETTERS, embedding=3, hidden=6, init="torch")


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_batched_equals_looped_on_clients_of_different_sizes(precision, optimizer):
    training = Training(batch_size=4, epochs=2, lr=0.5 if optimizer == "sgd" else 0.05, optimizer=optimizer)
    batched, looped = (
        train(build_engine(name, "cpu", model=network(), federation=texts(), precision=precision), training).uploads
        for name in ("batched", "looped")
    )
    assert_close(batched.weights, looped.weights, tolerance=5e-6 if precision == "float32" else 1e-10)
    start = network().init(3).params
    for name in ("encoder.embedding.weight", "encoder.lstm.weight_hh_l0", "encoder.lstm.bias_ih_l1", "head.weight"):
        assert float((looped.weights.params[name].float() - start[name]).abs().max()) > 1e-4, name


def test_a_cohort_in_chunks_of_one_or_more_gives_each_client_the_same():
    training = Training(batch_size=4, lr=0.1)
    alone, together = (
        train(
            build_engine("batched", "cpu", model=network(), federation=texts(), chunk=chunk), training
        ).uploads.weights
        for chunk in (1, 5)
    )
    assert_close(alone, together, tolerance=1e-6)


def test_a_client_does_not_read_the_text_of_another():
    plain = texts((6, 6, 6))
    x = plain.train.x.clone()
    x[6:12] = 0
    data = Dataset("other", x, plain.train.y, plain.train.classes)
    other = Federation(data, plain.test, plain.indices, plain.offsets)
    one, two = (
        train(build_engine("batched", "cpu", model=network(), federation=each), Training(batch_size=4, lr=0.5))
        for each in (plain, other)
    )
    for client in (0, 2):
        assert_same_bits(rows(one.uploads.weights, client), rows(two.uploads.weights, client))
    moved = [run.uploads.weights.params["encoder.embedding.weight"][1] for run in (one, two)]
    assert not torch.allclose(*moved, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_stored_ids_reach_the_network_as_integers_without_scaling(dtype):
    data = texts(dtype=dtype).train
    feed = Feed(data.x, data.y, data, torch.device("cpu"), torch.float32)
    assert feed.x.dtype == dtype  # bytes stay bytes on the device
    x, y = feed.batch(torch.tensor([[0, 3], [2, 2]]), torch.zeros(2, 2, dtype=torch.int64), ())
    assert x.dtype == torch.int64
    assert torch.equal(x, data.x.long()[torch.tensor([[0, 3], [2, 2]])])
    assert torch.equal(y, data.y[torch.tensor([[0, 3], [2, 2]])])


def test_ids_too_many_for_a_float_copy_are_not_normalised(monkeypatch):
    monkeypatch.setattr("fedstill.engine.device_data.CPU_FLOAT_BYTES", 0)
    data = texts(dtype=torch.int64).train
    assert torch.equal(Feed(data.x, data.y, data, torch.device("cpu"), torch.float32).inputs(slice(0, 4)), data.x[:4])
