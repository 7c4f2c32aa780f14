"""Runs whose data or network were handed over in Python: recorded as such, resumed, predicted with."""

import logging

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedstill
from fedstill import Experiment, FedstillError

RANDOM = np.random.default_rng(0)
X = pd.DataFrame({"age": RANDOM.normal(50, 10, 90), "sex": RANDOM.choice(["f", "m"], 90)})
Y = pd.Series(np.where(X["age"] > 50, "sick", "well"), name="state")
OWNER = pd.Series(RANDOM.choice(["north", "south", "west"], 90), name="clinic")
EXPERIMENT = Experiment(rounds=2, model={"name": "mlp", "hidden": [8], "init": "torch"}, local={"lr": 0.1})


def network(width=8):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))


def test_owners_become_the_clients_and_the_run_can_be_predicted_with(tmp_path):
    result = fedstill.run(EXPERIMENT, data=(X, Y, OWNER), run_dir=tmp_path / "run")
    run = fedstill.load_run(tmp_path / "run")
    assert run.contract.population == 3
    assert run.contract.data.classes == ("sick", "well")
    assert run.experiment.data.source == "(given from Python)"
    assert run.history == result.history.rows
    assert run.summary["accuracy_last"] == result.summary()["accuracy_last"]
    X.assign(state=Y).to_csv(tmp_path / "new.csv", index=False)
    by_frame, by_file = run.predict(X), run.predict(tmp_path / "new.csv")
    assert torch.equal(by_frame.probabilities, by_file.probabilities)
    assert by_frame.calibration.why == by_file.calibration.why


def test_the_same_data_go_on_as_if_never_interrupted_and_others_are_refused(tmp_path):
    whole = fedstill.run(EXPERIMENT.replace(rounds=4), data=(X, Y, OWNER))
    fedstill.run(EXPERIMENT, data=(X, Y, OWNER), run_dir=tmp_path)
    others = Y.map({"sick": "well", "well": "sick"})
    with pytest.raises(FedstillError, match="began with other data"):
        fedstill.run(EXPERIMENT.replace(rounds=4), data=(X, others, OWNER), run_dir=tmp_path, resume=True)
    with pytest.raises(FedstillError, match="handed over in Python"):
        fedstill.resume_run(tmp_path)
    resumed = fedstill.run(EXPERIMENT.replace(rounds=4), data=(X, Y, OWNER), run_dir=tmp_path, resume=True)
    assert all(torch.equal(whole.weights.params[name], leaf) for name, leaf in resumed.weights.params.items())


def test_a_split_of_ones_own_and_owners_contradict_each_other():
    with pytest.raises(FedstillError, match="leave out the owners, or the partition"):
        fedstill.run(EXPERIMENT.replace(partition={"scheme": "iid", "clients": 12}), data=(X, Y, OWNER))
    federation = fedstill.federation_from_tensors([(np.eye(4), [0, 1, 0, 1])], test=(np.eye(4), [0, 1, 0, 1]))
    with pytest.raises(FedstillError, match="give one of them"):
        fedstill.run(EXPERIMENT, federation=federation, data=(X, Y))
    with pytest.raises(FedstillError, match="has 4 parts"):
        fedstill.run(EXPERIMENT, data=(X, Y, OWNER, OWNER))


def test_a_comparison_takes_the_same_data_and_has_its_reference_points():
    asked = EXPERIMENT.replace(compare={"references": True})
    comparison = fedstill.compare(asked, ["fedavg", "fedprox"], seeds=1, data=(X, Y, OWNER))
    alone = fedstill.run(EXPERIMENT, data=(X, Y, OWNER))
    assert comparison.results["fedavg"][0].summary()["accuracy_last"] == alone.summary()["accuracy_last"]
    assert {row.method for row in comparison.summaries} == {
        "fedavg",
        "fedprox",
        "pooled",
        "alone (mean)",
        "majority class",
    }
    with pytest.raises(FedstillError, match="give one of them"):
        fedstill.compare(EXPERIMENT, data=(X, Y), source=fedstill.from_data(X, Y))


def test_without_owners_the_experiment_splits_the_rows_and_names_the_label():
    split = EXPERIMENT.replace(partition={"scheme": "iid", "clients": 5}, cohort=5)
    named = split.replace(data={"label": "state"})
    pair, table = fedstill.run(split, data=(X, Y)), fedstill.run(named, data=X.assign(state=Y))
    assert all(torch.equal(pair.weights.params[name], leaf) for name, leaf in table.weights.params.items())


def test_a_network_of_python_trains_says_what_it_cannot_and_is_handed_over_again(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "fedstill.run"):
        fedstill.run(EXPERIMENT, data=(X, Y, OWNER), model=network(), run_dir=tmp_path)
    assert "the data are in Python only" in caplog.text
    assert "the network is in Python only" in caplog.text
    with pytest.raises(FedstillError, match="hand it over again"):
        fedstill.predict(tmp_path, X)
    with pytest.raises(FedstillError, match="other names or shapes"):
        fedstill.load_run(tmp_path, model=network(9)).predict(X)
    run = fedstill.load_run(tmp_path, model=network())
    inputs = torch.tensor(np.column_stack([X["age"], X["sex"] == "f", X["sex"] == "m"]), dtype=torch.float32)
    trained = network()
    trained.load_state_dict(dict(run.weights.params))
    task = run.contract.data
    logits = trained((inputs - torch.tensor(task.mean)) / torch.tensor(task.std)).detach()
    expected = [task.classes[place] for place in logits.argmax(1).tolist()]
    assert list(run.predict(X).labels) == expected
    with pytest.raises(FedstillError, match="other names or shapes"):
        fedstill.run(EXPERIMENT, data=(X, Y, OWNER), model=network(9), run_dir=tmp_path, resume=True)
    fedstill.run(EXPERIMENT.replace(rounds=3), data=(X, Y, OWNER), model=network(), run_dir=tmp_path, resume=True)
    assert len(fedstill.load_run(tmp_path, model=network()).history) == 3


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.02), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(3, 8), nn.Identity(), nn.Linear(8, 2)),
    ],
    ids=["tanh", "leaky", "linear"],
)
def test_a_network_of_the_same_tensors_that_computes_something_else_is_refused(tmp_path, other):
    fedstill.run(EXPERIMENT, data=(X, Y, OWNER), model=network(), run_dir=tmp_path, pictures=False)
    with pytest.raises(FedstillError, match="computes something else"):
        fedstill.load_run(tmp_path, model=other).predict(X)
    with pytest.raises(FedstillError, match="computes something else"):
        fedstill.run(EXPERIMENT.replace(rounds=3), data=(X, Y, OWNER), model=other, run_dir=tmp_path, resume=True)
    untrained = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))  # other weights, the same computation
    answers = [fedstill.load_run(tmp_path, model=model).predict(X).probabilities for model in (network(), untrained)]
    assert torch.equal(*answers)


def test_a_network_for_a_run_that_has_its_own_is_refused(tmp_path):
    fedstill.run(EXPERIMENT, data=(X, Y, OWNER), run_dir=tmp_path, pictures=False)
    with pytest.raises(FedstillError, match="leave model out"):
        fedstill.load_run(tmp_path, model=network()).predict(X)


def test_texts_of_a_list_are_read_by_the_tokenizer_of_the_run(tmp_path):
    texts = [f"{'good film' if row % 2 else 'bad play'} {row}" for row in range(40)]
    small = {"name": "bert", "layers": 1, "hidden": 8, "inner": 8, "heads": 2}
    split = EXPERIMENT.replace(partition={"scheme": "iid", "clients": 2}, cohort=2, model=small, data={"tokens": 6})
    fedstill.run(split, data=(texts, ["no", "yes"] * 20), run_dir=tmp_path / "run")
    (tmp_path / "new.txt").write_text("\n".join(texts[:5]))
    run = fedstill.load_run(tmp_path / "run")
    by_list, by_file = run.predict(texts[:5]), run.predict(tmp_path / "new.txt")
    assert torch.equal(by_list.probabilities, by_file.probabilities)


def test_reprs_are_one_or_two_short_lines(tmp_path):
    source = fedstill.from_data(X, Y, groups=OWNER)
    federation = fedstill.make_federation(source, [np.arange(72)])
    result = fedstill.run(EXPERIMENT, data=(X, Y, OWNER), run_dir=tmp_path)
    run = fedstill.load_run(tmp_path)
    model = fedstill.from_module(network(), input_shape=(3,))
    shown = [EXPERIMENT, source, source.train, federation, model, result, result.history, result.weights, run]
    for value in [*shown, run.contract, run.predict(X)]:
        assert len(repr(value)) < 320, type(value)
        assert repr(value).count("\n") <= 1
        assert type(value).__name__ in repr(value)
        assert "tensor(" not in repr(value)
