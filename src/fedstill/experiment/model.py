"""Build the Model of a [model] section: a built-in network, a user's network, or several in one federation."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedstill.compose.groups import merge
from fedstill.core.data import GIVEN
from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.core.types import ENSEMBLE, Federation, Model, Weights, check_report
from fedstill.methods import options
from fedstill.methods.lookup import Part, single
from fedstill.methods.own_code import own_function
from fedstill.models import READS_TEXT, build_model, form_of, from_module, mixed_model, model_options
from fedstill.models.mixed import MIXED

if TYPE_CHECKING:
    from fedstill.experiment.config import Experiment

Network = Model | nn.Module | Callable[[], nn.Module]  # as somebody hands it over in Python
NETWORK_DIFFERS = {  # facts of `given_network`, and the difference that a user sees
    "tensors": "its tensors have other names or shapes",
    "computes": "its tensors are the same, and it computes something else from them",
}
EXAMPLE = 'e.g. model.prototypes = ["mlp(hidden=[32])", "cnn"]'


def build_network(experiment: Experiment, federation: Federation, given: Network | None = None) -> Model:
    """Build the experiment's network for the federation's samples and classes.

    given: a network in Python that takes its place: a Model, an nn.Module, or a function that builds one.
    """
    section = experiment.model
    if isinstance(given, Model):
        return given
    if given is not None:
        return _from_module(given, federation)
    if section.name == GIVEN:
        raise FedstillError(
            "the network of this run was handed over in Python, and no file holds it: hand it over again, to predict "
            "fedstill.load_run(folder, model=network), to go on fedstill.run(..., model=network, resume=True)"
        )
    if section.name != MIXED:
        return _network(section.name, section.options, federation)
    parts = prototypes_of(section.options["prototypes"])
    networks = {name: _network(part.name, part.options, federation) for name, part in parts.items()}
    return mixed_model(networks, federation.population, section.options.get("report", ENSEMBLE))


def _network(name: str, options: dict[str, Any], federation: Federation) -> Model:
    if ":" in name:
        return _own_network(name, options, federation)
    return build_model(name, **_facts_for(name, federation), **options)


def _facts_for(name: str, federation: Federation) -> dict[str, Any]:
    """Return the arguments of a built-in network that the data decide; data that it cannot read are refused."""
    _check_reads(name, federation)
    facts = _facts(federation)
    if not _reads_tokens(name):
        del facts["vocabulary"]
    return facts


def _facts(federation: Federation) -> dict[str, Any]:
    """Return the arguments of a network that the data decide: shape of a sample, classes, number of different ids."""
    train = federation.train
    classes = len(train.classes)
    vocabulary = classes if train.tokenizer is None else train.tokenizer.size
    return {"input_shape": tuple(train.x.shape[1:]), "classes": classes, "vocabulary": vocabulary}


def _reads_tokens(name: str) -> bool:
    return "vocabulary" in model_options(name)


def _check_reads(name: str, federation: Federation) -> None:
    """Refuse a network that cannot read the data: text needs a network that reads ids, and only text does."""
    if federation.train.text and name not in READS_TEXT:
        raise FedstillError(f"model.name = '{name}' cannot read text: use {' or '.join(map(repr, sorted(READS_TEXT)))}")
    if name in READS_TEXT and not federation.train.text:
        cure = "data.tokens" if _reads_tokens(name) else "data.window"
        raise FedstillError(f"model.name = '{name}' reads text, {federation.train.name} holds numbers: set {cure}")
    if federation.train.tokenizer is not None and not _reads_tokens(name):
        cure = " or ".join(repr(other) for other in sorted(READS_TEXT) if _reads_tokens(other))
        raise FedstillError(f"model.name = '{name}' reads characters, not tokens: use {cure}, or data.window")


def _own_network(name: str, options: dict[str, Any], federation: Federation) -> Model:
    """Build the network of FILE.py:function, which gets input_shape, classes and vocabulary as far as it takes them."""
    factory, facts = own_function(name, "model.name"), _facts(federation)
    parameters = inspect.signature(factory).parameters
    arguments = {key: value for key, value in facts.items() if key in parameters}
    return _from_module(lambda: factory(**arguments, **options), federation, name.rpartition(":")[2])


def _from_module(source: nn.Module | Callable[[], nn.Module], federation: Federation, name: str | None = None) -> Model:
    facts = _facts(federation)
    return from_module(
        source,
        input_shape=facts["input_shape"],
        classes=facts["classes"],
        name=name,
        input_dtype=torch.int64 if federation.train.text else torch.float32,
    )


def check_weights(experiment: Experiment, federation: Federation, weights: Weights) -> None:
    """Refuse weights that are not those of the experiment's built-in network, or not finite; nothing is built."""
    section, leaves = experiment.model, flatten(weights)
    precision = torch.float64 if experiment.engine.precision == "float64" else torch.float32
    most = 2 * len(leaves) + 10  # a little more, so that a tensor that is missing is named
    parts = (
        prototypes_of(section.options["prototypes"])
        if section.name == MIXED
        else {"": Part(section.name, section.options)}
    )
    forms = {
        prototype: form_of(part.name, **_facts_for(part.name, federation), most=most, **part.options)
        for prototype, part in parts.items()
    }
    form = merge(forms) if section.name == MIXED else forms[""]
    for difference in form_differences(weights, form):
        raise FedstillError(f"the weights are those of another network: {difference}")
    for name, wanted in flatten(form).items():
        leaf, dtype = leaves[name], precision if wanted.is_floating_point() else wanted.dtype
        if leaf.dtype != dtype:
            raise FedstillError(f"layer '{name.partition('/')[2]}' holds {leaf.dtype}, not {dtype}")
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise FedstillError(f"layer '{name.partition('/')[2]}' holds numbers that are not finite")


def form_differences(weights: Weights, wanted: Weights) -> Iterator[str]:
    """Yield a line for each tensor that is missing, too many or of another shape."""
    there, here = flatten(weights), flatten(wanted)
    for name in dict.fromkeys((*here, *there)):
        layer = name.partition("/")[2]
        if name not in there:
            yield f"it has no layer '{layer}'"
        elif name not in here:
            yield f"its layer '{layer}' is not in this network"
        elif there[name].shape != here[name].shape:
            yield f"layer '{layer}' has the shape {tuple(there[name].shape)}, not {tuple(here[name].shape)}"


def tensors_digest(network: Model) -> str:
    """Return a text that changes with the names and shapes of a network's tensors."""
    shapes = {name: tuple(leaf.shape) for name, leaf in flatten(network.init(0)).items()}
    return hashlib.blake2b(repr(sorted(shapes.items())).encode(), digest_size=8).hexdigest()


def computation_digest(network: Model, *, reads_ids: bool) -> str:
    """Return a text that changes with the function that a network computes, and not with the weights that it has.

    It digests the logits for two fixed samples under fixed weights. They are computed in float64 and rounded, so that
    another machine finds the same text.
    """
    logits = [_fixed_logits(part, reads_ids).numpy().tobytes() for part in network.networks.values()]
    return hashlib.blake2b(b"".join(logits), digest_size=8).hexdigest()


def _fixed_logits(network: Model, reads_ids: bool) -> Tensor:
    """Return a network's logits for two fixed samples, under weights that depend on names and shapes alone."""
    begin = network.init(0)
    x = _wave((2, *network.input_shape), 0)
    for dtype, decimals in ((torch.float64, 5), (torch.float32, 2)):  # some modules hold constants of float32
        params = {
            name: _wave(leaf.shape, place).to(dtype) for place, (name, leaf) in enumerate(sorted(begin.params.items()))
        }
        buffers = {
            name: (1.5 + _wave(leaf.shape, 0)).to(dtype) if leaf.is_floating_point() else leaf  # a variance is positive
            for name, leaf in begin.buffers.items()
        }
        try:
            with torch.no_grad():
                output, _ = network.apply(Weights(params, buffers), (x > 0).long() if reads_ids else x.to(dtype))
        except RuntimeError:
            continue
        logits: Tensor = output.logits.double()
        logits = logits / logits.abs().max().clamp(min=1e-300)
        return torch.round(logits, decimals=decimals).add(0.0)  # 0.0, because -0.0 has other bytes
    return torch.zeros(0)


def _wave(shape: Sequence[int], phase: int) -> Tensor:
    """Return numbers between -1 and 1 in a shape, divided by the root of the count of those that a sum would take."""
    wave = torch.cos(torch.arange(math.prod(shape), dtype=torch.float64) * 0.7 + phase).reshape(tuple(shape))
    return wave / math.sqrt(max(1, math.prod(shape[1:])))


def given_network(network: Model, *, reads_ids: bool) -> dict[str, str]:
    """Return the facts about a network handed over in Python by which a later call knows it again."""
    computes = computation_digest(network, reads_ids=reads_ids)
    return {"network": network.name, "tensors": tensors_digest(network), "computes": computes}


def check_given_network(experiment: Experiment, network: Model, *, reads_ids: bool) -> None:
    """Refuse to answer with a network handed over in Python that is not the network of the run."""
    if experiment.model.name != GIVEN:
        raise FedstillError(
            f"model: this run has the network '{experiment.model.name}', which its folder describes: leave model out"
        )
    now = given_network(network, reads_ids=reads_ids)
    for fact, difference in NETWORK_DIFFERS.items():
        if experiment.model.options.get(fact) != now[fact]:
            raise FedstillError(f"model: the run had another network: {difference}: hand over the network of the run")


def prototypes_of(texts: Sequence[str]) -> dict[str, Part]:
    """Return the networks of a mixture by their names in the run; equal names are numbered.

    >>> prototypes_of(["cnn", "mlp(hidden=[8])", "mlp(hidden=[16])"])["mlp_2"]
    Part(name='mlp', options={'hidden': [16]})
    """
    parts = [_part(text) for text in texts]
    names = [part.name.rpartition(":")[2] for part in parts]  # of FILE.py:function the function
    if not parts:
        raise FedstillError(f"model.prototypes is empty: name at least one network, {EXAMPLE}")
    numbered = [
        name if names.count(name) == 1 else f"{name}_{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]
    return dict(zip(numbered, parts, strict=True))


def describe_model(name: str, options: Mapping[str, Any]) -> str:
    """Return a network in words; a mixture lists its prototypes and names the one whose accuracy is reported.

    >>> describe_model("mixed", {"prototypes": ["cnn", "mlp(hidden=[8])"], "report": "mlp"})
    'mixed(cnn, mlp; reported: mlp)'
    """
    if name != MIXED:
        return name.rpartition("/")[2]
    return f"{MIXED}({', '.join(prototypes_of(options['prototypes']))}; reported: {options.get('report', ENSEMBLE)})"


def _part(text: str) -> Part:
    try:
        part = single(text)
    except FedstillError:
        part = None
    if part is None:
        raise FedstillError(f"model.prototypes: cannot read '{text}': write networks with their options, {EXAMPLE}")
    return part


def check_mixture(section: Mapping[str, Any]) -> None:
    """Refuse every mistake in the options of a mixture that can be seen without data."""
    parts = prototypes_of(section["prototypes"])
    for part in parts.values():
        if part.name == MIXED:
            raise FedstillError("model.prototypes: a mixture cannot hold another one: name its prototypes instead")
        try:
            options.check("model", part.name, part.options)
        except FedstillError as error:
            raise FedstillError(*(f"model.prototypes, '{part.name}': {line}" for line in error.lines)) from None
    check_report(section.get("report", ENSEMBLE), parts)
