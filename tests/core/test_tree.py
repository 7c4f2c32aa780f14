from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core import tree
from fedstill.core.types import Output, Weights

NAMES = st.text(st.characters(blacklist_characters="/", codec="utf-8"), min_size=1, max_size=6)
LEAVES = st.lists(st.floats(-9, 9, width=32), max_size=3).map(torch.tensor)
TREES = st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=8)


def weights(a: float, b: float, count: int = 0) -> Weights:
    params = {"a": torch.full((2, 3), a), "b.bias": torch.full((3,), b)}
    return Weights(params, {"mean": torch.full((3,), a + b), "count": torch.tensor(count)})


def same(left, right) -> bool:
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return torch.equal(left, right) and left.dtype == right.dtype


@given(st.dictionaries(NAMES, TREES, max_size=3))
def test_flatten_and_unflatten_are_inverse(nested):
    flat = tree.flatten(nested)
    assert all(isinstance(leaf, torch.Tensor) for leaf in flat.values())
    assert len(flat) == len(list(tree.leaves(nested)))
    assert same(tree.unflatten(flat), nested)


def test_flatten_names_the_fields_of_a_named_tuple_and_keeps_dots_in_names():
    assert list(tree.flatten(weights(1, 2))) == ["params/a", "params/b.bias", "buffers/mean", "buffers/count"]
    assert list(tree.flatten({"x": {"y.z": torch.ones(1)}}, "top")) == ["top/x/y.z"]


def test_tree_map_keeps_dicts_tuples_and_named_tuples_what_they_are():
    nested = {"pair": (torch.ones(2), {"z": torch.zeros(1)}), "out": Output(torch.ones(1), torch.ones(2))}
    doubled = tree.tree_map(lambda leaf: 2 * leaf, nested)
    assert isinstance(doubled["out"], Output)
    assert isinstance(doubled["pair"], tuple)
    assert torch.equal(doubled["pair"][0], torch.full((2,), 2.0))
    assert [len(leaf) for leaf in tree.leaves(doubled)] == [2, 1, 1, 2]


def test_tree_map_of_trees_of_different_form_is_an_error_not_a_silent_cut():
    with pytest.raises(KeyError):
        tree.tree_map(torch.add, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    with pytest.raises(ValueError, match="shorter"):
        tree.tree_map(torch.add, (torch.ones(1), torch.ones(1)), (torch.ones(1),))


def test_stacked_trees_come_apart_again_row_by_row_and_join_again():
    several = [weights(i, -i, i) for i in range(4)]
    stacked = tree.stack(several)
    assert stacked.params["a"].shape == (4, 2, 3)
    for i, one in enumerate(several):
        assert same(tree.flatten(tree.rows(stacked, i)), tree.flatten(one))
    joined = tree.concatenate([tree.rows(stacked, slice(0, 1)), tree.rows(stacked, torch.tensor([1, 2, 3]))])
    assert same(tree.flatten(joined), tree.flatten(stacked))


def test_a_clone_shares_neither_memory_nor_gradient():
    original = {"w": torch.ones(2, requires_grad=True)}
    copy = tree.clone(original)
    copy["w"].zero_()
    assert not copy["w"].requires_grad
    assert torch.equal(original["w"], torch.ones(2))


def test_arithmetic_is_that_of_the_flat_vectors():
    generator = torch.Generator().manual_seed(0)
    a, b = ({n: torch.randn(s, generator=generator) for n, s in {"u": (2, 3), "v": (4,)}.items()} for _ in range(2))
    flat_a, flat_b = (np.concatenate([leaf.numpy().ravel() for leaf in t.values()]).astype(np.float64) for t in (a, b))

    def flat(params):
        return torch.cat([leaf.reshape(-1) for leaf in params.values()]).numpy()

    np.testing.assert_allclose(flat(tree.add(a, b, 0.5)), flat_a + 0.5 * flat_b, rtol=1e-6)
    np.testing.assert_allclose(flat(tree.subtract(a, b)), flat_a - flat_b, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(float(tree.dot(a, b)), flat_a @ flat_b, rtol=1e-5)
    np.testing.assert_allclose(float(tree.squared_distance(a, b)), ((flat_a - flat_b) ** 2).sum(), rtol=1e-5)
    assert not flat(tree.zeros_like(a)).any()


def test_interpolation_mixes_floats_and_takes_integers_from_the_first():
    mixed = tree.interpolate(weights(1.0, 2.0, count=7), weights(5.0, 4.0, count=9), 0.25)
    assert torch.equal(mixed.params["a"], torch.full((2, 3), 4.0))
    assert torch.equal(mixed.buffers["mean"], torch.full((3,), 0.25 * 3 + 0.75 * 9))
    assert int(mixed.buffers["count"]) == 7


def test_interpolation_at_its_ends_is_exact_even_against_nan():
    good, bad = weights(1 / 3, 0.1), weights(float("nan"), 0.7)
    assert tree.interpolate(good, bad, 1.0) is good
    assert tree.interpolate(bad, good, 0.0) is good


def test_bytes_count_every_leaf_in_its_own_width():
    leaves = {"f": torch.ones(3), "d": {"d": torch.ones(2, dtype=torch.float64)}, "b": torch.ones(5, dtype=torch.uint8)}
    assert tree.byte_size(leaves) == 3 * 4 + 2 * 8 + 5
    assert tree.byte_size({}) == 0


def test_to_device_moves_every_leaf():
    moved = tree.to_device(weights(1, 2), "meta")
    assert {leaf.device.type for leaf in tree.leaves(moved)} == {"meta"}
