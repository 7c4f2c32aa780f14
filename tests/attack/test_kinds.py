"""What hostile clients do to moves, rows and answers, by hand."""

from __future__ import annotations

import math

import pytest
import torch
import toy

from fedstill.attack import ATTACKS, Attack, adaptive, backdoor, gaussian, label_flip, scale, sign, sure, together
from fedstill.attack.kinds import Cohort, lengths, where_hostile
from fedstill.core.data import Dataset
from fedstill.core.errors import FedstillError

MOVES = {"a": torch.tensor([[3.0], [0.0], [6.0]]), "b": torch.tensor([[4.0], [1.0], [8.0]])}  # lengths 5, 1, 10
COHORT = Cohort(MOVES, torch.tensor([True, False, False]), 0)


def sent(kind):
    return where_hostile(COHORT, kind.send(COHORT))


def first(moves):
    return [float(leaf[0]) for leaf in moves.values()]


def train_of(x, y=None):
    return Dataset("toy", x, torch.zeros(len(x), dtype=torch.int64) if y is None else y, tuple("abc"))


@pytest.mark.parametrize(("kind", "expected"), [(sign(4.0), [-12.0, -16.0]), (scale(20.0), [60.0, 80.0])])
def test_a_move_is_sent_backwards_or_much_too_far(kind, expected):
    assert first(sent(kind)) == expected


@pytest.mark.parametrize("kind", [sign(), scale(), gaussian(), adaptive(), backdoor(), backdoor(adaptive=True)])
def test_honest_clients_send_what_they_trained(kind):
    for name, leaf in sent(kind).items():
        assert torch.equal(leaf[1:], MOVES[name][1:])


def test_noise_is_as_long_as_it_is_told_and_another_one_in_every_round():
    now, then = (where_hostile(cohort, gaussian(2.0).send(cohort)) for cohort in (COHORT, COHORT._replace(seed=1)))
    assert float(lengths(now)[0]) == pytest.approx(10.0, rel=1e-5)
    assert first(now) != first(then)


def test_an_adaptive_move_points_against_the_honest_ones_and_is_no_longer_than_they_are():
    """The honest mean is (3, 4.5); 99 % of the way from length 1 to length 10 is 9.91."""
    made = sent(adaptive())
    assert float(lengths(made)[0]) == pytest.approx(9.91)
    assert first(made) == pytest.approx([-9.91 * 3.0 / math.hypot(3.0, 4.5), -9.91 * 4.5 / math.hypot(3.0, 4.5)])


def test_an_adaptive_backdoor_keeps_the_direction_of_its_training():
    assert first(sent(backdoor(adaptive=True))) == pytest.approx([9.91 * 0.6, 9.91 * 0.8])
    assert first(sent(backdoor(factor=2.0))) == [6.0, 8.0]


def test_labels_are_turned_round():
    _, y = label_flip().poison(train_of(torch.zeros(3, 2)), torch.zeros(3, 2), torch.tensor([0, 1, 2]), 0)
    assert y.tolist() == [2, 1, 0]


def test_the_pattern_of_an_image_is_a_bright_square_and_of_a_table_its_last_features():
    images, table = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([[1.0, 2.0, 9.0], [1.0, 2.0, 3.0]])
    images[0, 0, 0, 0] = 200
    seen = backdoor(size=2).trigger(train_of(images), images)
    assert seen[1, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 200, 200], [0, 0, 200, 200]]
    assert backdoor(size=1).trigger(train_of(table), table).tolist() == [[1.0, 2.0, 9.0], [1.0, 2.0, 9.0]]


def test_half_of_the_rows_carry_the_pattern_and_the_target():
    x, y = torch.zeros(8, 1, 4, 4), torch.ones(8, dtype=torch.int64)
    train = train_of(torch.ones(1, 1, 4, 4))
    marked, told = backdoor(target=2, part=0.5).poison(train, x, y, 3)
    changed = marked.flatten(1).any(dim=1)
    assert int(changed.sum()) == 4
    assert torch.equal(told == 2, changed)
    assert not bool(x.any())


def test_texts_have_no_pattern_and_a_target_must_be_a_class():
    texts = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(FedstillError, match="no pattern for texts"):
        backdoor().trigger(train_of(texts), texts)
    with pytest.raises(FedstillError, match="target = 7"):
        backdoor(target=7).poison(train_of(torch.zeros(2, 5)), torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), 0)


def test_a_client_that_is_sure_of_everything_scores_all_public_samples_alike_high():
    negatives = torch.tensor([[3.0, 0.0], [3.0, 8.0]])  # the mean is (3, 4)
    told = sure(10.0).lie({"w": torch.tensor([0.0, 2.0]), "intercept": torch.tensor(1.0)}, {"negatives": negatives})
    assert told["w"].tolist() == pytest.approx([12.0, 16.0])
    assert float(told["intercept"]) == 1.0
    told = sure(1.0).lie({"log_scores": torch.tensor([-5.0, -1.0])}, {})
    assert told["log_scores"].tolist() == [-1.0, -1.0]


def test_kinds_join_in_their_order():
    both = together([sign(2.0), scale(3.0), label_flip(), sure()])
    assert first(sent(both)) == [-18.0, -24.0]
    assert both.lie is not None
    assert both.trigger is None
    _, y = both.poison(train_of(torch.zeros(1, 2)), torch.zeros(1, 2), torch.tensor([0]), 0)
    assert y.tolist() == [2]
    twice = together([label_flip(), label_flip()])
    assert twice.poison(train_of(torch.zeros(1, 2)), torch.zeros(1, 2), torch.tensor([0]), 0)[1].tolist() == [0]


def test_the_seed_chooses_who_is_hostile_and_the_share_how_many():
    attack = Attack(sign(), 0.2)
    chosen = [tuple(attack.hostile(range(20), seed)) for seed in range(5)]
    assert {len(ids) for ids in chosen} == {4}
    assert len(set(chosen)) > 1
    assert attack.hostile(reversed(range(20)), 0) == list(chosen[0])
    assert len(attack.hostile(range(2), 0)) == 1


def test_only_rows_of_hostile_clients_are_poisoned_and_shared_rows_stay_with_their_other_owners():
    points = (torch.arange(6.0).reshape(6, 1), torch.tensor([0, 1, 2, 0, 1, 2]))
    federation = toy.federation_of(points, points, [3, 3])
    federation.indices[:] = torch.tensor([0, 1, 2, 0, 1, 2])  # both clients hold the same rows
    poisoned = Attack(label_flip()).poisoned(federation, [1], 0)
    own = [poisoned.train.y[poisoned.indices[place]].tolist() for place in (slice(0, 3), slice(3, 6))]
    assert own == [[0, 1, 2], [2, 1, 0]]
    assert torch.equal(federation.train.y, points[1])
    assert Attack(sign()).poisoned(federation, [1], 0) is federation


def test_every_kind_is_in_the_registry_with_an_explanation():
    for make in ATTACKS.values():
        assert (make.__doc__ or "").endswith((".\n    ", "."))
        make()
