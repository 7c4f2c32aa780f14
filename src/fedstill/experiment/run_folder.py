"""The folder of a run: its name, config.toml, env.json and contract.json, and how a later command reads them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.core.data import GIVEN
from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation, Model
from fedstill.data import contract
from fedstill.data.load import is_embedded
from fedstill.experiment.bundle import is_bundle
from fedstill.experiment.code_names import check_code, code_names
from fedstill.experiment.config import Experiment, ModelSection
from fedstill.experiment.model import NETWORK_DIFFERS, given_network
from fedstill.loop.checkpoint import WEIGHTS_FILE
from fedstill.methods.lookup import anchored
from fedstill.methods.own_code import file_digest, own_files, speak
from fedstill.storage import toml as toml_io
from fedstill.storage.files import check_no_way_out, from_json, read_json, read_text, write_whole

CONFIG_FILE = "config.toml"
CONTRACT_FILE = "contract.json"
MAY_CHANGE = (  # settings on which no round depends
    "rounds", "early_stop", "track", "compare", "privacy.epsilon", "cluster.address", "cluster.actors", "cluster.gpus",
)  # fmt: skip


def new_run_dir(experiment: Experiment, root: str | Path = "runs") -> Path:
    """Return a folder that does not exist yet: runs/<name>/<time in UTC>-<hash of the experiment>."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(root) / experiment.name / f"{stamp}-{experiment.digest()}"
    twin = 2
    while folder.exists():
        folder = folder.with_name(f"{stamp}-{experiment.digest()}-{twin}")
        twin += 1
    return folder


def write_description(experiment: Experiment, folder: Path, contract: Mapping[str, Any] | None = None) -> None:
    """Write contract.json, env.json and config.toml, with every default.

    A resumed run keeps the files of its start. Only settings on which no round depends are written anew.
    """
    if not (begun := (folder / CONFIG_FILE).exists()):
        check_run_folder(experiment, folder, asked="run_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = _as_table(experiment)
        if begun:
            old = toml_io.read_toml(folder / CONFIG_FILE)
            if old == table or _changes(old, table):
                return
            if (path := folder / CONTRACT_FILE).exists():  # a comparison has none
                tree = read_json(path)
                contract = {**{key: tree[key] for key in ("experiment", "files", "data", "seal")}, "experiment": table}
        else:
            write_whole(folder / "env.json", json.dumps(environment(), indent=2) + "\n")
        if contract is not None:
            write_whole(folder / CONTRACT_FILE, contract_text(contract))
        write_whole(folder / CONFIG_FILE, toml_io.dumps(table))
    except OSError as error:
        raise FedstillError(
            f"cannot write into '{folder}' ({error.strerror or error}): choose another folder"
        ) from error


def make_contract(experiment: Experiment, federation: Federation, secret: bytes = b"") -> dict[str, Any]:
    """Return the content of contract.json: the experiment, its files and its data as the run begins, and a seal.

    secret: see data.contract.contract_of.
    """
    tree = {
        "experiment": _as_table(experiment),
        "files": {path: file_digest(Path(path)) for path in _files_of(experiment)},
        "data": contract.as_json(contract.contract_of(federation, secret)),
    }
    return {**tree, "seal": _seal(tree)}


def contract_text(tree: Mapping[str, Any]) -> str:
    """Return contract.json: a contract with its seal, and a digest of all of it, of settings that may change, too."""
    whole = hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=16).hexdigest()
    return json.dumps({**tree, "digest": whole}, indent=1, ensure_ascii=False) + "\n"


class Agreed(NamedTuple):
    """A run's experiment, data and files when it began."""

    experiment: Experiment
    data: contract.Contract
    files: Mapping[str, str]  # path -> digest, of Python files that the experiment names
    seal: str  # a digest of all of them


def read_contract(folder: Path) -> Agreed:
    """Return the contract in a run's folder; one that was changed since it was written is refused."""
    read_description(folder)
    path = folder / CONTRACT_FILE
    if not path.is_file():
        raise FedstillError(f"'{folder}' was written by an older fedstill (no {CONTRACT_FILE}): run it again")
    try:
        text = read_text(path)
        tree = from_json(text)
        tree.pop("digest")
        unchanged = text == contract_text(tree)  # to the last letter, its digest too
        seal = tree.pop("seal")
        unchanged = unchanged and seal == _seal(tree)
        files = {str(place): str(made) for place, made in tree["files"].items()}
        table, data = dict(tree["experiment"]), tree["data"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise FedstillError(f"'{path}' cannot be read ({error}): restore it from a copy of the run") from error
    if not unchanged:
        raise FedstillError(f"'{path}' was changed after the run wrote it: restore it from a copy of the run")
    agreed = contract.from_json(data, where=str(path))
    check_code(table, path)
    return Agreed(Experiment.model_validate(table), agreed, files, seal)


def _seal(tree: Mapping[str, Any]) -> str:
    """Return a digest of a contract without the settings that may change while its run goes on."""
    fixed = {key: value for key, value in flat(tree["experiment"]).items() if not _may_change(key)}
    text = json.dumps({**tree, "experiment": fixed}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _files_of(experiment: Experiment) -> list[str]:
    """Return every file that decides a run beside its data: functions of one's own, and the model it starts from."""
    start = [] if experiment.model.start is None else [str(start_file(experiment.model.start))]
    used = {**experiment.model_dump(), "compare": {}}  # methods that a comparison runs beside this one decide nothing
    return [*own_files(code_names(used)), *start]


def start_file(start: str) -> Path:
    """Return the file of the model that `model.start` names: a bundle, or the last model of a run."""
    place = Path(start).resolve()
    return place if is_bundle(place) else place / "last" / WEIGHTS_FILE


def check_files(files: Mapping[str, str], names: Collection[str]) -> None:
    """Refuse files that are not as they were when the run began."""
    for path in names:
        if not Path(path).is_file():
            raise FedstillError(f"'{path}' is gone, and this run needs it: put it back")
        if file_digest(Path(path)) != files.get(path):
            raise FedstillError(f"'{path}' has changed since the run began: restore it, or start a new run")


def check_same_experiment(experiment: Experiment, folder: Path) -> Agreed:
    """Refuse to resume a run as another experiment or with other code; return the contract of the run.

    Only the rounds, the trackers and the sections [early_stop] and [compare] may differ, because no round depends on
    them.
    """
    speak(code_names(experiment.model_dump()))  # the user has named or allowed it, for this run
    agreed = read_contract(folder)
    if changed := _changes(_as_table(agreed.experiment), _as_table(experiment)):
        raise FedstillError(
            f"'{folder}' holds a run of another experiment: {'; '.join(changed)}: set it back, or use a new folder"
        )
    check_files(agreed.files, _files_of(experiment))
    return agreed


def check_same_comparison(experiment: Experiment, folder: Path, *, fixed: Collection[str] = ()) -> Experiment:
    """Refuse to go on with a comparison as another experiment; return the experiment in its folder.

    fixed: settings that must be the same although no round depends on them.
    """
    old = read_description(folder)
    now = with_given_data(experiment) if old.data.source == GIVEN else experiment
    if changed := _changes(_as_table(old), _as_table(now), fixed=fixed):
        longer = f"; `fedstill resume {folder} --rounds N` plays more rounds" if now.rounds != old.rounds else ""
        raise FedstillError(
            f"'{folder}' holds a comparison of another experiment: {'; '.join(changed)}: set it back, or use a new "
            f"folder{longer}"
        )
    return old


def check_same_run(experiment: Experiment, federation: Federation, folder: Path, secret: bytes = b"") -> str:
    """Refuse to resume a run as another experiment, with other data or with other code; return the contract's seal."""
    agreed = check_same_experiment(experiment, folder)
    if others := contract.differences(agreed.data, contract.contract_of(federation, secret)):
        raise FedstillError(
            f"'{folder}' began with other data: {'; '.join(others)}: restore the data, or start a new run"
        )
    return agreed.seal


def _changes(then: Mapping[str, Any], now: Mapping[str, Any], *, fixed: Collection[str] = ()) -> list[str]:
    """Return each key in which two experiments differ, with both values, but for the keys that may change.

    fixed: keys and sections that may not change here.
    """
    old, new = flat(then), flat(now)
    differ = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    keys = [key for key in differ if not _may_change(key) or key in fixed or key.partition(".")[0] in fixed]
    if old.get("model.name") == new.get("model.name") == GIVEN:  # digests say nothing to a reader
        explained = {f"model.{fact}": f"the network is another one: {words}" for fact, words in NETWORK_DIFFERS.items()}
        if "model.tensors" in keys:
            keys = [key for key in keys if key != "model.computes"]
    else:
        explained = {}
    return [explained.get(key, f"{key} was {old.get(key)!r} and is {new.get(key)!r}") for key in keys]


def _may_change(key: str) -> bool:
    return key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE


def _as_table(experiment: Experiment) -> dict[str, Any]:
    return toml_io.loads(toml_io.dumps(with_full_paths(experiment).resolved()))


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a table of tables by their keys with dots: "local.lr"."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return values


def with_full_paths(experiment: Experiment) -> Experiment:
    """Return the experiment with full paths of its files and folders, so that it can be resumed from anywhere."""
    data, model, method = experiment.data, experiment.model, experiment.method
    places = {"source": data.source, "unlabeled": unlabeled_place(experiment)}
    places |= {"test": data.test, "tokenizer": data.tokenizer}
    here = {key: str(Path(str(place)).resolve()) for key, place in places.items() if is_local(place)}
    network: dict[str, Any] = {"name": anchored(model.name)}
    if model.start is not None:
        network["start"] = str(Path(model.start).resolve())
    if "prototypes" in model.options:
        network["prototypes"] = [anchored(text) for text in model.options["prototypes"]]
    methods, over = (tuple(map(anchored, texts)) for texts in (experiment.compare.methods, experiment.compare.over))
    return experiment.model_copy(
        update={
            "data": data.model_copy(update=here),
            "model": model.model_copy(update=network),
            "method": method.model_copy(update={"name": anchored(method.name)}),
            "evaluate": anchored(experiment.evaluate),
            "engine": experiment.engine.model_copy(update={"name": anchored(experiment.engine.name)}),
            "cluster": experiment.cluster.model_copy(update={"engine": anchored(experiment.cluster.engine)}),
            "compare": experiment.compare.model_copy(update={"methods": methods, "over": over}),
        }
    )


def with_given_data(experiment: Experiment) -> Experiment:
    """Return the experiment as a run records it whose data were handed over in Python."""
    return experiment.model_copy(update={"data": experiment.data.model_copy(update={"source": GIVEN})})


def with_given_network(experiment: Experiment, network: Model, *, reads_ids: bool) -> Experiment:
    """Return the experiment as a run records it whose network was handed over in Python."""
    about = {"name": GIVEN, "start": experiment.model.start, **given_network(network, reads_ids=reads_ids)}
    return experiment.model_copy(update={"model": ModelSection.model_validate(about)})


def is_local(place: object) -> bool:
    """Return whether a place is a file or folder of this machine; an embedded set hides a folder of its name."""
    return isinstance(place, str) and place != GIVEN and not is_embedded(place) and Path(place).exists()


def read_description(folder: Path) -> Experiment:
    """Return the experiment that a run wrote into its folder, checked."""
    table = read_settings(folder)
    check_code(table, folder / CONFIG_FILE)
    return Experiment.model_validate(table)


def read_settings(folder: Path) -> dict[str, Any]:
    """Return config.toml of a run as a table, unchecked: no code that it names is run, and its files may be gone.

    A folder from which a link leads out is refused.
    """
    if not (folder / CONFIG_FILE).is_file() or not (folder / CONFIG_FILE).stat().st_size:
        raise FedstillError(f"'{folder}' holds no run (no {CONFIG_FILE}): give the folder that `fedstill run` named")
    check_no_way_out(folder)
    table = toml_io.read_toml(folder / CONFIG_FILE)
    if "algorithm" in table:
        raise FedstillError(
            f"'{folder}' was written by an older fedstill (section [algorithm]): run it again with this version"
        )
    return table


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


CORE_PACKAGES = ("torch", "numpy", "scikit-learn", "scipy", "safetensors", "pydantic", "typer", "rich")
EXTRAS = {
    "data": ("datasets", "pandas", "pyarrow", "pillow"),
    "plots": ("matplotlib",),
    "dp": ("dp-accounting",),
    "text": ("tokenizers",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "report": ("vl-convert-python",),
    "watch": ("starlette", "uvicorn"),
    "search": ("optuna",),
    "flower": ("flwr",),
    "ray": ("ray",),
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

    commit, settings = git("rev-parse", "HEAD"), git("config", "--list", "--show-scope", "--name-only")
    if commit is None or settings is None or _git_runs_programs(settings):
        return commit
    flags = ("--porcelain", "--untracked-files=no", "--ignore-submodules=all")  # submodules have settings of their own
    changed = git("--no-optional-locks", "-c", "core.fsmonitor=false", "status", *flags)
    return f"{commit}+" if changed else commit


def _git_runs_programs(settings: str) -> bool:
    """Return whether a repository's own settings name programs for `git status`: the folder may be somebody else's.

    A remote that promises missing objects is asked for them, by programs that its settings name.
    """
    keys = [
        key
        for scope, _, key in (line.partition("\t") for line in settings.splitlines())
        if scope not in ("system", "global")
    ]
    begins = ("filter.", "include", "extensions.partialclone")
    return any(key.startswith(begins) or key.endswith(".promisor") for key in keys)


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
