"""FedRS: the smaller alpha, the less the rows of missing classes move."""

import torch
from label_skew import KNOWING, after_a_long_visit, assert_less_is_forgotten

from fedstill.methods import fedrs


def test_a_client_forgets_less_of_the_classes_that_it_lacks():
    assert_less_is_forgotten(fedrs())


def test_at_alpha_zero_the_rows_of_missing_classes_stay_where_they_are():
    for leaf, start in zip(after_a_long_visit(fedrs(alpha=0.0)).params.values(), KNOWING.params.values(), strict=True):
        assert torch.equal(leaf[2:], start[2:])
        assert (leaf[:2] - start[:2]).abs().max() > 0.1


def test_the_smaller_alpha_the_less_a_missing_class_moves():
    moved = [
        (after_a_long_visit(fedrs(alpha=alpha)).params["weight"] - KNOWING.params["weight"])[2:].norm().item()
        for alpha in (1.0, 0.5, 0.1)
    ]
    assert moved == sorted(moved, reverse=True)
