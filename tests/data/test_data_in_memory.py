"""Hugging Face objects, tensors and arrays become the Source that a file with the same content would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import fails, hub_folder, image_folder, pictures

from fedstill.data import from_hf, from_tensors, load


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels.transpose(0, 3, 1, 2)


def test_hugging_face_objects_equal_the_folder_they_would_be(tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    pixels, labels = hub_folder(tmp_path / "pets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "owl"])})

    def split(rows: slice) -> datasets.Dataset:
        columns = {"img": [Image.fromarray(p) for p in pixels[rows]], "label": labels[rows].tolist()}
        return datasets.Dataset.from_dict(columns, features=features)

    folder = load(tmp_path / "pets")
    both = from_hf(datasets.DatasetDict({"train": split(slice(0, 7)), "test": split(slice(7, 9))}))
    assert torch.equal(both.train.x, folder.train.x)
    assert torch.equal(both.test.y, folder.test.y)
    assert both.train.classes == folder.train.classes
    chosen = split(slice(0, 9)).select([8, 1, 3, 5, 6])
    alone = from_hf(chosen)
    seen = {x.numpy().tobytes() for x in torch.cat([alone.train.x, alone.test.x])}
    assert seen == {channels_first(pixels)[i].tobytes() for i in (8, 1, 3, 5, 6)}


def test_hugging_face_images_that_are_paths(tmp_path: Path) -> None:
    import datasets

    written = image_folder(tmp_path / "zoo", {"a": 5})["a"]
    rows = {"image": [str(tmp_path / "zoo" / "a" / f"{i}.png") for i in range(5)], "label": [0, 1, 0, 1, 0]}
    source = from_hf(datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()))
    seen = {x.numpy().tobytes() for x in torch.cat([source.train.x, source.test.x])}
    assert seen == {image.tobytes() for image in channels_first(written)}


def test_hugging_face_vectors_arrays_and_words() -> None:
    import datasets

    vectors = datasets.Dataset.from_dict({"v": [[float(i), 1.0] for i in range(10)], "label": ["a", "b"] * 5})
    source = from_hf(vectors)
    assert source.train.x.shape == (8, 2)
    assert source.train.classes == ("a", "b")
    shape = datasets.Array2D(shape=(3, 2), dtype="uint8")
    arrays = datasets.Dataset.from_dict(
        {"pixels": [[[i, 0], [1, 2], [3, 4]] for i in range(10)], "label": [0, 1] * 5},
        features=datasets.Features({"pixels": shape, "label": datasets.Value("int64")}),
    )
    source = from_hf(arrays)
    assert source.train.x.shape == (8, 1, 3, 2)
    assert source.train.x.dtype == torch.uint8
    assert sorted(torch.cat([source.train.x, source.test.x])[:, 0, 0, 0].tolist()) == list(range(10))
    assert "DatasetDict" in fails(from_hf, [1, 2, 3])


def test_tensors_and_arrays_in_any_image_layout() -> None:
    pixels, labels = pictures(10), [1, 0] * 5
    first = from_tensors(torch.from_numpy(channels_first(pixels).copy()), torch.tensor(labels), test=(pixels, labels))
    last = from_tensors(pixels, np.array(labels), test=(pixels, labels))
    assert torch.equal(first.train.x, last.train.x)
    narrow = pictures(10, height=3, width=5).transpose(0, 3, 2, 1)  # (10, 3, 5, 3): channels first is assumed
    assert np.array_equal(from_tensors(narrow, labels, test=(narrow, labels)).train.x, narrow)
    grey = from_tensors(pixels[..., 0], labels, test=0.3)
    assert grey.train.x.shape == (7, 1, 5, 4)
    assert len(grey.test.y) == 3
    table = from_tensors(np.arange(20).reshape(10, 2), labels)
    assert table.train.x.dtype == torch.float32
    floats = from_tensors(pixels / 255.0, labels)
    assert floats.train.x.shape == (8, 3, 5, 4)
    assert floats.train.x.dtype == torch.float32


def test_tensors_with_wrong_shapes_or_values_are_refused() -> None:
    assert "(3, 2)" in fails(from_tensors, np.zeros((3, 2)), [0, 1])
    assert "numbers" in fails(from_tensors, np.array([["a"], ["b"]]), [0, 1])
    assert "no value in row 2" in fails(from_tensors, [[0.0], [np.nan], [1.0]], [0, 1, 0])
    assert "not finite in row 3" in fails(
        from_tensors, [[0.0], [1.0], [np.inf], [0.0]], [0, 1, 0, 1], test=([[0.0]], [0])
    )
    assert "outside 0..1" in fails(from_tensors, np.zeros((4, 1)), [0, 1, 2, 0], classes=("a", "b"))


def test_normalisation_is_measured_on_the_train_split() -> None:
    pixels, labels = pictures(30), [0, 1, 2] * 10
    source = from_tensors(pixels, labels, test=(pictures(5, seed=9), [0] * 5))
    scaled = pixels.astype(np.float64) / 255
    assert source.train.mean == pytest.approx(scaled.mean((0, 1, 2)))
    assert source.train.std == pytest.approx(scaled.std((0, 1, 2)))
    assert source.test.mean == source.train.mean
    rows = np.array([[1.0, 7.0], [3.0, 7.0], [1.0, 7.0], [3.0, 7.0]])
    table = from_tensors(rows, [0, 1, 0, 1], test=(rows, [0, 1, 0, 1]))
    assert table.train.mean == pytest.approx((2.0, 7.0))
    assert table.train.std == pytest.approx((1.0, 1.0))  # a constant feature is not divided by zero
