"""Expensive results on disk: found by what they follow from, and never trusted when damaged."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedstill.storage import cache as cache_module
from fedstill.storage import files
from fedstill.storage.cache import Cache

IDENTITY = {"kind": "extractor", "seed": 2**63 + 1, "options": {"rate": 0.1, "names": ["a"]}}
TREE = {
    "words": np.array(["é", "longer"]),
    "facts": {"names": ["a", "b"], "count": 3, "nothing": None, "empty": {}},
    "params": {"body.0.weight": torch.arange(6.0).reshape(2, 3).T, "count": torch.tensor(3)},
    "loss": torch.tensor(0.5),
}


def same(found, wanted):
    return (
        found.keys() == wanted.keys()
        and found["facts"] == wanted["facts"]
        and np.array_equal(found["words"], wanted["words"])
        and torch.equal(found["params"]["body.0.weight"], wanted["params"]["body.0.weight"])
        and torch.equal(found["params"]["count"], wanted["params"]["count"])
    )


def test_what_was_saved_comes_back_bit_for_bit_also_for_another_process(tmp_path):
    Cache("prepared", tmp_path).save(IDENTITY, TREE)
    found = Cache("prepared", tmp_path).load(IDENTITY)
    assert same(found, TREE)
    assert found["params"]["count"].dtype == torch.int64


def test_another_identity_is_another_result(tmp_path):
    cache = Cache("prepared", tmp_path)
    cache.save(IDENTITY, TREE)
    for other in ({**IDENTITY, "seed": 1}, {**IDENTITY, "options": {"rate": 0.2, "names": ["a"]}}, {}):
        assert cache.load(other) is None
    assert cache.load(dict(reversed(IDENTITY.items()))) is not None  # the order of keys says nothing


def test_a_new_value_replaces_the_old_one_and_an_empty_one_takes_it_away(tmp_path):
    cache = Cache("prepared", tmp_path)
    cache.save(IDENTITY, TREE)
    cache.save(IDENTITY, {"loss": torch.tensor(0.25)})
    assert cache.load(IDENTITY)["loss"] == 0.25
    assert len(list(tmp_path.rglob("*.values"))) == 1
    cache.save(IDENTITY, {})
    assert cache.load(IDENTITY) is None
    assert not list((tmp_path / "prepared").iterdir())
    cache.save(IDENTITY, {})  # nothing to take away is no mistake


DAMAGE = {
    "gone": lambda values, entry: values.unlink(),
    "no JSON": lambda values, entry: entry.write_text("{"),
    "a list": lambda values, entry: entry.write_text("[]"),
    "another entry": lambda values, entry: entry.write_text(entry.read_text().replace("extractor", "extract0r")),
    "a path that leads away": lambda values, entry: entry.write_text(
        json.dumps({"entry": {"identity": IDENTITY, "values": "../x"}, "sha256": ""})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_is_damaged_counts_as_absent_and_can_be_saved_anew(tmp_path, damage):
    cache = Cache("prepared", tmp_path)
    cache.save(IDENTITY, TREE)
    (values,), (entry,) = tmp_path.rglob("*.values"), tmp_path.rglob("entry.json")
    DAMAGE[damage](values, entry)
    assert cache.load(IDENTITY) is None
    cache.save(IDENTITY, TREE)
    assert same(cache.load(IDENTITY), TREE)


def test_it_lives_in_the_librarys_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    Cache("prepared").save(IDENTITY, TREE)
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_disk_is_a_warning(tmp_path, caplog):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    Cache("prepared", tmp_path / "below").save(IDENTITY, TREE)
    assert "not kept for other runs" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    Cache("prepared", tmp_path / "file").save(IDENTITY, TREE)
    assert "not kept for other runs" in caplog.text
    assert Cache("prepared", tmp_path / "file").load(IDENTITY) is None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_or_cut_is_noticed(tmp_path, data):
    cache = Cache("prepared", tmp_path)
    cache.save(IDENTITY, TREE)
    victim = data.draw(st.sampled_from(sorted(path for path in tmp_path.rglob("*") if path.is_file())))
    content = bytearray(victim.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        place = data.draw(st.integers(0, 8 * len(content) - 1))
        content[place // 8] ^= 1 << (place % 8)
    victim.write_bytes(content)
    found = cache.load(IDENTITY)
    assert found is None or same(found, TREE)  # a flipped bit may be a blank of the JSON


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(cache_module, "PATIENCE", 0.001)


def found_or_computed(cache, computed, heard):
    with cache.alone(IDENTITY, heard.append):
        if cache.load(IDENTITY) is None:
            computed.append(1)
            cache.save(IDENTITY, TREE)
    return cache.load(IDENTITY)


def test_of_several_that_need_one_result_at_once_one_computes_it(tmp_path, impatient):
    """In threads: each opens the lock for itself, as processes do."""
    computed, heard = [], []
    with ThreadPoolExecutor(4) as runs:
        found = list(runs.map(lambda _: found_or_computed(Cache("prepared", tmp_path), computed, heard), range(4)))
    assert len(computed) == 1
    assert all(same(tree, TREE) for tree in found)
    assert len(list((tmp_path / "prepared").iterdir())) == 1  # no lock is left


def test_who_waits_is_told_once_for_whom_and_goes_on_when_the_other_is_done(tmp_path, impatient):
    cache, heard = Cache("prepared", tmp_path), []
    with ThreadPoolExecutor(1) as runs:
        with cache.alone(IDENTITY, heard.append):
            waiting = runs.submit(found_or_computed, Cache("prepared", tmp_path), [], heard)
            while not heard:
                pass
            assert not waiting.done()
            cache.save(IDENTITY, TREE)
        assert same(waiting.result(timeout=10), TREE)
    assert heard == [f"pid {os.getpid()}"]


def test_another_result_need_not_wait_and_an_error_lets_go(tmp_path):
    cache, heard = Cache("prepared", tmp_path), []
    with cache.alone(IDENTITY, heard.append), cache.alone({**IDENTITY, "seed": 1}, heard.append):
        pass
    with pytest.raises(RuntimeError), cache.alone(IDENTITY, heard.append):
        raise RuntimeError
    with cache.alone(IDENTITY, heard.append):
        pass
    assert heard == []


def test_a_run_that_was_killed_keeps_nobody_waiting(tmp_path):
    """Its file is still there, and the system has freed it."""
    heard = []
    code = f"""
import os, signal
from pathlib import Path
from fedstill.storage.files import lock
with lock(Path({str(lock_of(tmp_path))!r}), wait=False):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert lock_of(tmp_path).exists()
    with Cache("prepared", tmp_path).alone(IDENTITY, heard.append):
        pass
    assert heard == []
    assert not lock_of(tmp_path).exists()


def lock_of(folder):
    place = Cache("prepared", folder)._place(IDENTITY)
    return place.with_name(f".{place.name}.lock")


def test_where_nothing_can_be_locked_everybody_works_for_himself(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with Cache("prepared", tmp_path / "file").alone(IDENTITY, pytest.fail):
        pass
    monkeypatch.setattr(files, "fcntl", None)  # Windows
    cache = Cache("prepared", tmp_path / "cache")
    with cache.alone(IDENTITY, pytest.fail), cache.alone(IDENTITY, pytest.fail):
        pass
