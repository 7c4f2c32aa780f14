"""One error for every mistake a user can make: what is wrong, where, what to do. The CLI exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedstillError(Exception):
    """A user's mistake, told in one line."""


def suggest(word: str, known: Iterable[str]) -> str:
    """' did you mean ...?' for the nearest known word, or the list when nothing is near."""
    options = sorted(known)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return "choose one of: " + ", ".join(options)
