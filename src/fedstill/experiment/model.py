"""From the [model] section to a Model: built-in networks, networks of one's own, several of them in one federation."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fedstill.core.errors import FedstillError
from fedstill.core.types import ENSEMBLE, Federation, Model
from fedstill.experiment.config import Experiment
from fedstill.experiment.prototypes import MIXED, prototypes_of
from fedstill.methods.lookup import own_function
from fedstill.models import READS_TEXT, build_model, from_module, mixed_model, model_options


def build_network(experiment: Experiment, federation: Federation) -> Model:
    section = experiment.model
    if section.name != MIXED:
        return _network(section.name, section.options, federation)
    parts = prototypes_of(section.options["prototypes"])
    networks = {name: _network(part.name, part.options, federation) for name, part in parts.items()}
    return mixed_model(networks, federation.population, section.options.get("report", ENSEMBLE))


def _network(name: str, own: dict[str, Any], federation: Federation) -> Model:
    if ":" in name:
        return _own_network(name, own, federation)
    _check_reads(name, federation)
    shape, options = tuple(federation.train.x.shape[1:]), own | _vocabulary(name, federation)
    return build_model(name, input_shape=shape, classes=len(federation.train.classes), **options)


def _vocabulary(name: str, federation: Federation) -> dict[str, int]:
    """How many ids a network must know, where it asks: the tokenizer's, or as many as can follow a character."""
    tokenizer = federation.train.tokenizer
    size = len(federation.train.classes) if tokenizer is None else tokenizer.size
    return {"vocabulary": size} if _reads_tokens(name) else {}


def _reads_tokens(name: str) -> bool:
    return "vocabulary" in model_options(name)


def _check_reads(name: str, federation: Federation) -> None:
    """Text goes to networks that read ids, anything else to the others."""
    if federation.train.text and name not in READS_TEXT:
        raise FedstillError(f"model.name = '{name}' cannot read text: use {' or '.join(map(repr, sorted(READS_TEXT)))}")
    if name in READS_TEXT and not federation.train.text:
        cure = "data.tokens" if _reads_tokens(name) else "data.window"
        raise FedstillError(f"model.name = '{name}' reads text, {federation.train.name} holds numbers: set {cure}")
    if federation.train.tokenizer is not None and not _reads_tokens(name):
        told = " or ".join(repr(other) for other in sorted(READS_TEXT) if _reads_tokens(other))
        raise FedstillError(f"model.name = '{name}' reads characters, not tokens: use {told}, or data.window")


def _own_network(name: str, own: dict[str, Any], federation: Federation) -> Model:
    """What FILE.py:function builds; of shape, classes and vocabulary it is given what it asks for."""
    factory, train = own_function(name, "model.name"), federation.train
    tokenizer = train.tokenizer
    shape, classes = tuple(train.x.shape[1:]), len(train.classes)
    vocabulary = classes if tokenizer is None else tokenizer.size
    facts = {"input_shape": shape, "classes": classes, "vocabulary": vocabulary}
    asked = inspect.signature(factory).parameters
    given = {key: value for key, value in facts.items() if key in asked}
    return from_module(
        lambda: factory(**given, **own),
        input_shape=shape,
        classes=classes,
        name=name.rpartition(":")[2],
        input_dtype=torch.int64 if train.text else torch.float32,
    )
