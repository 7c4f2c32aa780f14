"""FedNTD: FedAvg's first step, and less forgetting after it; without a teacher (Tf) it pulls from the first step on."""

from label_skew import assert_less_is_forgotten, gap_to_fedavg

from fedstill.methods import fedntd, fedntd_tf


def test_the_first_step_from_the_teacher_itself_is_fedavgs():
    assert gap_to_fedavg(fedntd(), steps=1) < 1e-15
    assert gap_to_fedavg(fedntd(), steps=2) > 1e-4


def test_the_first_step_without_a_teacher_is_not_fedavgs():
    assert gap_to_fedavg(fedntd_tf(), steps=1) > 1e-3


def test_a_client_forgets_less_of_the_classes_that_it_lacks():
    assert_less_is_forgotten(fedntd())
