"""MrTF's server step against its card (T7.x) and against a slow numpy version of a whole target."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from by_hand import F64, DescentTrainer, blobs, number, round_of, uploads_of
from papers import released

from fedstill.core.tree import clone
from fedstill.core.types import Model, Need, Output, Round, Targets, Training, Weights
from fedstill.methods.mrtf.refinery import (
    Refinery,
    make_targets,
    rectified,
    rectified_distillation,
    share_of_clusters,
    stable,
    trust_in_clients,
)
from fedstill.server import average, distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import mix, standardised, targets_of

STUDENT = Student(**vars(Training(steps=3, lr=0.5)))
prior_mixture, released_step = released("mrtf", "prior_mixture"), released("mrtf", "refinement")
RELEASED = partial(released_step, stabilise=True, rectify=True, refine=True, batch=8)
PAPER = Refinery(refine_sharpness=4.0, refine_share="all")
CLASSES, FEATURES, WIDTH = 3, 4, 5
UNLABELED = blobs(9, 20).x


def hidden(seed: int, scale: float = 1.0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    body = torch.randn(WIDTH, FEATURES, generator=generator, dtype=F64)
    head = scale * torch.randn(CLASSES, WIDTH, generator=generator, dtype=F64)
    return Weights({"body": body, "head": head}, {})


def hidden_model() -> Model:
    """One tanh layer: features that depend on the weights."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        features = torch.tanh(x @ weights.params["body"].T)
        return Output(features @ weights.params["head"].T, features), {}

    return Model("hidden", init=hidden, apply=apply)


@dataclass
class Watched(DescentTrainer):
    """Remembers how outputs were asked for: (stacked, features, batch)."""

    looks: list = field(default_factory=list)

    def outputs(self, weights, x, stacked=False, *, features=True, batch=None, seed=0):
        self.looks.append((stacked, features, batch))
        return super().outputs(weights, x, stacked)


START = hidden(100)
UPLOADS = [hidden(1), hidden(2, scale=8.0), hidden(3)]


class Refined(NamedTuple):
    average: Weights
    learnt: Weights
    targets: Targets | None
    round: Round
    state: dict[str, Any]


def a_round(models=UPLOADS, *, losses=(0.4, 0.2, 0.3), at=6, start=START):
    uploads = uploads_of(models, [1.0] * len(models))._replace(loss=number(losses))
    this = round_of(start, uploads, model=hidden_model(), unlabeled=UNLABELED, number=at)
    return replace(this, trainer=Watched(hidden_model()))


def refined(form, this=None, *, state=None, student=STUDENT) -> Refined:
    """One step after the plain mean of the uploads."""
    this = this or a_round()
    middle, _ = average("uniform").apply(this.start, {}, this)
    step = rectified_distillation(student, form) if isinstance(form, Refinery) else form(student)
    learnt, state = step.apply(middle, step.init(middle) if state is None else state, this)
    return Refined(middle, learnt, targets_of(state), this, state)


def logits_of(*models):
    return torch.stack([hidden_model().apply(model, UNLABELED)[0].logits for model in models])


PAIR = number([[[0.9, 0.1]], [[0.5, 0.5]]])
KNOWN = number([[[0.6, 0.4]], [[0.8, 0.2]]])


def normalised(rows):
    return rows / rows.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("blend", "u", "expected"),
    [
        (rectified, 0.5, [0.718198, 0.281802]),
        (rectified, 1.0, [0.736396, 0.263604]),
        (rectified, 0.0, [0.7, 0.3]),
        (prior_mixture, 0.5, [0.711480, 0.288520]),
        (prior_mixture, 1.0, [0.545879 * 0.9 + 0.454121 * 0.5, 0.545879 * 0.1 + 0.454121 * 0.5]),
    ],
)
def test_both_forms_of_the_rectified_target_as_worked_by_hand(blend, u, expected):
    assert normalised(blend(PAIR, KNOWN, u))[0].tolist() == pytest.approx(expected, abs=1e-6)


def random_beliefs(count, samples=6):
    logits = torch.randn(count, samples, CLASSES, generator=torch.Generator().manual_seed(4), dtype=F64)
    return torch.softmax(2 * logits, -1)


@pytest.mark.parametrize("blend", [rectified, prior_mixture])
@pytest.mark.parametrize("u", [0.25, 0.6, 1.0])
def test_models_that_all_say_the_same_leave_nothing_to_rectify(blend, u):
    (one,) = random_beliefs(1)
    torch.testing.assert_close(normalised(blend(one.expand(4, -1, -1), one.expand(2, -1, -1), u)), one)


@pytest.mark.parametrize("blend", [rectified, prior_mixture])
def test_trusting_clients_alone_one_client_is_its_own_target_and_equally_sure_ones_their_mean(blend):
    beliefs = random_beliefs(3)
    torch.testing.assert_close(normalised(blend(beliefs[:1], beliefs[1:], 1.0)), beliefs[0])
    turned = torch.stack([beliefs[0], beliefs[0].roll(1, dims=-1), beliefs[0].roll(2, dims=-1)])
    torch.testing.assert_close(normalised(blend(turned, beliefs[:2], 1.0)), turned.mean(0))


def test_rectified_rows_sum_to_one_and_those_of_the_released_mixture_say_how_sure_the_models_are():
    beliefs = random_beliefs(5)
    torch.testing.assert_close(rectified(beliefs[:3], beliefs[3:], 0.4).sum(1), torch.ones(6, dtype=F64))
    sums = prior_mixture(beliefs[:3], beliefs[3:], 0.4).sum(1)
    assert float(sums.max() - sums.min()) > 1e-4
    assert float(sums.max()) < 0.4


@pytest.mark.parametrize(
    ("loss", "bounded", "unbounded"),
    [(math.log(10), 1, 1), (0, 0.25, 0.25), (1, 0.5757209, 0.5757209), (5, 1, 1.8786), (-1, 0.25, -0.0757209)],
)
def test_trust_in_clients_follows_their_loss_and_is_clipped_only_when_bounded(loss, bounded, unbounded):
    assert trust_in_clients(loss, 10) == pytest.approx(bounded, abs=1e-4)
    assert trust_in_clients(torch.tensor(loss), 10) == pytest.approx(bounded, abs=1e-4)
    assert trust_in_clients(loss, 10, bounded=False) == pytest.approx(unbounded, abs=1e-4)


def test_half_the_loss_of_a_guess_is_half_way_and_a_broken_loss_stays_in_bounds():
    assert trust_in_clients(0.5 * math.log(10), 10) == pytest.approx(0.625)
    assert trust_in_clients(0.5 * math.log(10), 10, floor=0.0) == pytest.approx(0.5)
    for broken in (-3.0, math.inf, math.nan):
        assert 0.25 <= trust_in_clients(broken, 10) <= 1.0


def test_the_spread_of_a_teacher_is_taken_over_all_rows_or_batch_by_batch():
    logits = torch.randn(2, 20, CLASSES, generator=torch.Generator().manual_seed(1), dtype=F64)
    whole, pieces = stable(logits, Refinery(sharpness=1.0)), released("mrtf", "stable")(logits, stabilise=True, batch=8)
    for first, last in ((0, 8), (8, 16), (16, 20)):
        piece = logits[:, first:last]
        spread = piece.flatten(1).std(dim=1, correction=1).reshape(-1, 1, 1)
        torch.testing.assert_close(pieces[:, first:last], torch.softmax(piece / spread, -1))
    assert not torch.allclose(whole, pieces, atol=1e-3)
    torch.testing.assert_close(stable(logits, Refinery(stabilise=False)), torch.softmax(logits, -1))


def numpy_softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_outputs(weights, x):
    features = np.tanh(x @ weights.params["body"].numpy().T)
    return features @ weights.params["head"].numpy().T, features


def numpy_target(uploads, start, middle, x, *, loss, refine, sharpness=4.0, share=1.0):
    """Eqs. 6 and 10 to 12 of the paper, sample by sample; share: the weight of the clusters."""
    answers = [numpy_outputs(model, x)[0] for model in (*uploads, start, middle)]
    q = [numpy_softmax(4.0 * z / z.std(ddof=1)) for z in answers]
    u = min(1.0, max(0.25, 0.25 + 0.75 * loss / math.log(CLASSES)))
    target = np.zeros((len(x), CLASSES))
    for i in range(len(x)):
        sure = np.array([np.exp(sum(p * math.log(p) for p in q_k[i])) for q_k in q[:-2]])
        for k, weight in enumerate(sure / sure.sum()):
            target[i] += u * weight * q[k][i]
        target[i] += (1 - u) / 2 * (q[-2][i] + q[-1][i])
    if not refine:
        return target
    return (1 - share) * target + share * numpy_clusters(target, numpy_outputs(middle, x)[1], sharpness)


def test_the_weights_of_teachers_are_the_means_of_their_certainties():
    found, x = refined(Refinery()).round, UNLABELED.numpy()
    q = [numpy_softmax(4.0 * z / z.std(ddof=1)) for z in (numpy_outputs(model, x)[0] for model in UPLOADS)]
    sure = np.exp(np.stack([(p * np.log(p)).sum(1) for p in q]))
    wanted = (sure / sure.sum(0)).mean(1)
    assert wanted.max() > 1.1 * wanted.min()
    assert found.teachers == pytest.approx(dict(enumerate(wanted)))


def numpy_clusters(target, h, sharpness):
    found = np.zeros_like(target)
    centres = [sum(target[i, c] * h[i] for i in range(len(h))) / target[:, c].sum() for c in range(CLASSES)]
    for i in range(len(h)):
        cosines = np.array([h[i] @ v / np.linalg.norm(h[i]) / np.linalg.norm(v) for v in centres])
        found[i] = numpy_softmax(-sharpness * (1 - cosines))
    return found


@pytest.mark.parametrize(("at", "refine"), [(1, False), (5, False), (6, True)])
def test_a_whole_target_of_the_paper_is_the_slow_one_and_the_first_five_rounds_have_no_refinery(at, refine):
    found = refined(PAPER, a_round(at=at))
    slow = numpy_target(UPLOADS, START, found.average, UNLABELED.numpy(), loss=0.3, refine=refine)
    np.testing.assert_allclose(found.targets.probabilities.numpy(), slow, rtol=1e-10)
    assert found.targets.kept.all()


def test_by_default_the_refinery_counts_as_often_as_a_client_contradicts_the_rectified_belief():
    found, x = refined(Refinery()), UNLABELED.numpy()
    how = {"uploads": UPLOADS, "start": START, "middle": found.average, "x": x, "loss": 0.3}
    belief = numpy_target(**how, refine=False).argmax(1)
    against = [int(numpy_outputs(one, x)[0][i].argmax() != belief[i]) for one in UPLOADS for i in range(len(x))]
    share = sum(against) / len(against)
    assert 0.05 < share < 0.95
    slow = numpy_target(**how, refine=True, sharpness=32.0, share=share)
    np.testing.assert_allclose(found.targets.probabilities.numpy(), slow, rtol=1e-9)
    assert found.round.metrics["refine_share"] == pytest.approx(share)


def test_the_share_of_the_refinery_and_its_targets_as_worked_by_hand():
    """Two clients and three samples: four of six answers name the belief's class, so the clusters count a third.

    The clusters are the card's (T7.7): (.723934, .316463, .490595) for class 0.
    """
    belief = number([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])
    features = number([[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]])
    logits = number([[[1, 0], [0, 1], [1, 0]], [[1, 0], [1, 0], [0, 1]]])
    form = Refinery(stabilise=False, rectify=False, refine_sharpness=4.0)
    assert share_of_clusters(logits, belief, form) == pytest.approx(1 / 3)
    assert share_of_clusters(logits, belief, replace(form, refine_share="all")) == 1.0
    # The clients' mean logits (+-d, half the log-odds) have the belief as their softmax, and name classes 0, 1, 0.
    odds = torch.log(belief[:, 0] / belief[:, 1]).unsqueeze(1) * number([[0.5, -0.5]])
    apart = number([[0.1, -0.1], [1.0, -1.0], [-0.1, 0.1]])  # the second sample is sure enough to be named by one only
    said = torch.stack([odds - apart, odds + apart])
    assert said.argmax(-1).tolist() == [[0, 1, 0], [0, 0, 1]]
    targets = make_targets(said, Output(odds, features), 1.0, a_round(), form)
    wanted = [0.9 * 2 / 3 + 0.723934 / 3, 0.2 * 2 / 3 + 0.316463 / 3, 0.5 * 2 / 3 + 0.490595 / 3]
    assert targets.probabilities[:, 0].tolist() == pytest.approx(wanted, abs=1e-6)


def test_the_refinery_is_left_out_where_all_clients_agree():
    alike = a_round([UPLOADS[0]] * 3, start=UPLOADS[0])
    found = refined(Refinery(), alike)
    assert found.round.metrics["refine_share"] == 0.0
    plain = refined(Refinery(refine=False), a_round([UPLOADS[0]] * 3, start=UPLOADS[0]))
    assert torch.equal(found.targets.probabilities, plain.targets.probabilities)
    literal = refined(PAPER, a_round([UPLOADS[0]] * 3, start=UPLOADS[0]))
    assert float((literal.targets.probabilities - plain.targets.probabilities).abs().max()) > 0.1


def numpy_released(uploads, start, middle, x, *, u, batch):
    """The released code's `assign_pseudo_labels` in its mode ALL, with prior weights."""

    def standard(z):
        pieces = [z[i : i + batch] for i in range(0, len(z), batch)]
        return numpy_softmax(np.concatenate([piece / (piece.std(ddof=1) + 1e-8) for piece in pieces]))

    models = [*uploads, start, middle]
    q = np.stack([standard(numpy_outputs(model, x)[0]) for model in models])
    doubt = -(q * np.log(q)).sum(-1) / CLASSES
    weight = np.exp(-doubt) / np.exp(-doubt).sum(0)
    prior = np.array([u / len(uploads)] * len(uploads) + [(1 - u) / 2] * 2)
    mixture = (prior[:, None, None] * weight[:, :, None] * q).sum(0)
    return numpy_clusters(mixture, numpy_outputs(middle, x)[1], 8.0)  # 4 x the squared distance of unit vectors


def test_the_released_target_lags_behind_the_loss_and_remembers_its_past():
    """u of the first refinement is 1, then it follows the mean of at most five losses on record."""
    state, past, losses = None, None, []
    for at, loss in enumerate((0.9, 0.1, 0.5, 0.3, 0.3, 0.8, 0.2), 1):
        u = 1.0 if not losses else 0.25 + 0.75 * np.mean(losses[-5:]) / math.log(CLASSES)
        start = hidden(50 + at)
        found = refined(RELEASED, a_round(losses=[loss] * 3, at=at, start=start), state=state)
        new = numpy_released(UPLOADS, start, found.average, UNLABELED.numpy(), u=u, batch=8)
        past = new if past is None else u * new + (1 - u) * past
        assert found.round.metrics["u"] == pytest.approx(u, rel=1e-6)
        np.testing.assert_allclose(found.targets.probabilities.numpy(), past, rtol=1e-6)
        losses.append(loss)
        state = found.state
    assert int(state["logged"]) == 7
    assert state["losses"].tolist() == pytest.approx([0.5, 0.3, 0.3, 0.8, 0.2])


def test_a_loss_beyond_that_of_a_guess_counts_as_one_in_the_released_form():
    first = refined(RELEASED, a_round(losses=[9.0] * 3))
    assert refined(RELEASED, state=first.state).round.metrics["u"] == 1.0


@pytest.mark.parametrize("at", [1, 9])
def test_without_its_three_modules_it_distils_averaged_logits_to_the_last_bit(at):
    found = refined(Refinery(stabilise=False, rectify=False, refine=False), a_round(at=at))
    other, state = distill(STUDENT).apply(found.average, {}, a_round(at=at))
    assert torch.equal(found.targets.probabilities, state["targets"]["probabilities"])
    for name, leaf in found.learnt.params.items():
        assert torch.equal(leaf, other.params[name])
    assert "u" not in found.round.metrics


def test_stable_teachers_alone_are_the_mean_of_their_probabilities():
    targets = refined(Refinery(rectify=False, refine=False)).targets
    torch.testing.assert_close(targets.probabilities, mix(standardised(logits_of(*UPLOADS))))


def test_every_module_that_is_taken_away_changes_the_targets():
    forms = [
        Refinery(stabilise=s, rectify=r, refine=c) for s in (True, False) for r in (True, False) for c in (True, False)
    ]
    found = [refined(form).targets.probabilities for form in forms]
    for i, one in enumerate(found):
        torch.testing.assert_close(one.sum(1), torch.ones(20, dtype=F64))
        assert all(float((one - other).abs().max()) > 1e-3 for other in found[:i])


def test_the_released_mixture_without_the_refinery_is_a_probability_too():
    form = partial(RELEASED, refine=False)
    found = refined(form, state=refined(form).state)
    torch.testing.assert_close(found.targets.probabilities.sum(1), torch.ones(20, dtype=F64))
    forgetful = refined(form).targets.probabilities  # nothing to remember
    assert float((found.targets.probabilities - forgetful).abs().max()) > 1e-3


def test_how_loud_a_client_is_does_not_count_unless_teachers_are_taken_as_they_are():
    louder = [*UPLOADS[:2], Weights({**UPLOADS[2].params, "head": 30 * UPLOADS[2].params["head"]}, {})]

    def targets(models, **modules):  # the same candidate: only the teachers differ
        step = rectified_distillation(STUDENT, Refinery(**modules))
        return targets_of(step.apply(START, {}, a_round(models))[1]).probabilities

    torch.testing.assert_close(targets(louder), targets(UPLOADS))
    plain = {"stabilise": False, "rectify": False, "refine": False}
    assert not torch.allclose(targets(louder, **plain), targets(UPLOADS, **plain), atol=0.05)


def test_zero_steps_return_the_average_without_asking_anybody():
    found = refined(Refinery(), student=Student(**vars(Training(steps=0))))
    assert found.learnt is found.average
    assert found.targets is None
    assert found.round.trainer.looks == found.round.trainer.asked == []
    assert found.round.metrics == found.round.models == {}


def test_only_the_averages_features_are_asked_for_and_only_when_they_are_used():
    """Clients' models stacked, the average, the sent model; after training the refined model is looked at."""
    late, early = (refined(Refinery(), a_round(at=at)).round.trainer.looks for at in (6, 5))
    clients, one = (True, False, None), (False, False, None)
    assert late == [clients, (False, True, None), one, one]
    assert early == [clients, one, one, one]


def test_in_train_mode_only_the_clients_models_answer_so():
    looks = refined(partial(RELEASED, batch=7)).round.trainer.looks
    assert [batch for _, _, batch in looks] == [7, None, None, None]


def test_it_reports_what_it_did_and_leaves_the_average_to_be_looked_at():
    found = refined(Refinery(), student=Student(**vars(Training(steps=40, lr=1.0))))
    metrics, target = found.round.metrics, found.targets.probabilities.numpy()
    assert found.round.models == {"aggregated": found.average}
    assert metrics["u"] == pytest.approx(0.25 + 0.75 * 0.3 / math.log(3))
    answer = numpy_softmax(numpy_outputs(found.average, UNLABELED.numpy())[0])
    before = (target * (np.log(target) - np.log(answer))).sum(1).mean()
    assert metrics["distill_loss_before"] == pytest.approx(before)
    assert metrics["distill_loss_after"] < 0.5 * before
    named = logits_of(*UPLOADS).argmax(-1).numpy()
    assert metrics["teacher_agreement"] == pytest.approx((named == target.argmax(1)).mean())


def test_teachers_and_the_sent_model_are_unchanged():
    this = a_round()
    before = clone((this.uploads.weights, this.start))
    refined(Refinery(), this)
    torch.testing.assert_close((this.uploads.weights, this.start), before, rtol=0, atol=0)


def test_as_printed_a_loss_beyond_that_of_a_guess_makes_the_global_models_count_negatively():
    found = refined(Refinery(bounded=False, refine=False), a_round(losses=[5.0] * 3))
    u = 0.25 + 0.75 * 5 / math.log(3)
    assert found.round.metrics["u"] == pytest.approx(u)
    beliefs = standardised(logits_of(*UPLOADS, START, found.average))
    torch.testing.assert_close(found.targets.probabilities, rectified(beliefs[:3], beliefs[3:], u))
    assert float(found.targets.probabilities.min()) < 0
    assert all(bool(leaf.isfinite().all()) for leaf in found.learnt.params.values())


def test_it_declares_what_it_looks_at():
    known = {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    assert rectified_distillation(STUDENT, Refinery()).needs == {*known, Need.FEATURES}
    assert rectified_distillation(STUDENT, Refinery(refine=False)).needs == known
