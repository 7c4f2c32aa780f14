"""Files that change between a run and the commands that use it: the same answers to the last bit, or one line.

Every row of CASES says what is done to the files, which command follows, and what must come back: SAME, or a pattern of
the line that names the difference. After each case all files are put back.
"""

from __future__ import annotations

import csv
import filecmp
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cli_runs import mistake
from PIL import Image

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.data import from_csv
from fedstill.experiment import compare as compare_room
from fedstill.experiment import run as run_room
from fedstill.experiment.build import build_federation
from fedstill.loop.checkpoint import load_model, load_weights, save_weights

SAME = "same"
HEADER = ["town", "age", "weight", "ill"]
TOWNS = ("bern", "oslo", "rome")
OWN = """
from width import HIDDEN
import torch

def network(input_shape, classes):
    return torch.nn.Sequential(torch.nn.Linear(input_shape[0], HIDDEN), torch.nn.Linear(HIDDEN, classes))
"""


# The world: data, inputs and finished runs below one folder, made once.


def patients(count: int, seed: int) -> list[list[str]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        town, age, weight = draw.choice(TOWNS), draw.randint(20, 90), draw.randint(45, 110)
        rows.append(
            [town, str(age), str(weight), "yes" if age + 10 * (town == "oslo") + draw.gauss(0, 12) > 58 else "no"]
        )
    return rows


def write_table(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def read_table(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def draw_images(folder: Path, names: tuple[str, ...], count: int) -> None:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for place in range(count):
            pixels = np.random.default_rng([number, place]).integers(0, 90, (8, 8)) + 80 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{place}.png")


def experiment(data: dict, **changes) -> fedstill.Experiment:
    sections = {
        "seed": 3,
        "partition": {"scheme": "lda", "clients": 3, "alpha": 5.0},
        "model": {"name": "mlp", "hidden": [6], "init": "torch"},
        "method": "fedavg",
        **changes,
    }
    return fedstill.Experiment(
        rounds=2,
        cohort=3,
        checkpoint_every=1,
        data=data,
        local={"batch_size": 16, "lr": 0.05},
        engine={"device": "cpu"},
        **sections,
    )


def own_federation(world: Path, seed: int = 3) -> fedstill.Federation:
    """Data that no setting names: the table read in Python."""
    source = from_csv(world / "train.csv", label="ill")
    return build_federation(experiment({"source": "digits"}, seed=seed), source)


def make_world(root: Path) -> None:
    write_table(root / "train.csv", [HEADER, *patients(160, 0)])
    write_table(root / "new.csv", [HEADER[:3], *(row[:3] for row in patients(12, 1))])
    write_table(root / "beside.csv", [HEADER[:3], *(row[:3] for row in patients(20, 2))])
    draw_images(root / "clothes", ("Bag", "Shirt", "Trouser"), 12)
    draw_images(root / "photos", ("first", "second"), 3)
    (root / "own.py").write_text(OWN)
    (root / "width.py").write_text("HIDDEN = 5\n")
    table = {"source": str(root / "train.csv"), "label": "ill", "validation": 40}
    feddf = {"name": "feddf", "student": {"steps": 3}}
    with_beside = experiment({**table, "unlabeled": str(root / "beside.csv")}, method=feddf)
    runs = {
        "table": with_beside,
        "twin": with_beside.model_copy(update={"seed": 4}),
        "images": experiment({"source": str(root / "clothes"), "size": 8}),
        "own": experiment(table, model=f"{root / 'own.py'}:network"),
    }
    if find_spec("tokenizers"):
        texts = [["text", "topic"]]
        texts += [[f"{'the team won' if row % 2 else 'the bank paid'} {row}", "ab"[row % 2]] for row in range(60)]
        write_table(root / "texts.csv", texts)
        write_table(root / "letters.csv", [["text"], *([text] for text, _ in texts[1:6])])
        bert = {"name": "bert", "layers": 1, "hidden": 8, "heads": 2, "inner": 8}
        tokens = {"source": str(root / "texts.csv"), "inputs": ["text"], "label": "topic", "tokens": 8}
        runs["learnt"] = experiment({**tokens, "vocabulary": 60}, model=bert)
        fedstill.run(runs["learnt"], run_dir=root / "learnt", pictures=False)
        contract = json.loads((root / "learnt" / "contract.json").read_text())
        (root / "tokenizer.json").write_text(contract["data"]["tokenizer"]["file"])
        runs["texts"] = experiment({**tokens, "tokenizer": str(root / "tokenizer.json")}, model=bert)
        del runs["learnt"]
    for name, wanted in runs.items():
        fedstill.run(wanted, run_dir=root / name, pictures=False)
    fedstill.run(
        experiment({"source": "digits"}), federation=own_federation(root), run_dir=root / "given", pictures=False
    )
    fedstill.compare(experiment(table), ["fedavg"], seeds=1, run_dir=root / "comparison")
    source = from_csv(root / "train.csv", label="ill")
    fedstill.compare(experiment({"source": "digits"}), ["fedavg"], seeds=1, source=source, run_dir=root / "handed")


INPUTS = {"images": "photos", "texts": "letters.csv", "learnt": "letters.csv"}  # new.csv for others


def command(world: Path, words: str) -> torch.Tensor:
    """Return the numbers of one command: predicted probabilities, or the last model of a resumed run."""
    verb, name, *options = words.split()
    folder = world / name
    if verb == "resume":
        fedstill.resume_run(folder)
        return torch.cat([leaf.flatten() for _, leaf in sorted(load_weights(folder / "last").params.items())])
    inputs = None if "unlabeled" in options or "targets" in options else world / INPUTS.get(name, "new.csv")
    from_ = next((word for word in ("best", "targets") if word in options), "last")
    return fedstill.predict(folder, inputs, from_=from_).probabilities


class Case(NamedTuple):
    """One tampering, the command after it, and SAME or a pattern of the line."""

    name: str
    do: Callable[[Path], object]
    command: str
    expected: str


# Tampering.


def table(change: Callable[[list[list[str]]], list[list[str]]], *files: str) -> Callable[[Path], None]:
    """Change the rows of tables, the header included."""

    def do(world: Path) -> None:
        for file in files or ("train.csv",):
            write_table(world / file, change(read_table(world / file)))

    return do


def cells(column: str, change: Callable[[str], str], *files: str) -> Callable[[Path], None]:
    def in_rows(rows: list[list[str]]) -> list[list[str]]:
        place = rows[0].index(column)
        return [rows[0], *([*row[:place], change(row[place]), *row[place + 1 :]] for row in rows[1:])]

    return table(in_rows, *files)


def text(file: str, old: str, new: str) -> Callable[[Path], None]:
    def do(world: Path) -> None:
        content = (world / file).read_text()
        changed = re.sub(old, new, content, count=1, flags=re.MULTILINE)
        assert changed != content, f"{file} holds no {old!r}"
        (world / file).write_text(changed)

    return do


def copy(old: str, new: str) -> Callable[[Path], None]:
    return lambda world: shutil.copyfile(world / old, world / new)


def exchange(first: str, second: str) -> Callable[[Path], None]:
    def do(world: Path) -> None:
        (world / first).rename(world / "between")
        (world / second).rename(world / first)
        (world / "between").rename(world / second)

    return do


def move(old: str, new: str) -> Callable[[Path], None]:
    return lambda world: (world / old).rename(world / new)


def remove(file: str) -> Callable[[Path], None]:
    return lambda world: (world / file).unlink()


def flip(file: str) -> Callable[[Path], None]:
    """Another last byte."""

    def do(world: Path) -> None:
        content = (world / file).read_bytes()
        (world / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    return do


def flip_middle(file: str) -> Callable[[Path], None]:
    def do(world: Path) -> None:
        content = bytearray((world / file).read_bytes())
        content[len(content) // 2] ^= 1
        (world / file).write_bytes(content)

    return do


def images(change: Callable[[Image.Image], Image.Image], folder: str) -> Callable[[Path], None]:
    def do(world: Path) -> None:
        for path in sorted((world / folder).rglob("*.png")):
            with Image.open(path) as image:
                changed = change(image.copy())
            changed.save(path)

    return do


def earlier_model(world: Path) -> None:
    weights, about = load_model(world / "table" / "last")
    save_weights(world / "table" / "last", weights, {**about, "round": "1"})


def allow_own(world: Path) -> None:
    fedstill.allow(world / "own.py")


def without_metadata(world: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = world / "table" / "last" / "weights.safetensors"
    save_file(load_file(path), path)


def several(*parts: Callable[[Path], object]) -> Callable[[Path], None]:
    def do(world: Path) -> None:
        for part in parts:
            part(world)

    return do


def reversed_columns(rows: list[list[str]]) -> list[list[str]]:
    return [row[::-1] for row in rows]


def more_patients(rows: list[list[str]]) -> list[list[str]]:
    """Other people: 300 rows more, old and heavy."""
    return [*rows, *([town, str(100 + int(age)), weight, ill] for town, age, weight, ill in patients(300, 9))]


def other(answer: str) -> str:
    return {"yes": "no", "no": "yes"}[answer]


def zurich(town: str) -> str:
    return "zurich" if town == "bern" else town


def thousandfold(number: str) -> str:
    return str(1000 * int(number))


# name, tampering of train.csv, and the line by which a resumed run refuses it; `predict` reads no training data
TABLE = [
    ("300 rows added", table(more_patients), r"train has \d+ rows and had 88"),
    ("ten rows removed", table(lambda rows: rows[:-10]), r"train has \d+ rows and had 88"),
    ("rows permuted", table(lambda rows: [rows[0], *rows[:0:-1]]), "differ|another order"),
    ("labels flipped", cells("ill", other), "labels|inputs"),
    ("columns reordered", table(reversed_columns), "column names are in another order"),
    ("column renamed", table(lambda rows: [["city", *HEADER[1:]], *rows[1:]]), "without 'town' with new 'city'"),
    ("column rescaled", cells("age", thousandfold), "mean or deviation moved in 1 of 3: 'age'"),
    ("column retyped", cells("age", lambda age: f"{age} years"), "'age'"),
    ("column added", table(lambda rows: [["pulse", *rows[0]], *(["70", *row] for row in rows[1:])]), "new 'pulse'"),
    ("column dropped", table(lambda rows: [row[:1] + row[2:] for row in rows]), "without 'age'"),
    ("class renamed", cells("ill", lambda ill: ill.replace("yes", "Yes!")), "classes differ: without 'yes'"),
    ("class added", table(lambda rows: [*rows, *(["rome", "50", "70", "maybe"] for _ in range(9))]), "new 'maybe'"),
    ("word renamed", cells("town", zurich), "column 'town': words differ: without 'bern' with new 'zurich'"),
    (
        "word added",
        table(lambda rows: [*rows, *(["ulm", "50", "70", "no"] for _ in range(9))]),
        "words differ: .*'ulm'",
    ),
    ("a cell emptied", text("train.csv", r"^(\w+),\d+", r"\1,"), "'age'"),
    ("file moved", move("train.csv", "elsewhere.csv"), "train.csv"),
    ("file is no table any more", lambda world: (world / "train.csv").write_bytes(b"\0\1"), "train.csv|label"),
]

# name, tampering of clothes/, and the line of a resumed run
IMAGES = [
    ("class folder renamed", move("clothes/Bag", "clothes/Zbag"), "classes differ: without 'Bag' with new 'Zbag'"),
    ("class folders exchanged", exchange("clothes/Bag", "clothes/Shirt"), "differ"),
    ("class folder removed", lambda world: shutil.rmtree(world / "clothes" / "Bag"), "without 'Bag'"),
    ("images resized", images(lambda image: image.resize((16, 5)), "clothes"), "differ"),
    (
        "images recoloured",
        images(lambda image: Image.merge("RGB", [image.point(lambda v: v // 2)] * 3), "clothes"),
        "shape .1, 8, 8. and have .3, 8, 8.",
    ),
    ("an image renamed", move("clothes/Bag/0.png", "clothes/Bag/z.png"), "another order|differ"),
    ("an image removed", remove("clothes/Bag/0.png"), "rows and had"),
    ("an image added", copy("photos/first/0.png", "clothes/Bag/more.png"), "rows and had"),
    ("folder moved", move("clothes", "elsewhere"), "clothes"),
]

# a line of config.toml, and the name in the line of a resumed run
SETTINGS = [
    (r"^seed = 3", "seed = 4", "seed was 3 and is 4"),
    (r"^cohort = 3", "cohort = 2", "cohort was 3 and is 2"),
    (r"^validation = 40", "validation = 20", r"data\.validation was 40 and is 20"),
    (r'^scale = "train"', 'scale = "none"', r"data\.scale was 'train' and is 'none'"),
    (r'^label = "ill"', 'label = "town"', r"data\.label was 'ill'"),
    (r"^alpha = 5\.0", "alpha = 0.1", r"partition\.alpha was 5\.0 and is 0\.1"),
    (r"^clients = 3", "clients = 4", r"partition\.clients was 3 and is 4"),
    (r"^hidden = .*", "hidden = [7]", r"model\.hidden was \[6\] and is \[7\]"),
    (r"^lr = 0\.05", "lr = 0.5", r"local\.lr was 0\.05 and is 0\.5"),
    (r"^epochs = 1\n", "epochs = 2\n", r"local\.epochs was 1 and is 2"),
    (r"^steps = 3", "steps = 4", r"method\.student\.steps was 3 and is 4"),
    (r'^device = "cpu"', 'device = "auto"', r"engine\.device was 'cpu'"),
    (r"^quorum = .*", "quorum = 0.9", r"guard\.quorum was"),
]

OWN_EDITS = [("own.py", "HIDDEN, classes", "HIDDEN,  classes"), ("width.py", "5", "5  # cm")]
WEIGHTS = "table/last/weights.safetensors"
NEWEST = "checkpoints/round-000002.zip"

CASES = [
    *(Case(f"training table: {name}", do, "predict table", SAME) for name, do, _ in TABLE),
    *(Case(f"training table: {name}", do, "resume own", line) for name, do, line in TABLE),
    *(Case(f"training images: {name}", do, "predict images", SAME) for name, do, _ in IMAGES),
    *(Case(f"training images: {name}", do, "resume images", line) for name, do, line in IMAGES),
    *(
        Case(f"config.toml: {new}", text("table/config.toml", old, new), "predict table", SAME)
        for old, new, _ in SETTINGS
    ),
    *(
        Case(f"config.toml: {new}", text("table/config.toml", old, new), "resume table", line)
        for old, new, line in SETTINGS
    ),
    Case(
        "config.toml cut off",
        lambda world: (world / "table/config.toml").write_text("seed = "),
        "predict table",
        "toml",
    ),
    Case("config.toml is gone", remove("table/config.toml"), "predict table", "holds no run"),
    # inputs
    Case("inputs: columns reordered", table(reversed_columns, "new.csv"), "predict table", SAME),
    Case(
        "inputs: column added",
        table(lambda rows: [["pulse", *rows[0]], *(["70", *row] for row in rows[1:])], "new.csv"),
        "predict table",
        SAME,
    ),
    Case(
        "inputs: the label is there",
        table(lambda rows: [HEADER, *([*row, "no"] for row in rows[1:])], "new.csv"),
        "predict table",
        SAME,
    ),
    Case("inputs: column renamed", text("new.csv", "age", "years"), "predict table", "'age'"),
    Case("inputs: column dropped", table(lambda rows: [row[1:] for row in rows], "new.csv"), "predict table", "'town'"),
    Case("inputs: column retyped", cells("age", lambda age: f"{age} years", "new.csv"), "predict table", "'age'"),
    Case(
        "inputs: grey photos saved in colour",
        images(lambda image: image.convert("RGB"), "photos"),
        "predict images",
        SAME,
    ),
    Case("inputs: gone", remove("new.csv"), "predict table", "no such file or folder"),
    # the unlabeled set
    Case("unlabeled: train.csv moved", move("train.csv", "elsewhere.csv"), "predict table unlabeled", SAME),
    Case("unlabeled: 300 rows added to train.csv", table(more_patients), "predict table unlabeled", SAME),
    Case("targets: train.csv moved", move("train.csv", "elsewhere.csv"), "predict table targets", SAME),
    Case(
        "unlabeled: row removed",
        table(lambda rows: rows[:-1], "beside.csv"),
        "predict table unlabeled",
        "unlabeled has 19 rows and had 20",
    ),
    Case(
        "unlabeled: rows permuted",
        table(lambda rows: [rows[0], *rows[:0:-1]], "beside.csv"),
        "predict table unlabeled",
        "the same 20 rows stand in another order",
    ),
    Case(
        "unlabeled: column rescaled",
        cells("age", thousandfold, "beside.csv"),
        "predict table unlabeled",
        "unlabeled: inputs of its 20 rows differ",
    ),
    Case(
        "unlabeled: row removed", table(lambda rows: rows[:-1], "beside.csv"), "resume table", "unlabeled has 19 rows"
    ),
    Case("unlabeled: another table", copy("new.csv", "beside.csv"), "predict table targets", "unlabeled has 12 rows"),
    Case("unlabeled: moved", move("beside.csv", "elsewhere.csv"), "predict table unlabeled", "beside.csv"),
    # contract.json
    Case(
        "contract.json: a mean edited",
        text("table/contract.json", r'"mean": \[\n\s*[\d.]+', '"mean": [\n 0.0'),
        "predict table",
        "contract.json' was changed after the run wrote it",
    ),
    Case(
        "contract.json: a class renamed", text("table/contract.json", '"yes"', '"ill"'), "predict table", "was changed"
    ),
    Case(
        "contract.json: of another run",
        copy("twin/contract.json", "table/contract.json"),
        "predict table",
        r"last/weights.safetensors' was not written by this run",
    ),
    Case(
        "contract.json: of another run",
        copy("twin/contract.json", "table/contract.json"),
        "resume table",
        "seed was 4 and is 3",
    ),
    Case(
        "contract.json: cut off",
        lambda world: (world / "table/contract.json").write_text("{"),
        "predict table",
        "contract.json' cannot be read",
    ),
    Case(
        "contract.json: a run of an older version",
        remove("table/contract.json"),
        "predict table",
        r"written by an older fedstill \(no contract.json\): run it again",
    ),
    Case("contract.json: a run of an older version", remove("table/contract.json"), "resume table", "older fedstill"),
    # calibration.json
    Case(
        "calibration.json: edited",
        text("table/calibration.json", r'"temperature": [\d.]+', '"temperature": 9.0'),
        "predict table",
        "calibration.json' does not belong to the run's models",
    ),
    Case(
        "calibration.json: of another run",
        copy("twin/calibration.json", "table/calibration.json"),
        "predict table",
        "calibration.json' does not belong",
    ),
    Case("calibration.json: is gone", remove("table/calibration.json"), "predict table", "calibration.json' is gone"),
    Case("calibration.json: is gone", remove("table/calibration.json"), "resume table", SAME),
    # models
    Case("weights: one bit", flip(WEIGHTS), "predict table", "weights.safetensors' was changed after the run wrote it"),
    Case(
        "weights: of another run",
        copy("twin/last/weights.safetensors", WEIGHTS),
        "predict table",
        "not written by this run",
    ),
    Case(
        "weights: whole last/ of another run",
        exchange("twin/last", "table/last"),
        "predict table",
        "not written by this",
    ),
    Case(
        "weights: best of another run",
        copy("twin/best/weights.safetensors", "table/best/weights.safetensors"),
        "predict table best",
        "best/weights.safetensors' was not written by this run",
    ),
    Case(
        "weights: last and best exchanged",
        exchange("table/last", "table/best"),
        "predict table",
        "the run's best model",
    ),
    Case("weights: of an earlier round", earlier_model, "predict table", "after round 1, and the run has played 2"),
    Case("weights: saved by another program", without_metadata, "predict table", "has no seal"),
    Case(
        "weights: cut off",
        lambda world: (world / WEIGHTS).write_bytes((world / WEIGHTS).read_bytes()[:200]),
        "predict table",
        "weights.safetensors is not a readable safetensors file",
    ),
    Case("weights: of another run", copy("twin/last/weights.safetensors", WEIGHTS), "resume table", SAME),
    # targets
    Case(
        "targets: one bit",
        flip("table/targets.safetensors"),
        "predict table targets",
        "was changed after the run wrote it",
    ),
    Case(
        "targets: of another run",
        copy("twin/targets.safetensors", "table/targets.safetensors"),
        "predict table targets",
        "targets.safetensors was written by another run",
    ),
    # checkpoints
    Case(
        "checkpoint: of another run",
        copy(f"twin/{NEWEST}", f"table/{NEWEST}"),
        "resume table",
        "written by another run",
    ),
    Case("checkpoint: of another run", copy(f"twin/{NEWEST}", f"table/{NEWEST}"), "predict table", SAME),
    Case("checkpoint: a byte", flip_middle(f"table/{NEWEST}"), "resume table", SAME),
    Case("checkpoint: the newest is gone", remove(f"table/{NEWEST}"), "resume table", SAME),
    Case("checkpoint: the newest is gone", remove(f"table/{NEWEST}"), "predict table", SAME),
    Case("checkpoint: none is left", lambda world: shutil.rmtree(world / "table/checkpoints"), "resume table", SAME),
    Case("checkpoint: none is left", lambda world: shutil.rmtree(world / "table/checkpoints"), "predict table", SAME),
    # code of one's own
    *(
        Case(f"{file}: edited", text(file, old, new), words, "names code, '.*own.py:network'.*fedstill allow")
        for file, old, new in OWN_EDITS
        for words in ("predict own", "resume own")
    ),
    *(
        Case(
            f"{file}: edited and allowed", several(text(file, old, new), allow_own), words, f"{file}' has changed since"
        )
        for file, old, new in OWN_EDITS
        for words in ("predict own", "resume own")
    ),
    Case("own.py: is gone", remove("own.py"), "predict own", "no file '.*own.py'"),
    # the run's folder, and data that were handed over in Python
    Case(
        "log, numbers and pictures edited",
        lambda world: (world / "table/metrics.jsonl").write_text(""),
        "predict table",
        SAME,
    ),
    Case("data handed to run(federation=)", table(more_patients), "predict given", SAME),
    Case("data handed to run(federation=)", lambda world: None, "resume given", "handed over in Python"),
    Case("data handed to compare(source=)", table(more_patients), "predict handed/fedavg/seed-3", SAME),
    Case("data handed to compare(source=)", lambda world: None, "resume handed/fedavg/seed-3", "handed over in Python"),
    Case(
        "config.toml of such a run names digits",
        text("given/config.toml", "^source = .*", 'source = "digits"'),
        "resume given",
        r"data\.source was .* and is 'digits'",
    ),
    Case("a comparison's training table", table(more_patients), "predict comparison/fedavg/seed-3", SAME),
    Case("a comparison's training table", table(more_patients), "resume comparison/fedavg/seed-3", r"rows and had"),
    # texts
    Case("tokenizer.json: another", copy("table/contract.json", "tokenizer.json"), "predict texts", SAME),
    Case(
        "tokenizer.json: a word renamed",
        text("tokenizer.json", '"team"', '"crew"'),
        "resume texts",
        "cut into other tokens",
    ),
    Case("texts.csv: moved", move("texts.csv", "elsewhere.csv"), "predict texts", SAME),
    Case("texts.csv: other words, another vocabulary", cells("text", str.upper, "texts.csv"), "predict learnt", SAME),
    Case(
        "texts.csv: other words, another vocabulary",
        cells("text", lambda line: f"{line} and so on", "texts.csv"),
        "resume learnt",
        "cut into other tokens",
    ),
    Case(
        "config.toml: vocabulary",
        text("learnt/config.toml", "^vocabulary = 60", "vocabulary = 40"),
        "resume learnt",
        r"data\.vocabulary was 60 and is 40",
    ),
]


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def kept(tmp_path_factory, monkeypatch_module):
    """The folder of the world, a copy of it, and the answer of each command before anything was changed."""
    for room in (run_room, compare_room):
        monkeypatch_module.setattr(
            room, "draw_pictures", lambda *parts, **options: []
        )  # nothing here is about pictures
    root = tmp_path_factory.mktemp("world") / "world"
    root.mkdir()
    make_world(root)
    copied = shutil.copytree(root, root.with_name("copy"))
    commands = {case.command for case in CASES if case.expected == SAME and available(case)}
    answers = {words: command(root, words) for words in sorted(commands)}
    return root, copied, answers


@pytest.fixture
def world(kept):
    """The world as it was made: files that a case has changed are put back."""
    root, copied, _ = kept
    there = {path.relative_to(root): path for path in root.rglob("*")}
    wanted = {path.relative_to(copied): path for path in copied.rglob("*")}
    for place in sorted(there.keys() - wanted.keys(), reverse=True):
        there[place].rmdir() if there[place].is_dir() else there[place].unlink()
    for place, path in sorted(wanted.items()):
        if path.is_dir():
            (root / place).mkdir(exist_ok=True)
        elif place not in there or not filecmp.cmp(path, there[place]):
            shutil.copy2(path, root / place)
    return root


def available(case: Case) -> bool:
    return find_spec("tokenizers") is not None or case.command.split()[1] not in ("texts", "learnt")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} - {case.command}".replace("\n", " "))
def test_a_change_is_named_or_changes_nothing(world, kept, case):
    if not available(case):
        pytest.skip("needs fedstill[text]")
    case.do(world)
    if case.expected == SAME:
        assert torch.equal(command(world, case.command), kept[2][case.command])
        return
    with pytest.raises(FedstillError) as refusal:
        command(world, case.command)
    assert "\n" not in str(refusal.value)
    assert re.search(case.expected, str(refusal.value))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cells("town", zurich, "train.csv", "new.csv"), "column 'town' holds 'zurich'"),
        (text("new.csv", r"^(\w+),\d+", r"\1,"), "column 'age' has no value"),
    ],
)
def test_rows_that_cannot_be_read_are_named_and_the_others_keep_their_answers(world, kept, change, reason):
    change(world)
    outcome = fedstill.predict(world / "table", world / "new.csv")
    assert outcome.skipped
    assert all(reason in name for name in outcome.skipped)
    before, rows = kept[2]["predict table"], [int(name) for name in outcome.ids]
    assert len(rows) + len(outcome.skipped) == len(before)
    torch.testing.assert_close(outcome.probabilities, before[rows], rtol=0, atol=1e-6)


def test_the_table_holds_more_than_the_forty_that_were_asked_for():
    assert len({(case.name, case.command) for case in CASES}) == len(CASES) >= 44


@pytest.mark.parametrize(
    ("change", "words", "line"),
    [
        (text("new.csv", "age", "years"), ["predict", "table", "new.csv"], "'age'"),
        (copy("twin/last/weights.safetensors", WEIGHTS), ["predict", "table", "new.csv"], "not written by this run"),
        (cells("ill", other), ["resume", "table"], "began with other data"),
        (
            text("table/config.toml", r"^alpha = 5\.0", "alpha = 0.1"),
            ["resume", "table"],
            "partition.alpha was 5.0 and is 0.1",
        ),
        (remove("table/contract.json"), ["resume", "table"], "older fedstill"),
    ],
)
def test_the_command_line_says_it_in_one_line_with_exit_code_2(world, change, words, line):
    change(world)
    assert line in mistake(words[0], *(world / word for word in words[1:]))


def test_classes_keep_the_names_of_the_run(world):
    move("clothes/Bag", "clothes/Zbag")(world)
    assert fedstill.predict(world / "images", world / "photos").classes == ("Bag", "Shirt", "Trouser")
    for handed in ("given", "handed/fedavg/seed-3"):
        assert fedstill.predict(world / handed, world / "new.csv").classes == ("no", "yes")


def test_a_run_of_a_comparison_answers_as_the_same_run_alone(world, tmp_path):
    table = {"source": str(world / "train.csv"), "label": "ill", "validation": 40}
    fedstill.run(experiment(table), run_dir=tmp_path / "alone", pictures=False)
    alone = fedstill.predict(tmp_path / "alone", world / "new.csv")
    assert torch.equal(alone.probabilities, command(world, "predict comparison/fedavg/seed-3"))


def test_inputs_in_another_order_get_the_same_answers_in_that_order(world, kept):
    table(lambda rows: [rows[0], *rows[:0:-1]], "new.csv")(world)
    torch.testing.assert_close(command(world, "predict table").flip(0), kept[2]["predict table"], rtol=0, atol=1e-6)


def test_data_handed_over_again_must_be_the_same(world):
    wanted, folder = experiment({"source": "digits"}), world / "given"
    before = load_weights(folder / "last").params
    (folder / NEWEST).unlink()
    same = own_federation(world)
    other_labels = replace(same, train=replace(same.train, y=1 - same.train.y))
    with pytest.raises(FedstillError, match="labels of the same 128 inputs differ"):
        fedstill.run(wanted, federation=other_labels, run_dir=folder, resume=True, pictures=False)
    with pytest.raises(FedstillError, match=r"handed over in Python|another experiment"):
        fedstill.run(wanted, run_dir=folder, resume=True, pictures=False)
    fedstill.run(wanted, federation=own_federation(world), run_dir=folder, resume=True, pictures=False)
    after = load_weights(folder / "last").params
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_run_that_began_is_not_taken_over_by_another_experiment(world):
    shutil.rmtree(world / "table" / "checkpoints")
    wanted = fedstill.Experiment.from_toml(world / "table" / "config.toml")
    with pytest.raises(FedstillError, match="another experiment: seed was 3 and is 5"):
        fedstill.run(wanted.model_copy(update={"seed": 5}), run_dir=world / "table", pictures=False)


def test_a_model_of_more_rounds_is_not_calibrated_by_the_temperature_of_before(world):
    calibration = (world / "table" / "calibration.json").read_text()
    text("table/config.toml", "^rounds = 2", "rounds = 4")(world)

    class DiesInRound4(fedstill.Callback):
        def on_round(self, row):
            if row["round"] == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstill.resume_run(world / "table", callbacks=[DiesInRound4()])
    assert (world / "table" / "calibration.json").read_text() == calibration
    meanwhile = fedstill.predict(world / "table", world / "new.csv")
    assert (meanwhile.round, meanwhile.calibration.temperature) == (3, None)
    fedstill.resume_run(world / "table")
    assert fedstill.predict(world / "table", world / "new.csv").round == 4
