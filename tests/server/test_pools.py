import math

import pytest
import torch
from by_hand import number
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedstill.server.distill.student import divergence
from fedstill.server.distill.targets import (
    confident_share,
    entropy,
    hard_targets,
    maximum_rule,
    mean_rule,
    mix,
    pool_targets,
    standardised,
)

quick = settings(deadline=None, max_examples=60)


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


@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_a_single_teacher_is_its_own_target_and_so_is_one_that_has_all_the_share(pool):
    logits = several_teachers()
    torch.testing.assert_close(pool_targets(logits[:1], pool), torch.softmax(logits[0], -1))
    alone = pool_targets(logits, pool, share=number([0.0, 1.0, 0.0]))
    torch.testing.assert_close(alone, torch.softmax(logits[1], -1))


@quick
@given(ensembles(), st.sampled_from(["logits", "probabilities"]), st.floats(0.2, 5.0))
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


@pytest.mark.parametrize("pool", ["logits", "probabilities"])
def test_temperature_divides_every_teacher(pool):
    logits = several_teachers()
    torch.testing.assert_close(pool_targets(logits, pool, temperature=2.0), pool_targets(logits / 2.0, pool))


@quick
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


@quick
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


@quick
@given(ensembles(), st.floats(0.0, 1.0))
def test_models_that_say_the_same_are_a_target_that_says_it_for_any_trust(logits, u):
    alike = torch.softmax(logits[:1], -1).expand(4, -1, -1)
    target = u * mix(alike[:2], confident_share(alike[:2])) + (1 - u) * mix(alike[2:])
    torch.testing.assert_close(target, alike[0])


@quick
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
    ("rule", "sure", "kept"),
    [(maximum_rule, [0.85, 0.5], [True, False]), (mean_rule, [0.475, 0.45], [False, False])],
)
def test_both_rules_as_worked_by_hand(rule, sure, kept):
    targets = rule(number(BOTH), 0.75)
    assert targets.probabilities.argmax(1).tolist() == [1, 0]
    assert targets.probabilities.max(1).values.tolist() == pytest.approx(sure)
    assert targets.kept.tolist() == kept


@quick
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


@quick
@given(ensembles(teachers=(2, 5)), st.floats(0, 1))
def test_one_more_teacher_never_loses_a_label_of_the_maximum_rule(logits, threshold):
    probabilities = torch.softmax(logits, -1)
    fewer, more = (maximum_rule(p, threshold).kept for p in (probabilities[:-1], probabilities))
    assert not (fewer & ~more).any()


@quick
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


@quick
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
