"""What all commands share: a mistake is one line on stderr and exit code 2; answers go to stdout."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from fedstill.core.errors import FedstillError, suggest


class Format(StrEnum):
    """How an answer is printed."""

    text = "text"
    json = "json"


class OneLineErrors(TyperGroup):
    """Commands whose mistakes, typer's own included, are told in one line without a traceback."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except FedstillError as error:
            fail(str(error))
        except Exception as error:
            # typer brings its own copy of click since 0.20 or so: both kinds of usage error have this method.
            if not hasattr(error, "format_message"):
                raise
            fail(error.format_message())
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise FedstillError(f"unknown command '{args[0]}': {suggest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def fail(message: str) -> NoReturn:
    tell(" ".join(message.split()))
    sys.exit(2)


def tell(line: str) -> None:
    """A line for the person in front; stdout stays for answers."""
    print(f"fedstill: {line}", file=sys.stderr, flush=True)


class Ended(KeyboardInterrupt):
    """SIGTERM, as a scheduler, `timeout` or a container sends it: to be taken as Ctrl-C is."""


@contextmanager
def stoppable(how_to_go_on: Callable[[], str | None]) -> Iterator[None]:
    """Who stops long work is told how to go on; it exits as shells expect: 130 after Ctrl-C, 143 after SIGTERM."""

    def end(number: int, frame: object) -> NoReturn:
        raise Ended

    alone = threading.current_thread() is threading.main_thread()  # no other thread may say what a signal does
    before = signal.signal(signal.SIGTERM, end) if alone else None
    try:
        yield
    except KeyboardInterrupt as stopped:
        if told := how_to_go_on():
            tell(f"stopped; {told}")
        raise typer.Exit(143 if isinstance(stopped, Ended) else 130) from None
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def print_json(answer: Any) -> None:
    typer.echo(json.dumps(answer, indent=2, allow_nan=False))
