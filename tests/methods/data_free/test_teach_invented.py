"""FedDF on invented samples: a whole round against plain torch, and what its options promise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from server_rounds import CLASSES, FEATURES, clients_models, network, preparation_of
from server_rounds import server_round as plain_round
from torch import nn
from toy import furthest, same_bits

from fedstill.core.errors import FedstillError
from fedstill.core.tree import clone, flatten, unflatten
from fedstill.core.types import Need, Outlook, Tokenizer, Training
from fedstill.methods.data_free import inventing as invented
from fedstill.methods.data_free.inventing import diversity
from fedstill.methods.data_free.teach_invented import SLOT, Teaching, teach_invented
from fedstill.models import from_module
from fedstill.server.distill.targets import pool_targets

NOISE, BATCH = 4, 8
COUNTS = [[9.0, 3.0, 0.0], [1.0, 5.0, 0.0], [0.0, 2.0, 0.0]]


class SmallGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NOISE + CLASSES, 7), nn.BatchNorm1d(7), nn.Tanh())
        self.out = nn.Linear(7, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x))


GENERATOR = from_module(SmallGenerator, input_shape=(NOISE + CLASSES,), classes=FEATURES, check=False)


def teaching(generator_steps=3, student_steps=2, **options) -> Teaching:
    both = {"batch_size": BATCH, "weight_decay": 1e-3, "lr_decay": 0.5}
    how = {name: options.pop(name) for name in list(options) if name in Training.__dataclass_fields__}
    return Teaching(
        Training(steps=generator_steps, optimizer="adam", lr=0.01, **both),
        Training(steps=student_steps, lr=0.1, **{**both, **how}),
        noise=NOISE, **options,
    )  # fmt: skip


@dataclass
class Spy:
    """An engine that remembers what was played."""

    engine: Any
    played: list = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def take_turns(self, players, start, drawn, given, seed, **how):
        ((name, player),) = players.items()
        self.played.append((name, player.training, clone(drawn)))
        return self.engine.take_turns(players, start, drawn, given, seed, **how)


def round_of(models, *, net="mlp", counts=None, number=1):
    this = plain_round(models, network(net), number=number)
    counts = torch.tensor(COUNTS[: len(models)] if counts is None else counts, dtype=torch.float64)
    return replace(this, uploads=this.uploads._replace(label_counts=counts), trainer=Spy(this.trainer.engine))


def taught(how: Teaching, this, candidate=None):
    """-> (the student, the server's state, the state before)."""
    step = teach_invented(how, lambda _: GENERATOR)
    candidate = this.start if candidate is None else candidate
    _, first = step.prepare(candidate, step.init(candidate), preparation_of(this))
    learnt, state = step.apply(candidate, first, this)
    return learnt, state, first


def generator_of(state):
    return invented.generator_of(state, SLOT)


def models_of(net="mlp", count=3):
    return clients_models(network(net), count)


def test_probabilities_are_averaged_by_default_and_logits_on_request():
    """Card 13.4: logits (2, 0, 0) and (0, 1, 0)."""
    logits = torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]], dtype=torch.float64)
    assert pool_targets(logits, teaching().pool)[0].tolist() == pytest.approx([0.4995, 0.3413, 0.1592], abs=1e-4)
    assert pool_targets(logits, "logits")[0].tolist() == pytest.approx([0.5065, 0.3072, 0.1863], abs=1e-4)


def by_hand(models, first, played, *, pool):
    """The two phases in plain torch: modules, backward(), torch.optim; one teacher after the other."""
    generator = SmallGenerator().double()
    generator.load_state_dict({**first.params, **first.buffers})
    net = network()
    student = {name: leaf.clone().requires_grad_() for name, leaf in models[0].params.items()}

    def asked(z, y):
        return torch.cat([z, F.one_hot(y, CLASSES).double()], 1)

    def answers(x):
        return [net.apply(model, x)[0].logits for model in models]

    (_, _, drawn), (_, _, shown) = played
    adam = torch.optim.Adam(generator.parameters(), lr=0.01, weight_decay=1e-3)
    for z, y in zip(drawn["z"], drawn["y"], strict=True):
        adam.zero_grad()
        x = generator(asked(z, y))
        (diversity(x, z) + sum(F.cross_entropy(said, y) for said in answers(x)) / len(models)).backward()
        adam.step()
    generator.eval()
    sgd = torch.optim.SGD(student.values(), lr=0.1, weight_decay=1e-3)
    for z, y in zip(shown["z"], shown["y"], strict=True):
        sgd.zero_grad()
        x = generator(asked(z, y)).detach()
        said = torch.stack(answers(x))
        targets = said.softmax(-1).mean(0) if pool == "probabilities" else said.mean(0).softmax(-1)
        log_student = net.apply(models[0]._replace(params=student), x, training=True)[0].logits.log_softmax(-1)
        F.kl_div(log_student, targets, reduction="batchmean").backward()
        sgd.step()
    return generator, {name: leaf.detach() for name, leaf in student.items()}


@pytest.mark.parametrize("pool", ["probabilities", "logits"])
def test_a_round_is_what_plain_torch_makes_of_the_same_draws(pool):
    this = round_of(models := models_of())
    learnt, state, first = taught(teaching(generator_steps=4, student_steps=3, pool=pool), this)
    generator, student = by_hand(models, generator_of(first), this.trainer.played, pool=pool)
    for name, leaf in {**dict(generator.named_parameters()), **dict(generator.named_buffers())}.items():
        found = {**generator_of(state).params, **generator_of(state).buffers}[name]
        torch.testing.assert_close(found, leaf.detach(), rtol=1e-8, atol=1e-10)
    for name, leaf in student.items():
        torch.testing.assert_close(learnt.params[name], leaf, rtol=1e-8, atol=1e-10)
    assert furthest(learnt.params, models[0].params) > 1e-4


def test_no_step_of_the_student_is_the_candidate_and_nothing_is_asked_of_anybody():
    this = round_of(models_of())
    learnt, state, first = taught(teaching(student_steps=0), this)
    assert learnt is this.start
    assert state is first
    assert (this.trainer.played, this.metrics) == ([], {})


def test_teachers_that_are_the_student_leave_it_where_it_is():
    """Card 13.5: with BatchNorm in eval mode the gradient is 0."""
    models = models_of("norm", 1) * 3
    how = teaching(student_steps=5, weight_decay=0.0, batch_norm="frozen")
    learnt, _, _ = taught(how, this := round_of(models, net="norm"))
    assert furthest(learnt, this.start) < 1e-12
    assert this.metrics["distill_loss"] == pytest.approx(0.0, abs=1e-12)
    moved, _, _ = taught(replace(how, batch_norm="train"), round_of(models, net="norm"))
    assert furthest(moved.params, this.start.params) > 1e-4


@pytest.mark.parametrize(("policy", "kept"), [("train", False), ("frozen", True), ("restore", True)])
def test_batchnorm_statistics_become_those_of_invented_samples_only_in_train_mode(policy, kept):
    this = round_of(models_of("norm"), net="norm")
    learnt, _, _ = taught(teaching(batch_norm=policy), this)
    assert same_bits(learnt.buffers, this.start.buffers) == kept
    assert furthest(learnt.params, this.start.params) > 1e-5


def test_restored_statistics_come_after_training_in_train_mode():
    found = {}
    for policy in ("train", "restore"):
        found[policy], _, _ = taught(teaching(batch_norm=policy), round_of(models_of("norm"), net="norm"))
    assert same_bits(found["train"].params, found["restore"].params)


def test_while_the_student_learns_generator_and_teachers_stay():
    short, long = (taught(teaching(student_steps=n), round_of(models_of()))[1] for n in (1, 4))
    assert same_bits(short[SLOT], long[SLOT])
    this = round_of(models_of())
    before = clone(this.uploads.weights)
    _, state, first = taught(teaching(), this)
    assert same_bits(this.uploads.weights, before)
    assert not same_bits(state[SLOT], first[SLOT])


def test_the_generator_of_a_round_is_where_the_next_one_starts():
    this = round_of(models_of())
    step = teach_invented(teaching(), lambda _: GENERATOR)
    _, state = step.prepare(this.start, step.init(this.start), preparation_of(this))
    for number in (1, 2):
        before = generator_of(state)
        _, state = step.apply(this.start, state, replace(this, number=number, seed=number))
        assert furthest(generator_of(state).params, before.params) < 5 * 0.01  # Adam moves by a rate a step, at most
        assert furthest(generator_of(state).params, before.params) > 1e-3


def test_rates_fall_from_round_to_round_and_one_exchange_is_one_step():
    this = round_of(models_of(), number=3)
    taught(teaching(generator_steps=3, student_steps=2), this)
    (name, generator, drawn), (other, student, shown) = this.trainer.played
    assert (name, other) == ("generator", "student")
    assert (generator.optimizer, student.optimizer) == ("adam", "sgd")
    assert (generator.lr, student.lr) == (pytest.approx(0.01 / 4), pytest.approx(0.1 / 4))
    assert (generator.steps, len(drawn["z"]), student.steps, len(shown["z"])) == (1, 3, 1, 2)


def test_labels_come_in_the_cohorts_proportions_and_every_step_has_its_own_noise():
    """Counts 10, 10, 0 of the three classes: half of all labels each, none of the last."""
    this = round_of(models_of())
    taught(teaching(generator_steps=2, student_steps=2), this)
    for _, _, drawn in this.trainer.played:
        steps = len(drawn["y"])
        assert torch.bincount(drawn["y"].flatten(), minlength=3).tolist() == [4 * steps, 4 * steps, 0]
        assert drawn["z"].shape == (steps, BATCH, NOISE)
        assert len({float(row[0, 0]) for row in drawn["z"]}) == steps
    first, second = (drawn for _, _, drawn in this.trainer.played)
    assert not torch.equal(first["z"][0], second["z"][0])


def test_by_class_only_those_who_hold_a_class_teach_it():
    """The second client holds everything: it alone is heard, to 1e-6 of a count."""
    models = models_of(count=2)
    held = [[0.0, 0.0, 0.0], [40.0, 40.0, 40.0]]
    both, _, _ = taught(teaching(ensemble="class"), round_of(models, counts=held))
    alone = round_of([models[1]], counts=held[1:])
    wanted, _, _ = taught(teaching(), alone, candidate=models[0])
    assert furthest(both, wanted) < 1e-5
    alike, _, _ = taught(teaching(), round_of(models, counts=held))
    assert furthest(alike, wanted) > 1e-3


@pytest.mark.parametrize("pool", ["probabilities", "logits"])
def test_a_class_that_nobody_holds_is_taught_by_all_alike(pool):
    """COUNTS has none of the last class. Sure teachers that are the student still teach it nothing."""
    sure = [one._replace(params={n: 4 * p for n, p in one.params.items()}) for one in models_of(count=1) * 3]
    how = teaching(student_steps=5, weight_decay=0.0, labels="uniform", ensemble="class", pool=pool)
    learnt, _, _ = taught(how, this := round_of(sure))
    assert furthest(learnt, this.start) < 1e-6


def test_an_upload_without_samples_spreads_nothing():
    models = models_of(count=3)
    lost = models[2]._replace(params={n: torch.full_like(p, float("nan")) for n, p in models[2].params.items()})
    for how in (teaching(), teaching(ensemble="class", labels="uniform")):
        this = round_of([*models[:2], lost])
        this = replace(this, uploads=this.uploads._replace(size=torch.tensor([1.0, 1.0, 0.0])))
        assert same_bits(taught(how, this)[0], taught(how, round_of(models[:2]))[0])
        gone = replace(this, uploads=this.uploads._replace(size=torch.zeros(3)))
        assert taught(how, gone)[0] is gone.start


def test_a_later_phase_goes_on_with_the_generator_that_it_finds():
    this = round_of(models_of())
    _, state, first = taught(teaching(), this)
    later = replace(preparation_of(this), round=9, seed=99)
    kept = teach_invented(teaching(), lambda _: GENERATOR).prepare(this.start, state, later)[1]
    assert same_bits(kept, state)
    assert not same_bits(kept, first)


def test_where_noise_has_left_no_count_all_teachers_and_classes_count_alike():
    none = [[0.0] * CLASSES] * 3
    found, wanted = (
        taught(how, round_of(models_of(), counts=none))[0]
        for how in (teaching(ensemble="class"), teaching(labels="uniform"))
    )
    assert same_bits(found, wanted)


def test_the_generator_learns_to_be_recognised_and_diversity_pulls_the_other_way():
    """Mean cross-entropy of teachers of one mind on new samples, and how alike these are."""
    losses, alike = {}, {}
    for lam_cls, lam_dis in ((1.0, 0.0), (0.0, 1.0)):
        this = round_of(models := models_of(count=1) * 3)
        how = teaching(generator_steps=60, student_steps=1, lam_cls=lam_cls, lam_dis=lam_dis)
        _, state, first = taught(how, this)
        for when, kept in (("before", first), ("after", state)):
            z = torch.randn(30, NOISE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            y = torch.arange(30) % 2
            x = GENERATOR.apply(generator_of(kept), torch.cat([z, F.one_hot(y, CLASSES).double()], 1))[0].logits
            said = [network().apply(model, x)[0].logits for model in models]
            losses[lam_cls, when] = sum(float(F.cross_entropy(one, y)) for one in said) / len(said)
            alike[lam_cls, when] = float(diversity(x, z))
    assert losses[1.0, "after"] < losses[1.0, "before"] - 0.1
    assert alike[0.0, "after"] < alike[0.0, "before"] - 0.05
    assert losses[0.0, "after"] > losses[1.0, "after"]


def test_ten_samples_of_each_class_are_shown_of_the_generator_as_it_is_also_after_a_checkpoint():
    step, (_, state, _) = teach_invented(teaching(), lambda _: GENERATOR), taught(teaching(), round_of(models_of()))
    assert "samples" not in step.init(models_of()[0])
    kept = state["samples"]
    assert torch.bincount(kept["y"]).tolist() == [10] * CLASSES
    assert kept["x"].shape == (10 * CLASSES, FEATURES)
    back = generator_of(unflatten(flatten(state)))
    assert same_bits(back, generator_of(state))


def test_the_model_before_the_lesson_is_left_to_be_looked_at_and_losses_are_reported():
    this = round_of(models_of())
    taught(teaching(), this)
    assert this.models == {"aggregated": this.start}
    assert set(this.metrics) == {"teaching_generator_loss", "distill_loss"}
    assert all(value > 0 for value in this.metrics.values())


def test_what_it_needs_is_declared_and_what_it_cannot_do_is_refused():
    step, this = teach_invented(teaching(), lambda _: GENERATOR), round_of(models_of())
    assert step.needs == {Need.LABEL_COUNTS_UPLOADED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    with pytest.raises(FedstillError, match="not prepared"):
        step.apply(this.start, step.init(this.start), this)
    with pytest.raises(FedstillError, match="invents numbers, not words"):
        step.check(Outlook(1, None, Tokenizer("", 8, 20, mask=4, first_word=5)))


def test_without_label_counts_all_classes_are_asked_for_alike():
    how = teaching(generator_steps=3, student_steps=3, labels="uniform")
    this = round_of(models_of())
    this = replace(this, uploads=this.uploads._replace(label_counts=None))
    taught(how, this)
    assert Need.LABEL_COUNTS_UPLOADED not in how.needs
    assert Need.LABEL_COUNTS_UPLOADED in replace(how, ensemble="class").needs
    for _, _, drawn in this.trainer.played:
        assert torch.bincount(drawn["y"].flatten()).tolist() == [8, 8, 8]


def test_the_generator_has_the_precision_of_the_candidate():
    this = round_of(models_of())
    first = teach_invented(teaching(), lambda _: GENERATOR).prepare(this.start, {}, preparation_of(this))[1]
    assert {leaf.dtype for leaf in generator_of(first).params.values()} == {torch.float64}
