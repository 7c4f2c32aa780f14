import dataclasses
import math
from typing import get_args

import numpy as np
import pytest
import torch
from by_hand import number
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from largest_tensor import LargestTensor
from server_rounds import CLASSES, clients_models, network, points, server_round
from students import student_of
from whole_server import whole

from fedstill.core.types import Need
from fedstill.methods import avglogit
from fedstill.server.distill.student import divergence
from fedstill.server.distill.targets import (
    Pool,
    capped,
    cluster_labels,
    confident_share,
    entropy,
    hard_belief,
    hard_targets,
    maximum_rule,
    mean_rule,
    median,
    mix,
    pool_targets,
    shares_by_accuracy,
    shares_without_worst,
    sharpen,
    soft_belief,
    standardised,
    targets_of,
    teacher_shares,
)


@st.composite
def ensembles(draw, teachers=(1, 5), samples=(1, 4), classes=(2, 5)):
    """Logits (T, M, K); each number lies between two."""
    shape = [draw(st.integers(*bounds)) for bounds in (teachers, samples, classes)]
    return torch.from_numpy(draw(arrays("float64", shape, elements=st.floats(-9, 9))))


def several_teachers(count=3, samples=5, classes=4):
    return torch.randn(count, samples, classes, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize(
    ("pool", "expected"), [("logits", [0.268941, 0.731059]), ("probabilities", [0.449392, 0.550608])]
)
def test_two_teachers_pool_as_worked_by_hand(pool, expected):
    targets = pool_targets(number([[[2.0, 0.0]], [[0.0, 4.0]]]), pool)
    assert targets[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [("logits", [0.989437, 0.009304, 0.001259]), ("probabilities", [0.363519, 0.606295, 0.030186])],
)
def test_one_loud_teacher_captures_averaged_logits_but_not_probabilities(pool, expected):
    logits = number([[[20.0, 0.0, 0.0]], [[0.0, 3.0, 0.0]], [[0.0, 3.0, 0.0]]])
    assert pool_targets(logits, pool)[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pool", ["logits", "probabilities", "median", "trimmed"])
def test_a_single_teacher_is_its_own_target_and_so_is_one_that_has_all_the_share(pool):
    logits = several_teachers()
    torch.testing.assert_close(pool_targets(logits[:1], pool), torch.softmax(logits[0], -1))
    alone = pool_targets(logits, pool, share=number([0.0, 1.0, 0.0]))
    torch.testing.assert_close(alone, torch.softmax(logits[1], -1))


@given(ensembles(), st.sampled_from(get_args(Pool)), st.floats(0.2, 5.0))
def test_targets_are_probabilities(logits, pool, temperature):
    targets = pool_targets(logits, pool, temperature=temperature)
    assert (targets >= 0).all()
    torch.testing.assert_close(targets.sum(1), torch.ones(logits.shape[1], dtype=torch.float64))


def test_averaged_logits_are_the_geometric_mean_of_probabilities_and_averaged_probabilities_the_arithmetic():
    share = number([0.5, 0.2, 0.3])
    probabilities = torch.softmax(several_teachers(), -1)
    geometric = torch.exp((share.reshape(-1, 1, 1) * probabilities.log()).sum(0))
    expected = geometric / geometric.sum(-1, keepdim=True)
    torch.testing.assert_close(pool_targets(several_teachers(), share=share), expected)
    arithmetic = (share.reshape(-1, 1, 1) * probabilities).sum(0)
    torch.testing.assert_close(pool_targets(several_teachers(), "probabilities", share=share), arithmetic)


THREE = number([[[2.0, 0.0]], [[1.0, 0.0]], [[-60.0, 0.0]]])  # centred: 1, 0.5 and -30 for the first class


@pytest.mark.parametrize(
    ("pool", "share", "first"),
    [
        ("median", None, 1 / (1 + math.exp(-1.0))),
        ("median", [0.1, 0.2, 0.7], 1 / (1 + math.exp(60.0))),  # most of the weight is no minority
        ("median", [0.25, 0.25, 0.5], 1 / (1 + math.exp(29.5))),  # halfway between -30 and 0.5
        ("vote", None, 2 / 3),
        ("vote", [0.5, 0.2, 0.3], 0.7),
        # a fifth at either end leaves 2/15 of a third of each outer teacher: (1 x 2 + 0.5 x 5 - 30 x 2) / 9
        ("trimmed", None, 1 / (1 + math.exp(2 * 55.5 / 9))),
    ],
)
def test_pools_that_a_minority_does_not_move_as_worked_by_hand(pool, share, first):
    found = pool_targets(THREE, pool, share=None if share is None else number(share))
    assert found[0].tolist() == pytest.approx([first, 1 - first], rel=1e-9)


@given(ensembles(teachers=(3, 7)), st.sampled_from(["median", "vote"]), st.floats(-1e6, 1e6))
def test_what_one_loud_teacher_says_moves_such_a_pool_no_farther_than_an_honest_one_could(logits, pool, loud):
    """The pooled logits of each class stay between those of the others, and a vote moves by one vote."""
    captured = logits.clone()
    captured[0] = 0.0
    captured[0, :, 0] = loud
    if pool == "vote":
        moved = (pool_targets(captured, pool) - pool_targets(logits, pool)).abs().max()
        assert float(moved) <= 1 / len(logits) + 1e-9
        return
    level = captured - captured.mean(-1, keepdim=True)
    middle = median(level)
    assert bool((middle >= level[1:].amin(0) - 1e-9).all() and (middle <= level[1:].amax(0) + 1e-9).all())


@given(ensembles(teachers=(1, 6)), st.permutations(range(6)))
def test_the_median_of_equal_teachers_is_that_of_numpy_in_any_order(logits, order):
    shuffled = logits[[place for place in order if place < len(logits)]]
    assert torch.allclose(median(shuffled), torch.from_numpy(np.median(logits.numpy(), axis=0)))


@given(arrays("float64", st.tuples(st.integers(1, 9), st.integers(1, 3)), elements=st.floats(0, 5)), st.floats(1, 9))
def test_no_share_is_above_the_cap_and_all_shares_still_sum_to_one(raw, cap):
    assume((raw.sum(0) > 1e-6).all())
    share = torch.from_numpy(raw / raw.sum(0))
    found = capped(share, cap)
    torch.testing.assert_close(found.sum(0), torch.ones(share.shape[1], dtype=torch.float64))
    assert float(found.max()) <= max(cap, 1.0) / len(share) + 1e-9
    if float(share.max()) <= cap / len(share):
        assert torch.equal(found, share)


def test_what_is_above_the_cap_goes_to_the_others_in_their_proportions():
    assert capped(number([0.7, 0.2, 0.1, 0.0]), 1.6).tolist() == pytest.approx([0.4, 0.4, 0.2, 0.0])
    assert capped(number([1.0, 0.0, 0.0, 0.0]), 2.0).tolist() == pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6])
    assert capped(number([0.9, 0.1]), None).tolist() == [0.9, 0.1]


def test_every_sample_may_weigh_the_teachers_in_its_own_way():
    logits, share = several_teachers(2, 3), number([[1.0, 0.0, 0.25], [0.0, 1.0, 0.75]])
    found = pool_targets(logits, "probabilities", share=share)
    first, second = torch.softmax(logits, -1)
    torch.testing.assert_close(found[0], first[0])
    torch.testing.assert_close(found[1], second[1])
    torch.testing.assert_close(found[2], 0.25 * first[2] + 0.75 * second[2])


@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_a_constant_on_a_teachers_logits_changes_nothing_but_a_scale_does(pool):
    shifted, scaled = several_teachers(), several_teachers()
    shifted[1] += torch.arange(5, dtype=torch.float64).unsqueeze(-1)
    scaled[1] *= 3.0
    torch.testing.assert_close(pool_targets(shifted, pool), pool_targets(several_teachers(), pool))
    assert not torch.allclose(pool_targets(scaled, pool), pool_targets(several_teachers(), pool), atol=1e-3)


@pytest.mark.parametrize("pool", get_args(Pool))
def test_temperature_divides_every_teacher(pool):
    logits = several_teachers()
    torch.testing.assert_close(pool_targets(logits, pool, temperature=2.0), pool_targets(logits / 2.0, pool))


@given(ensembles(), st.integers(0, 99))
def test_learning_the_mean_of_probabilities_is_learning_from_every_teacher_at_once(logits, seed):
    """KL(AP || q) = sum_k w_k KL(p_k || q) - [H(AP) - sum_k w_k H(p_k)]: the bracket does not depend on q."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(len(logits), generator=generator, dtype=torch.float64) + 0.1
    share = share / share.sum()
    student = torch.randn(logits.shape[1:], generator=generator, dtype=torch.float64).requires_grad_()
    members = torch.softmax(logits, -1)
    pooled = pool_targets(logits, "probabilities", share=share)
    together = divergence(pooled, student)
    apart = mix(divergence(members, student.expand_as(members)).unsqueeze(-1), share)[:, 0]
    bracket = entropy(pooled) - mix(entropy(members).unsqueeze(-1), share)[:, 0]
    torch.testing.assert_close(together, apart - bracket)
    pulls = [torch.autograd.grad(loss.sum(), student)[0] for loss in (together, apart)]
    torch.testing.assert_close(*pulls)


def test_standardised_logits_as_worked_by_hand():
    logits = number([[[2.0, 0.0], [0.0, 4.0]]])
    found = standardised(logits, 1.0)[0]
    torch.testing.assert_close(found, number([[0.739711, 0.260289], [0.110177, 0.889823]]), rtol=0, atol=1e-6)
    found = standardised(logits, 4.0)[0]
    torch.testing.assert_close(found, number([[0.9849, 0.0151], [0.000235, 0.999765]]), rtol=0, atol=5e-5)


@given(ensembles(samples=(2, 4)), st.floats(1e-3, 1e3))
def test_the_scale_of_a_teacher_does_not_count(logits, scale):
    assume(float(logits.flatten(1).std(dim=1).min()) > 1e-3)  # nearly constant logits are mostly rounding
    louder = logits.clone()
    louder[-1] *= scale
    torch.testing.assert_close(standardised(louder), standardised(logits), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("level", [0.0, 0.1, -7.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_logits_are_an_even_guess(level, dtype):
    found = standardised(torch.full((2, 3, 4), level, dtype=dtype))
    torch.testing.assert_close(found, torch.full((2, 3, 4), 0.25, dtype=dtype))


def test_large_logits_that_differ_little_keep_their_digits():
    """In float32, dividing 1e4 by a small std first would leave steps of several units."""
    logits = 1e4 + 0.01 * several_teachers(2, 200, 3)
    kept = logits.float()
    torch.testing.assert_close(standardised(kept), standardised(kept.double()).float(), rtol=1e-3, atol=1e-4)


def test_one_deviation_is_taken_over_all_of_a_teachers_logits():
    """Adding to one sample's logits changes the std, and so the answers to all others: it is not taken by row."""
    logits = several_teachers(1, 3)
    moved = logits.clone()
    moved[0, 0] += 50.0
    assert not torch.allclose(standardised(moved)[0, 1:], standardised(logits)[0, 1:], atol=1e-2)


def test_half_precision_logits_are_pooled_in_float32():
    half = several_teachers().to(torch.bfloat16)
    assert pool_targets(half).dtype == standardised(half).dtype == torch.float32


PAIR = [[[0.9, 0.1]], [[0.5, 0.5]]]


def test_entropies_and_shares_as_worked_by_hand():
    pair = number(PAIR)
    assert entropy(pair).flatten().tolist() == pytest.approx([0.325083, 0.693147], abs=1e-6)
    share = confident_share(pair)
    assert share.flatten().tolist() == pytest.approx([0.590991, 0.409009], abs=1e-6)
    assert mix(pair, share)[0].tolist() == pytest.approx([0.736396, 0.263604], abs=1e-6)


def test_a_sure_answer_has_no_entropy_and_an_even_one_the_most():
    assert entropy(number([1.0, 0.0, 0.0])).item() == 0.0
    assert entropy(number([0.25] * 4)).item() == pytest.approx(math.log(4))


def test_the_rectified_target_as_worked_by_hand():
    """u sum_k w_k q_k + (1 - u) / 2 (q_sent + q_average), u = 0.5."""
    pair, known = number(PAIR), number([[[0.6, 0.4]], [[0.8, 0.2]]])
    target = 0.5 * mix(pair, confident_share(pair)) + 0.5 * mix(known)
    assert target[0].tolist() == pytest.approx([0.718198, 0.281802], abs=1e-6)


@given(ensembles(), st.floats(0.0, 1.0))
def test_models_that_say_the_same_are_a_target_that_says_it_for_any_trust(logits, u):
    alike = torch.softmax(logits[:1], -1).expand(4, -1, -1)
    target = u * mix(alike[:2], confident_share(alike[:2])) + (1 - u) * mix(alike[2:])
    torch.testing.assert_close(target, alike[0])


@given(ensembles())
def test_shares_sum_to_one_favour_the_surest_and_are_even_between_equally_sure_teachers(logits):
    probabilities = torch.softmax(logits, -1)
    share = confident_share(probabilities)
    torch.testing.assert_close(share.sum(0), torch.ones(logits.shape[1], dtype=torch.float64))
    surest = entropy(probabilities).min(0).values
    torch.testing.assert_close(entropy(probabilities).gather(0, share.argmax(0, keepdim=True))[0], surest)
    turned = torch.stack([probabilities[0], probabilities[0].flip(-1)])  # the same entropy, other classes
    torch.testing.assert_close(mix(turned, confident_share(turned)), turned.mean(0))  # AvgProb


BOTH = [[[0.8, 0.1, 0.1], [0.4, 0.35, 0.25]], [[0.1, 0.85, 0.05], [0.5, 0.3, 0.2]]]  # samples A and B


@pytest.mark.parametrize(
    ("rule", "sure", "kept"), [(maximum_rule, [0.85, 0.5], [True, False]), (mean_rule, [0.475, 0.45], [False, False])]
)
def test_both_rules_as_worked_by_hand(rule, sure, kept):
    targets = rule(number(BOTH), 0.75)
    assert targets.probabilities.argmax(1).tolist() == [1, 0]
    assert targets.probabilities.max(1).values.tolist() == pytest.approx(sure)
    assert targets.kept.tolist() == kept


@given(ensembles(), st.floats(0, 1))
def test_whatever_the_mean_rule_keeps_the_maximum_rule_keeps(logits, threshold):
    for precision in (torch.float32, torch.float64):
        probabilities = torch.softmax(logits.to(precision), -1)
        for bound in (threshold, float(probabilities.mean(0).max())):
            by_mean, by_maximum = (rule(probabilities, bound).kept for rule in (mean_rule, maximum_rule))
            assert not (by_mean & ~by_maximum).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_equal_teachers_is_kept_where_each_of_them_is_however_it_rounds(dtype):
    """The sum of n equal numbers over n may be a little more than each."""
    alone = torch.softmax(several_teachers(1, 500, 3).to(dtype), -1)
    for count in (3, 5, 6, 7, 10):
        alike = alone.expand(count, -1, -1)
        for bound in alike.mean(0).amax(1)[:50].tolist():
            by_mean, by_maximum = (rule(alike, bound).kept for rule in (mean_rule, maximum_rule))
            assert not (by_mean & ~by_maximum).any()


@given(ensembles(teachers=(2, 5)), st.floats(0, 1))
def test_one_more_teacher_never_loses_a_label_of_the_maximum_rule(logits, threshold):
    probabilities = torch.softmax(logits, -1)
    fewer, more = (maximum_rule(p, threshold).kept for p in (probabilities[:-1], probabilities))
    assert not (fewer & ~more).any()


@given(ensembles(teachers=(1, 1)), st.floats(0, 1))
def test_with_one_teacher_the_rules_agree(logits, threshold):
    by_maximum, by_mean = (rule(torch.softmax(logits, -1), threshold) for rule in (maximum_rule, mean_rule))
    assert torch.equal(by_maximum.kept, by_mean.kept)
    assert torch.equal(by_maximum.probabilities, by_mean.probabilities)


@pytest.mark.parametrize("rule", [maximum_rule, mean_rule])
@pytest.mark.parametrize(("threshold", "kept"), [(0.0, 3), (0.75, 2), (0.750001, 1), (1.0, 1), (1.01, 0)])
def test_a_threshold_keeps_what_reaches_it_zero_keeps_all_and_above_one_nothing(rule, threshold, kept):
    probabilities = number([[[0.75, 0.25], [0.5, 0.5], [0.0, 1.0]]])
    assert int(rule(probabilities, threshold).kept.sum()) == kept


def test_ties_go_to_the_first_teacher_and_the_lowest_class():
    first, second = [0.0, 0.75, 0.25], [0.75, 0.25, 0.0]
    assert maximum_rule(number([[first], [second]]), 0.5).probabilities.argmax(1).item() == 1
    assert maximum_rule(number([[second], [first]]), 0.5).probabilities.argmax(1).item() == 0
    for rule in (maximum_rule, mean_rule):
        assert rule(number([[[0.2, 0.4, 0.4]]]), 0.0).probabilities.argmax(1).item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 3, 7, 10, 62, 100])
@pytest.mark.parametrize("rule", [maximum_rule, mean_rule])
def test_an_even_guess_is_the_lowest_class(rule, classes, dtype):
    even = torch.softmax(torch.zeros(3, 2, classes, dtype=dtype), -1)
    assert rule(even, 0.0).probabilities.argmax(1).tolist() == [0, 0]


@given(ensembles())
def test_hard_targets_are_probabilities_that_name_their_label(logits):
    probabilities = torch.softmax(logits, -1)
    best, label = probabilities[0].max(1)
    targets = hard_targets(label, best > 0.5, logits.shape[-1], best)
    assert torch.equal(targets.probabilities.argmax(1), label)
    torch.testing.assert_close(targets.probabilities.sum(1), torch.ones_like(best))
    assert (targets.probabilities >= 0).all()
    plain = hard_targets(label, best > 0.5, logits.shape[-1]).probabilities
    assert torch.equal(plain, torch.nn.functional.one_hot(label, logits.shape[-1]).float())


# What teachers say together: powers, hard labels and shares, with the numbers of the method cards.


def logits_of(probabilities):
    return number([[[math.log(p) for p in probabilities]]])


@pytest.mark.parametrize(
    ("before", "exponent", "after"),
    [
        ([0.8, 0.2], 0.75, [0.738796, 0.261204]),  # MrTF's code
        ([0.6, 0.4], 2.0, [0.692308, 0.307692]),  # FedBE, T = 0.5
        ([0.6, 0.4], 1.0, [0.6, 0.4]),
        ([0.5, 0.5], 7.0, [0.5, 0.5]),
    ],
)
@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_the_pooled_probabilities_are_raised_to_a_power_as_worked_by_hand(pool, before, exponent, after):
    assert soft_belief(pool, exponent=exponent)(logits_of(before))[0].tolist() == pytest.approx(after, abs=1e-6)


def test_hard_labels_are_kept_as_worked_by_hand():
    """Card 8: sample A [.8, .1, .1] and [.1, .85, .05], sample B [.4, .35, .25] and [.5, .3, .2], tau = .75."""
    said = number([[[0.8, 0.1, 0.1], [0.4, 0.35, 0.25]], [[0.1, 0.85, 0.05], [0.5, 0.3, 0.2]]]).log()
    by_max, by_mean = hard_belief("max")(said), hard_belief("mean")(said)
    assert (by_max.probabilities.argmax(1).tolist(), by_max.kept.tolist()) == ([1, 0], [True, False])
    assert (by_mean.probabilities.argmax(1).tolist(), by_mean.kept.tolist()) == ([1, 0], [False, False])
    assert hard_belief("mean", threshold=0.46)(said).kept.tolist() == [True, False]


SHARES = [
    (shares_by_accuracy, [0.6, 0.2, 0.11], [0.75, 0.25, 0.0]),  # ten classes: below 0.12 is a guess
    (shares_by_accuracy, [0.6, 0.2, 0.12], [0.6 / 0.92, 0.2 / 0.92, 0.12 / 0.92]),
    (shares_by_accuracy, [0.1, 0.1], [0.5, 0.5]),  # nobody knows anything
    (shares_without_worst, [0.6, 0.2, 0.11], [0.5, 0.5, 0.0]),
    (shares_without_worst, [0.9, 0.5, 0.5, 0.5, 0.5, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2, 0.0]),  # .46 - 1.5 * .08 = .34
    (shares_without_worst, [0.9, 0.6, 0.4, 0.5], [0.25] * 4),  # .5 - 1.5 * .082 = .38
    (shares_without_worst, [0.3, 0.3, 0.3], [1 / 3] * 3),
    (shares_without_worst, [0.05], [1.0]),
]


@pytest.mark.parametrize(("judge", "accuracy", "shares"), SHARES)
def test_teachers_count_by_their_accuracy_as_worked_by_hand(judge, accuracy, shares):
    assert judge(number(accuracy), 10).tolist() == pytest.approx(shares)


def test_teachers_are_examined_on_the_validation_set():
    """Labels are what the first model says of 22 samples and the second of 18: each is right about its own."""
    first, second = clients_models(network(), 2)
    this = server_round([first, second], network())
    x, _ = points(40, "exam")
    known, other = (this.trainer.outputs(model, x).logits.argmax(1) for model in (first, second))
    y = torch.cat([known[:22], other[22:]])
    right = [(answer == y).double().mean().item() for answer in (known, other)]
    assert 1.2 / CLASSES < min(right) < max(right) < 1.0
    exam = dataclasses.replace(this, validation=(x, y))
    assert teacher_shares("validation").of(exam, {}).tolist() == pytest.approx([one / sum(right) for one in right])
    assert exam.metrics["teachers_kept"] == 2


def test_a_teacher_that_is_no_better_than_a_guess_is_dropped():
    first, second = clients_models(network(), 2)
    this = server_round([first, second], network())
    x, _ = points(40, "exam")
    known, other = (this.trainer.outputs(model, x).logits.argmax(1) for model in (first, second))
    differ = known != other
    exam = dataclasses.replace(this, validation=(x[differ], known[differ]))
    assert teacher_shares("drop_worst").of(exam, {}).tolist() == [1.0, 0.0]
    assert teacher_shares("validation").of(exam, {}).tolist() == [1.0, 0.0]
    assert exam.metrics["teachers_kept"] == 1


def test_teachers_that_count_alike_need_no_shares_and_sizes_need_no_exam():
    assert teacher_shares("uniform") is None
    assert teacher_shares("size").needs == frozenset()
    assert teacher_shares("validation").needs == teacher_shares("drop_worst").needs == {Need.VALIDATION}


def test_weighted_teachers_are_what_the_student_is_taught():
    models, sizes = clients_models(network(), 3), [5.0, 1.0, 2.0]
    this = server_round(models, network(), sizes=sizes)
    method = avglogit(student=student_of(avglogit, steps=1), teacher_weighting="size")
    _, state = whole(method).apply(this.start, whole(method).init(this.start), this)
    said = [this.trainer.outputs(model, this.unlabeled).logits for model in models]
    assert this.teachers == pytest.approx({0: 5 / 8, 1: 1 / 8, 2: 2 / 8})
    mean = sum(share / 8.0 * logits for share, logits in zip(sizes, said, strict=True))
    torch.testing.assert_close(targets_of(state["distill"]).probabilities, torch.softmax(mean, 1))


POINTS = [[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]]

BELIEF = [[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]]


@st.composite
def beliefs(draw, samples=6):
    """(M, K) rows that sum to 1."""
    classes = draw(st.integers(2, 5))
    logits = draw(arrays("float64", (samples, classes), elements=st.floats(-6, 6)))
    return torch.softmax(torch.from_numpy(logits), -1)


def random_points(seed, samples=6, width=3):
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("before", "temperature", "after"),
    [
        ([0.6, 0.4], 0.5, [0.692308, 0.307692]),  # FedBE
        ([0.8, 0.2], 1 / 0.75, [0.738796, 0.261204]),  # the power 0.75 of MrTF's released code
        ([0.6, 0.4], 1.0, [0.6, 0.4]),
        ([0.25] * 4, 0.1, [0.25] * 4),
    ],
)
def test_sharpening_as_worked_by_hand(before, temperature, after):
    assert sharpen(number(before), temperature).tolist() == pytest.approx(after, abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 0.5, 1.0, 2.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_impossible_stays_impossible_at_every_temperature(temperature, dtype):
    found = sharpen(torch.tensor([[0.7, 0.3, 0.0], [1.0, 0.0, 0.0]], dtype=dtype), temperature)
    assert (found[:, 2] == 0).all()
    assert found[1].tolist() == [1.0, 0.0, 0.0]


@given(beliefs(), st.floats(0.05, 20.0))
def test_sharpening_keeps_the_order_of_classes_and_rows_that_sum_to_one(belief, temperature):
    found = sharpen(belief, temperature)
    torch.testing.assert_close(found.sum(1), torch.ones(len(belief), dtype=torch.float64))
    ordered = belief.sort(dim=1).indices
    assert (found.gather(1, ordered).diff(dim=1) >= -1e-12).all()
    largest, before = found.max(1).values, belief.max(1).values
    assert ((largest >= before - 1e-12) if temperature <= 1 else (largest <= before + 1e-12)).all()


@pytest.mark.parametrize(
    ("sharpness", "expected"),
    [
        (4.0, [[0.723934, 0.276066], [0.316463, 0.683537], [0.490595, 0.509405]]),
        (8.0, [[0.873041, 0.126959], [0.176514, 0.823486], [0.481197, 0.518803]]),
    ],
)
def test_clustered_labels_as_worked_by_hand(sharpness, expected):
    """The centres are (1.5, 1.375) and (1.142857, 2)."""
    found = cluster_labels(number(BELIEF), number(POINTS), sharpness)
    torch.testing.assert_close(found, number(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("sharpness", "expected"), [(4.0, [0.982014, 0.017986]), (8.0, [0.999665, 0.000335])])
def test_sure_labels_on_orthogonal_features_are_as_sure_as_the_sharpness_allows(sharpness, expected):
    found = cluster_labels(torch.eye(2), torch.eye(2), sharpness)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert found[1].tolist() == pytest.approx(expected[::-1], abs=1e-6)


@pytest.mark.parametrize(
    ("classes", "sharpness", "ceiling"), [(10, 4.0, 0.8585), (10, 8.0, 0.9970), (62, 4.0, 0.4723), (100, 8.0, 0.9679)]
)
def test_no_target_on_non_negative_features_passes_the_ceiling_of_its_sharpness(classes, sharpness, ceiling):
    found = cluster_labels(torch.eye(classes), torch.eye(classes), sharpness)
    assert float(found.max()) == pytest.approx(ceiling, abs=5e-5)


@given(beliefs(), st.integers(0, 99), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_neither_the_scale_of_features_nor_that_of_a_class_counts(belief, seed, features_times, class_times):
    assume(float(belief[:, 0].sum()) * min(class_times, 1.0) > 1e-5)  # less is no class
    points = random_points(seed)
    found = cluster_labels(belief, points)
    torch.testing.assert_close(found.sum(1), torch.ones(len(belief), dtype=torch.float64))
    torch.testing.assert_close(cluster_labels(belief, features_times * points), found, rtol=1e-7, atol=1e-9)
    scaled = belief.clone()
    scaled[:, 0] *= class_times
    torch.testing.assert_close(cluster_labels(scaled, points), found, rtol=1e-7, atol=1e-9)


@given(beliefs(), st.integers(0, 99))
def test_the_order_of_samples_does_not_count(belief, seed):
    points = random_points(seed)
    turned = cluster_labels(belief.flip(0), points.flip(0)).flip(0)
    torch.testing.assert_close(turned, cluster_labels(belief, points))


def test_a_class_that_nobody_believes_in_gets_nothing_and_takes_nothing_from_the_others():
    two = cluster_labels(number(BELIEF), number(POINTS))
    three = cluster_labels(torch.cat([number(BELIEF), torch.zeros(3, 1)], 1), number(POINTS))
    assert three[:, 2].tolist() == [0.0] * 3
    torch.testing.assert_close(three[:, :2], two)


def test_features_of_zero_are_equally_near_to_every_class():
    points = number([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    found = cluster_labels(number(BELIEF), points)
    assert found[2].tolist() == [0.5, 0.5]
    assert cluster_labels(number(BELIEF), torch.zeros_like(points)).tolist() == [[0.5, 0.5]] * 3


def test_feature_maps_are_read_as_one_long_vector():
    maps = random_points(3, width=8).reshape(6, 2, 2, 2)
    belief = torch.softmax(random_points(4), 1)
    assert torch.equal(cluster_labels(belief, maps), cluster_labels(belief, maps.flatten(1)))


def test_the_refinery_makes_nothing_larger_than_features_and_targets():
    """84,000 samples, 81 classes and 256 features would be 7 GB side by side."""
    samples, classes, width = 300, 20, 50
    with LargestTensor() as largest:
        cluster_labels(torch.softmax(random_points(0, samples, classes), 1), random_points(1, samples, width))
    assert largest.numbers <= samples * width
