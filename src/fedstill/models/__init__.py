"""The built-in networks by name, and functions that make a Model from any nn.Module."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Model, Weights
from fedstill.models.from_module import first_line, from_module, why_unbatchable
from fedstill.models.mixed import mixed_model
from fedstill.models.network import Network
from fedstill.models.stateless import weights_of
from fedstill.models.zoo.bert import bert
from fedstill.models.zoo.char_lstm import char_lstm
from fedstill.models.zoo.mobile import mobilenet_v2, shufflenet
from fedstill.models.zoo.resnet import resnet8, resnet8_wide, resnet18, resnet20, resnet34
from fedstill.models.zoo.small import cnn, convnet, fecnn, lenet, lenet5, mlp, vgg8, vgg11

__all__ = [
    "MODELS",
    "READS_TEXT",
    "build_model",
    "form_of",
    "from_module",
    "mixed_model",
    "model_options",
    "why_unbatchable",
]

SMALL = (mlp, cnn, lenet5, lenet, convnet, fecnn, vgg8, vgg11)
RESIDUAL = (resnet8, resnet20, resnet8_wide, resnet18, resnet34)
OTHERS = (mobilenet_v2, shufflenet, char_lstm, bert)
MODELS: dict[str, Callable[..., Network]] = {network.__name__: network for network in (*SMALL, *RESIDUAL, *OTHERS)}
READS_TEXT = frozenset({"char_lstm", "bert"})


def model_options(name: str) -> dict[str, Any]:
    """Return the options of a built-in network with their defaults."""
    if name not in MODELS:
        raise FedstillError(f"model.name = '{name}' is unknown: {suggest(name, MODELS)}")
    parameters = inspect.signature(MODELS[name]).parameters.values()
    return {option.name: option.default for option in parameters if option.kind is option.KEYWORD_ONLY}


def build_model(name: str, *, input_shape: tuple[int, ...], classes: int, **options: Any) -> Model:
    """Build a built-in network as a Model, for samples of `input_shape`.

    >>> model = build_model("mlp", input_shape=(64,), classes=10, hidden=(32,))
    >>> sorted(model.init(0).params)
    ['encoder.1.bias', 'encoder.1.weight', 'head.bias', 'head.weight']
    """
    known = model_options(name)
    for option, value in options.items():
        if option not in known:
            hint = suggest(option, known) if known else f"'{name}' has no options"
            raise FedstillError(f"model.{option} is not an option of '{name}': {hint}")
        if isinstance(known[option], tuple) and not isinstance(value, (tuple, list)):
            raise FedstillError(f"model.{option} = {value!r} must be a list: e.g. {option}={known[option]!r}")
    shape = tuple(input_shape)
    # vmap can run all of them, as a test shows, so from_module need not try.
    return from_module(
        partial(_network, name, shape, classes, **options),
        input_shape=shape,
        classes=classes,
        name=name,
        check=False,
        input_dtype=torch.int64 if name in READS_TEXT else torch.float32,
    )


def _network(name: str, input_shape: tuple[int, ...], classes: int, /, **options: Any) -> Network:
    """Make a built-in network; one that is larger than torch or this machine can hold is refused in one line."""
    try:
        return MODELS[name](input_shape, classes, **options)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise FedstillError(
            f"the network '{name}' cannot be made with these options ({first_line(error)}): use a smaller one"
        ) from error


def form_of(name: str, *, input_shape: tuple[int, ...], classes: int, most: int, **options: Any) -> Weights:
    """Return the tensors of a built-in network without memory for their numbers (device "meta").

    A network of more than `most` parameter tensors is refused as soon as it has them, because a file that somebody else
    wrote may ask for a network of any size.

    >>> form_of("mlp", input_shape=(64,), classes=10, most=4, hidden=(32,)).params["head.weight"].shape
    torch.Size([10, 32])
    """
    count, here = 0, threading.get_ident()

    def note(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
        nonlocal count
        count += threading.get_ident() == here
        if count > most:
            raise FedstillError(f"the network '{name}' has more than {most} tensors")

    hook = register_module_parameter_registration_hook(note)
    try:
        with torch.device("meta"):
            return weights_of(_network(name, tuple(input_shape), classes, **options))
    finally:
        hook.remove()
