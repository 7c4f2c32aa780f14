"""The federation of an experiment: who holds which rows; a partition of one's own that does not fit is told."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import image_folder

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.experiment.build import agreed_data, build_federation, load_source
from fedstill.experiment.config import Experiment
from fedstill.experiment.run_folder import read_description, write_description
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


def digits_of(**data: object) -> Experiment:
    return Experiment(cohort=2, data={"source": "digits", **data}, partition={"scheme": "iid", "clients": 4})


def test_seeds_share_one_test_set_and_differ_in_what_clients_and_server_hold() -> None:
    one = digits_of(client_rows=600, unlabeled="central", validation=50, test_limit=100)
    two = one.replace(seed=1)
    first, second = build_federation(one), build_federation(two)
    assert torch.equal(first.test.x, second.test.x)
    assert len(first.test.y) == 100
    assert first.unlabeled_ids == second.unlabeled_ids
    assert len(first.indices) == len(first.train.y) == 550
    assert len(first.validation[0]) == 50
    assert not torch.equal(first.validation[0], second.validation[0])
    assert len(first.unlabeled) == len(first.unlabeled_ids) == len(first.unlabeled_truth)
    # 1,797 digits: 600 for clients, of 1,197 others 239 to test (100 of them looked at) and 958 unlabeled
    assert len(first.unlabeled) == 1_797 - 600 - round(0.2 * 1_197)


def test_a_federation_is_the_same_from_a_source_that_was_loaded_before() -> None:
    one = digits_of(client_rows=600, unlabeled="central", unlabeled_limit=10)
    source = load_source(one)
    assert build_federation(one, source).unlabeled_ids == build_federation(one).unlabeled_ids
    assert len(source.central.ids) == 958


def test_rows_the_server_holds_do_not_change_by_asking_for_validation() -> None:
    plain, watched = (build_federation(digits_of(unlabeled=200, validation=count)) for count in (0, 20))
    assert plain.unlabeled_ids == watched.unlabeled_ids
    assert plain.validation is None
    assert len(watched.train.y) == len(plain.train.y) - 20


def test_places_are_written_by_their_full_path_and_words_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("test", "central", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for number, data in enumerate(({"unlabeled": "test", "test": "test"}, {"unlabeled": "central", "client_rows": 9})):
        write_description(digits_of(**data), tmp_path / "mine" / str(number))
    first, second = (read_description(tmp_path / "mine" / name).data for name in "01")
    assert (first.unlabeled, first.test) == ("test", str(tmp_path / "test"))
    assert (second.unlabeled, second.source) == ("central", "digits")


def test_files_that_a_run_cannot_read_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    image_folder(tmp_path / "web", {"x": 3}, height=8, width=8, channels=1)
    (tmp_path / "web" / "x" / "1.png").write_bytes(b"?")
    with caplog.at_level(logging.WARNING, logger="fedstill.run"):
        federation = build_federation(digits_of(unlabeled=str(tmp_path / "web")))
    assert federation.unlabeled_ids == ("x/0.png", "x/2.png")
    assert "data.unlabeled: 1 of 3 files or rows cannot be read and are left out: x/1.png" in caplog.text


AGREED = {
    "label": "y",
    "classes": ["no", "yes"],
    "columns": {"b": "numbers", "a": ["u", "v"]},
    "mean": [1.0, 0.5, 0.5],
    "std": [2.0, 0.5, 0.5],
}


def agreed(place: str, **changes: object) -> Experiment:
    data = {"source": place, **AGREED, **changes}
    return Experiment.model_validate({"data": data, "partition": {"scheme": "iid", "clients": 2}, "cohort": 2})


def test_a_simulation_obeys_the_form_that_parties_agreed_on(tmp_path: Path) -> None:
    rows = "".join(f"{'uv'[row % 2]},{row},{['yes', 'no'][row % 2]},left out\n" for row in range(20))
    (tmp_path / "a.csv").write_text("a,b,y,c\n" + rows)
    train = build_federation(agreed(str(tmp_path / "a.csv"))).train
    assert [column.name for column in train.columns] == ["b", "a"]
    assert train.classes == ("no", "yes")
    assert train.mean == (1.0, 0.5, 0.5)
    assert all(row[1:] == [[1.0, 0.0], [0.0, 1.0]][int(row[0]) % 2] for row in train.x.tolist())
    assert train.y.tolist() == [1 - int(number) % 2 for number in train.x[:, 0].tolist()]


def test_the_agreed_form_is_a_task_without_rows() -> None:
    data = agreed_data(agreed("(at the sites)"))
    assert (tuple(data.x.shape), data.x.dtype, len(data.y)) == ((0, 3), torch.float32, 0)
    pictures = {"columns": {}, "shape": [3, 8, 6], "mean": [0.5, 0.4, 0.3], "std": [0.1, 0.1, 0.1]}
    images = agreed_data(agreed("(at the sites)", **pictures))
    assert (tuple(images.x.shape), images.x.dtype) == ((0, 3, 8, 6), torch.uint8)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"classes": []}, "data.classes is not there"),
        ({"columns": {}}, "data.columns"),
        ({"mean": [], "std": []}, "data.mean is not there"),
        ({"mean": [1.0, 2.0], "std": [1.0, 2.0]}, "data.columns make 3 features: give 3"),
        ({"classes": ["a", "a"]}, "names a class twice"),
        ({"columns": {"a": ["v", "u"]}}, "in the order of the alphabet"),
        ({"shape": [1, 8, 8]}, "remove one of them"),
        ({"columns": {}, "shape": [8, 8]}, r"\(channels, height, width\)"),
        ({"columns": {}, "shape": [1, 8, 8], "size": 8}, "remove data.size"),
        ({"missing": "mean", "mean": [], "std": []}, "data.mean fills the gaps"),
    ],
)
def test_a_form_that_says_too_little_or_contradicts_itself_is_refused(changes: dict[str, object], line: str) -> None:
    with pytest.raises(FedstillError, match=line):
        agreed_data(agreed("(at the sites)", **changes))
