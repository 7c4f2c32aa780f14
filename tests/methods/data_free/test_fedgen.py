"""FedGen as a method: what it is before its generator is trained, its forms, and what it joins with."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial

import pytest
import torch
from papers import released
from quick import EITHER_ENGINE
from server_rounds import CLASSES, network, run
from toy import furthest, same_bits

from fedstill.compose.combine import bound_to
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.tree import byte_size
from fedstill.core.types import Need, Phase
from fedstill.methods import fedavg, fedgen
from fedstill.methods.data_free.feature_generator import FeatureGenerator
from fedstill.methods.lookup import build_method, write
from fedstill.privacy.plan import Privacy

SMALL = FeatureGenerator(steps=5, batch_size=8, noise=4)
SHORT = {"gen_batch": 6, "generator": SMALL, "label_weight": 1.0, "match_weight": 1.0}
WRITTEN = {**SHORT, "generator": {"steps": 5, "batch_size": 8, "noise": 4}}


def joined(text):
    return build_method(text)[0].method


def with_fedgen(other):
    return f"{write('fedgen', WRITTEN)}+{other}"


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_the_first_round_is_fedavg_bit_for_bit_and_the_second_is_not(engine, net):
    for rounds, equal in ((1, True), (2, False)):
        found, wanted = (run(one, net=net, rounds=rounds, engine=engine) for one in (fedgen(**SHORT), fedavg()))
        assert same_bits(found.weights, wanted.weights) == equal
        assert (found.history.rows[-1]["train_loss"] == wanted.history.rows[-1]["train_loss"]) == equal


def test_each_part_alone_differs_from_both_and_none_is_fedavg():
    forms = [{}, {"label_weight": 0.0}, {"match_weight": 0.0}, {"label_weight": 0.0, "match_weight": 0.0}]
    models = [run(fedgen(**{**SHORT, **form}), rounds=2).weights for form in forms]
    assert same_bits(models[-1], run(fedavg(), rounds=2).weights)
    for i, one in enumerate(models):
        assert all(furthest(one, other) > 1e-4 for other in models[:i])


def test_where_no_part_is_on_nothing_is_asked_of_the_clients():
    off = fedgen(label_weight=0.0, match_weight=0.0)
    assert needs_of(off) == set()
    assert off.objective.bind is None


@pytest.mark.parametrize(
    "other", [*("fedprox(mu=0.1)", "moon", "fedlmd", "fedavgm"), "scaffold+average", "feddyn+average"]
)
def test_it_joins_any_local_method_and_is_that_method_in_the_first_round(other):
    together, alone = joined(with_fedgen(other)), joined(other)
    assert same_bits(run(together, rounds=1).weights, run(alone, rounds=1).weights)
    both = run(together, rounds=2).weights
    assert furthest(both, run(alone, rounds=2).weights) > 1e-4
    assert furthest(both, run(fedgen(**SHORT), rounds=2).weights) > 1e-4


def test_a_later_phase_starts_with_fedavgs_round_and_then_regularises():
    """FedAvg for two rounds, then FedGen: its generator is new in round 3, so that round is still FedAvg's."""
    phases = (Phase(fedavg(), until=2), Phase(fedgen(**SHORT)))
    for rounds, equal in ((3, True), (4, False)):
        assert same_bits(run(phases, rounds=rounds).weights, run(fedavg(), rounds=rounds).weights) == equal


def test_every_client_downloads_the_generator_and_sends_one_number_a_class():
    """4 + 3 inputs, 256 hidden, 6 features; BatchNorm has four vectors and a count; a label mask, two weights."""
    generator = 4 * (256 * (4 + CLASSES + 1) + 4 * 256 + 6 * 257 + CLASSES + 2) + 8
    model = byte_size(network().init(0))
    for row in run(fedgen(**SHORT), rounds=2).history.rows:
        assert row["bytes_down"] == 4 * (model + generator)
        assert row["bytes_up"] == 4 * (model + 8 + 3 * 4 + 4 * CLASSES)


def test_the_defaults_are_the_authors_but_for_the_matching_term_which_the_paper_lacks():
    """Card 12.3 and 12.4."""
    defaults = {name: option.default for name, option in inspect.signature(fedgen).parameters.items()}
    authors = {"label_weight": 10.0, "match_weight": 0.0, "decay": 0.98, "floor": 1e-4, "gen_batch": 32}
    assert authors.items() <= defaults.items()
    own = {"steps": 50, "lr": 3e-4, "lr_decay": 0.98, "weight_decay": 1e-2, "noise": 32, "noise_kind": "uniform"}
    assert own.items() <= dataclasses.asdict(defaults["generator"]).items()


def test_the_released_form_is_another_method():
    how = {"gen_batch": 6, "generator": SMALL}
    same_terms = partial(fedgen, match_weight=10.0)
    found, plain = (run(build(**how), rounds=2).weights for build in (released("fedgen", "fedgen"), same_terms))
    assert furthest(found, plain) > 1e-5


def test_the_generators_network_and_noise_are_those_asked_for(monkeypatch):
    """72 million parameters need not be drawn for it."""
    model, built = network(), {}
    monkeypatch.setitem(fedgen.__globals__, "build_generator", lambda name, **how: built.update(how, name=name))
    bound_to(fedgen(generator=FeatureGenerator("features", noise=100)), model)
    assert built == {"name": "features", "shape": (6,), "classes": CLASSES, "noise": 100, "inputs": model.input_shape}


def test_label_counts_may_have_noise_or_not_be_sent_at_all():
    noisy = run(fedgen(**SHORT), rounds=2, privacy=Privacy(label_counts="dp", label_epsilon=1.0)).weights
    assert furthest(noisy, run(fedgen(**SHORT), rounds=2).weights) > 1e-6
    with pytest.raises(FedstillError, match=r"fedgen\(class_weights='uniform'\)"):
        run(fedgen(**SHORT), privacy=Privacy(label_counts="none"))
    without = fedgen(**SHORT, class_weights="uniform")
    assert Need.LABEL_COUNTS_UPLOADED not in needs_of(without)
    run(without, rounds=2, privacy=Privacy(label_counts="none"))


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_it_runs_in_other_precisions(precision):
    found = run(fedgen(**SHORT), rounds=2, engine_options={"precision": precision})
    assert all(bool(leaf.isfinite().all()) for leaf in found.weights.params.values())
    assert torch.isfinite(torch.tensor(found.history.rows[-1]["server/feature_generator_loss"]))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"label_weight": -1.0}, "label_weight"),
        ({"generator": {"steps": 0}}, "steps"),
        ({"generator": {"batch_size": 1}}, "batch_size = 1 must be a whole number, at least 2"),
        ({"decay": 1.5}, "decay"),
        ({"gen_batch": 0}, "gen_batch"),
        ({"generator": {"network": "dens"}}, "dense"),
        ({"generator": {"noise_kind": "gaussian"}}, "noise_kind"),
        ({"class_weights": "none"}, "class_weights"),
    ],
)
def test_an_impossible_option_is_refused_by_its_name(options, told):
    with pytest.raises(FedstillError, match=told):
        build_method("fedgen", options)
