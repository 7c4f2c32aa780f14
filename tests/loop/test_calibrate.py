"""One temperature, fitted on labels: worked numbers, an independent search, and what it must not look at."""

import math

import numpy as np
import pytest
import torch

from fedstill.loop.calibrate import FEWEST_ROWS, at_temperature, calibrate, fit_temperature, log_scores, reliability
from fedstill.loop.evaluate import calibration_error


def drawn(count=600, classes=5, *, sharpness=1.0, seed=0):
    """Scores whose softmax at temperature `sharpness` are the true probabilities of the labels."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(count, classes))
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    y = np.array([generator.choice(classes, p=share) for share in shares])
    return torch.from_numpy(sharpness * scores), torch.from_numpy(y)


def test_two_classes_by_hand():
    # scores (2, 0), right in 3 of 4 rows: sigmoid(2 / T) = 3/4, so T = 2 / ln 3
    scores = torch.tensor([[2.0, 0.0]] * 4)
    assert fit_temperature(scores, torch.tensor([0, 0, 0, 1])) == pytest.approx(2 / math.log(3), rel=1e-12)


def test_the_fit_is_that_of_a_plain_search_over_the_likelihood():
    scores, y = drawn(sharpness=2.5)

    def likelihood(temperature):
        z = scores.numpy() / temperature
        return (z[np.arange(len(y)), y] - np.log(np.exp(z).sum(1))).mean()

    fine = np.linspace(1.5, 4.0, 25001)
    best = fine[np.argmax([likelihood(temperature) for temperature in fine])]
    assert fit_temperature(scores, y) == pytest.approx(best, abs=2e-4)
    assert 2.0 < best < 3.2, "2.5 times too sharp is found out"


def test_scores_times_c_need_c_times_the_temperature_and_a_shift_of_a_row_changes_nothing():
    scores, y = drawn()
    plain = fit_temperature(scores, y)
    assert fit_temperature(7 * scores, y) == pytest.approx(7 * plain, rel=1e-9)
    assert fit_temperature(scores + 100 * torch.arange(len(y)).unsqueeze(1), y) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(lambda y: torch.eye(3)[y] * 5, id="every answer is right"),
        pytest.param(lambda y: torch.eye(3)[(y + 1) % 3], id="every answer is wrong"),
        pytest.param(lambda y: torch.zeros(len(y), 3), id="the scores say nothing"),
    ],
)
def test_there_is_no_temperature_where_no_finite_one_is_best(answers):
    y = torch.arange(30) % 3
    assert fit_temperature(answers(y), y) is None
    found = calibrate(answers(y), y, "the test set")
    assert found.temperature is None
    assert found.why.startswith("not calibrated")


def test_too_few_labels_are_told_and_enough_are_not():
    scores, y = drawn()
    few = calibrate(scores[: FEWEST_ROWS - 1], y[: FEWEST_ROWS - 1], "the validation set")
    assert few.temperature is None
    assert "the validation set has 19 labeled rows" in few.why
    enough = calibrate(3 * scores, y, "the validation set")  # too sure of itself
    assert enough.temperature == fit_temperature(3 * scores, y)
    assert (enough.fitted_on, enough.rows) == ("the validation set", len(y))
    assert enough.after.ece < enough.before.ece


def test_a_temperature_that_raises_the_calibration_error_is_not_used():
    """Sure and wrong in one class, unsure and right in the other: one temperature cannot serve both."""
    scores, y = drawn()
    worse = next(
        found
        for size in range(FEWEST_ROWS, 200)
        if "would raise the calibration error" in (found := calibrate(scores[:size], y[:size], "some rows")).why
    )
    assert worse.temperature is None
    assert worse.after is None


def test_a_temperature_changes_no_answer_and_rows_sum_to_one():
    scores, _ = drawn()
    for temperature in (0.05, 1.0, 40.0):
        shares = at_temperature(scores, temperature)
        assert torch.equal(shares.argmax(1), scores.argmax(1))
        assert shares.sum(1).tolist() == pytest.approx([1.0] * len(scores), abs=1e-12)


def test_probabilities_are_their_own_scores_even_where_one_of_them_is_zero():
    probabilities = torch.tensor([[0.7, 0.3, 0.0], [1.0, 0.0, 0.0]])
    back = at_temperature(log_scores(probabilities), 1.0)
    assert torch.allclose(back, probabilities.double(), atol=1e-12)
    assert torch.isfinite(log_scores(probabilities)).all()


def test_reliability_by_hand():
    # bins of a quarter: 0.6 and 0.75 (one right, gap 0.175), 0.9 and 1.0 (both right, gap 0.05): ECE = 0.1125
    probabilities = torch.tensor([[0.6, 0.4], [0.25, 0.75], [0.9, 0.1], [0.0, 1.0]], dtype=torch.float64)
    found = reliability(probabilities, torch.tensor([0, 0, 0, 1]), bins=4)
    assert (found.rows, found.accuracy) == (4, 0.75)
    assert found.confidence == pytest.approx(0.8125)
    assert found.ece == pytest.approx(0.1125)
    assert [(one.low, one.high, one.count) for one in found.bins] == [(0.5, 0.75, 2), (0.75, 1.0, 2)]
    assert [one.confidence for one in found.bins] == pytest.approx([0.675, 0.95])
    assert [one.accuracy for one in found.bins] == [0.5, 1.0]


def test_the_error_is_that_of_the_training_log_and_of_the_bins_that_are_drawn():
    scores, y = drawn(sharpness=3.0)
    probabilities = at_temperature(scores, 1.0)
    confidence, answer = probabilities.max(dim=1)
    found = reliability(probabilities, y)
    assert found.ece == pytest.approx(float(calibration_error(confidence, answer == y)))
    assert found.ece == pytest.approx(sum(one.count * abs(one.accuracy - one.confidence) for one in found.bins) / 600)
    assert sum(one.count for one in found.bins) == 600


def test_calibration_takes_most_of_an_overconfident_error_away_on_rows_it_did_not_see():
    scores, y = drawn(count=4000, sharpness=3.0)
    temperature = fit_temperature(scores[:2000], y[:2000])
    before = reliability(at_temperature(scores[2000:], 1.0), y[2000:])
    after = reliability(at_temperature(scores[2000:], temperature), y[2000:])
    assert before.ece > 0.2
    assert after.ece < 0.04
    assert after.accuracy == before.accuracy
