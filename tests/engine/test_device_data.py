from __future__ import annotations

import colorsys
from itertools import permutations

import numpy as np
import pytest
import torch
from engine_cases import MEAN, STD, dataset
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import bits as draw_bits
from fedstill.core.seeds import uniform, uniforms
from fedstill.core.types import Dataset
from fedstill.engine import device_data as feed_module
from fedstill.engine.device_data import (
    ATTEMPTS,
    AUGMENTATIONS,
    Boxes,
    Feed,
    Strength,
    _blended,
    _orders,
    check_augmentations,
    cutout,
    gather_augmented,
    grey_of,
    largest_box,
    random_boxes,
    random_views,
    recoloured,
    resized_crops,
    shifted_hue,
)

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


# Two random views of an image: each operation against a slow formula, and what holds for all draws.


OFF = Strength(area=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, jitter=0.0, grey=0.0)


def noise_images(count, channels=3, height=9, width=7, seed=0):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(seed))


def words(count, seed=0):
    return torch.from_numpy(draw_bits(seed, np.arange(count)).view(np.int64))


def views_of(data, bits, strength=None, **how):
    index = torch.arange(len(bits)) % len(data)
    return random_views(data, index, bits, lambda x: x, torch.float32, strength or Strength(), **how)


def slow_resized_crop(image, top, left, height, width):
    """Every pixel on its own: bilinear between the four centres around it, all of them inside the crop."""
    crop = image[:, top : top + height, left : left + width]
    found = np.empty_like(image)
    rows, columns = image.shape[1:]
    for i in range(rows):
        for j in range(columns):
            y = min(max((i + 0.5) * height / rows - 0.5, 0.0), height - 1.0)
            x = min(max((j + 0.5) * width / columns - 0.5, 0.0), width - 1.0)
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            upper = crop[:, y0, x0] * (1 - (x - x0)) + crop[:, y0, x1] * (x - x0)
            lower = crop[:, y1, x0] * (1 - (x - x0)) + crop[:, y1, x1] * (x - x0)
            found[:, i, j] = upper * (1 - (y - y0)) + lower * (y - y0)
    return found


@given(st.data())
def test_a_crop_is_stretched_to_the_image_and_perhaps_mirrored(data):
    x = noise_images(3)
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    top, left = data.draw(st.integers(0, 9 - height)), data.draw(st.integers(0, 7 - width))
    mirrored, which = data.draw(st.booleans()), data.draw(st.integers(0, 2))
    box = Boxes(*(torch.tensor([[value]]) for value in (top, left, height, width)))
    found = resized_crops(x, torch.tensor([which]), box, torch.tensor([[mirrored]]), torch.float32)[0, 0]
    wanted = slow_resized_crop(x[which].double().numpy(), top, left, height, width)
    wanted = wanted[:, :, ::-1] if mirrored else wanted
    assert np.abs(found.numpy() - wanted).max() < 1e-6


def test_the_hue_turns_as_the_standard_library_turns_it():
    x = noise_images(2)
    x[0, :, 0, 0] = 0.4  # grey has no hue
    x[0, :, 0, 1] = torch.tensor([0.5, 0.5, 0.1])  # two largest channels
    for shift in (-0.1, 0.03, 0.1):
        found = shifted_hue(x, torch.tensor(shift))
        for i, row, column in [(0, 0, 0), (0, 0, 1), *((1, i, j) for i in range(9) for j in range(7))]:
            h, s, v = colorsys.rgb_to_hsv(*x[i, :, row, column].double().tolist())
            wanted = colorsys.hsv_to_rgb((h + shift) % 1.0, s, v)
            assert found[i, :, row, column].tolist() == pytest.approx(wanted, abs=1e-5)
    assert torch.equal(shifted_hue(x, torch.tensor(0.0)), x)


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.4])
def test_brightness_contrast_and_saturation_blend_with_black_the_mean_grey_and_the_grey_image(factor):
    x = noise_images(2)
    weights = np.array([0.2989, 0.587, 0.114])
    pixels = x.double().numpy()
    grey = np.einsum("c,bchw->bhw", weights, pixels)[:, None]
    bases = [0.0 * pixels, grey.mean((1, 2, 3), keepdims=True), grey]
    for kind, base in enumerate(bases):
        factors = [torch.full((2, 1, 1, 1), factor if k == kind else 9.0) for k in range(3)]
        found = _blended(x, torch.full((2, 1, 1, 1), float(kind)), factors)
        wanted = np.clip(factor * pixels + (1 - factor) * base, 0.0, 1.0)
        assert np.abs(found.numpy() - wanted).max() < 1e-6
    assert np.abs(grey_of(x).numpy() - grey).max() < 1e-6


def test_the_three_blends_come_in_all_six_orders():
    found = {tuple(int(kind) for kind in _orders(torch.tensor((k + 0.5) / 6.0))) for k in range(6)}
    assert found == set(permutations(range(3)))


def test_draws_decide_whether_colours_change_and_by_how_much():
    """Draws: jitter, brightness, contrast, saturation, hue, order, grey; one half is no change."""
    x = noise_images(1)
    still = [0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.9]
    assert torch.equal(recoloured(x, torch.tensor([still])), x)
    dark = [0.0, 0.0, *still[2:]]  # brightness 1 - 0.4
    assert torch.allclose(recoloured(x, torch.tensor([dark])), 0.6 * x)
    assert torch.equal(recoloured(x, torch.tensor([[0.85, *dark[1:]]])), x)  # jitter has probability 0.8
    grey = recoloured(x, torch.tensor([[*still[:-1], 0.1]]))
    assert torch.allclose(grey, grey_of(x).expand_as(x))


def test_with_everything_off_a_view_is_its_image_bit_for_bit():
    x = noise_images(4, height=8, width=8)
    found = views_of(x, words(4), OFF)
    assert torch.equal(found, x[:, None].expand(4, 2, 3, 8, 8))


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 8, 8), (3, 32, 32), (1, 28, 20), (3, 96, 96)])
def test_views_have_the_form_of_their_image_stay_on_its_scale_and_differ(channels, height, width):
    x = noise_images(3, channels, height, width)
    found = views_of(x, words(6))
    assert found.shape == (6, 2, channels, height, width)
    assert float(found.min()) >= 0.0
    assert float(found.max()) <= 1.0 + 1e-6
    different = (found.unsqueeze(0) - found.unsqueeze(1)).abs().amax((2, 3, 4, 5)) > 1e-3
    assert bool((different | torch.eye(6, dtype=torch.bool)).all())  # a sample that comes twice has other views
    assert bool(((found[:, 0] - found[:, 1]).abs().amax((1, 2, 3)) > 1e-3).all())


def test_a_view_is_a_function_of_the_image_and_its_bits_alone():
    x, bits = noise_images(5), words(5)
    whole = views_of(x, bits)
    order = torch.tensor([3, 0, 4])
    some = random_views(x, order, bits[order], lambda part: part, torch.float32)
    assert torch.equal(some, whole[order])
    assert not torch.equal(views_of(x, words(5, seed=1)), whole)


def test_draws_of_many_seeds_are_those_of_each():
    seeds = words(3)
    assert torch.equal(uniforms(seeds, 4), torch.stack([uniform(seed, (4,)) for seed in seeds]))


@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 2**32))
def test_every_box_lies_in_the_image(height, width, seed):
    draws = uniforms(words(50, seed=seed), 2 * ATTEMPTS + 2)
    box = random_boxes(
        draws[:, :ATTEMPTS], draws[:, ATTEMPTS:-2], draws[:, -2], draws[:, -1], (height, width), Strength()
    )
    assert bool((box.height >= 1).all())
    assert bool((box.width >= 1).all())
    assert bool(((box.top >= 0) & (box.top + box.height <= height)).all())
    assert bool(((box.left >= 0) & (box.left + box.width <= width)).all())


def test_boxes_spread_over_sizes_and_places_as_asked():
    draws = uniforms(words(20_000), 2 * ATTEMPTS + 2)
    box = random_boxes(draws[:, :ATTEMPTS], draws[:, ATTEMPTS:-2], draws[:, -2], draws[:, -1], (96, 96), Strength())
    area = (box.height * box.width).double() / 96**2
    assert float(area.min()) == pytest.approx(0.08, abs=0.005)
    # of a first try at area a the ratio r fits if max(r, 1 / r) <= 1 / a, so large areas are rarer than small ones
    generator = np.random.default_rng(0)
    a, r = generator.uniform(0.08, 1, 100_000), np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3), 100_000))
    fits = np.maximum(r, 1 / r) * a <= 1.0
    assert float(area.mean()) == pytest.approx(a[fits].mean(), abs=0.01)
    ratio = box.width / box.height
    assert 0.7 < float(ratio.min()) < 0.78
    assert 1.28 < float(ratio.max()) < 1.43
    free = 96 - box.height
    assert float((box.top[free > 0] / free[free > 0]).mean()) == pytest.approx(0.5, abs=0.01)


def test_where_no_try_fits_the_box_is_the_largest_in_the_middle():
    assert largest_box((8, 8), Strength()) == (8, 8)
    assert largest_box((20, 4), Strength()) == (5, 4)  # 4 / 0.75
    assert largest_box((3, 30), Strength()) == (3, 4)  # 3 * 4 / 3
    always_wide = torch.full((1, ATTEMPTS), 0.999), torch.full((1, ATTEMPTS), 0.999)
    place = torch.zeros(1), torch.zeros(1)
    assert [int(part) for part in random_boxes(*always_wide, *place, (20, 4), Strength())] == [7, 0, 5, 4]


def test_about_half_are_mirrored_and_a_fifth_grey():
    x = torch.zeros(1, 3, 8, 8)
    x[:, 0, :, :4] = 1.0  # red on the left
    found = views_of(x, words(4000), Strength(area=(1.0, 1.0), ratio=(1.0, 1.0), jitter=0.0), count=1)[:, 0]
    mirrored = found[:, 0, 0, 0] < found[:, 0, 0, 7]
    grey = (found[:, 0] - found[:, 1]).abs().amax((1, 2)) < 1e-6
    assert float(mirrored.double().mean()) == pytest.approx(0.5, abs=0.03)
    assert float(grey.double().mean()) == pytest.approx(0.2, abs=0.03)


def feed(x, device="cpu"):
    return Feed(
        x,
        torch.zeros(len(x)),
        Dataset("d", x, torch.zeros(len(x)), ("a",), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)),
        torch.device(device),
        torch.float32,
    )


def test_a_batch_holds_both_views_side_by_side_normalised(monkeypatch):
    x = (255 * noise_images(4, height=8, width=8)).to(torch.uint8)
    index, bits = torch.tensor([[2, 0], [1, 1]]), words(4).reshape(2, 2)
    found, _ = feed(x).batch(index, bits, ("views",))
    assert found.shape == (2, 2, 6, 8, 8)
    plain = random_views(x.float() / 255.0, index.reshape(-1), bits.reshape(-1), lambda part: part, torch.float32)
    mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    wanted = ((plain - mean) / std).reshape(2, 2, 6, 8, 8)
    assert float((found - wanted).abs().max()) < 1e-5
    monkeypatch.setattr(feed_module, "CPU_FLOAT_BYTES", 0)  # bytes stay bytes
    kept = feed(x)
    assert kept.x.dtype == torch.uint8
    assert float((kept.batch(index, bits, ("views",))[0] - wanted).abs().max()) < 1e-5


def test_views_are_for_a_server_only_and_for_images_only():
    check_augmentations(("views",), (3, 8, 8), "method.augment")
    with pytest.raises(FedstillError, match="two images of one"):
        check_augmentations(("views",), (3, 8, 8))
    with pytest.raises(FedstillError, match="need images"):
        check_augmentations(("views",), (5,), "method.augment")
    with pytest.raises(FedstillError, match="views"):  # it stands alone
        check_augmentations(("views", "crop"), (3, 8, 8), "method.augment")


@pytest.mark.gpu
def test_a_gpu_makes_the_same_views_also_from_a_captured_graph():
    x, bits = (255 * noise_images(64, height=32, width=32)).to(torch.uint8), words(64)
    index = torch.arange(64)
    wanted, _ = feed(x).batch(index, bits, ("views",))
    there = feed(x, "cuda")
    index, bits = index.cuda(), bits.cuda()
    assert float((there.batch(index, bits, ("views",))[0].cpu() - wanted).abs().max()) < 1e-4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = there.batch(index, bits, ("views",))
    graph.replay()
    torch.cuda.synchronize()
    assert float((found.cpu() - wanted).abs().max()) < 1e-4
