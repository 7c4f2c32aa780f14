"""A process that trains clients for a driver: it builds the run from a recipe, and holds the data of all clients."""

from __future__ import annotations

import os
import platform
import traceback
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fedstill import __version__
from fedstill.compose.moving import moves_all, moving
from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError, in_one_line
from fedstill.core.population import Order
from fedstill.core.tree import as_tree, tree_map
from fedstill.core.types import Federation, Seed, Uploads, Weights
from fedstill.loop.federate import Built, first_weights, make_task, share_states_of, suited
from fedstill.loop.privacy_plan import with_sent_counts
from fedstill.loop.site import Site

Arrays = dict[str, Any]  # nested dicts with numpy arrays at the leaves: the form in which trees travel
HERE = {"fedstill": __version__, "torch": torch.__version__, "python": platform.python_version()}


class Recipe(Protocol):
    """Builds a run in another process. It travels there by pickle, so it holds text and bytes."""

    def __call__(self, federation: Federation, device: str) -> Built: ...


class Kit(NamedTuple):
    """All that a worker needs to train clients as the driver would; it travels by pickle."""

    recipe: Recipe
    federation: Federation  # without any row
    device: str  # as engine.device says
    noise_seed: Seed
    threads: int
    versions: Mapping[str, str] = HERE  # of the driver


class Failed(NamedTuple):
    """The error in which a worker's task ended: a user's mistake, or with a traceback."""

    lines: tuple[str, ...]
    traceback: str = ""


def arrays_of(tree: Any) -> Any:
    """Return a tree with arrays in place of its tensors."""
    return tree_map(lambda leaf: leaf.detach().cpu().contiguous().numpy(), tree)


def tensors_of(tree: Any, device: torch.device | str) -> Any:
    """Return a tree with tensors in place of its arrays, as copies, because arrays of an object store are read-only."""
    return tree_map(lambda leaf: torch.tensor(leaf, device=device), tree)


def rows_of(federation: Federation) -> Arrays:
    """Return the rows of all clients, and who holds which, as arrays."""
    train = federation.train
    rows: Arrays = arrays_of({"x": train.x, "y": train.y, "indices": federation.indices, "offsets": federation.offsets})
    return rows


def outline_of(federation: Federation) -> Federation:
    """Return what workers know of a federation beside the rows of its clients: nothing that the server holds."""
    nothing = replace(federation.train, x=federation.train.x[:0].clone(), y=federation.train.y[:0].clone())
    none = federation.indices[:0].clone()
    return Federation(nothing, nothing, none, none, names=federation.names, public_facts=federation.public_facts)


def with_rows(outline: Federation, rows: Arrays) -> Federation:
    """Return the federation of an outline and its rows, which are not copied: the workers of a machine share them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of arrays that are read-only, and engines do not write to data
        x, y, indices, offsets = (torch.from_numpy(rows[name]) for name in ("x", "y", "indices", "offsets"))
    return replace(outline, train=replace(outline.train, x=x, y=y), indices=indices, offsets=offsets)


class Worker:
    """Trains clients in its own process. It is made at once, and builds the run with its first call."""

    def __init__(self, kit: Kit, rows: Arrays, device: str) -> None:
        self._kit, self._rows, self._device = kit, rows, device

    def begin(self) -> str | Failed:
        """Build the run, and return the name of this process for people."""
        try:
            assert self._site
            return f"process {os.getpid()} of {platform.node()}"
        except Exception as error:
            return _failed(error)

    def do(self, task: str, common: Any, *piece: Any) -> Any:
        """Do a task by its name, "play" or "answer"; return its result, or the error in which it ended."""
        try:
            return self._play(common, *piece) if task == "play" else self._answer(common, *piece)
        except Exception as error:
            return _failed(error)

    @cached_property
    def _site(self) -> Site:
        kit = self._kit
        for package, version in kit.versions.items():
            if HERE[package] != version:
                raise FedstillError(
                    f"{platform.node()} has {package} {HERE[package]}, and the driver {version}: install the same"
                )
        torch.set_num_threads(kit.threads)
        built = kit.recipe(with_rows(kit.federation, self._rows), self._device)
        engines = built.engines(model=built.model, federation=built.federation)
        task = make_task(built, suited(phases_of(built.method), built.model, built.training), engines)
        _, phases = share_states_of(task.phases, first_weights(built, engines.trainer), built.model)
        return Site(with_sent_counts(replace(task, phases=phases, noise_seed=kit.noise_seed)))

    def _play(self, common: Arrays, ids: np.ndarray, states: Arrays, noise_seed: Seed) -> tuple[Arrays, Arrays]:
        site = self._site
        task, device = site.task, site.task.engine.device
        sent = tensors_of(common["tensors"], device)
        order = Order(common["round"], Weights(**sent["start"]), sent["received"])
        trained = site.play(order, np.array(ids), tensors_of(states, device), noise_seed)
        uploads = trained.uploads
        if not isinstance(uploads, Uploads):
            raise FedstillError("an engine whose clients send messages cannot work for a cluster: choose another one")
        if not moves_all(task.model, part := task.training.part):  # the driver has the other tensors
            uploads = uploads._replace(weights=moving(uploads.weights, task.model, part))
        return arrays_of(as_tree(uploads)), arrays_of(trained.states)

    def _answer(self, common: Arrays, ids: Collection[int], noise_seed: Seed) -> dict[int, Any]:
        site = self._site
        questions = {question.name: question for question in site.task.method(common["round"]).questions}
        question, sent = questions[common["question"]], tensors_of(common["tensors"], site.task.engine.device)
        answers = site.answers(question, ids, sent, round=common["round"], noise_seed=noise_seed)
        return {client: answer if isinstance(answer, str) else arrays_of(answer) for client, answer in answers}


def _failed(error: Exception) -> Failed:
    if isinstance(error, FedstillError):
        return Failed(error.lines)
    return Failed((in_one_line(error),), "".join(traceback.format_exception(error)))
