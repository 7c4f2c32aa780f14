"""Damage to files of a run, and hostile files with right digests: each must end in one line, or be passed over.

`flips`, `links`, `contents`, `full_disks` and `double_starts` yield the name of each attempt and what came of it:
REFUSED in one line, with nothing lost, or what went wrong. `folder` holds a finished run of `make_run`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.experiment.run_folder import _seal, contract_text
from fedstill.loop import checkpoint
from fedstill.loop.checkpoint import load_model, load_weights, save_weights
from fedstill.loop.message import decode, encode, on_meta

REFUSED = "refused in one line"
ROUNDS = 4


def make_run(folder: Path) -> None:
    """Make a run of four rounds, whose newest checkpoint is that of round 4."""
    fedstill.run(experiment(), run_dir=folder, pictures=False)


def experiment(**changes: Any) -> fedstill.Experiment:
    fields = {"rounds": ROUNDS, "cohort": 2, "checkpoint_every": 1, "partition": {"scheme": "iid", "clients": 3}}
    return fedstill.Experiment(**{**fields, "model": {"name": "mlp", "hidden": [4]}, **changes})


def outcome_of(act: Callable[[], object]) -> str:
    try:
        act()
    except FedstillError as error:
        return REFUSED if "\n" not in str(error) else f"several lines: {error}"
    except BaseException as error:
        return f"traceback: {type(error).__name__}: {error}"
    return "accepted"


def flips(folder: Path, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Flip one bit at a time in a model, a checkpoint, the contract and an upload."""
    draw = random.Random(seed)
    files: dict[str, Callable[[], object]] = {
        "last/weights.safetensors": lambda: load_weights(folder / "last"),
        "best/weights.safetensors": lambda: load_weights(folder / "best"),
        f"checkpoints/round-{ROUNDS:06d}.zip": lambda: _read_checkpoint(folder),
        "contract.json": lambda: fedstill.load_run(folder),
        "upload": lambda: None,
    }
    upload = _upload(folder)
    message, form = encode(upload, round=3), on_meta(upload)
    for number in range(count):
        name = draw.choice(list(files))
        whole = message if name == "upload" else (folder / name).read_bytes()
        place = draw.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        label = f"{number}: bit {place} of {name}"
        if name == "upload":
            yield label, outcome_of(lambda data=bytes(damaged): decode(data, form, client=1, round=3))
            continue
        (folder / name).write_bytes(damaged)
        try:
            yield label, outcome_of(files[name])
        finally:
            (folder / name).write_bytes(whole)


def _read_checkpoint(folder: Path) -> None:
    """Read the newest checkpoint; one that does not verify is named like a refusal, because a resume passes it over."""
    path = folder / "checkpoints" / f"round-{ROUNDS:06d}.zip"
    try:
        state = checkpoint.load_checkpoint(path)
        list(state.clients)
    except checkpoint._Damaged as damage:
        raise FedstillError(" ".join(str(damage).split())) from None


def _upload(folder: Path) -> Any:
    from fedstill.core.types import Uploads

    weights = load_weights(folder / "last")
    one = torch.tensor(1.0)
    return Uploads(weights, one * 9, torch.tensor(4), one, one, {}, None, torch.tensor(1))


def links(folder: Path, outside: Path) -> Iterator[tuple[str, str]]:
    """Put a link, a pipe or a socket where a run writes, and resume it; nothing outside may change."""
    outside.mkdir()
    (outside / "precious").write_text("precious\n")
    copy = folder.with_name("linked")
    inside = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.name != "config.toml"]
    names = [*inside, Path(".running"), Path("error.txt"), Path("curves.png"), Path("privacy.json")]
    for place, name in enumerate(names):
        for kind in ("link", "pipe") if place % 4 else ("link", "pipe", "socket", "link to nothing"):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            shutil.rmtree(copy / "checkpoints" / f"round-{ROUNDS:06d}.zip", ignore_errors=True)
            target = copy / name
            is_folder = target.is_dir()
            shutil.rmtree(target) if is_folder else target.unlink(missing_ok=True)
            _put(kind, target, outside / ("" if is_folder else "precious"), outside)
            came = outcome_of(lambda: fedstill.resume_run(copy))
            if sorted(path.name for path in outside.iterdir()) != ["precious"]:
                came = "wrote outside"
            if (outside / "precious").read_text() != "precious\n":
                came = "changed a file outside"
            yield f"{kind} in place of {name}", came


def _put(kind: str, target: Path, there: Path, outside: Path) -> None:
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(target.parent)  # a socket's path may have 100 letters
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(target.name)
        finally:
            os.chdir(here)
    else:
        target.symlink_to(there if kind == "link" else outside / "nothing")


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    """Write files whose digests are right and whose content no run writes; resume or predict must say so in a line."""
    copy = folder.with_name("wrong")
    rows = torch.zeros(2, 1, 8, 8, dtype=torch.uint8).numpy()

    def again() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)

    for name, change in CONTRACTS.items():
        again()
        tree = json.loads((copy / "contract.json").read_text())
        del tree["digest"]
        change(tree)
        if "seal" in tree and isinstance(tree.get("experiment"), dict):
            own = {key: part for key, part in tree.items() if key != "seal"}
            tree["seal"] = _seal(own)
        (copy / "contract.json").write_text(contract_text(tree))
        yield f"contract: {name}", outcome_of(lambda: fedstill.load_run(copy).predict(rows))
    for name, spoil in MODELS.items():
        again()
        weights, about = load_model(copy / "last")
        spoil(weights.params, about)
        save_weights(copy / "last", weights, about)
        yield f"model: {name}", outcome_of(lambda: fedstill.predict(copy, rows))
    for name, change in STATES.items():
        again()
        for path in (copy / "checkpoints").iterdir():
            rewrite(path, change)
        yield f"checkpoint: {name}", outcome_of(lambda: _read_newest(copy))
    for name, write in OTHERS.items():
        again()
        write(copy)
        yield f"file: {name}", outcome_of(lambda: fedstill.load_run(copy).predict(rows))


def _read_newest(folder: Path) -> None:
    for number, _ in checkpoint.list_checkpoints(folder / "checkpoints"):
        path = folder / "checkpoints" / f"round-{number:06d}.zip"
        try:
            list(checkpoint.load_checkpoint(path).clients)
        except checkpoint._Damaged as damage:
            refusal = FedstillError(" ".join(str(damage).split()))
        else:
            return
    raise refusal


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change state.json of a checkpoint, and compute all digests anew."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist() if name != "manifest.json"}
    state = json.loads(parts["state.json"])
    change(state)
    parts["state.json"] = json.dumps(state).encode()
    manifest = json.dumps({"format": 1, "files": {name: checkpoint.content_digest(d) for name, d in parts.items()}})
    sealed = {"manifest": manifest, "blake2b": checkpoint.content_digest(manifest.encode())}
    parts["manifest.json"] = json.dumps(sealed).encode()
    with path.open("w+b") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in parts.items():
                archive.writestr(zipfile.ZipInfo(name), data)
            archive.comment = checkpoint.NO_DIGEST
        digest = checkpoint._frame_digest(file, archive.infolist())
        file.seek(-len(digest), os.SEEK_END)
        file.write(digest)


def deflated(path: Path, size: int) -> None:
    """Put a checkpoint in place whose parts are small on disk and `size` bytes when they are read."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("manifest.json", "w") as part:
            for _ in range(size >> 20):
                part.write(bytes(1 << 20))
        archive.comment = checkpoint.NO_DIGEST


def _set(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        if value is None:
            del tree[keys[-1]]
        else:
            tree[keys[-1]] = value

    return change


CONTRACTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no experiment": _set("experiment", value=None),
    "an experiment of words": _set("experiment", value="fedavg"),
    "no data": _set("data", value=None),
    "data of a list": _set("data", value=[1]),
    "no files": _set("files", value=None),
    "files of a list": _set("files", value=[1]),
    "no seal": _set("seal", value=None),
    "an unknown key": _set("experiment", "more", value=1),
    "a huge network": _set("experiment", "model", "hidden", value=[10**9]),
    "a negative network": _set("experiment", "model", "hidden", value=[-1]),
    "another network": _set("experiment", "model", "hidden", value=[5]),
    "no class": _set("data", "classes", value=[]),
    "other classes": _set("data", "classes", value=["a", "b"]),
    "a deep tree": _set("data", value={"a": [[[[[[]]]]]]}),
}
MODELS: dict[str, Callable[[dict[str, Any], dict[str, str]], object]] = {
    "of no round": lambda params, about: about.pop("round"),
    "of the round x": lambda params, about: about.update(round="x"),
    "of no kind": lambda params, about: about.pop("model"),
    "without calibration": lambda params, about: about.pop("calibration"),
    "without a layer": lambda params, about: params.pop(next(iter(params))),
    "with a layer more": lambda params, about: params.update(more=torch.zeros(3)),
    "of another shape": lambda params, about: params.update({next(iter(params)): torch.zeros(3)}),
    "of whole numbers": lambda params, about: params.update({k: v.long() for k, v in params.items()}),
    "of no number": lambda params, about: params.update({k: v * float("nan") for k, v in params.items()}),
}
STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no round": _set("round", value=None),
    "a round of words": _set("round", value="four"),
    "another round": _set("round", value=17),
    "no history": _set("history", value=None),
    "a history of words": _set("history", value="words"),
    "a history with another key": _set("history", value={"rows": [], "more": []}),
    "rows without rounds": _set("history", "rows", value=[{}]),
    "rows twice": lambda state: state["history"]["rows"].append(state["history"]["rows"][0]),
    "an audit of words": _set("history", "audit", value=["words"]),
    "no shape": _set("shape", value=None),
    "a shape of words": _set("shape", value="words"),
    "a model that is none": _set("shape", "dict", "weights", value={"value": 1}),
    "a tensor that is not there": _set("shape", "dict", "server", value={"dict": {"a": {"tensor": "nowhere"}}}),
    "an identity of words": _set("identity", value="words"),
    "no client shape": _set("away", value=7),
}
OTHERS: dict[str, Callable[[Path], object]] = {
    "config.toml that is none": lambda run: (run / "config.toml").write_bytes(b"\xff\x00"),
    "config.toml of another kind": lambda run: (run / "config.toml").write_text("algorithm = 1"),
    "a model of zeros": lambda run: (run / "last/weights.safetensors").write_bytes(bytes(100)),
    "a huge header": lambda run: (run / "last/weights.safetensors").write_bytes(b"\xff" * 100),
    "a contract that is none": lambda run: (run / "contract.json").write_text("[]"),
    "a deep contract": lambda run: (run / "contract.json").write_text("[" * 100_000),
    "metrics that are none": lambda run: (run / "metrics.jsonl").write_text("[1]\n{"),
    "a huge contract": lambda run: os.truncate(run / "contract.json", 1 << 40),
    "a huge model": lambda run: os.truncate(run / "last/weights.safetensors", 1 << 40),
}


def full_disks(folder: Path, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Let the disk be full from a random byte of a random file on, then resume with room: nothing may be lost.

    The system refuses to write beyond a length of every file (RLIMIT_FSIZE), as a full disk does: partly, at any write.
    """
    import resource

    draw = random.Random(seed)
    whole = flatten(load_weights(folder / "last"))
    sizes = sorted(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    room = folder.with_name("full")
    for number in range(count):
        shutil.rmtree(room, ignore_errors=True)
        limit = draw.randrange(1, draw.choice(sizes) + 1)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard[1]))
        try:
            came = outcome_of(lambda: fedstill.run(experiment(), run_dir=room, pictures=False))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, hard)
        if came != REFUSED:
            yield f"{number}: no byte beyond {limit}", came
            continue
        before = rounds_of(room)
        result = fedstill.run(experiment(), run_dir=room, pictures=False, resume=(room / "config.toml").exists())
        after = flatten(result.weights)
        same = all(torch.equal(leaf, after[name]) for name, leaf in whole.items())
        lost = rounds_of(room) != list(range(1, ROUNDS + 1)) or before != sorted(set(before))
        yield f"{number}: no byte beyond {limit}", REFUSED if same and not lost else f"lost something: {before}"


def double_starts(folder: Path, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Let two processes start, or go on with, one run at nearly the same moment.

    One of them may be refused in one line. The run must be whole, and equal to a run that nobody disturbed.
    """
    import multiprocessing

    draw = random.Random(seed)
    whole = flatten(load_weights(folder / "last"))
    room = folder.with_name("shared")
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=_start_each, args=(end,), daemon=True) for _, end in pipes]
    for worker in workers:
        worker.start()
    for number in range(count):
        shutil.rmtree(room, ignore_errors=True)
        kind = draw.choice(["start twice", "start and resume", "resume twice"])
        if kind == "resume twice":
            shutil.copytree(folder, room)
            for path in list((room / "checkpoints").iterdir())[1:]:
                path.unlink()
        later = draw.choice([0, draw.uniform(0, 0.3)])
        for place, (ours, _) in enumerate(pipes):
            ours.send((room, kind == "resume twice" or (kind == "start and resume" and place == 1), place * later))
        came = [ours.recv() for ours, _ in pipes]
        after = flatten(load_weights(room / "last"))
        same = all(torch.equal(leaf, after[name]) for name, leaf in whole.items())
        fine = set(came) <= {REFUSED, "accepted"} and "accepted" in came
        whole_lines = rounds_of(room) == list(range(1, ROUNDS + 1))
        yield f"{number}: {kind}, {later:.2f} s apart", REFUSED if fine and same and whole_lines else f"{came} {same}"
    for (ours, _), worker in zip(pipes, workers, strict=True):
        ours.send(None)
        worker.join()


def _start_each(orders: Any) -> None:
    """Run what each order says, in a process of its own."""
    torch.set_num_threads(1)
    while (order := orders.recv()) is not None:
        room, resume, later = order
        time.sleep(later)
        orders.send(outcome_of(partial(fedstill.run, experiment(), run_dir=room, pictures=False, resume=resume)))


def rounds_of(folder: Path) -> list[int]:
    """Return the rounds that metrics.jsonl has whole lines of."""
    if not (folder / "metrics.jsonl").exists():
        return []
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line)["round"] for line in lines]
