"""What all commands share: a mistake is one line on stderr and exit code 2; answers go to stdout."""

from __future__ import annotations

import json
import sys
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


def print_json(answer: Any) -> None:
    typer.echo(json.dumps(answer, indent=2, allow_nan=False))
