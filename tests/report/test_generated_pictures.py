"""Pictures of generated samples: pixels in their places, names beside them, and none where there is nothing to see."""

from __future__ import annotations

import builtins
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.image import imread
from pictures import assert_no_label_is_clipped, saved_figures

from fedstill.core.seeds import torch_generator
from fedstill.core.types import Dataset, Federation, Samples, Weights
from fedstill.loop.history import History, Result
from fedstill.report.generated import (
    as_stored,
    closest_picture,
    generated_picture,
    inputs,
    is_pictured,
    look_for_copies,
    pixels,
    show_generated,
)


def dataset(shape=(1, 6, 6), count: int = 30, seed: int = 0, **changes) -> Dataset:
    x = torch.randint(0, 256, (count, *shape), generator=torch_generator(seed), dtype=torch.uint8)
    made = Dataset("toys", x, torch.arange(count) % 3, ("cat", "dog", "owl"), (0.25,), (0.5,))
    return dataclasses.replace(made, **changes)


def federation(train: Dataset, test: Dataset | None = None) -> Federation:
    return Federation(train, test or dataset(train.x.shape[1:], 40, 1), torch.arange(30), torch.tensor([0, 30]))


def samples(count: int = 6, values: int = 36) -> Samples:
    return Samples(torch.randn(count, values, generator=torch_generator(2)), torch.arange(count) % 2)


def result(made: Samples | None) -> Result:
    return Result(History([{"round": 1}]), Weights({}, {}), Weights({}, {}), "inventing", 1.0, samples=made)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Figure]:
    """Draw a picture and return its figure."""
    figures = saved_figures(monkeypatch)

    def draw(picture: Callable, *what: object, **options: object) -> Figure:
        path = picture(*what, tmp_path / "x.png", **{"title": "t", **options})
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def sheet(figure: Figure) -> np.ndarray:
    return np.asarray(figure.axes[0].images[0].get_array())


def test_pixels_are_put_back_and_cut_at_black_and_white():
    x = torch.tensor([-0.5, 0.5, 1.5, 9.0, -9.0, 0.0]).reshape(1, 1, 2, 3)
    shown = pixels(x, dataset())  # x 0.5 + 0.25
    assert shown.shape == (1, 2, 3, 1)
    assert shown.flatten().tolist() == [0.0, 0.5, 1.0, 1.0, 0.0, 0.25]


def test_every_channel_has_its_own_constants_and_stored_images_come_back_as_they_were():
    colours = dataset((3, 6, 6), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    shown = pixels(inputs(colours.x, colours), colours)
    np.testing.assert_allclose(255 * shown.transpose(0, 3, 1, 2), colours.x.numpy(), atol=1e-4)


def test_images_that_are_numbers_go_from_the_darkest_to_the_lightest_of_all():
    x = torch.linspace(-100, 300, 30 * 36).reshape(30, 1, 6, 6)
    numbers = dataset(x=x)
    shown = pixels(inputs(x, numbers), numbers)
    assert (float(shown.min()), float(shown.max())) == pytest.approx((0.0, 1.0))
    assert float(shown[15, 0, 0, 0]) == pytest.approx((float(x[15, 0, 0, 0]) + 100) / 400, abs=1e-5)


def test_flat_samples_of_a_set_of_images_are_images():
    made = as_stored(samples(), dataset())
    assert made is not None
    assert made.x.shape == (6, 1, 6, 6)
    assert torch.equal(made.x.flatten(1), samples().x)


@pytest.mark.parametrize(
    ("made", "stored"),
    [
        (None, dataset()),
        (samples(values=35), dataset()),  # features
        (samples(0), dataset()),
        (samples(values=8), dataset(x=torch.ones(30, 8, dtype=torch.int64))),  # text
    ],
    ids=["none", "features", "nothing", "text"],
)
def test_what_is_no_sample_of_the_data_is_left_out(tmp_path, made, stored):
    shown = show_generated(result(made), federation(stored), tmp_path, seed=0)
    assert shown.generated is None
    assert list(tmp_path.glob("generated*")) == []


def test_rows_are_classes_and_columns_the_samples_that_were_asked_for(drawn):
    made = as_stored(samples(23), dataset())  # 12 of class 0, 11 of class 1, none of class 2
    figure = drawn(generated_picture, made, dataset())
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["cat", "dog", "owl"]
    whole, lit = sheet(figure), pixels(made.x, dataset())
    assert whole.shape == (3 * 7 - 1, 10 * 7 - 1, 3)
    for column in range(10):  # of 12 and 11, no more
        for row in range(2):
            image = whole[7 * row : 7 * row + 6, 7 * column : 7 * column + 6]
            np.testing.assert_array_equal(image, np.repeat(lit[2 * column + row], 3, axis=2))
    assert (whole[14:] == 1.0).all()


def test_pairs_stand_one_below_the_other_nearest_first(drawn):
    train = dataset()
    made = Samples(
        torch.cat([samples(4).x, inputs(train.x[17:18], train).flatten(1)]), torch.zeros(5, dtype=torch.int64)
    )
    copies = look_for_copies(made, federation(train), seed=0)
    figure = drawn(closest_picture, copies, train)
    whole = sheet(figure)
    np.testing.assert_allclose(255 * whole[:6, :6, 0], train.x[17, 0].numpy(), atol=1e-4)
    np.testing.assert_array_equal(whole[:6, :6], whole[7:13, :6])
    told = [float(label.get_text()) for label in figure.axes[0].get_xticklabels()]
    assert len(told) == 5
    assert told == sorted(told)
    assert told[0] == 0.0
    second = pixels(made.x[copies.closest[1]].reshape(1, 1, 6, 6), train)[0, ..., 0]
    np.testing.assert_array_equal(whole[:6, 7:13, 0], second)
    other = train.x[copies.to_training.row[copies.closest[1]], 0].numpy()
    np.testing.assert_allclose(255 * whole[7:13, 7:13, 0], other, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 120])
def test_no_label_is_clipped_and_more_than_a_hundred_classes_are_told(drawn, classes):
    names = tuple(f"a class with a rather long name {one}" for one in range(classes))
    many = dataset(classes=names)
    figure = drawn(generated_picture, as_stored(samples(), many), many, title="a method with options " * 4)
    assert_no_label_is_clipped(figure, at_least=3)
    assert len(figure.axes[0].get_yticklabels()) == min(classes, 100)
    assert ("first 100 of 120 classes" in " ".join(figure.get_suptitle().split())) == (classes == 120)


@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 28, 28)])
def test_nothing_is_left_empty_beside_the_images(tmp_path, shape):
    toys = dataset(shape, mean=(0.25,) * shape[0], std=(0.5,) * shape[0], classes=tuple("0123456789"))
    made = Samples(torch.full((100, *shape), -0.5), torch.arange(100) % 10)  # black
    picture = imread(generated_picture(made, toys, tmp_path / "x.png", title="t"))[..., :3]
    ink = np.flatnonzero(picture[len(picture) // 10 :].min(axis=(0, 2)) < 0.5)  # below the title
    assert ink[0] < 0.02 * picture.shape[1]
    assert ink[-1] > 0.98 * picture.shape[1]


def test_a_generator_of_features_is_told_in_the_log_and_other_methods_are_not(tmp_path, caplog):
    caplog.set_level("INFO", logger="fedstill.run")
    plain = result(None)
    show_generated(plain, federation(dataset()), tmp_path, seed=0)
    assert caplog.text == ""
    rows = [{"round": 1, "server/feature_generator_loss": 0.5}]
    show_generated(dataclasses.replace(plain, history=History(rows)), federation(dataset()), tmp_path, seed=0)
    assert [one.message for one in caplog.records] == [
        "the generator of inventing invents features, no samples: no generated.json"
    ]


def test_a_folder_gets_the_numbers_and_both_pictures(tmp_path):
    shown = show_generated(result(samples()), federation(dataset()), tmp_path, seed=0)
    assert sorted(path.name for path in tmp_path.glob("generated*")) == [
        "generated.json", "generated.png", "generated_closest.png",
    ]  # fmt: skip
    assert json.loads((tmp_path / "generated.json").read_text()) == shown.generated
    assert shown.summary()["generated"] == shown.generated["text"]
    assert "generated" not in result(samples()).summary()


def test_rows_of_a_table_are_compared_and_not_drawn(tmp_path):
    table = dataset(x=torch.randn(30, 4, generator=torch_generator(5)))
    other = dataset(x=torch.randn(30, 4, generator=torch_generator(6)))
    shown = show_generated(result(samples(values=4)), federation(table, other), tmp_path, seed=0)
    assert [path.name for path in tmp_path.glob("generated*")] == ["generated.json"]
    assert shown.generated["samples"] == 6


def test_images_of_other_channels_than_grey_and_rgb_are_not_drawn():
    assert [is_pictured(dataset((channels, 6, 6))) for channels in (1, 2, 3, 4)] == [True, False, True, False]


def test_without_matplotlib_the_numbers_are_there_and_a_line_says_what_is_missing(tmp_path, monkeypatch, caplog):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    shown = show_generated(result(samples()), federation(dataset()), tmp_path, seed=0)
    assert shown.generated is not None
    assert [path.name for path in tmp_path.glob("generated*")] == ["generated.json"]
    assert "pip install 'fedstill[plots]'" in caplog.text
