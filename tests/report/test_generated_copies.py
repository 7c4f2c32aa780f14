"""Whether generated samples are copies of training samples: distances by hand, copies caught, noise not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedstill.core.seeds import torch_generator
from fedstill.core.types import Dataset, Federation, Samples
from fedstill.report import generated as module
from fedstill.report.generated import SHOWS_NOT, Copies, Nearest, inputs, look_for_copies, nearest

CLASSES = ("cat", "dog", "owl")
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def images(count: int, seed: int) -> torch.Tensor:
    """Bright and dark patches, so that two images are apart by about what photographs are."""
    coarse = torch.randint(0, 256, (count, 3, 4, 4), generator=torch_generator(seed), dtype=torch.uint8)
    return coarse.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def photographs(count: int, seed: int) -> Dataset:
    return Dataset("photographs", images(count, seed), torch.arange(count) % 3, CLASSES, MEAN, STD)


def federation(train: Dataset, test: Dataset, held: torch.Tensor | None = None) -> Federation:
    rows = torch.arange(len(train.y)) if held is None else held
    return Federation(train, test, rows, torch.tensor([0, len(rows)]))


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
