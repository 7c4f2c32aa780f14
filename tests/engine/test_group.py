"""A cohort gets the same numbers from either engine, in any order, in chunks of any size, with any padding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engine_cases import (
    NETS,
    UNEVEN,
    assert_close,
    assert_same_bits,
    dataset,
    engine_for,
    federation,
    network,
    reads_images,
    train,
)
from quick import EITHER_ENGINE

from fedstill.compose.combine import combine, weighted_mean
from fedstill.core.seeds import normal, numpy_generator, seed_for
from fedstill.core.tree import clone, rows
from fedstill.core.types import Dataset, Federation, Model, Objective, Training
from fedstill.engine import build_engine
from fedstill.engine import engine as engine_module
from fedstill.engine import group as probe_module
from fedstill.engine.device_data import Feed
from fedstill.engine.group import chunk_budget
from fedstill.engine.plan import Plan, make_plan
from fedstill.local.terms import cross_entropy
from fedstill.models import build_model

ENGINES = ("batched", "looped")
SIZES = (5, 0, 9, 1, 16, 4)  # nobody, a client of one sample, a last batch of one, full batches
TRAININGS = {
    "momentum": Training(batch_size=4, epochs=2, lr=0.05, momentum=0.9),
    "adam": Training(batch_size=4, epochs=2, lr=2e-3, optimizer="adam"),
    "cosine": Training(batch_size=4, epochs=2, lr=0.05, lr_schedule="cosine", clip=0.5),
    "steps": Training(batch_size=4, steps=5, lr=0.05),
}
NETWORKS = (*NETS, "convnorm")


def cohort(engine: str, net: str, training: Training, **how):
    options = {name: how.pop(name) for name in ("chunk",) if name in how}
    data = federation(SIZES, images=reads_images(net))
    return train(engine_for(engine, net, data, **options), training, **how)


@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("name", TRAININGS)
def test_batched_equals_looped(net, name):
    assert_close(
        cohort("batched", net, TRAININGS[name]).uploads._asdict() | {"label_counts": {}},
        cohort("looped", net, TRAININGS[name]).uploads._asdict() | {"label_counts": {}},
    )


@pytest.mark.parametrize("net", ["cnn", "convnorm"])
def test_batched_equals_looped_on_augmented_images(net):
    training = dataclasses.replace(TRAININGS["momentum"], augment=("crop", "flip", "cutout"))
    batched, looped, plain = (
        cohort(engine, net, chosen).uploads.weights
        for engine, chosen in (("batched", training), ("looped", training), ("looped", TRAININGS["momentum"]))
    )
    assert_close(batched, looped)
    assert not torch.allclose(looped.params["head.weight"], plain.params["head.weight"], atol=1e-3)


@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_the_size_of_a_chunk_changes_nothing(net, chunk):
    whole = cohort("batched", net, TRAININGS["momentum"], chunk=len(SIZES)).uploads
    assert_close(cohort("batched", net, TRAININGS["momentum"], chunk=chunk).uploads.weights, whole.weights)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("name", ["momentum", "cosine"])
def test_results_follow_the_order_of_the_ids_and_do_not_depend_on_the_others(engine, name):
    everybody = cohort(engine, "mlp", TRAININGS[name]).uploads
    for ids in ([4, 2, 0, 5, 3, 1], [3], [5, 1]):
        some = cohort(engine, "mlp", TRAININGS[name], ids=ids).uploads
        assert some.ids.tolist() == ids
        for field in ("weights", "size", "steps", "travel", "loss"):
            wanted = rows(getattr(everybody, field), torch.tensor(ids))
            assert_close({field: getattr(some, field)}, {field: wanted})
            if engine == "looped":
                assert_same_bits({field: getattr(some, field)}, {field: wanted})


def with_padding(change):
    """make_plan whose padding is changed and whose real samples are not."""

    def planned(*args, **how) -> Plan:
        plan = make_plan(*args, **how)
        index, weight, bits = change(plan)
        return dataclasses.replace(plan, index=index, weight=weight, bits=bits)

    return planned


def other_rows(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Padding holds samples of other clients."""
    strange = np.arange(plan.index.size).reshape(plan.index.shape) % sum(SIZES)
    return np.where(plan.weight > 0, plan.index, strange), plan.weight, plan.bits


def more_columns(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every batch is three samples longer, all of them padding."""
    index, weight, bits = other_rows(plan)
    longer = ((0, 0), (0, 0), (0, 3))
    return np.pad(index, longer, mode="edge"), np.pad(weight, longer), np.pad(bits, longer)


@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("change", [other_rows, more_columns])
def test_padding_changes_nothing(monkeypatch, engine, net, change):
    plain = cohort(engine, net, TRAININGS["momentum"]).uploads
    monkeypatch.setattr(engine_module, "make_plan", with_padding(change))
    padded = cohort(engine, net, TRAININGS["momentum"]).uploads
    assert_close(padded.weights, plain.weights)
    assert_close({"loss": padded.loss}, {"loss": plain.loss})
    if engine == "looped":
        assert_same_bits(padded.weights, plain.weights)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("net", ["mlp", "norm", "cnn"])
def test_a_client_without_data_sends_back_what_it_received(engine, net):
    uploads = cohort(engine, net, TRAININGS["momentum"]).uploads
    runner = engine_for(engine, net)
    assert_same_bits(rows(uploads.weights, 1), runner.model.init(3))
    assert [float(getattr(uploads, name)[1]) for name in ("size", "steps", "travel", "loss")] == [0.0] * 4


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("training", [Training(steps=0), Training(epochs=0)])
def test_a_cohort_without_any_step_sends_back_what_it_received(engine, training):
    uploads = cohort(engine, "norm", training).uploads
    start = engine_for(engine, "norm").model.init(3)
    for client in range(len(SIZES)):
        assert_same_bits(rows(uploads.weights, client), start)
    assert uploads.size.tolist() == list(SIZES)
    assert not uploads.loss.any()


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_uploads_say_how_much_each_client_has_and_did(engine):
    uploads = cohort(engine, "mlp", TRAININGS["momentum"]).uploads
    assert uploads.size.dtype == torch.float64
    assert uploads.size.tolist() == list(SIZES)
    assert uploads.steps.tolist() == [2 * -(-size // 4) for size in SIZES]
    assert uploads.ids.tolist() == list(range(len(SIZES)))
    assert uploads.extra == {}
    assert uploads.label_counts is None


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("net", NETWORKS)
def test_nothing_that_was_lent_is_changed(engine, net):
    data = federation(SIZES, images=reads_images(net))
    runner = engine_for(engine, net, data)
    start = runner.model.init(3)
    lent = {"start": start, "x": data.train.x, "y": data.train.y, "indices": data.indices}
    before = clone(lent)
    train(runner, TRAININGS["momentum"], start=start)
    assert_same_bits(lent, before)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_a_second_round_on_the_same_engine_is_what_a_new_engine_gives(engine):
    data = federation(SIZES)
    used, objective = engine_for(engine, "norm", data), cross_entropy()
    for training in (TRAININGS["adam"], TRAININGS["momentum"]):
        train(used, training, objective=objective, ids=[4, 0])
    later = {"start": used.model.init(9), "round": 6, "ids": [2, 3, 0]}
    faster = dataclasses.replace(TRAININGS["momentum"], lr=0.2, lr_decay=0.9)
    again = train(used, faster, objective=objective, **later).uploads.weights
    fresh = train(engine_for(engine, "norm", data), faster, **later).uploads.weights
    assert_same_bits(again, fresh)


def test_losses_may_draw_noise_that_is_each_clients_and_each_steps_own():
    """A term <noise, w> moves the weights by -lr times the sum of the noises of all steps."""

    def loss(output, batch, local):
        return (normal(local.seed, (4, 8)) * local.params["head.weight"]).sum()

    training = Training(batch_size=4, epochs=2, lr=0.1)
    data = federation((7, 7, 3))
    plan = make_plan(
        data.indices.numpy(), np.array([7, 7, 3]), np.arange(3), training=training, round=1, seed=7
    )  # fmt: skip
    start = engine_for("looped", "mlp", data).model.init(3)
    for engine in ENGINES:
        found = train(engine_for(engine, "mlp", data), training, objective=Objective(loss)).uploads.weights
        for client in range(3):
            seeds = torch.from_numpy(plan.seeds[: int(plan.steps[client]), client])
            moved = sum(normal(seed, (4, 8)) for seed in seeds)
            wanted = start.params["head.weight"] - 0.1 * moved
            torch.testing.assert_close(found.params["head.weight"][client], wanted, rtol=1e-5, atol=1e-6)


def test_parameters_that_no_term_touches_stay():
    def loss(output, batch, local):
        return weighted_mean(output.features.square().sum(1), batch.weight)

    for engine in ENGINES:
        runner = engine_for(engine, "mlp")
        params = train(runner, TRAININGS["momentum"], objective=Objective(loss)).uploads.weights.params
        assert torch.equal(params["head.weight"][0], runner.model.init(3).params["head.weight"])
        assert not torch.equal(params["body.0.weight"][0], runner.model.init(3).params["body.0.weight"])


def test_half_precision_is_near_and_leaves_the_weights_in_float32():
    """bf16 has 8 bits: one part in 256 of a step."""
    exact = cohort("looped", "mlp", TRAININGS["momentum"]).uploads.weights
    for engine in ENGINES:
        rough = train(
            engine_for(engine, "mlp", federation(SIZES), precision="bf16"), TRAININGS["momentum"]
        ).uploads.weights
        assert_close(rough, exact, tolerance=2e-2)
        assert not torch.equal(rough.params["head.weight"], exact.params["head.weight"])


def test_terms_add_up_inside_the_engine():
    """cross-entropy + <1, head bias>: a constant gradient of one more on the bias."""

    def push(output, batch, local):
        return local.params["head.bias"].sum()

    training = Training(batch_size=64, epochs=1, lr=0.1)
    for engine in ENGINES:
        plain = cohort(engine, "mlp", training).uploads.weights.params["head.bias"]
        pushed = cohort(engine, "mlp", training, objective=combine(cross_entropy(), Objective(push))).uploads
        wanted = plain - 0.1 * torch.tensor([float(size > 0) for size in SIZES])[:, None]
        torch.testing.assert_close(pushed.weights.params["head.bias"], wanted, rtol=0, atol=1e-6)


# How many clients are trained at once when nobody says so.

TRAINING = Training(batch_size=4, lr=0.05, momentum=0.9)


def runner_of(engine):
    """The program and runner that the engine built for its only objective."""
    ((program, runner),) = engine.programs.values()
    return program, runner


@pytest.mark.parametrize("net", ["mlp", "cnn", "convnorm"])
def test_the_trial_step_finds_the_cost_of_a_client_and_leaves_no_trace(net):
    engine = engine_for("batched", net, federation(images=reads_images(net)))
    start = engine.model.init(3)
    before = clone(start)
    train(engine, TRAINING, start=start)
    program, _ = runner_of(engine)
    weights = sum(leaf.numel() * 4 for leaf in start.params.values())
    assert program.memory >= 4 * weights
    assert set(program.layout) == {name for name, leaf in start.params.items() if leaf.ndim >= 1}
    for name, order in program.layout.items():
        assert sorted(order) == list(range(start.params[name].ndim))
    assert_same_bits(start, before)


def test_larger_batches_take_more_memory():
    needed = []
    for batch in (2, 8, 32):
        engine = engine_for("batched", "mlp", federation((40, 40)))
        train(engine, Training(batch_size=batch, lr=0.1))
        needed.append(runner_of(engine)[0].memory)
    assert needed[0] < needed[1] < needed[2]


def test_a_cohort_that_does_not_fit_is_cut_and_gives_the_same(monkeypatch):
    data = federation((3, 5, 8, 2, 7, 6, 4))
    whole = train(engine_for("batched", "norm", data), TRAINING).uploads.weights
    engine = engine_for("batched", "norm", data)
    monkeypatch.setattr("fedstill.engine.engine.chunk_budget", lambda device, program: int(2.5 * program.memory))
    cut = train(engine, TRAINING).uploads.weights
    assert runner_of(engine)[1].chunk == 2
    assert_close(cut, whole)


def test_a_chunk_that_is_asked_for_is_used_and_is_never_more_than_the_cohort():
    for asked, used in ((3, 3), (None, 5)):
        engine = engine_for("batched", "mlp", federation((4,) * 5), chunk=asked)
        train(engine, TRAINING)
        assert runner_of(engine)[1].chunk == used


def test_the_budget_of_a_cpu_holds_at_least_eight_clients_and_never_the_whole_machine(monkeypatch):
    engine = engine_for("batched", "mlp")
    train(engine, TRAINING)
    program = runner_of(engine)[0]
    cpu = torch.device("cpu")
    assert chunk_budget(cpu, program) == probe_module.CPU_CHUNK_BYTES
    program.memory = 100 << 20
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1 << 24)  # 64 GiB
    assert chunk_budget(cpu, program) == 8 * program.memory
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1 << 18)  # 1 GiB
    assert chunk_budget(cpu, program) == 256 << 20


def test_a_client_larger_than_the_budget_still_trains(monkeypatch):
    monkeypatch.setattr("fedstill.engine.engine.chunk_budget", lambda device, program: 0)
    engine = engine_for("batched", "mlp")
    uploads = train(engine, TRAINING, objective=cross_entropy(), ids=np.array([0, 1])).uploads
    assert runner_of(engine)[1].chunk == 1
    assert uploads.ids.tolist() == [0, 1]


# BatchNorm and dropout inside cohorts: statistics of real rows only, masks from the plan.


NO_STEP = Training(batch_size=4, lr=0.0)


@pytest.mark.parametrize("net", ["norm", "convnorm"])
@pytest.mark.parametrize("sizes", [(5, 9, 13), (1, 1, 1), (1, 4, 5)])
def test_a_last_batch_of_one_sample_breaks_nothing_and_both_engines_agree(net, sizes):
    training = Training(batch_size=4, epochs=2, lr=0.05, momentum=0.9)
    data = federation(sizes, images=net == "convnorm")
    batched, looped = (train(engine_for(name, net, data), training).uploads for name in ENGINES)
    for leaf in (*looped.weights.params.values(), *looped.weights.buffers.values(), looped.loss):
        assert bool(leaf.isfinite().all())
    assert_close(batched.weights, looped.weights)
    moved = looped.weights.params["head.bias"] - network(net).init(3).params["head.bias"]
    assert bool((moved.abs().amax(1) > 1e-4).all())


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_running_statistics_follow_the_batches_with_more_than_one_value(engine):
    """momentum 0.1: mean <- 0.9 mean + 0.1 (batch mean), var with n / (n - 1); a batch of one changes nothing."""
    data = federation((5,))
    uploads = train(engine_for(engine, "norm", data), NO_STEP).uploads
    model = network("norm")
    start = model.init(3)
    plan_rows = first_batch(data)
    hidden = data.train.x[plan_rows] @ start.params["body.0.weight"].T
    mean, variance = hidden.mean(0), hidden.var(0, unbiased=True)
    buffers = rows(uploads.weights.buffers, 0)
    torch.testing.assert_close(buffers["body.1.running_mean"], 0.1 * mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(buffers["body.1.running_var"], 0.9 + 0.1 * variance, rtol=1e-5, atol=1e-6)
    assert int(buffers["body.1.num_batches_tracked"]) == 1
    assert buffers["body.1.num_batches_tracked"].dtype == torch.int64


def first_batch(data: Federation) -> torch.Tensor:
    plan = make_plan(data.indices.numpy(), np.array([5]), np.zeros(1, np.int64), training=NO_STEP, round=1, seed=7)
    assert plan.weight.sum(2).tolist() == [[4.0], [1.0]]
    return torch.from_numpy(plan.index[0, 0])


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_a_client_does_not_see_the_statistics_of_another(engine):
    """One client's data are shifted by 100: nobody else's statistics or weights change."""
    plain = federation((6, 6, 6))
    x = plain.train.x.clone()
    x[plain.indices[6:12]] += 100.0
    shifted = Federation(
        Dataset("shifted", x, plain.train.y, plain.train.classes), plain.test, plain.indices, plain.offsets
    )
    training = Training(batch_size=4, lr=0.05)
    one, other = (train(engine_for(engine, "norm", data), training).uploads.weights for data in (plain, shifted))
    for client in (0, 2):
        assert_same_bits(rows(one, client), rows(other, client))
    assert float((other.buffers["body.1.running_mean"][1] - one.buffers["body.1.running_mean"][1]).abs().max()) > 1.0


def twins() -> Federation:
    """Two clients with the same samples."""
    train_set = dataset(8, images=False)
    double = Dataset("twins", train_set.x.repeat(2, 1), train_set.y.repeat(2), train_set.classes)
    return Federation(double, train_set, torch.arange(16), torch.tensor([0, 8, 16]))


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_clients_with_the_same_data_drop_different_units(engine):
    """A batch of everything and no shuffling to tell them apart: without dropout the twins are equal."""
    training = Training(batch_size=8, lr=0.5)
    dropped = train(engine_for(engine, "drop", twins()), training).uploads.weights.params["head.weight"]
    assert float((dropped[0] - dropped[1]).abs().max()) > 1e-3
    plain = train(engine_for(engine, "mlp", twins()), training).uploads.weights.params["head.weight"]
    assert float((plain[0] - plain[1]).abs().max()) < 1e-6


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_masks_change_with_step_round_and_seed_and_are_the_same_again(engine):
    runner = engine_for(engine, "drop", federation((8,)))

    def moved(**how) -> torch.Tensor:
        return train(runner, Training(batch_size=8, lr=0.5), **how).uploads.weights.params["head.weight"]

    first = moved()
    assert torch.equal(moved(), first)
    assert not torch.allclose(moved(round=2), first, atol=1e-3)
    assert not torch.allclose(moved(seed=8), first, atol=1e-3)


def test_dropout_in_a_cohort_leaves_the_global_stream_alone():
    before = torch.random.get_rng_state()
    for engine in ENGINES:
        train(engine_for(engine, "drop"), Training(batch_size=4, lr=0.1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_half_of_the_units_are_dropped_in_training():
    """With a first layer that puts out ones, the features that are not zero are the units that were kept."""

    def loss(output, batch, local):
        return (output.features != 0).float().mean() + 0.0 * local.params["head.bias"].sum()

    start = network("drop").init(3)
    params = {name: torch.zeros_like(leaf) for name, leaf in start.params.items()}
    params["body.0.bias"] += 1.0
    training = Training(batch_size=40, epochs=20, lr=0.0)
    batched, looped = (
        float(train(engine_for(name, "drop", federation((40,))), training, objective=Objective(loss),
                    start=start._replace(params=params)).uploads.loss[0])
        for name in ENGINES
    )  # fmt: skip
    assert batched == pytest.approx(looped)
    assert batched == pytest.approx(0.5, abs=4 * (0.25 / (20 * 40 * 16)) ** 0.5)


# Text and recurrent layers in both engines: ids reach the network as they are, clients at once equal one by one.


LETTERS, WINDOW = 7, 5


def texts(sizes=UNEVEN, *, dtype: torch.dtype = torch.uint8) -> Federation:
    generator = numpy_generator(seed_for(0, "text"))
    x = torch.from_numpy(generator.integers(0, LETTERS, (sum(sizes), WINDOW))).to(dtype)
    y = (x.long().sum(1) + 1) % LETTERS
    data = Dataset("text", x, y, tuple("abcdefg"))
    return Federation(data, data, torch.arange(len(y)), torch.tensor([0, *np.cumsum(sizes)]))


def reader() -> Model:
    return build_model("char_lstm", input_shape=(WINDOW,), classes=LETTERS, embedding=3, hidden=6, init="torch")


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_batched_equals_looped_on_clients_of_different_sizes(precision, optimizer):
    training = Training(batch_size=4, epochs=2, lr=0.5 if optimizer == "sgd" else 0.05, optimizer=optimizer)
    batched, looped = (
        train(build_engine(name, "cpu", model=reader(), federation=texts(), precision=precision), training).uploads
        for name in ("batched", "looped")
    )
    assert_close(batched.weights, looped.weights, tolerance=5e-6 if precision == "float32" else 1e-10)
    start = reader().init(3).params
    for name in ("encoder.embedding.weight", "encoder.lstm.weight_hh_l0", "encoder.lstm.bias_ih_l1", "head.weight"):
        assert float((looped.weights.params[name].float() - start[name]).abs().max()) > 1e-4, name


def test_a_cohort_in_chunks_of_one_or_more_gives_each_client_the_same():
    training = Training(batch_size=4, lr=0.1)
    alone, together = (
        train(build_engine("batched", "cpu", model=reader(), federation=texts(), chunk=chunk), training).uploads.weights
        for chunk in (1, 5)
    )
    assert_close(alone, together, tolerance=1e-6)


def test_a_client_does_not_read_the_text_of_another():
    plain = texts((6, 6, 6))
    x = plain.train.x.clone()
    x[6:12] = 0
    data = Dataset("other", x, plain.train.y, plain.train.classes)
    other = Federation(data, plain.test, plain.indices, plain.offsets)
    one, two = (
        train(build_engine("batched", "cpu", model=reader(), federation=each), Training(batch_size=4, lr=0.5))
        for each in (plain, other)
    )
    for client in (0, 2):
        assert_same_bits(rows(one.uploads.weights, client), rows(two.uploads.weights, client))
    moved = [run.uploads.weights.params["encoder.embedding.weight"][1] for run in (one, two)]
    assert not torch.allclose(*moved, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_stored_ids_reach_the_network_as_integers_without_scaling(dtype):
    data = texts(dtype=dtype).train
    feed = Feed(data.x, data.y, data, torch.device("cpu"), torch.float32)
    assert feed.x.dtype == dtype  # bytes stay bytes on the device
    x, y = feed.batch(torch.tensor([[0, 3], [2, 2]]), torch.zeros(2, 2, dtype=torch.int64), ())
    assert x.dtype == torch.int64
    assert torch.equal(x, data.x.long()[torch.tensor([[0, 3], [2, 2]])])
    assert torch.equal(y, data.y[torch.tensor([[0, 3], [2, 2]])])


def test_ids_too_many_for_a_float_copy_are_not_normalised(monkeypatch):
    monkeypatch.setattr("fedstill.engine.device_data.CPU_FLOAT_BYTES", 0)
    data = texts(dtype=torch.int64).train
    assert torch.equal(Feed(data.x, data.y, data, torch.device("cpu"), torch.float32).inputs(slice(0, 4)), data.x[:4])
