"""Ends workers by kill -9 while a run goes on."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading

from fedstill.loop.callbacks import Callback
from fedstill.loop.history import Row

LINE = re.compile(r"worker (\d+) is process (\d+) of")


class Kills(Callback, logging.Handler):
    """Kills the newest process of each worker in turn, one a round, some time after the round has begun.

    It reads the processes from the lines of the log. after: seconds; rounds: in which one is killed.
    """

    def __init__(self, after: float, rounds: int) -> None:
        logging.Handler.__init__(self, logging.INFO)
        self.after, self.rounds = after, rounds
        self.process: dict[int, int] = {}
        self.killed: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        if found := LINE.search(record.getMessage()):
            self.process[int(found[1])] = int(found[2])

    def on_round(self, row: Row) -> None:
        if row["round"] < self.rounds:
            threading.Timer(self.after, self._kill, [row["round"]]).start()

    def _kill(self, round: int) -> None:
        process = self.process[round % len(self.process)]
        if process not in self.killed:
            self.killed.append(process)
            os.kill(process, signal.SIGKILL)
