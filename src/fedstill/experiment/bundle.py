"""The bundle of a trained model: one safetensors file with weights, contract, experiment, calibration and model card.

Its header holds a digest of all bytes of the file, computed with zeros in the digest's own place. A bundle of which any
byte was changed is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes

from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.core.types import Weights
from fedstill.data import contract
from fedstill.data.contract import Contract
from fedstill.experiment.config import Experiment
from fedstill.loop.calibrate import Calibration, calibration_from
from fedstill.storage.files import write_whole

FORMAT = "1"  # raise it when a bundle says something else in the same words
SUFFIX = ".safetensors"
NO_DIGEST = "0" * 64
LENGTH = 8  # bytes of a safetensors file that hold the length of its header


@dataclass(frozen=True)
class Trained:
    """A trained model with everything that its answers follow from."""

    experiment: Experiment
    contract: Contract
    weights: Weights
    which: str  # "last" or "best"
    calibrations: Sequence[Calibration]  # in the order in which they are to be used
    round: int | None  # None when the run's folder does not hold it
    notes: Sequence[str] = ()
    card: str = ""  # Markdown; only of a bundle
    place: str = ""  # the folder or file that it was read from


def is_bundle(place: str | Path) -> bool:
    """Return whether a path names a bundle, and not the folder of a run."""
    return Path(place).suffix.lower() == SUFFIX


def write_bundle(trained: Trained, path: Path) -> None:
    """Write a bundle, in one step."""
    about = {
        "format": FORMAT,
        "digest": NO_DIGEST,
        "contract": json.dumps(contract.as_json(trained.contract)),
        "experiment": json.dumps(trained.experiment.resolved()),
        "calibration": json.dumps([asdict(calibration) for calibration in trained.calibrations]),
        "model": json.dumps({"which": trained.which, "round": trained.round, "notes": list(trained.notes)}),
        "card": trained.card,
    }
    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in flatten(trained.weights).items()}
    data: bytes = tensor_bytes(tensors, {f"fedstill.{name}": text for name, text in about.items()})
    write_whole(path, data.replace(NO_DIGEST.encode(), _digest(data).encode(), 1))


def read_bundle(path: Path) -> Trained:
    """Return the model in a bundle; a file that is no bundle, or was changed, is refused."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FedstillError(f"cannot read the bundle '{path}' ({error.strerror or error})") from error
    try:
        header = json.loads(data[LENGTH : LENGTH + int.from_bytes(data[:LENGTH], "little")])
        about: dict[str, Any] = {name.removeprefix("fedstill."): text for name, text in header["__metadata__"].items()}
        digest, version = about["digest"], about["format"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FedstillError(
            f"'{path}' is no bundle, or was damaged: write one with `fedstill export RUN`, or get an unchanged copy"
        ) from error
    if not _is_whole(data, digest):
        raise FedstillError(f"the bundle '{path}' was changed after it was written: get an unchanged copy")
    if version != FORMAT:
        raise FedstillError(f"the bundle '{path}' was written by another version of fedstill: export the run again")
    try:
        model = json.loads(about["model"])
        parts: dict[str, dict[str, Any]] = {"params": {}, "buffers": {}}
        for name, leaf in read_tensors(data).items():
            kind, _, inner = name.partition("/")
            parts[kind][inner] = leaf
        return Trained(
            Experiment.model_validate(json.loads(about["experiment"])),
            contract.from_json(json.loads(about["contract"]), where=str(path)),
            Weights(**parts),
            model["which"],
            [calibration_from(tree) for tree in json.loads(about["calibration"])],
            model["round"],
            model["notes"],
            about["card"],
            str(path),
        )
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise FedstillError(f"the bundle '{path}' cannot be read ({error}): export the run again") from error


def _is_whole(data: bytes, digest: Any) -> bool:
    """Return whether the digest in a file is that of the file."""
    if not isinstance(digest, str) or len(digest) != len(NO_DIGEST):
        return False
    return _digest(data.replace(digest.encode(), NO_DIGEST.encode(), 1)) == digest


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=len(NO_DIGEST) // 2).hexdigest()
