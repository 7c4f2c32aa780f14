"""A closed folder: the folder of a run whose claim covers all that the public sees, with nothing beside the release.

A simulation can measure what nobody in a deployment would see: training losses, who took part, how many samples of each
class a client holds. In a folder that is published one such number tells two worlds apart, whatever the noise hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstill.loop.history import Row
from fedstill.loop.round import Task
from fedstill.storage.files import write_whole

OF_CLIENTS = ("train_loss", "client_mean", "client_worst", "accepted_scale")
NO_LOG = "The log is not kept here: it may say what clients hold, and privacy.json claims that this folder does not.\n"


def closed_row(row: Row, task: Task, sent: int) -> Row:
    """Return the numbers of a round without those of clients' own data; a cohort has its expected size.

    sent: bytes of the model, which are counted for each client of that size where nobody learns the true one.

    The round's records are left out, too, because a refused upload is a fact about a client's data.
    """
    kept = {key: value for key, value in row.items() if key not in OF_CLIENTS}
    kept |= {"cohort": task.cohort, "accepted": task.cohort, "train_loss": None}
    hidden = dict.fromkeys(("bytes_up", "bytes_down"), task.cohort * sent) if task.sampling == "poisson" else {}
    return {**kept, **hidden}


@contextmanager
def no_log(folder: Path | None) -> Iterator[None]:
    """Say in log.txt why it is empty."""
    if folder is not None:
        write_whole(folder / "log.txt", NO_LOG)
    yield
