"""One engine a prototype behind the interface of one."""

import numpy as np
import pytest
import torch
from mixed_runs import LOCAL, NETS, federation, mixed
from toy import same_bits

from fedstill.compose.groups import only, part_of
from fedstill.core.errors import FedstillError
from fedstill.core.trainer import Lesson, LocalWork
from fedstill.engine import Engine, MixedEngine, build_engine
from fedstill.local.terms import control_variates, cross_entropy


def engine_of(model=None, name="auto", **how):
    return build_engine(name, "cpu", model=model or mixed(), federation=federation(), **how)


def train(engine, ids, objective=None, **changes):
    start = engine.model.init(1)
    states = changes.pop("states", {})
    work = LocalWork(objective or RISK, LOCAL, start, **{"round": 2, "seed": 5} | changes)
    return start, engine.train(work, np.array(ids), states)


RISK = cross_entropy()


def test_each_prototype_is_run_as_it_suits_it():
    engine = engine_of()
    assert isinstance(engine, MixedEngine)
    assert {name: one.name for name, one in engine.engines.items()} == {"a": "batched", "b": "looped"}
    assert engine.name == "batched and looped"
    assert engine_of(name="looped").name == "looped"


def test_the_training_set_is_on_the_device_once():
    first, second = engine_of().engines.values()
    assert first.feed is second.feed


def test_every_client_trains_as_in_the_engine_of_its_prototype_alone():
    start, trained = train(engine_of(), [4, 0, 3])
    for name, places in (("a", [1]), ("b", [0, 2])):
        alone = build_engine("auto", "cpu", model=NETS[name], federation=federation())
        ids = np.array([4, 0, 3])[places]
        wanted = alone.train(LocalWork(RISK, LOCAL, part_of(start, name), round=2, seed=5), ids, {}).uploads
        own = part_of(trained.uploads.weights, name)
        assert same_bits(
            type(own)(*({key: leaf[places] for key, leaf in part.items()} for part in own)), wanted.weights
        )
        assert torch.equal(trained.uploads.loss[places], wanted.loss)
        assert torch.equal(trained.uploads.size[places], wanted.size)
    assert trained.uploads.ids.tolist() == [4, 0, 3]


def test_a_client_keeps_its_slots_of_other_prototypes():
    objective, engine = control_variates("II"), engine_of()
    start = engine.model.init(1)
    ids = [1, 5]
    states = {
        name: {"control": {key: torch.full((2, *leaf.shape), 0.5) for key, leaf in part_of(start, name).params.items()}}
        for name in "ab"
    }
    received = {
        name: {"control": {k: torch.zeros_like(v) for k, v in part_of(start, name).params.items()}} for name in "ab"
    }
    _, trained = train(engine, ids, objective=objective, states=states, received=received)
    for name, mine, other in (("a", 0, 1), ("b", 1, 0)):
        for key, leaf in trained.states[name]["control"].items():
            assert torch.equal(leaf[other], states[name]["control"][key][other])
        control = trained.states[name]["control"]["head.bias"][mine]
        assert not torch.equal(control, states[name]["control"]["head.bias"][mine])
        delta = trained.uploads.extra[name]["control_delta"]["head.bias"]
        torch.testing.assert_close(delta[mine], control - 0.5)
        assert not delta[other].any()


def test_outputs_are_those_of_the_ensemble_of_what_is_there():
    engine, x = engine_of(), federation().test.x
    weights = engine.model.init(1)
    each = {name: engine.engines[name].outputs(part_of(weights, name), x).logits for name in "ab"}
    torch.testing.assert_close(engine.outputs(weights, x).logits, (each["a"] + each["b"]) / 2)
    assert torch.equal(engine.outputs(only(weights, "b"), x).logits, each["b"])
    reported = engine_of(mixed(report="a"))
    assert torch.equal(reported.outputs(weights, x).logits, each["a"])
    assert torch.equal(reported.outputs(only(weights, "b"), x).logits, each["b"])


def test_some_rows_and_stacked_weights():
    engine, x = engine_of(), federation().test.x
    weights, rows = engine.model.init(1), torch.tensor([3, 1])
    whole = engine.outputs(weights, x, features=False).logits
    torch.testing.assert_close(engine.outputs(weights, x, features=False, rows=rows).logits, whole[rows])
    twice = type(weights)(*({name: torch.stack([leaf, leaf]) for name, leaf in part.items()} for part in weights))
    found = engine.outputs(twice, x, stacked=True, features=False)
    torch.testing.assert_close(found.logits, torch.stack([whole, whole]))


def test_a_prototype_is_lent_its_own_engine_and_a_stranger_a_fresh_one():
    engine = engine_of()
    assert engine.lend(NETS["b"]) is engine.engines["b"]
    other = engine.lend(NETS["c"])
    assert isinstance(other, Engine)
    assert other.model is NETS["c"]
    assert other not in engine.engines.values()


def test_batch_statistics_are_taken_for_every_prototype():
    engine, x = engine_of(), federation().test.x
    weights = engine.model.init(1)
    found = engine.batch_statistics(weights, x, 10)
    wanted = engine.engines["b"].batch_statistics(part_of(weights, "b"), x, 10)
    assert same_bits({name.removeprefix("b/"): leaf for name, leaf in found.items()}, wanted)


def test_the_union_is_not_trained_as_one_model():
    engine = engine_of()
    with pytest.raises(FedstillError, match="prototype by prototype"):
        engine.fit(Lesson(RISK, federation().test.x, federation().test.y, LOCAL), engine.model.init(0), 0)


def test_a_cohort_of_nobody_has_uploads_of_no_rows():
    start, trained = train(engine_of(), np.array([], dtype=np.int64))
    assert len(trained.uploads.ids) == 0
    assert {name: leaf.shape for name, leaf in trained.uploads.weights.params.items()} == {
        name: (0, *leaf.shape) for name, leaf in start.params.items()
    }


def test_batched_equals_looped():
    member = ("a", "c", "a", "c", "a", "c")
    first = train(engine_of(mixed(member), "batched"), range(6))[1].uploads
    second = train(engine_of(mixed(member), "looped"), range(6))[1].uploads
    for name, leaf in first.weights.params.items():
        torch.testing.assert_close(leaf, second.weights.params[name], atol=1e-6, rtol=1e-5)
