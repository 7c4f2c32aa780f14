"""One error for every mistake a user can make: what is wrong, where, what to do. The CLI exits with 2."""

from __future__ import annotations

import difflib
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FEDSTILL = str(Path(__file__).parents[1])
_INSTALLED = {"site-packages", "dist-packages"}  # folders that pip and Debian install packages into


class FedstillError(Exception):
    """One or several mistakes of a user, each in one line.

    >>> print(FedstillError("rounds = 0 must be at least 1", "unknown key 'sed': did you mean 'seed'?"))
    2 mistakes:
      rounds = 0 must be at least 1
      unknown key 'sed': did you mean 'seed'?
    """

    def __init__(self, *lines: str) -> None:
        self.lines = tuple(printable(line) for line in lines)  # each quotes names, and somebody else may have made them
        super().__init__(*self.lines)

    def __str__(self) -> str:
        if len(self.lines) < 2:
            return "".join(self.lines)
        return "\n".join([f"{len(self.lines)} mistakes:", *(f"  {line}" for line in self.lines)])


def printable(text: str, *, keep: str = "") -> str:
    """Return a text in one line, without signs that steer a terminal, turn the direction of writing or are half ones.

    White space of any kind becomes a space, and every other such sign a question mark; those in `keep` stay.

    >>> printable("cat\\x1b[2J\\ndog\\u202e")
    'cat?[2J dog?'
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in keep else " " if sign.isspace() else "?" for sign in text)


class _OneLine(logging.Filter):
    """Lets a line of the run's log hold no sign that `printable` would replace, whoever made the names in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), None
        return True


logging.getLogger("fedstill.run").addFilter(_OneLine())


@contextmanager
def noting(lines: list[str]) -> Iterator[None]:
    """Add the mistakes that the block raises to `lines`, so that the next check can run."""
    try:
        yield
    except FedstillError as error:
        lines += error.lines


def suggest(word: str, known: Iterable[str]) -> str:
    """' did you mean ...?' for the only known word with this beginning, else the nearest one, or the list."""
    options = sorted(known)
    longer = [option for option in options if len(word) > 2 and option.startswith(word)]
    near = longer if len(longer) == 1 else difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return "choose one of: " + ", ".join(options)


def in_one_line(error: Exception) -> str:
    """The error behind the line of an author's file that led to it, or else behind the innermost line of fedstill."""
    if isinstance(error, FedstillError):
        place, text = own_place(error), str(error)
    else:
        place, text = own_place(error) or own_place(error, _FEDSTILL), f"{type(error).__name__}: {error}"
    return f"{place}: {text}" if place else text


def own_place(error: Exception, folder: str = "") -> str:
    """The innermost line in a file of this folder, by default of no installed package; empty where there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code, package = frame.f_code, frame.f_globals.get("__name__", "").partition(".")[0]
        file = Path(code.co_filename)
        installed = package in {"fedstill", *sys.stdlib_module_names} or not _INSTALLED.isdisjoint(file.parts)
        if code.co_filename.startswith(folder) if folder else not installed:
            return f"{code.co_qualname.partition('.<locals>')[0]} ({file.name}, line {line})"
    return ""
