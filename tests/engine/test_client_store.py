from __future__ import annotations

import resource

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator
from fedstill.core.tree import flatten, rows
from fedstill.engine import client_store as store_module
from fedstill.engine.client_store import ClientStore
from fedstill.engine.device_data import free_memory

POPULATION = 12
BUDGETS = pytest.mark.parametrize("budget", [2 << 30, 0], ids=["memory", "disk"])


def template() -> dict:
    return {
        "control": {"weight": torch.tensor([[0.5, -1.0], [2.0, 3.0]]), "bias": torch.zeros(3, dtype=torch.bfloat16)},
        "count": torch.tensor(7),
        "seen": torch.tensor([True, False]),
        "hollow": torch.zeros(0, 4),
        "empty": {},
    }


def draw_states(count: int, seed: int) -> dict:
    generator = torch_generator(seed)
    return {
        "control": {
            "weight": torch.randn(count, 2, 2, generator=generator),
            "bias": torch.randn(count, 3, generator=generator).bfloat16(),
        },
        "count": torch.randint(0, 2**60, (count,), generator=generator),
        "seen": torch.rand(count, 2, generator=generator) < 0.5,
        "hollow": torch.zeros(count, 0, 4),
        "empty": {},
    }


def assert_same(found: dict, expected: dict) -> None:
    found, expected = flatten(found), flatten(expected)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name


@BUDGETS
def test_a_client_never_written_has_the_template(budget):
    with ClientStore(template(), POPULATION, budget=budget) as store:
        read = store.read(np.array([3, 0]))
        assert read["empty"] == {}
        for i in range(2):
            assert_same(rows(read, i), template())


@BUDGETS
@given(st.lists(st.sets(st.integers(0, POPULATION - 1), min_size=1), max_size=6), st.randoms(use_true_random=False))
def test_reads_give_back_the_last_write_of_each_client(budget, cohorts, random):
    """Against a plain dict of single states, in any order of ids."""
    expected = {client: template() for client in range(POPULATION)}
    with ClientStore(template(), POPULATION, budget=budget) as store:
        for seed, cohort in enumerate(cohorts):
            ids = np.array(random.sample(sorted(cohort), len(cohort)))
            states = draw_states(len(ids), seed)
            store.write(ids, states)
            expected.update({int(client): rows(states, i) for i, client in enumerate(ids)})
        everyone = np.array(random.sample(range(POPULATION), POPULATION))
        read = store.read(everyone)
        for i, client in enumerate(everyone):
            assert_same(rows(read, i), expected[int(client)])


@pytest.mark.parametrize("source", [2 << 30, 0], ids=["memory", "disk"])
@pytest.mark.parametrize("target", [2 << 30, 0], ids=["memory", "disk"])
def test_a_snapshot_restores_into_either_kind_of_store(source, target):
    with (
        ClientStore(template(), POPULATION, budget=source) as old,
        ClientStore(template(), POPULATION, budget=target) as new,
    ):
        old.write(np.array([2, 5, 6, 11]), draw_states(4, 0))
        parts = list(old.snapshot(part_bytes=2 * old.record_bytes))
        assert [ids.tolist() for ids, _ in parts] == [[2, 5], [6, 11]]
        new.restore(parts)
        everyone = np.arange(POPULATION)
        assert_same(new.read(everyone), old.read(everyone))
        assert np.flatnonzero(new.touched).tolist() == [2, 5, 6, 11]


def test_writes_do_not_reach_into_what_was_read_before():
    with ClientStore({"a": torch.zeros(2)}, 3) as store:
        before = store.read(np.array([1]))
        store.write(np.array([1]), {"a": torch.ones(1, 2)})
        assert before["a"].tolist() == [[0.0, 0.0]]


def test_an_empty_template_costs_nothing_and_returns_nothing():
    with ClientStore({}, 10**6, budget=0) as store:
        assert not store.on_disk
        store.write(np.array([1, 2]), {})
        assert store.read(np.array([1, 2])) == {}
        assert list(store.snapshot()) == []


@BUDGETS
def test_states_keep_slots_shapes_and_dtypes(budget):
    with ClientStore({"a": torch.zeros(2)}, 3, budget=budget) as store:
        ids = np.array([0])
        with pytest.raises(FedstillError, match="slot 'a'"):
            store.write(ids, {"b": torch.zeros(1, 2)})
        with pytest.raises(FedstillError, match="keep shapes"):
            store.write(ids, {"a": torch.zeros(1, 3)})
        with pytest.raises(FedstillError, match="keep shapes"):
            store.write(ids, {"a": torch.zeros(1, 2, dtype=torch.float64)})


def test_a_population_larger_than_memory_lives_in_a_sparse_file(tmp_path):
    """1,000,000 clients x 64 KiB = 64 GB: neither memory nor disk grows with the population."""
    ids = np.arange(0, 1_000_000, 25_000)
    states = {"a": torch.randn(len(ids), 1 << 14, generator=torch_generator(0))}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ClientStore({"a": torch.zeros(1 << 14)}, 1_000_000, folder=tmp_path, budget=2 << 30) as store:
        assert store.on_disk
        store.write(ids, states)
        assert torch.equal(store.read(ids)["a"], states["a"])
        assert not store.read(ids + 1)["a"].any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "on_disk"), [(8 * 8 * 100, False), (8 * 8 * 100 - 8, True)])
def test_records_lie_in_memory_while_they_take_an_eighth_of_what_is_free(monkeypatch, free, on_disk):
    """100 clients with eight bytes each."""
    monkeypatch.setattr(store_module, "free_memory", lambda device: free)
    with ClientStore({"a": torch.zeros(2)}, 100) as store:
        assert store.on_disk is on_disk


def test_what_a_gpu_cannot_hold_lies_in_the_host_and_what_neither_can_in_a_file():
    host, gpu = torch.device("cpu"), torch.device("cuda", 0)
    free = {host: 2000, gpu: 800}

    def place(wanted):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_module, "free_memory", free.__getitem__)
            return store_module._place(wanted, gpu, None)

    assert [place(wanted) for wanted in (100, 101, 250, 251)] == [gpu, host, host, None]


def test_free_memory_is_what_the_system_says_within_the_limit_of_the_group(tmp_path):
    def free(limit, used=100):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(str(used))
        (tmp_path / "memory.stat").write_text("anon 60\ninactive_file 40\n")
        return free_memory(torch.device("cpu"), meminfo=meminfo, cgroup=tmp_path)

    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16 kB\nMemAvailable:    4 kB\n")
    assert (free("max\n"), free("1100\n"), free("50\n")) == (4096, 1040, 0)
    elsewhere = free_memory(torch.device("cpu"), meminfo=tmp_path / "none", cgroup=tmp_path / "none")
    assert 1 << 26 < elsewhere < 1 << 50


@pytest.mark.gpu
def test_states_that_lie_in_the_host_come_to_the_gpu(monkeypatch):
    monkeypatch.setattr(store_module, "free_memory", lambda device: 0 if device.type == "cuda" else 1 << 40)
    with ClientStore({"a": torch.zeros(2)}, 3, device="cuda") as store:
        store.write(np.array([1]), {"a": torch.ones(1, 2, device="cuda")})
        read = store.read(np.array([0, 1]))["a"]
        assert read.is_cuda
        assert read.tolist() == [[0.0, 0.0], [1.0, 1.0]]
