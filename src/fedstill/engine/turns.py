"""Models trained in turns, each with the stack and the optimiser of a client that runs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for, to_signed
from fedstill.core.trainer import Fitted
from fedstill.core.tree import clone, flatten, leaves, rows, tree_map
from fedstill.core.types import Output, Player, Scene, Seed, Tree, Weights
from fedstill.engine.cuda_graphs import capture
from fedstill.engine.group import row_at
from fedstill.engine.stack import Layout, Stack, View, allocate_weights

Each = Callable[[Weights, Tensor], Output]


def turns_key(players: Mapping[str, Player], drawn: Tree, given: Tree) -> object:
    """Of what one captured exchange can serve: rates may change, functions and forms may not."""
    who = tuple((name, p.loss, p.look, replace(p.training, lr=0.0, lr_decay=1.0)) for name, p in players.items())
    # an exchange more or less changes nothing: rows are looked up one at a time
    forms = [(name, leaf.shape[1:], leaf.dtype) for name, leaf in flatten(drawn).items()]
    return who, tuple(forms), tuple((name, leaf.shape, leaf.dtype) for name, leaf in flatten(given).items())


class Turns:
    """Runs exchanges: in each of them every player takes the steps of its turn, in order.

    A captured exchange reads copies of its own of all that is drawn and given, and they stay as long as it does: of
    ten teachers that is ten models more on the device, for each game.
    """

    def __init__(
        self,
        players: Mapping[str, Player],
        start: Mapping[str, Weights],
        each: Each,
        *,
        layouts: Mapping[str, Layout],
        autocast: Callable[[], AbstractContextManager[Any]],
        graphs: bool,
    ) -> None:
        self.players, self.each, self.autocast, self.graphs = dict(players), each, autocast, graphs
        self.stacks = {
            name: Stack(allocate_weights(start[name], 1, layouts[name]), 1, player.training)
            for name, player in players.items()
        }
        self.views = {name: View(stack, 1, stacked=False) for name, stack in self.stacks.items()}
        self.device = next(iter(self.stacks.values())).loss.device
        self.cursor = torch.zeros((), dtype=torch.int64, device=self.device)
        self.drawn: Tree = {}
        self.given: Tree = {}
        self.seeds = torch.zeros((0,), dtype=torch.int64, device=self.device)  # (I, one look and the steps of each)
        self.rates: dict[str, Tensor] = {}
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(
        self,
        players: Mapping[str, Player],
        start: Mapping[str, Weights],
        drawn: Tree,
        given: Tree,
        seed: Seed,
        optimizers: Mapping[str, Tree],
    ) -> dict[str, Fitted]:
        """players: the same as before but for their rates."""
        lengths = {len(leaf) for leaf in leaves(drawn)}
        if len(lengths) != 1:
            raise FedstillError(
                f"drawn: every leaf needs a row for each exchange, and they have {sorted(lengths)} rows"
            )
        exchanges = lengths.pop()
        self.players = dict(players)
        self._load(drawn, given, seed, exchanges)
        for name, stack in self.stacks.items():
            stack.reset(start[name])
            stack.go_on(optimizers.get(name, {}))
        self.cursor.zero_()
        for exchange in range(exchanges):
            if self.graphs:
                self._captured().replay()
            else:
                self._exchange(exchange)
        if not self.graphs:
            self.drawn, self.given = {}, {}  # a cohort's uploads, which would outlive the next one's training
        fitted = {}
        for name, stack in self.stacks.items():
            weights = rows(Weights(stack.params, stack.buffers), 0)
            # Not clones: those keep channels last, which a model out of a checkpoint does not have. Other strides take
            # other kernels, and a resumed run would differ in the last digits.
            plain = tree_map(lambda leaf: leaf.new_empty(leaf.shape).copy_(leaf), weights)
            fitted[name] = Fitted(plain, stack.optimizer(), stack.loss[0] / max(exchanges * self._steps(name), 1))
        return fitted

    def _steps(self, name: str) -> int:
        steps = self.players[name].training.steps
        if steps is None:
            raise FedstillError(f"player '{name}': training.steps says how many steps a turn has")
        return steps

    def _load(self, drawn: Tree, given: Tree, seed: Seed, exchanges: int) -> None:
        total = sum(1 + self._steps(name) for name in self.players)
        paths = seed_for(seed, np.arange(exchanges * total)) if exchanges * total else np.zeros(0, np.uint64)
        seeds = torch.from_numpy(np.ascontiguousarray(to_signed(paths)).reshape(exchanges, total)).to(self.device)
        rates = {name: self._rate(name) for name in self.players}
        if not self.graphs:
            self.drawn, self.given, self.seeds, self.rates = drawn, given, seeds, rates
            return
        if self.graph is None or len(self.seeds) < exchanges:
            self.graph = None  # static inputs of this length, for the first time
            self.drawn, self.given, self.seeds, self.rates = clone(drawn), clone(given), seeds, rates
            return
        tree_map(lambda old, new: old[: len(new)].copy_(new), self.drawn, drawn)
        tree_map(lambda old, new: old.copy_(new), (self.given, self.rates), (given, rates))
        self.seeds[:exchanges].copy_(seeds)

    def _rate(self, name: str) -> Tensor:
        """A device scalar in float32, which is what the fused kernels read; in float64 one number per row."""
        like, lr = self.stacks[name].loss, self.players[name].training.lr
        if like.dtype == torch.float64:
            return torch.full((1,), lr, dtype=torch.float64, device=self.device)
        return torch.tensor(lr, dtype=torch.float32, device=self.device)

    def _exchange(self, exchange: int | Tensor) -> None:
        drawn: Tree = tree_map(lambda leaf: row_at(leaf, exchange), self.drawn)
        seeds, at = row_at(self.seeds, exchange), 0
        for name in self.players:
            after = at + 1 + self._steps(name)
            self._turn(name, drawn, *seeds[at:after].unbind())
            at = after

    def _turn(self, name: str, drawn: Tree, look_seed: Tensor, *seeds: Tensor) -> None:
        player, view = self.players[name], self.views[name]
        now = {
            other: Weights({key: leaf.detach() for key, leaf in seen.params.items()}, seen.buffers)
            for other, seen in self.views.items()
        }
        scene = Scene(now, drawn, self.given, {}, self._number(0), look_seed, self.each)
        if seeds:
            with torch.no_grad(), self.autocast():
                scene = scene._replace(seen=player.look(scene))
        rate: float | Tensor = self.rates[name] if self.graphs else player.training.lr
        for step, seed in enumerate(seeds):
            here = self._number(step)
            with self.autocast():
                loss, buffers = player.loss(Weights(view.params, view.buffers), scene._replace(step=here, seed=seed))
            gradients = torch.autograd.grad(loss, view.leaves, materialize_grads=True)
            with torch.no_grad():
                view.loss.add_(loss.detach())
                view.keep(buffers)
                view.update(gradients, rate)

    def _number(self, value: int) -> Tensor:
        return torch.full((), value, dtype=torch.int64, device=self.device)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """One exchange as a CUDA graph, captured once."""
        if self.graph is None:
            changed = [tensor for stack in self.stacks.values() for tensor in stack.tensors()]
            self.graph = capture(self._once, self.cursor, changed)
        return self.graph

    def _once(self) -> None:
        self._exchange(self.cursor)
        self.cursor.add_(1)
