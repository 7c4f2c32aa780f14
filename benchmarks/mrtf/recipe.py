"""MrTF (Li et al., 2023): Tables 2 and 3 and the Figures 7 to 11 as experiments. Choices: see README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstill.bench import Cell, Recipe, Table
from fedstill.experiment.config import Experiment
from fedstill.methods.lookup import write

PRESETS = {
    "correct": "the paper's form with the refined model sent to the clients, u_t at most 1, teachers in eval mode",
    "paper": "what the text says: u_t as printed, no weight decay and no clipping on the clients",
    "released": "the public code: the refined model is reported, never sent; a fifth of each client's data is not used",
}

DATA: dict[str, dict[str, Any]] = {
    "mnist": {"source": "ylecun/mnist"},
    "mnistm": {"source": "Mike0307/MNIST-M", "size": 32},
    "svhn": {"source": "ufldl-stanford/svhn:cropped_digits"},
    "cifar10": {"source": "uoft-cs/cifar10"},
    "cifar100": {"source": "uoft-cs/cifar100", "label": "fine_label"},
    "femnist": {"source": "flwrlabs/femnist", "label": "character", "test_limit": 16_000},
    "shakespeare": {"source": "shakespeare", "inputs": ("text",), "window": 80, "test_limit": 84_000},
}
NETWORKS = {
    "mnist": "mlp",
    "mnistm": "lenet",
    "svhn": "convnet",
    "cifar10": "vgg8",
    "cifar100": "vgg8",
    "femnist": "fecnn",
    "shakespeare": "char_lstm",
}
DIGITS, CIFAR, LEAF = ("mnist", "mnistm", "svhn"), ("cifar10", "cifar100"), ("femnist", "shakespeare")

# Section 5: SGD with momentum 0.9, batches of 64 (LEAF: 10); rates are the one that text and code share, see README.
RATES = {**dict.fromkeys(DIGITS, 0.01), **dict.fromkeys(CIFAR, 0.03), "femnist": 0.004, "shakespeare": 1.47}
CODE_ONLY = {"weight_decay": 1e-5, "clip": 100.0}  # on the clients; the text has neither
EVENLY = {"aggregate": 'average(weighting="uniform")'}  # Section 3.2: theta_{t+1} is the plain mean over S_t
SETTING = Experiment(name="mrtf", rounds=200, cohort=10, checkpoint_every=50, server=EVENLY)

SPLITS: dict[str, dict[str, Any]] = {
    "label-5": {"scheme": "label_split", "classes_per_client": 5},
    "label-3": {"scheme": "label_split", "classes_per_client": 3},
    "dir-1": {"scheme": "mrtf", "alpha": 1.0},
    "dir-0.1": {"scheme": "mrtf", "alpha": 0.1},
}
WIDE_SPLITS = {  # of 100 classes
    "label-50": {"scheme": "label_split", "classes_per_client": 50},
    "label-30": {"scheme": "label_split", "classes_per_client": 30},
    "dir-1": SPLITS["dir-1"],
    "dir-0.1": SPLITS["dir-0.1"],
}
OWNERS: dict[str, dict[str, Any]] = {
    "femnist": {"scheme": "natural", "keys": ["writer_id"], "clients": 359},
    "shakespeare": {"scheme": "natural", "keys": ["play", "role"], "clients": 112},
}

# The text's refinery and student, which are not the method's defaults (docs/methods/mrtf.md).
LITERAL = {"refine_sharpness": 4.0, "refine_share": "all", "student": {"lr_schedule": "constant"}}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.01},
    "fedmmd": {"lam": 0.01},
    "fedopt": {"optimizer": "sgd", "server_lr": 0.1, "momentum": 0.9},
    "scaffold": {"option": "II"},
    "feddf": {"student": {"lr": 3e-4, "lr_schedule": "constant", "batch_size": 64, "clip": None}},
    "mrtf": {**LITERAL, "feedback": True},
}
OF_PRESET: dict[str, dict[str, dict[str, Any]]] = {
    "correct": OPTIONS,
    "paper": {**OPTIONS, "mrtf": {**LITERAL, "bounded": False, "feedback": True}},
    "released": {**OPTIONS, "feddf": {}, "mrtf": {}},
}
RELEASED_FORMS = Path(__file__).with_name("released.py")  # FedDF and MrTF of the public code
ALL = ("fedavg", "fedprox", "fedmmd", "fedopt", "scaffold", "feddf", "mrtf")
SHORT = ("fedavg", "feddf", "mrtf")  # Part IV, Tables 2 and 3
SIGMAS = (0.0, 0.001, 0.01, 0.1)
MODULES: dict[str, dict[str, bool]] = {  # Section 5.3; without any of the three it is AvgLogit
    "al": {"stabilise": False, "rectify": False, "refine": False},
    "st": {"rectify": False, "refine": False},
    "st+rd": {"refine": False},
    "st+rd+clr": {},
}
# Not in the paper: the refined model is sent to the clients, only reported, or sent after gentler steps.
SENT: dict[str, dict[str, Any]] = {"sent": {}, "reported": {"feedback": False}, "gentle": {"student": {"lr": 3e-5}}}
# Not in the paper: the method's own form and its refinery, reported only. "literal" is the text's refinery.
FORMS: dict[str, dict[str, Any]] = {
    "mrtf-defaults": {},
    "no-refinery": {"refine": False},
    "whole-refinery": {"refine_share": "all"},
    "literal": {**LITERAL, "feedback": False},
}
# Figure 10: clients and epochs are the paper's, rounds those of the released script for FedAvg.
SCALES = {(100, 2): 200, (100, 10): 100, (100, 50): 50, (1000, 5): 1000, (1000, 50): 500, (1000, 100): 200}


def period(rounds: int) -> int:
    """The released code tests (and refines) so often."""
    return max(1, rounds // 100)


def method_of(row: str, preset: str, scene: Experiment, *, sigma: float = 0.0, **changes: Any) -> str:
    """`mrtf` as `mrtf(feedback=true)`; with noise on the updates also `+update_noise(sigma=0.01)`."""
    options = {**OF_PRESET[preset][row], **changes}
    if "student" in changes:
        options["student"] = {**OF_PRESET[preset][row].get("student", {}), **changes["student"]}
    name = row
    if preset == "released" and row in ("feddf", "mrtf"):
        name, options = f"{RELEASED_FORMS}:{row}", {**options, **released_loops(row, scene)}
    text = write(name, options)
    return f"{text}+{write('update_noise', {'sigma': sigma})}" if sigma else text


def released_loops(row: str, scene: Experiment) -> dict[str, Any]:
    """What the released code derives from the rounds and from the clients' batch size.

    Its FedDF refines every so often too; nothing is sent or remembered, so that only the looks count.
    """
    often, batch = period(scene.rounds), 10 * scene.local.batch_size
    options = {} if batch == 640 else {"teacher_batch": batch}
    return options | ({"every": often} if row == "mrtf" and often > 1 else {})


def local(data: str, preset: str, **changes: Any) -> dict[str, Any]:
    """How a client trains on a data set."""
    options: dict[str, Any] = {"batch_size": 10 if data in LEAF else 64, "lr": RATES[data], "momentum": 0.9}
    if preset != "paper":
        options |= CODE_ONLY
    if data in CIFAR:
        options["augment"] = ("crop", "flip")
    if preset == "released" and data in DIGITS:
        options |= {"batch_size": 32, "augment": () if data == "mnist" else ("flip",)}
    if preset == "correct" and data == "shakespeare":
        options["momentum"] = 0.0  # 1.47 is FedAvg's rate for plain SGD
    return {**options, **changes}


def network(data: str, preset: str) -> dict[str, Any]:
    released = {"form": "released"} if preset == "released" and data == "femnist" else {}
    return {"name": NETWORKS[data], "init": "paper", **released}


def setting(data: str, split: Mapping[str, Any], preset: str, /, *, rounds: int, **changes: Any) -> Experiment:
    """A scene without its method; changes: `local` is merged, other keys replace."""
    partition = {"clients": 100, **split}
    if preset == "released" and partition["scheme"] in ("mrtf", "label_split"):
        partition["held_out"] = 0.2
    chosen: dict[str, Any] = {
        "rounds": rounds,
        "evaluate_every": period(rounds) if preset == "released" or rounds > 200 else 1,
        "data": {**DATA[data], "unlabeled": "test"},
        "partition": partition,
        "model": network(data, preset),
        **changes,
    }
    return SETTING.replace(**{**chosen, "local": local(data, preset, **changes.get("local", {}))})


def cells(rows: Iterable[str], column: str, scene: Experiment, preset: str, **changes: Any) -> tuple[Cell, ...]:
    return tuple(Cell(row, column, scene.replace(method=method_of(row, preset, scene, **changes))) for row in rows)


def table_2(preset: str) -> Iterator[Cell]:
    """SVHN's clients, MNIST-M's test set and the other way round."""
    for source, target in (("svhn", "mnistm"), ("mnistm", "svhn")):
        for alpha in ("1", "0.1"):
            data = {**DATA[source], "size": 32, "test": DATA[target]["source"], "unlabeled": "test"}
            split, training = SPLITS[f"dir-{alpha}"], {"epochs": 5}
            changes = {"data": data, "model": network("svhn", preset), "local": training}
            scene = setting(source, split, preset, rounds=200, **changes)
            yield from cells(SHORT, f"{source}-to-{target}-dir-{alpha}", scene, preset)


def table_3(preset: str) -> Iterator[Cell]:
    scene = setting("cifar10", SPLITS["dir-1"], preset, rounds=200, local={"epochs": 5})
    for sigma in SIGMAS:
        yield from cells(SHORT, f"sigma-{sigma:g}", scene, preset, sigma=sigma)


def figure_7(preset: str) -> Iterator[Cell]:
    for data in (*DIGITS, "cifar10"):
        rounds = 1500 if data == "cifar10" else 200
        training = {"epochs": 5 if preset == "released" and data in DIGITS else 3}
        for split, keys in SPLITS.items():
            scene = setting(data, keys, preset, rounds=rounds, local=training)
            yield from cells(ALL, f"{data}-{split}", scene, preset)


def figure_8(preset: str) -> Iterator[Cell]:
    for name in ("vgg8", "resnet8", "resnet20"):
        for split, keys in WIDE_SPLITS.items():
            model = {"name": name, **({"init": "paper"} if name == "vgg8" else {})}  # the ResNets' default
            scene = setting("cifar100", keys, preset, rounds=500, model=model, local={"epochs": 20})
            yield from cells(ALL, f"{name}-{split}", scene, preset)


def figure_9(preset: str) -> Iterator[Cell]:
    work: dict[str, tuple[int, dict[str, int]]] = {"femnist": (500, {"epochs": 5}), "shakespeare": (200, {"steps": 50})}
    for data, (rounds, training) in work.items():
        scene = setting(data, OWNERS[data], preset, rounds=rounds, cohort=0.05, local=training)
        yield from cells(ALL, data, scene, preset)


def figure_10(preset: str) -> Iterator[Cell]:
    for data in ("svhn", "cifar10"):
        for split in ("label-5", "dir-1"):
            for (clients, epochs), rounds in SCALES.items():
                keys = {**SPLITS[split], "clients": clients}
                scene = setting(data, keys, preset, rounds=rounds, local={"epochs": epochs})
                yield from cells(SHORT, f"{data}-{split}-k{clients}-e{epochs}", scene, preset)


def figure_11(preset: str) -> Iterator[Cell]:
    for data in ("svhn", "cifar10"):
        for split, keys in SPLITS.items():
            scene = setting(data, keys, preset, rounds=50, local={"epochs": 5})
            column = f"{data}-{split}"
            yield Cell("pa", column, scene.replace(method=method_of("fedavg", preset, scene)))
            for row, modules in MODULES.items():
                yield Cell(row, column, scene.replace(method=method_of("mrtf", preset, scene, **modules)))


def feedback(preset: str) -> Iterator[Cell]:
    """Table 3 without noise, and Figure 11's CIFAR-10 at alpha = 0.1."""
    for split, rounds in (("dir-1", 200), ("dir-0.1", 50)):
        scene, column = (
            setting("cifar10", SPLITS[split], preset, rounds=rounds, local={"epochs": 5}),
            f"cifar10-{split}",
        )
        yield Cell("fedavg", column, scene.replace(method=method_of("fedavg", preset, scene)))
        for row in ("feddf", "mrtf"):
            for name, changes in SENT.items():
                yield Cell(f"{row}-{name}", column, scene.replace(method=method_of(row, preset, scene, **changes)))


def defaults() -> Iterator[Cell]:
    """FedAvg and MrTF's own form in Table 3's scene, the first half of it, and in Figure 11's.

    At Dirichlet 1 every fifth round is refined and tested. Nothing is sent, so the other rounds would change nothing.
    """
    for split, rounds, often in (("dir-1", 100, 5), ("dir-0.1", 50, 1)):
        scene = setting("cifar10", SPLITS[split], "correct", rounds=rounds, evaluate_every=often, local={"epochs": 5})
        column, looks = f"cifar10-{split}", {"every": often} if often > 1 else {}
        yield Cell("fedavg", column, scene.replace(method=method_of("fedavg", "correct", scene)))
        for row, options in FORMS.items():
            yield Cell(row, column, scene.replace(method=write("mrtf", {**options, **looks})))


def tables(preset: str) -> Iterator[Table]:
    drawn = "The paper draws curves and prints no numbers"
    yield Table(
        "2",
        "Cross-domain (SVHN and MNIST-M, ConvNet)",
        tuple(table_2(preset)),
        note="Final accuracy, mean of five runs. The paper does not name the network: SVHN's is our guess.",
    )
    yield Table(
        "3",
        "Noise on the updates (CIFAR-10, VGG8, Dirichlet 1)",
        tuple(table_3(preset)),
        note="The paper has no FedDF row: it is ours. FedAvg at sigma = 0.1 is missing in the text that we have.",
    )
    yield Table("figure-7", "Four data sets, four splits", tuple(figure_7(preset)), note=f"{drawn}.")
    yield Table(
        "figure-8",
        "Networks (CIFAR-100)",
        tuple(figure_8(preset)),
        note=f"{drawn}. Its milder splits are not named: 50 classes and alpha = 1 are the released code's.",
    )
    yield Table("figure-9", "LEAF: FeMnist and Shakespeare", tuple(figure_9(preset)), note=f"{drawn}.")
    yield Table(
        "figure-10",
        "Clients and local epochs",
        tuple(figure_10(preset)),
        note=f"{drawn}. Rounds are those of the released script.",
    )
    yield Table(
        "figure-11",
        "The modules one by one, 50 rounds",
        tuple(figure_11(preset)),
        note=f"{drawn}; clients and epochs stand in the picture only: 100 and 5 are ours. PA is FedAvg, AL AvgLogit.",
    )
    if preset == "correct":
        yield Table(
            "feedback",
            "Is the refined model sent to the clients?",
            tuple(feedback(preset)),
            note="Not in the paper, whose text sends it and whose released code does not.",
        )
        yield Table(
            "defaults",
            "What the name alone gives: the library's form of MrTF, and its refinery",
            tuple(defaults()),
            note="Not in the paper. The refined model is reported; at Dirichlet 1 in every fifth round.",
        )


RECIPE = Recipe(
    paper="mrtf",
    title="MrTF: Model Refinery for Transductive Federated Learning (Li, Yang and Zhan, 2023)",
    presets=PRESETS,
    tables={preset: {table.name: table for table in tables(preset)} for preset in PRESETS},
)
