"""A federation small enough to try a method on in milliseconds: for `explain` and `doctor`."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedstill.core.needs import needs_of
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Federation, Method, Model, Need, Tokenizer, Training
from fedstill.data import federation_from_tensors
from fedstill.engine import build_engines
from fedstill.loop.federate import Built, Schedule, federate
from fedstill.loop.history import Result
from fedstill.models import build_model

CLASSES = 3
SHAPE = (1, 8, 8)
UNLABELED = 25  # of `trial_run`: no other size of the trial is the same, so that counts tell what they count
VOCABULARY = 21  # of texts: five marks, and words


def trial_federation(clients: int = 4, samples: int = 24, *, unlabeled: int = 16, text: bool = False) -> Federation:
    """Noisy images whose brightness tells the class, or texts by their words; client k misses class k mod 3."""
    if text:
        return _as_texts(trial_federation(clients, samples, unlabeled=unlabeled))
    generator = numpy_generator(seed_for(0, "trial"))

    def draw(count: int, missing: int | None) -> tuple[np.ndarray, np.ndarray]:
        classes = [c for c in range(CLASSES) if c != missing]
        y = generator.choice(classes, size=count)
        noise = generator.integers(0, 60, size=(count, *SHAPE))
        return (noise + 80 * y.reshape(-1, 1, 1, 1)).astype(np.uint8), y.astype(np.int64)

    pairs = [draw(samples, k % CLASSES) for k in range(clients)]
    names = [str(c) for c in range(CLASSES)]
    federation = federation_from_tensors(
        pairs,
        test=draw(30, None),
        unlabeled=draw(unlabeled, None)[0],
        classes=names,
        name="trial",
        partition="one class each missing",
    )
    x, y = draw(12, None)
    validation = torch.from_numpy(x), torch.from_numpy(y)
    return dataclasses.replace(federation, validation=validation, public_facts=())  # nobody's data


def _as_texts(images: Federation) -> Federation:
    """The first row of each image as ids of words, behind a mark."""

    def read(x: Tensor) -> Tensor:
        words = 5 + x[:, 0, 0].long() // 16
        words[:, 0] = 2
        return words

    tokenizer = Tokenizer("", SHAPE[2], VOCABULARY, mask=4, first_word=5)
    both = (images.train, images.test)
    train, test = (dataclasses.replace(part, x=read(part.x), tokenizer=tokenizer) for part in both)
    assert images.unlabeled is not None
    assert images.validation is not None
    validation = read(images.validation[0]), images.validation[1]
    return dataclasses.replace(images, train=train, test=test, unlabeled=read(images.unlabeled), validation=validation)


def trial_model(*, text: bool = False) -> Model:
    if text:
        small = {"layers": 1, "hidden": 8, "heads": 2, "inner": 8, "positions": SHAPE[2]}
        return build_model("bert", input_shape=SHAPE[2:], classes=CLASSES, vocabulary=VOCABULARY, **small)
    return build_model("mlp", input_shape=SHAPE, classes=CLASSES, hidden=(16,))


def trial_run(method: Method, *, rounds: int = 1, engine: str = "looped", device: str = "cpu") -> Result:
    text = Need.TOKENS in needs_of(method)
    return federate(
        Built(
            method,
            trial_model(text=text),
            trial_federation(unlabeled=UNLABELED, text=text),
            Training(batch_size=8, lr=0.05),
            Schedule(rounds=rounds, cohort=3),
            partial(build_engines, engine, device),
        )
    )
