"""A partition or an evaluation of one's own that does not fit is told with its file and line."""

import numpy as np
import pytest

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.partition import PARTITIONS


def without_seed(labels, clients):
    return np.array_split(np.arange(len(labels)), clients)


def too_few(labels, clients, *, seed):
    return without_seed(labels, clients - 1)


def returns_nothing(labels, clients, *, seed):
    pass


def returns_owners(labels, clients, *, seed):
    return np.arange(len(labels)) % clients


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        (without_seed, r"cannot be called as a partition, \(labels, clients, \*, seed\): .*'seed'"),
        (too_few, r"must return .* each of the 4 clients \(only a scheme with the option min_size"),
        (returns_nothing, "must return a list"),
        (returns_owners, "must return a list"),
    ],
)
def test_a_partition_that_does_not_fit_is_told_with_its_line(monkeypatch, scheme, told):
    monkeypatch.setitem(PARTITIONS, "mine", scheme)
    experiment = fedstill.Experiment(cohort=2, partition={"scheme": "mine", "clients": 4})
    with pytest.raises(FedstillError, match=rf"{scheme.__name__} \(test_build.py, line \d+\) {told}"):
        fedstill.build_federation(experiment)


def test_an_evaluation_with_other_parameters_is_told_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def measure(weights, test):\n    return {'accuracy': 1.0}\n")
    experiment = fedstill.Experiment(
        rounds=1, cohort=1, partition={"scheme": "iid", "clients": 2}, evaluate=f"{tmp_path / 'mine.py'}:measure"
    )
    with pytest.raises(FedstillError, match=r"measure \(mine.py, line 1\) cannot be called as an evaluation"):
        fedstill.run(experiment)
