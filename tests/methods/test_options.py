"""Options against the signatures of the functions that take them."""

import inspect
import json
from typing import Literal

import pytest

from fedstill.core.errors import FedstillError
from fedstill.methods import METHODS, options
from fedstill.methods.lookup import build_method


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


def test_a_docstring_is_read_by_its_headings():
    def method():
        """A method: it does.

            w <- w - 1

        Args:
            mu: strength.

        Reveals: the model.
        Differs from the paper: in two
            lines.
        Reference: Somebody, 2020.
        """

    words = options.read_docstring(method)
    assert words["summary"] == "A method: it does."
    assert words["body"] == "w <- w - 1"
    assert words["Differs from the paper"] == "in two lines."
    assert words["Reference"] == "Somebody, 2020."


@pytest.mark.parametrize("name", METHODS)
def test_values_worth_trying_contain_the_default_and_build(name):
    defaults = {option.name: option.default for option in options.listed(METHODS[name])}
    for path, values in options.tries(name).items():
        assert (options.NONE if defaults[path] is None else defaults[path]) in values
        assert len(set(values)) == len(values) > 1
        for value in values:
            assert build_method(f"{name}({path}={json.dumps(value)})")


def test_only_methods_whose_options_are_no_question_of_accuracy_name_nothing_to_try():
    assert {name for name in METHODS if not options.tries(name)} == {"fedavg", "fednova", "update_noise"}


def ranged(*, rate: float = 0.5, count: int | None = None, word: str = "a"):
    """Ranged: for tests.

    Tries: rate = 1, 0.5; count = 3, none;
        word = a, b.
    """


def test_values_worth_trying_have_the_type_of_their_option(monkeypatch):
    monkeypatch.setattr(options, "registry", lambda kind: {"ranged": ranged})
    ranges = options.tries("ranged")
    assert ranges == {"rate": (1.0, 0.5), "count": (3, "none"), "word": ("a", "b")}
    assert isinstance(ranges["rate"][0], float)


def test_all_mistakes_in_values_worth_trying_are_named(monkeypatch):
    monkeypatch.setattr(options, "registry", lambda kind: {"ranged": ranged})
    monkeypatch.setattr(ranged, "__doc__", "Tries: rat = 1; rate = x; count")
    with pytest.raises(FedstillError) as caught:
        options.tries("ranged")
    mistakes = str(caught.value)
    assert "unknown key 'method.rat' for ranged: did you mean 'rate'?" in mistakes
    assert 'method.rate = "x" must be a number' in mistakes
    assert "'Tries: count' of ranged cannot be read" in mistakes
