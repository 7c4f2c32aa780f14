from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import MEAN, STD, dataset
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import bits as draw_bits
from fedstill.core.types import Dataset
from fedstill.engine import device_data as feed_module
from fedstill.engine.device_data import AUGMENTATIONS, Feed, check_augmentations, cutout, gather_augmented

WORDS = st.integers(-(2**63), 2**63 - 1)
BLANK = torch.tensor([-1.0, -2.0, -3.0]).reshape(1, 3, 1, 1)


def images(count: int, height: int = 8, width: int = 9, channels: int = 3) -> torch.Tensor:
    """Every pixel has a value of its own."""
    return torch.arange(1.0, count * channels * height * width + 1).reshape(count, channels, height, width)


def random_bits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(draw_bits(seed, np.arange(count)).view(np.int64))


def word(*, dy: int = 4, dx: int = 4, flip: int = 0, row: int = 0, column: int = 0) -> torch.Tensor:
    """64 bits that ask for exactly this."""
    return torch.tensor([dy | dx << 12 | flip << 24 | row << 32 | column << 44])


def slow_crop_and_flip(image: np.ndarray, bits: int, names: tuple[str, ...], blank: np.ndarray) -> np.ndarray:
    """Pad by four pixels of `blank`, cut at (dy, dx), then mirror: one image, as torchvision does it."""
    channels, height, width = image.shape
    if "crop" in names:
        padded = np.empty((channels, height + 8, width + 8), image.dtype)
        padded[:] = blank.reshape(channels, 1, 1)
        padded[:, 4:-4, 4:-4] = image
        dy, dx = (bits & 0xFFF) % 9, (bits >> 12 & 0xFFF) % 9
        image = padded[:, dy : dy + height, dx : dx + width]
    return image[:, :, ::-1] if "flip" in names and (bits >> 24) & 1 else image


def slow_cutout(image: np.ndarray, bits: int) -> np.ndarray:
    _, height, width = image.shape
    side = min(16, height // 2, width // 2)
    row, column = (bits >> 32 & 0xFFF) % height, (bits >> 44 & 0xFFF) % width
    hole = image.copy()
    hole[:, max(0, row - side // 2) : row + side // 2, max(0, column - side // 2) : column + side // 2] = 0.0
    return hole


@given(st.lists(WORDS, min_size=1, max_size=5), st.sampled_from([("crop",), ("flip",), ("crop", "flip")]))
def test_crop_and_flip_are_those_of_a_slow_loop_over_images(words, names):
    data = images(7)
    index = torch.tensor([(3 * i + 1) % 7 for i in range(len(words))])
    found = gather_augmented(data, index, torch.tensor(words), names, BLANK)
    for i, bits in enumerate(words):
        wanted = slow_crop_and_flip(data[index[i]].numpy(), bits, names, BLANK.numpy())
        np.testing.assert_array_equal(found[i].numpy(), wanted)


@given(st.lists(WORDS, min_size=1, max_size=4), st.sampled_from([(8, 9), (32, 32), (40, 36), (5, 4)]))
def test_cutout_is_that_of_a_slow_loop_over_images(words, shape):
    data = images(len(words), *shape, channels=2)
    found = cutout(data, torch.tensor(words))
    for i, bits in enumerate(words):
        np.testing.assert_array_equal(found[i].numpy(), slow_cutout(data[i].numpy(), bits))


def test_the_middle_crop_without_a_flip_is_the_image_itself():
    data = images(2)
    assert torch.equal(gather_augmented(data, torch.tensor([1]), word(), ("crop", "flip"), BLANK), data[1:])


def test_a_corner_crop_shows_the_border_and_a_flip_mirrors_what_was_cropped():
    data = images(1, 8, 8)
    corner = gather_augmented(data, torch.tensor([0]), word(dy=0, dx=0), ("crop", "flip"), BLANK)
    assert torch.equal(corner[:, :, 4:, 4:], data[:, :, :4, :4])
    assert torch.equal(corner[:, :, :4], BLANK.expand(1, 3, 4, 8))
    assert torch.equal(corner[:, :, :, :4], BLANK.expand(1, 3, 8, 4))
    mirrored = gather_augmented(data, torch.tensor([0]), word(dy=0, dx=0, flip=1), ("crop", "flip"), BLANK)
    assert torch.equal(mirrored, corner.flip(3))


def test_images_of_a_batch_do_not_depend_on_each_other():
    data, bits, index = images(6), random_bits(12), torch.arange(12) % 6
    names = ("crop", "flip")
    together = cutout(gather_augmented(data, index, bits, names, BLANK), bits)
    for i in range(12):
        here = slice(i, i + 1)
        alone = cutout(gather_augmented(data, index[here], bits[here], names, BLANK), bits[here])
        assert torch.equal(together[here], alone)


def offsets_and_flips(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read dy, dx and the mirroring back off the pixels of cropped and flipped images."""
    data = images(1, 10, 10, channels=1)
    found = gather_augmented(
        data, torch.zeros(count, dtype=torch.int64), random_bits(count), ("crop", "flip"), torch.zeros(1, 1, 1, 1)
    )[:, 0].numpy()
    middle, right = found[:, 5, 4].astype(int) - 1, found[:, 5, 5].astype(int) - 1
    flipped = right < middle
    dy = middle // 10 - 5 + 4
    column = np.where(flipped, 5, 4)  # where this pixel was before the mirror
    dx = middle % 10 - column + 4
    return dy, dx, flipped


def test_crop_offsets_are_uniform_from_0_to_8_and_half_of_the_images_are_mirrored():
    """Chi-square with 8 degrees of freedom: 1 in 10,000 is 31.8; a share of 20,000 has a standard error of 0.0035."""
    count = 20_000
    dy, dx, flipped = offsets_and_flips(count)
    for offset in (dy, dx):
        assert set(offset) == set(range(9))
        assert ((np.bincount(offset) - count / 9) ** 2 / (count / 9)).sum() < 31.8
    assert abs(flipped.mean() - 0.5) < 0.014
    assert abs(np.corrcoef([dy, dx, flipped])[np.triu_indices(3, 1)]).max() < 4 / count**0.5


def test_cutout_centres_reach_every_pixel_so_that_squares_hang_over_the_border():
    ones = torch.ones(4000, 1, 8, 8)
    holes = (cutout(ones, random_bits(4000)) == 0).sum((1, 2, 3))
    assert int(holes.max()) == 16
    assert int(holes.min()) == 4  # centre in the corner: two of four rows and columns are left


def test_shapes_dtypes_and_data_are_kept():
    data = images(3).to(torch.uint8)
    before = data.clone()
    found = gather_augmented(data, torch.tensor([2, 0]), random_bits(2), ("crop",), torch.zeros((), dtype=torch.uint8))
    assert found.dtype == torch.uint8
    assert found.shape == (2, 3, 8, 9)
    assert torch.equal(data, before)


def test_mistakes_are_one_line():
    with pytest.raises(FedstillError, match="unknown augmentation 'flips'; did you mean 'flip'"):
        check_augmentations(("crop", "flips"), (3, 8, 8))
    with pytest.raises(FedstillError, match=r"flip need images, but samples have shape \(20,\)"):
        check_augmentations(("flip",), (20,))
    check_augmentations(AUGMENTATIONS, (3, 8, 8))
    check_augmentations((), (20,))


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
