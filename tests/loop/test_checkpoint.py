from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_helpers import linear_model

from fedstill.core.errors import FedstillError
from fedstill.loop.checkpoint import (
    RunState,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    load_weights,
    same_form,
    save_checkpoint,
    save_weights,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def same(a, b) -> bool:
    """Equal trees: same kinds, same keys in the same order, same bits."""
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        )
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def state_of(round: int, **changes) -> RunState:
    weights = linear_model().init(round)
    history = {"rows": [{"round": i + 1, "accuracy": 0.1 * i} for i in range(round)], "audit": []}
    parts = {"server": {"0": {}, "1": {"momentum": dict(weights.params)}}, "best": weights, "identity": {"seed": 0}}
    clients = [(np.array([1, 4]), {"c": torch.ones(2, 3), "e": {}}), (np.array([9]), {"c": torch.zeros(1, 3), "e": {}})]
    return RunState(round, weights, history=history, clients=clients, **{**parts, **changes})


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape))
    raw = draw(st.lists(st.integers(0, 1 if dtype is torch.bool else 120), min_size=count, max_size=count))
    return torch.tensor(raw, dtype=torch.float64).to(dtype).reshape(shape)


KEYS = st.text(alphabet="ab/~.0 é", min_size=0, max_size=4)
TREES = st.recursive(
    tensors() | st.integers() | st.text(max_size=3) | st.none() | st.booleans(),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS, TREES, max_size=3))
def test_any_tree_comes_back_as_it_was(tmp_path, server):
    save_checkpoint(state_of(1, server=server), tmp_path)
    assert same(load_newest(tmp_path).server, server)


def test_the_whole_state_comes_back(tmp_path):
    save_checkpoint(state_of(7), tmp_path)
    assert_is_state(load_newest(tmp_path), state_of(7))


def test_a_run_without_best_model_or_client_states_comes_back(tmp_path):
    weights = linear_model().init(0)
    save_checkpoint(RunState(3, weights, {}), tmp_path)
    loaded = load_newest(tmp_path)
    assert loaded.best is None
    assert loaded.server == {}
    assert list(loaded.clients) == []


def test_only_the_newest_three_are_kept(tmp_path):
    for number in (10, 20, 30, 40, 1_000_000):
        save_checkpoint(RunState(number, linear_model().init(0), {}), tmp_path)
    assert [number for number, _ in list_checkpoints(tmp_path)] == [1_000_000, 40, 30]


def test_no_checkpoint_is_none(tmp_path):
    assert load_newest(tmp_path / "checkpoints") is None


def assert_is_state(loaded: RunState, expected: RunState) -> None:
    assert (loaded.round, loaded.history, loaded.identity) == (expected.round, expected.history, expected.identity)
    assert same((loaded.weights, loaded.best, loaded.server), (expected.weights, expected.best, expected.server))
    parts = list(loaded.clients)
    assert [ids.tolist() for ids, _ in parts] == [ids.tolist() for ids, _ in expected.clients]
    assert all(same(a, b) for (_, a), (_, b) in zip(parts, expected.clients, strict=True))


@pytest.fixture(scope="module")
def newest_bytes(tmp_path_factory) -> bytes:
    return save_checkpoint(state_of(2), tmp_path_factory.mktemp("newest")).read_bytes()


@pytest.fixture(scope="module")
def damaged_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    save_checkpoint(state_of(1), folder)
    return folder


def damage(folder, content: bytes) -> RunState:
    for path in folder.glob("*round-000002.zip"):
        path.unlink()
    (folder / "round-000002.zip").write_bytes(content)
    return load_newest(folder)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_noticed_or_harmless(damaged_folder, newest_bytes, data):
    """Either the one before, or the newest with not one bit of the state changed (a zip has unused bits)."""
    content = bytearray(newest_bytes)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    loaded = damage(damaged_folder, bytes(content))
    assert_is_state(loaded, state_of(loaded.round))


@given(st.data())
def test_a_cut_anywhere_is_noticed_and_the_one_before_is_used(damaged_folder, newest_bytes, data):
    length = data.draw(st.integers(0, len(newest_bytes) - 1))
    assert_is_state(damage(damaged_folder, newest_bytes[:length]), state_of(1))


def test_every_bit_of_the_state_itself_is_watched(damaged_folder, newest_bytes):
    """One flip in the middle of each part's own bytes."""
    with zipfile.ZipFile(io.BytesIO(newest_bytes)) as archive:
        middles = [(i.filename, newest_bytes.index(archive.read(i)) + i.file_size // 2) for i in archive.infolist()]
    assert len(middles) == 5
    for _, position in middles:
        content = bytearray(newest_bytes)
        content[position] ^= 16
        assert damage(damaged_folder, bytes(content)).round == 1


@pytest.mark.parametrize("part", ["state.safetensors", "clients-0001.safetensors", "state.json"])
def test_a_part_that_was_replaced_in_a_sound_zip_is_noticed(damaged_folder, newest_bytes, part):
    """The zip's own checksums fit the new bytes, so only the digest in the manifest can tell."""
    rewritten = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(newest_bytes)) as old, zipfile.ZipFile(rewritten, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == part:
                # another number of the same length: the last byte of the tensors, or the round
                swapped = content[:-1] + bytes([content[-1] ^ 1])
                content = content.replace(b'"round": 2', b'"round": 3', 1) if part == "state.json" else swapped
                assert content != old.read(name)
                assert len(content) == len(old.read(name))
            new.writestr(name, content)
    with zipfile.ZipFile(rewritten) as archive:
        assert archive.testzip() is None
    assert_is_state(damage(damaged_folder, rewritten.getvalue()), state_of(1))


def test_falling_back_is_told_in_the_log_and_the_damaged_one_is_set_aside(tmp_path, caplog):
    for number in (1, 2):
        save_checkpoint(state_of(number), tmp_path)
    (tmp_path / "round-000002.zip").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "fedstill.run"):
        assert load_newest(tmp_path).round == 1
    assert "round-000002.zip does not verify" in caplog.text
    assert (tmp_path / "damaged-round-000002.zip").is_file()


def test_damaged_ones_never_push_out_a_good_one(tmp_path):
    for number in (10, 20, 30):
        save_checkpoint(state_of(number), tmp_path).write_bytes(b"zip")
    assert load_newest(tmp_path) is None
    save_checkpoint(state_of(5), tmp_path)
    assert load_newest(tmp_path).round == 5


class Crash(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("number", [3, 2], ids=["new round", "same round again"])
def test_a_crash_at_any_system_call_leaves_a_checkpoint_that_verifies(tmp_path, monkeypatch, number):
    """Die before the n-th open, write, fsync, rename or unlink, for every n."""
    survived, done = [], False
    while not done:
        folder = tmp_path / str(len(survived))
        save_checkpoint(state_of(1), folder)
        save_checkpoint(state_of(2), folder)
        calls = iter(range(len(survived)))
        with monkeypatch.context() as patch:
            for owner, name in [
                (os, "fsync"),
                (os, "replace"),
                (os, "unlink"),
                (Path, "open"),
                (zipfile.ZipFile, "writestr"),
            ]:
                original = getattr(owner, name)

                def dying(*args, _original=original, _calls=calls, **kwargs):
                    if next(_calls, None) is None:
                        raise Crash
                    return _original(*args, **kwargs)

                patch.setattr(owner, name, dying)
            try:
                save_checkpoint(state_of(number), folder, keep=2)
                done = True
            except Crash:
                pass
        loaded = load_newest(folder)
        assert_is_state(loaded, state_of(loaded.round))
        survived.append(loaded.round)
        assert not list(folder.glob(".writing-*"))
    assert len(survived) >= 9
    assert set(survived) == {2, number}
    assert survived[-1] == number


def test_a_state_that_json_and_safetensors_cannot_hold_is_named(tmp_path):
    with pytest.raises(FedstillError, match="state at '/server/a/b' is a list"):
        save_checkpoint(RunState(1, linear_model().init(0), {"a": {"b": [1, 2]}}), tmp_path)


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedstillError, match="cannot write the checkpoint"):
        save_checkpoint(state_of(1), tmp_path / "file")


def test_models_are_plain_safetensors_with_plain_names(tmp_path):
    weights = linear_model().init(0)
    save_weights(tmp_path / "best", weights)
    flat = safetensors.torch.load_file(tmp_path / "best" / "weights.safetensors")
    assert flat.keys() == {"params/weight", "params/bias", "buffers/seen", "buffers/scale"}
    loaded = load_weights(tmp_path / "best")
    assert same_form(loaded, weights)
    assert all(torch.equal(loaded.params[name], weights.params[name]) for name in weights.params)
    assert all(torch.equal(loaded.buffers[name], weights.buffers[name]) for name in weights.buffers)
    for place in (
        tmp_path / "best" / "weights.safetensors",
        f"{tmp_path}/best/weights.safetensors",
        f"{tmp_path}/best",
    ):
        assert same_form(load_weights(place), weights)
    assert os.listdir(tmp_path / "best") == ["weights.safetensors"]


@pytest.mark.parametrize("shape", [(0, 2**63), (0, 2**64 - 1), (2**63, 0)])
def test_a_model_of_a_shape_that_torch_cannot_hold_is_one_line(tmp_path, shape):
    words = json.dumps({"params/a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "weights.safetensors").write_bytes(len(words).to_bytes(8, "little") + words)
    with pytest.raises(FedstillError, match="holds no tensors that can be read"):
        load_weights(tmp_path)


def test_what_is_not_a_model_is_one_line(tmp_path):
    with pytest.raises(FedstillError, match="no model at"):
        load_weights(tmp_path / "last")
    (tmp_path / "weights.safetensors").write_bytes(b"not a model")
    with pytest.raises(FedstillError, match="not a readable safetensors file"):
        load_weights(tmp_path)
    safetensors.torch.save_file({"layer.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(FedstillError, match="not a fedstill model"):
        load_weights(tmp_path / "other.safetensors")


def test_a_checkpoint_is_json_and_safetensors_only(tmp_path):
    path = save_checkpoint(state_of(2), tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == [
            "clients-0000.safetensors", "clients-0001.safetensors", "manifest.json", "state.json", "state.safetensors",
        ]  # fmt: skip
        assert json.loads(archive.read("state.json"))["round"] == 2
        assert "/weights/0/weight" in safetensors.torch.load(archive.read("state.safetensors"))
    assert load_checkpoint(path).round == 2
