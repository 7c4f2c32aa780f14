"""FedFTG's server step: the card's worked numbers, what leaves the model as it is, and what each option changes."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hard_rounds import (
    CLASSES,
    COUNTS,
    FEATURES,
    NOISE,
    contest,
    features_for,
    generator_for,
    hard_round,
    models_of,
    network,
    play,
)
from papers import module_of
from server_rounds import preparation_of
from torch import nn
from toy import furthest, same_bits

from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten, unflatten
from fedstill.core.types import Need, Outlook, Tokenizer, Weights
from fedstill.engine import turns
from fedstill.methods.data_free.generators import build_generator
from fedstill.methods.data_free.hard_samples import (
    RIGHT,
    apart,
    discrepancy,
    ensemble_names,
    forward_kl_per_class,
    hard_samples,
    recognition,
)
from fedstill.methods.data_free.inventing import asked_for
from fedstill.models import build_model, from_module
from fedstill.server.distill.targets import mix

paper = module_of("fedftg")
S = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
T = torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]], dtype=torch.float64)
SHARE = torch.tensor([[0.75], [0.25]], dtype=torch.float64)


def test_the_ensemble_and_its_losses_are_those_of_the_card():
    """Card 14.7."""
    blend = mix(torch.softmax(T, -1), SHARE)
    assert blend[0].tolist() == pytest.approx([0.643225, 0.223909, 0.132866], abs=1e-6)
    assert float(discrepancy("forward_kl", S, T, SHARE)) == pytest.approx(0.154235, abs=1e-6)
    assert float(discrepancy("reverse_kl", S, T, SHARE)) == pytest.approx(0.176081, abs=1e-6)
    assert apart("l1", S, T).flatten().tolist() == pytest.approx([2 / 3, 1.0])
    assert float(discrepancy("l1", S, T, SHARE)) == pytest.approx(0.75)
    assert apart("mse", S, T).flatten().tolist() == pytest.approx([2 / 3, 1.0])
    assert ensemble_names(T, SHARE).tolist() == [0]
    assert ensemble_names(T, SHARE.flip(0)).tolist() == [1]


def test_the_students_gradient_is_the_cards_and_a_kth_of_it_that_of_the_released_loss():
    """Card 14.7: (.022016, .020819, -.042835); the code minimises -mean log softmax(s) mix = 0.299082 instead."""

    def gradient(loss):
        s = S.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(s), s)
        return found[0]

    whole = gradient(lambda s: discrepancy("forward_kl", s, T, SHARE))
    assert whole.tolist() == pytest.approx([0.022016, 0.020819, -0.042835], abs=1e-6)
    scaled = gradient(lambda s: forward_kl_per_class(s, T, SHARE))
    torch.testing.assert_close(3 * scaled, whole)

    def released(s):
        return -(torch.log_softmax(s, -1) * (SHARE.unsqueeze(-1) * torch.softmax(T, -1)).sum(0)).mean()

    assert float(released(S)) == pytest.approx(0.299082, abs=1e-6)
    torch.testing.assert_close(scaled, gradient(released))


def test_the_cross_entropy_counts_sample_by_sample_or_client_by_client():
    """Teacher 1 gives (ln 2, ln 4), teacher 2 (ln 4, ln 2); shares (1, 0) and (0, 1) take ln 2 both times."""
    half, quarter = [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], [[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]
    said = torch.tensor([half, quarter], dtype=torch.float64).log()
    y, share = torch.tensor([0, 1]), torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert float(recognition(said, y, share) / torch.tensor(2.0).log()) == pytest.approx(1.0)
    assert float(paper.recognition_of_clients(said, y, share) / torch.tensor(2.0).log()) == pytest.approx(1.5)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "mse"])
def test_teachers_who_equal_the_student_leave_it_as_it_is(one_by_one, kind):
    model, still = network("norm"), {"batch_norm": "frozen", "weight_decay": 0.0}
    rules = contest(one_by_one=one_by_one, lesson=partial(discrepancy, kind), student=still)
    played = play(rules, net=model, models=models_of(model, 1) * 3)
    assert furthest(played.learnt, played.candidate) < 1e-12
    assert abs(played.round.metrics["student_loss"]) < 1e-12
    assert furthest(played.generator(), played.generator("before")) > 1e-3


def test_a_client_that_comes_alone_teaches_its_own_average_nothing():
    played = play(contest(student={"weight_decay": 0.0}), models=models_of(network(), 1))
    assert furthest(played.learnt, played.candidate) < 1e-12
    assert (
        furthest(play(contest(student={"weight_decay": 0.1}), models=models_of(network(), 1)).learnt, played.candidate)
        > 1e-4
    )


def test_one_client_alone_is_the_same_in_turn_and_jointly():
    alone = models_of(network(), 1)
    each, joint = (
        play(contest(one_by_one=one_by_one, generator={"steps": 2}), models=alone) for one_by_one in (True, False)
    )
    assert same_bits(each.generator(), joint.generator())
    several = [play(contest(one_by_one=one_by_one)) for one_by_one in (True, False)]
    assert furthest(several[0].generator(), several[1].generator()) > 1e-3


def features_of_inputs(model):
    """A generator of inputs whose values have no bounds."""
    return build_generator("dense", shape=(FEATURES,), classes=CLASSES, noise=NOISE)


def hardness(played, when):
    """Mean of sum_k a_k mean_c |s_c - t_kc| on what a generator invents in train mode, for many z and y."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(300, NOISE, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (300,), generator=generator)
    made, net = features_of_inputs(played.round.model), played.round.model
    x = made.apply(played.generator(when), asked_for(z, y, CLASSES), training=True)[0].logits
    counts = torch.tensor(COUNTS, dtype=torch.float64)
    gaps = [
        (net.apply(played.candidate, x)[0].logits - net.apply(one, x)[0].logits).abs().mean(1)
        for one in models_of(net)
    ]  # fmt: skip
    return float(sum(gap * (counts / counts.sum(0))[k, y] for k, gap in enumerate(gaps)).mean())


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_generators_turn_makes_samples_harder(one_by_one):
    how = {"one_by_one": one_by_one, "iterations": 8, "student": {"steps": 0}}
    played = play(contest(**how, generator={"lam_cls": 0.0, "lam_dis": 0.0}), made=features_of_inputs)
    assert same_bits(played.learnt, played.candidate)
    assert hardness(played, "after") > 2 * hardness(played, "before")
    easy = play(contest(**how, hardness=None, generator={"lam_dis": 0.0}), made=features_of_inputs)
    assert hardness(easy, "after") < hardness(played, "after")


def test_the_students_turn_closes_the_gap():
    """Teachers agree, and are surer than the student, who starts at 5/9 of their head. The generator does not move."""
    net = network()
    model = models_of(net, 1)[0]
    sure, unsure = (
        model._replace(params={n: p * (scale if n.startswith("head.") else 1.0) for n, p in model.params.items()})
        for scale in (9.0, -3.0)
    )
    rules = {"generator": {"steps": 0}, "lesson": partial(discrepancy, "forward_kl"), "iterations": 10}
    learning = {"weight_decay": 0.0, "lr": 0.5}
    # the average of 9, 9 and -3 is 5 times the head; the third client has no sample of any class, and does not teach
    how = {"models": [sure, sure, unsure], "counts": [[1.0] * 3, [1.0] * 3, [0.0] * 3]}
    first, last = (play(contest(**rules, student={**learning, "steps": steps}), **how) for steps in (1, 30))
    assert last.round.metrics["student_loss"] < 0.5 * first.round.metrics["student_loss"]
    assert same_bits(last.generator(), last.generator("before"))


def test_the_student_learns_in_train_mode_frozen_or_gets_its_statistics_back():
    played = {mode: play(contest(student={"batch_norm": mode}), net="norm") for mode in ("train", "frozen", "restore")}
    played["reestimate"] = play(contest(statistics=paper.fresh_statistics), net="norm")
    start = played["train"].candidate
    assert furthest(played["train"].learnt.buffers, start.buffers) > 0.05
    assert RIGHT not in played["train"].learnt.buffers
    for mode in ("frozen", "restore"):
        assert same_bits(played[mode].learnt.buffers, start.buffers)
    assert same_bits(played["restore"].learnt.params, played["train"].learnt.params)
    assert same_bits(played["reestimate"].learnt.params, played["train"].learnt.params)
    assert furthest(played["frozen"].learnt.params, played["train"].learnt.params) > 1e-6


def test_statistics_taken_anew_are_those_of_all_samples_of_the_round():
    played = play(contest(statistics=paper.fresh_statistics), net="norm")
    z, y = played.drawn["z"].flatten(0, 1), played.drawn["y"].flatten()
    x = generator_for(network()).apply(played.generator(), asked_for(z, y, CLASSES))[0].logits
    hidden = x @ played.learnt.params["body.0.weight"].T
    torch.testing.assert_close(played.learnt.buffers["body.1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(played.learnt.buffers["body.1.running_var"], hidden.var(0))
    plain = network().init(0)
    assert paper.fresh_statistics(network(), plain, x, 0) is plain.buffers


def test_features_are_invented_for_the_last_layer_and_only_it_moves():
    """The clients' extractors are never run: they may hold NaN."""
    net = network("norm")
    models = models_of(net)
    played = play(contest(input="feature"), net=net, models=models)
    body = {name for name in played.candidate.params if not name.startswith("head.")}
    assert all(torch.equal(played.learnt.params[name], played.candidate.params[name]) for name in body)
    assert same_bits(played.learnt.buffers, played.candidate.buffers)
    assert furthest(played.learnt.params, played.candidate.params) > 1e-5
    spoiled = [
        Weights({n: torch.full_like(p, float("nan")) if n in body else p for n, p in one.params.items()}, one.buffers)
        for one in models
    ]
    again = play(contest(input="feature"), net=net, models=spoiled)
    assert torch.equal(again.learnt.params["head.weight"], played.learnt.params["head.weight"])
    assert "samples" not in played.state
    assert Need.HEAD in hard_samples(generator_for, contest(input="feature")).needs


def test_labels_come_in_the_cohorts_proportions_and_absent_classes_are_never_asked_for():
    played = play(contest(iterations=5), counts=[[4.0, 0.0, 1.0], [3.0, 0.0, 2.0], [3.0, 0.0, 2.0]])
    assert torch.bincount(played.drawn["y"].flatten(), minlength=3).tolist() == [20, 0, 10]
    assert played.drawn["y"].shape == (5, 6)
    share = played.round.trainer.games[0][3]["share"]
    torch.testing.assert_close(share[:, 0], torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64), atol=1e-6, rtol=0)
    assert share[:, 1].tolist() == [1 / 3] * 3
    even = play(contest(labels="uniform", ensemble="uniform"), counts=[[4.0, 0.0, 1.0]] * 3)
    assert torch.bincount(even.drawn["y"].flatten()).tolist() == [6, 6, 6]
    alike = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(even.round.trainer.games[0][3]["share"], alike)


def test_without_any_label_count_classes_and_clients_count_alike():
    nothing = play(contest(), counts=[[0.0] * 3] * 3)
    even = play(contest(labels="uniform", ensemble="uniform"))
    assert same_bits(nothing.learnt, even.learnt)
    assert furthest(nothing.learnt, nothing.candidate) > 1e-6


def test_label_counts_are_declared_only_where_they_are_looked_at():
    always = {Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    assert hard_samples(generator_for, contest()).needs == always | {Need.LABEL_COUNTS_UPLOADED}
    for rules in (contest(labels="uniform"), contest(ensemble="uniform")):
        assert Need.LABEL_COUNTS_UPLOADED in hard_samples(generator_for, rules).needs
    assert hard_samples(generator_for, contest(labels="uniform", ensemble="uniform")).needs == always


def test_a_client_without_samples_is_no_teacher():
    models = models_of(network(), 4)
    lost = models[3]._replace(params={n: torch.full_like(p, float("nan")) for n, p in models[3].params.items()})
    counts = [*COUNTS, [9.0, 9.0, 9.0]]
    found = play(contest(), models=[*models[:3], lost], counts=counts, sizes=[1.0, 1.0, 1.0, 0.0])
    assert same_bits(found.learnt, play(contest(), models=models[:3]).learnt)


def test_optimisers_and_rates_are_the_papers_and_fall_from_round_to_round():
    played = play(
        contest(generator={"lr": 0.01, "lr_decay": 0.5}, student={"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.25}),
        number=3,
    )
    generator, student = (played.players[name].training for name in ("generator", "student"))
    assert (generator.optimizer, generator.lr, generator.weight_decay) == ("adam", 0.0025, 0.0)
    assert (student.optimizer, student.lr, student.weight_decay, student.momentum) == ("sgd", 0.025, 0.25, 0.0)
    assert (generator.steps, student.steps) == (3, 2)  # one for each client
    assert play(contest(one_by_one=False, generator={"steps": 2})).players["generator"].training.steps == 2


def test_teachers_answer_once_for_all_steps_of_the_student(monkeypatch):
    """3 exchanges: the generator asks 3 clients in turn, the student all of them once."""
    asked = []
    this = hard_round(models_of(network()), network())
    engine = this.trainer.engine

    def each(weights, x, plain=engine._each):
        asked.append(len(next(iter(weights.params.values()))))
        return plain(weights, x)

    monkeypatch.setattr(engine, "_each", each)
    step = hard_samples(generator_for, contest(student={"steps": 7}))
    _, state = step.prepare(this.start, step.init(this.start), preparation_of(this))
    step.apply(this.start, state, this)
    assert asked == [1, 1, 1, 3] * 3


@pytest.mark.parametrize("options", [{}, {"one_by_one": False}, {"input": "feature"}], ids=str)
def test_an_exchange_that_is_captured_once_serves_later_rounds(monkeypatch, options):
    """What a GPU replays: the same functions on the same tensors, with other teachers, labels and rates."""

    def captured(self):
        self.graph = self.graph or SimpleNamespace(replay=self._once)
        return self.graph

    monkeypatch.setattr(turns.Turns, "_captured", captured)
    rules = contest(**options, generator={"lr_decay": 0.5}, student={"lr_decay": 0.5})
    step = hard_samples(features_for if options.get("input") else generator_for, rules)
    found = []
    for graphs in (False, True):
        first, second = (hard_round(models_of(network()), network(), number=number) for number in (1, 2))
        second.uploads.label_counts[:] = torch.tensor(COUNTS).flip(0)
        model, engine = first.model, first.trainer.engine
        engine.graphs = graphs
        _, state = step.prepare(first.start, step.init(first.start), preparation_of(first))
        learnt, state = step.apply(first.start, state, first)
        found.append(step.apply(learnt, state, dataclasses.replace(second, model=model, trainer=engine))[0])
        assert len(engine.turns) == 1
    assert furthest(*found) < 1e-9


def test_it_reports_how_many_samples_the_ensemble_names_as_asked():
    """Teachers that always say class 1, which is a third of what is asked for."""
    net = network()
    models = [
        one._replace(params={**one.params, "head.bias": torch.tensor([0.0, 1e4, 0.0], dtype=torch.float64)})
        for one in models_of(net)
    ]
    played = play(contest(labels="uniform"), models=models)
    assert played.round.metrics["samples_right"] == pytest.approx(1 / 3)
    for held, share in (([1.0, 1.0, 0.0], 1 / 2), ([1.0, 0.0, 1.0], 0.0)):
        some = play(contest(labels="uniform"), models=models, counts=[held] * 3)
        assert some.round.metrics["samples_right"] == pytest.approx(share), "of classes that somebody holds"
    assert set(played.round.metrics) == {"generator_loss", "student_loss", "samples_right"}
    assert same_bits(played.round.models["aggregated"], played.candidate)


def test_the_generator_lives_on_from_round_to_round_and_shows_what_it_invents():
    first = play(contest())
    kept = unflatten(flatten(first.state))  # as a checkpoint writes and reads it
    second = play(contest(), state=kept)
    assert furthest(second.generator(), first.generator()) > 1e-3
    assert not same_bits(second.learnt, first.learnt)
    samples, later = kept["samples"], second.state["samples"]
    assert samples["x"].shape == (10 * CLASSES, FEATURES)
    assert torch.bincount(samples["y"]).tolist() == [10] * CLASSES
    assert furthest({"x": samples["x"]}, {"x": later["x"]}) > 1e-3
    assert "samples" not in hard_samples(generator_for, contest()).init(first.candidate)


def test_a_later_phase_goes_on_with_the_generator_that_it_finds_if_it_fits():
    first = play(contest())
    step, preparation = hard_samples(generator_for, contest()), preparation_of(first.round)
    _, state = step.prepare(first.candidate, first.state, preparation)
    assert same_bits(state["hard_generator"], first.state["hard_generator"])
    other = {**first.state, "hard_generator": {"params": {"w": torch.zeros(2)}, "buffers": {}}}
    _, state = step.prepare(first.candidate, other, preparation)
    assert same_bits(state["hard_generator"], first.before["hard_generator"])


def test_no_iteration_returns_the_candidate_without_asking_anybody():
    played = play(contest(iterations=0))
    assert played.learnt is played.candidate
    assert played.round.trainer.games == []
    assert played.state == {"hard_generator": {}}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def test_dropout_is_live_for_the_student_alone_and_a_function_of_the_seed():
    net = from_module(Dropped, input_shape=(FEATURES,), classes=CLASSES)
    before = torch.random.get_rng_state()
    first, again = play(contest(), net=net), play(contest(), net=net)
    assert same_bits(first.learnt, again.learnt)
    assert torch.equal(torch.random.get_rng_state(), before)
    live, still = (
        play(contest(iterations=1, student={"steps": 1, "batch_norm": mode}), net=net) for mode in ("train", "frozen")
    )
    assert same_bits(live.generator(), still.generator())
    assert furthest(live.learnt, still.learnt) > 1e-5


def test_text_is_refused_with_what_to_do():
    step = hard_samples(generator_for, contest())
    with pytest.raises(FedstillError, match=r"numbers, not words: .*method\.input = 'feature'"):
        step.check(Outlook(1, None, Tokenizer("", 6, 20, mask=4, first_word=5)))
    hard_samples(generator_for, contest(input="feature")).check(Outlook(1, None, Tokenizer("", 6, 20, 4, 5)))
    small = {"layers": 1, "hidden": 8, "heads": 2, "inner": 8, "positions": 6}
    text = build_model("bert", input_shape=(6,), classes=CLASSES, vocabulary=20, **small)
    this = hard_round(models_of(network()), network())
    with pytest.raises(FedstillError, match="numbers, not words"):
        step.prepare(this.start, {}, dataclasses.replace(preparation_of(this), model=text))


def test_what_cannot_be_played_is_one_line_with_its_cure():
    this = hard_round(models_of(network()), network())
    step, preparation = hard_samples(generator_for, contest()), preparation_of(this)
    with pytest.raises(FedstillError, match="call its `prepare`"):
        step.apply(this.start, step.init(this.start), this)
    unknown = dataclasses.replace(network(), input_shape=())
    with pytest.raises(FedstillError, match="make it with from_module"):
        step.prepare(this.start, {}, dataclasses.replace(preparation, model=unknown))
    tied = dataclasses.replace(network(), head_names=())
    with pytest.raises(FedstillError, match="another layer shares its parameters"):
        hard_samples(generator_for, contest(input="feature")).prepare(
            this.start, {}, dataclasses.replace(preparation, model=tied)
        )


# BatchNorm's statistics taken anew on invented samples: in float32, of any size, with any momentum.


class Normed(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2, momentum=momentum), nn.Linear(2, CLASSES)

    def forward(self, x):
        return self.head(self.norm(x))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None, 0.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_statistics_of_any_size_are_taken_anew_in_float32_whatever_the_momentum(momentum, scale):
    """A layer with momentum 0 never moves them: it keeps its own."""
    net = from_module(lambda: Normed(momentum), input_shape=(2,), classes=CLASSES, check=False)
    x = scale * (1 + torch.randn(500, 2, generator=torch.Generator().manual_seed(0)))
    before = net.init(0)
    before.buffers["norm.num_batches_tracked"] += 10**6  # without a momentum the next batch would count a millionth
    found = paper.fresh_statistics(net, before, x, 0)
    mean, var = (torch.zeros(2), torch.ones(2)) if momentum == 0.0 else (x.mean(0), x.var(0))
    torch.testing.assert_close(found["norm.running_mean"], mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(found["norm.running_var"], var, rtol=1e-5, atol=0)
