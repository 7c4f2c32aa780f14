"""Arrays that two processes hand each other in a file."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.core.errors import FedstillError
from fedstill.population.area import Area, Laid


def test_a_message_comes_back_at_the_other_end_with_small_and_large_arrays(tmp_path):
    here, there = Area(tmp_path / "area"), Area(tmp_path / "area")
    for length in (2000, 90000, 3000):  # the file grows, and stays as large as it was
        large = np.arange(length, dtype=np.float64).reshape(-1, 4)
        outline = here.lay(("play", {"a": {"large": large, "none": {}}, "one": np.int32([3])}, [large[:, 1], 7]))
        assert isinstance(outline[1]["a"]["large"], Laid)
        task, tree, (column, seven) = there.read(outline)
        assert (task, tree["a"]["none"], tree["one"].tolist(), seven) == ("play", {}, [3], 7)
        assert np.array_equal(tree["a"]["large"], large)
        assert np.array_equal(column, large[:, 1])


def test_a_full_disk_is_one_line_and_no_signal(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(FedstillError, match=r"no room for .* bytes .*No space left on device.* TMPDIR"):
        Area(tmp_path / "area").lay(np.zeros(10000))
