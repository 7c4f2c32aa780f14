from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedstill.core.errors import FedstillError
from fedstill.data import load

X, Y = np.arange(120, dtype=np.float32).reshape(40, 3), np.arange(40) % 2


def read(tmp_path: Path, **arrays: np.ndarray):
    np.savez(tmp_path / "set.npz", **arrays)
    return load(tmp_path / "set.npz", cache_dir=tmp_path / "cache")


def test_bytes_in_the_order_of_another_machine_are_the_same_numbers(tmp_path: Path):
    here, other = read(tmp_path, x=X, y=Y), read(tmp_path, x=X.astype(">f8"), y=Y.astype(">i2"))
    assert (here.train.x == other.train.x).all()
    assert (here.train.y == other.train.y).all()


def test_negative_labels_are_classes(tmp_path: Path):
    assert read(tmp_path, x=X, y=2 * Y - 1).train.classes == ("-1", "1")


class Open:
    """What a pickle may hold: a call that happens while it is read."""

    def __reduce__(self):
        return (open, ("pickle-was-read", "w"))


def test_objects_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedstillError, match=r"'x' of .* holds Python objects, and reading them would run code"):
        read(tmp_path, x=np.array([Open()] * 40), y=Y)
    assert not (tmp_path / "pickle-was-read").exists()


@pytest.mark.parametrize(
    ("x", "y", "line"),
    [
        (X, Y[:-1], "40 rows in 'x' and 39 in 'y'"),
        (X + 1j, Y, "'x' of .* must hold real numbers"),
        (X, Y.astype("S1"), "'y' of .* must hold real numbers, or labels as words"),
        (np.zeros(40, [("a", "f4")]), Y, "must hold real numbers"),
        (X.astype(str), Y, "'x' of .* must hold numbers, not words"),
        (X, np.eye(2)[Y], "one label a row"),
        (X, np.where(Y == 1, np.nan, Y), "no value in row 2, 4"),
        (X, np.where(Y == 1, np.inf, Y), "too large for a class"),
        (np.float32(1), Y, "has the shape"),
        (X[:, :0], Y, "nothing to learn from"),
    ],
)
def test_what_no_model_can_learn_from_is_refused(tmp_path: Path, x, y, line):
    with pytest.raises(FedstillError, match=line) as caught:
        read(tmp_path, x=x, y=y)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("sign", [0x110000, 0xD800])
def test_a_sign_that_no_text_has_is_refused(tmp_path: Path, sign: int):
    words = np.array(["ill", "well"] * 20)
    words.view(np.uint32)[5] = sign
    with pytest.raises(FedstillError, match=r"array 'y' of .* holds words with signs that no text has"):
        read(tmp_path, x=X, y=words)


def test_arrays_that_grow_a_thousandfold_are_refused_before_they_are_unpacked(tmp_path: Path):
    np.savez_compressed(tmp_path / "set.npz", x=np.zeros((70_000_000, 1), np.uint8), y=np.zeros(70_000_000, np.uint8))
    assert (tmp_path / "set.npz").stat().st_size < 200_000
    with pytest.raises(FedstillError, match=r"would take \d.* GB of memory"):
        load(tmp_path / "set.npz", cache_dir=tmp_path / "cache")
