"""The app that a SuperNode starts for each message: it hands the bytes to the site's daemon, and the answer back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedstill.deploy.flower.transport import ANSWER, COMMON, OWN, bytes_of, record_of
from fedstill.deploy.socket import NotThere, hand_over

SOCKET = "socket"  # the key of --node-config that names the socket of the site's daemon
TRY_AGAIN = 1.0  # seconds


def client_app() -> Any:
    """Return Flower's ClientApp of a site. It sees no data and trains nothing: the daemon does."""
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def answer(message: Any, context: Any) -> Any:
        ends = message.metadata.created_at + message.metadata.ttl
        path = Path(str(context.node_config[SOCKET]))
        data = patient(path, bytes_of(message.content[COMMON]), bytes_of(message.content[OWN]), ends=ends)
        return Message(RecordDict({ANSWER: record_of(data)}), reply_to=message)

    return app


def patient(path: Path, common: bytes, own: bytes, *, ends: float) -> bytes:
    """Hand an order to the daemon, again and again until its deadline, because a killed daemon is started again.

    A daemon that sees an order twice answers it twice with the same bytes.
    """
    while True:
        try:
            return hand_over(path, common, own, timeout=max(ends - time.time(), TRY_AGAIN))
        except NotThere:
            if time.time() + TRY_AGAIN > ends:
                raise
            time.sleep(TRY_AGAIN)
