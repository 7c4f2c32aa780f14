"""FedGen's term: a generator that says ln 3 for class 0 makes every number one of the hand."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import F64, local_view, number
from papers import module_of
from server_rounds import CLASSES, clients_models, network, preparation_of, server_round
from torch import nn
from toy import same_bits

from fedstill.compose.combine import bound, combine
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.tree import rows, stack
from fedstill.core.types import Batch, Model, Need, Output, Stage, Weights
from fedstill.engine import turns
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free import feature_generator as generator_training
from fedstill.methods.data_free.feature_generator import (
    SLOT,
    FeatureGenerator,
    GeneratorTraining,
    draw_requests,
    generated_features,
    generator_player,
    label_shares,
    labels_among,
    row_noise,
    seen_labels,
    train_generator,
)
from fedstill.methods.data_free.inventing import diversity
from fedstill.models import from_module

SAID = {0: math.log(3.0), 1: -1.0}  # the one feature of each class


def seed(value):
    return torch.tensor(value, dtype=torch.int64)


def generator(noise=1, by_noise=0.0):
    """feature = by_noise * (sum of the noise) + what SAID has for the class."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        assert not training, "a client runs the generator in eval mode"
        return Output(x @ weights.params["g"], x), weights.buffers

    start = Weights({"g": number([[by_noise]] * noise + [[SAID[0]], [SAID[1]]])}, {})
    return Model("said", init=lambda _: start, apply=apply, classes=2)


def head(params, features):
    """Logits (h feature, 0)."""
    return torch.cat([params["h"] * features, torch.zeros_like(features)], dim=-1)


def model():
    def apply(weights, x, *, training=False, weight=None, seed=None):
        features = weights.params["f"] * x
        return Output(head(weights.params, features), features), {}

    return Model("line", lambda _: Weights({"f": number(1.0), "h": number(1.0)}, {}), apply, head, ("h",), classes=2)


def received(label_weight=0.0, match_weight=0.0, labels=(1.0, 0.0), inventor=None):
    weights = (inventor or generator()).init(0)
    return {
        "generator": weights._asdict(), "labels": number(list(labels)),
        "label_weight": number(label_weight), "match_weight": number(match_weight),
    }  # fmt: skip


def term(inventor=None, noise=1, **options):
    return bound(generated_features(lambda _: inventor or generator(), noise=noise, **options), model())


def value_and_slopes(objective, batch, slots, *, f=1.0, h=1.0, at=0):
    params = {"f": number(f).requires_grad_(), "h": number(h).requires_grad_()}
    view = local_view(Weights(params, {}), params=params, received=slots, seed=seed(at))
    output, _ = model().apply(Weights(params, {}), batch.x, training=True)
    loss = objective.loss(output, batch, view)
    slopes = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    return loss.item(), [slope.item() for slope in slopes]


def batch_of(x, y, weight=None):
    return Batch(number(x).unsqueeze(-1), torch.tensor(y), number(weight or [1.0] * len(y)))


def test_the_label_part_is_the_heads_cross_entropy_on_what_the_generator_says():
    """h(G) = (ln 3, 0) is (3/4, 1/4): r a (-ln 3/4), and its slope in h is -r a (1 - 3/4) ln 3."""
    objective = term(ratio=2.0, count=7, match_term=False)
    loss, (slope_f, slope_h) = value_and_slopes(objective, batch_of([5.0], [1]), received(label_weight=5.0))
    assert loss == pytest.approx(-10 * math.log(0.75))
    assert slope_h == pytest.approx(-10 * 0.25 * math.log(3.0))
    assert slope_f == 0.0, "generated features pass no extractor"


def test_the_matching_part_is_the_divergence_from_the_heads_answer_for_the_same_class():
    """Class 0 wants (3/4, 1/4), the model says (1/2, 1/2) of x = 0: ln 2 - H(3/4)."""
    objective = term(label_term=False)
    loss, _ = value_and_slopes(objective, batch_of([0.0], [0]), received(match_weight=10.0))
    assert loss == pytest.approx(10 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)))


def test_the_target_of_the_matching_part_gets_no_gradient():
    """d KL / dz_0 = p_0 - 3/4 at z_0 = f h x alone; f h x = ln 3 is the target, where nothing pulls."""
    objective, slots = term(label_term=False), received(match_weight=1.0)
    _, slopes = value_and_slopes(objective, batch_of([2.0], [0]), slots, f=0.5)
    pull = 1 / (1 + math.exp(-1.0)) - 0.75
    assert slopes == pytest.approx([pull * 2.0, pull * 1.0])
    assert value_and_slopes(objective, batch_of([math.log(3.0)], [0]), slots)[1] == pytest.approx([0.0, 0.0])


def test_both_parts_add_up():
    data, slots = batch_of([0.3, -1.0], [0, 1]), received(3.0, 2.0)
    both, *single = (
        value_and_slopes(term(**options), data, slots) for options in ({}, {"match_term": False}, {"label_term": False})
    )
    assert both[0] == pytest.approx(sum(one[0] for one in single))
    assert both[1] == pytest.approx([sum(pair) for pair in zip(*(one[1] for one in single), strict=True)])


def test_a_weight_of_zero_adds_exactly_nothing_whatever_the_generator_says():
    wild = generator()
    wild_slots = received(inventor=wild)
    wild_slots["generator"] = {"params": {"g": number([[math.inf]] * 3)}, "buffers": {}}
    assert value_and_slopes(term(wild), batch_of([0.3, -1.0], [0, 1]), wild_slots) == (0.0, [0.0, 0.0])


def test_samples_of_weight_zero_and_how_many_there_are_change_nothing():
    """The noise of a row does not depend on the rows behind it."""
    inventor = generator(noise=3, by_noise=0.7)
    for kind in ("uniform", "normal"):
        objective = term(inventor, 3, noise_kind=kind)
        slots = received(1.0, 1.0, inventor=inventor)
        alone = value_and_slopes(objective, batch_of([0.5, 1.0], [0, 1]), slots, at=5)
        padded = value_and_slopes(
            objective, batch_of([0.5, 1.0, 9.0, 9.0], [0, 1, 0, 1], [1.0, 1.0, 0.0, 0.0]), slots, at=5
        )
        assert padded[0] == pytest.approx(alone[0])
        assert padded[1] == pytest.approx(alone[1])


@pytest.mark.parametrize("gone", ["label_term", "match_term"])
def test_noise_is_new_in_every_step(gone):
    inventor = generator(noise=3, by_noise=0.7)
    objective, slots = term(inventor, 3, **{gone: False}), received(1.0, 1.0, inventor=inventor)
    losses = {value_and_slopes(objective, batch_of([0.5, 1.0], [0, 1]), slots, at=step)[0] for step in range(5)}
    assert len(losses) == 5


def test_a_cohort_under_vmap_is_a_loop_over_its_clients():
    inventor = generator(noise=2, by_noise=0.5)
    objective, slots = term(inventor, 2), received(1.0, 1.0, (1.0, 1.0), inventor)
    data = [batch_of([0.5 * k, 1.0], [0, k % 2]) for k in range(3)]
    seeds, params = torch.arange(3), [{"f": number(1.0 + k), "h": number(0.5 - k)} for k in range(3)]

    def loss(batch, params, at):
        view = local_view(Weights(params, {}), params=params, received=slots, seed=at)
        return objective.loss(model().apply(Weights(params, {}), batch.x)[0], batch, view)

    wide = {name: leaf.requires_grad_() for name, leaf in stack(params).items()}
    together = torch.func.vmap(loss)(stack(data), wide, seeds)
    slopes = torch.autograd.grad(together.sum(), list(wide.values()))
    for k in range(3):
        value, alone = value_and_slopes(objective, data[k], slots, f=1.0 + k, h=0.5 - k, at=k)
        assert together[k].item() == pytest.approx(value)
        assert [slope[k].item() for slope in slopes] == pytest.approx(alone)


def test_labels_are_drawn_alike_among_the_known_ones():
    drawn = torch.bincount(labels_among(seed(1), 6000, number([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])), minlength=6)
    assert drawn[[0, 2, 5]].tolist() == [0, 0, 0]
    assert (drawn[[1, 3, 4]] - 2000).abs().max() < 4 * math.sqrt(6000 * (1 / 3) * (2 / 3))
    assert torch.unique(labels_among(seed(1), 50, number([0.0, 0.0, 1.0]))).tolist() == [2]


@pytest.mark.parametrize(("kind", "mean", "variance"), [("uniform", 0.5, 1 / 12), ("normal", 0.0, 1.0)])
def test_noise_is_of_its_kind_and_differs_from_seed_to_seed(kind, mean, variance):
    drawn = row_noise(seed(3), 400, 50, kind).to(F64)
    assert float(drawn.mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / drawn.numel()))
    assert float(drawn.var()) == pytest.approx(variance, rel=0.05)
    assert torch.equal(row_noise(seed(3), 7, 50, kind).to(F64), drawn[:7])
    assert not torch.equal(row_noise(seed(4), 7, 50, kind).to(F64), drawn[:7])


def test_the_term_waits_for_its_model_also_in_a_sum():
    loose = combine(cross_entropy(), generated_features(lambda _: generator(), noise=1))
    assert loose.needs == {Need.HEAD, Need.FEATURES}
    data, slots = batch_of([0.0], [0]), received(label_weight=1.0)
    with pytest.raises(FedstillError, match="bind it"):
        value_and_slopes(loose, data, slots)
    loss, _ = value_and_slopes(bound(loose, model()), data, slots)
    assert loss == pytest.approx(math.log(2.0) - math.log(0.75))


# FedGen's server: worked numbers of its card, and all steps of two rounds against plain torch.


NOISE, HIDDEN, CLIENTS = 5, 7, 3
COUNTS = [[4.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 9.0, 0.0]]  # nobody holds the last class
TRAINING = FeatureGenerator(noise=NOISE, batch_size=4, lr=3e-3)
HOW = GeneratorTraining(TRAINING)


def layers():
    return nn.Sequential(
        nn.Linear(NOISE + CLASSES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 6)
    )  # fmt: skip


MODEL = network()
GENERATOR = from_module(layers, input_shape=(NOISE + CLASSES,), check=False, name="tiny")


def round_with(counts=COUNTS, number=1):
    this = server_round(clients_models(MODEL, CLIENTS), MODEL, number=number)
    given = torch.tensor(counts, dtype=torch.float64)
    return dataclasses.replace(this, uploads=this.uploads._replace(label_counts=given), seed=seed_for(7, number))


def step_of(**changes):
    return train_generator(lambda _: GENERATOR, dataclasses.replace(HOW, **changes))


def prepared(step, this):
    return step.prepare(this.start, step.init(this.start), preparation_of(this))[1]


def played(step, rounds=1, **how):
    """The state after some rounds."""
    state = prepared(step, round_with())
    for at in range(1, rounds + 1):
        state = step.apply(round_with().start, state, round_with(number=at, **how))[1]
    return state


def own(state) -> Weights:
    return Weights(**state["feature_generator"]["weights"])


def by_hand(start: Weights, rounds, *, fresh=False, share_of=lambda share, losses: (share * losses).mean()):
    """Plain torch from the equations: an nn.Module, torch's Adam, a loop over clients and over pairs."""
    module = layers().double()
    module.load_state_dict({**start.params, **start.buffers})

    def adam(number):
        return torch.optim.Adam(module.parameters(), lr=3e-3 * 0.98 ** (number - 1), weight_decay=1e-2)

    optimizer = adam(1)
    for at in rounds:
        this = round_with(number=at)
        optimizer = adam(at) if fresh else optimizer
        optimizer.param_groups[0]["lr"] = 3e-3 * 0.98 ** (at - 1)
        asked = draw_requests(HOW, seen_labels(this.uploads.label_counts), seed_for(this.seed, "generator"), WIDE)
        started = np.array(COUNTS) + 1
        for z, y in zip(asked["z"], asked["y"], strict=True):
            features = module(torch.cat([z, torch.eye(CLASSES, dtype=torch.float64)[y]], 1))
            loss = torch.exp(-torch.stack([
                (z[i] - z[j]).square().mean() * (features[i] - features[j]).abs().mean()
                for i in range(len(z)) for j in range(len(z))
            ]).mean())  # fmt: skip
            for k in range(CLIENTS):
                params = rows(this.uploads.weights.params, k)
                logits = features @ params["head.weight"].T + params["head.bias"]
                share = torch.tensor([started[k, c] / started[:, c].sum() for c in y.tolist()])
                loss = loss + share_of(share, nn.functional.cross_entropy(logits, y, reduction="none"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return module.state_dict()


WIDE = torch.zeros((), dtype=torch.float64)


def assert_same(weights: Weights, wanted):
    for name, leaf in {**weights.params, **weights.buffers}.items():
        torch.testing.assert_close(leaf, wanted[name], rtol=1e-7, atol=1e-9, msg=name)


def test_shares_and_qualified_labels_are_those_of_the_card():
    """Card 12.5: A holds four of label 0, B two, nobody label 1."""
    counts = torch.tensor([[4.0, 0.0], [2.0, 0.0]])
    assert label_shares(counts).T.tolist() == [[0.625, 0.375], [0.5, 0.5]]
    assert seen_labels(counts).tolist() == [True, False]


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_requests_are_for_labels_that_somebody_holds_alike(kind):
    how = GeneratorTraining(dataclasses.replace(TRAINING, noise_kind=kind))
    asked = draw_requests(how, torch.tensor([True, False, True]), 3, WIDE)
    assert asked["z"].shape == (50, 4, NOISE)
    assert asked["z"].dtype == torch.float64
    assert (float(asked["z"].min()) >= 0.0) == (kind == "uniform")
    drawn = torch.bincount(asked["y"].flatten(), minlength=3)
    assert int(drawn[1]) == 0
    assert abs(int(drawn[0]) - 100) < 4 * np.sqrt(200 / 4)


def test_two_rounds_of_fifty_steps_are_those_of_plain_torch():
    """Adam and BatchNorm go on from round to round, the rate falls."""
    step = step_of()
    assert_same(own(played(step, 2)), by_hand(own(prepared(step, round_with())), (1, 2)))


def test_a_fresh_optimiser_each_round_is_an_option():
    step = step_of(generator=dataclasses.replace(TRAINING, keep_optimizer=False))
    state = played(step, 2)
    assert_same(own(state), by_hand(own(prepared(step, round_with())), (1, 2), fresh=True))
    assert state["feature_generator"]["optimizer"] == {}


def test_the_released_broadcast_takes_the_mean_of_both_factors():
    """There (B, 1) shares times (B,) losses make (B, B), whose mean is the product of the means."""

    def outer(share, losses):
        return (losses * share.reshape(-1, 1)).mean()

    step = step_of(spread=module_of("fedgen").mean_of_batch)
    wanted = by_hand(own(prepared(step, round_with())), (1,), share_of=outer)
    assert_same(own(played(step)), wanted)
    assert not torch.allclose(own(played(step_of())).params["0.weight"], wanted["0.weight"], atol=1e-6)


def test_the_generator_learns_what_the_heads_recognise():
    """The weighted cross-entropy starts near ln 3, that of heads which know nothing of the features."""
    step, this = step_of(generator=dataclasses.replace(TRAINING, diversity=0.1, lr=0.02)), round_with()
    asked = draw_requests(HOW, seen_labels(this.uploads.label_counts), 9, WIDE)
    z, y = asked["z"].flatten(0, 1), asked["y"].flatten()

    def loss(state):
        features = GENERATOR.apply(own(state), torch.cat([z, torch.eye(CLASSES, dtype=torch.float64)[y]], 1))[0].logits
        heads, share = this.uploads.weights.params, label_shares(this.uploads.label_counts)
        said = torch.einsum("bf,kcf->kbc", features, heads["head.weight"]) + heads["head.bias"].unsqueeze(1)
        chosen = said.log_softmax(-1)[:, torch.arange(len(y)), y]
        return -float((share[:, y] * chosen).sum(0).mean())

    assert loss(prepared(step, this)) > 0.8
    assert loss(played(step, 3)) < 0.1


def test_what_a_gpu_captures_serves_rounds_with_other_heads_labels_and_rates(monkeypatch):
    """A captured exchange without a GPU: the exchange itself, run again on static tensors."""

    class Replay:
        def __init__(self, game):
            self.replay = game._once

    def captured(game):
        game.graph = game.graph or Replay(game)
        return game.graph

    monkeypatch.setattr(turns.Turns, "_captured", captured)
    step, trainer = step_of(), round_with().trainer
    eager = static = prepared(step, round_with())
    trainer.engine.graphs = True
    for at, counts in ((1, COUNTS), (2, [[1.0, 0.0, 3.0]] * 3), (3, COUNTS)):
        this = round_with(counts, at)
        eager = step.apply(this.start, eager, this)[1]
        static = step.apply(this.start, static, dataclasses.replace(this, trainer=trainer))[1]
        assert_same(own(static), {**own(eager).params, **own(eager).buffers})
    assert len(trainer.engine.turns) == 1


def test_clients_hear_of_it_with_weight_zero_before_it_was_trained_and_then_ever_less():
    """a_t = max(1e-4, 10 * 0.98^(t - 1)): what is sent after round 1 is for round 2."""
    step = step_of(match_weight=0.0)
    assert step.broadcast(step.init(round_with().start)) == {}
    first = step.broadcast(prepared(step, round_with()))
    assert set(first) == {"generator", "labels", "label_weight", "match_weight"}
    assert (float(first["label_weight"]), first["labels"].tolist()) == (0.0, [0.0, 0.0, 0.0])
    after = step.broadcast(played(step, 2))
    assert float(after["label_weight"]) == pytest.approx(10 * 0.98**2)
    assert float(after["match_weight"]) == 0.0, "a part that is switched off stays off"
    assert HOW.strength(10.0, 569) > 1e-4 == HOW.strength(10.0, 570)


def test_labels_once_known_stay_known():
    step = step_of()
    state = played(step)
    assert step.broadcast(state)["labels"].tolist() == [1.0, 1.0, 0.0]
    later = step.apply(round_with().start, state, round_with([[0.0, 0.0, 5.0]] * 3, number=2))[1]
    assert step.broadcast(later)["labels"].tolist() == [1.0, 1.0, 1.0]


def test_a_round_whose_clients_hold_nothing_leaves_the_generator_as_it_is_and_its_weights_fall_on():
    """After round 5 clients hear of it with 10 * 0.98^5; a generator that was never trained stays silent."""
    step, empty = step_of(), round_with([[0.0] * 3] * 3, number=5)
    state = played(step)
    after = step.apply(empty.start, state, empty)[1]
    for slot in ("weights", "optimizer", "labels"):
        assert same_bits({slot: after[SLOT][slot]}, {slot: state[SLOT][slot]})
    assert [float(after[SLOT][slot]) for slot in ("label_weight", "match_weight")] == [pytest.approx(10 * 0.98**5)] * 2
    silent = prepared(step, empty)
    assert same_bits(step.apply(empty.start, silent, empty)[1], silent)


def test_the_model_passes_through_and_the_loss_is_reported():
    step, this = step_of(), round_with()
    candidate, _ = step.apply(this.start, prepared(step, this), this)
    assert candidate is this.start
    assert 0 < this.metrics["feature_generator_loss"] < 5
    assert step.stage is Stage.KEEP


def test_without_label_counts_all_clients_count_alike_and_all_classes_are_asked_for():
    step, this = step_of(class_weights="uniform"), round_with()
    this = dataclasses.replace(this, uploads=this.uploads._replace(label_counts=None))
    assert Need.LABEL_COUNTS_UPLOADED not in step.needs
    assert Need.LABEL_COUNTS_UPLOADED in step_of().needs
    found = step.apply(this.start, prepared(step, this), this)[1]
    alike = round_with([[1.0] * 3] * 3)
    wanted = step_of().apply(alike.start, prepared(step, alike), alike)[1]
    assert same_bits(found, wanted)
    assert step.broadcast(found)["labels"].tolist() == [1.0, 1.0, 1.0]


def test_a_later_phase_goes_on_with_the_generator_of_an_earlier_one_if_it_fits():
    step, this = step_of(), round_with()
    state = played(step)
    later = dataclasses.replace(preparation_of(this), round=11, seed=99)
    kept = step.prepare(this.start, state, later)[1]
    assert same_bits(own(kept), own(state))
    assert float(step.broadcast(kept)["label_weight"]) == pytest.approx(10 * 0.98**10)
    other = from_module(lambda: nn.Linear(NOISE + CLASSES, 6), input_shape=(NOISE + CLASSES,), check=False)
    fresh = train_generator(lambda _: other, HOW).prepare(this.start, state, later)[1]
    assert set(own(fresh).params) == {"weight", "bias"}
    assert float(step.broadcast(fresh)["label_weight"]) == 0.0


def test_a_phase_that_keeps_no_optimiser_does_not_start_with_an_earlier_ones():
    state, this = played(step_of()), round_with(number=2)
    fresh = step_of(generator=dataclasses.replace(TRAINING, keep_optimizer=False))
    kept = fresh.prepare(this.start, state, dataclasses.replace(preparation_of(this), round=2))[1]
    empty = {SLOT: {**kept[SLOT], "optimizer": {}}}
    found, wanted = (fresh.apply(this.start, one, this)[1] for one in (kept, empty))
    assert same_bits(found, wanted)
    assert not same_bits(own(found), own(step_of().apply(this.start, kept, this)[1]))


def test_an_upload_without_samples_spreads_nothing():
    step, this = step_of(), round_with()
    broken = {
        n: torch.cat([p[:2], torch.full_like(p[2:], float("nan"))]) for n, p in this.uploads.weights.params.items()
    }
    sizes = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    uploads = this.uploads._replace(size=sizes, weights=this.uploads.weights._replace(params=broken))
    found = step.apply(this.start, prepared(step, this), dataclasses.replace(this, uploads=uploads))[1]
    two = server_round(clients_models(MODEL, CLIENTS)[:2], MODEL)
    counts = torch.tensor(COUNTS[:2], dtype=torch.float64)
    two = dataclasses.replace(two, uploads=two.uploads._replace(label_counts=counts), seed=this.seed)
    assert same_bits(found, step.apply(this.start, prepared(step, this), two)[1])


def test_in_half_precision_the_diversity_is_of_full_precision(monkeypatch):
    seen = []

    def noted(x, z):
        seen.append((x.dtype, z.dtype))
        return diversity(x, z)

    monkeypatch.setattr(generator_training, "diversity", noted)
    half = GENERATOR.apply(own(prepared(step_of(), round_with())), torch.zeros(4, NOISE + CLASSES).double())[0]
    made = dataclasses.replace(GENERATOR, apply=lambda *_, **__: (half._replace(logits=half.logits.bfloat16()), {}))
    z = torch.zeros(4, NOISE, dtype=torch.bfloat16)
    scene = SimpleNamespace(
        drawn={"z": z, "y": torch.zeros(4, dtype=torch.int64)},
        given={"heads": {n: p.bfloat16() for n, p in round_with().uploads.weights.params.items()},
               "shares": torch.ones(CLIENTS, CLASSES)},
    )  # fmt: skip
    generator_player(MODEL, made, HOW).loss(None, scene)
    assert seen == [(torch.float32, torch.float32)]
