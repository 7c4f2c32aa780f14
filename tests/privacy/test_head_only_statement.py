"""Where clients train the head alone, the statement names what leaves them then: heads, and no BatchNorm statistics."""

import pytest
from mixed_runs import mixed, network
from mixed_runs import run as run_of_six

from fedstill.about.toy import trial_model
from fedstill.core.tree import byte_size
from fedstill.core.types import Model, Training

HEADS, WHOLE = Training(batch_size=8, lr=0.05, part="head"), Training(batch_size=8, lr=0.05)
SCORES = 'fedaux(steps=2, form="mean", epsilon=1.0, part="{}")'
NUMBERS = "numbers of samples and steps, training losses"
NORMED = network("b")


def run(model: Model, training: Training, method: str = SCORES):
    return run_of_six(method.format(training.part), model, training=training, rounds=1)


def test_statistics_that_stay_with_a_client_are_not_said_to_leave_it():
    whole, heads = run(NORMED, WHOLE), run(NORMED, HEADS)
    assert whole.privacy.not_covered == ("trained models", NUMBERS, "BatchNorm statistics")
    assert heads.privacy.not_covered == ("trained heads", NUMBERS)
    assert f"NOT protected from anybody: trained heads; {NUMBERS}" in heads.privacy.text()
    assert heads.history.bytes_up < 6 * byte_size(NORMED.init(0).buffers) < whole.history.bytes_up


def test_each_of_several_architectures_sends_its_head():
    assert run(mixed(), WHOLE).privacy.not_covered == ("trained models", NUMBERS, "BatchNorm statistics")
    assert run(mixed(), HEADS).privacy.not_covered == ("trained heads", NUMBERS)


def test_a_model_without_statistics_says_heads_too():
    assert run(trial_model(), HEADS).privacy.not_covered == ("trained heads", NUMBERS)


@pytest.mark.parametrize(("training", "trained"), [(WHOLE, "trained models"), (HEADS, "trained heads")])
def test_what_a_method_sends_beside_the_model_is_told_all_the_same(training, trained):
    told = run(trial_model(), training, SCORES + "+scaffold").privacy.not_covered
    assert told == (trained, NUMBERS, "control_delta")
