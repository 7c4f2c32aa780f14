"""Expensive results on disk: found by what they follow from, and never trusted when damaged."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedstill.storage import cache as kept_results
from fedstill.storage import files as file_lock
from fedstill.storage.cache import KeptResults

IDENTITY = {"kind": "extractor", "seed": 2**63 + 1, "options": {"rate": 0.1, "names": ["a"]}}
TREE = {
    "params": {"body.0.weight": torch.arange(6.0).reshape(2, 3).T, "count": torch.tensor(3)},
    "loss": torch.tensor(0.5),
}


def same(found, wanted):
    return (
        found.keys() == wanted.keys()
        and torch.equal(found["params"]["body.0.weight"], wanted["params"]["body.0.weight"])
        and torch.equal(found["params"]["count"], wanted["params"]["count"])
    )


def test_what_was_saved_comes_back_bit_for_bit_also_for_another_process(tmp_path):
    KeptResults(tmp_path).save(IDENTITY, TREE)
    found = KeptResults(tmp_path).load(IDENTITY)
    assert same(found, TREE)
    assert found["params"]["count"].dtype == torch.int64


def test_another_identity_is_another_result(tmp_path):
    kept = KeptResults(tmp_path)
    kept.save(IDENTITY, TREE)
    for other in ({**IDENTITY, "seed": 1}, {**IDENTITY, "options": {"rate": 0.2, "names": ["a"]}}, {}):
        assert kept.load(other) is None
    assert kept.load(dict(reversed(IDENTITY.items()))) is not None  # the order of keys says nothing


def test_a_new_value_replaces_the_old_one_and_an_empty_one_takes_it_away(tmp_path):
    kept = KeptResults(tmp_path)
    kept.save(IDENTITY, TREE)
    kept.save(IDENTITY, {"loss": torch.tensor(0.25)})
    assert kept.load(IDENTITY)["loss"] == 0.25
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    kept.save(IDENTITY, {})
    assert kept.load(IDENTITY) is None
    assert not list(tmp_path.iterdir())
    kept.save(IDENTITY, {})  # nothing to take away is no mistake


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": lambda values, entry: flipped(values),
    "cut": lambda values, entry: values.write_bytes(values.read_bytes()[:-4]),
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
    kept = KeptResults(tmp_path)
    kept.save(IDENTITY, TREE)
    (values,), (entry,) = tmp_path.rglob("*.safetensors"), tmp_path.rglob("entry.json")
    DAMAGE[damage](values, entry)
    assert kept.load(IDENTITY) is None
    kept.save(IDENTITY, TREE)
    assert same(kept.load(IDENTITY), TREE)


def test_it_lives_in_the_librarys_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    KeptResults().save(IDENTITY, TREE)
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_disk_is_a_warning(tmp_path, caplog):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    KeptResults(tmp_path / "below").save(IDENTITY, TREE)
    assert "not kept for other runs" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    KeptResults(tmp_path / "file").save(IDENTITY, TREE)
    assert "not kept for other runs" in caplog.text
    assert KeptResults(tmp_path / "file").load(IDENTITY) is None


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(kept_results, "PATIENCE", 0.001)


def found_or_computed(kept, computed, heard):
    with kept.alone(IDENTITY, heard.append):
        if kept.load(IDENTITY) is None:
            computed.append(1)
            kept.save(IDENTITY, TREE)
    return kept.load(IDENTITY)


def test_of_several_that_need_one_result_at_once_one_computes_it(tmp_path, impatient):
    """In threads: each opens the lock for itself, as processes do."""
    computed, heard = [], []
    with ThreadPoolExecutor(4) as runs:
        found = list(runs.map(lambda _: found_or_computed(KeptResults(tmp_path), computed, heard), range(4)))
    assert len(computed) == 1
    assert all(same(tree, TREE) for tree in found)
    assert len(list(tmp_path.iterdir())) == 1  # no lock is left


def test_who_waits_is_told_once_for_whom_and_goes_on_when_the_other_is_done(tmp_path, impatient):
    kept, heard = KeptResults(tmp_path), []
    with ThreadPoolExecutor(1) as runs:
        with kept.alone(IDENTITY, heard.append):
            waiting = runs.submit(found_or_computed, KeptResults(tmp_path), [], heard)
            while not heard:
                pass
            assert not waiting.done()
            kept.save(IDENTITY, TREE)
        assert same(waiting.result(timeout=10), TREE)
    assert heard == [f"pid {os.getpid()}"]


def test_another_result_need_not_wait_and_an_error_lets_go(tmp_path):
    kept, heard = KeptResults(tmp_path), []
    with kept.alone(IDENTITY, heard.append), kept.alone({**IDENTITY, "seed": 1}, heard.append):
        pass
    with pytest.raises(RuntimeError), kept.alone(IDENTITY, heard.append):
        raise RuntimeError
    with kept.alone(IDENTITY, heard.append):
        pass
    assert heard == []


def test_a_run_that_was_killed_keeps_nobody_waiting(tmp_path):
    """Its file is still there, and the system has freed it."""
    heard = []
    code = f"""
import os, signal
from pathlib import Path
from fedstill.file_lock import take
held = take(Path({str(lock_of(tmp_path))!r}), wait=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert lock_of(tmp_path).exists()
    with KeptResults(tmp_path).alone(IDENTITY, heard.append):
        pass
    assert heard == []
    assert not lock_of(tmp_path).exists()


def lock_of(folder):
    place = KeptResults(folder)._place(IDENTITY)
    return place.with_name(f".{place.name}.lock")


def test_where_nothing_can_be_locked_everybody_works_for_himself(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with KeptResults(tmp_path / "file").alone(IDENTITY, pytest.fail):
        pass
    monkeypatch.setattr(file_lock, "fcntl", None)  # Windows
    kept = KeptResults(tmp_path / "kept")
    with kept.alone(IDENTITY, pytest.fail), kept.alone(IDENTITY, pytest.fail):
        pass
