"""Hand a trained model over: as a bundle, or as an ONNX file, each with a model card in Markdown beside it."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedstill.about.explain import explain
from fedstill.core.data import GIVEN
from fedstill.core.errors import FedstillError, printable, suggest
from fedstill.core.types import Dataset, Model, Weights
from fedstill.data.contract import Contract, federation_without_rows
from fedstill.data.source import require_extra
from fedstill.experiment.bundle import SUFFIX, Trained, write_bundle
from fedstill.experiment.model import build_network, describe_model
from fedstill.loop.calibrate import at_temperature
from fedstill.loop.privacy_plan import STATEMENT_FILE
from fedstill.models.mixed import MIXED
from fedstill.prediction import open_run
from fedstill.prediction.answers import MODELS, scorer, trained_model
from fedstill.report.export import markdown_code, markdown_text
from fedstill.storage.files import read_json, write_whole

SUFFIXES = {"bundle": SUFFIX, "onnx": ".onnx"}
CLOSE = 1e-5  # how far the answers of an ONNX file may be from ours
PROBES = 33  # rows of noise on which they are compared
SHOWN_WORDS = 12


def export(
    run_dir: str | Path, *, from_: str = "last", out: str | Path | None = None, kind: str = "bundle"
) -> dict[Path, str]:
    """Write the last or best model of a run as one file, and a model card beside it; return both files in words.

    out: the file (default: bundle.safetensors or model.onnx in the run's folder). kind: "bundle", which `predict` and
    `load` answer from without the training data and the run's folder, or "onnx".
    """
    for name, word, known in (("--from", from_, MODELS), ("--format", kind, tuple(SUFFIXES))):
        if word not in known:
            raise FedstillError(f"{name} '{word}' is unknown: {suggest(word, known)}")
    folder = Path(run_dir)
    path = folder / {"bundle": "bundle.safetensors", "onnx": "model.onnx"}[kind] if out is None else Path(out)
    if path.suffix.lower() != SUFFIXES[kind]:
        raise FedstillError(f"--out: the name of the file must end in {SUFFIXES[kind]}, not '{path.name}'")
    run = open_run(folder)
    network = run.experiment.model
    networks = (network.name, *network.options.get("prototypes", ()))
    if foreign := [name for name in networks if ":" in name or name == GIVEN]:
        raise FedstillError(
            f"'{foreign[0]}' is a network of your own, and a file that holds no code cannot carry it: hand over "
            "your Python code with the run's folder, and predict from the folder"
        )
    trained = trained_model(run, from_)
    if trained.round is not None and trained.round < run.experiment.rounds:
        note = f"the model is that of round {trained.round} of {run.experiment.rounds}"
        trained = replace(trained, notes=(note,))
    score = scorer(trained)  # refuses weights of another network
    trained = replace(trained, card=model_card(trained, folder))
    try:
        if kind == "onnx":
            _write_onnx(trained, score, path)
        else:
            write_bundle(_shareable(trained), path)
        write_whole(path.with_suffix(".md"), trained.card)
    except OSError as error:
        raise FedstillError(f"--out: cannot write '{path}' ({error.strerror or error}): give another file") from error
    words = {"bundle": f"the {from_} model: fedstill predict {path} INPUTS", "onnx": f"the {from_} model as ONNX"}
    return {path: words[kind], path.with_suffix(".md"): "the model card: fill in licence and intended use"}


def _shareable(trained: Trained) -> Trained:
    """Leave out facts that no answer needs: the seed, by which noise could be taken away, and fingerprints of rows."""
    contract = Contract(trained.contract.data, {}, "", trained.contract.population)
    return replace(trained, experiment=trained.experiment.model_copy(update={"seed": 0}), contract=contract)


def model_card(trained: Trained, folder: Path) -> str:
    """Describe a model in Markdown: how it came about, what it reads and answers, its results, and what it revealed."""
    sections = {
        "Licence and intended use": _to_fill_in(),
        "How it was trained": _training(trained),
        "What it reads": _schema(trained.contract.data),
        "What it answers": [f"One of {len(trained.contract.data.classes)} classes, with a probability for each:", ""]
        + [f"- {markdown_code(name)}" for name in trained.contract.data.classes],
        "Results": _results(trained),
        "Calibration": [f"- {calibration.why}" for calibration in trained.calibrations],
        "What left each party": _leaves(trained),
        "Privacy": _privacy(folder),
    }
    lines = [f"# {markdown_text(trained.experiment.name)}: {trained.which} model", "", *trained.notes]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *content]
    return "\n".join(lines) + "\n"


def _to_fill_in() -> Iterator[str]:
    yield "| field | content |\n|---|---|"
    for name in ("licence", "owner and contact", "intended use", "uses that are out of scope", "date of release"):
        yield f"| {name} | *to be filled in* |"


def _training(trained: Trained) -> Iterator[str]:
    experiment, contract = trained.experiment, trained.contract
    count = sum(leaf.numel() for leaf in trained.weights.params.values())
    options = ", ".join(f"{key} = {value}" for key, value in experiment.model.options.items())
    facts = {
        "method": experiment.method.name,
        "network": f"{describe_model(experiment.model.name, experiment.model.options)}, {count:,} parameters",
        "options of the network": options or "defaults",
        "parties": f"{contract.population}",
        "rounds": f"{trained.round or experiment.rounds}, {experiment.cohort} parties in each",
        **{f"{part} rows": f"{rows.count:,}" for part, rows in contract.rows.items() if rows.count},
        "split": experiment.partition.scheme,
    }
    yield "| | |\n|---|---|"
    for name, text in facts.items():
        yield f"| {name} | {printable(text).replace('|', chr(92) + '|')} |"


def _schema(data: Dataset) -> Iterator[str]:
    if data.columns and data.tokenizer is None:
        yield "A table with these columns, in any order. Inputs are scaled as the training rows were.\n"
        yield "| column | holds |\n|---|---|"
        for column in data.columns:
            words = ", ".join(markdown_code(word) for word in column.words[:SHOWN_WORDS])
            more = f" and {len(column.words) - SHOWN_WORDS} more" if len(column.words) > SHOWN_WORDS else ""
            single = column.width == 1 or column.flag
            numbers = "a number" + (", or nothing" if column.flag else "") if single else f"{column.width} numbers"
            yield f"| {markdown_code(column.name)} | {f'one of the words {words}{more}' if words else numbers} |"
    elif data.tokenizer is not None:
        yield f"Texts, cut into at most {data.tokenizer.length} tokens of a vocabulary of {data.tokenizer.size:,}."
    elif data.x.ndim == 4:
        channels, height, width = data.x.shape[1:]
        yield f"Images of any size, cut and resized to {width}x{height}, {'grey' if channels == 1 else 'in colour'}."
    else:
        yield f"Samples of the shape {tuple(data.x.shape[1:])}."


def _results(trained: Trained) -> Iterator[str]:
    measured = [(calibration.fitted_on, calibration.before) for calibration in trained.calibrations]
    yield "| measured on | rows | accuracy | mean confidence | calibration error |\n|---|--:|--:|--:|--:|"
    for on, table in measured:
        if table is not None:
            yield f"| {on} | {table.rows:,} | {table.accuracy:.1%} | {table.confidence:.1%} | {table.ece:.1%} |"
    if not any(table for _, table in measured):
        yield "| nothing | | | | |"


def _leaves(trained: Trained) -> Iterator[str]:
    name = trained.experiment.method.name
    try:
        facts = explain(name)
    except FedstillError as error:
        yield f"Not known: {error}"
        return
    for title, key in (("In each round", "leaves_a_client"), ("Once, before the first round", "leaves_a_client_once")):
        if facts[key]:
            yield from [f"{title}:", "", *(f"- {part}" for part in facts[key]), ""]
    yield "The method sends no row. The model's file holds no row either. It holds the names of columns and classes, "
    yield "the words of columns of words, and the mean and deviation of each input."


def _privacy(folder: Path) -> list[str]:
    try:
        statement = read_json(folder / STATEMENT_FILE)
        return [f"- {line}" for line in [*str(statement["text"]).splitlines(), *statement["assumptions"]]]
    except FileNotFoundError:
        return ["No differential privacy was used: nothing bounds what the weights reveal about the training rows."]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedstillError(f"'{folder / STATEMENT_FILE}' cannot be read ({error}): restore it from a copy") from error


class _FromStorage(nn.Module):
    """A network with its scaling and its temperature: samples in storage form in, probabilities out."""

    def __init__(self, model: Model, trained: Trained) -> None:
        super().__init__()
        data = trained.contract.data
        self.model, self.data, self.names = model, data, [list(part) for part in trained.weights]
        shape = (1, -1, *[1] * (data.x.ndim - 2))
        tensors = [leaf.clone() for part in trained.weights for leaf in part.values()]
        tensors += [torch.tensor(numbers).reshape(shape) for numbers in (data.mean, data.std)]
        for place, leaf in enumerate(tensors):
            self.register_buffer(f"tensor_{place}", leaf)
        self.temperature = trained.calibrations[0].temperature or 1.0

    def forward(self, x: Tensor) -> Tensor:
        *leaves, mean, std = [getattr(self, f"tensor_{place}") for place in range(sum(map(len, self.names)) + 2)]
        if self.data.text:
            inputs = x.long()
        else:
            inputs = ((x.float() / 255 if self.data.x.dtype == torch.uint8 else x) - mean) / std
        unread = iter(leaves)
        weights = Weights(*({name: next(unread) for name in part} for part in self.names))
        return torch.softmax(self.model.apply(weights, inputs, training=False)[0].logits / self.temperature, dim=1)


def _write_onnx(trained: Trained, score: Callable[[Tensor], Tensor], path: Path) -> None:
    """Write an ONNX file and compare its answers with ours; a file that answers otherwise is removed."""
    onnx, runtime = require_extra("onnx", extra="onnx"), require_extra("onnxruntime", extra="onnx")
    require_extra("onnxscript", extra="onnx")
    if trained.experiment.model.name == MIXED:
        raise FedstillError("--format onnx: a run of several networks has no single network: export a bundle")
    network = build_network(trained.experiment, federation_without_rows(trained.contract))
    probe, log = _noise(trained.contract), logging.getLogger("torch.onnx")
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own code
            program = torch.onnx.export(
                _FromStorage(network, trained).eval(),
                (probe,),
                input_names=["x"],
                output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim("rows")},),
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        made = program.model_proto
    except Exception as error:  # the exporter raises many kinds, for networks that ONNX cannot express
        reason = " ".join(str(error).split())[:160]
        raise FedstillError(
            f"--format onnx: torch cannot write the network '{trained.experiment.model.name}' as ONNX ({reason}): "
            "export a bundle"
        ) from error
    finally:
        log.setLevel(level)
    data = trained.contract.data
    features = [column.name for column in data.columns for _ in range(column.width)]
    about = {"classes": list(data.classes), "features": features, "dtype": str(data.x.dtype)}
    onnx.helper.set_model_props(made, {name: json.dumps(value) for name, value in about.items()})
    theirs = runtime.InferenceSession(made.SerializeToString()).run(None, {"x": probe.numpy()})[0]
    ours = at_temperature(score(probe), trained.calibrations[0].temperature or 1.0)
    if not (gap := float((torch.from_numpy(theirs) - ours).abs().max())) <= CLOSE:
        raise FedstillError(
            f"--format onnx: the file's probabilities would differ from ours by {gap:.1g}: export a bundle"
        )
    write_whole(path, made.SerializeToString())


def _noise(contract: Contract) -> Tensor:
    """Return samples in storage form that no one took."""
    data, draws = contract.data, torch.Generator().manual_seed(0)
    shape = (PROBES, *data.x.shape[1:])
    if data.text:
        size = len(data.classes) if data.tokenizer is None else data.tokenizer.size
        return torch.randint(0, size, shape, generator=draws).to(data.x.dtype)
    if data.x.dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=draws).to(torch.uint8)
    scale = (1, -1, *[1] * (data.x.ndim - 2))
    noise = torch.randn(shape, generator=draws)
    return noise * torch.tensor(data.std).reshape(scale) + torch.tensor(data.mean).reshape(scale)
