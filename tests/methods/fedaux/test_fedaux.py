"""FedAUX: its forms, what it promises, what it is with equal scores, and what it becomes beside other methods."""

import dataclasses
from pathlib import Path

import pytest
import torch
from papers import released
from server_rounds import CLASSES, FEATURES, federation, network, points, run
from students import form
from toy import furthest, same_bits
from weighed import weighed
from whole_server import as_one, watched, whole

from fedstill.about.explain import explain
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.tree import byte_size, flatten
from fedstill.core.types import Federation, Need, Phase, Release, Training
from fedstill.engine import build_engine
from fedstill.methods import fedaux
from fedstill.methods.fedaux.certainty import normalised, sensitivity
from fedstill.methods.lookup import build_method
from fedstill.models import build_model, mixed_model
from fedstill.privacy.accountant import analytic_gaussian_multiplier, classic_multiplier, epsilon_of
from fedstill.server.distill.targets import targets_of

SHORT = {"steps": 5, "batch_size": 8}
SCORERS = ("kde", "isolation_forest", "one_class_svm", "two_class_svm")


def release_of(**options) -> Release:
    (release,) = fedaux(**options).releases
    return release


def noise_of(lam, count, **options):
    """The standard deviation of the noise on a client's w."""
    claimed = release_of(form="mean", lam=lam, **options).multiplier
    return claimed * sensitivity(lam, count)


@pytest.mark.parametrize(
    ("count", "lam", "epsilon", "delta", "sigma"),
    [(22_500, 0.1, 0.1, 1e-5, 0.0430649), (22_500, 0.01, 0.1, 1e-5, 0.4306494), (21_250, 0.01, 0.04, 1e-6, 1.2467771)],
)
def test_the_papers_noise_is_the_cards(count, lam, epsilon, delta, sigma):
    """T6.2."""
    found = noise_of(lam, count, epsilon=epsilon, delta=delta, mechanism="classic")
    assert found == pytest.approx(sigma, rel=3e-6)  # a millionth goes to the solver's error
    exact = noise_of(lam, count, epsilon=epsilon, delta=delta)
    assert exact < found  # the same promise with less noise


def test_without_epsilon_there_is_no_noise_and_no_claim_and_it_says_so():
    for options in ({}, {"form": "mean"}):
        release = release_of(**options)
        assert release.multiplier is None
        assert "epsilon" in release.why
    quiet, again = (run(form("fedaux", **SHORT, form="mean"), seed=4, rounds=1).weights for _ in range(2))
    assert same_bits(quiet, again)


def test_a_claim_is_one_release_of_one_sample_towards_the_server_once():
    release = release_of(form="mean", epsilon=0.5, delta=1e-6)
    assert (release.unit, release.when, release.against) == ("sample", "once", "server")
    assert release.multiplier == pytest.approx(analytic_gaussian_multiplier(0.5, 1e-6), rel=1e-12)
    assert "2 / (lam n)" in release.why


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"form": "sum"}, "with form = 'sum': .* set form = 'mean'"),
        ({"gamma": "both"}, "with gamma = 'both': .* set gamma = 'negatives'"),
        ({"intercept": True}, "with intercept = true: .* set intercept = false"),
        ({"form": "sum", "gamma": "both"}, "with form = 'sum', gamma = 'both': .*form = 'mean'.*gamma = 'negatives'"),
    ],
)
def test_an_epsilon_that_cannot_be_kept_is_refused_with_the_setting_at_fault_and_what_to_do(wrong, named):
    options = {"form": "mean", "epsilon": 1.0, **wrong}
    with pytest.raises(FedstillError, match=rf"method\.epsilon = 1\.0 cannot be promised {named}") as told:
        fedaux(**options)
    assert {key for key in ("form", "gamma", "intercept") if f"{key} = " in str(told.value)} == set(wrong)
    assert "\n" not in str(told.value)
    assert release_of(**{**options, "epsilon": None}).multiplier is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lam": 0.0}, "lam = 0.0"),
        ({"distill_share": 1.0}, "distill_share = 1.0 must be a number above 0 and below 1"),
        ({"distill_share": 0.0}, "distill_share = 0.0 must be"),
        ({"distill_share": 1.2}, "distill_share = 1.2"),
        ({"form": "mean", "epsilon": 0.0}, "epsilon = 0.0"),
        ({"form": "mean", "epsilon": 1.0, "delta": 1.0}, "method.delta = 1.0 must be a number above 0 and below 1"),
        ({"mechanism": "classic", "epsilon": 5.0}, "epsilon is 5: .*method.mechanism = 'analytic'"),
        ({"scorer": "kde", "epsilon": 1.0}, "epsilon = 1.0 has no use with scorer = 'kde'"),
        ({"scorer": "uniform", "score": "odds"}, "score = 'odds'"),
        ({"scorer": "logistc"}, "did you mean 'logistic'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(options, told):
    with pytest.raises(FedstillError, match=told.replace(".", r"\.").replace(r"\.*", ".*")) as error:
        build_method("fedaux", options)
    assert "\n" not in str(error.value)


def test_noise_beside_an_intercept_claims_nothing_for_that_reason():
    release = release_of(form="mean", intercept=True, epsilon=0.5, mechanism="classic")
    assert release.multiplier is None
    assert "the intercept has no penalty" in release.why


def test_the_papers_and_the_released_form_claim_nothing():
    """Both add the paper's noise: one publishes a private norm bound, the other solves another problem."""
    noise = {"epsilon": 0.1, "delta": 1e-5}
    paper = release_of(form="mean", lam=0.1, gamma="both", mechanism="classic", **noise)
    (code,) = released("fedaux", "fedaux")(**noise).releases
    assert (paper.multiplier, code.multiplier) == (None, None)
    assert "gamma" in paper.why
    assert "n times too small" in code.why


def test_its_page_names_the_epsilon_that_the_released_noise_certifies():
    """The sum moves n times as far as the mean, for which the noise was made."""
    page = (Path(__file__).parents[3] / "docs" / "methods" / "fedaux.md").read_text(encoding="utf-8")
    for count, told in ((1000, "300"), (4500, "4,709"), (22_500, "110,000")):
        certified = epsilon_of(1e-5, classic_multiplier(0.1, 1e-5) / count)
        assert certified > 0.1 * count
        assert certified == pytest.approx(float(told.replace(",", "")), rel=2e-3)
        words = f"{told} at $n = {count:,}$".replace(f"{count:,}", f"{count:,}".replace(",", "{,}"))
        assert words in " ".join(page.split())
    assert epsilon_of(1e-5, classic_multiplier(0.1, 1e-5) / 100) > 0.1 * 100
    assert "2,250" not in page


@pytest.mark.parametrize("scorer", SCORERS)
def test_other_scorers_run_and_make_no_claim(scorer):
    method = form("fedaux", **SHORT, scorer=scorer)
    assert scorer in method.releases[0].why
    assert method.releases[0].multiplier is None
    found = run(method, rounds=1)
    assert found.history.rows[0]["bytes_prepared"] == 5 * 16 * 4  # a number for each of 16 rows from 5 clients
    assert found.history.rows[0]["bytes_prepared_down"] == 5 * (byte_size(network().init(0)) + 20 * 6 * 4)  # all rows
    assert not same_bits(found.weights, run(form("fedaux", **SHORT, scorer="uniform"), rounds=1).weights)


def test_features_are_needed_only_where_scores_are_made_of_them():
    assert Need.FEATURES in needs_of(fedaux())
    assert Need.FEATURES not in needs_of(fedaux(scorer="uniform"))
    assert fedaux(scorer="uniform").releases == ()


def test_its_page_says_what_leaves_a_client_before_the_first_round():
    facts = explain("fedaux")
    assert facts["leaves_a_client_once"] == ["w: one number for each feature"]
    assert {"distill", "average"} <= {part["part"] for part in facts["parts"]}
    assert explain("fedaux(scorer=uniform)")["leaves_a_client_once"] == []


def test_what_leaves_a_client_before_the_first_round_are_as_many_numbers_as_features():
    row = run(form("fedaux", **SHORT), rounds=1).history.rows[0]
    assert row["bytes_prepared"] == 5 * 6 * 4  # 5 clients, 6 features
    assert row["bytes_prepared_down"] == 5 * (byte_size(network().init(0)) + 4 * 6 * 4)  # the model, 4 negatives
    assert row["prepare/scored_clients"] == 5
    assert 1 / 5 < row["prepare/largest_share"] < 1


@pytest.mark.parametrize("options", [{}, {"pool": "probabilities", "temperature": 2.0}, {"warm_up": 1}])
def test_with_equal_scores_it_is_feddf_on_the_same_rows_bit_for_bit(options):
    """T6.4, through three rounds."""
    found = run(form("fedaux", **SHORT, scorer="uniform", **options))
    wanted = run(weighed(form("feddf", **SHORT, distill_share=0.8, **options), "size"))
    assert same_bits(found.weights, wanted.weights)
    assert same_bits(found.targets._asdict(), wanted.targets._asdict())
    assert int(found.targets.kept.sum()) == 16  # of 20
    assert not same_bits(run(form("fedaux", **SHORT, **options)).weights, wanted.weights)


def test_an_endless_penalty_is_feddf_too():
    """T6.4: s = .5 + xi for every client and sample."""
    found, wanted = (
        run(form("fedaux", **SHORT, **how)) for how in ({"form": "mean", "lam": 1e12}, {"scorer": "uniform"})
    )
    assert furthest(found.targets._asdict(), wanted.targets._asdict()) < 1e-6
    assert furthest(found.weights, wanted.weights) < 1e-5


def states_of(method, **how):
    """The distilling step's state after each round."""
    seen = []

    def look(candidate, state, round):
        seen.append({name.rpartition("/")[2]: leaf for name, leaf in flatten(state).items()})

    return seen, run(watched(method, look), **how)


def test_scores_are_made_once_and_stay():
    """T6.8."""
    seen, _ = states_of(form("fedaux", **SHORT), rounds=3)
    for later in seen[1:]:
        assert torch.equal(later["scores"], seen[0]["scores"])
        assert torch.equal(later["distilled"], seen[0]["distilled"])
    assert seen[0]["scores"].shape == (5, 16)
    assert not torch.equal(seen[2]["probabilities"], seen[0]["probabilities"])


def test_every_method_of_a_run_distils_on_the_same_rows():
    """A function of the run's seed; and rows that are not distilled on are not kept."""
    first, other, another = (
        states_of(method, rounds=1, seed=seed)[0][0]["distilled"]
        for method, seed in (
            (form("fedaux", **SHORT), 3),
            (form("feddf", **SHORT, distill_share=0.8), 3),
            (form("fedaux", **SHORT), 4),
        )
    )
    assert torch.equal(first, other)
    assert not torch.equal(first, another)
    _, result = states_of(form("fedaux", **SHORT), rounds=1)
    assert torch.equal(result.targets.kept, first)


def test_a_phase_that_follows_has_the_same_negatives_as_the_one_before():
    """T6.9: no row is distilled on in one phase and a negative in the next."""
    first, second = form("fedaux", **SHORT), form("fedaux", **SHORT, score="odds")
    seen = []

    def watched(method):
        def prepare(candidate, state, preparation):
            candidate, state = whole(method).prepare(candidate, state, preparation)
            seen.append(next(leaf for name, leaf in flatten(state).items() if name.endswith("distilled")))
            return candidate, state

        return as_one(method, prepare=prepare)

    run((Phase(watched(first), until=2), Phase(watched(second))), rounds=3)
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_asking_clients_leaves_the_kept_sets_of_the_engine_in_their_places():
    data = federation()
    engine = build_engine("looped", "cpu", model=network(), federation=data)
    kept = [engine._feed_of(x) for x in (data.unlabeled, data.test.x)]
    run(form("fedaux", **SHORT), rounds=1, federation=data, engine=engine)
    assert [engine._feed_of(x) for x in (data.unlabeled, data.test.x)] == kept
    assert len(engine.feeds) == 2  # none of the five clients'


def one_class_each() -> tuple[Federation, torch.Tensor]:
    """Three clients, each with all samples of one class; and the classes of 200 unlabeled samples."""
    data, (x, y) = federation(), points(200, "more")
    order, sizes = torch.argsort(data.train.y, stable=True), torch.bincount(data.train.y, minlength=CLASSES)
    offsets = torch.tensor([0, *sizes.cumsum(0).tolist()])
    return dataclasses.replace(data, indices=order, offsets=offsets, unlabeled=x), y


def test_the_client_that_knows_a_class_counts_most_for_its_samples():
    data, truth = one_class_each()
    model = build_model("mlp", input_shape=(FEATURES,), classes=CLASSES, hidden=(), init="torch")
    seen, _ = states_of(form("fedaux", **SHORT), federation=data, model=model, cohort=3, rounds=1)
    share, kind = normalised(seen[0]["scores"]), truth[seen[0]["distilled"]]
    assert (share.argmax(0) == kind).double().mean() > 0.7
    assert share.gather(0, kind.unsqueeze(0)).mean() > 0.45  # alike: a third


def test_more_of_its_targets_are_right_than_of_feddfs_where_clients_know_one_class_each():
    data, truth = one_class_each()
    model = build_model("mlp", input_shape=(FEATURES,), classes=CLASSES, hidden=(), init="torch")
    how = {"federation": data, "model": model, "cohort": 3, "rounds": 1}
    how["training"] = Training(batch_size=6, epochs=20, lr=0.5)

    def right(method):
        total = 0.0
        for seed in range(4):
            targets = run(method, seed=seed, **how).targets
            total += float((targets.probabilities.argmax(1) == truth)[targets.kept].double().mean()) / 4
        return total

    alike, weighted = right(form("fedaux", **SHORT, scorer="uniform")), right(form("fedaux", **SHORT, score="odds"))
    assert weighted > alike + 0.01


@pytest.mark.parametrize(
    "text",
    [
        "fedaux(student.steps=5, student.batch_size=8)+fedprox(mu=0.5)",
        "fedaux(student.steps=5, student.batch_size=8)+scaffold",
        "fedaux(student.steps=5, student.batch_size=8)+fedavgm",
        "fedaux(student.steps=5, student.batch_size=8)+update_noise(sigma=0.01)",
    ],
)
def test_it_joins_methods_that_change_the_clients_or_the_servers_step(text):
    (phase,) = build_method(text)
    found = run(phase.method, rounds=2)
    assert found.history.rows[0]["prepare/scored_clients"] == 5
    assert any(release.what == "certainty scores" for release in phase.method.releases)
    for part in text.split("+"):
        (alone,) = build_method(part)
        assert not same_bits(found.weights, run(alone.method, rounds=2).weights)


def test_what_its_page_says_to_join_for_the_rounds_makes_a_claim_about_all_that_leaves_a_client():
    page = (Path(__file__).parents[3] / "docs" / "methods" / "fedaux.md").read_text(encoding="utf-8")
    advice = " ".join(page.split()).partition("It does not protect the models")[2].partition("privacy statement")[0]
    assert 'dp_fedavg(trust="nobody")' in advice
    scores = "fedaux(form=mean, epsilon=1.0)"
    (phase,) = build_method(f"dp_fedavg(trust=nobody, noise_multiplier=8)+{scores}")
    assert {release.when for release in phase.method.releases} == {"once", "round"}
    assert all(release.multiplier for release in phase.method.releases)
    (quiet,) = build_method(f"update_noise(sigma=0.1)+{scores}")
    assert {release.when for release in quiet.method.releases if release.multiplier} == {"once"}


def test_a_later_phase_asks_when_its_turn_comes_and_forms_targets_then():
    phases = build_method("fedavg until 2 then fedaux(student.steps=5, student.batch_size=8)")
    rows = run(phases, rounds=3).history.rows
    assert ["prepare/scored_clients" in row for row in rows] == [False, False, True]
    assert [row.get("pseudo_labels") for row in rows] == [None, None, 16]


@pytest.mark.parametrize("idle", [{"steps": 0}, {"epochs": 0}])
def test_without_distillation_nobody_is_asked_and_nothing_is_released(idle):
    method = form("fedaux", **idle)
    assert method.releases == ()
    assert "prepare/scored_clients" not in run(method, rounds=1).history.rows[0]


def test_a_refined_model_that_is_only_reported_is_prepared_too():
    found = run(form("fedaux", **SHORT, feedback=False, warm_up=1), rounds=2)
    assert found.history.rows[0]["prepare/scored_clients"] == 5
    assert [row.get("pseudo_labels") for row in found.history.rows] == [None, 16]


def test_one_prototype_is_the_same_as_no_prototypes():
    """T6.7."""
    alone = run(form("fedaux", **SHORT), rounds=2)
    found = run(form("fedaux", **SHORT), rounds=2, model=mixed_model({"only": network()}, 5))
    assert furthest({n.removeprefix("only/"): p for n, p in found.weights.params.items()}, alone.weights.params) < 1e-6


def test_clients_of_two_architectures_teach_both_by_their_scores():
    nets = {"small": network(), "large": build_model("mlp", input_shape=(FEATURES,), classes=CLASSES, hidden=(9,))}
    method, seen = form("fedaux", **SHORT), []
    (refine,) = method.server

    def apply(candidate, state, round):
        candidate, state = refine.apply(candidate, state, round)
        seen.append(state)
        return candidate, state

    method = dataclasses.replace(method, server=(dataclasses.replace(refine, apply=apply),))
    result = run(method, rounds=1, model=mixed_model(nets, 5))
    small, large = seen
    assert torch.equal(small["scores"], large["scores"])
    assert small["scores"].shape == (5, 16)
    kept = small["distilled"]
    assert torch.equal(targets_of(small).probabilities[kept], targets_of(large).probabilities[kept])
    assert result.history.rows[0]["bytes_prepared"] == (3 * 6 + 2 * 9) * 4  # clients 0, 2, 4 and 1, 3: their features
