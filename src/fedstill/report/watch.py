"""The server of a live page: it listens on this machine only, and answers two addresses behind a token."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import FedstillError
from fedstill.report.live import Live, event
from fedstill.report.page import make_live_page
from fedstill.report.panels import panel_makers
from fedstill.storage.files import writing

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESS = "127.0.0.1"
SHARE = 1 / 64  # of the time of one core: for looks at the folders, and once more for making the report's sections
SOONEST, LATEST = 0.4, 20.0  # seconds between two looks, and between two makings of the sections
BEAT = 10.0  # seconds: a reader hears from the server at least this often
PATIENCE = 10.0  # seconds: who does not ask or does not read for so long is dropped
MOST_CONNECTIONS, MOST_READERS = 64, 16
PIECE = 65_536  # bytes that are handed to a connection at a time
KEY_BYTES = 32
BEAT_EVENT = event("beat", {})
HEADERS = (
    ("cache-control", "no-store"),
    ("connection", "close"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)


def make_token(key: bytes, port: int, folders: Sequence[Path]) -> str:
    """Return the token of an address: the same for the same key, port and folders, so that open pages find it again."""
    text = "\n".join([str(port), *(str(folder.resolve()) for folder in folders)])
    digest = hmac.digest(key, text.encode("utf-8", "surrogateescape"), hashlib.sha256)
    return base64.urlsafe_b64encode(digest[:24]).decode()


def read_key(file: Path) -> bytes:
    """Return the secret that tokens are made from; nobody but this user can read its file.

    A file that is missing, damaged or readable by others is written anew.
    """
    try:
        private = os.name != "posix" or not file.stat().st_mode & 0o077
        if private and len(key := file.read_bytes()) == KEY_BYTES:
            return key
    except FileNotFoundError:
        pass
    key = secrets.token_bytes(KEY_BYTES)
    with writing(file) as open_file:
        if os.name == "posix":
            os.fchmod(open_file.fileno(), 0o600)
        open_file.write(key)
    return key


def listen(port: int) -> socket.socket:
    """Return a socket of this machine's own address; port 0 takes a free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # after a restart the port of the old process is free at once
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ADDRESS, port))
        listening.listen(MOST_CONNECTIONS)  # now, so that a reader of the address is never refused
    except OSError as error:
        listening.close()
        reason = f"--port {port}: {error.strerror or error}"
        raise FedstillError(f"{reason}: choose another port, or leave --port out") from None
    return listening


class Guard:
    """Passes on requests with GET, this machine's name and the token; all others get 403 and no further word."""

    def __init__(self, app: ASGIApp, *, token: str, port: int, policy: str) -> None:
        self.app, self.token = app, token.encode()
        self.hosts = {f"{name}:{port}".encode() for name in (ADDRESS, "localhost")}  # no other: DNS rebinding
        more = ("content-security-policy", f"{policy}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
        self.headers = [(name.encode(), value.encode()) for name, value in (*HEADERS, more)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import Response

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
            await send(message)

        allowed = scope["type"] == "http" and self._allows(scope)
        await (self.app if allowed else Response(status_code=403))(scope, receive, send_safely)

    def _allows(self, scope: Scope) -> bool:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        given = scope["path"].split("/")[1] if scope["path"].startswith("/") else ""
        right = hmac.compare_digest(given.encode("utf-8", "replace"), self.token)
        return right and scope["method"] == "GET" and len(hosts) == 1 and hosts[0] in self.hosts


class Watch:
    """A live page, and its readers. A reader is sent the newest state only: nothing is queued for a slow one."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.readers = 0
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()

    def app(self, token: str, port: int) -> ASGIApp:
        from starlette.applications import Starlette
        from starlette.responses import Response
        from starlette.routing import Route

        page = make_live_page()
        content = page.html.encode()

        async def send_page(request: Request) -> Response:
            return Response(content, media_type="text/html")

        async def send_events(request: Request) -> Response:
            if self.readers >= MOST_READERS:
                return Response(status_code=503)
            return _events(self)

        routes = [Route(f"/{token}/", send_page), Route(f"/{token}/events", send_events)]
        app = Starlette(routes=routes)
        app.router.redirect_slashes = False
        return Guard(app, token=token, port=port, policy=page.policy)

    async def keep_fresh(self) -> None:
        """Look at the folders again and again while somebody reads, as often as the share of time allows."""
        await asyncio.to_thread(panel_makers)  # loads packages for a second, often before the runs begin
        spent, sections_at = time.process_time(), 0.0
        while True:
            if not self.readers:
                self._wanted.clear()
                await self._wanted.wait()
                spent = time.process_time()
            made = self.live.times_made
            if await asyncio.to_thread(self.live.refresh, sections=time.monotonic() >= sections_at):
                self._changed.set()
                self._changed = asyncio.Event()
            now = time.process_time()  # of all threads: reading, rendering and sending
            cost, spent = now - spent, now
            pause = min(LATEST, max(SOONEST, cost / SHARE))
            if self.live.times_made == made:
                await asyncio.sleep(pause)
            else:  # looks go on meanwhile
                sections_at = time.monotonic() + pause
                await asyncio.sleep(SOONEST)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Send the newest events to one reader until it goes."""

        async def write(content: bytes) -> None:
            for place in range(0, len(content), PIECE):
                piece = content[place : place + PIECE]
                await send({"type": "http.response.body", "body": piece, "more_body": True})

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        leaving = asyncio.ensure_future(leave())
        self.readers += 1
        self._wanted.set()
        try:
            seen: dict[str, int] = {}
            while not leaving.done():
                changed = self._changed
                for name in list(self.live.frames):
                    frame = self.live.frames.get(name)  # the newest one, although earlier ones took their time
                    if frame is not None and seen.get(name) != frame.version:
                        seen[name] = frame.version
                        await write(frame.content)
                waiting = asyncio.ensure_future(changed.wait())
                await asyncio.wait({waiting, leaving}, timeout=BEAT, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    await write(BEAT_EVENT)
        finally:
            self.readers -= 1
            leaving.cancel()


def _events(watch: Watch) -> Response:
    from starlette.responses import Response

    class Events(Response):
        media_type = "text/event-stream"

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await watch.stream(receive, send)

    return Events()


def _connection() -> type[asyncio.Protocol]:
    """Return uvicorn's connection, with a limit on their number and on the patience with each.

    Where there are too many, the oldest that has not asked makes room, because a browser asks at once.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        _dropping: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            by_age[self] = None
            if len(self.connections) > MOST_CONNECTIONS:
                dropped = next((each for each in by_age if not each.cycle), self)
                del by_age[dropped]
                dropped.transport.abort()
            self.loop.call_later(PATIENCE, lambda: None if self.cycle else transport.abort())

        def pause_writing(self) -> None:
            super().pause_writing()
            self._dropping = self.loop.call_later(PATIENCE, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._dropping is not None:
                self._dropping.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            by_age.pop(self, None)
            if self._dropping is not None:
                self._dropping.cancel()

    by_age: dict[Connection, None] = {}
    return Connection


def serve(live: Live, listening: socket.socket, token: str, *, ready: Callable[[str], None]) -> None:
    """Serve the page of some folders until a signal ends it.

    ready: called with the address of the page when it can be opened.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise FedstillError("watch needs starlette and uvicorn: pip install 'fedstill[watch]'") from None
    port = listening.getsockname()[1]

    async def main() -> None:
        watch = Watch(live)
        config = uvicorn.Config(
            watch.app(token, port),
            http=_connection(),
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,  # a log would hold the token
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=0,
        )
        refreshing = asyncio.create_task(watch.keep_fresh())
        try:
            ready(f"http://{ADDRESS}:{port}/{token}/")
            await uvicorn.Server(config).serve(sockets=[listening])
        finally:
            refreshing.cancel()

    asyncio.run(main())
