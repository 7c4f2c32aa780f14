"""A pre-trained extractor is another one for a network that computes something else from the same first weights."""

from dataclasses import replace

import pytest
import torch
from pretraining_cases import BRIEF, CLASSES, SIDE, net, pretext, pretrained, sent_first
from torch import nn

from fedstill.core.threads import threads
from fedstill.core.tree import flatten
from fedstill.core.types import Training
from fedstill.loop.callbacks import Callback
from fedstill.methods.pretraining.words import next_words
from fedstill.models import build_model, from_module
from fedstill.server.pretrain import _fingerprint
from fedstill.storage.cache import Cache

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


class Stops(Callback):
    def on_prepare(self, what, share):
        raise KeyboardInterrupt


def test_another_activation_finds_neither_the_extractor_nor_one_that_is_unfinished(tmp_path):
    cache = Cache("prepared", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        sent_first(pretrained(), model=own(), cache=cache, callbacks=[Stops()])
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
