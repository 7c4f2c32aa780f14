"""FedFTG (Zhang et al., CVPR 2022): all tables of results, Figures 4 to 6 as experiments. Choices: see README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstill.bench import Cell, Recipe, Table
from fedstill.experiment.config import Experiment
from fedstill.methods.lookup import write

PRESETS = {
    "correct": "the released code's schedule and losses with its slips put right, and every baseline in its own form",
    "paper": "what the text says: KL(model || client) for both players, one generator step on all clients, Table 7(a)",
    "released": "the public code: a generator step for each client, about 10 clients a round, FedProx as weight decay",
}

# Section 4.1 and the released script. Every cell starts from this.
LOCAL: dict[str, Any] = {
    "epochs": 5,
    "batch_size": 50,
    "lr": 0.1,
    "lr_decay": 0.998,
    "weight_decay": 1e-3,
    "clip": 10.0,
    "augment": ("crop", "flip"),
}
SETTING = Experiment(name="fedftg", rounds=1000, cohort=10, checkpoint_every=100)
RESNET18 = {"name": "resnet18", "stem": "imagenet"}  # the stem of the released code
STEMS = {stem: {"name": "resnet18", "stem": stem} for stem in ("imagenet", "cifar")}
NETWORKS = {"vgg11": {"name": "vgg11"}, "resnet34": {"name": "resnet34", "stem": "imagenet"}}

DATA: dict[str, dict[str, Any]] = {
    "cifar10": {"source": "uoft-cs/cifar10"},
    "cifar100": {"source": "uoft-cs/cifar100", "label": "fine_label"},
    "mio-tcd": {"source": "mio_tcd", "size": 112},
    "compcars": {"source": "compcars", "size": 112},
    "tiny": {"source": "zh-plus/tiny-imagenet", "size": 64},
}
WIDE_NOISE = {"generator.noise": 256}  # d, of all but CIFAR-10
LARGE = {
    "feddf_gen": {"generator.network": "deconv"},
    "fedftg": {"generator.network": "deconv"},
    "fedgen": {"generator.network": "features_large"},
}

POOLED = {"pool": "probabilities"}  # the paper's code; feddf_gen's default is FedDF's own, the mean of logits
Options = Mapping[str, Mapping[str, Any]]  # by the name of a method
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 1e-4},
    "feddyn": {"alpha": 0.01},
    "moon": {"mu": 1.0, "temperature": 0.5},
    "scaffold": {"option": "II"},
    "fedgen": {  # Table 7(b): 72 M parameters; clients' batches of 50
        "match_weight": 10.0,  # the authors' code; fedgen's default leaves the term out
        "ratio": 0.64,
        "generator.network": "features",
        "generator.noise": 100,
        "generator.noise_kind": "normal",
        "generator.batch_size": 50,
        "generator.lr": 0.01,
        "generator.lr_decay": 0.998,
    },
    "feddf_gen": POOLED,
    "fedftg": {},
}
EVENLY = {"aggregate": 'average(weighting="uniform")'}  # Algorithm 1
BY_BATCH = {"student.batch_norm": "train"}  # statistics of invented images
PRINTED = {"discrepancy": "kl", "discrepancy_through": "both", "student_loss": "reverse_kl", "student_scale": "batch"}
CODE = {"clients": "each", "cls_weights": "client"}
RELEASED_FILE = Path(__file__).with_name("released.py")  # has these options beside fedftg's own
OF_RELEASED = {"clients", "cls_weights", "discrepancy_through", "student_loss", "student_scale", "reestimate"}
OF_PRESET: dict[str, dict[str, dict[str, Any]]] = {
    "correct": OPTIONS,
    "paper": {
        **OPTIONS,
        "feddf_gen": {**POOLED, **BY_BATCH, "generator.network": "conv_paper"},
        "fedftg": {**PRINTED, **BY_BATCH, "generator.network": "conv_paper"},
    },
    "released": {**OPTIONS, "feddf_gen": {**POOLED, **BY_BATCH}, "fedftg": {**CODE, **BY_BATCH}},
}
INVENTING = ("fedgen", "feddf_gen", "fedftg")
FEDPROX_AS_DECAY = 1e-3 + 1e-4  # the released FedProx: no term around the received model

FEDFTG = "scaffold+fedftg"  # "FedFTG" in the paper's tables
BASES = ("fedavg", "fedprox", "feddyn", "moon", "scaffold")
TABLE_1 = (*BASES, "fedgen", "feddf_gen", FEDFTG)
TABLE_3 = tuple(f"{base}+fedftg" for base in BASES)
TABLE_6 = tuple(row for row in TABLE_1 if row != "moon")
PAIRS = ("fedavg", "fedavg+fedftg", "scaffold", FEDFTG)
GONE: dict[str, dict[str, Any]] = {  # Table 4: what is left out
    "hsm": {"discrepancy": "none"},
    "cls": {"labels": "uniform"},
    "abe": {"ensemble": "uniform"},
}
LOSSES: dict[str, dict[str, Any]] = {
    "no-loss-cls": {"generator.lam_cls": 0.0},
    "no-loss-dis": {"generator.lam_dis": 0.0},
    "no-loss-cls-dis": {"generator.lam_cls": 0.0, "generator.lam_dis": 0.0},
    "mse": {"discrepancy": "mse", "student_loss": "mse"},
}
LAMBDAS, NOISES = (0.5, 0.75, 1.0, 1.25, 1.5), (50, 100, 150, 200, 250)
BETAS, COHORTS = (0.2, 0.3, 0.6, 1.0), (5, 10, 20, 50)  # of Figure 5 the text names 0.2; the others are ours
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "each": {"clients": "each"},
    "kl": {"discrepancy": "kl"},
    "kl-both": {"discrepancy": "kl", "discrepancy_through": "both"},
    "reverse-kl": {"student_loss": "reverse_kl"},
    "batch-scale": {"student_scale": "batch"},
    "bn-train": BY_BATCH,
    "bn-restore": {"student.batch_norm": "restore"},
    "bn-reestimate": {**BY_BATCH, "reestimate": True},
    "conv-paper": {"generator.network": "conv_paper"},
    "no-hsm": GONE["hsm"],
    "low-rate": {"student.lr": 0.01},
}
NO_COUNTS = {"labels": "uniform", "ensemble": "uniform"}
COUNTS: dict[str, dict[str, Any]] = {
    "exact": {},
    **{f"epsilon-{e:g}": {"label_counts": "dp", "label_epsilon": e} for e in (8.0, 1.1, 0.3, 0.1)},
    "none": {"label_counts": "none"},
}
MUS = (0.1, 1.0, 5.0)


def split(beta: float | None, clients: int = 100) -> dict[str, Any]:
    """The released code's split by class priors Dir(beta); None is IID."""
    if beta is None:
        return {"scheme": "iid", "clients": clients}
    return {"scheme": "feddyn", "clients": clients, "beta": beta, "fedftg_sizes": True, "legacy_seed": 1024}


def method_of(row: str, preset: str, changes: Options) -> str:
    """`scaffold+fedftg` as `scaffold(option="II")+fedftg`; changes: other options, by the part's name."""
    parts = row.replace("fedprox", "fedavg").split("+") if preset == "released" else row.split("+")
    return "+".join(part_of(part, {**OF_PRESET[preset][part], **changes[part]}) for part in parts)


def part_of(name: str, options: Mapping[str, Any]) -> str:
    return write(f"{RELEASED_FILE}:{name}" if name == "fedftg" and options.keys() & OF_RELEASED else name, options)


def cell(
    row: str,
    column: str,
    preset: str,
    *,
    data: str = "cifar10",
    options: Options | None = None,
    named: str = "",
    **changes: Any,
) -> Cell:
    """One experiment: beta = 0.3 and ResNet-18 unless `changes` say otherwise; named: the row, if not by its method."""
    wide: Options = {} if data == "cifar10" else dict.fromkeys(INVENTING, WIDE_NOISE)
    parts = {part: {**wide.get(part, {}), **(options or {}).get(part, {})} for part in OPTIONS}
    local = {**LOCAL, **changes.pop("local", {})}
    if preset == "paper":
        changes["server"] = EVENLY
    if preset == "released":
        changes["sampling"] = "poisson"
        local |= {"weight_decay": FEDPROX_AS_DECAY} if row.startswith("fedprox") else {}
    scene = {"data": DATA[data], "partition": split(0.3), "model": RESNET18, **changes, "local": local}
    return Cell(named or row, column, SETTING.replace(method=method_of(row, preset, parts), **scene))


def grid(rows: Iterable[str], columns: Mapping[str, Mapping[str, Any]], preset: str) -> tuple[Cell, ...]:
    rows = tuple(rows)
    return tuple(cell(row, column, preset, **how) for column, how in columns.items() for row in rows)


def sets(*betas: float | None) -> dict[str, dict[str, Any]]:
    """Columns of CIFAR-10 and CIFAR-100 by beta."""
    return {
        f"{data}-iid" if beta is None else f"{data}-beta-{beta:g}": {"data": data, "partition": split(beta)}
        for data in ("cifar10", "cifar100")
        for beta in betas
    }


def aims(columns: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each column twice, for the two accuracies that the paper counts the rounds to."""
    goals = {"cifar10": (75, 80), "cifar100": (40, 50)}
    return {
        f"{column}-to-{goal}": {**how, "target": goal / 100}
        for column, how in columns.items()
        for goal in goals[how["data"]]
    }


def ablation(preset: str, column: str, **how: Any) -> Iterator[Cell]:
    """Table 4: FedFTG whole, without one, two or all of its modules, without a loss, with MSE."""
    yield cell(FEDFTG, column, preset, **how)
    for names in (("hsm",), ("cls",), ("abe",), ("hsm", "cls"), ("hsm", "abe"), ("cls", "abe"), ("hsm", "cls", "abe")):
        gone = {key: value for name in names for key, value in GONE[name].items()}
        yield cell(FEDFTG, column, preset, options={"fedftg": gone}, named="-".join(("no", *names)), **how)
    for name, changed in LOSSES.items():
        yield cell(FEDFTG, column, preset, options={"fedftg": changed}, named=name, **how)


def table_3(preset: str) -> Iterator[Cell]:
    columns: dict[str, dict[str, Any]] = {
        "beta-0.6": {"partition": split(0.6)},
        "beta-0.3": {},
        "beta-0.3-to-75": {"target": 0.75},
        "beta-0.3-to-80": {"target": 0.8},
    }
    yield from grid((*BASES, *TABLE_3), columns, preset)


def table_5(preset: str) -> Iterator[Cell]:
    feature = {"fedftg": {"input": "feature", "generator.network": "features"}}
    for beta in (0.6, 0.3):
        column, how = f"beta-{beta:g}", {"partition": split(beta)}
        yield cell(FEDFTG, column, preset, options=feature, named="fedftg-feature", **how)
        yield cell(FEDFTG, column, preset, named="fedftg-input", **how)


def table_6(preset: str) -> Iterator[Cell]:
    columns: dict[str, dict[str, Any]] = {
        "mio-tcd": {"rounds": 50, "partition": split(0.6)},
        "compcars": {"rounds": 100, "partition": split(0.6, 50), "cohort": 5},
        "tiny": {"rounds": 1000, "partition": split(0.6)},
    }
    for data, how in columns.items():
        for row in TABLE_6:
            yield cell(row, data, preset, data=data, options=LARGE, **how)


def table_10(preset: str) -> Iterator[Cell]:
    for column, model in NETWORKS.items():
        for row in TABLE_1:
            yield cell(row, column, preset, model=model, options=LARGE if column == "vgg11" else None)


def figure_5(preset: str) -> tuple[Cell, ...]:
    columns: dict[str, dict[str, Any]] = {f"beta-{beta:g}": {"partition": split(beta)} for beta in BETAS}
    columns |= {f"c-{cohort / 100:g}": {"cohort": cohort} for cohort in COHORTS}
    return grid(TABLE_1, columns, preset)


def figure_6(preset: str) -> Iterator[Cell]:
    for name, values in {"lam_cls": LAMBDAS, "lam_dis": LAMBDAS, "noise": NOISES}.items():
        for value in values:
            changed = {} if value in (1.0, 100) else {f"generator.{name}": value}  # the defaults: runs of Table 1
            named = f"{name.replace('_', '-')}-{value:g}"
            yield cell(FEDFTG, "cifar10-beta-0.3", preset, options={"fedftg": changed}, named=named)


def stems(preset: str) -> Iterator[Cell]:
    columns: dict[str, dict[str, Any]] = {}
    for stem, model in STEMS.items():
        columns[stem] = {"model": model, "rounds": 150, "checkpoint_every": 75}
        columns[f"{stem}-to-75"] = {**columns[stem], "target": 0.75}
    yield from grid(PAIRS, columns, preset)
    if preset != "correct":
        return
    for column, how in columns.items():  # as in the code
        for row in PAIRS[1::2]:
            yield cell(row, column, preset, options={"fedftg": FORMS["bn-train"]}, named=f"{row}-bn-train", **how)


def forms(preset: str) -> Iterator[Cell]:
    how: dict[str, Any] = {"rounds": 150, "checkpoint_every": 75}
    yield cell("fedavg", "cifar10-beta-0.3", preset, **how)
    for named, form in FORMS.items():
        yield cell("fedavg+fedftg", "cifar10-beta-0.3", preset, options={"fedftg": form}, named=named, **how)


def count_noise(preset: str) -> Iterator[Cell]:
    for column, privacy in COUNTS.items():
        options = {"fedftg": NO_COUNTS} if column == "none" else None
        how: dict[str, Any] = {"privacy": privacy, "rounds": 150, "checkpoint_every": 75}
        for row in ("fedavg+fedftg", FEDFTG):
            yield cell(row, column, preset, options=options, **how)


def small(preset: str) -> Iterator[Cell]:
    how: dict[str, Any] = {"model": {"name": "cnn"}, "rounds": 100}
    yield from (cell(row, "cnn", preset, **how) for row in ("fedavg", "fedavg+fedftg", "scaffold"))
    yield from ablation(preset, "cnn", **how)


def centralised() -> Iterator[Cell]:
    """One client that holds everything; lengths and rates are ours."""
    local = {"epochs": 1, "lr_decay": 0.98}
    for data in ("cifar10", "cifar100"):
        for stem, model in STEMS.items():
            how: dict[str, Any] = {
                "model": model,
                "rounds": 200,
                "cohort": 1,
                "partition": split(None, 1),
                "local": local,
            }
            yield cell("fedavg", f"{data}-{stem}", "correct", data=data, **how)


def searched(preset: str) -> Iterator[Cell]:
    for row in ("moon", "moon+fedftg"):
        for mu in MUS:
            yield cell(row, "cifar10-beta-0.3", preset, options={"moon": {"mu": mu}}, named=f"{row}-mu-{mu:g}")


def tables(preset: str) -> Iterator[Table]:
    whole = "The paper does not say whether its figure is of the last round or the best; it is compared as the last."
    yield Table(
        "1", "Accuracy (ResNet-18, 100 clients, 10 a round)", grid(TABLE_1, sets(None, 0.6, 0.3), preset), whole
    )
    yield Table("2", "Rounds to an accuracy (beta = 0.3)", grid(TABLE_1, aims(sets(0.3)), preset))
    yield Table("3", "FedFTG on top of each method (CIFAR-10)", tuple(table_3(preset)), whole)
    yield Table(
        "4",
        "Ablation (CIFAR-10, beta = 0.3, 500 rounds)",
        tuple(ablation(preset, "cifar10-beta-0.3", rounds=500)),
        note="hsm: hard samples; cls: label sampling; abe: class-level ensemble. The figure of FedFTG itself is lost.",
    )
    yield Table("5", "Invented features or inputs (CIFAR-10)", tuple(table_5(preset)), whole)
    yield Table("6", "Larger images (beta = 0.6)", tuple(table_6(preset)), whole)
    yield Table("9", "Rounds to an accuracy (beta = 0.6)", grid(TABLE_1, aims(sets(0.6)), preset))
    yield Table("10", "Other networks (CIFAR-10, beta = 0.3)", tuple(table_10(preset)), whole)
    guess = "The paper draws this and prints no numbers"
    yield Table("figure-4", "Curves over 1000 rounds (beta = 0.3)", grid(TABLE_1, sets(0.3), preset), f"{guess}.")
    yield Table(
        "figure-5",
        "Skew, and clients a round (CIFAR-10)",
        figure_5(preset),
        note=f"{guess}; its text names beta = 0.2, the other values are ours.",
    )
    yield Table(
        "figure-6", "Weights of the losses, length of the noise (CIFAR-10)", tuple(figure_6(preset)), f"{guess}."
    )
    yield Table(
        "stems",
        "The first 150 rounds with both stems of ResNet-18 (CIFAR-10, beta = 0.3)",
        tuple(stems(preset)),
        note="The paper does not name its stem. Rates fall by the round: these are the first 150 rounds of 1000. "
        "bn-train: fine-tuned with BatchNorm in train mode, as in the released code.",
    )


def ours() -> Iterator[Table]:
    """Not in the paper."""
    preset, note = "correct", "Not in the paper."
    yield Table("small", "The ablation of Table 4 with a small network (CNN, 100 rounds)", tuple(small(preset)), note)
    yield Table("forms", "Forms of FedFTG over FedAvg (ResNet-18, 150 rounds)", tuple(forms(preset)), note)
    yield Table(
        "count-noise",
        "Noise on the label counts (ResNet-18, 150 rounds)",
        tuple(count_noise(preset)),
        note="The paper says that noise of less than 10 % costs less than 0.1 points, and not what the 10 % are of.",
    )
    yield Table(
        "centralised",
        "All data in one place (ResNet-18)",
        tuple(centralised()),
        note="The first line of Table 1; the paper does not say how it was trained, 200 epochs are ours.",
    )
    yield Table("options", "MOON's strength, which the paper tuned and does not print", tuple(searched(preset)), note)


RECIPE = Recipe(
    paper="fedftg",
    title="Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID FL (Zhang et al., CVPR 2022)",
    presets=PRESETS,
    tables={
        preset: {table.name: table for table in (*tables(preset), *(ours() if preset == "correct" else ()))}
        for preset in PRESETS
    },
)
