"""Several models trained in turns: a generator that looks for hard samples, a student that learns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from fedstill.core.types import Output, Params, Training, Tree, Weights


class Scene(NamedTuple):
    """All that a player may look at in one step; no gradient goes into any of it."""

    weights: Mapping[str, Weights]  # of every player, as they are now
    drawn: Tree  # of this exchange: its row of what `take_turns` was given
    given: Tree  # the same in all exchanges: teachers, class weights
    seen: Tree  # what the player's own `look` found when its turn began
    step: Tensor  # int64 scalar: its step within the turn, from 0; a look comes before step 0 and reads 0
    seed: Tensor  # int64 scalar of this exchange, player and step, or of its look; for core.seeds.uniform / normal
    each: Callable[[Weights, Tensor], Output]  # (stacked weights, x) -> (T, B, ...) in eval mode; x gets its gradient


def nothing_seen(_: Scene) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Player:
    """One of several models that are trained in turns. Functions are made once: an engine keeps what it captured.

    loss: (own weights, which get the gradient, scene) -> (scalar, new buffers).
    training: optimiser and rate; its `steps` are those of one turn.
    look: once when a turn begins, without gradient: what stays the same over its steps.
    """

    loss: Callable[[Weights, Scene], tuple[Tensor, Params]]
    training: Training
    look: Callable[[Scene], Tree] = nothing_seen
