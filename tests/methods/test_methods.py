import inspect

import pytest
import torch
from label_skew import SKEWED, samples_of, trained
from weighed import weighed

from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.types import Method, Need
from fedstill.methods import METHODS
from fedstill.methods.lookup import build_method

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
    method = build_method(name)[0].method
    assert isinstance(method, Method)
    assert needs_of(method) == NEEDS.get(name, set())


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_a_keyword_with_a_default_and_is_explained(name):
    factory = METHODS[name]
    arguments = inspect.getdoc(factory).partition("Args:")[2].partition("Reveals:")[0]
    for option in inspect.signature(factory).parameters.values():
        assert option.kind is inspect.Parameter.KEYWORD_ONLY
        assert option.default is not inspect.Parameter.empty
        assert f"\n    {option.name}: " in arguments


@pytest.mark.parametrize("name", METHODS)
def test_every_docstring_says_what_it_reveals_and_where_it_differs(name):
    text = inspect.getdoc(METHODS[name])
    assert "<-" in text or "=" in text.split("Args:")[0]
    options = ["Args:"] if inspect.signature(METHODS[name]).parameters else []
    sections = [*options, "Reveals:", "Differs from the paper:", "Reference:"]
    places = [text.index(f"\n{section}") for section in sections]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedavgg", {}, r"method\.name = 'fedavgg' is unknown: did you mean"),
        (
            "fedavg",
            {"weighting": "uniform"},
            r"for fedavg: write fedavg\+average\(weighting='uniform'\), or \[server\]",
        ),
        ("fedprox", {"buffers": "local"}, r"for fedprox: it stands in the section \[server\]"),
        ("fedprox", {"mo": 1}, r"unknown key 'method\.mo' for fedprox: did you mean 'mu'"),
        ("fedprox", {"mu": -1.0}, r"method\.mu = -1\.0 must be a number, at least 0: e\.g\. method\.mu = 0\.01"),
        ("fedprox", {"mu": "big"}, r'method\.mu = "big" must be a number'),
        ("fedprox", {"mu": True}, r"method\.mu = true must be"),
        ("fedprox", {"mu": float("nan")}, r"method\.mu = nan must be"),
        ("fedprox", {"mu": float("inf")}, r"method\.mu = inf must be"),
        ("scaffold", {"option": "III"}, r'method\.option = "III" is unknown: did you mean'),
        ("scaffold", {"global_lr": 0}, r"method\.global_lr = 0 must be a number above 0"),
        ("fedcurv", {"lam": -1.0}, r"method\.lam = -1\.0 must be"),
        ("moon", {"temperature": 0.0}, r"method\.temperature = 0\.0 must be a number from 0\.001 to 1000"),
        ("fedavgm", {"beta": 1.0}, r"method\.beta = 1\.0 must be a number, at least 0 and below 1"),
        ("fedadam", {"tau": 0.0}, r"method\.tau = 0\.0 must be"),
        ("fedopt", {"optimizer": "adamw"}, r'method\.optimizer = "adamw" is unknown: did you mean .adam'),
        ("feddyn", {"alpha": 0.0}, r"method\.alpha = 0\.0 must be"),
        ("d2cfl", {"beta": 1.3}, r"method\.beta = 1\.3 must be a number from 0 to 1"),
        ("d2cfl", {"past": 0}, r"method\.past = 0 must be a whole number, at least 1"),
        ("kd", {"tau": 0}, r"method\.tau = 0 must be"),
        ("fedrs", {"alpha": 1.5}, r"method\.alpha = 1\.5 must be a number from 0 to 1"),
        ("fedrs", {"rule": "proportion"}, r'method\.rule = "proportion" is unknown: did you mean .proportional'),
        ("feddf", {"student": {"steps": 2.5}}, r"method\.student\.steps = 2\.5 must be a whole number"),
        ("feddf", {"student": {"clip": "no"}}, r'method\.student\.clip = "no" must be a number above 0'),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(name, options, message):
    with pytest.raises(FedstillError, match=message) as told:
        build_method(name, options)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedprox", {"mu": 1}), ("feddf", {"student": {"clip": None}}), ("feddf", {"student": {"clip": "none"}})],
)
def test_whole_numbers_are_numbers_and_none_is_allowed_where_it_means_something(name, options):
    build_method(name, options)


def test_uniform_weighting_reaches_the_server_whatever_the_clients_minimise():
    data = [SKEWED[0], samples_of(1, 0, 0, 0, seed=1)]
    for name in ("kd", "fedntd_tf", "fedlmd", "fedlmd_tf", "label_smoothing", "fedrs"):
        by_size, evenly = (trained(weighed(METHODS[name](), w), data) for w in ("size", "uniform"))
        alone = [trained(METHODS[name](), [batch]) for batch in data]
        for weights, shares in ((by_size, (15 / 16, 1 / 16)), (evenly, (0.5, 0.5))):
            expected = sum(p * one.params["weight"] for p, one in zip(shares, alone, strict=True))
            torch.testing.assert_close(weights.params["weight"], expected)
