"""A SuperNode that runs the app in its own folder and no other. Takes the folder of the app, then Flower's options.

Flower lets whoever starts a run on the SuperLink send Python code to every SuperNode. A site of fedstill needs none of
it: the app is in the kit that its operator installed. So this SuperNode compares the app that arrives with that one.
"""

from __future__ import annotations

import io
import os
import sys
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError

LARGEST_FILE = 1 << 20  # bytes of one file of an app
PROJECT = "pyproject.toml"  # Flower writes it anew when it bundles an app


def check_app(bundle: bytes, installed: Path) -> None:
    """Refuse an app that has another file than the installed one, or one with other content."""
    known = {
        path.relative_to(installed).as_posix(): path.read_bytes() for path in installed.rglob("*.*") if path.is_file()
    }
    known = {name: content for name, content in known.items() if "__pycache__" not in name}
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        sent = {info.filename: info for info in archive.infolist() if not info.filename.startswith(".info/")}
        if len(sent) != len([info for info in archive.infolist() if not info.filename.startswith(".info/")]):
            raise FedstillError("the app that arrived names a file twice")
        if sent.keys() != known.keys():
            raise FedstillError(
                f"the app that arrived has other files than the installed one: {sorted(sent.keys() ^ known.keys())[:3]}"
            )
        for name, info in sent.items():
            if info.file_size > LARGEST_FILE or not _same(name, archive.read(name), known[name]):
                raise FedstillError(f"the app that arrived has another {name} than the installed one")


def _same(name: str, sent: bytes, here: bytes) -> bool:
    if name == PROJECT:
        return tomllib.loads(sent.decode()) == tomllib.loads(here.decode())
    return sent == here


def checked(connect: Callable[..., Any], installed: Path, refuse: Callable[[str], Exception]) -> Callable[..., Any]:
    """Return Flower's function that connects to a SuperLink, of which the app that it fetches is checked."""

    @contextmanager
    def connected(*args: Any, **options: Any) -> Iterator[Any]:
        with connect(*args, **options) as parts:
            *before, get_fab, pull, push, confirm = parts

            def fetch(fab_hash: str, run_id: int) -> Any:
                fab = get_fab(fab_hash, run_id)
                try:
                    check_app(fab.content, installed)
                except Exception as error:
                    raise refuse(str(error)) from None
                return fab

            yield (*before, fetch, pull, push, confirm)

    return connected


def main() -> None:
    """Start Flower's SuperNode with the check; refuse to start where this Flower has no place for it."""
    from flwr.supernode import start_client_internal as inside
    from flwr.supernode.cli.flower_supernode import flower_supernode

    def refuse(reason: str) -> Any:
        print(f"fedstill: refused to run: {reason}", file=sys.stderr, flush=True)
        return inside.RunNotRunningException()  # Flower leaves the message alone, and the SuperNode goes on

    installed = Path(sys.argv.pop(1)).resolve()
    if not (installed / PROJECT).is_file():
        raise SystemExit(f"fedstill: '{installed}' holds no app: install the kit that the server's operator sent")
    if not hasattr(inside, "http_request_response") or not hasattr(inside, "RunNotRunningException"):
        raise SystemExit("fedstill: this version of flwr cannot check apps: install flwr>=1.41,<1.43")
    inside.http_request_response = checked(inside.http_request_response, installed, refuse)  # type: ignore[attr-defined, unused-ignore]
    sys.argv[0] = "flower-supernode"
    # Flower starts flower-superexec by its name
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        flower_supernode()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # a thread of Flower's would keep the process, and nobody would start it again


if __name__ == "__main__":
    main()
