"""The bundle of a trained model: one safetensors file with weights, contract, experiment, calibration and model card.

Its header holds a digest of all bytes of the file, computed with zeros in the digest's own place. A bundle of which any
byte was changed is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes

from fedstill.core.data import GIVEN
from fedstill.core.errors import FedstillError
from fedstill.core.limits import SECTION, CountOrNone
from fedstill.core.tree import flatten
from fedstill.core.types import Weights
from fedstill.data import contract
from fedstill.data.contract import Contract
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import check_weights
from fedstill.loop.calibrate import Calibration, calibration_from
from fedstill.methods.lookup import label
from fedstill.storage.files import write_whole

FORMAT = "1"  # raise it when a bundle says something else in the same words
SUFFIX = ".safetensors"
NO_DIGEST = "0" * 64
LENGTH = 8  # bytes of a safetensors file that hold the length of its header
MOST_LETTERS = 300  # of a reason in one line


@dataclass(frozen=True)
class Trained:
    """A trained model with everything that its answers follow from."""

    experiment: Experiment  # of a bundle without a method of one's own, because no answer needs its code
    method: str  # in words
    contract: Contract
    weights: Weights
    which: str  # "last" or "best"
    calibrations: Sequence[Calibration]  # in the order in which they are to be used
    round: int | None  # None when the run's folder does not hold it
    notes: Sequence[str] = ()
    card: str = ""  # Markdown; only of a bundle
    place: str = ""  # the folder or file that it was read from


@dataclass(frozen=True)
class _About:
    """Which model of its run a bundle holds, as JSON has it."""

    __pydantic_config__ = SECTION
    which: Literal["last", "best"]
    round: CountOrNone | None
    notes: tuple[str, ...]


_ABOUT = TypeAdapter(_About)


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


def read_bundle(path: Path, *, key: str = "") -> Trained:
    """Return the model in a bundle; a file that is no bundle, was changed or contradicts itself is refused.

    The digest shows damage, and no intention, because everybody can compute it. So nothing in the file is trusted: no
    code is loaded that it names, and no network is built that its weights do not fit.
    key: the setting that names the bundle, before each message.
    """
    try:
        data = _bytes_of(path)
        header = _json(data[LENGTH : LENGTH + int.from_bytes(data[:LENGTH], "little")])
        about = {name.removeprefix("fedstill."): text for name, text in header["__metadata__"].items()}
        whole, version = _is_whole(data, about["digest"]), about["format"]
    except OSError as error:
        raise FedstillError(f"{key}cannot read the bundle '{path}' ({error.strerror or error})") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FedstillError(
            f"{key}'{path}' is no bundle, or was damaged: write one with `fedstill export RUN`, or get an "
            "unchanged copy"
        ) from error
    if not whole:
        raise FedstillError(f"{key}the bundle '{path}' was changed after it was written: get an unchanged copy")
    if version != FORMAT:
        raise FedstillError(
            f"{key}the bundle '{path}' was written by another version of fedstill: export the run again"
        )
    try:
        return _trained(about, data, str(path))
    except FedstillError as error:
        reason = "; ".join(error.lines)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    except KeyError as error:
        reason = f"it has no {error}"
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError, safetensors.SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"
    reason = " ".join(reason.split())[:MOST_LETTERS]
    raise FedstillError(f"{key}the bundle '{path}' cannot be read ({reason}): export the run again")


def _bytes_of(path: Path) -> bytes:
    """Return the content of a file whose header fits into it; of any other file only the first bytes are read."""
    size = path.stat().st_size
    if not path.is_file():  # a pipe would never end
        raise OSError("it is no file")
    with path.open("rb") as file:
        start = file.read(LENGTH)
        if int.from_bytes(start, "little") > size - LENGTH:
            raise ValueError("the header does not fit into the file")
        return start + file.read()


def _trained(about: dict[str, Any], data: bytes, place: str) -> Trained:
    """Return the model of a bundle, once all its parts belong together."""
    table, model = _json(about["experiment"]), _ABOUT.validate_python(_json(about["model"]))
    method = table["method"]["name"]
    experiment = Experiment.model_validate(_without_code(table))
    agreed = contract.from_json(_json(about["contract"]), where="contract")
    calibrations = [calibration_from(tree) for tree in _json(about["calibration"])]
    if not calibrations:
        raise FedstillError("calibration: it is empty")
    parts: dict[str, dict[str, Any]] = {"params": {}, "buffers": {}}
    for name, leaf in read_tensors(data).items():
        kind, _, inner = name.partition("/")
        parts[kind][inner] = leaf
    weights = Weights(**parts)
    check_weights(experiment, contract.federation_without_rows(agreed), weights)
    return Trained(
        experiment,
        label(method),
        agreed,
        weights,
        model.which,
        calibrations,
        model.round,
        model.notes,
        card=TypeAdapter(str).validate_python(about["card"]),
        place=place,
    )


def _without_code(table: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment's table without a method of one's own; a network of one's own is refused.

    An Experiment looks for the functions that its method and its network name, and so runs their files.
    """
    for text in _texts(table["model"]):
        if ":" in text or text == GIVEN:
            raise FedstillError(f"it names the network '{text}', and no code is loaded for a bundle")
    has_own_code = any(":" in text for text in _texts(table["method"]))
    return {key: section for key, section in table.items() if not (has_own_code and key == "method")}


def _texts(tree: Any) -> Iterator[str]:
    """Yield every text in a tree, keys too."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for part in [*tree, *tree.values()] if isinstance(tree, dict) else tree:
            yield from _texts(part)


def _json(text: str | bytes) -> Any:
    """Return what a JSON text holds; numbers must be finite, and texts such that UTF-8 can hold them."""
    tree = json.loads(text)
    json.dumps(tree, ensure_ascii=False, allow_nan=False).encode()
    return tree


def _is_whole(data: bytes, digest: str) -> bool:
    """Return whether the digest in a file is that of the file."""
    if len(digest) != len(NO_DIGEST):
        return False
    return _digest(data.replace(digest.encode(), NO_DIGEST.encode(), 1)) == digest


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=len(NO_DIGEST) // 2).hexdigest()
