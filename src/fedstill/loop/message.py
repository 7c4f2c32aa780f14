"""One client's upload on the wire: safetensors bytes with a JSON envelope, and a reader that trusts nothing.

An upload of one client is an `Uploads` without its first dimension. The reader holds every message against a
template (what the server expects, as tensors without storage), so a message can neither bring a new name nor
make the server allocate more than the template's own bytes plus the header limit.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.tree import as_tree, byte_size, flatten, from_tree, tree_map
from fedstill.core.types import Tree, Uploads

ENVELOPE = "fedstill"
VERSION = 2
NO_DIGEST = "0" * 64  # stands where the digest comes
HEADER_LIMIT = 1 << 20  # a header of names and shapes; 5,000 tensors need about half of it

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def template_of(uploads: Uploads) -> Uploads:
    """Return the form that one upload of this cohort must have: names, shapes and dtypes, no storage."""
    return from_tree(
        tree_map(lambda leaf: torch.empty(leaf.shape[1:], dtype=leaf.dtype, device="meta"), as_tree(uploads))
    )


def on_meta(upload: Uploads) -> Uploads:
    """The form of one client's upload."""
    return from_tree(tree_map(lambda leaf: torch.empty_like(leaf, device="meta"), as_tree(upload)))


def encode(upload: Uploads, *, round: int) -> bytes:
    """One client's upload as bytes. Who it is from and for which round is in the envelope."""
    envelope = {"version": VERSION, "client": int(upload.ids), "round": round, "digest": NO_DIGEST}
    # clone: safetensors refuses tensors that share memory, as an extra that is a view of the params does
    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in flatten(_body(upload)).items()}
    data: bytes = safetensors.torch.save(tensors, metadata={ENVELOPE: json.dumps(envelope)})
    return with_digest(data)


def with_digest(data: bytes) -> bytes:
    """Return a message that states the digest of its bytes in place of the one that it states."""
    stated = _envelope_of(data)["digest"]
    return data.replace(stated.encode(), _digest(data, stated).encode(), 1)


def _envelope_of(data: bytes) -> Any:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"][ENVELOPE])


def _digest(data: bytes, stated: str) -> str:
    """The digest of a message in which zeros stand for the digest that it states; it finds bits that flipped."""
    end = 8 + int.from_bytes(data[:8], "little")
    hashed = hashlib.blake2b(data[:8], digest_size=len(NO_DIGEST) // 2)
    hashed.update(data[8:end].replace(stated.encode(), NO_DIGEST.encode(), 1))
    hashed.update(memoryview(data)[end:])
    return hashed.hexdigest()


def decode(data: bytes, template: Uploads, *, client: int, round: int) -> Uploads:
    """The upload in `data`, or a FedstillError with the reason: anything but the template's form is refused."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise FedstillError(f"message is a {type(data).__name__}, not bytes")
    data = bytes(data)
    limit = byte_size(_body(template)) + HEADER_LIMIT
    if len(data) > limit:
        raise FedstillError(f"message of {len(data)} bytes, at most {limit} expected")
    try:
        entries = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise FedstillError(f"unreadable message: {_one_line(error)}") from None
    _check_envelope(data, client=client, round=round)
    flat = {name: _Entry(entry) for name, entry in entries.items()}
    return _assemble(flat, template, client)


def from_mapping(message: Mapping[str, Any], template: Uploads, *, client: int) -> Uploads:
    """The same check for an upload that arrives as a nested mapping of tensors (same process, Ray)."""
    try:
        flat = flatten(message)
    except (AttributeError, RecursionError):
        raise FedstillError("message holds something that is neither a tensor nor a mapping") from None
    flat.pop("ids", None)
    for name, leaf in flat.items():
        if leaf.layout is not torch.strided or leaf.device.type == "meta":
            raise FedstillError(f"{name[:60]!r} is not a plain tensor")
    return _assemble({name: leaf.detach() for name, leaf in flat.items()}, template, client)


class _Entry:
    """A tensor as the message describes it; made into a tensor only after it was found to fit."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.dtype = DTYPES.get(entry["dtype"], entry["dtype"])
        self.shape = tuple(entry["shape"])
        self._data = entry["data"]

    def tensor(self) -> Tensor:
        if math.prod(self.shape) == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self._data, dtype=self.dtype).reshape(self.shape)


def _body(upload: Uploads) -> Tree:
    """Return the parts that travel as tensors: the id is in the envelope."""
    tree = as_tree(upload)
    del tree["ids"]
    return tree


def _assemble(flat: Mapping[str, _Entry | Tensor], template: Uploads, client: int) -> Uploads:
    expected = flatten(_body(template))
    missing, extra = sorted(expected.keys() - flat.keys()), sorted(flat.keys() - expected.keys())
    if missing:
        raise FedstillError(f"missing name {_shown(missing)}")
    if extra:
        raise FedstillError(f"unexpected name {_shown(extra)}")
    for name, outline in expected.items():
        leaf = flat[name]
        if tuple(leaf.shape) != tuple(outline.shape):
            raise FedstillError(f"wrong shape of {name}: {tuple(leaf.shape)}, expected {tuple(outline.shape)}")
        if leaf.dtype != outline.dtype:
            raise FedstillError(f"wrong dtype of {name}: {leaf.dtype}, expected {outline.dtype}")
    tensors = {name: entry.tensor() if isinstance(entry, _Entry) else entry for name, entry in flat.items()}
    tree = _refill(_body(template), tensors, "")
    tree["ids"] = torch.tensor(client, dtype=torch.int64)
    return from_tree(tree)


def _refill(tree: Tree, flat: Mapping[str, Tensor], prefix: str) -> Tree:
    """The template's own nesting with the message's tensors; empty levels stay."""
    return {
        key: _refill(value, flat, f"{prefix}{key}/") if isinstance(value, dict) else flat[f"{prefix}{key}"]
        for key, value in tree.items()
    }


def _check_envelope(data: bytes, *, client: int, round: int) -> None:
    """Right version, sender and round; a stale or borrowed message is refused. `data` already parsed once."""
    try:
        envelope = _envelope_of(data)
        stated = (envelope["version"], envelope["client"], envelope["round"])
        digest = envelope["digest"] if stated[0] == VERSION else ""
        whole = len(digest) == len(NO_DIGEST) and _digest(data, digest) == digest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FedstillError("message has no fedstill envelope") from None
    if stated != (VERSION, client, round):
        shown = ", ".join(
            f"{key} {str(value)[:20]}" for key, value in zip(("version", "client", "round"), stated, strict=True)
        )
        raise FedstillError(f"envelope says {shown}; expected version {VERSION}, client {client}, round {round}")
    if not whole:
        raise FedstillError("the message's checksum is wrong: it was damaged on the way")


def _shown(names: list[str]) -> str:
    first = repr(names[0][:60])
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
