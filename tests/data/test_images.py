"""Encoded images: pixel for pixel as the file holds them, in one size and one colour for the whole set."""

from __future__ import annotations

import io
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import image_folder, pictures, png
from PIL import Image

from fedstill.core.errors import FedstillError
from fedstill.data import load
from fedstill.data.images import CHUNK, decode_images, fit_images


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def test_every_image_is_in_its_row_over_many_tasks() -> None:
    count = 2 * CHUNK + 7
    pixels = pictures(count, channels=1, height=2, width=3)
    x = decode_images([png(p) for p in pixels], where="a set")[0]
    assert x.dtype == np.uint8
    assert np.array_equal(x, pixels[:, None])


@pytest.mark.parametrize("grey_rows", [[0], [CHUNK - 1], list(range(CHUNK))])
def test_a_grey_image_among_coloured_ones_is_repeated_over_the_channels(grey_rows: list[int]) -> None:
    colour, grey = pictures(CHUNK + 2), pictures(CHUNK + 2, channels=1, seed=1)
    blobs = [png(grey[i] if i in grey_rows else colour[i]) for i in range(CHUNK + 2)]
    x, _ = decode_images(blobs, where="a set")
    assert x.shape == (CHUNK + 2, 3, 5, 4)
    for row in (0, CHUNK - 1, CHUNK, CHUNK + 1):
        expected = np.stack([grey[row]] * 3) if row in grey_rows else colour[row].transpose(2, 0, 1)
        assert np.array_equal(x[row], expected)


def test_palettes_alpha_bits_and_sixteen_bits_become_eight_bit_grey_or_rgb() -> None:
    colour = Image.fromarray(pictures(1)[0])
    alpha = colour.copy()
    alpha.putalpha(7)
    palette = colour.quantize(8)
    clear = palette.copy()
    for image in (alpha, palette, clear):
        options = {"transparency": bytes([0, 255, 9])} if image is clear else {}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x, _ = decode_images([encoded(image, **options)], where="a set")
        reference = colour if image is alpha else palette.convert("RGB")
        assert np.array_equal(x[0], np.asarray(reference).transpose(2, 0, 1))
    bits = np.array([[0, 1], [1, 0]], bool)
    assert decode_images([encoded(Image.fromarray(bits))], where="a set")[0].tolist() == [[[[0, 255], [255, 0]]]]
    deep = np.array([[0, 256], [65535, 32767]], np.uint16)
    assert decode_images([encoded(Image.fromarray(deep))], where="a set")[0].tolist() == [[[[0, 1], [255, 127]]]]


def test_a_photo_is_turned_upright() -> None:
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 255  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned: the left side is the top
    x, _ = decode_images([encoded(Image.fromarray(pixels), "JPEG", exif=exif.tobytes(), quality=95)], where="a set")
    assert x.shape == (1, 3, 16, 8)
    assert x[0, 0, :6].min() > 200
    assert x[0, 0, 10:].max() < 50


def test_mixed_sizes_ask_for_one_and_are_cut_to_it(tmp_path: Path) -> None:
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, 2:6] = 200  # only the centred square
    blobs = [png(wide), png(np.full((2, 2, 3), 100, np.uint8))]
    with pytest.raises(FedstillError, match=r"data.size.*2x2 to 8x4"):
        decode_images(blobs, where="a set")
    x, _ = decode_images(blobs, where="a set", shape=(2, 2))
    assert x.shape == (2, 3, 2, 2)
    assert (x[0] == 200).all()
    assert (x[1] == 100).all()
    image_folder(tmp_path / "zoo", {"a": 5})
    image_folder(tmp_path / "zoo" / "more", {"b": 5}, height=9)
    assert load(tmp_path / "zoo", size=3).train.x.shape[1:] == (3, 3, 3)


@pytest.mark.parametrize(("height", "width"), [(6, 9), (4, 12), (20, 6)])
def test_the_centre_in_the_wanted_proportions_is_kept_and_nothing_beside_it(height: int, width: int) -> None:
    """Wanted 2 x 3: of 6 x 9 all, of 4 x 12 the middle 6 columns, of 20 x 6 the middle 4 rows."""
    rows, columns = {(6, 9): (6, 9), (4, 12): (4, 6), (20, 6): (4, 6)}[height, width]
    pixels = np.zeros((height, width), np.uint8)
    top, left = (height - rows) // 2, (width - columns) // 2
    pixels[top : top + rows, left : left + columns] = 90
    x, _ = decode_images([png(pixels)], where="a set", shape=(2, 3))
    assert x.shape == (1, 1, 2, 3)
    assert (x == 90).all()
    as_array = fit_images(torch.from_numpy(pixels)[None, None], 2, 3)
    assert (as_array == 90).all()
    assert as_array.shape == (1, 1, 2, 3)


def test_an_image_of_the_wanted_size_is_not_touched() -> None:
    pixels = pictures(3)
    wanted = pixels.transpose(0, 3, 1, 2)
    assert np.array_equal(decode_images([png(p) for p in pixels], where="a set", shape=(5, 4))[0], wanted)
    assert np.array_equal(fit_images(torch.from_numpy(wanted.copy()), 5, 4), wanted)


def test_images_that_cannot_be_read_are_named_and_hold_zeros_over_many_tasks() -> None:
    count = 2 * CHUNK + 7
    pixels = pictures(count, channels=1, height=2, width=3)
    blobs = [png(p) for p in pixels]
    broken = [0, CHUNK - 1, CHUNK, count - 1]
    for row in broken:
        blobs[row] = blobs[row][:40]
    images, unreadable = decode_images(blobs, where="a set", skip=True)
    assert unreadable == tuple(broken)
    assert not images[broken].any()
    assert np.array_equal(np.delete(images, broken, axis=0), np.delete(pixels, broken, axis=0)[:, None])
    with pytest.raises(FedstillError, match="no readable image"):
        decode_images([b"", b"?"], where="a set", skip=True)
    images, _ = decode_images([b""] * CHUNK + blobs[1:2], where="a set", skip=True)
    assert np.array_equal(images[CHUNK:], pixels[1:2, None])


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    good = png(pictures(1, height=40, width=40)[0])
    for broken in (b"", b"no image", good[: len(good) // 2]):
        with pytest.raises(FedstillError, match="row 1 of a set is not a readable image") as error:
            decode_images([good, broken], where="a set")
        assert "\n" not in str(error.value)
    image_folder(tmp_path / "zoo", {"a": 5, "b": 5})
    (tmp_path / "zoo" / "b" / "3.png").write_bytes(b"?")
    with pytest.raises(FedstillError, match=r"b/3.png"):
        load(tmp_path / "zoo")


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded(progressive: bool) -> None:
    """A file of 231 kB with 2,000 scans of 25 million pixels took 21 seconds."""
    image = encoded(Image.new("RGB", (16, 16)), "JPEG", progressive=progressive)
    assert decode_images([image], where="a set")[0].shape == (1, 3, 16, 16)
    last = image.rindex(b"\xff\xda")
    with pytest.raises(FedstillError, match="more than 100 scans"):
        decode_images([image[:-2] + image[last:-2] * 100 + image[-2:]], where="a set")


def test_a_part_of_a_png_that_claims_4_gb_takes_no_memory(tmp_path: Path) -> None:
    """The decoder reads as many bytes as the head of the part names, and a file object takes memory for them first."""
    content = bytearray(png(np.zeros((4, 4), np.uint8)))
    place = content.index(b"IDAT") - 4
    content[place : place + 4] = (0xFFFFFFF0).to_bytes(4, "big")
    path = tmp_path / "long.png"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        decode_images([path], where="it", skip=True)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
