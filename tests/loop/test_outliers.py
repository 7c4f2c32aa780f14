"""What is far from honest uploads: by hand, and in runs whose clients differ honestly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import toy_uploads

from fedstill.core.types import Weights
from fedstill.loop.guard import Guard, admit
from fedstill.loop.outliers import believed, outliers, scale_of, shortened, sizes_of, too_long

HONEST = np.array([1.0, 2.0, 4.0, 8.0, 16.0])  # middle 4; distances in logarithms: 2, 1, 0, 1, 2 times log 2


def test_middle_and_spread_are_medians_of_logarithms():
    ((middle, spread, widest),) = scale_of({"move": HONEST}).values()
    assert middle == pytest.approx(math.log(4))
    assert spread == pytest.approx(1.4826 * math.log(2))
    assert widest == pytest.approx(math.log(4))


def test_what_is_zero_or_broken_says_nothing_about_others():
    assert scale_of({"move": np.array([0.0, math.nan, 3.0, math.inf])}) == {"move": [math.log(3), 0.0, 0.0]}
    assert scale_of({"move": np.zeros(4)}) == {}


@pytest.mark.parametrize(("value", "refused"), [(79.0, False), (81.0, True), (1e30, True), (math.inf, True)])
def test_in_the_first_round_the_cohort_itself_says_what_is_far(value, refused):
    """Six equal moves and one other: the spread is 0, and the factor 20 decides."""
    far = outliers({"move": np.array([4.0] * 6 + [value])}, [], 20.0)
    assert list(far) == ([6] if refused else [])


@pytest.mark.parametrize(("value", "refused"), [(2.0 * 2**7, False), (2.0 * 2**8, True)])
def test_where_clients_differ_by_themselves_the_reach_is_ten_spreads(value, refused):
    """10 spreads of the roots of HONEST are a factor of 2^7.4; another upload in the middle keeps the middle."""
    past = [scale_of({"move": np.sqrt(HONEST)})] * 9
    assert bool(outliers({"move": np.array([2.0, 2.0, 2.0, value])}, past, 20.0)) == refused


@pytest.mark.parametrize(("value", "refused"), [(4.0 * 9_000, False), (4.0 * 11_000, True)])
def test_no_difference_of_clients_lets_a_factor_of_ten_thousand_through(value, refused):
    """10 spreads of HONEST are a factor of 2^14.8 = 29,000; hostile uploads of an early cohort can widen them."""
    past = [scale_of({"move": HONEST})] * 9
    assert bool(outliers({"move": np.array([4.0, 4.0, 4.0, value])}, past, 20.0)) == refused


@pytest.mark.parametrize("count", [2, 3])
def test_a_cohort_of_two_is_judged_after_three_others(count):
    past = [scale_of({"move": np.array([1.0, 1.1])})] * count
    assert bool(outliers({"move": np.array([1.0, 1e6])}, past, 20.0)) == (count == 3)


@pytest.mark.parametrize("name", ["travel", "steps"])
def test_servers_divide_by_some_claims_so_a_tiny_one_is_raised(name):
    assert believed({name: np.array([5.0, 5.0, 5.0, 1e-6])}, [], 20.0)[name][0] == pytest.approx(5.0 / 20.0)


@pytest.mark.parametrize("name", ["size", "label counts", "travel", "steps", "size times move", "move per travel"])
@pytest.mark.parametrize("value", [1e-9, 0.0, 4e4])
def test_nobody_is_refused_for_what_it_claims_within_a_factor_of_ten_thousand(name, value):
    assert not outliers({name: np.array([5.0, 5.0, 5.0, value])}, [], 20.0)
    assert bool(outliers({name: np.array([5.0, 5.0, 5.0, 6e4])}, [], 20.0)) == ("move" not in name)


@pytest.mark.parametrize("name", ["travel", "steps"])
def test_who_claims_to_have_worked_backwards_is_refused(name):
    assert list(outliers({name: np.array([5.0, -5.0, 5.0, 5.0])}, [], 20.0)) == [1]


@pytest.mark.parametrize(("travel", "refused"), [(1.0, True), (10.0, False), (1e3, False), (1e30, True)])
def test_who_worked_longer_may_move_farther(travel, refused):
    sizes = {"move": np.array([1.0] * 6 + [150.0]), "travel": np.array([1.0] * 6 + [travel])}
    assert bool(outliers(sizes, [], 20.0)) == refused
    assert outliers({**sizes, "move": np.array([1.0] * 6 + [1e30])}, [], 20.0)


@pytest.mark.parametrize(("move", "travel", "refused"), [(5.0, 1.0, True), (4.0, 1.0, False), (5.0, 5.0, False)])
def test_who_moves_far_for_its_work_is_refused_for_size_times_move(move, travel, refused):
    """Six equal uploads, and one with five times the samples; the root of 20 is 4.47."""
    sizes = {
        "move": np.array([1.0] * 6 + [move]),
        "size": np.array([2.0] * 6 + [10.0]),
        "travel": np.array([1.0] * 6 + [travel]),
    }
    sizes["size times move"] = sizes["size"] * sizes["move"]
    assert bool(outliers(sizes, [], 20.0)) == refused


def test_a_claim_is_believed_to_the_second_widest_of_earlier_rounds_with_a_margin():
    """All sizes are 4 but one; the spread is 0, and the widest were 3, 5 and 200 times the middle."""
    past = [scale_of({"size": np.array([4.0] * 6 + [4.0 * wide])}) for wide in (3.0, 200.0, 5.0)]
    assert believed({"size": np.full(7, 4.0)}, past, 1000.0)["size"] == (0.0, pytest.approx(4.0 * 5.0 * 2.5))
    assert believed({"size": np.full(7, 4.0)}, past, 2.6)["size"][1] == pytest.approx(4.0 * 2.6)


def test_in_the_first_rounds_the_second_widest_pull_of_the_cohort_counts():
    limits = believed({name: np.array([4.0] * 6 + [12.0, 4e6]) for name in ("size times move", "size")}, [], 20.0)
    assert limits["size times move"][1] == pytest.approx(4.0 * 3.0 * 4.0)
    assert limits["size"][1] == pytest.approx(4.0 * 20.0)


def test_scales_of_earlier_versions_have_no_widest_and_say_what_they_can():
    past = [{"size": [math.log(4.0), 0.0]}] * 5
    assert believed({"size": np.full(7, 4.0)}, past, 20.0)["size"][1] == pytest.approx(4.0 * 20.0)
    assert list(outliers({"move": np.array([1.0, 1e6])}, [{"move": [0.0, 0.0]}] * 3, 20.0)) == [1]


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=12), st.floats(1e-3, 1e3), st.sampled_from([20.0, 100.0]))
def test_the_unit_of_a_size_does_not_matter(values, unit, factor):
    sizes = np.asarray(values)
    assert outliers({"move": sizes}, [], factor).keys() == outliers({"move": unit * sizes}, [], factor).keys()


@given(st.integers(5, 20), st.data())
def test_a_minority_cannot_have_an_honest_upload_refused(honest, data):
    """Honest sizes within a factor of 10, and fewer hostile ones of any size: no honest one is refused."""
    values = data.draw(st.lists(st.floats(1.0, 10.0), min_size=honest, max_size=honest))
    hostile = data.draw(st.lists(st.floats(1e-20, 1e30), max_size=(honest - 1) // 2))
    far = outliers({"move": np.asarray(values + hostile)}, [], 20.0)
    assert all(place >= honest for place in far)


@pytest.mark.parametrize(("name", "length"), [("move", 4.0 * math.sqrt(20.0)), ("the norm of 'control'", 4.0)])
@pytest.mark.parametrize("value", [17.0, 18.0, 79.0])
def test_from_the_root_of_the_factor_on_a_move_gets_that_length_and_a_slot_the_middle(name, length, value):
    """Six equal lengths of 4 and one other; the root of 20 is 4.47."""
    shares = too_long({name: np.array([4.0] * 6 + [value])}, [], 20.0)
    assert shares.keys() == ({name} if value > 17.9 else set())
    if shares:
        np.testing.assert_allclose(shares[name], [1.0] * 6 + [length / value])


@pytest.mark.parametrize(("value", "long"), [(2.0 * 60, False), (2.0 * 62, True)])
def test_where_clients_differ_by_themselves_eight_spreads_are_not_too_long(value, long):
    """8 spreads of the roots of HONEST are a factor of 2^5.93 = 61."""
    past = [scale_of({"move": np.sqrt(HONEST)})] * 9
    assert bool(too_long({"move": np.array([2.0, 2.0, 2.0, value])}, past, 20.0)) == long


def test_lengths_that_fall_from_round_to_round_do_not_hide_a_long_one():
    """Honest slots fall to a half each round: 15 times the present length is 4 times that of the middle round."""
    past = [scale_of({"the norm of 'control'": np.full(10, 2.0**ago)}) for ago in range(1, 5)]
    slots = {"the norm of 'control'": np.array([1.0] * 9 + [15.0])}
    assert not outliers(slots, past, 20.0)
    assert too_long(slots, past, 20.0)["the norm of 'control'"][-1] == pytest.approx(1 / 15)


def test_two_uploads_cannot_say_which_of_them_is_too_long():
    past = [scale_of({"move": np.ones(5)})] * 9
    assert too_long({"move": np.array([1.0, 1000.0])}, past, 20.0) == {}
    assert too_long({"move": np.array([1.0, 1.0, 1000.0])}, past, 20.0).keys() == {"move"}


@given(st.lists(st.floats(1.0, 4.4), min_size=3, max_size=12), st.integers(0, 10))
def test_honest_uploads_within_the_root_of_the_factor_are_never_shortened(values, rounds):
    past = [scale_of({"move": np.array([1.0, 1.0, 1.0])})] * rounds
    assert too_long({"move": np.asarray(values)}, past, 20.0) == {}


def test_a_client_that_keeps_its_length_keeps_every_bit():
    uploads, start = toy_uploads()
    params = {**uploads.weights.params, "weight": torch.full_like(uploads.weights.params["weight"], 1e-20)}
    start = Weights({**start.params, "weight": torch.ones_like(start.params["weight"])}, start.buffers)
    uploads = uploads._replace(weights=uploads.weights._replace(params=params))
    got = shortened(uploads, start, {"move": np.array([1.0, 0.5, 1.0, 1.0])}).weights.params["weight"]
    assert got[:, 0, 0].tolist() == [params["weight"][0, 0, 0].item(), 0.5, *params["weight"][2:, 0, 0].tolist()]


def test_every_part_of_an_upload_has_a_size():
    uploads, start = toy_uploads()
    sizes = sizes_of(uploads, start)
    assert set(sizes) == {
        "move", "buffers", "the norm of 'control'", "size", "size times move", "steps", "travel", "move per travel",
    }  # fmt: skip
    expected = sum(
        (uploads.weights.params[name] - leaf).square().sum((*range(1, leaf.ndim + 1),))
        for name, leaf in start.params.items()
    )
    torch.testing.assert_close(sizes["move"], expected.sqrt())


@pytest.mark.parametrize("part", ["params", "buffers", "extra", "size", "travel", "steps"])
@pytest.mark.parametrize("value", [1e6, 1e20])
def test_one_huge_upload_is_refused_or_lowered_in_the_first_round_with_its_size(part, value):
    uploads, start = toy_uploads(extra={"control": {"weight": torch.ones(4, 2)}})
    start = Weights(start.params, {**start.buffers, "scale": start.buffers["scale"] + 0.5})

    def huge(leaf):
        leaf = leaf.clone()
        leaf[1] = value * 10
        return leaf

    if part in ("params", "buffers"):
        whole = getattr(uploads.weights, part)
        changed = {name: huge(leaf) if leaf.is_floating_point() else leaf for name, leaf in whole.items()}
        uploads = uploads._replace(weights=uploads.weights._replace(**{part: changed}))
    elif part == "extra":
        changed = {name: huge(leaf) for name, leaf in uploads.extra["control"].items()}
        uploads = uploads._replace(extra={**uploads.extra, "control": changed})
    else:
        uploads = uploads._replace(**{part: huge(getattr(uploads, part))})
    admitted = admit(uploads, start, Guard(size_cap=None), round=1, past=[])
    assert {record["client"] for record in admitted.records} == {11}
    if part in ("size", "travel", "steps"):  # a claim within a factor of 10,000 is lowered
        known = getattr(uploads, part)
        wide = uploads._replace(**{part: torch.where(torch.arange(4) == 1, 100 * known[[0, 2, 3]].max(), known)})
        lowered = admit(wide, start, Guard(), round=1, past=[])
        got = getattr(lowered.uploads, part)
        assert torch.equal(got[[0, 2, 3]], known[[0, 2, 3]])
        assert got[1] <= 20.01 * known[[0, 2, 3]].max()
        assert all(record["note"] for record in lowered.records)
    assert admitted.kept.tolist() == [0, 2, 3]
    assert not admit(uploads, start, Guard(size_cap=None, outlier=0), round=1, past=[]).records


def test_an_upload_that_is_a_little_too_large_in_both_size_and_move_counts_for_fewer_samples():
    """Of four equal uploads one says 8 times the samples and moves 4 times as far; earlier rounds had each alone."""
    uploads, start = toy_uploads()
    moves = uploads.weights.params["weight"] - start.params["weight"]
    factor = torch.tensor([1.0, 4.0, 1.0, 1.0]) / moves.flatten(1).norm(dim=1)
    weight = start.params["weight"] + factor.reshape(-1, 1, 1) * moves
    bias = start.params["bias"].expand_as(uploads.weights.params["bias"])
    size = torch.tensor([5.0, 40.0, 5.0, 5.0], dtype=torch.float64)
    weights = uploads.weights._replace(params={"weight": weight, "bias": bias})
    far = uploads._replace(weights=weights, size=size)
    past = 3 * [{"size": [math.log(5), 0.0, math.log(8)], "size times move": [math.log(5), 0.0, math.log(8)]}]
    admitted = admit(far, start, Guard(), round=4, past=past)
    (record,) = [record for record in admitted.records if record["reason"].startswith("size")]
    assert (record["client"], record["note"]) == (11, True)
    torch.testing.assert_close(admitted.uploads.size, torch.tensor([5.0, 25.0, 5.0, 5.0], dtype=torch.float64))
    torch.testing.assert_close(admitted.uploads.weights.params["weight"], weight)


def test_refused_uploads_do_not_say_what_is_honest():
    uploads, start = toy_uploads()
    params = {name: leaf.clone() for name, leaf in uploads.weights.params.items()}
    params["weight"][0] = 1e8
    admitted = admit(
        uploads._replace(weights=uploads.weights._replace(params=params)), start, Guard(), round=1, past=[]
    )
    kept = uploads.size[1:].double().numpy()
    assert admitted.scale["size"] == scale_of({"size": kept})["size"]
