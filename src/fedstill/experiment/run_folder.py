"""The folder of a run: its name, its files config.toml and env.json, and how a later command reads them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation
from fedstill.data.load import is_embedded
from fedstill.experiment.config import Experiment
from fedstill.methods.lookup import anchored
from fedstill.storage import toml as toml_io
from fedstill.storage.files import write_whole

CONFIG_FILE = "config.toml"
TOKENIZER_FILE = "tokenizer.json"


def new_run_dir(experiment: Experiment, root: str | Path = "runs") -> Path:
    """Return a folder that does not exist yet: runs/<name>/<time in UTC>-<hash of the experiment>."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(root) / experiment.name / f"{stamp}-{experiment.digest()}"
    twin = 2
    while folder.exists():
        folder = folder.with_name(f"{stamp}-{experiment.digest()}-{twin}")
        twin += 1
    return folder


def write_description(experiment: Experiment, folder: Path) -> None:
    """Write config.toml, with every default, and env.json; a resumed run keeps the files of its start."""
    if not (begun := (folder / CONFIG_FILE).exists()):
        check_run_folder(experiment, folder, asked="run_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not begun:
            write_whole(folder / "env.json", json.dumps(environment(), indent=2) + "\n")
            write_whole(folder / CONFIG_FILE, toml_io.dumps(_anchored(experiment).resolved()))
    except OSError as error:
        raise FedstillError(
            f"cannot write into '{folder}' ({error.strerror or error}): choose another folder"
        ) from error


def keep_tokenizer(federation: Federation, folder: Path) -> None:
    """Write tokenizer.json, because `predict` must read new texts as the run did, even if the data change."""
    if federation.train.tokenizer is None:
        return
    path, file = folder / TOKENIZER_FILE, federation.train.tokenizer.file
    if path.exists() and path.read_text(encoding="utf-8") != file:
        raise FedstillError(
            f"'{path}' is not the tokenizer that these data give now: the data have changed since the run began, "
            "start a new run"
        )
    write_whole(path, file)


def _anchored(experiment: Experiment) -> Experiment:
    """Return the experiment with full paths of its files and folders, so that it can be resumed from anywhere."""
    data, model, method = experiment.data, experiment.model, experiment.method
    places = {"source": data.source, "unlabeled": unlabeled_place(experiment)}
    places |= {"test": data.test, "tokenizer": data.tokenizer}
    here = {key: str(Path(str(place)).resolve()) for key, place in places.items() if is_local(place)}
    network: dict[str, Any] = {"name": anchored(model.name)}
    if "prototypes" in model.options:
        network["prototypes"] = [anchored(text) for text in model.options["prototypes"]]
    methods = tuple(anchored(entry) for entry in experiment.compare.methods)
    return experiment.model_copy(
        update={
            "data": data.model_copy(update=here),
            "model": model.model_copy(update=network),
            "method": method.model_copy(update={"name": anchored(method.name)}),
            "evaluate": anchored(experiment.evaluate),
            "engine": experiment.engine.model_copy(update={"name": anchored(experiment.engine.name)}),
            "compare": experiment.compare.model_copy(update={"methods": methods}),
        }
    )


def is_local(place: object) -> bool:
    """Return whether a place is a file or folder of this machine; an embedded set hides a folder of its name."""
    return isinstance(place, str) and not is_embedded(place) and Path(place).exists()


def check_same_experiment(experiment: Experiment, folder: Path) -> None:
    """Refuse to resume a run as another experiment; only the rounds and the trackers may differ."""
    new, old = (toml_io.loads(toml_io.dumps(_anchored(x).resolved())) for x in (experiment, read_description(folder)))
    changed = [key for key in new | old if key not in ("rounds", "track") and new.get(key) != old.get(key)]
    if changed:
        raise FedstillError(
            f"'{folder}' holds a run with another {' and '.join(changed)}: use `fedstill resume`, or a new folder"
        )


def read_description(folder: Path) -> Experiment:
    """Return the experiment that a run wrote into its folder."""
    if not (folder / CONFIG_FILE).is_file() or not (folder / CONFIG_FILE).stat().st_size:
        raise FedstillError(f"'{folder}' holds no run (no {CONFIG_FILE}): give the folder that `fedstill run` named")
    if "algorithm" in toml_io.read_toml(folder / CONFIG_FILE):
        raise FedstillError(
            f"'{folder}' was written by an older fedstill (section [algorithm]): run it again with this version"
        )
    return Experiment.from_toml(folder / CONFIG_FILE)


def unlabeled_place(experiment: Experiment) -> str | None:
    """Return the file, folder or dataset that data.unlabeled names; None where it names a part of the run's data."""
    choice = str(experiment.data.unlabeled)
    inside = choice in ("", "none", "test", "central") or choice.lstrip("-").isdigit()
    return None if inside else choice


def check_run_folder(experiment: Experiment, folder: Path, *, asked: str) -> None:
    """Refuse to write a run into the folder of its data; a folder below is fine, because readers skip runs."""
    data = experiment.data
    for place in (data.source, data.test, unlabeled_place(experiment)):
        if place is not None and is_local(place) and Path(place).resolve() == folder.resolve():
            raise FedstillError(f"{asked}: '{folder}' holds the data: give another folder, for instance one below it")


CORE_PACKAGES = ("torch", "numpy", "scikit-learn", "safetensors", "pydantic", "typer", "rich")
EXTRAS = {
    "data": ("datasets", "pandas", "pyarrow", "pillow"),
    "plots": ("matplotlib",),
    "dp": ("dp-accounting",),
    "text": ("tokenizers",),
    "track": ("tensorboard", "mlflow", "wandb", "trackio"),
}


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the commit of the working folder, with '+' when files differ from it; None outside of git."""

    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return commit and (f"{commit}+" if git("status", "--porcelain", "--untracked-files=no") else commit)


def describe_device() -> dict[str, Any]:
    """Return the accelerator that the device 'auto' means here; without one the CPU and torch's threads."""
    import torch

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        return {"kind": "cuda", "name": torch.cuda.get_device_name(0), "gigabytes": round(memory / 1e9, 1)}
    return {"kind": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()}


def environment() -> dict[str, Any]:
    extras = [package for packages in EXTRAS.values() for package in packages]
    versions = {package: version_of(package) for package in ("fedstill", *CORE_PACKAGES, *extras)}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": describe_device(),
        "git_commit": git_commit(),
        "packages": {package: version for package, version in versions.items() if version is not None},
    }
