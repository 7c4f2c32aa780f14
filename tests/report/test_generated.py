"""Pictures of generated samples: pixels in their places, names beside them, and none where there is nothing to see."""

from __future__ import annotations

import builtins
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from pictures import assert_no_label_is_clipped, saved_figures
from running import run_on_trial
from typer.testing import CliRunner

import fedstill
from fedstill.about.toy import trial_model
from fedstill.cli import app
from fedstill.compose import combine
from fedstill.compose.groups import merge, per_group
from fedstill.core.seeds import torch_generator
from fedstill.core.types import Dataset, Federation, Groups, Method, Phase, Round, Samples, ServerStep, Uploads, Weights
from fedstill.loop.history import History, Result
from fedstill.methods import fedavg
from fedstill.report import generated as module
from fedstill.report.generated import (
    SHOWS_NOT,
    Copies,
    Nearest,
    as_stored,
    closest_picture,
    generated_picture,
    inputs,
    is_pictured,
    look_for_copies,
    nearest,
    pixels,
    show_generated,
)

pytest.importorskip("matplotlib")


def dataset(shape=(1, 6, 6), count: int = 30, seed: int = 0, **changes) -> Dataset:
    x = torch.randint(0, 256, (count, *shape), generator=torch_generator(seed), dtype=torch.uint8)
    made = Dataset("toys", x, torch.arange(count) % 3, ("cat", "dog", "owl"), (0.25,), (0.5,))
    return dataclasses.replace(made, **changes)


def federation(train: Dataset, test: Dataset | None = None, held: torch.Tensor | None = None) -> Federation:
    """One client, which holds all training rows or these."""
    rows = torch.arange(len(train.y)) if held is None else held
    return Federation(train, test or dataset(train.x.shape[1:], 40, 1), rows, torch.tensor([0, len(rows)]))


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


def test_where_no_client_has_its_rows_nothing_is_compared(tmp_path):
    nobody = dataclasses.replace(dataset(), x=torch.zeros(0, 1, 6, 6), y=torch.zeros(0, dtype=torch.int64))
    alone = federation(nobody, held=torch.zeros(0, dtype=torch.int64))
    assert module.show_generated(result(samples()), alone, tmp_path, seed=0).generated is None
    assert not (tmp_path / module.COPIES_FILE).exists()


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


# Whether generated samples are copies of training samples: distances by hand, copies caught, noise not.

CLASSES = ("cat", "dog", "owl")

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def images(count: int, seed: int) -> torch.Tensor:
    """Bright and dark patches, so that two images are apart by about what photographs are."""
    coarse = torch.randint(0, 256, (count, 3, 4, 4), generator=torch_generator(seed), dtype=torch.uint8)
    return coarse.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def photographs(count: int, seed: int) -> Dataset:
    return Dataset("photographs", images(count, seed), torch.arange(count) % 3, CLASSES, MEAN, STD)


WORLD = federation(photographs(400, 1), photographs(300, 2))


def noise(count: int, seed: int = 3) -> Samples:
    return Samples(torch.randn(count, 3 * 8 * 8, generator=torch_generator(seed)), torch.arange(count) % 3)


def copied(rows: list[int], jitter: float = 0.0) -> Samples:
    x = inputs(WORLD.train.x[rows], WORLD.train)
    return Samples(x + jitter * torch.randn(x.shape, generator=torch_generator(4)), WORLD.train.y[rows])


def test_distances_are_those_of_a_slow_double_loop(monkeypatch):
    """Pieces of a few rows, in NumPy and float64 from the formula: sqrt(mean((a - b)^2)) of (x / 255 - mean) / std."""
    monkeypatch.setattr(module, "NUMBERS_AT_ONCE", 7 * 192)
    rows = torch.arange(5, 400, 3)
    found = nearest(noise(11).x, WORLD.train.x, rows, WORLD.train)
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (MEAN, STD))
    for i, sample in enumerate(noise(11).x.double().numpy().reshape(-1, 3, 8, 8)):
        stored = (WORLD.train.x[rows].numpy() / 255 - mean) / std
        apart = [np.sqrt(((sample - other) ** 2).mean()) for other in stored]
        assert float(found.distance[i]) == pytest.approx(min(apart), rel=1e-5)
        assert int(found.row[i]) == int(rows[int(np.argmin(apart))])


def test_the_rows_that_are_compared_at_once_are_few(monkeypatch):
    sizes, feed = [], module.Feed
    monkeypatch.setattr(module, "NUMBERS_AT_ONCE", 20 * 192)
    monkeypatch.setattr(module, "Feed", lambda x, *rest: (sizes.append(len(x)), feed(x, *rest))[1])
    nearest(noise(6).x, WORLD.train.x, torch.arange(400), WORLD.train)
    assert max(sizes) == 20
    sizes.clear()
    nearest(noise(384).x, WORLD.train.x, torch.arange(400), WORLD.train)  # the table of distances counts, too
    assert max(sizes) == 10


def test_a_copy_has_no_distance_at_all_though_images_are_far_from_the_origin():
    bright = dataclasses.replace(WORLD.train, mean=(-50.0,), std=(0.01,))  # |a|^2 is 2.5e7 a pixel
    found = nearest(inputs(bright.x[:9], bright).flatten(1), bright.x, torch.arange(400), bright)
    assert found.distance.tolist() == [0.0] * 9


def test_a_generator_that_copies_training_images_is_caught():
    rows = list(range(7, 47))
    found = look_for_copies(copied(rows), WORLD, seed=0)
    assert found.near == 40
    assert found.to_training.row.tolist() == rows
    assert float(found.to_training.distance.max()) == 0.0


def test_a_copy_with_a_little_noise_on_it_is_caught_as_well():
    found = look_for_copies(copied(list(range(40)), jitter=0.2), WORLD, seed=0)
    assert found.near == 40
    assert float(found.to_training.distance.median()) == pytest.approx(0.2, rel=0.1)
    assert float(found.to_held_out.distance.median()) > 3 * 0.2


def test_a_few_copies_among_noise_are_counted_and_stand_first_among_the_pairs():
    few, others = copied([30, 60, 90]), noise(37)
    x = torch.cat([others.x[:20], few.x.flatten(1), others.x[20:]])
    y = torch.cat([others.y[:20], few.y, others.y[20:]])
    found = look_for_copies(Samples(x, y), WORLD, seed=0)
    assert found.near == 3
    assert found.closest[:3] == [20, 21, 22]
    assert len(found.closest) == 10
    told = found.as_dict(WORLD.train)
    assert told["closest"][1] == {
        "sample": 21, "class": "cat", "training_row": 60, "training_class": "cat", "distance": 0.0,
    }  # fmt: skip
    assert told["share_as_near"] == pytest.approx(3 / 40)


def test_noise_is_not_taken_for_copies():
    found = look_for_copies(noise(40), WORLD, seed=0)
    assert found.near == 0
    assert found.text().startswith("0 of 40 generated samples are as near to a training sample as the nearest 1 %")


def test_a_short_line_says_whether_copies_were_found_how_near_they_came_and_what_counts_as_one():
    some, none, one = (Nearest(torch.tensor(at), torch.zeros(4, dtype=torch.int64)) for at in
                       ([0.125, 0.9, 0.25, 0.5], [0.9, 0.781, 2.0, 3.0], [0.0, 0.8, 0.9, 1.0]))  # fmt: skip
    held_out = Nearest(torch.tensor([0.25, 0.5]), torch.zeros(2, dtype=torch.int64))  # the nearest 1 %: the first
    told = [Copies(noise(4), found, found, held_out, {}).line() for found in (some, none, one)]
    assert told == [
        "2 of 4 generated samples may be copied: nearest training sample at 0.125 (a copy: 0.25 or less)",
        "no copies found among 4 generated samples: nearest training sample at 0.781 (a copy: 0.25 or less)",
        "1 of 4 generated samples may be copied: nearest training sample at 0 (a copy: 0.25 or less)",
    ]


def test_new_samples_of_the_same_kind_are_as_near_as_held_out_ones_are():
    """About two of 200 are expected within the distance of the nearest 1 %."""
    fresh = Samples(inputs(images(200, 9), WORLD.train), torch.zeros(200, dtype=torch.int64))
    found = look_for_copies(fresh, WORLD, seed=0)
    assert found.near <= 10
    middle = float(found.held_out.distance.median())
    assert float(found.to_training.distance.median()) == pytest.approx(middle, rel=0.05)


def test_numbers_are_median_and_minimum_of_each_and_the_nearest_one_percent():
    found = look_for_copies(noise(40), WORLD, seed=0)
    told = found.as_dict(WORLD.train)
    apart = np.sort(found.held_out.distance.numpy())
    assert len(apart) == 300  # all there are: at least 500 are wanted
    assert told["within"] == apart[2]  # 1 % of 300
    assert told["held_out_to_training"] == {
        "of": 300, "among": 400, "median": pytest.approx(np.median(apart)), "minimum": apart[0],
    }  # fmt: skip
    assert (told["generated_to_held_out"]["of"], told["generated_to_held_out"]["among"]) == (40, 300)
    assert told["generated_to_training"]["minimum"] == float(found.to_training.distance.min())
    assert SHOWS_NOT in told["about"]
    assert "no guarantee of privacy" in SHOWS_NOT


def test_rows_that_no_client_holds_are_no_training_images():
    held = federation(WORLD.train, WORLD.test, held=torch.arange(200, 400).repeat(2))
    found = look_for_copies(copied([5, 205]), held, seed=0)
    assert found.sizes["training"] == 200
    assert found.near == 1
    assert float(found.to_training.distance[1]) == 0.0
    assert int(found.to_training.row[0]) >= 200


def test_a_held_out_set_that_holds_training_images_itself_hides_no_copy():
    """Some benchmark sets do: then the nearest 1 % are at distance 0, and a copy is as near as they are."""
    twins = dataclasses.replace(WORLD.test, x=torch.cat([WORLD.train.x[:30], WORLD.test.x[30:]]))
    found = look_for_copies(copied(list(range(100, 120))), federation(WORLD.train, twins), seed=0)
    assert found.bound == 0.0
    assert found.near == 20


def test_which_held_out_samples_are_taken_is_up_to_the_seed_alone():
    many = federation(WORLD.train, photographs(900, 5))
    one, same, other = (look_for_copies(noise(8), many, seed=seed).held_out for seed in (1, 1, 2))
    assert len(one.row) == 500
    assert torch.equal(one.distance, same.distance)
    assert not torch.equal(one.distance, other.distance)
    assert len(look_for_copies(noise(700), many, seed=1).held_out.row) == 700  # as many as generated ones


# What a server's generator invents is handed over by the run, written into its folder, and told in its last lines.


INVENTING_FILE = '''
import torch
from fedstill.methods import fedavg
from fedstill.core.seeds import torch_generator
from fedstill.core.types import Method, ServerStep
from fedstill.data import load
from fedstill.report.generated import inputs

def inventing(*, copies: int = 0):
    """Inventing: FedAvg and samples of noise, the first of them copied.

    Args:
        copies: samples that are training images.
    """
    train = load("digits").train

    def apply(candidate, state, round):
        x = torch.randn(20, 64, generator=torch_generator(round.number))
        x[:copies] = inputs(train.x[:copies], train).flatten(1)
        return candidate, {"samples": {"x": x, "y": torch.arange(20) % 10}}

    base = fedavg()
    step = ServerStep("invent", apply)
    return Method(base.objective, base.aggregate, (step,))
'''


def inventing() -> Method:
    """As many samples as rounds were played, all of the last round's number."""

    def apply(candidate, state, round):
        x, y = torch.full((round.number, 64), float(round.number)), torch.zeros(round.number, dtype=torch.int64)
        return candidate, {"samples": {"x": x, "y": y}}

    base = fedavg()
    step = ServerStep("invent", apply)
    return Method(base.objective, base.aggregate, (step,))


def test_a_result_holds_what_was_invented_last_and_nothing_where_nothing_was():
    assert run_on_trial(inventing()).samples.x.shape == (3, 64)
    assert run_on_trial(fedavg()).samples is None


def test_a_resumed_run_has_the_same_samples_also_one_that_was_finished(tmp_path):
    where = {"run_dir": tmp_path / "run", "checkpoint_every": 1}
    run_on_trial(inventing(), rounds=2, **where)
    for _ in range(2):
        assert run_on_trial(inventing(), resume=True, **where).samples.x.unique().tolist() == [3.0]


def test_a_method_that_follows_another_has_its_own():
    assert run_on_trial((Phase(inventing(), until=1), Phase(fedavg()))).samples is None
    assert run_on_trial((Phase(fedavg(), until=1), Phase(inventing()))).samples.x.shape == (3, 64)


def test_of_several_architectures_those_of_the_first_that_has_some():
    model = trial_model()
    groups = Groups({"one": model, "two": model}, ("one", "two"))
    one, two = (ServerStep("invent"), inventing().server[0])
    step = per_group({"one": Method(None, one), "two": Method(None, two)}, groups)
    start = merge({name: model.init(0) for name in groups.models})
    nobody = Uploads(start, *[torch.ones(0)] * 4, {}, None, torch.ones(0, dtype=torch.int64))
    look = Round(5, start, nobody, model, 2, None, 0, SimpleNamespace(lend=lambda model: None))
    _, state = step.apply(start, step.init(start), look)
    assert combine.samples(Method(None, step), {step.name: state}).x.shape == (5, 64)


@pytest.fixture
def experiment(tmp_path):
    (tmp_path / "inventing.py").write_text(INVENTING_FILE)

    def make(copies: int = 0, method: str = "") -> fedstill.Experiment:
        own = f"{tmp_path / 'inventing.py'}:inventing(copies={copies})"
        return fedstill.Experiment(
            rounds=2, cohort=2, method={"name": method or own},
            data={"source": "digits"}, model={"name": "mlp", "hidden": [8]}, checkpoint_every=1,
            partition={"scheme": "iid", "clients": 4},
        )  # fmt: skip

    return make


def test_a_run_folder_tells_copies_from_noise(tmp_path, experiment):
    result = fedstill.run(experiment(copies=4), run_dir=tmp_path / "run", pictures=False)
    told = json.loads((tmp_path / "run" / "generated.json").read_text())
    assert (told["as_near"], told["samples"]) == (4, 20)
    assert told == result.generated
    assert [one["training_row"] for one in told["closest"][:4]] == [0, 1, 2, 3]


def test_the_files_are_there_after_a_resume_and_where_no_curves_are_drawn(tmp_path, experiment):
    first = fedstill.run(experiment(), run_dir=tmp_path / "run", pictures=False)
    folder, found = tmp_path / "run", (tmp_path / "run" / "generated.json").read_text()
    assert not (folder / "curves.png").exists()
    for name in ("generated.json", "generated.png", "generated_closest.png"):
        (folder / name).unlink()  # raises where it is not there
    again = fedstill.run(experiment(), run_dir=folder, resume=True)
    assert (folder / "generated.json").read_text() == found
    assert again.generated == first.generated
    assert fedstill.run(experiment()).generated is None  # no folder, no look


@pytest.mark.parametrize(
    "method", ["fedgen(generator.steps=1)", 'fedftg(input="feature", iterations=1, student.steps=1)']
)
def test_a_folder_of_a_method_that_invents_features_has_no_such_file(tmp_path, experiment, method):
    assert fedstill.run(experiment(method=method), run_dir=tmp_path / "run", pictures=False).generated is None
    assert not list((tmp_path / "run").glob("generated*"))


def test_the_last_lines_of_a_run_tell_what_was_found_and_what_it_is_not(tmp_path, experiment):
    (tmp_path / "e.toml").write_text(experiment(3).to_toml())
    done = CliRunner().invoke(app, ["run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0
    told = "generated      3 of 20 generated samples may be copied: nearest training sample at 0 (a copy: "
    assert told in done.stdout
    assert max(map(len, done.stdout.split("Everything is in")[0].splitlines())) <= 120
    assert "(a check against copies, no guarantee of privacy: see generated.json)" in done.stdout
