"""A method in several forms: the correct one, as its paper prints it, as its released code does it."""

import inspect
import typing
from typing import Literal

import pytest

from fedstill.core.errors import FedstillError
from fedstill.core.types import Method
from fedstill.experiment.config import Experiment
from fedstill.methods import METHODS, fedavg, options
from fedstill.methods.lookup import build_method
from fedstill.methods.options import presets

Mode = Literal["eval", "train"]
CORRECT = {"steps": 500, "server_lr": 1e-3, "clip": 5.0, "mode": "eval", "feedback": True, "window": None}
PAPER = {**CORRECT, "server_lr": 3e-4}
RELEASED = {**CORRECT, "clip": None, "mode": "train", "feedback": False, "window": 5}
FORMS = {"correct": CORRECT, "paper": PAPER, "released": RELEASED}


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """What a method called "refinery" was built with, each time it was."""
    built: list[dict] = []

    @presets(paper={"server_lr": 3e-4}, released={"clip": None, "mode": "train", "feedback": False, "window": 5})
    def refinery(
        *,
        steps: int = 500,
        server_lr: float = 1e-3,
        clip: float | None = 5.0,
        mode: Mode = "eval",
        feedback: bool = True,
        window: int | None = None,
    ) -> Method:
        """Refinery: a method of three forms."""
        values = (steps, server_lr, clip, mode, feedback, window)
        built.append(dict(zip(CORRECT, values, strict=True)))
        return fedavg()

    monkeypatch.setitem(METHODS, "refinery", refinery)
    return built


@pytest.mark.parametrize("preset", FORMS)
def test_a_preset_is_other_defaults(calls, preset):
    METHODS["refinery"](preset=preset)
    assert calls == [FORMS[preset]]


def test_without_a_word_the_form_is_the_correct_one(calls):
    METHODS["refinery"]()
    assert calls == [CORRECT]


def test_an_option_that_is_set_by_name_counts_before_the_presets(calls):
    METHODS["refinery"](preset="released", clip=100.0, steps=7)
    assert calls == [{**RELEASED, "clip": 100.0, "steps": 7}]


def test_a_method_shows_preset_beside_its_own_options_and_keeps_its_name_and_docstring(calls):
    factory = METHODS["refinery"]
    assert list(inspect.signature(factory).parameters) == ["preset", *CORRECT]
    assert inspect.signature(factory).parameters["preset"].default == "correct"
    assert all(one.kind is one.KEYWORD_ONLY for one in inspect.signature(factory).parameters.values())
    hints = typing.get_type_hints(factory)
    assert hints["preset"] == Literal["correct", "paper", "released"]
    assert hints["clip"] == float | None
    assert (factory.__name__, inspect.getdoc(factory)) == ("refinery", "Refinery: a method of three forms.")
    assert set(factory.presets) == {"paper", "released"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "papr"}, r"method\.preset = 'papr' is unknown: did you mean 'paper'"),
        ({"preset": "paper", "stepps": 1}, r"method\.stepps is not an option of refinery: did you mean 'steps'"),
        ({"preset": "paper", "steps": 1.5}, r"method\.steps = 1\.5 is impossible: it must be a whole number"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(calls, options, message):
    with pytest.raises(FedstillError, match=message) as told:
        build_method("refinery", options)
    assert "\n" not in str(told.value)
    assert calls == []


def test_an_unknown_preset_is_refused_in_python_too(calls):
    with pytest.raises(FedstillError, match=r"method\.preset = 'code' is unknown"):
        METHODS["refinery"](preset="code")


@pytest.mark.parametrize(
    ("text", "preset"), [("refinery(preset='released')", "released"), ("refinery(preset=paper)", "paper")]
)
def test_a_preset_can_be_named_in_an_expression(calls, text, preset):
    build_method(f"fedprox+{text}")
    assert calls == [FORMS[preset]]


def test_an_unknown_preset_in_a_file_is_told_before_anything_runs(calls):
    with pytest.raises(FedstillError, match=r'method\.preset = "papr" is unknown: did you mean .paper'):
        Experiment(method={"name": "refinery", "preset": "papr"})
    assert calls == []


# Own keys against the signatures of the functions that take them.


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
