"""The whole state of a run on disk: safetensors and JSON, never pickle.

    checkpoints/round-000120.zip   state.safetensors              model, best model, server state
                                   clients-0000.safetensors ...   client states, in parts
                                   state.json                     round, history, shape of the trees
                                   manifest.json                  blake2b of each of them and of itself
                                   comment                        blake2b of all other bytes of the zip file

One uncompressed zip file, because a file costs one fsync and a folder of files one each (5 ms here). It is
written under a temporary name, fsynced, and renamed, so a kill at any moment leaves the one before; the newest
that verifies is taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fedstill.core.errors import FedstillError, in_one_line
from fedstill.core.tree import flatten, leaves
from fedstill.core.types import Tree, Weights
from fedstill.storage.files import MOST_BYTES, MOST_MODEL_BYTES, TEMPORARY, open_zip, regular, writing

KEEP = 3
DIGEST_BYTES = 32
NO_DIGEST = b"0" * 2 * DIGEST_BYTES  # stands where a digest comes
ZIP_HEAD = 30  # bytes before the name of a part
WEIGHTS_FILE = "weights.safetensors"
_NAME = re.compile(r"round-(\d{6,})\.zip")

_log = logging.getLogger("fedstill.run")


@dataclass(frozen=True)
class RunState:
    """All that a run needs to go on as if it had never stopped."""

    round: int  # rounds that are done
    weights: Weights
    server: Tree
    clients: Iterable[tuple[np.ndarray, Tree]] = ()  # (ids, stacked states), only clients ever written
    history: dict[str, Any] = field(default_factory=dict)  # JSON: rows and audit
    best: Weights | None = None
    identity: dict[str, Any] = field(default_factory=dict)  # JSON: what must not differ when the run is resumed
    targets_round: int = 0  # in which the server last formed targets


def save_checkpoint(state: RunState, folder: Path, *, keep: int = KEEP) -> Path:
    """Write one checkpoint below `folder` and remove all but the newest `keep`."""
    target = folder / f"round-{state.round:06d}.zip"
    try:
        with writing(target) as file:
            with zipfile.ZipFile(file, "w") as archive:
                _write_parts(state, archive)
                archive.comment = NO_DIGEST
            digest = _frame_digest(file, archive.infolist())
            file.seek(-len(NO_DIGEST), os.SEEK_END)
            file.write(digest)
        for _, old in list_checkpoints(folder)[keep:]:
            old.unlink()
    except OSError as error:
        raise FedstillError(f"cannot write the checkpoint {target}: {error.strerror or error}") from error
    return target


def load_newest(folder: Path, device: torch.device | str = "cpu") -> RunState | None:
    """The newest checkpoint below `folder` that verifies; None when there is none.

    A damaged one is renamed, so that it neither counts as kept nor is tried again, but can be looked at.
    """
    for leftover in folder.glob(f"{TEMPORARY}*"):
        leftover.unlink()
    for _, path in list_checkpoints(folder):
        try:
            return load_checkpoint(path, device)
        except _Damaged as damage:
            _log.warning("checkpoint %s does not verify (%s): taking the one before", path.name, damage)
            os.replace(path, path.with_name(f"damaged-{path.name}"))
    return None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (round, path) of each file that is named like a checkpoint, newest first."""
    entries = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(((int(match[1]), path) for match, path in entries if match), reverse=True)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> RunState:
    """Read one checkpoint after every part of it was verified."""
    try:
        with regular(path) as file, open_zip(file) as archive:
            names = _verify(file, archive)
            state = json.loads(archive.read("state.json"))
            tensors = read_tensors(archive.read("state.safetensors"))
        away = set(state["away"])
        tensors = {name: leaf if name in away else leaf.to(device) for name, leaf in tensors.items()}
        tree = _fill_shape(state["shape"], tensors)
        parts = sorted(name for name in names if name.startswith("clients-"))
        for _ in _read_clients(path, parts, state["client_shape"]):
            pass  # so that a part that cannot be read is found here
        run = RunState(
            round=state["round"],
            weights=tree["weights"],
            server=tree["server"],
            clients=_read_clients(path, parts, state["client_shape"]),
            history=state["history"],
            best=tree["best"],
            identity=state["identity"],
            targets_round=state["targets_round"],
        )
        _check_content(run, path)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make zipfile raise nearly anything
        raise _Damaged(f"{type(error).__name__}: {error}") from None
    return run


def _check_content(state: RunState, path: Path) -> None:
    """Refuse what no run writes, because everybody can compute the digests of a checkpoint."""
    named = _NAME.fullmatch(path.name)
    if type(state.round) is not int or (named is not None and int(named[1]) != state.round):
        raise ValueError(f"it is of round {state.round!r}")
    if not isinstance(state.weights, Weights) or not isinstance(state.best, Weights | None):
        raise ValueError("its model is no model")
    if state.best is not None and not same_form(state.best, state.weights):
        raise ValueError("its best model has another form")
    if not isinstance(state.server, dict) or not isinstance(state.identity, dict):
        raise ValueError("its server state is no table")
    if type(state.targets_round) is not int or not set(state.history) <= {"rows", "audit"}:
        raise ValueError("its history is none")
    rows, audit = state.history.get("rows", []), state.history.get("audit", [])
    numbers = [row["round"] for row in rows]
    if numbers != sorted(set(numbers)) or any(type(number) is not int or number > state.round for number in numbers):
        raise ValueError("its history has other rounds")
    if not all(isinstance(record, dict) and {"round", "client", "reason"} <= record.keys() for record in audit):
        raise ValueError("its audit is none")


def save_weights(
    folder: Path, weights: Weights, about: Mapping[str, str] = MappingProxyType({}), *, durable: bool = True
) -> None:
    """`folder`/weights.safetensors with the names params/... and buffers/..., replaced in one step."""
    save_tensors(folder / WEIGHTS_FILE, flatten(weights), about, durable=durable)


def save_tensors(path: Path, tensors: dict[str, Tensor], about: Mapping[str, str], *, durable: bool = True) -> None:
    """A safetensors file, replaced in one step; its metadata hold `about` and a seal over `about` and the tensors."""
    with writing(path, durable=durable) as file:
        file.write(_serialise(tensors, {**about, "seal": _seal(tensors, about)}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in a safetensors file and its metadata; a file that does not fit its seal is refused."""
    with regular(path) as opened:
        if (size := os.fstat(opened.fileno()).st_size) > MOST_MODEL_BYTES:
            raise FedstillError(f"'{path}' holds {size:,} bytes, and at most {MOST_MODEL_BYTES:,} are read")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (TypeError, RuntimeError, OverflowError) as error:  # torch's, for a shape that it cannot hold
        raise FedstillError(f"'{path}' holds no tensors that can be read ({in_one_line(error)})") from None
    if "seal" not in about:
        raise FedstillError(f"'{path}' has no seal: it is not a fedstill model, or was changed: restore a copy")
    if about.pop("seal") != _seal(tensors, about):
        raise FedstillError(f"'{path}' was changed after the run wrote it: restore it from a copy of the run")
    return tensors, about


def _seal(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    hasher = hashlib.blake2b(json.dumps(dict(about), sort_keys=True).encode(), digest_size=DIGEST_BYTES)
    for name, leaf in sorted(tensors.items()):
        hasher.update(f"{name} {leaf.dtype} {tuple(leaf.shape)} ".encode())
        hasher.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def load_weights(folder: str | Path, device: torch.device | str = "cpu") -> Weights:
    """The model that `save_weights` wrote; `folder` is best/ or last/ of a run, or the file itself."""
    return load_model(folder, device)[0]


def load_model(folder: str | Path, device: torch.device | str = "cpu") -> tuple[Weights, dict[str, str]]:
    """Return the model that `save_weights` wrote, and the facts that it wrote about the model."""
    path = Path(folder)
    path = path / WEIGHTS_FILE if path.is_dir() else path
    try:
        flat, about = load_tensors(path)
    except FileNotFoundError:
        raise FedstillError(f"no model at {path}: give the best/ or last/ folder of a finished run") from None
    except OSError as error:
        raise FedstillError(f"{path} cannot be read ({error.strerror or error})") from None
    except safetensors.SafetensorError as error:
        raise FedstillError(f"{path} is not a readable safetensors file: {error}") from None
    parts: dict[str, dict[str, Tensor]] = {"params": {}, "buffers": {}}
    for name, leaf in flat.items():
        kind, _, rest = name.partition("/")
        if kind not in parts:
            raise FedstillError(f"{path} holds '{name}', not params/... or buffers/...: it is not a fedstill model")
        parts[kind][rest] = leaf.to(device)
    return Weights(**parts), about


def same_form(weights: Weights, expected: Weights) -> bool:
    """Same names, shapes and dtypes."""

    def form(weights: Weights) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (leaf.shape, leaf.dtype) for name, leaf in flatten(weights).items()}

    return form(weights) == form(expected)


class _Damaged(Exception):
    """Why a checkpoint cannot be believed."""


def _write_parts(state: RunState, archive: zipfile.ZipFile) -> None:
    digests: dict[str, str] = {}

    def write(name: str, data: bytes) -> None:
        archive.writestr(zipfile.ZipInfo(name), data)
        digests[name] = content_digest(data)

    tensors: dict[str, Tensor] = {}
    tree = {"weights": state.weights, "best": state.best, "server": state.server}
    body = {
        "round": state.round,
        "history": state.history,
        "identity": state.identity,
        "targets_round": state.targets_round,
        "shape": _take_shape(tree, tensors, ""),
        "client_shape": _write_clients(state.clients, write),
    }
    home = next(leaves(state.weights)).device
    body["away"] = [name for name, leaf in tensors.items() if leaf.device != home]  # kept on the CPU by the server
    write("state.safetensors", _serialise(tensors))
    write("state.json", json.dumps(body).encode())
    manifest = json.dumps({"format": 1, "files": digests}, sort_keys=True)
    sealed = {"manifest": manifest, "blake2b": content_digest(manifest.encode())}
    write("manifest.json", json.dumps(sealed).encode())


def _write_clients(clients: Iterable[tuple[np.ndarray, Tree]], write: Callable[[str, bytes], None]) -> Any:
    """Write the parts one after the other; the shape of one part is the shape of all."""
    shape = None
    for number, (ids, states) in enumerate(clients):
        tensors: dict[str, Tensor] = {}
        shape = _take_shape({"ids": torch.from_numpy(np.asarray(ids, np.int64)), "states": states}, tensors, "")
        write(f"clients-{number:04d}.safetensors", _serialise(tensors))
    return shape


def _read_clients(path: Path, parts: list[str], shape: Any) -> Iterator[tuple[np.ndarray, Tree]]:
    """Read the parts one after the other, because all of them may be more than memory holds."""
    with zipfile.ZipFile(path) as archive:
        for name in parts:
            tree = _fill_shape(shape, read_tensors(archive.read(name)))
            yield tree["ids"].numpy(), tree["states"]


def _frame_digest(file: IO[bytes], members: Sequence[zipfile.ZipInfo]) -> bytes:
    """The digest of all bytes of a zip file outside of its parts, but for the digest itself, which is its end.

    The parts must be stored as they are, one behind the other, so that no byte escapes a digest and none is inflated.
    """
    hasher, end = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    for info in sorted(members, key=lambda info: info.header_offset):
        if (
            info.header_offset != end
            or info.compress_type != zipfile.ZIP_STORED
            or info.file_size != info.compress_size
        ):
            raise ValueError("its parts do not lie as they were written")
        file.seek(end)
        head = file.read(ZIP_HEAD)
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        hasher.update(head + file.read(lengths))
        end += ZIP_HEAD + lengths + info.file_size
    file.seek(end)
    if len(rest := file.read(MOST_BYTES)) < len(NO_DIGEST):
        raise ValueError("its end is missing")
    hasher.update(rest[: -len(NO_DIGEST)])
    return hasher.hexdigest().encode()


def _verify(file: IO[bytes], archive: zipfile.ZipFile) -> list[str]:
    """The names of a checkpoint's parts, once each of them and the bytes between them have the recorded digest."""
    if _frame_digest(file, archive.infolist()) != archive.comment:
        raise ValueError("the frame of the zip file was changed")
    sealed = json.loads(archive.read("manifest.json"))
    if content_digest(sealed["manifest"].encode()) != sealed["blake2b"]:
        raise ValueError("manifest.json was changed")
    digests: dict[str, str] = json.loads(sealed["manifest"])["files"]
    for name, digest in digests.items():
        with archive.open(name) as part:
            hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
            while block := part.read(1 << 20):
                hasher.update(block)
            if hasher.hexdigest() != digest:
                raise ValueError(f"{name} was changed")
    if sorted(archive.namelist()) != sorted([*digests, "manifest.json"]):
        raise ValueError("it holds other parts than it names")
    return list(digests)


def _take_shape(node: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """The nesting of a tree as JSON; tensors go to `tensors` under their path."""
    if isinstance(node, Tensor):
        tensors[path] = node
        return {"tensor": path}
    if isinstance(node, dict):
        return {"dict": {key: _take_shape(value, tensors, f"{path}/{_escape(key)}") for key, value in node.items()}}
    if isinstance(node, tuple):
        kind = "weights" if isinstance(node, Weights) else "tuple"
        return {kind: [_take_shape(value, tensors, f"{path}/{i}") for i, value in enumerate(node)]}
    if node is None or isinstance(node, (bool, int, float, str)):
        return {"value": node}
    raise FedstillError(f"state at '{path}' is a {type(node).__name__}: keep tensors, numbers and text in dicts")


def _fill_shape(shape: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = shape.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _fill_shape(value, tensors) for key, value in content.items()}
    if kind == "value":
        return content
    parts = tuple(_fill_shape(value, tensors) for value in content)
    return Weights(*parts) if kind == "weights" else parts


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _serialise(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    # clone: safetensors refuses tensors that share memory, as a remembered model and the present one may
    plain = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}
    data: bytes = tensor_bytes(plain, metadata)
    return data


def content_digest(data: bytes) -> str:
    """The digest by which a later command knows the content of a file again."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
