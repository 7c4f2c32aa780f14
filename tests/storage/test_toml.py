"""The TOML writer against the standard library's reader."""

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.storage.files import MOST_BYTES
from fedstill.storage.toml import dumps, loads, parse_value, read_toml

scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(st.text(max_size=8), values, max_size=5)


@given(tables)
def test_reading_what_was_written_gives_the_same_table(table):
    assert tomllib.loads(dumps(table)) == table


@given(st.floats())
def test_every_float_keeps_its_bits(number):
    back = tomllib.loads(dumps({"x": number}))["x"]
    assert (
        math.isnan(back)
        if math.isnan(number)
        else (back == number and math.copysign(1, back) == math.copysign(1, number))
    )


def test_none_is_left_out_and_tuples_become_arrays():
    assert tomllib.loads(dumps({"a": None, "b": (1, 2), "c": {"d": None}})) == {"b": [1, 2], "c": {}}


def test_scalars_stand_before_sections_so_that_they_stay_outside_them():
    table = {"section": {"inner": 1}, "outer": 2}
    assert tomllib.loads(dumps(table)) == table


def test_what_toml_cannot_hold_is_refused():
    with pytest.raises(FedstillError, match="object"):
        dumps({"x": object()})


def test_a_syntax_error_names_the_file_and_the_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("rounds = 3\ncohort 5\n")
    with pytest.raises(FedstillError, match=r"broken\.toml.*line 2"):
        read_toml(path)


def test_a_missing_file_names_its_nearest_neighbour(tmp_path):
    (tmp_path / "first.toml").write_text("")
    with pytest.raises(FedstillError, match=r"frist\.toml.*first\.toml"):
        read_toml(tmp_path / "frist.toml")


def test_a_binary_file_is_told_apart(tmp_path):
    path = tmp_path / "picture.toml"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(FedstillError, match="not a text file"):
        read_toml(path)


def test_a_file_that_is_too_large_is_one_line_and_not_read(tmp_path):
    path = tmp_path / "large.toml"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(FedstillError, match=r"large\.toml cannot be read"):
        read_toml(path)


def test_an_empty_table_is_an_empty_file():
    assert loads(dumps({})) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.05", 0.05),
        ("1e-5", 1e-5),
        ("true", True),
        ('"a b"', "a b"),
        ("cuda:0", "cuda:0"),
        ("fedavg", "fedavg"),
        ("[64, 32]", [64, 32]),
        ("", ""),
        ("2024-01-01", "2024-01-01"),
        ("1\ny = 2", "1\ny = 2"),
    ],
)
def test_a_value_of_the_command_line_is_toml_or_else_a_text(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)
