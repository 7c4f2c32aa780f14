"""Damage to valid inputs, drawn from a seed: bits, pieces, numbers, and the values of a JSON tree."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

HUGE = ("0", "-1", "1e400", "nan", "4294967296", "-9223372036854775808", "18446744073709551615", "9" * 5000)
SIGNS = (
    "\x00",
    "\x1b[2J",
    "\u202e",
    "\r",
    "\n",
    "\t",
    '"',
    "'",
    "=1+1",
    "$a^b^c$",
    "\ud800",
    ":",
    ",",
    ";",
    "[" * 3000,
)
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1e308, -0.0, float("inf"), float("nan"), "", "x", "0" * 5000,
    "../../../etc/passwd", "\x1b[31m", "\ud800", [], [[]], {}, {"a": {}}, [0] * 2000, [1e308, "x", None],
)  # fmt: skip


def flip_bits(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 4, 32))):
        if damaged:
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def flip_near_an_end(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Heads and footers hold sizes and offsets."""
    size = min(len(data), 400)
    place = 0 if draw.random() < 0.5 else len(data) - size
    return data[:place] + flip_bits(draw, data[place : place + size], others) + data[place + size :]


def truncate(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] if draw.random() < 0.8 else data[place:]


def splice(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The beginning of one file and the end of another of its kind."""
    other = draw.choice(list(others))
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


def repeat_a_piece(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = draw.randrange(len(data) + 1)
    piece = data[start : start + draw.randrange(1, 200)]
    return data[:start] + piece * draw.choice((2, 3, 50)) + data[start:]


def replace_a_number(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    places = [match.span() for match in re.finditer(rb"-?\d+", data[:200_000])]
    if not places:
        return flip_bits(draw, data, others)
    start, end = draw.choice(places)
    return data[:start] + draw.choice(HUGE).encode() + data[end:]


def set_a_word(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A number in binary becomes 0, -1 or huge."""
    start = draw.randrange(max(1, len(data)))
    form, value = draw.choice(
        (("<I", 0xFFFFFFFF), ("<I", 0), ("<Q", 2**63), ("<Q", 2**40), (">I", 2**30), ("<H", 0xFFFF))
    )
    word = struct.pack(form, value)
    return data[:start] + word + data[start + len(word) :]


def insert_signs(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.choice(SIGNS).encode("utf-8", "surrogatepass") + data[place:]


OF_BYTES: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    flip_bits, flip_near_an_end, truncate, splice, repeat_a_piece, replace_a_number, set_a_word, insert_signs,
)  # fmt: skip


def damaged(draw: random.Random, data: bytes, others: Sequence[bytes]) -> tuple[str, bytes]:
    """Return the names of one to three damages, and the damaged bytes."""
    names = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        mutation = draw.choice(OF_BYTES)
        data = mutation(draw, data, others)
        names.append(mutation.__name__)
    return "+".join(names), data


def damaged_tree(draw: random.Random, tree: Any) -> Any:
    """Return a JSON tree in which one value or one name is another; text that holds JSON is entered."""
    if isinstance(tree, str) and tree[:1] in "{[" and tree and draw.random() < 0.9:
        try:
            return json.dumps(damaged_tree(draw, json.loads(tree)))
        except ValueError:
            pass
    if isinstance(tree, dict) and tree and draw.random() < 0.9:
        name = draw.choice(list(tree))
        if draw.random() < 0.1:
            return {key: value for key, value in tree.items() if key != name}
        if draw.random() < 0.1:
            return {**tree, draw.choice(("", "x", "../x", "\x1b", "weights")): draw.choice(VALUES)}
        return {**tree, name: damaged_tree(draw, tree[name])}
    if isinstance(tree, list) and tree and draw.random() < 0.9:
        place = draw.randrange(len(tree))
        if draw.random() < 0.1:
            return tree[:place] + tree[place + 1 :]
        return [*tree[:place], damaged_tree(draw, tree[place]), *tree[place + 1 :]]
    return draw.choice(VALUES)


def damaged_header(draw: random.Random, data: bytes) -> bytes:
    """Return a safetensors file with another header, whose length is right."""
    length = int.from_bytes(data[:8], "little")
    head = json.dumps(damaged_tree(draw, json.loads(data[8 : 8 + length]))).encode()
    return struct.pack("<Q", len(head)) + head + data[8 + length :]
