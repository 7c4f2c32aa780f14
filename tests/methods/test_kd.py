"""Distillation from the received model: FedAvg's first step, and less forgetting after it."""

from label_skew import assert_less_is_forgotten, gap_to_fedavg

from fedstill.methods import kd


def test_the_first_step_from_the_teacher_itself_is_fedavgs():
    assert gap_to_fedavg(kd(), steps=1) < 1e-15
    assert gap_to_fedavg(kd(), steps=2) > 1e-4


def test_a_client_forgets_less_of_the_classes_that_it_lacks():
    assert_less_is_forgotten(kd())
