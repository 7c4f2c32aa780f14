"""The only door to a SuperLink from outside: nodes may fetch orders and hand in answers, and nothing else.

A SuperLink serves three APIs on one port, and asks for no credentials in two of them: who reaches the port can register
a node and start an app on every SuperNode. So the SuperLink listens on the machine itself, and sites reach this proxy.
"""

from __future__ import annotations

import re
import ssl
import sys
from pathlib import Path
from typing import Any

from fedstill.deploy.flower.files import AUTHORITY, read_addresses, server_folder

ALLOWED = re.compile(r"/v1/fleet/[a-z-]+")
REFUSED = {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}  # the operator registers nodes, see run.py
LARGEST_BODY = 64 << 20  # bytes; Flower cuts what it sends into pieces of 5 MB
PATIENCE = 60.0  # seconds for an answer of the SuperLink
OF_ONE_CONNECTION = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "content-encoding"}


def is_allowed(method: str, path: str) -> bool:
    """Return whether a request from outside may reach the SuperLink. path: as it was sent, before any decoding."""
    return method == "POST" and ALLOWED.fullmatch(path) is not None and path not in REFUSED


def proxy_app(superlink: str, authority: Path) -> Any:
    """Return the ASGI app that hands the requests of nodes to the SuperLink at host:port."""
    from httpx import AsyncClient, HTTPError
    from starlette.responses import PlainTextResponse, Response

    trusted = ssl.create_default_context(cafile=str(authority))
    client = AsyncClient(verify=trusted, timeout=PATIENCE, trust_env=False)

    async def forward(request: Any) -> Any:
        path = request.scope["raw_path"].decode("latin-1")
        if not is_allowed(request.method, path) or request.scope["query_string"]:
            return PlainTextResponse("not here", 404)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_BODY:
                return PlainTextResponse("too large", 413)
        try:
            answer = await client.post(
                f"https://{superlink}{path}", content=bytes(body), headers=_kept(request.headers)
            )
        except HTTPError as error:
            return PlainTextResponse(f"the SuperLink does not answer: {type(error).__name__}", 502)
        return Response(answer.content, answer.status_code, _kept(answer.headers))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        if scope["type"] == "http":
            await (await forward(Request(scope, receive)))(scope, receive, send)

    return app


def _kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_ONE_CONNECTION}


def main(folder: Path) -> None:
    """Serve until stopped; the addresses are those of the deployment's folder."""
    import uvicorn

    addresses = read_addresses(folder)
    host, _, port = addresses.listen.rpartition(":")
    uvicorn.run(
        proxy_app(addresses.superlink, server_folder(folder) / AUTHORITY / "ca.crt"),
        host=host.strip("[]"),
        port=int(port),
        ssl_certfile=str(server_folder(folder) / "server.crt"),
        ssl_keyfile=str(server_folder(folder) / "server.key"),
        log_level="warning",
        lifespan="off",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
