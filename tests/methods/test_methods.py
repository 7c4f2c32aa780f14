import inspect

import pytest

from fedstill import methods as methods
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.types import Method, Need
from fedstill.methods import METHODS, build_algorithm

NEEDS = {
    "scaffold": {Need.CLIENT_STATE, Need.PLAIN_SGD},
    "fednova": {Need.PLAIN_SGD},
    "feddyn": {Need.CLIENT_STATE},
    "fedcurv": {Need.CLIENT_STATE},
    "moon": {Need.CLIENT_STATE, Need.FEATURES},
    "fedmmd": {Need.FEATURES},
    "fedlmd": {Need.LABEL_COUNTS},
    "fedlmd_tf": {Need.LABEL_COUNTS},
    "fedrs": {Need.LABEL_COUNTS},
    **{name: {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS} for name in ("avglogit", "avgprob", "feddf")},
    **{
        name: {Need.LABEL_COUNTS_UPLOADED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
        for name in ("fedftg", "feddf_gen")
    },
    "fedbe": {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE},
    "fedaux": {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS, Need.FEATURES},
    "mrtf": {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS, Need.FEATURES, Need.ONE_ARCHITECTURE},
    "simclr": {Need.UNLABELED, Need.HEAD, Need.FEATURES},
    **{name: {Need.UNLABELED, Need.HEAD, Need.TOKENS} for name in ("masked_lm", "next_token")},
    "fedgen": {*(Need.HEAD, Need.FEATURES, Need.LABEL_COUNTS_UPLOADED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE)},
    "dp_fedavg": {Need.ONE_ARCHITECTURE},  # a trusted server shows one mean
    "d2cfl": {Need.UNLABELED, Need.ONE_ARCHITECTURE},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_builds_from_its_name_alone_and_declares_its_needs(name):
    method = build_algorithm(name, {})
    assert isinstance(method, Method)
    assert needs_of(method) == NEEDS.get(name, set())


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_a_keyword_with_a_default_and_is_explained(name):
    factory = METHODS[name]
    arguments = inspect.getdoc(factory).split("Args:")[1].split("Reveals:")[0]
    for option in inspect.signature(factory).parameters.values():
        assert option.kind is inspect.Parameter.KEYWORD_ONLY
        assert option.default is not inspect.Parameter.empty
        assert f"\n    {option.name}: " in arguments


@pytest.mark.parametrize("name", METHODS)
def test_every_docstring_says_what_it_reveals_and_where_it_differs(name):
    text = inspect.getdoc(METHODS[name])
    assert "<-" in text or "=" in text.split("Args:")[0]
    sections = [
        text.index(f"\n{section}") for section in ("Args:", "Reveals:", "Differs from the paper:", "Reference:")
    ]
    assert sections == sorted(sections)


def test_the_public_names_are_the_registry_and_its_builder():
    assert sorted(methods.__all__) == sorted(["METHODS", "build_algorithm", *METHODS])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedavgg", {}, r"method\.name 'fedavgg' is not a method: did you mean"),
        ("fedprox", {"mo": 1}, r"method\.mo is not an option of fedprox: did you mean 'mu'"),
        ("fedprox", {"mu": -1.0}, r"method\.mu = -1\.0 is impossible: it must be 0 or a number above it"),
        ("fedprox", {"mu": "big"}, r"method\.mu = 'big' is impossible: it must be a number"),
        ("fedprox", {"mu": True}, r"method\.mu = True is impossible"),
        ("fedprox", {"mu": float("nan")}, r"method\.mu = nan is impossible"),
        ("fedprox", {"mu": float("inf")}, r"method\.mu = inf is impossible"),
        ("fedavg", {"weighting": "sizes"}, r"method\.weighting = 'sizes' is unknown: did you mean 'size'"),
        (
            "fedavg",
            {"buffers": 3},
            r"method\.buffers = 3 is unknown: choose one of: average, last, local, pooled, reset",
        ),
        ("scaffold", {"option": "III"}, r"method\.option = 'III' is unknown"),
        ("scaffold", {"global_lr": 0}, r"method\.global_lr = 0 is impossible"),
        ("fednova", {"correction": "on"}, r"method\.correction = 'on' is unknown"),
        ("fedcurv", {"lam": -1.0}, r"method\.lam = -1\.0 is impossible: it must be 0 or a number above it"),
        ("fedcurv", {"fisher": "batch"}, r"method\.fisher = 'batch' is unknown"),
        ("moon", {"temperature": 0.0}, r"method\.temperature = 0\.0 is impossible: it must be from 0\.001 to 1000"),
        ("moon", {"mu": -0.1}, r"method\.mu = -0\.1 is impossible"),
        ("fedmmd", {"lam": float("inf")}, r"method\.lam = inf is impossible"),
        ("fedavgm", {"beta": 1.0}, r"method\.beta = 1\.0 is impossible: it must be at least 0 and below 1"),
        ("fedadam", {"tau": 0.0}, r"method\.tau = 0\.0 is impossible"),
        ("fedyogi", {"beta2": -0.1}, r"method\.beta2"),
        ("fedopt", {"optimizer": "adamw"}, r"method\.optimizer = 'adamw' is unknown: did you mean 'adam'"),
        ("feddyn", {"alpha": 0.0}, r"method\.alpha = 0\.0 is impossible: it must be a number above 0"),
        ("fedntd", {"tau": 0}, r"method\.tau = 0 is impossible"),
        ("d2cfl", {"beta": 1.3}, r"method\.beta = 1\.3 is impossible: it must be from 0 to 1"),
        ("d2cfl", {"mix_alpha": -0.1}, r"method\.mix_alpha = -0\.1 is impossible: it must be from 0 to 1"),
        ("d2cfl", {"past": 0}, r"method\.past = 0 is impossible: it must be a number above 0"),
        ("d2cfl", {"rule": "average"}, r"method\.rule = 'average' is unknown"),
        ("fedntd_tf", {"beta": -1.0}, r"method\.beta = -1\.0 is impossible"),
        ("kd", {"tau": 0}, r"method\.tau = 0 is impossible"),
        ("fedlmd", {"beta": float("nan")}, r"method\.beta = nan is impossible"),
        ("fedlmd_tf", {"tau": -1}, r"method\.tau = -1 is impossible"),
        ("fedrs", {"alpha": 1.5}, r"method\.alpha = 1\.5 is impossible: it must be from 0 to 1"),
        ("fedrs", {"alpha": -0.5}, r"method\.alpha = -0\.5 is impossible"),
        ("fedrs", {"alpha": float("nan")}, r"method\.alpha = nan is impossible"),
        ("fedrs", {"rule": "proportion"}, r"method\.rule = 'proportion' is unknown: did you mean 'proportional'"),
        ("label_smoothing", {"epsilon": 1.0}, r"method\.epsilon = 1\.0 is impossible: it must be at least 0 and"),
        ("feddf", {"steps": 2.5}, r"method\.steps = 2\.5 is impossible: it must be a whole number"),
        ("feddf", {"steps": -1}, r"method\.steps = -1 is impossible"),
        ("feddf", {"clip": 0.0}, r"method\.clip = 0\.0 is impossible"),
        ("feddf", {"clip": "no"}, r"method\.clip = 'no' is impossible: it must be a number"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(name, options, message):
    with pytest.raises(FedstillError, match=message) as told:
        build_algorithm(name, options)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedprox", {"mu": 1}), ("feddf", {"clip": None})],
)
def test_whole_numbers_are_numbers_and_none_is_allowed_where_it_means_something(name, options):
    build_algorithm(name, options)
