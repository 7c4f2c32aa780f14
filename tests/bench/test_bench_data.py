"""Data of a cell taken from a folder: train, test and unlabeled sets by their names."""

import pytest
from bench_cases import small

from fedstill.bench import Cell
from fedstill.bench.recipe import with_data
from fedstill.core.errors import FedstillError


@pytest.fixture
def shelf(tmp_path):
    for name in ("svhn", "cifar10"):
        (tmp_path / name).mkdir()
    return tmp_path


def placed(shelf, **data):
    return with_data(Cell("fedavg", "column", small(data=data)), shelf).experiment.data


def test_a_hub_id_is_its_folder_with_or_without_a_configuration(shelf):
    assert placed(shelf, source="uoft-cs/cifar10").source == str(shelf / "cifar10")
    assert placed(shelf, source="ufldl-stanford/svhn:cropped_digits").source == str(shelf / "svhn")


def test_the_test_set_of_another_domain_is_taken_from_the_folder_too(shelf):
    found = placed(shelf, source="uoft-cs/cifar10", test="ufldl-stanford/svhn:cropped_digits", unlabeled="test")
    assert (found.test, found.unlabeled) == (str(shelf / "svhn"), "test")
    with pytest.raises(FedstillError, match=r"no 'MNIST-M' in .*: put it there"):
        placed(shelf, source="uoft-cs/cifar10", test="Mike0307/MNIST-M")


def test_what_the_clients_leave_is_no_folder(shelf):
    assert placed(shelf, source="uoft-cs/cifar10", client_rows=20_000, unlabeled="central").unlabeled == "central"
