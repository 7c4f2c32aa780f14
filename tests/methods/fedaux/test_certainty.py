"""Certainty scores: worked numbers and invariants T6.1-T6.13 of the cards, and what they promise about privacy."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import expit

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.setup import Preparation
from fedstill.core.types import Answers, ClientData, Output, Tools, Weights
from fedstill.methods.fedaux.certainty import (
    AIM,
    FLOOR,
    LEAST,
    SOLVER_SLACK,
    Features,
    Problem,
    Scoring,
    _descend,
    bounded,
    client_answer,
    comparable,
    fit_logistic,
    log_scores,
    norm_bound,
    normalised,
    relative,
    score,
    score_table,
    scores_of,
    sensitivity,
)
from fedstill.server.distill.step import distilled_rows, split_rows
from fedstill.server.distill.targets import pool_targets

F64 = torch.float64
START = Weights({}, {})
ONE, MINUS_ONE = torch.tensor([[1.0]], dtype=F64), torch.tensor([[-1.0]], dtype=F64)
MEAN = Scoring(form="mean", lam=1 / (4 * math.log(3)))


def cloud(seed, count, features=6, centre=0.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, features)) + centre)


def w_of(own, negatives, scoring, seed=0):
    return client_answer(own, negatives, scoring, seed)["w"].double()


class Identity:
    """A trainer whose features are the samples themselves."""

    def outputs(self, weights, x, stacked=False, **how):
        return Output(x, x)


def preparation(unlabeled, clients, *, population=None, told=None, trainer=None, **how):
    trainer = trainer or Identity()

    def ask(question, among=None, *, sent, release):
        tools = Tools(trainer, seed=5, noise_seed=0)
        each = {k: question.answer(ClientData(k, x, torch.zeros(len(x))), sent, tools) for k, x in clients.items()}
        if told is not None:
            told.update(each)
        values = {name: torch.stack([answer[name] for answer in each.values()]) for name in next(iter(each.values()))}
        return Answers(torch.tensor(list(each)), values)

    return Preparation(1, None, population or len(clients), unlabeled, 5, trainer, ask, run_seed=11, **how)


def factor_of(number):
    return Weights({"factor": torch.tensor(number)}, {})


def table_of(unlabeled, clients, scoring, share=0.8, **how):
    look = preparation(unlabeled, clients, **how)
    return score_table(START, distilled_rows(look, share), look, scoring), look


@given(count=st.integers(2, 400), share=st.sampled_from([0.5, 0.8, 0.29]), seed=st.integers(0, 99))
def test_the_unlabeled_rows_fall_into_two_parts_of_one_permutation(count, share, seed):
    """T6.9."""
    chosen = split_rows(count, share, seed)
    assert len(chosen) == count
    assert int(chosen.sum()) == count * round(100 * share) // 100
    assert torch.equal(chosen, split_rows(count, share, seed))


def test_another_seed_gives_other_parts_and_no_part_is_the_first_rows():
    parts = [split_rows(50, 0.8, seed) for seed in range(4)]
    assert len({tuple(part.tolist()) for part in parts}) == 4
    assert not any(bool(part[:40].all()) for part in parts)


@pytest.mark.parametrize(("rows", "share"), [(1, 0.8), (3, 0.2)])
def test_an_empty_part_is_refused_in_one_line(rows, share):
    with pytest.raises(FedstillError, match=rf"distill_share = {share} .* {rows} unlabeled rows .*data\.unlabeled"):
        distilled_rows(preparation(torch.zeros(rows, 1), {}), share)


def test_a_client_and_the_server_work_out_the_cards_numbers():
    """T6.1: D_i = {1}, D- = {-1}: w = ln 3, s(1) = .75 + xi, s(-1) = .25 + xi."""
    answer = client_answer(ONE, MINUS_ONE, MEAN, 0)
    assert set(answer) == {"w"}
    assert answer["w"].dtype == torch.float32  # F floats leave the client
    found = scores_of({"w": answer["w"].unsqueeze(0)}, Features(MINUS_ONE, torch.tensor([[1.0], [-1.0]])), MEAN)
    assert found[0].tolist() == pytest.approx([0.75 + 1e-8, 0.25 + 1e-8], abs=1e-7)


def test_two_teachers_count_by_their_scores():
    """T6.3."""
    logits = torch.tensor([[[2.0, 0.0]], [[0.0, 4.0]]])
    weighted = pool_targets(logits, share=normalised(torch.tensor([[0.75], [0.25]])))
    assert weighted[0].tolist() == pytest.approx([0.622459, 0.377541], abs=1e-6)
    alike = pool_targets(logits, share=normalised(torch.tensor([[0.3], [0.3]])))
    assert alike[0].tolist() == pytest.approx([0.268941, 0.731059], abs=1e-6)


@given(
    teachers=st.integers(1, 12),
    level=st.sampled_from([1e-30, 1e-8, 0.1, 0.3, 0.5 + 1e-8, 1.0, 1e8]),
    pool=st.sampled_from(["logits", "probabilities"]),
)
def test_equal_scores_are_feddfs_targets_bit_for_bit(teachers, level, pool):
    """T6.4 and T6.6: also where all scores are nearly 0."""
    logits = torch.randn(teachers, 5, 3, generator=torch.Generator().manual_seed(teachers))
    share = normalised(torch.full((teachers, 5), level))
    assert torch.equal(pool_targets(logits, pool, share=share), pool_targets(logits, pool))


@given(factor=st.floats(1e-6, 1e6))
def test_a_factor_of_all_scores_changes_nothing(factor):
    scores = torch.rand(4, 7, generator=torch.Generator().manual_seed(1), dtype=F64) + 1e-3
    torch.testing.assert_close(normalised(factor * scores), normalised(scores), rtol=1e-12, atol=0)
    torch.testing.assert_close(normalised(scores).sum(0), torch.ones(7, dtype=F64))


def test_a_single_teacher_counts_fully_whatever_its_score():
    """T6.5."""
    assert normalised(torch.tensor([[1e-8, 0.3, 1.0]])).tolist() == [[1.0, 1.0, 1.0]]


def test_scores_lie_between_the_floor_and_one_and_odds_between_its_inverses():
    margin = torch.tensor([-1e4, 0.0, math.log(3), 1e4], dtype=F64)
    assert score(margin, "probability").tolist() == pytest.approx([FLOOR, 0.5 + FLOOR, 0.75 + FLOOR, 1 + FLOOR])
    assert score(margin, "odds").tolist() == pytest.approx([FLOOR, 1.0, 3.0, 1 / FLOOR])


@pytest.mark.parametrize("gamma", ["negatives", "both"])
@pytest.mark.parametrize("form", ["mean", "sum"])
def test_local_data_that_were_held_out_score_higher_than_the_negatives(gamma, form):
    """T6.11."""
    scoring = Scoring(form=form, lam=1e-3, gamma=gamma)
    negatives, held_out = cloud(2, 80), cloud(3, 50, centre=0.8)
    answer = client_answer(cloud(1, 40, centre=0.8), negatives, scoring, 0)
    stacked = {name: value.unsqueeze(0) for name, value in answer.items()}
    found, others = (scores_of(stacked, Features(negatives, part), scoring).mean() for part in (held_out, negatives))
    assert found > others + 0.1


def test_a_client_without_data_has_a_finite_w_that_is_against_the_negatives():
    """T6.12."""
    negatives = cloud(2, 30, centre=0.3)
    w = w_of(negatives[:0], negatives, MEAN)
    assert bool(w.isfinite().all())
    assert torch.sigmoid(bounded(negatives, norm_bound(negatives)) @ w).mean() < 0.5


def test_the_largest_norm_is_one_and_no_other_is_larger():
    """T6.13; by the negatives' bound longer features of a client are cut to 1."""
    own, negatives = cloud(1, 20, centre=3.0), cloud(2, 30)
    both = torch.maximum(norm_bound(own), norm_bound(negatives))
    scaled = torch.cat([bounded(own, both), bounded(negatives, both)])
    assert scaled.norm(dim=1).max().item() == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(scaled, torch.cat([own, negatives]) / both)  # and all by one factor
    cut = bounded(own, norm_bound(negatives)).norm(dim=1)
    assert cut.tolist() == pytest.approx([1.0] * 20, abs=1e-12)
    assert bounded(torch.zeros(2, 3, dtype=F64), norm_bound(torch.zeros(1, 3))).tolist() == [[0.0] * 3] * 2


def test_scores_use_the_features_divided_as_each_form_says():
    """gamma = both: h / gamma_i, however long; gamma = negatives: cut to 1, as the client's own were."""
    negatives, far = torch.eye(2, dtype=F64), torch.tensor([[4.0, 0.0]])
    answer = {"w": torch.tensor([[1.0, 0.0]]), "bound": torch.tensor([2.0]), "intercept": torch.tensor([0.5])}
    public = Features(negatives, far)
    found = [
        scores_of(answer, public, Scoring(gamma=gamma, intercept=intercept)).item()
        for gamma, intercept in (("both", False), ("negatives", False), ("negatives", True))
    ]
    assert found == pytest.approx([1 / (1 + math.exp(-z)) + 1e-8 for z in (2.0, 1.0, 1.5)], abs=1e-9)


@pytest.mark.parametrize("how", [{}, {"score": "odds"}, {"scorer": "kde"}])
def test_a_client_that_said_nothing_counts_as_much_as_the_others_on_average(how):
    unlabeled, clients = cloud(0, 25), {0: cloud(1, 9, centre=1.0), 3: cloud(2, 9, centre=-1.0)}
    table, look = table_of(unlabeled, clients, Scoring(**how), population=5)
    assert table.shape == (5, 20)
    assert not torch.allclose(table[0], table[3])
    for silent in (1, 2, 4):
        torch.testing.assert_close(table[silent], (table[0] + table[3]) / 2)
    assert normalised(table)[1].tolist() == [pytest.approx(1 / 5)] * 20  # of five clients
    assert look.metrics["scored_clients"] == 2
    assert 1 / 5 < look.metrics["largest_share"] < 1


def test_odds_are_those_of_the_probability():
    unlabeled, clients = cloud(0, 25), {0: cloud(1, 9, centre=1.0), 1: cloud(2, 9, centre=-1.0)}
    table, odds = (table_of(unlabeled, clients, Scoring(score=mode))[0] for mode in ("probability", "odds"))
    torch.testing.assert_close(odds[0].double(), table[0].double() / (1 - table[0].double()), rtol=1e-4, atol=1e-4)


def test_what_clients_send_depends_on_the_negatives_and_not_on_the_rows_that_are_distilled_on():
    unlabeled, clients = cloud(0, 25), {k: cloud(1 + k, 9, centre=1.0) for k in range(2)}
    chosen = split_rows(25, 0.8, 11)
    first: dict = {}
    plain, _ = table_of(unlabeled, clients, Scoring(), told=first)
    for rows, same in ((chosen, True), (~chosen, False)):
        other, told = unlabeled.clone(), {}
        other[rows] = cloud(9, int(rows.sum()))
        table, _ = table_of(other, clients, Scoring(), told=told)
        assert torch.equal(told[0]["w"], first[0]["w"]) == same
        assert not torch.equal(table, plain)


def test_constant_scores_ask_nobody_and_an_endless_penalty_comes_to_the_same():
    """T6.4: lam to infinity without an intercept gives s = .5 + xi."""
    unlabeled, clients = cloud(0, 25), {k: cloud(1 + k, 9, centre=k) for k in range(3)}
    told: dict = {}
    uniform, _ = table_of(unlabeled, clients, Scoring(scorer="uniform"), told=told)
    assert told == {}
    stiff, _ = table_of(unlabeled, clients, Scoring(form="mean", lam=1e12))
    torch.testing.assert_close(stiff, uniform, rtol=0, atol=1e-7)
    assert uniform.unique().tolist() == [pytest.approx(0.5 + 1e-8)]


def test_prototypes_are_scored_by_their_own_features_and_every_client_is_asked_once():
    unlabeled, clients = cloud(0, 25), {k: cloud(1 + k, 9, centre=k) for k in range(4)}
    asked: list[int] = []

    class Scaled(Identity):
        def __init__(self, factor):
            self.factor = factor

        def outputs(self, weights, x, stacked=False, **how):
            assert weights.params["factor"] == self.factor
            return Output(x, x**self.factor)

    def look_of(factor, members):
        told: dict = {}
        own = preparation(unlabeled, {k: clients[k] for k in members}, told=told, trainer=Scaled(factor))

        def ask(question, among=None, **how):
            answers = own.ask(question, **how)
            asked.extend(answers.ids.tolist())
            return answers

        return dataclasses.replace(own, ask=ask)

    looks = {"odd": look_of(3, (1, 3)), "plain": look_of(1, (0, 2))}
    shared: dict = {}
    looks = {
        name: dataclasses.replace(
            look, groups=looks, candidates={"odd": factor_of(3), "plain": factor_of(1)}, shared=shared
        )
        for name, look in looks.items()
    }
    chosen = split_rows(25, 0.8, 11)
    tables = [score_table(START, chosen, look, Scoring()) for look in looks.values()]
    assert torch.equal(*tables)
    assert sorted(asked) == [0, 1, 2, 3]
    alone, _ = table_of(unlabeled, clients, Scoring())
    torch.testing.assert_close(tables[0][[0, 2]], alone[[0, 2]], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(tables[0][[1, 3]], alone[[1, 3]], atol=1e-3)


def scores_in_two_spaces(scoring):
    """Clients 0 and 2 in 6 dimensions, 1 and 3 in 120 that say the same."""
    unlabeled, clients = cloud(0, 25), {k: cloud(1 + k, 9, centre=k) for k in range(4)}

    class Repeated(Identity):
        def outputs(self, weights, x, stacked=False, **how):
            return Output(x, x.repeat(1, int(weights.params["factor"])))

    looks = {
        name: preparation(unlabeled, {k: clients[k] for k in members}, trainer=Repeated())
        for name, members in (("low", (0, 2)), ("high", (1, 3)))
    }
    whole = dataclasses.replace(looks["low"], groups=looks, candidates={"low": factor_of(1), "high": factor_of(20)})
    return score_table(START, split_rows(25, 0.8, 11), whole, scoring), unlabeled, clients


def test_densities_of_prototypes_with_more_features_do_not_drown_the_others():
    table, unlabeled, clients = scores_in_two_spaces(Scoring(scorer="kde"))
    share = normalised(table)
    torch.testing.assert_close(share[[0, 2]].sum(0), torch.full((20,), 0.5, dtype=F64), rtol=1e-5, atol=1e-5)
    alone, _ = table_of(unlabeled, {0: clients[0], 1: clients[2]}, Scoring(scorer="kde"))
    torch.testing.assert_close(2 * share[[0, 2]], normalised(alone), rtol=1e-5, atol=1e-5)


def on_the_sphere(points):
    return torch.nn.functional.normalize(points, dim=1)


@pytest.mark.parametrize("lam", [1e-3, 1e-2, 0.1])
def test_one_sample_moves_the_mean_forms_solution_no_further_than_its_sensitivity(lam):
    worst = 0.0
    for seed in range(20):
        own, negatives = on_the_sphere(cloud(seed, 3, centre=0.5)), on_the_sphere(cloud(seed + 100, 9))
        other = own.clone()
        other[0] = -own[0]
        moves = [w_of(part, negatives, Scoring(form="mean", lam=lam)) for part in (own, other)]
        worst = max(worst, float((moves[0] - moves[1]).norm()))
    assert 0.01 * sensitivity(lam, 12) < worst <= sensitivity(lam, 12)


def test_in_the_form_of_the_released_code_it_moves_many_times_as_far():
    """One sample, at a right angle to 299 negatives: sigma(-v) = lam v, times n for the mean."""
    negatives = torch.nn.functional.pad(on_the_sphere(cloud(1, 299)), (2, 0))
    first, second = torch.eye(2, 8, dtype=F64).split(1)
    moved = {
        form: float((w_of(first, negatives, one) - w_of(second, negatives, one)).norm())
        for form in ("mean", "sum")
        for one in [Scoring(form=form, lam=0.1)]
    }
    assert moved["sum"] == pytest.approx(math.sqrt(2) * 1.6335062, abs=1e-6)  # T6.1
    assert moved["sum"] > 30 * sensitivity(0.1, 300)
    assert moved["mean"] < sensitivity(0.1, 300)


def test_far_private_samples_are_bounded_by_public_data_alone():
    """A sample of any length moves w by no more than one of length 1: gamma does not look at it."""
    own, negatives = cloud(1, 40, centre=1.0), cloud(2, 400)
    far = own.clone()
    far[0] = 1e9 * far[0]
    scoring = Scoring(form="mean", lam=0.1)
    assert (w_of(own, negatives, scoring) - w_of(far, negatives, scoring)).norm() <= sensitivity(0.1, 440)
    both = dataclasses.replace(scoring, gamma="both")
    assert (w_of(own, negatives, both) - w_of(far, negatives, both)).norm() > 2 * sensitivity(0.1, 440)
    assert "bound" in client_answer(own, negatives, both, 0)


def test_noise_has_the_standard_deviation_of_its_multiple_of_the_sensitivity():
    own, negatives = cloud(1, 3), cloud(2, 5)
    quiet = w_of(own, negatives, Scoring(form="mean", lam=0.1))
    loud = Scoring(form="mean", lam=0.1, noise=3.0)
    moves = torch.stack([w_of(own, negatives, loud, seed_for(0, k)) - quiet for k in range(400)])
    wanted = 3.0 * 2 / (0.1 * 8)
    assert moves.std().item() == pytest.approx(wanted, rel=0.06)  # 2400 draws: four standard errors
    assert abs(moves.mean().item()) < 4 * wanted / math.sqrt(2400)
    again = w_of(own, negatives, loud, seed_for(0, 1)) - quiet
    assert torch.equal(again, moves[1])


def test_every_client_draws_noise_of_its_own():
    unlabeled, same = cloud(0, 25), cloud(1, 9)
    told: dict = {}
    table_of(unlabeled, {0: same, 1: same}, Scoring(form="mean", noise=1.0), told=told)
    assert not torch.allclose(told[0]["w"], told[1]["w"])
    table_of(unlabeled, {0: same, 1: same}, Scoring(form="mean"), told=told)
    assert torch.equal(told[0]["w"], told[1]["w"])


LATENT, WIDTH, OWN, PUBLIC = 30, 64, 500, 4000  # the card's toy: ten clients with one class of thirty each


@pytest.fixture(scope="module")
def toy():
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(LATENT, WIDTH))

    def relu_features(kind, count):
        return torch.from_numpy(np.maximum(centres[kind] + generator.normal(size=(count, WIDTH)), 0))

    negatives = torch.cat([relu_features(kind, PUBLIC // LATENT + 1) for kind in range(LATENT)])[:PUBLIC]
    clients = [relu_features(kind, OWN) for kind in range(10)]
    return negatives, clients, [relu_features(kind, 100) for kind in range(10)]


@pytest.mark.parametrize(
    ("form", "lam", "intercept", "share"),
    [
        ("mean", 0.1, False, 0.105),
        ("mean", 1e-3, False, 0.531),
        ("mean", 1e-4, False, 0.846),
        ("sum", 0.01, True, 0.939),
    ],
)
def test_the_right_client_counts_most_and_by_how_much_depends_on_the_form(toy, form, lam, intercept, share):
    """Mean share of the client that holds a sample's class; 0.1 says nothing. The card's figures, on our own draw."""
    negatives, clients, tests = toy
    scoring = Scoring(form=form, lam=lam, intercept=intercept)
    answers = [client_answer(own, negatives, scoring, 0) for own in clients]
    stacked = {name: torch.stack([answer[name] for answer in answers]) for name in answers[0]}
    shares = [normalised(scores_of(stacked, Features(negatives, part), scoring)).mean(1) for part in tests]
    assert [int(one.argmax()) for one in shares] == list(range(10))
    assert np.mean([float(one[kind]) for kind, one in enumerate(shares)]) == pytest.approx(share, abs=0.025)


# The convex problem of the certainty scores: worked numbers (T6.1 of the cards), and gradients taken by NumPy.

PAIR, SIGN = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.tensor([1.0, -1.0])

LN3 = math.log(3)


def sample(seed, count=60, features=7, scale=1.0):
    """Two overlapping clouds in the unit ball."""
    generator = np.random.default_rng(seed)
    sign = np.where(generator.random(count) < 0.3, 1.0, -1.0)
    sign[:2] = (1.0, -1.0)
    x = generator.normal(size=(count, features)) + 0.7 * sign[:, None]
    x *= scale / np.linalg.norm(x, axis=1).max()
    return torch.from_numpy(x), torch.from_numpy(sign)


def gradient_by_numpy(x, sign, w, b, lam, form):
    """Of the objective as the paper prints it (with the right sign), sample by sample."""
    x, sign, w = x.numpy(), sign.numpy(), w.numpy()
    scale = 1 / len(x) if form == "mean" else 1.0
    total, last = lam * w, 0.0
    for row, t in zip(x, sign, strict=True):
        slope = -t * expit(-t * (row @ w + b))
        total, last = total + scale * slope * row, last + scale * slope
    return total, last


@pytest.mark.parametrize(
    ("lam", "w", "score"),
    [
        (1 / (4 * LN3), 1.0986123, 0.75),
        (0.1, 1.6335062, 0.8366494),
        (0.01, 3.3592750, 0.9664072),
        (1.0, 0.4010581, 0.5989419),
    ],
)
def test_two_points_are_parted_as_worked_out_by_hand(lam, w, score):
    """T6.1: w = sigma(-w) / lam, since both points pull alike."""
    found = fit_logistic(PAIR, SIGN, lam=lam).w
    assert found.item() == pytest.approx(w, abs=6e-8)
    assert torch.sigmoid(PAIR @ found).tolist() == pytest.approx([score, 1 - score], abs=6e-8)


def test_local_data_are_on_the_positive_side():
    """The loss as the paper prints it, ln(1 + e^z), would give -ln 3."""
    assert fit_logistic(PAIR, SIGN, lam=1 / (4 * LN3)).w.item() > 0
    assert fit_logistic(PAIR, -SIGN, lam=1 / (4 * LN3)).w.item() == pytest.approx(-LN3, abs=6e-8)


def test_the_sum_with_n_times_the_penalty_is_the_mean():
    found = fit_logistic(PAIR, SIGN, lam=0.4551196, form="sum").w.item()  # 2 / (4 ln 3)
    assert found == pytest.approx(LN3, abs=1e-6)
    x, sign = sample(1)
    mean, total = fit_logistic(x, sign, lam=0.02), fit_logistic(x, sign, lam=0.02 * len(x), form="sum")
    torch.testing.assert_close(total.w, mean.w, rtol=1e-8, atol=1e-8)


@given(
    seed=st.integers(0, 10_000),
    lam=st.sampled_from([1e-6, 1e-3, 0.1, 10.0]),
    form=st.sampled_from(["mean", "sum"]),
    intercept=st.booleans(),
)
@example(seed=586, lam=1e-6, form="sum", intercept=False)  # parted without an error: exp(z) would overflow
def test_the_gradient_is_as_small_as_promised(seed, lam, form, intercept):
    x, sign = sample(seed)
    solved = fit_logistic(x, sign, lam=lam, form=form, intercept=intercept)
    by_w, by_b = gradient_by_numpy(x, sign, solved.w, float(solved.intercept), lam, form)
    norm = math.hypot(np.linalg.norm(by_w), by_b if intercept else 0.0)
    promised = SOLVER_SLACK / len(x) if form == "mean" else SOLVER_SLACK
    assert solved.tolerance == pytest.approx(promised)
    assert norm <= promised
    assert norm == pytest.approx(float(solved.gradient), abs=1e-12)
    assert intercept or solved.intercept == 0


def test_it_is_the_solution_that_scikit_learn_finds():
    from sklearn.linear_model import LogisticRegression

    x, sign = sample(3, count=200)
    for intercept in (False, True):
        other = LogisticRegression(C=1 / 0.05, fit_intercept=intercept, tol=1e-12, max_iter=10_000).fit(x, sign)
        found = fit_logistic(x, sign, lam=0.05, form="sum", intercept=intercept)
        assert found.w.tolist() == pytest.approx(other.coef_[0].tolist(), abs=1e-5)
        assert float(found.intercept) == pytest.approx(float(np.ravel(other.intercept_)[0]), abs=1e-5)


def test_points_that_can_be_parted_have_a_solution_too():
    x, sign = sample(5, count=20, features=40)  # fewer points than features: always separable
    solved = fit_logistic(x, sign, lam=1e-7, form="sum", intercept=True)
    assert bool(((x @ solved.w + solved.intercept) * sign > 0).all())
    assert solved.gradient <= SOLVER_SLACK


@pytest.mark.parametrize("intercept", [False, True])
def test_without_own_points_the_solution_is_finite_and_against_the_others(intercept):
    """T6.12; with points of one sign a free intercept would run away."""
    x, sign = sample(7)
    others = x[sign < 0] + 0.1
    solved = fit_logistic(others, -torch.ones(len(others)), lam=0.01, form="sum", intercept=intercept)
    assert bool(solved.w.isfinite().all())
    assert solved.intercept == 0
    assert torch.sigmoid(others @ solved.w).mean() < 0.5


def test_an_endless_penalty_leaves_nothing():
    x, sign = sample(2)
    assert fit_logistic(x, sign, lam=1e12).w.norm() < 1e-11


def test_where_rounding_keeps_it_from_its_aim_it_ends_within_its_promise():
    """A sum of 60 terms of about 1 is not known to 1e-16, and no further step helps."""
    x, sign = sample(4)
    problem = Problem(sign[:, None] * x, 1.0, torch.full((7,), 0.1, dtype=torch.float64))
    _, norm = _descend(problem, tolerance=1e-14)
    assert 1e-14 * AIM / SOLVER_SLACK < norm <= 1e-14


def test_a_problem_without_a_solution_is_told():
    x = torch.full((2, 1), float("nan"), dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="gradient"):
        _descend(Problem(x, 1.0, torch.ones(1, dtype=torch.float64)), tolerance=1e-6)


# The other scorers of FedAUX's Fig. 4: what they say of near and far samples, against slow formulas.

SCORERS = ("kde", "isolation_forest", "one_class_svm", "two_class_svm")


def cloud_scorers(seed, count, centre, features=3):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(size=(count, features)) + np.asarray(centre))


NEGATIVES = cloud_scorers(0, 60, 0.0)


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_client_with_such_samples_counts_more(scorer):
    centres = ((3.0, 0.0, 0.0), (-3.0, 0.0, 0.0))
    asked = torch.cat([cloud_scorers(8, 20, centre) for centre in centres])
    logs = [log_scores(scorer, cloud_scorers(k, 30, centre), NEGATIVES, asked, 1) for k, centre in enumerate(centres)]
    share = normalised(relative(torch.stack(logs)))
    right = torch.cat([share[0, :20], share[1, 20:]])
    assert right.mean() > 0.52
    assert (right > 0.5).double().mean() > 0.9


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_scorer_leaves_numpys_global_stream_alone(scorer):
    before = np.random.get_state()
    log_scores(scorer, cloud_scorers(1, 30, 1.0), NEGATIVES, NEGATIVES, 1)
    np.testing.assert_equal(np.random.get_state(), before)


def test_the_density_is_that_of_a_gaussian_kernel_with_scotts_width():
    own, asked = cloud_scorers(1, 9, 1.0, features=2), cloud_scorers(2, 4, 0.0, features=2)
    width = math.sqrt(float(own.var(dim=0, correction=0).mean())) * 9 ** (-1 / 6)
    wanted = [
        math.log(
            sum(math.exp(-float(((x - y) ** 2).sum()) / (2 * width**2)) for y in own) / (9 * 2 * math.pi * width**2)
        )
        for x in asked
    ]
    found = log_scores("kde", own, NEGATIVES[:, :2], asked, 0)
    assert found.tolist() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_client_of_one_sample_has_finite_scores(scorer):
    found = log_scores(scorer, cloud_scorers(1, 1, 1.0), NEGATIVES[:2], cloud_scorers(2, 5, 0.0), 3)
    assert found.shape == (5,)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_same_seed_gives_the_same_scores(scorer):
    first, again = (log_scores(scorer, cloud_scorers(1, 9, 1.0), NEGATIVES, NEGATIVES[:4], 2**63 + 5) for _ in range(2))
    assert torch.equal(first, again)


def test_scores_without_a_scale_are_parts_of_the_largest():
    logs = torch.tensor([[-5000.0, 0.0], [-5000.0 - math.log(4), -1e5]], dtype=torch.float64)
    assert relative(logs).tolist() == [[1.0, 1.0], [pytest.approx(0.25), LEAST]]


def test_densities_of_spaces_of_different_dimension_count_by_their_clients():
    """24 and 384 features: a density is of another size in each, and says nothing about the other."""
    wide = torch.tensor([[900.0, 950.0], [905.0, 800.0], [905.0, 940.0]], dtype=torch.float64)
    narrow = torch.tensor([[-3.0, -9.0], [-4.0, -2.0]], dtype=torch.float64)
    share = normalised(relative(torch.cat(comparable([wide, narrow]))))
    torch.testing.assert_close(share[:3].sum(0), torch.full((2,), 3 / 5, dtype=torch.float64))
    for part, own in ((share[:3], wide), (share[3:], narrow)):  # among themselves they share as if alone
        torch.testing.assert_close(part / part.sum(0), normalised(relative(own)))


def test_densities_of_one_architecture_stay_as_they_are():
    logs = [torch.tensor([[-5.0, 2.0], [3.0, 4.0]])]
    assert comparable(logs) is logs
    assert comparable([logs[0], torch.empty(0, 2)])[1].shape == (0, 2)  # none of its clients answered
