"""The command that shows runs while they go on."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedstill.cli.app import say, stoppable, tell
from fedstill.core.errors import FedstillError
from fedstill.report.live import Live
from fedstill.report.runs import Runs
from fedstill.report.watch import KEY_BYTES, listen, make_token, read_key, serve
from fedstill.storage.files import default_cache_dir

KEY_FILE = "watch.key"  # in the cache folder


def watch_command(folders: Sequence[Path], port: int | None) -> None:
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise FedstillError(f"'{folder}' is a file: give the folder of a run or a comparison")
    with listen(port or 0) as listening, stoppable(lambda: None):
        token = make_token(_key(), listening.getsockname()[1], folders)
        serve(Live(folders, _reveals), listening, token, ready=_say)


def _key() -> bytes:
    file = default_cache_dir() / KEY_FILE
    try:
        return read_key(file)
    except OSError as error:
        tell(f"'{file}' cannot be used ({error.strerror or error}): the next start will have another address")
        return secrets.token_bytes(KEY_BYTES)


def _reveals(runs: Runs) -> Mapping[str, Sequence[str]]:
    from fedstill.cli.report import reveals_of  # here, because it loads torch

    return reveals_of(runs)


def _say(address: str) -> None:
    say(address)
    tell("open this address on this machine; Ctrl-C ends the page, not the runs")
