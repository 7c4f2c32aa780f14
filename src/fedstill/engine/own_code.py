"""Errors in a method's own code while clients train, told with the line that made them and the rule it breaks."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from fedstill.core.errors import FedstillError
from fedstill.core.mistakes import UndeclaredInput
from fedstill.core.vmap_rules import why_not_under_vmap

_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_RULES = "see 'Rules for the code of a term' in docs/adding-a-method.md"


def tell_mistake(error: Exception) -> None:
    """Raise what a user can act on, if the error comes from code outside of the library and a rule names it."""
    place = _own_place(error)
    if isinstance(error, UndeclaredInput):
        raise FedstillError(f"{place}: {error}" if place else str(error)) from error
    if place is None or isinstance(error, FedstillError):
        return
    if found := why_not_under_vmap(str(error)):
        does, instead = found
        raise FedstillError(
            f"{place} {does}, and so cannot run for many clients at once: {instead}, "
            f"or set engine.name = 'looped' ({_RULES})"
        ) from error


def _own_place(error: Exception) -> str | None:
    """The innermost line of the first file that is neither the library's nor PyTorch's."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame.f_code, line) for frame, line in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)]
    if not own:
        return None
    code, line = next(one for one in reversed(own) if one[0].co_filename == own[0][0].co_filename)
    return f"{code.co_qualname.partition('.<locals>')[0]} ({Path(code.co_filename).name}, line {line})"
