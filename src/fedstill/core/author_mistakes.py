"""Mistakes in the code of an extension: each becomes one line that names the part, the file and the cure."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError, own_place
from fedstill.core.types import Batch, Local, Need, Objective, Output, ServerStep, Tree, Weights

_MAY_BE_ASKED = frozenset({torch.isnan, Tensor.isnan, Tensor.__repr__})  # whether they are there


class UndeclaredInput(FedstillError):
    """A term computed with an input that is not in its `needs`."""


class _Undeclared(Tensor):
    """NaN in the place of an input that nobody declared; computing with it is an error.

    NaN alone would not do: `label_counts > 0` makes a plain False of it, and the run goes on with wrong numbers.
    """

    subject = need = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAY_BE_ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise UndeclaredInput(
            f"a local term reads {cls.subject} and does not declare it: "
            f"add needs=frozenset({{Need.{cls.need}}}) to its Objective"
        )


class _LabelCounts(_Undeclared):
    subject, need = "local.label_counts", Need.LABEL_COUNTS.name


class _FrozenFeatures(_Undeclared):
    subject, need = "the features of a frozen model", Need.FEATURES.name


LABEL_COUNTS = torch.full((1,), float("nan")).as_subclass(_LabelCounts)
FROZEN_FEATURES = torch.full((1, 1), float("nan")).as_subclass(_FrozenFeatures)


def hide_undeclared(local: Local, needs: frozenset[Need]) -> Local:
    """Return the part of a Local that the client's objective declares."""
    if Need.FEATURES not in needs and local.frozen:
        frozen = {name: answer._replace(features=FROZEN_FEATURES) for name, answer in local.frozen.items()}
        local = local._replace(frozen=frozen)
    return local if Need.LABEL_COUNTS in needs else local._replace(label_counts=LABEL_COUNTS)


def name_of(function: Callable[..., Any]) -> str:
    """The part that made a function or class, and where it is written: 'my_term (mine.py, line 12)'."""
    code = getattr(function.__init__ if inspect.isclass(function) else function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__).partition(".<locals>")[0]
    return f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else name


def call(function: Callable[..., Any], duty: str, /, *given: Any, **options: Any) -> Any:
    """Return the value of a function that an author wrote; one that does not take these arguments is refused.

    duty: of the function, and its signature, for the message.
    """
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        raise FedstillError(f"{name_of(function)} cannot be called as {duty}: {error}") from None
    return function(*given, **options)


def one_number(term: Objective, value: Tensor) -> Tensor:
    """The value of a term's loss, which must be one number for the batch."""
    if isinstance(value, (Tensor, int, float)) and not getattr(value, "ndim", 0):
        return value
    form = f"values of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise FedstillError(
        f"the loss of the local term {name_of(term.loss)} returned {form}: return one number for the batch, "
        "e.g. weighted_mean(values, batch.weight) of one value for each sample"
    )


def check_objective(objective: Objective, output: Output, batch: Batch, local: Local) -> None:
    """Refuse an objective that counts padding, or whose value is the same for all labels, by trying it on one batch.

    batch: its last rows are padding (weight 0) that repeats no other row. A padded batch and the same batch without
    padding are the same work, and which of them a client gets is up to the engine.
    A term that fails here is passed over, because its first training step fails too and names the cause.
    """
    terms, real, classes = objective.terms or (objective,), int(batch.weight.sum()), output.logits.shape[-1]
    frozen = {name: _first_rows(answer, real) for name, answer in local.frozen.items()}
    without_padding = (
        _first_rows(output, real),
        _first_rows(batch, real),
        hide_undeclared(local._replace(frozen=frozen), objective.needs),
    )
    local = hide_undeclared(local, objective.needs)
    for term in terms:
        padded, alone = _loss_value(term, output, batch, local), _loss_value(term, *without_padding)
        if abs(padded - alone) > 1e-5 + 1e-3 * max(abs(padded), abs(alone)):  # never where one of them is NaN
            raise FedstillError(
                f"the local term {name_of(term.loss)} counts padding: its loss is {alone:.4g} for {real} samples and "
                f"{padded:.4g} for the same samples in a padded batch: take weighted_mean(values, batch.weight) of "
                "fedstill.compose.combine instead of a plain mean or sum"
            )
    if any(term.risk for term in terms) or classes < 2:
        return
    relabelled = batch._replace(y=(batch.y + 1) % classes)
    if _loss_value(objective, output, batch, local) == _loss_value(objective, output, relabelled, local):
        raise FedstillError(
            f"no local term of this method fits the labels: the loss of {name_of(terms[0].loss)} is the same for all "
            "labels: combine(cross_entropy(), ...) adds a term that does; a term that is to train without labels says "
            "so by a name, Objective(loss, risk='my_loss')"
        )


def _first_rows(part: Any, count: int) -> Any:
    """The first rows of an Output or a Batch."""
    return type(part)(*(leaf[:count] for leaf in part))


def _loss_value(term: Objective, output: Output, batch: Batch, local: Local) -> float:
    """A term's loss as a number; NaN where it cannot be computed."""
    with suppress(Exception), torch.no_grad():
        return float(one_number(term, term.loss(output, batch, local)))
    return math.nan


def model_and_state(step: ServerStep, before: Weights, returned: tuple[Weights, Tree]) -> tuple[Weights, Tree]:
    """Return the (candidate, state) of a server step. The new candidate must have the form of the one before it.

    Weights are a pair too, and would unpack.
    """
    who = f"the server step {name_of(step.apply)} returned"
    if not isinstance(returned, Weights) and isinstance(returned, tuple) and len(returned) == 2:
        candidate, state = returned
        if isinstance(candidate, Weights) and isinstance(state, Mapping):
            if fault := _other_form(candidate, before):
                raise FedstillError(f"{who} another form of model: {fault}")
            return returned
    form = "nothing" if returned is None else _in_words(returned)
    raise FedstillError(
        f"{who} {form}: return two things, (candidate, state): "
        "Weights, and the state as a dict (the one it was given, if it keeps nothing)"
    )


def _other_form(made: Weights, wanted: Weights) -> str:
    """The first difference between two models in names, shapes and dtypes, with its cure; empty where there is none."""
    for kind, tensors, expected in zip(Weights._fields, made, wanted, strict=True):
        if not isinstance(tensors, Mapping) or tensors.keys() != expected.keys():
            return f"its {kind} must be a dict with the names of round.start.{kind}"
        for name, leaf in expected.items():
            shape, dtype = tuple(getattr(tensors[name], "shape", ())), getattr(tensors[name], "dtype", None)
            if (shape, dtype) != (leaf.shape, leaf.dtype):
                stacked = len(shape) == leaf.ndim + 1 and shape[1:] == leaf.shape
                cure = ": reduce the first dimension, which is the client, e.g. with leaf.mean(0)" if stacked else ""
                return f"its {name} is {shape} {dtype}, and must be {tuple(leaf.shape)} {leaf.dtype}{cure}"
    return ""


def _in_words(returned: Any) -> str:
    if isinstance(returned, Weights):
        return "only the candidate"
    if isinstance(returned, tuple):
        return f"({', '.join(type(part).__name__ for part in returned)})"
    return f"a {type(returned).__name__}"


# (pattern in PyTorch's message, what the code does, what to do instead)
_CAUSES = (
    (r"calling \.item\(\)", "calls .item(), float() or int() on a tensor", "keep it a tensor"),
    (
        r"functional\.one_hot",
        "calls F.one_hot without num_classes",
        "use fedstill.local.target_mask, or give it num_classes",
    ),
    (r"data-dependent control flow", "branches on the value of a tensor (if tensor)", "use torch.where"),
    (
        r"dynamic shape|boolean mask",
        "makes a shape that depends on values (boolean mask, nonzero, unique)",
        "use torch.where or masked_fill",
    ),
    (
        r"inplace arithmetic|match the broadcast shape",
        "writes one client's values into a tensor that all clients share",
        "write out of place (x = x + y) or into torch.zeros_like(x)",
    ),
    (r"data pointer|numpy", "leaves PyTorch (.numpy(), .tolist())", "stay in tensor operations"),
    (
        r"setup_context|vmap support",
        "uses a torch.autograd.Function without a vmap rule",
        "give the Function setup_context and generate_vmap_rule = True",
    ),
    (
        r"(?:Batching rule not implemented|derivative) for (aten::\w+)",
        "uses {} (PyTorch has no batched form of it)",
        "replace that operation",
    ),
)


def why_not_under_vmap(message: str) -> tuple[str, str] | None:
    """(what the code does, what to do instead), of an error of PyTorch's; None where no rule names it."""
    for pattern, does, instead in _CAUSES:
        match = re.search(pattern, message)
        if match:
            return does.format(*match.groups()), instead
    return None


_RULES = "see 'Rules for the code of a term' in docs/adding-a-method.md"


def tell_mistake(error: Exception) -> None:
    """Raise what a user can act on, if the error comes from code outside of the library and a rule names it."""
    place = own_place(error)
    if isinstance(error, UndeclaredInput):
        raise FedstillError(f"{place}: {error}" if place else str(error)) from error
    if not place or isinstance(error, FedstillError):
        return
    if cause := why_not_under_vmap(str(error)):
        does, instead = cause
        raise FedstillError(
            f"{place} {does}, and so cannot run for many clients at once: {instead}, "
            f"or set engine.name = 'looped' ({_RULES})"
        ) from error
