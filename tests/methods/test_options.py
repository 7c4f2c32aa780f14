"""Options against the signatures of the functions that take them."""

import inspect
from typing import Literal

import pytest

from fedstill.core.errors import FedstillError
from fedstill.methods import options


def sample(
    *,
    rate: float = 0.5,
    hidden: tuple[int, ...] = (8,),
    mode: Literal["a", "b"] = "a",
    other: Literal["a", "b"] | None = None,
    needed: int,
    flag: bool = False,
):
    return rate


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(options, "registry", lambda kind: {"sample": sample})


@pytest.mark.parametrize(
    "given",
    [
        {"needed": 1},
        {"needed": 1, "rate": 1},
        {"needed": 1, "hidden": [4, 4]},
        {"needed": 1, "hidden": (4,), "mode": "b"},
    ],
)
def test_right_keys_pass(registered, given):
    options.check("method", "sample", given)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, r"method\.needed is missing: sample needs it, a whole number"),
        ({"needed": 1.5}, r"method\.needed = 1\.5 must be a whole number"),
        ({"needed": True}, r"method\.needed = true must be a whole number"),
        ({"needed": 1, "rate": "x"}, r'method\.rate = "x" must be a number: e\.g\. method\.rate = 0\.5'),
        ({"needed": 1, "rat": 1}, r"unknown key 'method\.rat' for sample: did you mean 'rate'\?"),
        ({"needed": 1, "hidden": ["x"]}, r"method\.hidden = .* must be a list of whole numbers"),
        ({"needed": 1, "mode": "c"}, r'method\.mode = "c" is unknown: choose one of: a, b'),
        ({"needed": 1, "other": "c"}, r'method\.other = "c" is unknown: choose one of: a, b'),
        ({"needed": 1, "flag": 1}, r"method\.flag = 1 must be true or false"),
    ],
)
def test_wrong_keys_are_one_line_with_a_cure(registered, given, line):
    with pytest.raises(FedstillError, match=line):
        options.check("method", "sample", given)


@pytest.mark.parametrize("kind", ["partition", "model", "method"])
def test_defaults_of_everything_registered_pass_their_own_check(kind):
    for name in options.registry(kind):
        required = {
            key: ["column"]
            for key, parameter in options.parameters(kind, name).items()
            if parameter.default is inspect.Parameter.empty
        }
        options.check(kind, name, {**options.defaults(kind, name), **required})
