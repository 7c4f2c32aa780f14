"""Read and write TOML; reading a written table gives the same table back."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.storage.files import read_text

LONGEST_FILE = 16_000_000  # letters
_DEEP_KEY = re.compile(r"""(?<![\w"'.-])(?:[\w"'-]++\s*+\.\s*+){64}""")  # tomllib takes the square of its parts
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def loads(text: str, *, where: str = "TOML") -> dict[str, Any]:
    """Parse TOML; the message about a syntax error names the file `where` and the line."""
    if len(text) > LONGEST_FILE or _DEEP_KEY.search(text):
        raise FedstillError(f"{where}: too large, or a key of too many parts, for an experiment file")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FedstillError(f"{where}: not valid TOML: its brackets are nested too deep") from None
    except ValueError as error:  # of TOML, or a number of more than 4300 digits
        raise FedstillError(f"{where}: not valid TOML: {error}; a line reads: key = value") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a file; the message about a missing file suggests the file with the most similar name."""
    if path.is_dir():
        raise FedstillError(f"'{path}' is a folder: give the .toml file itself")
    if not path.is_file():
        near = difflib.get_close_matches(str(path), [str(other) for other in path.parent.glob("*.toml")], n=1)
        hint = f"did you mean '{near[0]}'?" if near else "write one, or leave it out for the quick start"
        raise FedstillError(f"no experiment file '{path}': {hint}")
    try:
        return loads(read_text(path), where=path.name)
    except UnicodeDecodeError:
        raise FedstillError(f"{path.name}: not a text file: TOML is UTF-8 text") from None
    except OSError as error:
        raise FedstillError(f"{path.name} cannot be read: {error.strerror or error}") from None


def parse_value(text: str) -> Any:
    """Return the value that a text means right of '=' in TOML; a text that is no TOML value is returned as it is."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = table["value"]
    return value if len(table) == 1 and isinstance(value, (bool, int, float, str, list, dict)) else text


def split_outside(text: str, separator: str) -> list[str]:
    """Split a text at a separator where neither a bracket nor a quotation is open.

    >>> split_outside('fedavg,fedopt(server_lr=1.0, momentum=0.5),[1, 2]', ",")
    ['fedavg', 'fedopt(server_lr=1.0, momentum=0.5)', '[1, 2]']
    """
    pieces, depth, quoted, start, place = [], 0, False, 0, 0
    while place < len(text):
        quoted ^= text[place] == '"'
        depth += 0 if quoted else (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0 and not quoted and text.startswith(separator, place):
            pieces.append(text[start:place])
            place = start = place + len(separator)
            continue
        place += 1
    return [*pieces, text[start:]]


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it right of '='."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)  # nan, inf and -inf are spelled alike
    if isinstance(value, str):  # a JSON string is a TOML basic string, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = [f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None]
        return "{" + ", ".join(pairs) + "}"
    raise FedstillError(f"TOML cannot hold a {type(value).__name__}: {value!r}")


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    flat = {key: value for key, value in table.items() if value is not None and key not in nested}
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in flat.items()]
    for key, value in nested.items():
        header = ".".join(_key(part) for part in (*path, key))
        lines += ["", f"[{header}]", *_table(value, (*path, key))]
    return lines


def dumps(table: Mapping[str, Any]) -> str:
    """Return a table as TOML; None is left out, because TOML has no null, and tuples become arrays.

    >>> print(dumps({"rounds": 3, "local": {"lr": 0.1, "clip": None}}))
    rounds = 3
    <BLANKLINE>
    [local]
    lr = 0.1
    <BLANKLINE>
    """
    return "\n".join(_table(table, ())).lstrip("\n") + "\n"
