"""Pre-training on the server: what changes, what is kept, what goes on where it stopped."""

import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from pretraining_cases import (
    BRIEF,
    CLASSES,
    SIDE,
    UNLABELED,
    net,
    picture_federation,
    pretext,
    pretrained,
    run,
    sent_first,
)
from torch import nn

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import threads
from fedstill.core.tree import flatten
from fedstill.core.types import Method, Phase, Stage, Training
from fedstill.engine import Engine
from fedstill.local.terms import cross_entropy
from fedstill.loop.callbacks import Callback
from fedstill.methods.pretraining.words import next_words
from fedstill.models import build_model, from_module
from fedstill.server.aggregate import average
from fedstill.server.pretrain import Pretext, _fingerprint, digest, pretrain
from fedstill.storage import cache as kept_results
from fedstill.storage.cache import Cache

HEAD = {"head.weight", "head.bias"}


def same(found, wanted, names=None):
    found, wanted = flatten(found), flatten(wanted)
    return all(torch.equal(found[name], wanted[name]) for name in names or wanted)


def body(weights):
    """The extractor: all but the head; counters of batches too."""
    return {name: leaf for name, leaf in flatten(weights).items() if "head." not in name}


class Stops(Callback):
    """Pulls the plug after so many epochs."""

    def __init__(self, after):
        self.after, self.lines = after, []

    def on_prepare(self, what, share):
        self.lines.append((what, share))
        if len(self.lines) == self.after:
            raise KeyboardInterrupt


def test_the_first_cohort_gets_a_trained_extractor_and_the_runs_own_random_head():
    """Local training at rate 0: what is sent in round 1 comes back, but for BatchNorm's statistics."""
    fresh = net().init(seed_for(0, "model"))
    weights, row = sent_first(pretrained())
    changed = {name for name in fresh.params if not torch.equal(fresh.params[name], weights.params[name])}
    assert changed == {"body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"}
    assert row["prepare/simclr_epochs"] == 3
    assert row["prepare/simclr_loss"] > 0
    assert row["bytes_prepared"] == 0  # nobody was asked


def test_statistics_of_batchnorm_come_with_the_extractor():
    seen = {}

    def apply(candidate, state, round):
        seen.update(round.start.buffers)
        return candidate, state

    method = pretrained()
    run(replace(method, aggregate=replace(method.aggregate, apply=apply)))
    # 3 epochs of 2 batches (the third, of 5 rows, is left out), two views each
    assert int(seen["body.1.num_batches_tracked"]) == 3 * (UNLABELED // 8) * 2
    assert bool((seen["body.1.running_mean"] != 0).all())


def test_zero_epochs_change_no_bit():
    plain = Method(cross_entropy(), average())
    assert same(run(pretrained(task=pretext(replace(BRIEF, epochs=0)))).weights, run(plain).weights)


def test_another_run_and_another_method_take_the_same_bits_from_the_cache(tmp_path):
    cache = Cache("prepared", tmp_path)
    first, row = sent_first(pretrained(), cache=cache)
    assert row["prepare/simclr_epochs"] == 3
    again, later = sent_first(pretrained(), cache=cache)
    assert later["prepare/simclr_epochs"] == 0
    assert later["prepare/simclr_loss"] == row["prepare/simclr_loss"]
    assert same(again, first)
    # another method and another engine, with the same extractor
    other = replace(pretrained(), objective=replace(cross_entropy(), risk="other"))
    found, third = sent_first(other, cache=cache, engine="batched")
    assert third["prepare/simclr_epochs"] == 0
    names = [name for name in body(first) if "running" not in name]  # local training moves the statistics
    assert same(found, first, names)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"federation": picture_federation(seed=1)},
        {"federation": picture_federation(mean=(0.4, 0.5, 0.5))},
        {"method": pretrained(task=pretext(replace(BRIEF, lr=2e-2)))},
        {"method": pretrained(task=pretext(temperature=0.1))},
        {"method": pretrained(seed=4)},
    ],
    ids=["seed", "images", "normalisation", "rate", "temperature", "pretrain_seed"],
)
def test_whatever_the_result_follows_from_makes_it_another_result(tmp_path, changes):
    cache = Cache("prepared", tmp_path)
    sent_first(pretrained(), cache=cache)
    changes = dict(changes)
    _, row = sent_first(changes.pop("method", pretrained()), cache=cache, **changes)
    assert row["prepare/simclr_epochs"] == 3


def test_a_seed_of_its_own_lets_runs_of_several_seeds_share_one_extractor(tmp_path):
    cache = Cache("prepared", tmp_path)
    first, _ = sent_first(pretrained(seed=4), cache=cache, seed=0)
    second, row = sent_first(pretrained(seed=4), cache=cache, seed=1)
    assert row["prepare/simclr_epochs"] == 0
    assert torch.equal(first.params["body.0.weight"], second.params["body.0.weight"])
    assert not torch.equal(first.params["head.weight"], second.params["head.weight"])


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_interrupted_training_goes_on_and_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, after):
    whole, row = sent_first(pretrained())
    cache = Cache("prepared", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(pretrained(), cache=cache, callbacks=[Stops(after)])  # long before it is time to save
    listener = Stops(0)
    resumed, again = sent_first(pretrained(), cache=cache, callbacks=[listener])
    assert again["prepare/simclr_epochs"] == 3 - after
    assert f"goes on after epoch {after}" in listener.lines[0][0]
    assert again["prepare/simclr_loss"] == row["prepare/simclr_loss"]
    assert same(resumed, whole)
    assert len(list(tmp_path.iterdir())) == 1  # what was unfinished is gone


def kept_on_the_way(monkeypatch, tmp_path, save_seconds):
    """The epochs after which an unfinished training was saved."""
    saved, save = [], Cache.save

    def listening(self, identity, tree):
        saved.extend([int(tree["epochs"])] if "epochs" in tree else [])
        save(self, identity, tree)

    monkeypatch.setattr(Cache, "save", listening)
    run(pretrained(save_seconds=save_seconds), cache=Cache("prepared", tmp_path))
    return saved


def test_an_unfinished_training_is_saved_when_it_is_time_and_not_before(tmp_path, monkeypatch):
    assert kept_on_the_way(monkeypatch, tmp_path / "often", 0.0) == [1, 2]
    assert kept_on_the_way(monkeypatch, tmp_path / "seldom", 30.0) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory"), SystemExit(1)], ids=repr)
def test_whatever_ends_it_in_the_middle_of_an_epoch_the_last_whole_epoch_is_kept(tmp_path, monkeypatch, error):
    whole, _ = sent_first(pretrained())
    fit, calls = Engine.fit, []

    def breaking(self, *args, **how):
        fitted = fit(self, *args, **how)
        calls.append(fitted)
        if len(calls) == 2:
            raise error
        return fitted

    monkeypatch.setattr(Engine, "fit", breaking)
    with pytest.raises(type(error)):
        run(pretrained(), cache=Cache("prepared", tmp_path))
    monkeypatch.undo()
    resumed, again = sent_first(pretrained(), cache=Cache("prepared", tmp_path))
    assert again["prepare/simclr_epochs"] == 2
    assert same(resumed, whole)


def test_a_training_that_would_break_again_is_not_kept(tmp_path, monkeypatch):
    fit, losses = Engine.fit, iter([1.0, float("nan")])

    def diverging(self, *args, **how):
        return fit(self, *args, **how)._replace(loss=torch.tensor(next(losses)))

    monkeypatch.setattr(Engine, "fit", diverging)
    with pytest.raises(FedstillError, match=r"loss of epoch 2 is nan: use a lower training\.lr"):
        run(pretrained(), cache=Cache("prepared", tmp_path))
    assert not list((tmp_path / "prepared").iterdir())


def test_a_run_waits_for_the_extractor_that_another_one_trains_and_takes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_results, "PATIENCE", 0.001)
    asked = []
    monkeypatch.setattr(Cache, "load", lambda self, identity: asked.append(identity))
    first, _ = sent_first(pretrained(), cache=Cache("prepared", tmp_path / "first"))
    monkeypatch.undo()
    monkeypatch.setattr(kept_results, "PATIENCE", 0.001)
    trained, cache, other = (
        Cache("prepared", tmp_path / "first").load(asked[0]),
        Cache("prepared", tmp_path),
        ExitStack(),
    )
    other.enter_context(cache.alone(asked[0], pytest.fail))

    class Done(Callback):
        def on_prepare(self, what, share):
            heard.append(what)
            if "waits" in what:
                cache.save(asked[0], trained)
                other.close()

    heard = []
    taken, row = sent_first(pretrained(), cache=cache, callbacks=[Done()])
    assert heard[0] == f"simclr: waits for the extractor that another run trains, pid {os.getpid()}"
    assert "was found" in heard[1]
    assert row["prepare/simclr_epochs"] == 0
    assert same(taken, first)


def test_the_rate_falls_by_epoch():
    flat, _ = sent_first(pretrained(task=pretext(replace(BRIEF, epochs=2))))
    falling, _ = sent_first(pretrained(task=pretext(replace(BRIEF, epochs=2, lr_epoch_decay=1e-6))))
    once, _ = sent_first(pretrained(task=pretext(replace(BRIEF, epochs=1))))
    weight = "body.0.weight"
    assert float((falling.params[weight] - once.params[weight]).abs().max()) < 1e-6
    assert float((flat.params[weight] - once.params[weight]).abs().max()) > 1e-3


def test_progress_is_told_epoch_by_epoch():
    listener = Stops(0)
    run(pretrained(), callbacks=[listener])
    assert [share for _, share in listener.lines] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert listener.lines[1][0].startswith("simclr: epoch 2/3, loss ")


def test_a_later_phase_is_refused_in_words_before_the_first_round():
    played = []

    class Counts(Callback):
        def on_round(self, row):
            played.append(row)

    plain, listener = Method(cross_entropy(), average()), Counts()
    with pytest.raises(FedstillError, match=r"2 rounds have trained.*first phase"):
        run((Phase(plain, until=2), Phase(pretrained())), rounds=3, callbacks=[listener])
    assert not played
    off = pretrained(task=pretext(replace(BRIEF, epochs=0)))
    assert len(run((Phase(plain, until=1), Phase(off)), rounds=2, callbacks=[listener]).history.rows) == 2


def test_a_loss_that_is_nan_is_refused_in_words():
    with pytest.raises(FedstillError, match=r"lower training\.lr"):
        run(pretrained(task=pretext(replace(BRIEF, lr=1e38))))


@pytest.mark.parametrize("training", [Training(steps=4), Training(lr_schedule="cosine"), Training(lr_decay=0.5)])
def test_a_plan_that_cannot_be_cut_into_epochs_is_refused(training):
    with pytest.raises(FedstillError, match="epoch by epoch"):
        Pretext("task", lambda model: model, cross_entropy(), training, lambda x: x)


def test_a_probe_looks_before_and_after_and_changes_nothing():
    seen = []

    def probe(weights, preparation):
        seen.append(weights)
        return {"size": float(len(seen))}

    weights, row = sent_first(pretrained(probe=probe))
    assert (row["prepare/size_before"], row["prepare/size"]) == (1.0, 2.0)
    assert same(seen[0], net().init(seed_for(0, "model")))
    assert torch.equal(seen[1].params["body.0.weight"], weights.params["body.0.weight"])
    assert same(weights, sent_first(pretrained())[0])


def test_fewer_images_than_a_batch_are_one_batch_and_one_image_has_none_to_be_told_from():
    for count in (2, 5):
        weights, row = sent_first(pretrained(), federation=picture_federation(unlabeled=count))
        assert row["prepare/simclr_epochs"] == 3
        assert all(bool(leaf.isfinite().all()) for leaf in weights.params.values())
    with pytest.raises(FedstillError, match=r"at least 2 unlabeled images, and there is 1: raise data\.unlabeled"):
        run(pretrained(), federation=picture_federation(unlabeled=1))


def test_labels_that_a_simulation_knows_never_reach_the_training():
    known, unknown = (
        sent_first(pretrained(), federation=picture_federation(truth=truth))[0] for truth in (True, False)
    )
    assert same(known, unknown)


def test_it_stands_before_what_refines_and_needs_unlabeled_data():
    step = pretrain(pretext())
    assert step.stage is Stage.KEEP
    with pytest.raises(FedstillError, match=r"unlabeled data on the server \(set data.unlabeled"):
        run(pretrained(), federation=replace(picture_federation(), unlabeled=None))


def test_a_users_own_weights_are_where_it_starts():
    """from_module of a module, not of a factory: its values are the first ones, whatever the seed."""
    from pretraining_cases import Net

    with torch.random.fork_rng():
        torch.manual_seed(11)
        module = Net()
    own = from_module(module, input_shape=(3, 6, 6), classes=3, check=False)
    weights, _ = sent_first(pretrained(task=pretext(replace(BRIEF, lr=1e-12, weight_decay=0.0))), model=own)
    assert torch.allclose(weights.params["body.0.weight"], module.body[0].weight.detach(), atol=1e-6)


def test_a_digest_tells_names_forms_and_values_apart():
    x = torch.arange(6.0)
    told = {
        digest({"a": x}), digest({"b": x}), digest({"a": x.reshape(2, 3)}), digest({"a": x.double()}),
        digest({"a": x + 1.0}), digest({"a": x, "b": x}),
    }  # fmt: skip
    assert len(told) == 6
    assert digest({"a": x.reshape(2, 3).T.contiguous().T}) == digest({"a": x.reshape(2, 3)})


def test_all_epochs_share_one_optimiser_and_each_has_batches_of_its_own(monkeypatch):
    calls, fit = [], Engine.fit

    def listening(self, *args, optimizer, **how):
        calls.append((int(optimizer["count"]) if optimizer else 0, args[-1]))
        return fit(self, *args, optimizer=optimizer, **how)

    monkeypatch.setattr(Engine, "fit", listening)
    run(pretrained())
    steps, seeds = zip(*calls, strict=True)
    assert steps == (0, 2, 4)  # Adam's count before each epoch of two steps
    assert len(set(seeds)) == 3


# A pre-trained extractor is another one for a network that computes something else from the same first weights.

SHAPE = (3, SIDE, SIDE)

PICTURES = torch.zeros(5, *SHAPE, dtype=torch.uint8)

TEXTS = torch.arange(60).reshape(6, 10) % 20


def own(activation=nn.ReLU, *, momentum=0.1, dropout=0.0, last=1.0, groups=2):
    """A branch that starts at 0, as in a ResNet, hides its own norm at the first weights."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), activation())
            self.branch = nn.GroupNorm(groups, 4)
            self.scale = nn.Parameter(torch.full((), last))
            self.drop, self.head = nn.Dropout(dropout), nn.Linear(4 * 16, CLASSES)

        def forward(self, x):
            x = self.body(x)
            features = self.drop((x + self.scale * self.branch(x)).flatten(1))
            return features, self.head(features)

    return from_module(Own, input_shape=SHAPE, classes=CLASSES, name="own", check=False)


def resnet(**options):
    return build_model("resnet8", input_shape=SHAPE, classes=CLASSES, **options)


def bert(**options):
    small = {"layers": 1, "hidden": 8, "inner": 8, "vocabulary": 20, "heads": 2}
    return build_model("bert", input_shape=(10,), classes=2, **{**small, **options})


def same_first_weights(one, other):
    found, wanted = (flatten(model.init(0)) for model in (one, other))
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def fingerprint(model, task=None, x=PICTURES):
    return _fingerprint(task or pretext(), model, model.init(0), x)


PAIRS = {
    "groups": (resnet(norm="group"), resnet(norm="group", groups=4)),
    "activation": (own(), own(nn.Tanh)),
    "bounded activation": (own(), own(nn.ReLU6)),
    "momentum": (own(), own(momentum=0.2)),
    "dropout": (own(dropout=0.1), own(dropout=0.2)),
    "groups of a branch that starts at 0": (own(last=0.0), own(last=0.0, groups=4)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_what_the_first_weights_do_not_tell_is_told(pair):
    assert same_first_weights(*pair)
    assert fingerprint(pair[0]) != fingerprint(pair[1])


@pytest.mark.parametrize("options", [{"heads": 4}, {"dropout": 0.1}], ids=str)
def test_so_it_is_of_a_network_that_reads_text(options):
    task = next_words(Training())
    assert same_first_weights(bert(), bert(**options))
    assert fingerprint(bert(), task, TEXTS) == fingerprint(bert(), task, TEXTS)
    assert fingerprint(bert(), task, TEXTS) != fingerprint(bert(**options), task, TEXTS)


def test_it_does_not_go_by_the_last_bits():
    """Other kernels and numbers of threads, as on another machine; sums that should be 0 are rounding alone."""
    model = build_model("mobilenet_v2", input_shape=(3, 16, 16), classes=3, width=0.25)
    images, weights = torch.zeros(2, 3, 16, 16), model.init(0)
    other = {n: p.to(memory_format=torch.channels_last) if p.ndim == 4 else p for n, p in weights.params.items()}
    wanted = _fingerprint(pretext(), model, weights, images)
    assert _fingerprint(pretext(), model, weights._replace(params=other), images) == wanted
    noisy = {name: leaf.double() * (1.0 + 1e-12) for name, leaf in weights.params.items()}
    assert _fingerprint(pretext(), model, weights._replace(params=noisy), images) == wanted


def test_it_takes_one_thread_and_gives_the_others_back():
    """Runs that share a machine would wait for each other's threads (13 s instead of 0.2)."""
    seen = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3 * SIDE**2, CLASSES)

        def forward(self, x):
            seen.append(torch.get_num_threads())
            return x.flatten(1), self.head(x.flatten(1))

    model = from_module(Looks, input_shape=SHAPE, classes=CLASSES, check=False)
    weights = model.init(0)
    with threads(2):
        seen.clear()
        _fingerprint(pretext(), model, weights, PICTURES)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2


def test_a_module_that_makes_float32_tensors_itself_has_one_too():
    class Fixed(nn.Module):
        def __init__(self, power):
            super().__init__()
            self.power, self.head = power, nn.Linear(4, CLASSES)

        def forward(self, x):
            features = x.flatten(1) @ torch.linspace(0, 1, 4 * 3 * SIDE**2).reshape(-1, 4) ** self.power
            return features, self.head(features)

    one, other = (
        from_module(lambda power=power: Fixed(power), input_shape=SHAPE, classes=CLASSES, check=False)
        for power in (1, 2)
    )
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)


def test_another_activation_finds_neither_the_extractor_nor_one_that_is_unfinished(tmp_path):
    cache = Cache("prepared", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        sent_first(pretrained(), model=own(), cache=cache, callbacks=[Stops(1)])
    epochs = [
        sent_first(pretrained(), model=model, cache=cache)[1]["prepare/simclr_epochs"]
        for model in (own(nn.Tanh), own(nn.Tanh), own(), own())
    ]
    assert epochs == [3, 0, 2, 0]


def test_it_draws_from_no_stream_that_others_draw_from():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fingerprint(own(dropout=0.5))
    assert torch.equal(torch.get_rng_state(), before)
    task = pretext(replace(BRIEF, epochs=1))
    assert fingerprint(net(), task) == fingerprint(net())


def test_a_network_that_cannot_be_tried_goes_by_its_weights():
    """Ghost batches of eight: the trial has four rows, and the run must not end by it."""

    class Ghost(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3 * SIDE * SIDE, CLASSES)

        def forward(self, x):
            if self.training and len(x) % 8:
                raise RuntimeError("a training batch is some eights of rows")
            return x.flatten(1), self.head(x.flatten(1))

    assert fingerprint(from_module(Ghost, input_shape=SHAPE, classes=CLASSES, name="ghost", check=False)) == "unknown"
