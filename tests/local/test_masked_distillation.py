"""Golden values: C = 4, z = (2, 1, 0, -1), teacher (0.5, 0, 1, 2), true class 0; majority sets as named."""

import pytest
import torch
from by_hand import local_view, number, scalar
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.types import Batch, Output
from fedstill.local import masked_distillation_loss, not_true_distillation, start_model, target_mask

Z = number([[2.0, 1.0, 0.0, -1.0]])
TEACHER = number([[0.5, 0.0, 1.0, 2.0]])
TRUE = torch.tensor([0])


def classes(*members: int) -> torch.Tensor:
    return torch.tensor([[i in members for i in range(4)]])


def masked(z=Z, teacher=TEACHER, majority=(), tau=1.0):
    target = target_mask(TRUE, 4)
    hidden = target | classes(*majority)
    return masked_distillation_loss(z, teacher, student_mask=target, teacher_mask=hidden, tau=tau)


@pytest.mark.parametrize(("tau", "expected"), [(1.0, 1.572787), (2.0, 1.638379)])
def test_distillation_without_masks_gives_the_cards_kd_values(tau, expected):
    assert masked_distillation_loss(Z, TEACHER, tau=tau).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("majority", "teacher", "at_one", "at_two"),
    [
        ((), TEACHER, 1.150421, 1.280627),  # FedNTD
        ((0, 1), TEACHER, 1.556461, 3.314609),  # FedLMD
        ((1,), TEACHER, 1.556461, 3.314609),
        ((0,), TEACHER, 1.150421, 1.280627),
        ((0, 1, 2), TEACHER, 2.407606, 6.721079),
        ((0, 1), None, 1.214459, 2.948490),  # FedLMD-Tf
        ((), None, 0.308994, 0.326630),  # FedNTD-Tf
    ],
)
def test_masked_distillation_gives_the_cards_values(majority, teacher, at_one, at_two):
    assert masked(teacher=teacher, majority=majority).item() == pytest.approx(at_one, abs=1e-6)
    assert masked(teacher=teacher, majority=majority, tau=2.0).item() == pytest.approx(at_two, abs=1e-6)


def test_the_gradient_has_the_cards_values():
    z = Z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(masked(z, majority=(0, 1), tau=2.0).sum(), z)
    assert gradient[0].tolist() == pytest.approx([0.0, 1.012961, -0.140690, -0.872271], abs=1e-6)
    assert gradient[0, 0].item() == 0.0


def test_no_gradient_reaches_the_true_logit_or_the_teacher():
    z, teacher = Z.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    loss = masked(z, teacher)
    assert torch.autograd.grad(loss.sum(), z)[0][0, 0].item() == 0.0
    assert not masked(Z, teacher).requires_grad


def test_one_class_left_to_the_teacher_costs_its_log_probability():
    student = torch.log_softmax(Z[:, 1:] / 2.0, -1)[0, 2]
    assert masked(majority=(1, 2), tau=2.0).item() == pytest.approx(-4.0 * student.item())


@pytest.mark.parametrize("teacher", [TEACHER, None])
def test_a_sample_without_any_teacher_class_counts_nothing(teacher):
    z = Z.clone().requires_grad_()
    loss = masked(z, teacher, majority=(1, 2, 3))
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss.sum(), z)[0].abs().max() == 0.0


def test_masking_survives_logits_that_minus_one_thousand_does_not():
    z, teacher = number([[5000.0, 0.0, 1.0, -1.0]]), number([[9000.0, 0.0, 1.0, -1.0]])
    assert masked(z, teacher).item() == pytest.approx(0.0, abs=1e-12)


logits = st.lists(st.floats(-20, 20), min_size=4, max_size=4).map(lambda row: number([row]))


@settings(deadline=None)
@given(z=logits, teacher=logits, shift=st.floats(-10, 10), tau=st.floats(0.5, 4.0))
def test_only_differences_between_not_true_logits_matter_and_none_is_negative(z, teacher, shift, tau):
    loss = masked(z, teacher, tau=tau)
    at_truth = number([[shift, 0.0, 0.0, 0.0]])
    for same in (masked(z + shift, teacher - shift, tau=tau), masked(z + at_truth, teacher - at_truth, tau=tau)):
        torch.testing.assert_close(same, loss, rtol=1e-9, atol=1e-9)
    assert loss.item() >= -1e-12
    assert masked(z, z, tau=tau).item() == pytest.approx(0.0, abs=1e-12)


def view_of(teacher):
    return local_view(scalar(0.0), frozen={"start": Output(teacher, teacher)})


def batch_of(z, y, weight):
    return Batch(z, torch.tensor(y), number(weight))


def test_the_term_is_beta_times_the_mean_over_real_samples():
    z, teacher = torch.cat([Z, Z, Z + 100.0]), torch.cat([TEACHER, Z, TEACHER])
    batch = batch_of(z, [0, 0, 3], [1.0, 1.0, 0.0])
    loss = not_true_distillation(3.0, tau=2.0).loss(Output(z, z), batch, view_of(teacher))
    assert loss.item() == pytest.approx(3.0 * (1.280627 + 0.0) / 2, abs=1e-6)


def test_a_student_at_the_teacher_feels_no_not_true_pull_but_a_majority_pull():
    z = Z.clone().requires_grad_()
    term = not_true_distillation()
    loss = term.loss(Output(z, z), batch_of(z, [0], [1.0]), view_of(Z))
    assert torch.autograd.grad(loss, z)[0].abs().max() < 1e-15
    (pull,) = torch.autograd.grad(masked(z, Z, majority=(1,)).sum(), z)
    assert pull[0, 1] > 0.1


def test_beta_zero_leaves_no_gradient_even_for_extreme_logits():
    z = number([[1e4, -1e4, 0.0, 3.0]]).requires_grad_()
    loss = not_true_distillation(0.0).loss(Output(z, z), batch_of(z, [0], [1.0]), view_of(-z.detach()))
    assert torch.autograd.grad(loss, z)[0].abs().max() == 0.0


def test_the_teacher_is_the_received_model_by_one_shared_name():
    start = scalar(2.0)
    assert not_true_distillation().frozen == {"start": start_model}
    assert start_model(local_view(start)) is start


def test_half_precision_logits_are_distilled_in_float32():
    loss = masked(Z.bfloat16(), TEACHER.bfloat16())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1.150421, abs=1e-5)
