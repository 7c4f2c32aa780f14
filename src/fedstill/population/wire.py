"""A parcel on the wire: facts in JSON and tensors in safetensors, behind a version, a size and a checksum.

    8 bytes   b"fedstill"
    2 bytes   version of this form
    4 bytes   length of the facts
   32 bytes   blake2b of everything after it
    ...       facts (JSON), then the body (tensors, or a message of loop/message.py)

The checksum finds bits that flipped on the way. It does not say who sent a parcel: the transport must.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from fedstill import __version__
from fedstill.core.errors import FedstillError, printable
from fedstill.core.types import Tree
from fedstill.loop.message import DTYPES

MAGIC = b"fedstill"
FORM = 1
FACTS_LIMIT = 1 << 20
DEPTH_LIMIT = 32  # of nested dicts, and dimensions of a tensor
NAMES_LIMIT = 1 << 22  # bytes of JSON that name the tensors; 10,000 tensors take about 2 MB
_HEAD = struct.Struct("<8sHI32s")
_OUTLINE = "outline"


class Parcel(NamedTuple):
    """The content of a parcel whose checksum is right; nothing in it has been believed yet."""

    facts: dict[str, Any]
    body: bytes


def seal(facts: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Return a parcel with these facts and this body."""
    words = json.dumps(facts).encode()
    return _HEAD.pack(MAGIC, FORM, len(words), _digest(words, body)) + words + body


def unseal(data: bytes, *, limit: int) -> Parcel:
    """Open a parcel; one that is damaged, of another version or larger than `limit` bytes is refused in one line."""
    if not isinstance(data, bytes):
        raise FedstillError(f"a parcel is bytes, and this is a {type(data).__name__}")
    if len(data) > limit:
        raise FedstillError(f"parcel of {len(data):,} bytes: at most {limit:,} are accepted")
    if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise FedstillError("these bytes are no parcel of fedstill")
    _, form, length, digest = _HEAD.unpack(data[: _HEAD.size])
    if form != FORM:
        raise FedstillError(
            f"parcel of form {form}, and this fedstill reads form {FORM}: install one version at all sites"
        )
    words, body = data[_HEAD.size : _HEAD.size + length], data[_HEAD.size + length :]
    if length > FACTS_LIMIT or len(words) != length or _digest(words, body) != digest:
        raise FedstillError("the parcel's checksum is wrong: it was damaged on the way")
    try:
        facts = json.loads(words)
    except (ValueError, RecursionError):
        raise FedstillError("the parcel's facts are no JSON") from None
    if not isinstance(facts, dict) or any(isinstance(fact, dict | list) for fact in facts.values()):
        raise FedstillError("the parcel's facts are no table of words and numbers")
    return Parcel(facts, body)


def shown(words: Any, length: int = 40) -> str:
    """Return somebody else's words for a message or a log: cut, in one line, without signs that steer a terminal."""
    return printable(" ".join(str(words).split())[:length])


def facts_of(run: Mapping[str, str]) -> dict[str, str]:
    """Return the facts that must be equal at server and client: fedstill's version, and the facts of their callers."""
    return {"fedstill": __version__, **run}


def digest_of(data: bytes) -> str:
    """Return a name for these bytes that no other bytes have."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def pack_tree(tree: Tree) -> bytes:
    """Return nested dicts of tensors as bytes. Empty dicts stay, and names may hold any letter."""
    leaves: list[Tensor] = []

    def outline(node: Any) -> Any:
        if isinstance(node, dict):
            return {str(name): outline(child) for name, child in node.items()}
        leaves.append(node)
        return len(leaves) - 1

    shape = json.dumps(outline(tree))
    # clone: safetensors refuses tensors that share memory
    tensors = {str(place): leaf.detach().cpu().contiguous().clone() for place, leaf in enumerate(leaves)}
    data: bytes = safetensors.torch.save(tensors, metadata={_OUTLINE: shape})
    return data


def unpack_tree(data: bytes) -> Tree:
    """Return the nested dicts of tensors that `pack_tree` made into bytes; anything else is refused in one line."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        if length > NAMES_LIMIT:  # read as JSON they would take many times their size
            raise FedstillError(f"the names of the tensors take {length:,} bytes: at most {NAMES_LIMIT:,} are accepted")
        shape = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_OUTLINE])
        tensors = safetensors.torch.load(data)
        if any(leaf.dtype not in DTYPES.values() or leaf.ndim > DEPTH_LIMIT for leaf in tensors.values()):
            raise FedstillError("these bytes hold a tensor of a type or of so many dimensions that no method sends it")
        tree = _refilled(shape, tensors)
    except FedstillError:
        raise
    except Exception as error:  # torch raises many kinds for shapes that it cannot hold, such as (0, 2 ** 62, 4)
        raise FedstillError(f"these bytes hold no tensors: {type(error).__name__}") from None
    if not isinstance(tree, dict) or tensors:
        raise FedstillError("these bytes hold no table of tensors")
    return tree


def _refilled(shape: Any, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Put each tensor into its place; a tensor that has one is removed, so that none stands in two places."""
    if not isinstance(shape, dict):
        return tensors.pop(json.dumps(shape))
    if depth == DEPTH_LIMIT:
        raise ValueError
    return {name: _refilled(child, tensors, depth + 1) for name, child in shape.items()}


def form_of(tree: Any, path: str = "") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of each tensor by its path."""
    if not isinstance(tree, dict):
        return {path: (tuple(tree.shape), tree.dtype)}
    return {name: form for key, child in tree.items() for name, form in form_of(child, f"{path}/{key}").items()}


def _tables(tree: Any, path: str = "") -> set[str]:
    """Return the paths of all tables in a tree, empty ones too."""
    children = tree.items() if isinstance(tree, dict) else ()
    inside = [_tables(child, f"{path}/{key}") for key, child in children if isinstance(child, dict)]
    return {path}.union(*inside)


def check_form(tree: Tree, expected: Tree, name: str) -> None:
    """Refuse a tree whose names, shapes or types are not the expected ones; the line names the first difference."""
    sent, wanted = form_of(tree), form_of(expected)
    if wrong := sorted((sent.keys() ^ wanted.keys()) or (_tables(tree) ^ _tables(expected))):
        lacks = wrong[0] in wanted.keys() | _tables(expected)
        raise FedstillError(f"{name} {'lacks' if lacks else 'has an unknown name'} {wrong[0][:60]!r}")
    for path, form in wanted.items():
        if sent[path] != form:
            raise FedstillError(f"{name}{path[:60]} is {_shown(sent[path])}, and {_shown(form)} was expected")


def _shown(form: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{str(form[1]).removeprefix('torch.')} {form[0]}"


def _digest(words: bytes, body: bytes) -> bytes:
    hashed = hashlib.blake2b(words, digest_size=32)
    hashed.update(body)
    return hashed.digest()
