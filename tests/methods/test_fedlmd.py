"""FedLMD and FedLMD-Tf: where label masking is FedNTD, and what it gives minority classes beyond it."""

import pytest
import torch
from by_hand import linear_model
from label_skew import CLASSES, HALF, SKEWED, after_a_long_visit, gap_to_fedavg, samples_of, trained
from own_counts import counts_of
from toy import furthest, same_bits

from fedstill.local import majority, target_mask
from fedstill.methods import fedavg, fedlmd, fedlmd_tf, fedntd, fedntd_tf

EVEN = [samples_of(3, 3, 3, 3, seed=3), samples_of(5, 5, 5, 5, seed=4)]
ONE_CLASS = [samples_of(6, 0, 0, 0, seed=5), samples_of(0, 0, 4, 0, seed=6)]


@pytest.mark.parametrize("method", [fedlmd, fedlmd_tf])
def test_the_first_step_of_label_masking_is_not_fedavgs(method):
    assert gap_to_fedavg(method(), steps=1) > 1e-3


@pytest.mark.parametrize("data", [EVEN, ONE_CLASS], ids=["no majority class", "only the own class"])
@pytest.mark.parametrize(("masked", "plain"), [(fedlmd, fedntd), (fedlmd_tf, fedntd_tf)])
def test_clients_without_another_majority_class_run_fedntd_to_the_last_bit(data, masked, plain):
    ours, other = (trained(method(beta=0.7, tau=2.0), data, rounds=3) for method in (masked, plain))
    assert same_bits(ours, other)
    assert furthest(trained(masked(), SKEWED, rounds=3), trained(plain(), SKEWED, rounds=3)) > 1e-3


def test_label_masking_gives_minority_classes_more_of_what_a_sample_is_not():
    """The negative supervision of majority classes: what FedLMD adds to FedNTD, and FedLMD-Tf to FedNTD-Tf."""
    assert majority(counts_of(HALF, CLASSES)).tolist() == [True, True, False, False]

    def minority_share(method):
        logits = linear_model().apply(after_a_long_visit(method), HALF.x)[0].logits
        others = torch.softmax(logits, -1).masked_fill(target_mask(HALF.y, CLASSES), 0.0)
        return (others[:, 2:].sum(-1) / others.sum(-1)).mean().item()

    assert minority_share(fedlmd()) > minority_share(fedntd()) + 0.1
    assert minority_share(fedlmd_tf()) > minority_share(fedntd_tf()) + 0.1
    assert min(minority_share(fedntd()), minority_share(fedntd_tf())) > minority_share(fedavg()) + 0.1
