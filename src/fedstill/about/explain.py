"""Explain a method: its equation and options, its parts and needs, and the data that leave a client in a tiny round."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstill.about.defaults import sentences
from fedstill.about.toy import CLASSES, SHAPE, UNLABELED, trial_model, trial_run
from fedstill.compose.combine import run_step
from fedstill.compose.sealed import OfSums, why_not_sealed
from fedstill.core.needs import needs_of
from fedstill.core.setup import AnyQuestion, Preparation, no_preparation
from fedstill.core.tree import byte_size, flatten
from fedstill.core.types import Answers, Method, Need, Phase, Round, ServerStep, Tree, Uploads, Weights, no_change
from fedstill.loop.privacy_plan import stretches_of
from fedstill.methods.lookup import build_method, parse, write
from fedstill.methods.options import find, listed, read_docstring, tries
from fedstill.privacy.plan import Privacy
from fedstill.privacy.statement import statement
from fedstill.server.aggregate import AGGREGATES

_NUMBERS = "its number of samples and of steps, and its mean training loss"


def explain(name: str) -> dict[str, Any]:
    """Return everything that `fedstill explain` prints, as plain data.

    Of methods that run together or in turn it holds the traffic, parts and needs of all, and each one's equation.
    """
    named = {part.name: part for stretch in parse(name) for part in stretch.parts}
    phases = build_method(f"fedavg+{name}" if named.keys() <= AGGREGATES.keys() else name)
    methods = [phase.method for phase in phases]
    flows = [traffic(method) for method in methods]
    if len(named) > 1:
        each = {part.name: explain(write(part.name, part.options)) for part in named.values()}
        options = [(key, option) for key, facts in each.items() for option in facts["options"]]
        words = {
            "summary": f"{name}: {'several methods in turn' if len(methods) > 1 else 'parts that run together'}.",
            "body": "\n\n".join(facts[key] for facts in each.values() for key in ("summary", "equation") if facts[key]),
            "Helps": "",
            "options": [{**option, "name": f"{key}({option['name']})"} for key, option in options],
            "tries": {
                f"{key}({path})": values for key, facts in each.items() for path, values in facts["tries"].items()
            },
            "Differs from the paper": " ".join(
                f"{key}: {answers}" for key, facts in each.items() if (answers := facts["differs_from_the_paper"])
            ),
            "Reference": " ".join(facts["reference"] for facts in each.values()).strip(),
        }
    else:
        (only,) = named
        factory = AGGREGATES[only] if only in AGGREGATES else find("method", only)
        ranges = {} if only in AGGREGATES else tries(only)
        words = {**read_docstring(factory), "options": _options(factory), "tries": ranges}
    return {
        "method": name,
        "summary": words["summary"],
        "helps": words["Helps"],
        "with_defaults": sentences(name),
        "equation": words["body"],
        "options": words["options"],
        "tries": words["tries"],
        "parts": _union(map(parts_of, methods)),
        "needs": sorted({need.value for method in methods for need in needs_of(method)}),
        **{key: _union(flow[key] for flow in flows) for key in flows[0]},
        "sealed": _union([why_not_sealed(method) for method in methods]),
        "privacy": privacy_of(phases),
        "differs_from_the_paper": words["Differs from the paper"],
        "reference": words["Reference"],
    }


def _union(lists: Iterable[list[Any]]) -> list[Any]:
    union: list[Any] = []
    for entries in lists:
        union += [item for item in entries if item not in union]
    return union


def first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def parts_of(method: Method) -> list[dict[str, str]]:
    """Name the terms of the clients, the changes on the way and the steps of the server, in the order they run."""
    ways = [*method.per_client, *([method.trusted] if method.trusted is not None else [])]
    makers = [
        *(("client", _maker(term.bind or term.loss)) for term in method.objective.terms or (method.objective,)),
        *(("on the way", _maker(way)) for way in ways),
        *(("server", _maker_of_step(step)) for step in method.steps),
    ]
    parts = [{"part": maker.__name__.strip("_"), "where": where, "does": first_line(maker)} for where, maker in makers]
    for part, step in zip(parts[-len(method.steps) :], method.steps, strict=True):
        part["part"] = step.name if part["part"] == "apply" else part["part"]
    return parts


def _maker(function: Any) -> Callable[..., Any]:
    """Return the function of a module in which this one was defined, or itself where there is none."""
    maker = function.__globals__.get(function.__qualname__.partition(".")[0])
    made = getattr(maker, "__annotations__", {}).get("return")
    return maker if inspect.isfunction(maker) and made not in (Method, "Method") else function  # a method is no part


def _maker_of_step(step: ServerStep) -> Callable[..., Any]:
    """Return the function that made a step; a wrapper of fedstill.compose holds the step that it wraps."""
    hook: Any = step.prepare if step.apply is no_change else step.apply
    hook = hook.function if isinstance(hook, OfSums) else hook
    cells = hook.__closure__ or () if hook.__module__.startswith("fedstill.compose") else ()
    wrapped = next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, ServerStep)), None)
    return _maker(hook) if wrapped is None else _maker_of_step(wrapped)


def _options(factory: Callable[..., Any]) -> list[dict[str, Any]]:
    """List the options of a method with default, limits and meaning; the fields of a table follow its option."""
    rows = []
    for name, default, limits, owner in listed(factory):
        args = read_docstring(owner)["Args"]
        meanings = dict(re.findall(r"^\s+(\w+): (.*(?:\n(?!\s+\w+: ).*)*)", args, re.MULTILINE))
        meaning = " ".join(meanings.get(name.rpartition(".")[2], "").split())
        rows.append({"name": name, "default": default, "limits": limits, "meaning": meaning})
    return rows


def traffic(method: Method) -> dict[str, list[str]]:
    """Return the parts that leave a client each round and once before the first one, the parts that stay on it, and the
    slots that the server sends beside the model: seen in one tiny round.
    """
    seen: list[Uploads] = []
    sent: Tree = {}
    answers: list[Answers] = []

    def look(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        seen.append(round.uploads)
        return run_step(method.aggregate, candidate, state, round)

    def heard(step: ServerStep) -> ServerStep:
        def broadcast(state: Tree) -> Tree:
            slots = step.broadcast(state)
            sent.update(slots)
            return slots

        def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
            def ask(question: AnyQuestion, /, among: Collection[int] | None = None, **how: Any) -> Answers:
                answers.append(preparation.ask(question, among=among, **how))
                return answers[-1]

            return step.prepare(candidate, state, dataclasses.replace(preparation, ask=ask))

        idle = step.prepare is no_preparation
        return dataclasses.replace(step, broadcast=broadcast, prepare=no_preparation if idle else prepare)

    aggregate = dataclasses.replace(heard(method.aggregate), apply=look)
    trial_run(dataclasses.replace(method, aggregate=aggregate, server=tuple(map(heard, method.server))))
    model, x = trial_model(text=Need.TOKENS in needs_of(method)), torch.zeros(1, *SHAPE)
    uploads, weights = seen[0], model.init(0)
    output, _ = model.apply(weights, x[:, 0, 0].long() if model.tokens else x)
    tried = _Tried(byte_size(weights), output.features.shape[1])
    leaves = ["the trained model"]
    stays = ["its data", *_slots(method.objective.init(weights), tried, 1)]
    hidden = {
        part
        for release in method.releases
        if release.when == "round" and release.against == "server"
        for part in release.covers
    }
    (stays if "numbers" in hidden else leaves).append(_NUMBERS)
    if Need.LABEL_COUNTS_UPLOADED in needs_of(method):
        leaves.append("how many samples of each class it holds")
    leaves += _slots(uploads.extra, tried, len(uploads.ids))
    for change in method.per_client:
        leaves.append(f"(changed on the way: {first_line(change) or 'see the method'})")
    if method.trusted is not None:
        leaves.append(f"(changed before the server's steps see it: {first_line(method.trusted) or 'see the method'})")
    return {
        "leaves_a_client": leaves,
        "leaves_a_client_once": [slot for answer in answers for slot in _slots(answer.values, tried, len(answer.ids))],
        "stays_on_a_client": stays,
        "sent_to_a_client": ["the global model", *_slots(sent, tried, 1)],
    }


class _Tried(NamedTuple):
    """The sizes that a method was tried on: a size in numbers says something only beside these."""

    model: int  # bytes
    features: int


def privacy_of(phases: Sequence[Phase]) -> list[str]:
    """Return the claim after the first round of the last method, every client taking part; empty without one."""
    if not any(phase.method.releases for phase in phases):
        return []
    played = 1 + max((phase.until or 0 for phase in phases), default=0)
    stretches = stretches_of(phases, trial_model().init(0), Privacy())(played)
    after = f"after {played} round{'s' if played > 1 else ''}, everybody in each:"
    return [after, *statement(stretches, Privacy().delta).text().split("\n")]


def _slots(tree: Tree, tried: _Tried, copies: int) -> list[str]:
    return [f"{slot}: {_size(value, tried, copies)}" for slot, value in tree.items()]


def _size(value: Any, tried: _Tried, copies: int) -> str:
    """Return the quantity that a client's share grows with, as far as its size in the trial tells."""
    leaves = flatten(value) if not isinstance(value, Tensor) else {"": value}
    numbers, share = sum(leaf.numel() for leaf in leaves.values()) // copies, byte_size(value) // copies / tried.model
    each = {1: "one number", CLASSES: "one number for each class", tried.features: "one number for each feature"}
    each[UNLABELED] = "one number for each unlabeled row"
    if numbers in each:
        return each[numbers]
    if 0.95 < share < 1.05:
        return "as large as the model"
    if 0.05 <= share < 3:  # what is larger (a generator) does not grow with the trial's tiny model
        return f"{share:.2g} times the size of the model"
    sizes = f"{tried.features} features, {UNLABELED} unlabeled rows, {CLASSES} classes"
    return f"{numbers} numbers in a trial with {sizes}"
