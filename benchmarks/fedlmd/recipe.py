"""FedLMD (Lu et al., ACM MM 2023): every table and the figures 5, 7, 8 and 9 as experiments. Choices: see README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstill.bench import Cell, Recipe, Table
from fedstill.experiment.config import Experiment
from fedstill.methods.lookup import write

PRESETS = {
    "correct": "every method in its correct form; Cutout, which the released code has and the text does not",
    "paper": "what the text says: no Cutout, and every upload weighs 1 / |S| (Algorithm 1, line 12)",
    "released": "the public code: Cutout, weights n_k / n, and the published forms of SCAFFOLD, FedNova and MOON",
}

PUBLISHED_SPLIT = {"clients": 100, "legacy_seed": 19940817}

# Section 5.1. Every cell starts from this.
LOCAL = {"epochs": 5, "batch_size": 50, "lr": 0.01, "lr_decay": 0.99, "momentum": 0.9, "weight_decay": 1e-5}
SETTING = Experiment(name="fedlmd", rounds=200, cohort=10, checkpoint_every=100)

DATA: dict[str, dict[str, str]] = {
    "mnist": {"source": "ylecun/mnist"},
    "cifar10": {"source": "uoft-cs/cifar10"},
    "cifar100": {"source": "uoft-cs/cifar100", "label": "fine_label"},
    "cinic10": {"source": "flwrlabs/cinic10"},
}
SHARDS = {"mnist": (2,), "cifar10": (2, 3, 5, 10), "cifar100": (10,), "cinic10": (2,)}
LDA = {"mnist": (0.1,), "cifar10": (0.05, 0.1, 0.3, 0.5), "cifar100": (0.1,), "cinic10": (0.1,)}
COLUMNS: dict[str, dict[str, Any]] = {
    f"{name}-s-{s}": {"data": DATA[name], "partition": {"scheme": "shards", "shards_per_client": s, **PUBLISHED_SPLIT}}
    for name, counts in SHARDS.items()
    for s in counts
} | {
    f"{name}-lda-{alpha}": {"data": DATA[name], "partition": {"scheme": "lda", "alpha": alpha, **PUBLISHED_SPLIT}}
    for name, alphas in LDA.items()
    for alpha in alphas
}
CIFAR10 = {column: changes for column, changes in COLUMNS.items() if changes["data"] == DATA["cifar10"]}
DEFAULT = "cifar10-lda-0.05"  # "our default experimental dataset"
NETWORKS: dict[str, dict[str, Any]] = {
    "cnn": {"model": "cnn"},
    "mobilenet": {"model": {"name": "mobilenet_v2", "norm": "batch"}},  # a guess, see the table's note
    "resnet8": {"model": {"name": "resnet8", "norm": "batch", "init": "torch"}},
}

DISTILLATION = {"beta": 1.0, "tau": 1.0}  # the released configurations of FedNTD, FedLMD and FedLMD-Tf
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedcurv": {"lam": 1.0, "fisher": "per_batch"},  # the released strength goes with the released Fisher
    "fedprox": {"mu": 1.0},
    "fednova": {},
    "scaffold": {"option": "II"},
    "moon": {"mu": 0.1, "temperature": 0.5},
    "fedrs": {"alpha": 0.5, "rule": "binary"},
    "kd": DISTILLATION,
    "fedntd": DISTILLATION,
    "fedlmd": DISTILLATION,
    "fedntd_tf": DISTILLATION,
    "fedlmd_tf": DISTILLATION,
    "label_smoothing": {"epsilon": 0.1},  # Section 5.2
    "fedavgm": {"beta": 0.7},
}
RELEASED: dict[str, dict[str, Any]] = {"fednova": {}, "scaffold": {}, "moon": {"mu": 0.1, "temperature": 0.5}}
RELEASED_FILE = Path(__file__).with_name("released.py")
NAMES = {"released": {name: f"{RELEASED_FILE}:{name}" for name in ("fednova", "scaffold", "moon")}}
OF_PRESET: dict[str, dict[str, dict[str, Any]]] = {
    "correct": OPTIONS,
    "paper": OPTIONS,
    "released": {**OPTIONS, **RELEASED},
}

TABLE_3 = ("fedavg", "fedcurv", "fedprox", "fednova", "scaffold", "moon", "fedrs", "fedntd", "fedlmd")
FEW = ("fedavg", "fedcurv", "fedprox", "fedntd", "fedlmd")  # Section 5.1: "only a few important methods"
LIGHT = ("fedavg", "fedprox", "fednova", "scaffold", "fedrs", "fedlmd_tf")  # a step costs what FedAvg's costs
SWITCHES = (0, 25, 50, 100, 150, 200)
EPOCHS, COHORTS = (1, 5, 10, 20), (5, 10, 20, 50)
MUS, TEACHER_FREE = (0.01, 0.1, 1.0), ((1.0, 1.0), (1.0, 0.3), (4.0, 0.3))
TAUS, BETAS = (0.5, 1.0, 2.0, 4.0), (0.1, 0.3, 1.0, 3.0)


def method_of(row: str, preset: str, **changes: Any) -> str:
    """`fedlmd` as `fedlmd(beta=1.0, tau=1.0)`; every part of `fedlmd+fedprox` with its own options."""
    options, names = OF_PRESET[preset], NAMES.get(preset, {})
    return "+".join(write(names.get(part, part), {**options[part], **changes}) for part in row.split("+"))


def switch(until: int, preset: str) -> str:
    """FedLMD-Tf in rounds 1 ... `until`, then FedLMD; at both ends it is the plain method, whose runs exist."""
    first, then = method_of("fedlmd_tf", preset), method_of("fedlmd", preset)
    if until in (0, SETTING.rounds):
        return first if until else then
    return f"{first} until {until} then {then}"


def cell(
    row: str, column: str, preset: str, *, method: str = "", local: Mapping[str, Any] | None = None, **changes: Any
) -> Cell:
    """One experiment; the data of the default column unless `changes` say otherwise."""
    changes = {**COLUMNS[DEFAULT], **changes}
    plain = preset == "paper" or changes["data"] == DATA["cinic10"]  # the released code has no Cutout for CINIC-10
    augment = ("crop", "flip") if plain else ("crop", "flip", "cutout")
    changes["local"] = {**LOCAL, "augment": augment, **(local or {})}
    if preset == "paper":  # Algorithm 1, line 12
        kind = "normalized_average" if row == "fednova" else "average"
        changes["server"] = {"aggregate": f'{kind}(weighting="uniform")'}
    return Cell(row, column, SETTING.replace(method=method or method_of(row, preset), **changes))


def grid(rows: Iterable[str], columns: Mapping[str, Mapping[str, Any]], preset: str) -> tuple[Cell, ...]:
    return tuple(cell(row, column, preset, **columns[column]) for row in rows for column in columns)


def tables(preset: str) -> Iterator[Table]:
    default = {DEFAULT: COLUMNS[DEFAULT]}
    rows = ("fedavg", "kd", "fedntd", "fedlmd")
    yield Table("1", "Distillation on the clients (CIFAR-10, LDA 0.05)", grid(rows, default, preset))
    rows = ("fedavg", "label_smoothing", "fedntd_tf", "fedlmd_tf")
    yield Table("2", "Distillation without a teacher (CIFAR-10, LDA 0.05)", grid(rows, default, preset))
    yield Table(
        "3",
        "Accuracy and convergence speed",
        grid(TABLE_3, COLUMNS, preset) + grid(("fedlmd_tf",), CIFAR10, preset),
        note="FedLMD-Tf is not in the paper's table; its Figure 5 draws it for CIFAR-10.",
    )
    yield Table(
        "4",
        "Networks (CIFAR-10, LDA 0.05)",
        grid(FEW, NETWORKS, preset),
        note="Neither the text nor the released code says which MobileNet: MobileNetV2 for 32x32 images is our guess.",
    )
    rows = ("fedlmd", "fedlmd+fedprox", "fedlmd+fedavgm", "fedlmd+fedprox+fedavgm")
    half = {"cifar10-lda-0.5": COLUMNS["cifar10-lda-0.5"]}
    yield Table("5", "FedLMD with other methods (CIFAR-10, LDA 0.5)", grid(rows, half, preset))


def figures(preset: str) -> Iterator[Table]:
    guess = "The paper prints no numbers"
    yield Table(
        "figure-5",
        "Methods whose step costs what FedAvg's costs (CIFAR-10)",
        grid(LIGHT, CIFAR10, preset),
        note=f"{guess} and does not name the baselines.",
    )
    work: dict[str, dict[str, Any]] = {f"epochs-{epochs}": {"local": {"epochs": epochs}} for epochs in EPOCHS}
    work |= {f"cohort-{cohort}": {"cohort": cohort} for cohort in COHORTS}
    yield Table(
        "figure-7",
        "Local epochs, and clients a round (CIFAR-10, LDA 0.05)",
        grid((*FEW, "fedlmd_tf"), work, preset),
        note=f"{guess}; its text names E = 10 and 20 and 50 clients, the other values are ours.",
    )
    yield Table(
        "figure-8",
        "FedLMD-Tf until a round, FedLMD from then on (CIFAR-10, LDA 0.05)",
        tuple(cell(f"switch-{s}", DEFAULT, preset, method=switch(s, preset)) for s in SWITCHES),
        note=f"{guess}. switch-0 is FedLMD, switch-200 is FedLMD-Tf.",
    )
    yield Table(
        "figure-9",
        "Temperature and weight of the distillation (CIFAR-10, LDA 0.05)",
        tuple(
            cell(row, f"tau-{tau:g}-beta-{beta:g}", preset, method=method_of(row, preset, tau=tau, beta=beta))
            for row in ("fedlmd", "fedlmd_tf")
            for tau in TAUS
            for beta in BETAS
        ),
        note=f"{guess} and does not say its grid.",
    )
    yield Table(
        "options",
        "Options that the paper searched for and does not print (CIFAR-10)",
        tuple(searched(preset)),
        note="Not in the paper: whether another option closes the gap of a cell that lies below its printed figure.",
    )


def searched(preset: str) -> Iterator[Cell]:
    for mu in MUS:
        method = method_of("fedprox", preset, mu=mu)
        yield cell(f"fedprox-mu-{mu:g}", "cifar10-lda-0.1", preset, method=method, **COLUMNS["cifar10-lda-0.1"])
    for tau, beta in TEACHER_FREE:
        method = method_of("fedntd_tf", preset, tau=tau, beta=beta)
        yield cell(f"fedntd_tf-tau-{tau:g}-beta-{beta:g}", DEFAULT, preset, method=method)


RECIPE = Recipe(
    paper="fedlmd",
    title="Federated Learning with Label-Masking Distillation (Lu et al., ACM Multimedia 2023)",
    presets=PRESETS,
    tables={preset: {table.name: table for table in (*tables(preset), *figures(preset))} for preset in PRESETS},
)
