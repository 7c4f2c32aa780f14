"""One row a method (or a variant of one): all that the conformance suite has to know. A new method adds a row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import toy
from papers import BENCHMARKS
from running import federate
from whole_server import as_one, whole

from fedstill.core.needs import needs_of
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.tree import flatten
from fedstill.core.types import Dataset, Federation, Method, Model, Need, Output, Tokenizer, Training
from fedstill.methods import METHODS
from fedstill.methods.lookup import build_method
from fedstill.models import build_model
from fedstill.privacy.plan import Privacy
from fedstill.server.aggregate import average


@dataclass(frozen=True)
class Row:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    is_fedavg_with: dict[str, Any] | None = None  # options at which the method is FedAvg bit for bit
    equal_steps: bool = False  # ... provided that all clients take the same steps
    own_first_step: bool = False  # a client's first step from the model it received is not FedAvg's
    sends: int = 0  # slots of the model's size that a client sends besides its model
    receives: int = 0  # ... and receives besides the model
    receives_bytes: int = 0  # ... and what it receives that is not of the model's size
    shows_in_round: int = 1  # the first whose model tells what the server looked at
    noise_by_place: bool = False  # draws a number for each weight, or by all of the data: renamed classes get others
    net: str = "mlp"  # the network and data that it can run with: see `network`

    @property
    def id(self) -> str:
        return "-".join([self.name, *(str(value) for value in self.options.values())])

    def build(self, **changes: Any) -> Method:
        student = {**self.options.get("student", {}), **changes.get("student", {})}
        options = {**self.options, **changes, **({"student": student} if student else {})}
        aggregate = options.pop("aggregate", None)
        method = build_method(self.name, options)[0].method
        return method if aggregate is None else dataclasses.replace(method, aggregate=aggregate)


SHORT = {"student": {"steps": 5, "batch_size": 8}}

REFINED = {"student": {"steps": 5, "batch_size": 8, "lr": 3e-3}}  # a short refinement, as a server does it

HARD = {"labels": "hard", "threshold": 0.4}  # FedDF and FedBE as D2C-FL ran them

HARD_STUDENT = {"epochs": 2, "batch_size": 8, "optimizer": "adam", "lr_schedule": "constant", "lr_epoch_decay": 0.95}

CODE = BENCHMARKS  # <paper>/released.py

BY_SIZE = {"aggregate": average()}

VALIDATED = {"steps": 6, "batch_size": 8, "patience": 2, "look_every": 2}

LABELS = {"threshold": 0.4, "student": {"epochs": 2, "batch_size": 4, "lr": 0.05}}  # D2C-FL: keeps some
PRINTED: dict[str, Any] = {  # D2C-FL's text
    "beta": 0.7,
    "rule": "max",
    "labels": "hard",
    "student_start": "carried",
    "student_share": "fixed",
    "feedback": True,
}

UNTRAINED = {"training": {"epochs": 0}}

IDLE = {"student": {"steps": 0}}

VIEWS = {"projection": 4, "hidden": 8}  # SimCLR, small

INVENTED = {
    "generator": {"steps": 3, "noise": 6},
    "student": {"steps": 3},
    "batch_size": 8,
}  # a short refinement without data

SMALL_GENERATOR = {"steps": 4, "batch_size": 8, "noise": 6}

FEATURES_INVENTED = {"label_weight": 1.0, "match_weight": 1.0, "gen_batch": 5, "generator": SMALL_GENERATOR}

# 256 hidden units read 6 + 4 numbers and make 8 features; BatchNorm and its count; the known classes, two weights
FEDGEN = {"receives_bytes": 4 * (256 * 11 + 4 * 256 + 8 * 257 + 4 + 2) + 8, "shows_in_round": 2, "noise_by_place": True}

# A slow generator: its Adam makes whole steps of gradients that are zero but for rounding (a bias in front of a norm).
HARD_SAMPLES = {"iterations": 2, "student": {"steps": 2}, "batch_size": 8, "generator": {"noise": 6, "lr": 3e-5}}

ROWS = (
    Row("fedavg", {}, {}),
    Row("fedprox", {"mu": 0.1}, {"mu": 0.0}),
    Row("fedavgm", {}, {"beta": 0.0, "server_lr": 1.0}),
    Row("fedopt", {}, {"optimizer": "sgd", "momentum": 0.0, "server_lr": 1.0}),
    Row("fedopt", {"optimizer": "adam", "server_lr": 3e-4}),
    Row("fedadam"),
    Row("fedyogi"),
    Row("fedadagrad"),
    Row("scaffold", sends=1, receives=1),
    Row("scaffold", {"option": "I"}, sends=1, receives=1),
    Row("fednova", {}, {}, equal_steps=True),
    Row(f"{CODE}/fedlmd/released.py:fednova"),
    Row("feddyn"),
    Row("fedcurv", {}, {"lam": 0.0}, sends=2, receives=2),
    Row("fedcurv", {"fisher": "per_sample", "lam": 0.1}, {"lam": 0.0}, sends=2, receives=2),
    Row("moon", {}, {"mu": 0.0}),
    Row("fedmmd", {}, {"lam": 0.0}),
    Row("kd", {}, {"beta": 0.0}),
    Row("fedntd", {}, {"beta": 0.0}),
    Row("fedntd_tf", {}, {"beta": 0.0}, own_first_step=True),
    Row("fedlmd", {}, {"beta": 0.0}, own_first_step=True),
    Row("fedlmd_tf", {}, {"beta": 0.0}, own_first_step=True),
    Row("label_smoothing", {}, {"epsilon": 0.0}, own_first_step=True),
    Row("fedrs", {}, {"alpha": 1.0}),
    Row("fedrs", {"rule": "proportional"}, {"alpha": 1.0}, own_first_step=True),
    *(
        Row("fedgen", {**FEATURES_INVENTED, **options}, {"label_weight": 0.0, "match_weight": 0.0}, **FEDGEN)
        for options in (
            {},
            {"match_weight": 0.0, "generator": {**SMALL_GENERATOR, "keep_optimizer": False}},
            {"class_weights": "uniform", "label_weight": 0.0, "generator": {**SMALL_GENERATOR, "noise_kind": "normal"}},
        )
    ),
    Row("update_noise", {}, {"sigma": 0.0}, noise_by_place=True),
    Row("update_noise", {"sigma": 0.0, "clip": 0.1}, {"clip": None}),
    Row("dp_fedavg", {"clip": 10.0, "noise_multiplier": 1e-3}, noise_by_place=True),
    Row("dp_fedavg", {"clip": 10.0, "noise_multiplier": 1e-3, "bands": 3}, noise_by_place=True),
    Row("dp_fedavg", {"trust": "nobody", "clip": 100.0, "noise_multiplier": 1e-3}, noise_by_place=True),
    Row("simclr", {"training": {"epochs": 2, "batch_size": 8}, **VIEWS}, UNTRAINED, net="pictures"),
    Row("simclr", {"training": {"epochs": 1, "seed": 3, "batch_size": 8}, **VIEWS}, UNTRAINED, net="pictures"),
    Row("masked_lm", {"training": {"epochs": 2, "batch_size": 8}, "share": 0.3}, UNTRAINED, net="text"),
    Row("next_token", {"training": {"epochs": 2, "batch_size": 8, "seed": 3}}, UNTRAINED, net="text"),
    Row("avglogit", SHORT, IDLE),
    Row("avgprob", SHORT, IDLE),
    Row("feddf", SHORT, {**IDLE, **BY_SIZE}),
    Row("feddf", {"student": VALIDATED, "teacher_weighting": "validation"}, {**IDLE, **BY_SIZE}),
    Row(f"{CODE}/mrtf/released.py:feddf", SHORT, {**IDLE, **BY_SIZE}),
    Row("feddf", {**HARD, "student": HARD_STUDENT}, {"student": {"epochs": 0}, **BY_SIZE}),
    Row("feddf", {**SHORT, "distill_share": 0.8}, {**IDLE, **BY_SIZE}),
    Row(f"{CODE}/fedaux/released.py:feddf", REFINED, {**IDLE, **BY_SIZE}),
    Row("feddf", {"student": {"steps": 5, "batch_size": 8, "part": "head"}}, {**IDLE, **BY_SIZE}),
    Row("feddf_gen", INVENTED, IDLE, noise_by_place=True),
    Row("feddf_gen", {**INVENTED, "ensemble": "class", "pool": "logits"}, IDLE, noise_by_place=True),
    Row(
        "feddf_gen",
        {**INVENTED, "labels": "uniform", "student": {"steps": 3, "batch_norm": "train"}},
        noise_by_place=True,
    ),
    Row("fedftg", {**HARD_SAMPLES, "student": {"steps": 2, "lr": 0.3}}, {"iterations": 0}, noise_by_place=True),
    Row("fedftg", {**HARD_SAMPLES, "discrepancy": "kl"}, noise_by_place=True),
    Row(
        "fedftg",
        {**HARD_SAMPLES, "input": "feature", "labels": "uniform", "report": "average"},
        {"iterations": 0},
        noise_by_place=True,
        shows_in_round=2,
    ),
    Row("fedaux", SHORT, IDLE),
    Row("fedaux", {**REFINED, "form": "mean", "lam": 0.01, "epsilon": 4.0}, IDLE, noise_by_place=True),
    Row("fedaux", {**REFINED, "score": "odds", "intercept": True, "gamma": "both", "feedback": False}, IDLE),
    Row(f"{CODE}/fedaux/released.py:fedaux", {**REFINED, "scorer": "one_class_svm"}, {**IDLE, **BY_SIZE}),
    Row(
        "fedbe",
        {"student": {"epochs": 4, "batch_size": 8, "lr": 0.3, "lr_cycle": 2}},
        {"student": {"epochs": 0}},
        noise_by_place=True,
    ),
    Row(f"{CODE}/fedbe/released.py:fedbe", {"student": {"epochs": 4, "batch_size": 8, "lr": 0.3}}, noise_by_place=True),
    Row("fedbe", {"student": {"epochs": 4, "batch_size": 8, "lr": 0.3}, "distill_share": 0.8}, noise_by_place=True),
    Row("fedbe", {**HARD, "sampling": "dirichlet", "student": HARD_STUDENT}, {"student": {"epochs": 0}}),
    Row("mrtf", {**REFINED, "warm_up": 1}, {**IDLE, **BY_SIZE}),
    Row(f"{CODE}/mrtf/released.py:mrtf", REFINED, {**IDLE, **BY_SIZE}),
    Row("mrtf", {**REFINED, "warm_up": 1, "feedback": True}, {**IDLE, **BY_SIZE}),
    Row("mrtf", {**REFINED, "warm_up": 1, "refine_share": "all", "refine_sharpness": 4.0}),
    Row("mrtf", {**REFINED, "refine": False}),
    Row("mrtf", {**REFINED, "rectify": False, "refine": False}),
    Row("mrtf", {**REFINED, "stabilise": False, "rectify": False, "refine": False}),
    Row("d2cfl", {"past": 1, **LABELS}, {"mix_alpha": 1.0}),
    Row("d2cfl", {"past": 1, **PRINTED, **LABELS}, {"mix_alpha": 1.0}),
    Row("d2cfl", {"past": 2, **PRINTED, "rule": "mean", **LABELS}, {"mix_alpha": 1.0}),
    Row("d2cfl", {"past": 2, **PRINTED, "student_start": "average", "rollback": "fixed", **LABELS}, {"threshold": 1.5}),
    Row("d2cfl", {"past": 3, "warm_up": 1, "least": 2, "feedback": True, **LABELS}, {"least": 14}),
    Row(
        "d2cfl",
        {"past": 1, **PRINTED, "feedback": False, **LABELS, "student": {**LABELS["student"], "optimizer": "sgd"}},
        {"mix_alpha": 1.0},
    ),
)


def row_of(name: str) -> Row:
    """The first row of a method: its defaults, or nearly."""
    return next(row for row in ROWS if row.name == name)


def is_first(row: Row) -> bool:
    """Whether a row is the first of a method of the library; the quick run leaves out forms that only a paper uses."""
    return row.name in METHODS and row is row_of(row.name)


CLASSES, FEATURES, IMAGE = 4, 6, (1, 8, 8)
TOKENS, IDS = 6, 20  # of a text, and different ones: 5 are marks
SIZES = (1, 9, 4, 16, 5, 7, 12)  # a client of one sample, last batches of one, three and four
UNLABELED = 13
TRAINING = Training(batch_size=4, epochs=2, lr=0.15, momentum=0.5, weight_decay=1e-3)
ROUNDS, COHORT = 3, 4


def network(net: str = "mlp") -> Model:
    if net in ("mlp", "adapted"):
        return toy.network(net)
    if net == "pictures":
        return build_model("mlp", input_shape=IMAGE, classes=CLASSES, hidden=(8,), init="torch")
    if net == "text":
        small = {"positions": TOKENS, "layers": 1, "hidden": 8, "heads": 2, "inner": 8}
        return build_model("bert", input_shape=(TOKENS,), classes=CLASSES, vocabulary=IDS, **small)
    if net == "cnn":
        return build_model("cnn", input_shape=IMAGE, classes=CLASSES)
    return toy.network("norm")


def samples(count: int, *, images: bool, use: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = numpy_generator(seed_for(0, "conformance", use))
    y = generator.integers(0, CLASSES, count)
    if images:
        x = generator.integers(0, 200, (count, *IMAGE)) + 12 * y[:, None, None, None]
        return torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(y)
    return toy.points(0, "conformance", use, count=count, apart=1.5)


def texts(count: int, use: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[CLS], words that mostly belong to the class, [SEP], padding."""
    generator = numpy_generator(seed_for(0, "conformance", "text", use))
    y = generator.integers(0, CLASSES, count)
    x = 5 + 3 * y[:, None] + generator.integers(0, 6, (count, TOKENS)) % (IDS - 5)
    x[:, 0], x[:, -1], x[: count // 2, -2] = 2, 3, 3
    x[: count // 2, -1] = 0
    return torch.from_numpy(x), torch.from_numpy(y)


def federation(net: str = "mlp", sizes: tuple[int, ...] = SIZES) -> Federation:
    """Neighbouring clients hold neighbouring classes."""
    images, names = net in ("cnn", "pictures"), tuple("abcd")

    def pick(count: int, use: str) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = texts(count, use) if net == "text" else samples(count, images=images, use=use)
        return (x / 512.0 if net == "pictures" else x), y

    x, y = pick(sum(sizes), "train")
    tokenizer = Tokenizer("", TOKENS, IDS, mask=4, first_word=5) if net == "text" else None
    train = Dataset("toy", x, y, names, tokenizer=tokenizer)
    test = Dataset("toy", *pick(20, "test"), names, tokenizer=tokenizer)
    indices = torch.argsort(y, stable=True)
    offsets = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int64)
    unlabeled, _ = pick(UNLABELED, "unlabeled")
    return Federation(train, test, indices, offsets, unlabeled, validation=pick(11, "validation"))


def run(method: Method, *, net: str = "mlp", **how: Any):
    """A few rounds of a tiny federation; anything may be changed by name."""
    settings = {
        "method": method, "model": network(net), "federation": federation(net), "training": TRAINING,
        "rounds": ROUNDS, "cohort": COHORT, "seed": 5, "engine": "batched", "device": "cpu",
        "privacy": Privacy(reproducible=True),
    }  # fmt: skip
    return federate(**{**settings, **how})


def run_row(row: Row, changes: dict[str, Any] | None = None, **how: Any):
    """A run of a row's method on the data that it is made for."""
    return run(row.build(**(changes or {})), **{"net": row.net, **how})


def first_broadcast(method: Method, net: str = "mlp") -> Any:
    """What the first cohort receives beside the model: caught in a run where the server has to know the network.

    The last broadcast of its only round: a release asks for one before, without the slots that come with the network.

    >>> from fedstill.methods.lookup import build_method
    >>> (phase,) = build_method("scaffold+dp_fedavg(trust='nobody')+fedgen(generator.steps=1)")
    >>> sorted(first_broadcast(phase.method))
    ['control', 'generator', 'label_weight', 'labels', 'match_weight']
    """
    if method.objective.bind is None:
        return whole(method).broadcast(whole(method).init(network(net).init(1)))
    seen = []

    def broadcast(state: Any) -> Any:
        seen.append(whole(method).broadcast(state))
        return seen[-1]

    run(as_one(method, broadcast=broadcast), net=net, rounds=1)
    return seen[-1]


def bytes_of_counts(method: Method) -> int:
    """What a client sends when the server must know its label counts: a number of 4 bytes for each class."""
    return 4 * CLASSES if Need.LABEL_COUNTS_UPLOADED in needs_of(method) else 0


def distance(found: Any, wanted: Any) -> float:
    """Largest |found - wanted| / (1 + largest |wanted| of the tensor)."""
    found, wanted = flatten(found), flatten(wanted)
    assert found.keys() == wanted.keys()
    gaps = [0.0]
    for name, leaf in wanted.items():
        gap = (found[name].double().cpu() - leaf.double().cpu()).abs()
        assert bool(gap.isfinite().all()), name
        gaps.append(float((gap / (1.0 + leaf.double().cpu().abs().max())).max()) if leaf.numel() else 0.0)
    return max(gaps)


def form_of(tree: Any) -> dict[str, tuple]:
    return {name: (tuple(leaf.shape), leaf.dtype, leaf.device.type) for name, leaf in flatten(tree).items()}


def relabelled(data: Federation, names: list[int]) -> Federation:
    """Class c is called names[c]."""
    new = torch.tensor(names)
    train, test = (dataclasses.replace(part, y=new[part.y]) for part in (data.train, data.test))
    x, y = data.validation
    return dataclasses.replace(data, train=train, test=test, validation=(x, new[y]))


def nan_features(model):
    def apply(weights, x, **how):
        output, buffers = model.apply(weights, x, **how)
        return Output(output.logits, torch.full_like(output.features, float("nan"))), buffers

    return dataclasses.replace(model, apply=apply)


def broken_head(params, features):
    raise AssertionError("called without Need.HEAD")


def spoiled(x: torch.Tensor) -> torch.Tensor:
    """NaN, or ids that no network has."""
    return torch.full_like(x, float("nan") if x.is_floating_point() else 10**6)


def poisoned(method, net: str = "mlp"):
    """A network and a federation whose unlabeled data, features and head are useless unless they are declared."""
    model, data, declared = network(net), federation(net), needs_of(method)
    if Need.UNLABELED not in declared:
        data = dataclasses.replace(data, unlabeled=spoiled(data.unlabeled))
    if Need.VALIDATION not in declared:
        data = dataclasses.replace(data, validation=(spoiled(data.validation[0]), data.validation[1]))
    if Need.FEATURES not in declared:
        model = nan_features(model)
    if Need.HEAD not in declared:
        model = dataclasses.replace(model, head=broken_head)
    return {"model": model, "federation": data}
