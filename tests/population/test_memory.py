from __future__ import annotations

import pytest
import torch

from fedstill.core.errors import FedstillError
from fedstill.population.memory import Memory

FIRST = {"control": {"w": torch.zeros(3)}, "count": torch.zeros((), dtype=torch.int64)}
LATER = {"control": {"w": torch.tensor([1.0, -0.0, 3e-40])}, "count": torch.tensor(7)}
OWNER = {"run": "a run", "client": 1}


def memory_of(folder, first=FIRST, **owner):
    return Memory(folder, first, {**OWNER, **owner})


def test_a_memory_comes_back_bit_for_bit_in_another_process_s_object(tmp_path):
    memory_of(tmp_path).write(4, LATER)
    found = memory_of(tmp_path).read(4)
    assert torch.equal(found["control"]["w"].view(torch.int32), LATER["control"]["w"].view(torch.int32))
    assert found["count"] == 7


def test_a_round_that_was_played_again_has_the_later_memory(tmp_path):
    memory = memory_of(tmp_path)
    memory.write(4, FIRST)
    memory.write(4, LATER)
    assert memory.read(4)["count"] == 7


def test_round_0_is_the_first_memory_whatever_was_written(tmp_path):
    memory = memory_of(tmp_path)
    memory.write(1, LATER)
    assert memory.read(0) is FIRST


def test_a_client_that_remembers_nothing_has_no_files(tmp_path):
    memory = memory_of(tmp_path, first={})
    memory.write(3, {})
    assert memory.read(3) == {}
    assert not list(tmp_path.iterdir())


def test_memories_before_a_round_are_forgotten_and_no_other_file(tmp_path):
    memory, others = memory_of(tmp_path), ("memory-1.fedstill", "memory-000001.fedstill.old", "secret")
    for name in others:
        (tmp_path / name).touch()
    for number in (1, 2, 3, 1_000_001):
        memory.write(number, LATER)
    memory.forget(3)
    assert memory.read(3)["count"] == memory.read(1_000_001)["count"] == 7
    assert {path.name for path in tmp_path.iterdir()} == {*others, "memory-000003.fedstill", "memory-1000001.fedstill"}


def test_a_lost_memory_is_named_by_its_round(tmp_path):
    with pytest.raises(FedstillError, match="no memory of round 4: it was lost"):
        memory_of(tmp_path).read(4)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:99] + b"?" + data[100:]]
)
def test_a_damaged_memory_is_refused(tmp_path, damage):
    memory_of(tmp_path).write(4, LATER)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FedstillError, match="memory of round 4 cannot be read"):
        memory_of(tmp_path).read(4)


def test_a_memory_of_another_form_is_refused(tmp_path):
    memory_of(tmp_path).write(4, {"control": {"w": torch.zeros(2)}, "count": torch.zeros((), dtype=torch.int64)})
    with pytest.raises(FedstillError, match=r"control/w is float32 \(2,\)"):
        memory_of(tmp_path).read(4)


@pytest.mark.parametrize("owner", [{"client": 2}, {"run": "another run"}, {"fedstill": "0"}])
def test_a_memory_of_another_client_or_run_is_refused(tmp_path, owner):
    memory_of(tmp_path, **owner).write(4, LATER)
    with pytest.raises(FedstillError, match="another client's, another run's"):
        memory_of(tmp_path).read(4)


def test_a_memory_under_another_round_s_name_is_refused(tmp_path):
    memory_of(tmp_path).write(4, LATER)
    next(tmp_path.iterdir()).rename(tmp_path / "memory-000005.fedstill")
    with pytest.raises(FedstillError, match="another round's"):
        memory_of(tmp_path).read(5)


def test_what_the_system_says_of_a_file_is_told_without_its_folder(tmp_path):
    (tmp_path / "memory-000004.fedstill").mkdir()
    with pytest.raises(FedstillError, match="cannot be read: Is a directory") as refused:
        memory_of(tmp_path).read(4)
    assert str(tmp_path) not in str(refused.value)
