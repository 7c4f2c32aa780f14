"""One error for every mistake a user can make: what is wrong, where, what to do. The CLI exits with 2."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

_FEDSTILL = str(Path(__file__).parents[1])
_INSTALLED = (_FEDSTILL, "<", *(sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib")))


class FedstillError(Exception):
    """A user's mistake, told in one line."""


def suggest(word: str, known: Iterable[str]) -> str:
    """' did you mean ...?' for the nearest known word, or the list when nothing is near."""
    options = sorted(known)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return "choose one of: " + ", ".join(options)


def in_one_line(error: Exception) -> str:
    """The error behind the line of an author's file that led to it, or else behind the innermost line of fedstill."""
    place, what = own_place(error), str(error)
    if not isinstance(error, FedstillError):
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        place = place or _place(*[frame for frame in frames if frame[0].co_filename.startswith(_FEDSTILL)][-1])
        what = f"{type(error).__name__}: {error}"
    return f"{place}: {what}" if place else what


def own_place(error: Exception) -> str | None:
    """The innermost line of the first file that belongs to no installed package; None where there is no such file."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame[0].co_filename.startswith(_INSTALLED)]
    return _place(*[frame for frame in own if frame[0].co_filename == own[0][0].co_filename][-1]) if own else None


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_qualname.partition('.<locals>')[0]} ({Path(code.co_filename).name}, line {line})"
