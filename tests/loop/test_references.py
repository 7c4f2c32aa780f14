"""Reference points: what is trained, for how long, and on which rows."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from engine_cases import UNEVEN, assert_close, federation, network
from quick import EITHER_ENGINE
from running import built
from toy import same_bits

from fedstill.core.types import Federation, Training
from fedstill.data import hold_client_tests
from fedstill.engine import build_engine
from fedstill.loop.federate import Built, federate
from fedstill.loop.references import budget_of, find_references, train_alone, train_pooled
from fedstill.methods.fedavg import fedavg

MOMENTUM = Training(epochs=2, batch_size=4, lr=0.1, momentum=0.9, lr_decay=0.8)
KEPT = dataclasses.replace(MOMENTUM, keep_optimizer=True)
STEPS = Training(steps=3, batch_size=4, lr=0.1, lr_schedule="cosine")


def run_of(data: Federation | None = None, *, engine: str = "batched", device: str = "cpu", **settings) -> Built:
    data = data or federation()
    given = {"training": MOMENTUM, "rounds": 4, "cohort": data.population, "seed": 3, **settings}
    return built(method=fedavg(), model=network(), federation=data, engine=engine, device=device, **given)


def alone(run: Built, engine: str = "batched", device: str = "cpu"):
    trainer = build_engine(engine, device, model=run.model, federation=run.federation)
    return dict(train_alone(run, budget_of(run), trainer))


def only_client(data: Federation, client: int) -> Federation:
    """The same population, of which one client holds rows; all classes are tested."""
    first, last = data.offsets[client : client + 2].tolist()
    offsets = torch.tensor([0] * (client + 1) + [last - first] * (data.population - client))
    return dataclasses.replace(data, indices=data.indices[first:last], offsets=offsets, test=data.train)


def test_pooled_and_own_models_answer_to_the_rows_that_each_party_holds_back():
    run = run_of(hold_client_tests(federation([9, 1, 13]), 0.4, seed=0))
    found = find_references(run, fedavg())
    trainer = build_engine("batched", "cpu", model=run.model, federation=run.federation)
    rows, offsets = run.federation.client_test
    models = alone(run)
    pooled = train_pooled(run, budget_of(run)).weights

    def accuracy(weights, client: int) -> float:
        own = rows[offsets[client] : offsets[client + 1]]
        answers = trainer.outputs(weights, run.federation.train.x[own]).logits.argmax(1)
        return sum(answers.eq(run.federation.train.y[own]).tolist()) / len(own)

    assert found.alone_by_party == (accuracy(models[0], 0), None, accuracy(models[2], 2))
    assert found.pooled_by_party == (accuracy(pooled, 0), None, accuracy(pooled, 2))
    assert find_references(run_of(), fedavg()).alone_by_party == ()


def test_a_best_model_by_a_number_of_one_s_own_evaluation_does_not_stop_the_references():
    run = dataclasses.replace(run_of(best="cost"), evaluate=lambda *_: {"accuracy": 0.5, "cost": 1.0})
    assert find_references(run, fedavg()).pooled == {"accuracy": 0.5, "cost": 1.0}


@pytest.mark.parametrize("training", [MOMENTUM, KEPT, STEPS], ids=["epochs", "kept optimizer", "steps"])
def test_with_one_client_pooled_alone_and_fedavg_are_the_same_model(training):
    run = run_of(federation([13]), training=training)
    expected = federate(run).weights
    assert same_bits(train_pooled(run, budget_of(run)).weights, expected)
    assert same_bits(alone(run)[0], expected)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("training", [MOMENTUM, KEPT], ids=["fresh optimizer", "kept optimizer"])
def test_a_party_alone_is_a_federation_of_its_own(engine, training):
    data = federation()
    models = alone(run_of(data, training=training), engine)
    assert list(models) == list(range(len(UNEVEN)))
    for client, model in models.items():
        own = federate(run_of(only_client(data, client), training=training, engine=engine, cohort=1))
        assert_close(model, own.weights)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["batched", "looped"])
def test_on_a_gpu_a_party_alone_is_a_federation_of_its_own(engine):
    data = federation()
    for client, model in alone(run_of(data, engine=engine, device="cuda"), engine, "cuda").items():
        own = federate(run_of(only_client(data, client), engine=engine, device="cuda", cohort=1))
        for name, leaf in model.params.items():
            torch.testing.assert_close(leaf, own.weights.params[name], rtol=1e-2, atol=1e-3)


def test_parties_with_the_same_rows_are_equally_good_alone_and_a_party_without_rows_is_left_out():
    data = federation()
    rows = data.indices[:12]
    twins = dataclasses.replace(data, indices=torch.cat([rows, rows]), offsets=torch.tensor([0, 12, 12, 24]))
    run = run_of(twins, training=Training(epochs=1, batch_size=12, lr=0.1), cohort=2)
    models = alone(run)
    assert list(models) == [0, 2]
    assert_close(models[0], models[2])


def test_the_majority_class_is_chosen_among_the_clients_rows_and_counted_in_the_test_set():
    data = federation()
    counts = torch.bincount(data.train.y[data.indices], minlength=4)
    most = int(counts.argmax())
    found = find_references(run_of(data, rounds=1), fedavg())
    assert found.majority_class == data.train.classes[most]
    assert found.majority["accuracy"] == pytest.approx(float((data.test.y == most).double().mean()))


def test_no_reference_is_trained_on_a_row_that_no_client_holds():
    data = federation()
    held = data.indices[: -UNEVEN[-1]]
    some = dataclasses.replace(data, indices=held, offsets=data.offsets[:-1])
    x = data.train.x.clone()
    x[data.indices[-UNEVEN[-1] :]] = float("nan")
    spoilt = dataclasses.replace(
        some,
        train=dataclasses.replace(data.train, x=x),
        test=dataclasses.replace(data.test, x=torch.full_like(data.test.x, float("nan"))),
    )
    clean, dirty = run_of(some), run_of(spoilt)
    assert same_bits(train_pooled(dirty, budget_of(dirty)).weights, train_pooled(clean, budget_of(clean)).weights)
    for client, model in alone(clean).items():
        assert same_bits(alone(dirty)[client], model)


def test_the_budget_is_a_clients_average_share_of_the_rounds_and_all_clients_steps_together():
    run = run_of(federation([4] * 10), training=Training(steps=6, lr_decay=0.5), rounds=20, cohort=2)
    budget = budget_of(run)  # 40 visits to 10 clients
    assert (budget.turns, budget.alone.steps, budget.pooled.steps) == (4, 6, 60)
    assert budget.alone.lr_decay == pytest.approx(0.5**5)
    epochs = budget_of(run_of(federation([4] * 10), training=Training(epochs=3), rounds=21, cohort=2))
    assert (epochs.turns, epochs.pooled.epochs, epochs.pooled.steps) == (5, 3, None)
    assert epochs.lines()[0].startswith("budget of a party alone: 15 epochs")


def test_a_resumed_run_takes_finished_references_unless_it_has_more_rounds(tmp_path):
    file = tmp_path / "references.json"
    found = find_references(run_of(rounds=2), fedavg(), file=file)
    assert find_references(run_of(rounds=2), fedavg(), file=file, resume=True) == found
    longer = find_references(run_of(rounds=3), fedavg(), file=file, resume=True)
    assert longer.rounds == json.loads(file.read_text())["rounds"] == 3
    file.write_text("{}")
    assert find_references(run_of(rounds=3), fedavg(), file=file, resume=True).alone == longer.alone
