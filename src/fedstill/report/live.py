"""The sections of a page while its runs go on: what has changed in the folders is read and rendered again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.core.errors import in_one_line
from fedstill.report.page import Section, in_json, make_section, make_sections, page_size, page_title
from fedstill.report.runs import METRICS_FILE, RESULTS_FILE, Run, Runs, gap_lines, read_run, read_runs, run_folders
from fedstill.report.under_way import UnderWay, find_work, panel, without

UNDER_WAY = "under_way"  # the section that a report does not have
Stamp = Mapping[str, tuple[int, int, int]]  # name of a file -> its time, size and number


class Frame(NamedTuple):
    """One event for the readers of a page; of each name they need the newest only."""

    version: int
    content: bytes


def event(kind: str, tree: Mapping[str, Any]) -> bytes:
    """Return an event as text/event-stream has it; `in_json` writes one line."""
    return f"event: {kind}\ndata: {in_json(tree)}\n\n".encode()


class Live:
    """The newest state of the page of some folders, as events by name: first the layout, then each section.

    reveals: returns everything that leaves a client, by the method's name as the runs have it. It is asked when no run
        is at work, because the answer takes as long as a hundred sections.
    """

    def __init__(
        self, folders: Sequence[Path], reveals: Callable[[Runs], Mapping[str, Sequence[str]]] = lambda runs: {}
    ) -> None:
        self.folders, self.reveals = list(dict.fromkeys(folders)), reveals
        self.frames: Mapping[str, Frame] = {}  # replaced as a whole, so that another thread may read it
        self._version = 0
        self._known: dict[Path, tuple[Stamp, str, Run]] = {}
        self._seen: object = None  # everything that the frames were made from
        self._runs: Runs | None = None
        self._shown: Runs | None = None  # the runs that the sections were made from
        self._sections: dict[str, Section] = {}
        self._revealed: tuple[list[str], Mapping[str, Sequence[str]]] | None = None  # of these methods
        self._waiting: list[str] = []

    def refresh(self) -> bool:
        """Look at the folders, and make new frames of everything that has changed; return whether there is any."""
        try:
            seen = self._look()
            if seen != self._seen:
                self._read()
                self._seen = seen
            return self._publish()
        except OSError as error:  # a folder is being moved or deleted: the next look will see it as it then is
            return self._put({"state": event("state", {"words": in_one_line(error), "share": None})})

    def _look(self) -> object:
        """Return the times and sizes of all files that the page depends on."""
        places = {folder: run_folders(folder) if folder.is_dir() else [] for folder in self.folders}
        stamps = {place: _stamp(place) for below in places.values() for place in below}
        return {folder: (_stamp(folder), _stamp(folder / "references")) for folder in self.folders}, stamps

    def _read(self) -> None:
        ready = [folder for folder in self.folders if folder.is_dir() and _has_begun(folder)]
        self._waiting = [folder.name for folder in self.folders if folder not in ready]
        self._runs = read_runs(ready, read=self._read_run) if ready else None
        there = set() if self._runs is None else {run.folder for run in self._runs.all}
        self._known = {place: known for place, known in self._known.items() if place in there}

    def _read_run(self, folder: Path, name: str) -> Run:
        """Return the run in a folder; the same object as before where no file of it has changed."""
        stamp = _stamp(folder)
        known = self._known.get(folder)
        if known is None or known[:2] != (stamp, name):
            known = self._known[folder] = stamp, name, read_run(folder, name)
        return known[2]

    def _publish(self) -> bool:
        runs = self._runs
        work = [] if runs is None else find_work(runs.all, self.folders)
        at_work = {place for each in work for place in each.at_work}
        under_way = UnderWay(work, self._waiting, {place: _age(place / METRICS_FILE) for place in at_work})
        if runs is not None:
            to_come = {line for run in runs.all if run.folder in at_work for line in gap_lines(run, runs.folders)}
            gaps = [line for line in runs.gaps if line not in to_come]
            shown = replace(runs, by_method=without(runs, under_way.left_out), gaps=gaps)
            if not under_way.is_going:
                if self._revealed is None or self._revealed[0] != list(shown.by_method):
                    self._revealed = list(shown.by_method), self.reveals(shown)
                shown = replace(shown, reveals=self._revealed[1])
            if shown != self._shown:
                self._shown, self._sections = shown, make_sections(shown, static=False)
        else:
            self._shown, self._sections = None, {}
        sections = dict(self._sections)
        if (made := panel(under_way, self._shown)) is not None:
            sections = {UNDER_WAY: make_section(UNDER_WAY, made, static=False), **sections}
        title = "fedstill watch" if runs is None else page_title(runs)
        order = [[name, section.title] for name, section in sections.items()]
        layout = {"title": title, "by": "" if runs is None else page_size(runs), "order": order}
        return self._put(
            {
                "layout": event("layout", layout),
                "state": event("state", {"words": under_way.in_words(), "share": under_way.share}),
                **{name: event("section", {"name": name, "html": each.html}) for name, each in sections.items()},
            }
        )

    def _put(self, events: Mapping[str, bytes]) -> bool:
        """Keep the frames of events that are as before, and give the others a new version."""
        old = self.frames
        new = {
            name: old[name] if name in old and old[name].content == content else Frame(self._version + 1, content)
            for name, content in events.items()
        }
        if new == old:
            return False
        self._version += 1
        self.frames = new
        return True


def _has_begun(folder: Path) -> bool:
    below = run_folders(folder)
    return bool(below) and not (below == [folder] and (folder / RESULTS_FILE).exists())


def _stamp(folder: Path) -> Stamp:
    """Return time, size and number of each file in a folder; empty where there is no such folder."""
    stamps = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file() and not entry.name.startswith("."):
                    about = entry.stat()
                    stamps[entry.name] = about.st_mtime_ns, about.st_size, about.st_ino
    except OSError:
        return stamps
    return stamps


def _age(file: Path) -> float:
    """Return the seconds since a file was changed; 0 where there is none."""
    try:
        return max(0.0, time.time() - file.stat().st_mtime)
    except OSError:
        return 0.0
