"""FederatedClassifier: scikit-learn's own checks, tables with words, owners, pipelines, networks of Python."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import fedstill
from fedstill import FederatedClassifier, FedstillError

# None is expected to fail. scikit-learn itself skips check_array_api_input, unless SCIPY_ARRAY_API is set.
EXPECTED_FAILED_CHECKS: dict[str, str] = {}
RANDOM = np.random.default_rng(0)
X = pd.DataFrame({"age": RANDOM.normal(50, 10, 120), "sex": RANDOM.choice(["f", "m"], 120)})
Y = np.where((X["age"] > 50) ^ (X["sex"] == "f"), "sick", "well")
OWNER = RANDOM.choice(["north", "south", "west"], 120)
IRIS = load_iris()


@parametrize_with_checks(
    [FederatedClassifier(rounds=4, clients=2)], expected_failed_checks=lambda _: EXPECTED_FAILED_CHECKS
)
def test_it_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_a_table_with_words_is_learnt_from_and_its_columns_are_found_by_name():
    fitted = FederatedClassifier(rounds=15).fit(X, Y, groups=OWNER)
    assert (fitted.contract_.population, fitted.experiment_.cohort) == (3, 3)
    assert fitted.classes_.tolist() == ["sick", "well"]
    assert fitted.feature_names_in_.tolist() == ["age", "sex"]
    assert fitted.score(X, Y) > 0.9
    assert fitted.history_[-1]["accuracy"] == pytest.approx(fitted.score(X, Y))
    with pytest.raises(ValueError, match="feature names"):
        fitted.predict(X[["sex", "age"]])
    with pytest.raises(FedstillError, match="'x'"):
        fitted.predict(X.assign(sex="x"))


def test_an_owner_may_be_a_column_and_is_no_input():
    table = X.assign(clinic=OWNER)
    by_column = FederatedClassifier(rounds=2).fit(table, Y, groups="clinic")
    beside = FederatedClassifier(rounds=2).fit(X, Y, groups=pd.Series(OWNER, name="clinic"))
    np.testing.assert_array_equal(by_column.predict_proba(table), beside.predict_proba(X))
    np.testing.assert_array_equal(by_column.predict_proba(X), beside.predict_proba(X))  # new rows need no owner
    assert list(by_column.feature_names_in_) == list(X.columns)


def test_rows_without_owners_are_split_as_the_parameters_say():
    split = FederatedClassifier(rounds=1, clients=6, partition={"scheme": "lda", "alpha": 0.3}).fit(X, Y)
    assert (split.contract_.population, split.experiment_.partition.scheme) == (6, "lda")


def test_a_pipeline_is_cross_validated_and_searched():
    pipeline = make_pipeline(StandardScaler(), FederatedClassifier(rounds=10, clients=3))
    assert cross_val_score(pipeline, IRIS.data, IRIS.target, cv=3).mean() > 0.85
    owners = np.arange(150) % 5
    owned = cross_val_score(
        pipeline, IRIS.data, IRIS.target, cv=3, params={"federatedclassifier__groups": owners}, error_score="raise"
    )
    assert owned.mean() > 0.85
    search = GridSearchCV(pipeline, {"federatedclassifier__method": ["fedavg", "fedprox(mu=0.1)"]}, cv=2)
    assert search.fit(IRIS.data, IRIS.target).best_score_ > 0.8


def test_tensors_are_taken_and_a_module_trains():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.tensor(IRIS.data), torch.tensor(IRIS.target)
    fitted = clone(FederatedClassifier(model=network, rounds=10, clients=3)).fit(x, y)
    assert fitted.predict_proba(x).shape == (150, 3)
    assert fitted.score(x, y) > 0.85


def test_parameters_changed_after_the_fit_do_not_change_the_answers():
    network, other = (nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3)) for layer in (nn.ReLU(), nn.Tanh()))
    fitted = FederatedClassifier(model=network, rounds=2, clients=3).fit(IRIS.data, IRIS.target)
    before = fitted.predict_proba(IRIS.data)
    np.testing.assert_array_equal(fitted.set_params(model=other, rounds=9).predict_proba(IRIS.data), before)


def test_images_go_to_a_convolutional_network():
    images = RANDOM.integers(0, 255, (20, 8, 8))
    fitted = FederatedClassifier(rounds=1, clients=2).fit(images, np.arange(20) % 2)
    assert fitted.experiment_.model.name == "cnn"
    assert fitted.predict_proba(images).shape == (20, 2)


def test_other_settings_of_an_experiment_reach_the_run(tmp_path):
    settings = {"cohort": 2, "data": {"unlabeled": 20, "scale": "none"}}
    fitted = FederatedClassifier("feddf(student.steps=2)", rounds=1, settings=settings)
    fitted.fit(X, Y, groups=OWNER, run_dir=tmp_path)
    assert fitted.contract_.rows["unlabeled"].count == 20
    assert set(fitted.contract_.data.std) == {1.0}
    answers = fedstill.load_run(tmp_path).predict(X, from_="last")
    assert list(answers.labels) == fitted.predict(X).tolist()


def test_a_mistake_is_an_error_of_both_kinds():
    with pytest.raises(FedstillError, match="did you mean 'fedavg'"):
        FederatedClassifier("fedavgg").fit(X, Y)
    with pytest.raises(ValueError, match="groups has the shape"):
        FederatedClassifier().fit(X, Y, groups=OWNER[:5])
    with pytest.raises(ValueError, match="'ward' names no column"):
        FederatedClassifier().fit(X, Y, groups="ward")
    with pytest.raises(ValueError, match="nobody owns these rows"):
        FederatedClassifier().fit(X, Y, groups=[None, *OWNER[1:]])
    with pytest.raises(ValueError, match="'rounds' is a parameter"):
        FederatedClassifier(rounds=2, settings={"rounds": 5}).fit(X, Y)
