"""Images of another source in the task's storage form: scale and colour."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from data_files import fails, pictures, png

from fedstill.data import from_tensors, match_storage, read_unlabeled


def test_fractions_beside_bytes_must_lie_between_0_and_1(tmp_path: Path) -> None:
    grey = from_tensors(pictures(6, channels=1), np.arange(6) % 2)
    pixels = pictures(3, channels=1)
    np.savez(tmp_path / "one.npz", x=pixels / 255.0)
    assert np.array_equal(read_unlabeled(str(tmp_path / "one.npz"), grey).x[:, 0], pixels)
    for scale in (1.0, 16 / 255):
        np.savez(tmp_path / "other.npz", x=pixels * scale + 0.5)
        told = fails(read_unlabeled, str(tmp_path / "other.npz"), grey)
        assert told.startswith("data.unlabeled: pixels of")
        assert "scale them to [0, 1] or give bytes (uint8)" in told
    np.savez(tmp_path / "other.npz", x=pixels / 255.0 - 0.5)  # centred
    assert "scale them to [0, 1]" in fails(read_unlabeled, str(tmp_path / "other.npz"), grey)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.png").write_bytes(png(pixels[0]))
    scaled = from_tensors(pictures(6, channels=1) / 255.0, np.arange(6) % 2)
    assert read_unlabeled(str(tmp_path / "mine"), scaled).x.max() <= 1.0
    large = from_tensors(pictures(6, channels=1) * 1.0, np.arange(6) % 2)
    assert "pixels of the task" in fails(read_unlabeled, str(tmp_path / "mine"), large)


def test_colour_becomes_grey_by_luma_as_in_pillow() -> None:
    from PIL import Image

    pixels = pictures(20)
    x = match_storage(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), torch.zeros(1, 1, 5, 4, dtype=torch.uint8))
    for got, image in zip(x, pixels, strict=True):
        wanted = np.asarray(Image.fromarray(image).convert("L")).astype(int)
        assert np.abs(got[0].numpy().astype(int) - wanted).max() <= 1
