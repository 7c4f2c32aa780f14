from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import MEAN, STD, dataset

from fedstill.core.types import Dataset
from fedstill.engine import device_data as feed_module
from fedstill.engine.device_data import Feed

CPU = torch.device("cpu")


def feed_of(data: Dataset) -> Feed:
    return Feed(data.x, data.y, data, CPU, torch.float32)


def test_bytes_become_numbers_between_0_and_1_and_then_mean_and_std_per_channel():
    data = dataset(6, images=True)
    scaled = data.x.numpy().astype(np.float64) / 255.0
    wanted = (scaled - np.reshape(MEAN, (1, 3, 1, 1))) / np.reshape(STD, (1, 3, 1, 1))
    np.testing.assert_allclose(feed_of(data).inputs(torch.arange(6)).numpy(), wanted, atol=1e-6)


def test_floats_are_not_divided_by_255_and_features_may_have_their_own_scale():
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    data = Dataset("two", x, torch.tensor([0, 1]), ("a", "b"), (1.0, 2.0), (2.0, 4.0))
    assert torch.equal(feed_of(data).inputs(slice(0, 2)), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(x, torch.tensor([[1.0, 2.0], [3.0, 6.0]]))


def test_tokens_are_left_alone():
    tokens = torch.tensor([[5, 1, 7], [2, 2, 9]])
    feed = feed_of(Dataset("text", tokens, torch.tensor([0, 1]), ("a", "b")))
    assert torch.equal(feed.inputs(torch.tensor([1])), tokens[1:])
    assert feed.inputs(torch.tensor([1])).dtype == torch.int64


@pytest.mark.parametrize("augment", [(), ("crop", "flip"), ("cutout",), ("crop", "cutout")])
def test_images_too_large_for_a_float_copy_give_the_same_batches(monkeypatch, augment):
    data = dataset(6, images=True)
    index, bits = torch.tensor([[0, 5, 2], [3, 3, 1]]), torch.arange(6).reshape(2, 3) * 0x123456789AB
    wanted, _ = feed_of(data).batch(index, bits, augment)
    monkeypatch.setattr(feed_module, "CPU_FLOAT_BYTES", 0)
    lean = feed_of(data)
    assert lean.x.dtype == torch.uint8
    found, _ = lean.batch(index, bits, augment)
    assert torch.equal(found, wanted)


def test_pixels_cropped_in_are_black():
    """Black is 0 before normalisation, so (0 - mean) / std after it."""
    data = dataset(2, images=True)
    x, _ = feed_of(data).batch(torch.tensor([1]), torch.tensor([0]), ("crop",))  # dy = dx = 0: 4 rows and columns
    for channel in range(3):
        assert float(x[0, channel, 0, 0]) == pytest.approx(-MEAN[channel] / STD[channel], rel=1e-6)
    assert torch.equal(x[0, :, 4:, 4:], feed_of(data).inputs(torch.tensor([1]))[0, :, :4, :4])


def test_a_batch_keeps_the_shape_of_its_index_and_brings_the_labels():
    data = dataset(9, images=False)
    feed, index = feed_of(data), torch.tensor([[0, 8], [4, 4], [1, 2]])
    x, y = feed.batch(index, index, ())
    assert x.shape == (3, 2, 6)
    assert torch.equal(y, data.y[index])
    assert torch.equal(x[1, 0], feed.inputs(torch.tensor([4]))[0])
    soft = Feed(data.x, torch.eye(9)[:, :4], data, CPU, torch.float32)
    assert torch.equal(soft.batch(index, index, ())[1][0, 0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
