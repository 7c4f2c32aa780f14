"""Teachers, pools and targets against numpy from the equations."""

import math

import numpy as np
import numpy_server as reference
import pytest
import torch
from by_hand import number, round_of, uploads_of
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from papers import released

from fedstill.core.types import Weights
from fedstill.methods.mrtf.refinery import rectified, trust_in_clients
from fedstill.server.distill.targets import (
    cluster_labels,
    confident_share,
    maximum_rule,
    mean_rule,
    mix,
    pool_targets,
    sharpen,
    standardised,
)
from fedstill.server.distill.teachers import dirichlet_samples, gaussian_samples

MANY = 40_000


@st.composite
def ensembles(draw, least=1, most=4):
    """Logits (T, M, K) of teachers that are not constant."""
    shape = draw(st.integers(least, most)), draw(st.integers(1, 4)), draw(st.integers(2, 5))
    logits = draw(arrays("float64", shape, elements=st.floats(-8, 8)))
    assume(logits.reshape(len(logits), -1).std(1).min() > 0.05)
    return logits


def even(count):
    return [1 / count] * count


def close(found, wanted):
    np.testing.assert_allclose(found.numpy(), np.array(wanted), rtol=1e-8, atol=1e-12)


@given(ensembles(), st.floats(0.3, 4.0), st.randoms(use_true_random=False))
def test_pooled_targets_equal_their_equations(logits, temperature, random):
    share = [random.random() + 0.1 for _ in logits]
    share = [part / sum(share) for part in share]
    for pool, slow in (("logits", reference.averaged_logits), ("probabilities", reference.averaged_probabilities)):
        found = pool_targets(torch.from_numpy(logits), pool, temperature=temperature, share=number(share))
        close(found, slow(logits.tolist(), share, temperature))
        plain = pool_targets(torch.from_numpy(logits), pool, temperature=temperature)
        close(plain, slow(logits.tolist(), even(len(logits)), temperature))


@given(ensembles(), st.floats(0.5, 8.0))
def test_standardised_teachers_and_their_shares_equal_their_equations(logits, sharpness):
    q = standardised(torch.from_numpy(logits), sharpness)
    slow = reference.standardised(logits.tolist(), sharpness)
    close(q, slow)
    share = confident_share(q)
    close(share, reference.confident_shares(slow))
    close(mix(q, share), reference.blended(slow, reference.confident_shares(slow)))


@given(ensembles(least=3, most=6), st.floats(0, 6))
def test_the_rectified_target_equals_its_equation(logits, loss):
    q = standardised(torch.from_numpy(logits))
    u = trust_in_clients(loss, logits.shape[-1])
    found = rectified(q[:-2], q[-2:], u)
    *uploads, sent, average = logits.tolist()
    close(found, reference.rectified(uploads, sent, average, loss))
    torch.testing.assert_close(found.sum(1), torch.ones(len(found), dtype=torch.float64))


@given(ensembles(most=1), st.integers(1, 4), st.floats(0.5, 8.0), st.integers(0, 99))
def test_clustered_labels_equal_their_equation(logits, width, sharpness, seed):
    q = torch.softmax(torch.from_numpy(logits[0]), -1)
    assume((q.sum(0) - 1e-6).abs().min() > 1e-9)
    features = torch.randn(len(q), width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    close(cluster_labels(q, features, sharpness), reference.clustered(q.tolist(), features.tolist(), sharpness))


@given(ensembles(), st.floats(0, 1))
def test_both_rules_equal_their_equations(logits, threshold):
    q = torch.softmax(torch.from_numpy(logits), -1)
    for rule, slow in ((maximum_rule, reference.maximum_rule), (mean_rule, reference.mean_rule)):
        targets, wanted = rule(q, threshold), slow(q.tolist(), threshold)
        assume(all(abs(sure - threshold) > 1e-9 for _, sure, _ in wanted))  # a mean may round to either side
        assert targets.kept.tolist() == [kept for _, _, kept in wanted]
        close(targets.probabilities.max(1).values, [sure for _, sure, _ in wanted])
        named, labels = targets.probabilities.argmax(1), torch.tensor([label for label, _, _ in wanted])
        if rule is maximum_rule:
            assert torch.equal(named, labels)
        else:  # classes whose means differ by rounding alone may change places
            means = q.mean(0)
            torch.testing.assert_close(*(means.gather(1, chosen.unsqueeze(1)) for chosen in (named, labels)))


@given(ensembles(most=1), st.floats(0.2, 5.0))
def test_sharpening_equals_its_equation(logits, temperature):
    q = torch.softmax(torch.from_numpy(logits[0]), -1)
    close(sharpen(q, temperature), [reference.sharpened(row, temperature) for row in q.tolist()])


MODELS = [[1.0, -2.0, 0.5, 4.0], [3.0, -2.5, 0.5, 4.5], [2.5, 1.0, 0.5, 3.0]]
START = [0.5, -1.0, 0.0, 3.5]
SIZES = [1.0, 3.0, 4.0]


def weights(values) -> Weights:
    return Weights({"w": number(values).reshape(2, 2)}, {})


def drawn(sampler, sizes=SIZES, weighting="size", **how) -> np.ndarray:
    round = round_of(weights(START), uploads_of([weights(model) for model in MODELS], sizes), weighting=weighting)
    return sampler(weights(START), round, count=MANY, **how).params["w"].reshape(MANY, 4).numpy()


def check_moments(samples, mean, spread):
    """Five standard errors: of a mean spread / sqrt(n), of a standard deviation about spread / sqrt(2 n)."""
    for column, (m, s) in enumerate(zip(mean, spread, strict=True)):
        assert samples[:, column].mean() == pytest.approx(m, abs=5 * s / math.sqrt(MANY) + 1e-9)
        assert samples[:, column].std() == pytest.approx(s, rel=5 / math.sqrt(2 * MANY), abs=1e-9)


def test_gaussian_samples_have_the_moments_of_their_equation():
    mean, variance = reference.gaussian_moments(MODELS, [size / sum(SIZES) for size in SIZES])
    check_moments(drawn(gaussian_samples), mean, [math.sqrt(v) for v in variance])
    mean, variance = reference.gaussian_moments(MODELS, even(3))
    check_moments(drawn(gaussian_samples, weighting="uniform"), mean, [math.sqrt(v) for v in variance])


@pytest.mark.parametrize("scale", [0.1, 0.7])
def test_direction_samples_have_the_moments_of_their_equation(scale):
    check_moments(
        drawn(released("fedbe", "direction_samples"), scale=scale), *reference.direction_moments(MODELS, START, scale)
    )


@pytest.mark.parametrize("alpha", [0.3, 1.0, 5.0])
def test_dirichlet_samples_have_the_moments_of_their_equation(alpha):
    mean, variance = reference.dirichlet_moments(MODELS, alpha)
    check_moments(drawn(dirichlet_samples, [1.0] * 3, alpha=alpha), mean, [math.sqrt(v) for v in variance])
    same = drawn(dirichlet_samples, SIZES, alpha=alpha, weighting="uniform")
    check_moments(same, mean, [math.sqrt(v) for v in variance])
