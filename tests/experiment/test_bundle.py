"""Bundles that somebody edited and gave a new digest: one line, or answers from a contract without a contradiction.

The digest shows damage, and everybody can compute it. So the table CASES edits each part of a bundle, writes the digest
anew, and says which line must come back. No such file may end in a traceback, fill the memory or load code.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
import torch
from cli_runs import fedstill as command
from cli_runs import mistake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.experiment.bundle import read_bundle

ANSWERS = "answers"
TREES = ("contract", "experiment", "calibration", "model")  # parts of the header that are JSON in a text
ABSENT = object()


class Parts:
    """A bundle taken apart: trees by name, the card, and tensors by name; `data` puts it together with a new digest."""

    def __init__(self, data: bytes) -> None:
        self.header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        texts = {name.removeprefix("fedstill."): text for name, text in self.header["__metadata__"].items()}
        self.about = {name: json.loads(text) if name in TREES else text for name, text in texts.items()}
        self.tensors = load(data)
        self.more: dict[str, str] = {}  # texts that take the place of a tree

    def __getattr__(self, name: str) -> Any:
        return self.about[name]

    @property
    def data(self) -> bytes:
        texts = {name: json.dumps(tree) if name in TREES else tree for name, tree in self.about.items()}
        texts |= {"digest": "0" * 64, **self.more}
        return with_digest(save(self.tensors, {f"fedstill.{name}": text for name, text in texts.items()}))


def with_digest(data: bytes) -> bytes:
    """A file whose digest stands in for its 64 zeros, as the module's docstring says."""
    return data.replace(b"0" * 64, hashlib.blake2b(data, digest_size=32).hexdigest().encode(), 1)


def with_header(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A file with another safetensors header, which its own writer would refuse, and a new digest."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["fedstill.digest"] = "0" * 64
    change(header)
    text = json.dumps(header).encode()
    return with_digest(struct.pack("<Q", len(text)) + text + data[8 + length :])


# The bundles: a table with gaps and words, images, and texts, each with the samples that it is asked about.


def frame(rows: int, seed: int) -> pandas.DataFrame:
    draw = np.random.default_rng(seed)
    table = pandas.DataFrame({"age": draw.normal(50, 9, rows).round(2), "town": draw.choice(["bern", "oslo"], rows)})
    table.loc[::7, "age"] = np.nan
    return table


def make_bundle(folder: Path, **sections: Any) -> Path:
    changes = {"partition": {"scheme": "iid", "clients": 2}, "engine": {"device": "cpu"}, **sections}
    fedstill.run(fedstill.Experiment(rounds=1, cohort=2, **changes), run_dir=folder, pictures=False)
    fedstill.export(folder, out=folder / "bundle.safetensors")
    return folder / "bundle.safetensors"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """The file of each bundle, and the samples that it is asked about."""
    root = tmp_path_factory.mktemp("bundles")
    train = frame(120, 0)
    train["ill"] = np.where(train.age.fillna(50) > 50, "yes", "no")
    train.to_csv(root / "train.csv", index=False)
    frame(5, 1).to_csv(root / "new.csv", index=False)
    data = {"source": str(root / "train.csv"), "label": "ill", "missing": "mean"}
    mlp = {"name": "mlp", "hidden": [3]}
    made = {"table": (make_bundle(root / "table", data=data, model=mlp), root / "new.csv")}
    draw = np.random.default_rng(0)
    np.savez(root / "digits.npz", x=draw.integers(0, 255, (4, 1, 8, 8)).astype(np.uint8))
    made["images"] = make_bundle(root / "images", data={"source": "digits"}, model={"name": "cnn"}), root / "digits.npz"
    if find_spec("tokenizers"):
        lines = [f"{'the team won' if row % 2 else 'the bank paid'} {row},{'ab'[row % 2]}" for row in range(60)]
        (root / "texts.csv").write_text("\n".join(["text,topic", *lines]))
        (root / "letters.csv").write_text("text\nthe team paid\nthe bank won\n")
        tokens = {"source": str(root / "texts.csv"), "inputs": ["text"], "label": "topic"}
        bert = {"name": "bert", "layers": 1, "hidden": 8, "heads": 2, "inner": 8}
        texts = make_bundle(root / "texts", data={**tokens, "tokens": 8, "vocabulary": 60}, model=bert)
        made["texts"] = texts, root / "letters.csv"
    return made


# The table of edits.


class Case(NamedTuple):
    """The edit of a bundle, which bundle, and ANSWERS or a pattern of the line."""

    name: str
    edit: Callable[[Parts], Any]
    line: str
    bundle: str = "table"


def at(path: str, value: Any) -> Callable[[Parts], None]:
    """Set one place of a header's tree, such as contract.mean.0; ABSENT removes it."""

    def edit(parts: Parts) -> None:
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        node: Any = parts.about
        for step in steps:
            node = node[step]
        if value is ABSENT:
            del node[last]
        else:
            node[last] = value

    return edit


def raw(**texts: str) -> Callable[[Parts], None]:
    return lambda parts: parts.more.update(texts)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Parts], None]:
    def edit(parts: Parts) -> None:
        changed = change(parts.tensors.pop(name))
        if changed is not None:
            parts.tensors[name] = changed

    return edit


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.clone()
        leaf.view(-1)[0] = value
        return leaf

    return change


def all_of(*edits: Callable[[Parts], Any]) -> Callable[[Parts], None]:
    def edit(parts: Parts) -> None:
        for one in edits:
            one(parts)

    return edit


def large_weights(parts: Parts) -> None:
    """The hidden layer answers 3e38 to every row, and the head multiplies it by as much."""
    for name, leaf in parts.tensors.items():
        leaf.fill_(0.0 if "encoder" in name and "weight" in name else 3e38)


HEAD = "params/head.weight"
NETWORK = "weights are those of another network"
CASES = [
    Case("nothing", lambda parts: None, ANSWERS),
    Case("nothing", lambda parts: None, ANSWERS, "images"),
    Case("nothing", lambda parts: None, ANSWERS, "texts"),
    # JSON that is none, or of another kind
    *(Case(f"{name} is no JSON", raw(**{name: "{"}), "cannot be read") for name in TREES),
    *(Case(f"{name} is null", raw(**{name: "null"}), "cannot be read") for name in TREES),
    *(Case(f"{name} is a list", raw(**{name: '["a"]'}), "cannot be read") for name in TREES),
    *(Case(f"{name} is a number", raw(**{name: "7"}), "cannot be read") for name in TREES),
    *(Case(f"{name} is nested deeply", raw(**{name: "[" * 100_000}), "cannot be read") for name in TREES),
    *(
        Case(f"{name} is missing", lambda parts, name=name: parts.about.pop(name), f"it has no '{name}'")
        for name in (*TREES, "card")
    ),
    Case("format of a later version", at("format", "2"), "written by another version"),
    Case("contract of a later version", at("contract.format", 2), "written by another version"),
    # the contract: types
    Case("a class is a number", at("contract.classes.0", 3), r"classes\.0: input should be a valid string"),
    Case("classes are one text", at("contract.classes", "no yes"), "classes: "),
    Case("a mean is a text", at("contract.mean.0", "50"), r"mean\.0: input should be a valid number"),
    Case("a mean is null", at("contract.mean.0", None), r"mean\.0: "),
    Case("columns are a table", at("contract.columns", {"age": 1}), "columns: "),
    Case("words are numbers", at("contract.columns.1.words", [1, 2]), r"columns\.1\.words\.0: "),
    Case("a column has one more key", at("contract.columns.0.code", "x"), r"columns\.0\.code: "),
    Case("the contract has one more key", at("contract.code", "x"), "code: "),
    Case("the contract lacks a key", at("contract.std", ABSENT), "std: "),
    Case("clients are a fraction", at("contract.population", 2.5), "population: "),
    Case("half a character", raw(contract='{"format": 1, "name": "\\ud800"}'), "cannot be read"),
    # the contract: lengths that disagree, with each other and with the weights
    Case("a mean more", lambda parts: parts.contract["mean"].append(0.0), "means and .* deviations"),
    Case("a deviation fewer", lambda parts: parts.contract["std"].pop(), "means and .* deviations"),
    Case("a class more", lambda parts: parts.contract["classes"].append("maybe"), NETWORK),
    Case("a class fewer", lambda parts: parts.contract["classes"].pop(), NETWORK),
    Case("no class", at("contract.classes", []), "no class"),
    Case("a class twice", at("contract.classes", ["yes", "yes"]), "one class twice"),
    Case("a column fewer", lambda parts: parts.contract["columns"].pop(), "features of columns"),
    Case("a column twice", at("contract.columns.0.name", "town"), "one column twice"),
    Case("the label is an input", at("contract.label", "age"), "the label among the inputs"),
    Case("a column is wider", at("contract.columns.0.width", 9), "features of columns"),
    Case("a column of no width", at("contract.columns.0.width", 0), "column 'age' has 0 features"),
    Case("a column of negative width", at("contract.columns.0.width", -1), "column 'age' has -1 features"),
    Case("a word more", lambda parts: parts.contract["columns"][1]["words"].append("rome"), "column 'town' has"),
    Case("words out of order", at("contract.columns.1.words", ["oslo", "bern"]), "out of order"),
    Case("a word twice", at("contract.columns.1.words", ["bern", "bern"]), "words twice"),
    Case("words that differ in a last NUL", at("contract.columns.1.words", ["bern", "bern\0"]), "words twice"),
    Case("other words, in order", at("contract.columns.1.words", ["lima", "rome"]), "no row of .* can be read"),
    Case("an unknown rule for gaps", at("contract.columns.0.missing", "guess"), "unknown rule"),
    Case("an unknown rule for words", at("contract.columns.1.unknown", "guess"), "unknown rule"),
    Case("a feature more", at("contract.sample.shape", [5]), "means and .* deviations"),
    Case("samples of no dimension", at("contract.sample.shape", []), "samples of the shape"),
    Case("a negative shape", at("contract.sample.shape", [-4]), r"sample\.shape\.0: "),
    Case("a shape of zero", at("contract.sample.shape", [0]), r"sample\.shape\.0: "),
    Case("a huge shape", at("contract.sample.shape", [10**12]), "samples of the shape"),
    Case("a shape beyond 64 bits", at("contract.sample.shape", [10**30]), "cannot be read"),
    Case("many dimensions", at("contract.sample.shape", [1] * 70), "samples of the shape"),
    Case("samples of bytes", at("contract.sample.dtype", "torch.uint8"), "features of columns"),
    Case("samples of an unknown kind", at("contract.sample.dtype", "torch.complex64"), "samples of torch.complex64"),
    Case("images of another size", at("contract.sample.shape", [1, 16, 16]), NETWORK, "images"),
    Case("images of a huge size", at("contract.sample.shape", [1, 2**20, 2**20]), "samples of the shape", "images"),
    Case("images in colour", at("contract.sample.shape", [3, 8, 8]), NETWORK, "images"),
    Case("a huge number of clients", at("contract.population", 10**15), "clients"),
    Case("no client", at("contract.population", 0), "population: "),
    # numbers that are not finite, or vanish
    *(
        Case(f"{key} is {value}", at(f"contract.{key}.0", value), "cannot be read")
        for key in ("mean", "std")
        for value in (math.nan, math.inf, -math.inf, 1e300)
    ),
    *(Case(f"std is {value}", at("contract.std.0", value), "cannot be read") for value in (0, 0.0, -1.0, 1e-300)),
    Case("fill is NaN", at("contract.columns.0.fill", math.nan), "cannot be read"),
    Case("fill is beyond float32", at("contract.columns.0.fill", 1e300), "float32 cannot hold"),
    *(Case(f"a weight is {value}", tensor(HEAD, filled(value)), "not finite") for value in (math.nan, math.inf)),
    Case("weights near the largest number", large_weights, "no row has an answer"),
    # the temperature
    *(
        Case(f"the temperature is {value!r}", at("calibration.0.temperature", value), "cannot be read")
        for value in (math.nan, math.inf, 0, -1.0, 1e-300, 1e300, "2", True, [1.0])
    ),
    Case("no calibration", at("calibration", []), "calibration: it is empty"),
    Case("a calibration without a reason", at("calibration.0.why", ABSENT), "why: "),
    Case("bins are a text", at("calibration.0.before.bins", "x"), r"before\.bins: "),
    Case("no bins", at("calibration.0.before.bins", []), r"before\.bins: "),
    Case("an accuracy of 2", at("calibration.0.before.accuracy", 2.0), r"before\.accuracy: "),
    Case("a bin of no rows", at("calibration.0.before.bins.0.count", 0), r"before\.bins\.0\.count: "),
    # which model it is
    Case("neither last nor best", at("model.which", "first"), "which: "),
    Case("a round that is a text", at("model.round", "1"), "round: "),
    Case("a negative round", at("model.round", -1), "round: "),
    Case("notes are numbers", at("model.notes", [1]), r"notes\.0: "),
    # the weights
    Case("a tensor is missing", tensor(HEAD, lambda w: None), "it has no layer 'head.weight'"),
    Case("a tensor more", lambda parts: parts.tensors.update({"params/more": torch.ones(2)}), "'more' is not in this"),
    Case("a tensor of no part", lambda parts: parts.tensors.update({"code": torch.ones(2)}), "cannot be read"),
    Case("a buffer more", lambda parts: parts.tensors.update({"buffers/more": torch.ones(2)}), "'more' is not in this"),
    Case("a tensor turned", tensor(HEAD, lambda w: w.T.contiguous()), r"has the shape \(3, 2\), not \(2, 3\)"),
    Case("a tensor of another rank", tensor(HEAD, lambda w: w.flatten()), NETWORK),
    *(
        Case(f"a tensor of {kind}", tensor(HEAD, lambda w, kind=kind: w.to(kind)), f"holds {kind}, not torch.float32")
        for kind in (torch.int64, torch.float16, torch.float64, torch.bool)
    ),
    Case("precision of another engine", at("experiment.engine.precision", "float64"), "not torch.float64"),
    Case("no tensor", lambda parts: parts.tensors.clear(), "it has no layer"),
    # the experiment: another network, a huge one, and code
    Case("another width", at("experiment.model.hidden", [4]), NETWORK),
    Case("a huge width", at("experiment.model.hidden", [10**9]), NETWORK),
    Case("a width beyond 64 bits", at("experiment.model.hidden", [10**30]), "cannot be read"),
    Case("a huge depth", at("experiment.model.hidden", [3] * 100_000), "more than 18 tensors"),
    Case("a huge depth", at("experiment.model.layers", 10**9), "more than .* tensors", "texts"),
    Case("widths are a text", at("experiment.model.hidden", "wide"), "cannot be read"),
    Case("another network", at("experiment.model", {"name": "cnn"}), "needs images"),
    Case("a network for text", at("experiment.model", {"name": "bert"}), "reads text"),
    Case("an unknown network", at("experiment.model.name", "nothing"), "is unknown"),
    Case("a network from Python", at("experiment.model", {"name": "(given from Python)"}), "no code is loaded"),
    Case("a network of a file", at("experiment.model", {"name": "evil.py:network"}), "no code is loaded"),
    Case("a network of a module", at("experiment.model", {"name": "os:system"}), "no code is loaded"),
    Case(
        "a mixture with a file",
        at("experiment.model", {"name": "mixed", "prototypes": ["mlp", "evil.py:network"]}),
        "no code is loaded",
    ),
    Case("a mixture in a text", at("experiment.model", {"name": "mixed", "prototypes": "mlp"}), "cannot be read"),
    Case(
        "a mixture",
        at("experiment.model", {"name": "mixed", "prototypes": ["mlp(hidden=[3])", "mlp(hidden=[4])"]}),
        NETWORK,
    ),
    Case("a method of a file", at("experiment.method", {"name": "evil.py:method"}), ANSWERS),
    Case("a method with a file", at("experiment.method.name", "fedavg+evil.py:method(mu=0.1)"), ANSWERS),
    Case("an engine of a file", at("experiment.engine.name", "evil.py:engine"), ANSWERS),
    Case("an evaluation of a file", at("experiment.evaluate", "evil.py:measure"), ANSWERS),
    Case("methods of a file", at("experiment.compare.methods", ["evil.py:method"]), ANSWERS),
    Case("an unknown method", at("experiment.method", {"name": "nothing"}), "is unknown"),
    Case("the method is a number", at("experiment.method", 3), "cannot be read"),
    Case("the method's name is a number", at("experiment.method.name", 3), "cannot be read"),
    Case("two mistakes", all_of(at("experiment.rounds", 0), at("experiment.cohort", -1)), "rounds.*; cohort"),
    Case("another GPU", at("experiment.engine.device", "cuda:77"), ANSWERS),
    # texts
    Case("no tokenizer", at("contract.tokenizer.file", "{}"), "no tokenizer.json", "texts"),
    Case("a longer text", at("contract.tokenizer.length", 9), "not the tokens of a text", "texts"),
    Case("more tokens", at("contract.tokenizer.size", 10**9), "vocabulary does not have", "texts"),
    Case("fewer tokens", at("contract.tokenizer.size", 3), "vocabulary does not have", "texts"),
    Case("another mask", at("contract.tokenizer.mask", 10**9), "vocabulary does not have", "texts"),
    Case("texts without a tokenizer", at("contract.tokenizer", None), "cannot be read", "texts"),
    Case("tokens as numbers", at("contract.sample.dtype", "torch.float32"), "not the tokens of a text", "texts"),
    # words that only people read
    Case("another card", at("card", "# x\n"), ANSWERS),
    Case("a name with mathematics in it", at("contract.name", r"$\frac$"), ANSWERS),
    Case("a class with a line break", at("contract.classes.1", "yes\n,\"'\0"), ANSWERS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.bundle}: {case.name}")
def test_an_edited_bundle_ends_in_one_line_or_answers(bundles, case, tmp_path, monkeypatch):
    if case.bundle not in bundles:
        pytest.skip("needs fedstill[text]")
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("open('loaded', 'w')\n")
    bundle, inputs = bundles[case.bundle]
    parts = Parts(bundle.read_bytes())
    case.edit(parts)
    Path("edited.safetensors").write_bytes(parts.data)
    words = ["predict", "edited.safetensors", pictures_of(inputs), "--out", "out"]
    if case.line == ANSWERS:
        command(*words)
        shares = pandas.read_csv("out/predictions.csv").filter(regex="(?s)^p_").to_numpy()
        np.testing.assert_allclose(shares.sum(axis=1), 1.0, atol=1e-5)
    else:
        assert re.search(case.line, mistake(*words))
    assert not Path("loaded").exists()


def pictures_of(inputs: Path) -> Path:
    """The file itself, or the arrays in it as a folder of pictures."""
    if inputs.suffix != ".npz":
        return inputs
    from PIL import Image

    folder = Path("pictures")
    folder.mkdir()
    for number, pixels in enumerate(np.load(inputs)["x"]):
        Image.fromarray(pixels[0]).save(folder / f"{number}.png")
    return folder


def test_each_case_stands_once_in_the_table():
    assert len({(case.name, case.bundle, case.line) for case in CASES}) == len(CASES)


def longer(entry: dict[str, Any]) -> None:
    entry["shape"] = [2, 4]


HEADERS = {
    "a shape that does not fit its bytes": lambda header: longer(header[HEAD]),
    "a negative shape": lambda header: header[HEAD].update(shape=[-2, -3]),
    "a huge shape": lambda header: header[HEAD].update(shape=[2**40, 2**40]),
    "offsets beyond the file": lambda header: header[HEAD].update(data_offsets=[0, 2**50]),
    "offsets that overlap": lambda header: header[HEAD].update(data_offsets=header["params/head.bias"]["data_offsets"]),
    "an unknown kind of numbers": lambda header: header[HEAD].update(dtype="Q77"),
    "a tensor that is a text": lambda header: header.update({HEAD: "code"}),
    "a tensor less": lambda header: header.pop(HEAD),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_safetensors_would_not_write_ends_in_one_line(bundles, name, tmp_path):
    path, (bundle, inputs) = tmp_path / "edited.safetensors", bundles["table"]
    path.write_bytes(with_header(bundle.read_bytes(), HEADERS[name]))
    assert "cannot be read (" in mistake("predict", path, inputs)


def test_files_that_are_no_bundle_end_in_one_line(bundles, tmp_path):
    bundle, inputs = bundles["table"]
    data = bundle.read_bytes()
    length = int.from_bytes(data[:8], "little")
    files = {
        "empty": b"",
        "text": b"no bundle",
        "cut in the header": data[: length // 2],
        "cut in the tensors": data[:-1],
        "trailing bytes": data + b"\0",
        "huge length": struct.pack("<Q", 2**63) + data[8:],
        "header of deep JSON": struct.pack("<Q", 100_000) + b"[" * 100_000,
        "header of another encoding": struct.pack("<Q", 4) + b"\xff\xfe\x00\x01",
        "metadata are a list": with_plain_header({"__metadata__": [1, 2]}),
        "digest is a number": with_plain_header({"__metadata__": {"fedstill.digest": 7, "fedstill.format": "1"}}),
        "digest is half a character": with_plain_header(
            {"__metadata__": {"fedstill.digest": "\ud800" * 64, "fedstill.format": "1"}}
        ),
        "from elsewhere": save({"weight": torch.ones(3)}, {"format": "pt"}),
        "without metadata": save({"weight": torch.ones(3)}),
    }
    for name, content in files.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        assert re.search("is no bundle|was changed", mistake("predict", path, inputs)), name
    (tmp_path / "folder.safetensors").mkdir()
    assert "it is no file" in mistake("predict", tmp_path / "folder.safetensors", inputs)
    assert "No such file" in mistake("predict", tmp_path / "nothing.safetensors", inputs)


def with_plain_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def test_bytes_after_the_tensors_are_refused_with_a_right_digest_too(bundles, tmp_path):
    path, (bundle, inputs) = tmp_path / "longer.safetensors", bundles["table"]
    path.write_bytes(with_header(bundle.read_bytes() + b"code", lambda header: None))
    assert "cannot be read" in mistake("predict", path, inputs)


def test_the_weights_of_another_bundle_answer_only_if_they_fit(bundles, tmp_path):
    table, images = (Parts(bundles[name][0].read_bytes()) for name in ("table", "images"))
    table.tensors = images.tensors
    path = tmp_path / "exchanged.safetensors"
    path.write_bytes(table.data)
    assert NETWORK in mistake("predict", path, bundles["table"][1])


def test_a_run_with_a_method_of_ones_own_makes_a_bundle_that_needs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from fedstill.methods import fedavg\n\n\ndef mine():\n    return fedavg()\n")
    make_bundle(tmp_path / "run", model={"name": "mlp", "hidden": [4]}, method={"name": "mine.py:mine"})
    Path("mine.py").unlink()
    model = fedstill.load("run/bundle.safetensors")
    assert model.trained.method == "mine.py:mine"
    assert len(model.predict(fedstill.load("digits").test.x[:3]).labels) == 3


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_bundle_keeps_weights_and_calibration_to_the_last_bit(tmp_path, precision):
    engine = {"device": "cpu", "precision": precision}
    make_bundle(tmp_path / "run", model={"name": "resnet8"}, engine=engine, data={"source": "digits"})
    run, alone = fedstill.load_run(tmp_path / "run"), read_bundle(tmp_path / "run" / "bundle.safetensors")
    for there, here in zip(run.weights, alone.weights, strict=True):
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in there)


# Anything at all in place of one value of the header.

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 12),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["", "a", "evil.py:network", "(given from Python)", "torch.uint8", "torch.int64", "mean", "zeros"]),
    st.text(max_size=6),
    st.lists(st.integers(-2, 5), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=2),
    st.just(ABSENT),
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a tree, inner ones too."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 10**6), LEAVES), min_size=1, max_size=2))
def test_any_value_of_the_header_is_refused_or_gives_probabilities(bundles, tmp_path, monkeypatch, edits):
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("open('loaded', 'w')\n")
    parts = Parts(bundles["table"][0].read_bytes())
    trees = {name: parts.about[name] for name in TREES}
    for number, value in edits:
        inner, node = [place for place in places(trees) if len(place) > 1], trees
        *steps, last = inner[number % len(inner)]
        for step in steps:
            node = node[step]
        if value is ABSENT:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    path = tmp_path / "edited.safetensors"
    path.write_bytes(parts.data)
    try:
        answers = fedstill.load(path).predict(frame(5, 1), out=tmp_path / "out")
    except FedstillError as error:
        line = str(error)
    else:
        line = "answers"
        assert bool(answers.probabilities.isfinite().all())
        assert set(answers.labels) <= set(answers.classes)
    assert "\n" not in line
    assert not Path("loaded").exists()


def test_a_file_of_tensors_with_our_keys_is_not_trusted(tmp_path):
    path = tmp_path / "made.safetensors"
    about = {f"fedstill.{name}": "{}" for name in (*TREES, "card")}
    save_file({"params/w": torch.ones(1)}, path, {**about, "fedstill.format": "1", "fedstill.digest": "0" * 64})
    path.write_bytes(with_digest(path.read_bytes()))
    with pytest.raises(FedstillError, match="cannot be read"):
        fedstill.load(path)
