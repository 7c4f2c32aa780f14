"""The distillation terms as a client calls them.

Golden values: C = 4, z = (2, 1, 0, -1), teacher (0.5, 0, 1, 2), y = 0. A majority set is given by label counts:
a class is in it when it holds more than a quarter of them.
"""

import math

import pytest
import torch
from by_hand import local_view, number, scalar
from hypothesis import given
from hypothesis import strategies as st

from fedstill.compose.combine import combine
from fedstill.core.errors import FedstillError
from fedstill.core.types import Batch, Need, Output
from fedstill.local import (
    cross_entropy,
    label_masked_distillation,
    masked_distillation_loss,
    not_true_distillation,
    plain_distillation,
    smoothed_cross_entropy,
    start_model,
    target_mask,
)

Z, TEACHER = number([[2.0, 1.0, 0.0, -1.0]]), number([[0.5, 0.0, 1.0, 2.0]])
NOBODY, ZERO, ONE = (3.0, 3.0, 3.0, 3.0), (9.0, 1.0, 0.0, 0.0), (1.0, 9.0, 0.0, 0.0)
ZERO_ONE, ZERO_ONE_TWO = (4.0, 4.0, 1.0, 1.0), (4.0, 4.0, 4.0, 0.0)
ALL_BUT_ZERO = (0.0, 4.0, 4.0, 4.0)
FAMILY = {
    "kd": plain_distillation,
    "ntd": not_true_distillation,
    "ntd_tf": lambda beta=1.0, tau=1.0: not_true_distillation(beta, tau=tau, teacher=False),
    "lmd": label_masked_distillation,
    "lmd_tf": lambda beta=1.0, tau=1.0: label_masked_distillation(beta, tau=tau, teacher=False),
}
every_term = pytest.mark.parametrize("name", FAMILY)
MASKED = ("ntd", "ntd_tf", "lmd", "lmd_tf")


def value(term, z=Z, teacher=TEACHER, *, y=(0,), counts=NOBODY, weight=None):
    """The term's loss; frozen outputs and label counts are there only where it asks for them."""
    batch = Batch(z, torch.tensor(y), torch.ones(len(z)) if weight is None else number(weight))
    frozen = {name: Output(teacher, teacher) for name in term.frozen}
    seen = number(counts) if Need.LABEL_COUNTS in term.needs else number([math.nan] * len(counts))
    return term.loss(Output(z, z), batch, local_view(scalar(0.0), frozen=frozen, label_counts=seen))


def gradient(term, z=Z, teacher=TEACHER, **how):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(value(term, z, teacher, **how), z)[0]


@pytest.mark.parametrize(
    ("name", "counts", "at_one", "at_two"),
    [
        ("kd", NOBODY, 1.572787, 1.638379),
        ("ntd", NOBODY, 1.150421, 1.280627),
        ("lmd", ZERO_ONE, 1.556461, 3.314609),
        ("lmd", ONE, 1.556461, 3.314609),  # the own class is masked in the teacher although it is a minority class
        ("lmd", ZERO, 1.150421, 1.280627),
        ("lmd", ZERO_ONE_TWO, 2.407606, 6.721079),
        ("lmd_tf", ZERO_ONE, 1.214459, 2.948490),
        ("ntd_tf", NOBODY, 0.308994, 0.326630),
    ],
)
def test_every_term_gives_the_cards_values(name, counts, at_one, at_two):
    assert value(FAMILY[name](), counts=counts).item() == pytest.approx(at_one, abs=1e-6)
    assert value(FAMILY[name](tau=2.0), counts=counts).item() == pytest.approx(at_two, abs=1e-6)


def test_cross_entropy_and_smoothed_labels_give_the_cards_values():
    assert value(cross_entropy()).item() == pytest.approx(0.440190, abs=1e-6)
    assert value(smoothed_cross_entropy(0.1)).item() == pytest.approx(0.590190, abs=1e-6)


def test_the_gradient_of_label_masked_distillation_has_the_cards_values():
    pull = gradient(label_masked_distillation(tau=2.0), counts=ZERO_ONE)[0].tolist()
    assert pull == pytest.approx([0.0, 1.012961, -0.140690, -0.872271], abs=1e-6)
    assert pull[0] == 0.0


@every_term
def test_a_term_is_beta_times_the_mean_over_real_samples(name):
    """The third row is padding; its logits, its label and its teacher are finite nonsense."""
    z, teacher = torch.cat([Z, 0.5 * Z, 1e6 * Z]), torch.cat([TEACHER, Z, -1e6 * TEACHER])
    alone = [
        value(FAMILY[name](1.0, tau=2.0), z[i : i + 1], teacher[i : i + 1], y=[i], counts=ZERO_ONE) for i in (0, 1)
    ]
    together = value(FAMILY[name](3.0, tau=2.0), z, teacher, y=[0, 1, 3], counts=ZERO_ONE, weight=[1.0, 1.0, 0.0])
    assert together.item() == pytest.approx(3.0 * (alone[0] + alone[1]).item() / 2, rel=1e-12)
    pull = gradient(FAMILY[name](3.0), z, teacher, y=[0, 1, 3], counts=ZERO_ONE, weight=[1.0, 1.0, 0.0])
    assert pull[2].abs().max() == 0.0
    assert pull[:2].abs().max() > 0.1


@every_term
def test_beta_zero_leaves_no_gradient_even_for_extreme_logits(name):
    pull = gradient(FAMILY[name](0.0), number([[1e4, -1e4, 0.0, 3.0]]), number([[-1e4, 1e4, 0.0, -3.0]]), counts=ONE)
    assert pull.abs().max() == 0.0


@pytest.mark.parametrize("name", ["lmd", "lmd_tf"])
@pytest.mark.parametrize("y", [0, 1, 2, 3])
def test_the_own_class_is_masked_in_the_teacher_even_where_it_is_a_minority_class(name, y):
    counts = tuple(0.0 if i == y else 5.0 if i == (y + 1) % 4 else 1.0 for i in range(4))
    as_majority = tuple(4.0 if i in (y, (y + 1) % 4) else 1.0 for i in range(4))
    found = value(FAMILY[name](), y=[y], counts=counts)
    assert found.isfinite()
    assert found.item() == value(FAMILY[name](), y=[y], counts=as_majority).item()


@pytest.mark.parametrize("name", ["lmd", "lmd_tf"])
@pytest.mark.parametrize("z", [Z, -1e4 * Z])
def test_a_sample_without_any_class_left_to_the_teacher_counts_nothing(name, z):
    term = FAMILY[name](tau=2.0)
    assert value(term, z, counts=ALL_BUT_ZERO).item() == 0.0
    assert gradient(term, z, counts=ALL_BUT_ZERO).abs().max() == 0.0
    both = value(term, torch.cat([z, z]), torch.cat([TEACHER, TEACHER]), y=[0, 1], counts=ALL_BUT_ZERO)
    assert both.item() == pytest.approx(value(term, z, y=[1], counts=ALL_BUT_ZERO).item() / 2)
    pull = gradient(term, torch.cat([z, z]), torch.cat([TEACHER, TEACHER]), y=[0, 1], counts=ALL_BUT_ZERO)
    assert pull.isfinite().all()
    assert pull[1].abs().max() > 0.1


@pytest.mark.parametrize("name", ["lmd", "lmd_tf"])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_one_class_left_to_the_teacher_costs_minus_tau_squared_its_log_probability(name, tau):
    others = [math.exp(score / tau) for score in (1.0, 0.0, -1.0)]
    expected = -(tau**2) * math.log(others[2] / sum(others))
    assert value(FAMILY[name](tau=tau), counts=ZERO_ONE_TWO).item() == pytest.approx(expected)


@pytest.mark.parametrize(("name", "zero"), [("kd", True), ("ntd", True), ("lmd", False)])
def test_at_the_received_model_only_label_masked_distillation_pulls(name, zero):
    pull = gradient(FAMILY[name](), Z, Z, counts=ONE).abs().max()
    assert (pull < 1e-15) if zero else (pull > 0.1)
    assert gradient(FAMILY["lmd"](), Z, Z, counts=ZERO).abs().max() < 1e-15  # no majority class but the own one


def test_negative_supervision_lowers_majority_classes_and_raises_minority_ones():
    """d/dz_i = tau (p_student(i) - p_teacher(i)): positive where the teacher has no mass."""
    pull = gradient(label_masked_distillation(), Z, Z, counts=ZERO_ONE)[0]
    assert pull[1] > 0.1
    assert (pull[2:] < 0).all()


@pytest.mark.parametrize("counts", [NOBODY, ZERO, (1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), (10.0, 4.0, 4.0, 4.0)])
@pytest.mark.parametrize("teacher", [True, False])
def test_with_no_majority_class_but_the_own_one_label_masking_is_not_true_distillation(counts, teacher):
    ours, plain = (kind(0.7, tau=1.5, teacher=teacher) for kind in (label_masked_distillation, not_true_distillation))
    assert torch.equal(value(ours, counts=counts), value(plain))
    assert torch.equal(gradient(ours, counts=counts), gradient(plain))


def test_what_a_term_needs_is_what_it_uses():
    assert {name for name, term in FAMILY.items() if Need.LABEL_COUNTS in term().needs} == {"lmd", "lmd_tf"}
    for name, term in FAMILY.items():
        assert term().frozen == ({} if name.endswith("_tf") else {"start": start_model})
        assert term().risk == ""
    assert list(combine(*(term() for term in FAMILY.values())).frozen) == ["start"]


@pytest.mark.parametrize("name", MASKED)
def test_soft_targets_are_refused_where_the_own_class_is_masked(name):
    soft = Batch(Z, number([[0.5, 0.5, 0.0, 0.0]]), torch.ones(1))
    frozen, counts = {"start": Output(TEACHER, TEACHER)}, number(ZERO_ONE)
    with pytest.raises(FedstillError, match="soft targets"):
        FAMILY[name]().loss(Output(Z, Z), soft, local_view(scalar(0.0), frozen=frozen, label_counts=counts))
    with pytest.raises(FedstillError, match="give class indices"):
        target_mask(soft.y, 4)


def test_distillation_over_all_classes_does_not_look_at_the_labels():
    soft = Batch(Z, number([[0.5, 0.5, 0.0, 0.0]]), torch.ones(1))
    view = local_view(scalar(0.0), frozen={"start": Output(TEACHER, TEACHER)})
    assert plain_distillation().loss(Output(Z, Z), soft, view).item() == pytest.approx(1.572787, abs=1e-6)


@every_term
def test_large_logits_stay_finite(name):
    """By hand, y = 0, majority {0, 1}: all mass of student and teacher lies on one class each, 2e4 apart."""
    z, teacher = number([[1e4, 1e4, -1e4, 0.0]]), number([[-1e4, 0.0, 1e4, -1e4]])
    found, pull = value(FAMILY[name](), z, teacher, counts=ZERO_ONE), gradient(FAMILY[name](), z, teacher)
    even = {"ntd_tf": (2e4 + 1e4) / 3 - math.log(3), "lmd_tf": (2e4 + 1e4) / 2 - math.log(2)}
    assert found.item() == pytest.approx(even.get(name, 2e4 + (math.log(2) if name == "kd" else 0.0)))
    assert pull.isfinite().all()


logits = st.lists(st.floats(-20, 20), min_size=4, max_size=4).map(lambda row: number([row]))
label_counts = st.lists(st.integers(0, 6).map(float), min_size=4, max_size=4)
drawn = given(z=logits, teacher=logits, counts=label_counts, y=st.integers(0, 3), tau=st.floats(0.5, 4.0))


@every_term
@drawn
def test_no_term_is_ever_negative(name, z, teacher, counts, y, tau):
    assert value(FAMILY[name](tau=tau), z, teacher, y=[y], counts=counts).item() >= -1e-12


@every_term
@drawn
@pytest.mark.parametrize("shift", [-7.5, 300.0])
def test_adding_a_constant_to_all_logits_changes_nothing(name, shift, z, teacher, counts, y, tau):
    loss = value(FAMILY[name](tau=tau), z, teacher, y=[y], counts=counts)
    moved = value(FAMILY[name](tau=tau), z + shift, teacher - shift, y=[y], counts=counts)
    torch.testing.assert_close(moved, loss, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MASKED)
@drawn
def test_neither_own_logit_matters_in_a_masked_term(name, z, teacher, counts, y, tau):
    own = 10.0 * target_mask(torch.tensor([y]), 4)
    loss = value(FAMILY[name](tau=tau), z, teacher, y=[y], counts=counts)
    moved = value(FAMILY[name](tau=tau), z + own, teacher - 3 * own, y=[y], counts=counts)
    torch.testing.assert_close(moved, loss, rtol=1e-12, atol=1e-12)
    assert gradient(FAMILY[name](tau=tau), z, teacher, y=[y], counts=counts)[0, y].item() == 0.0


@pytest.mark.parametrize("name", ["kd", "ntd"])
@given(z=logits, y=st.integers(0, 3), tau=st.floats(0.5, 4.0))
def test_a_student_with_the_teachers_logits_costs_nothing(name, z, y, tau):
    assert value(FAMILY[name](tau=tau), z, z, y=[y]).item() == pytest.approx(0.0, abs=1e-12)


# Golden values: C = 4, z = (2, 1, 0, -1), teacher (0.5, 0, 1, 2), true class 0; majority sets as named.

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
    z, teacher = (torch.cat([Z, Z, Z + 100.0]), torch.cat([TEACHER, Z, TEACHER]))
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


def test_beta_zero_leaves_no_gradient_even_for_extreme_logits_masked():
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
