"""Note which modules a run enters, and say later which of them have changed since it was recorded."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from fedstill.loop.callbacks import Callback
from fedstill.loop.history import Row
from fedstill.report import counted

PACKAGE = Path(__file__).parents[1]
BETWEEN = 10  # rounds between two that are watched, because a profile function slows every call
WATCHERS = ("bench", "cli", "report")  # rooms that start, watch and show a run, and compute none of its numbers
UNKNOWN = "recorded without its code: unknown whether it has changed"


class CodeWatch(Callback):
    """Collects the modules of the package whose functions a run calls, as paths such as loop/round.py.

    It watches everything before the first round, rounds 1 and 2, every tenth round and the last one. Python's compiled
    parts, other packages, files outside the package and the rooms that only watch do not count.
    """

    def __init__(self, rounds: int) -> None:
        self.entered: set[str] = set()
        self._rounds, self._folder, self._files = rounds, f"{PACKAGE}{os.sep}", set[str]()
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        sys.setprofile(self._before)
        modules = (Path(file).relative_to(PACKAGE) for file in self._files)
        self.entered |= {module.as_posix() for module in modules if module.parts[0] not in WATCHERS}

    def on_round(self, row: Row) -> None:
        following = int(row["round"]) + 1
        watched = following <= 2 or following % BETWEEN == 0 or following >= self._rounds
        sys.setprofile(self._note if watched else self._before)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._folder) and code.co_name != "<module>":
            self._files.add(code.co_filename)


def digests(modules: Iterable[str]) -> dict[str, str]:
    """Return eight letters for the source of each module that the package has now."""
    files = {module: PACKAGE / module for module in sorted(modules)}
    return {
        module: hashlib.sha256(file.read_bytes()).hexdigest()[:8] for module, file in files.items() if file.is_file()
    }


def changed_modules(run: Mapping[str, Any]) -> list[str] | None:
    """Return the modules whose source is another one than at the time of the run; None if its record names none."""
    recorded: Mapping[str, str] | None = run.get("code")
    if recorded is None:
        return None
    now = digests(recorded)
    return [module for module, digest in recorded.items() if now.get(module) != digest]


def code_lines(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each kind of recorded run: unknown code, or the same changes; none for unchanged code."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        changed = changed_modules(run)
        if changed is None:
            words = UNKNOWN
        elif changed:
            words = f"recorded with other code: {counted(len(changed), 'module')} changed: {', '.join(changed)}"
        else:
            continue
        labels.setdefault(words, []).append(f"{run['row']} {run['column']} seed {run['seed']}")
    return [f"{_shortened(names)} {words}" for words, names in labels.items()]


def _shortened(names: Sequence[str], most: int = 3) -> str:
    """Return the first names and how many more there are.

    >>> _shortened(["a", "b"]), _shortened(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
