import math

import pytest
import torch
from by_hand import linear, linear_model, local_view, number, scalar
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.types import Batch, Need, Output
from fedstill.local import class_scales, cross_entropy, majority, restricted_softmax, smoothed_cross_entropy


def value(term, z, y, *, counts=(math.nan,) * 3, weight=None):
    batch = Batch(z, torch.as_tensor(y), torch.ones(len(z), dtype=z.dtype) if weight is None else number(weight))
    return term.loss(Output(z, z), batch, local_view(scalar(0.0), label_counts=number(counts)))


def with_gradient(term, z, y, **how):
    z = z.clone().requires_grad_()
    loss = value(term, z, y, **how)
    return loss.detach(), torch.autograd.grad(loss, z)[0]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 5, 5, 5], []),  # >= would call all of them majority
        ([6, 5, 5, 4], [0]),
        ([20, 0, 0, 0], [0]),
        ([9, 9, 1, 1], [0, 1]),
        ([7, 7, 7, 0], [0, 1, 2]),  # absent classes count in the mean
        ([0, 0, 0, 0], []),
        ([1, 0, 0, 0], [0]),
    ],
)
def test_a_majority_class_has_strictly_more_than_an_even_share(counts, expected):
    found = majority(number(counts))
    assert found.dtype == torch.bool
    assert found.nonzero().flatten().tolist() == expected


def test_of_as_many_shards_as_classes_a_class_with_one_shard_is_no_majority_class():
    """s = C: a shard holds exactly n_k / C samples, so only classes with two or more shards are majority classes."""
    shards = torch.tensor([3, 2, 1, 1, 1, 1, 1, 0, 0, 0])
    assert majority(50.0 * shards).tolist() == (shards > 1).tolist()


@given(st.lists(st.integers(0, 2**20), min_size=2, max_size=60))
def test_the_majority_rule_is_exact_in_float32(counts):
    found = majority(torch.tensor(counts, dtype=torch.float32)).tolist()
    assert found == [count * len(counts) > sum(counts) for count in counts]


@pytest.mark.parametrize("classes", [10, 41, 47, 61, 100])
def test_even_counts_are_a_tie_for_any_number_of_classes(classes):
    for count in (1, 3, 500):
        assert not majority(torch.full((classes,), float(count))).any()


def test_clients_with_different_counts_are_told_apart_under_vmap():
    counts = torch.tensor([[5.0, 5.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [float("nan")] * 3])
    expected = [[True, True, False], [False] * 3, [False] * 3, [False] * 3]
    assert torch.func.vmap(majority)(counts).tolist() == expected


LOGITS = number([[2.0, 1.0, 1.5]])


def test_smoothed_labels_are_the_cross_entropy_with_a_share_on_every_class():
    target = number([[0.1, 0.1, 0.1]]) + number([[0.0, 0.0, 0.7]])
    expected = -(target * torch.log_softmax(LOGITS, -1)).sum()
    assert value(smoothed_cross_entropy(0.3), LOGITS, [2]).item() == pytest.approx(expected.item())
    soft = number([[0.25, 0.0, 0.75]])
    smoothed = -((0.7 * soft + 0.1) * torch.log_softmax(LOGITS, -1)).sum()
    assert value(smoothed_cross_entropy(0.3), LOGITS, soft).item() == pytest.approx(smoothed.item())


def test_a_smoothed_label_is_met_best_by_its_own_log_probabilities():
    target = number([[0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]])
    _, pull = with_gradient(smoothed_cross_entropy(0.1), target.log(), [0])
    assert pull.abs().max() < 1e-15


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, 0.680270), (0.5, 0.503429), (0.0, 0.407606)])
def test_the_restricted_softmax_gives_the_cards_values(alpha, expected):
    """Class 2 is missing on the client."""
    found = value(restricted_softmax(alpha), LOGITS, [0], counts=(5.0, 3.0, 0.0))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_proportional_scales_have_the_cards_values():
    for counts in ([0.6, 0.3, 0.1, 0.0], [6.0, 3.0, 1.0, 0.0]):
        scales = class_scales(number(counts), 0.5, proportional=True)
        assert scales.tolist() == pytest.approx([1.0, 0.75, 7 / 12, 0.5])
    scaled = LOGITS * number([[1.0, 0.75, 0.5]])  # counts 4, 2, 0 at alpha 0.5
    expected = -torch.log_softmax(scaled, -1)[0, 1].item()
    found = value(restricted_softmax(0.5, proportional=True), LOGITS, [1], counts=(4.0, 2.0, 0.0))
    assert found.item() == pytest.approx(expected)


def test_binary_scales_ask_only_whether_a_class_is_there():
    assert class_scales(number([900.0, 1.0, 0.0]), 0.25).tolist() == [1.0, 1.0, 0.25]


@pytest.mark.parametrize("proportional", [False, True])
def test_scales_of_a_client_without_data_are_harmless(proportional):
    assert class_scales(number([0.0, 0.0, 0.0]), 0.5, proportional=proportional).tolist() == [0.5, 0.5, 0.5]


def test_all_classes_observed_is_the_plain_softmax_to_the_last_bit():
    for alpha in (0.0, 0.5):
        ours, plain = (
            with_gradient(term, LOGITS, [1], counts=(7.0, 1.0, 2.0))
            for term in (restricted_softmax(alpha), cross_entropy())
        )
        assert torch.equal(ours[0], plain[0])
        assert torch.equal(ours[1], plain[1])


@pytest.mark.parametrize(
    "term", [smoothed_cross_entropy(0.0), restricted_softmax(1.0), restricted_softmax(1.0, proportional=True)]
)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38])
def test_with_its_knob_off_a_risk_is_the_cross_entropy_to_the_last_bit(term, scale):
    """At 1e38 the mean of the log-probabilities overflows in float32: 0 times it must not be NaN."""
    z = scale * torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    y = torch.tensor([0, 1, 2, 2, 1, 0])
    ours, plain = (with_gradient(one, z, y, counts=(4.0, 0.0, 1.0)) for one in (term, cross_entropy()))
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    assert ours[1].isfinite().all()


def test_at_alpha_zero_the_row_of_a_missing_class_gets_no_gradient():
    start = linear(3, 4, seed=5)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, model = torch.tensor([0, 1, 1, 0, 0, 1]), linear_model()

    def pull(alpha):
        params = {name: leaf.clone().requires_grad_() for name, leaf in start.params.items()}
        output, _ = model.apply(start._replace(params=params), x)
        view = local_view(start, label_counts=number([3.0, 3.0, 0.0]))
        loss = restricted_softmax(alpha).loss(output, Batch(x, y, torch.ones(6, dtype=torch.float64)), view)
        return torch.autograd.grad(loss, [params["weight"], params["bias"]])

    for leaf in pull(0.0):
        assert leaf[2].abs().max() == 0.0
        assert leaf[:2].abs().max() > 0.01
    for leaf in pull(0.5):
        assert leaf[2].abs().max() > 0.01


def test_a_missing_class_is_pushed_down_less_the_smaller_alpha():
    pushes = [
        with_gradient(restricted_softmax(alpha), LOGITS, [0], counts=(5.0, 3.0, 0.0))[1][0, 2].item()
        for alpha in (1.0, 0.5, 0.1, 0.0)
    ]
    assert pushes == sorted(pushes, reverse=True)
    assert pushes[0] > pushes[1] > pushes[2] > pushes[3] == 0.0


@pytest.mark.parametrize("term", [smoothed_cross_entropy(0.1), restricted_softmax(0.5)])
def test_padding_changes_neither_loss_nor_gradient(term):
    padded, counts = torch.cat([LOGITS, number([[3e5, -3e5, 7.0]])]), (5.0, 3.0, 0.0)
    alone, own = with_gradient(term, LOGITS, [0], counts=counts)
    together, pull = with_gradient(term, padded, [0, 2], counts=counts, weight=[1.0, 0.0])
    assert torch.equal(together, alone)
    assert torch.equal(pull[:1], own)
    assert pull[1].abs().max() == 0.0


@pytest.mark.parametrize("term", [smoothed_cross_entropy(0.1), restricted_softmax(0.5, proportional=True)])
def test_half_precision_logits_are_fitted_in_float32(term):
    z = LOGITS.bfloat16()
    loss = value(term, z, [0], counts=(4.0, 2.0, 0.0), weight=None)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(value(term, LOGITS, [0], counts=(4.0, 2.0, 0.0)).item(), abs=1e-6)


def test_soft_targets_on_scaled_logits_equal_class_indices_when_one_hot():
    hard = value(restricted_softmax(0.5), LOGITS, [1], counts=(4.0, 2.0, 0.0))
    soft = value(restricted_softmax(0.5), LOGITS, number([[0.0, 1.0, 0.0]]), counts=(4.0, 2.0, 0.0))
    assert soft.item() == pytest.approx(hard.item(), abs=1e-14)


def test_both_take_the_place_of_the_cross_entropy_and_say_what_they_need():
    assert smoothed_cross_entropy(0.1).risk == "smoothed_cross_entropy"
    assert restricted_softmax(0.5).risk == "restricted_softmax"
    assert smoothed_cross_entropy(0.1).needs == frozenset()
    assert restricted_softmax(0.5).needs == {Need.LABEL_COUNTS}
