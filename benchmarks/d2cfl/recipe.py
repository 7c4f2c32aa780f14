"""D2C-FL (Wang et al., 2022): the Figures 4 to 15 as experiments. Choices: see README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedstill.bench import Cell, Recipe, Table
from fedstill.experiment.config import Experiment
from fedstill.methods.lookup import write

PRESETS = {"correct": "what the text says; there is no released code, and what the text leaves open is our choice"}

# Section 4.1: 20,000 train images go to the clients; of the other 40,000 the server tests on a fifth and has the rest
# without labels.
LABELS = {"cifar10": {}, "cifar100": {"label": "fine_label"}}
SHARED_OUT = {"client_rows": 20_000, "test_share": 0.2, "unlabeled": "central"}
UNLABELED = 32_000
SIZES = {"cifar10": 600, "cifar100": 100}  # images of a client
CLASSES = {"cifar10": 10, "cifar100": 100}
MODELS: dict[str, dict[str, Any]] = {"cnn": {"name": "lenet5"}, "resnet8": {"name": "resnet8", "norm": "batch"}}
LOCAL = {"epochs": 5, "batch_size": 128, "optimizer": "adam", "lr": 1e-3, "lr_epoch_decay": 0.95}
PLAIN_SGD = {"epochs": 5, "batch_size": 128, "optimizer": "sgd", "lr": 1e-3}  # Figure 15: a constant rate
BY_SIZE = {"aggregate": "average"}  # FedDF's own average would be even
SETTING = Experiment(name="d2cfl", rounds=100, cohort=10, checkpoint_every=50, server=BY_SIZE)

ROLLBACK: dict[tuple[str, str], dict[str, float]] = {  # Section 4.1, "Training Details"
    ("cnn", "cifar10"): {"mix_alpha": 0.2, "beta": 0.7},
    ("cnn", "cifar100"): {"mix_alpha": 0.2, "beta": 0.4},
    ("resnet8", "cifar10"): {"mix_alpha": 0.8, "beta": 0.9},
    ("resnet8", "cifar100"): {"mix_alpha": 0.2, "beta": 0.4},
}
LITERAL: dict[str, Any] = {  # the text's form, which is not the method's default (docs/methods/d2cfl.md)
    "threshold": 0.75,
    "rule": "max",
    "labels": "hard",
    "student_start": "carried",
    "student_share": "fixed",
    "feedback": True,
    "student": {"lr": 1e-3, "lr_schedule": "constant", "lr_epoch_decay": 0.95},
}
STUDENT = {"epochs": 5, "lr_schedule": "constant", "lr_epoch_decay": 0.95, "clip": None}
FEDDF = {"labels": "hard", "warm_up": 10, "student": STUDENT}
FEDBE = {
    "sampling": "dirichlet",
    "with_average": False,
    "with_clients": False,
    "labels": "hard",
    "warm_up": 10,
    "student": {**STUDENT, "optimizer": "adam", "weight_decay": 0.0, "average_after": None, "reestimate": False},
}
DEFAULT = ("cnn", "cifar10")
SPLITS = ("iid", "0.8-bias", "2-class")
ROWS = ("fedavg", "feddf", "fedbe", "d2cfl")
ALPHAS, BETAS = (0.0, 0.2, 0.5, 0.8, 1.0), (0.0, 0.4, 0.7, 1.0)
TEACHERS = (1, 5, 10, 20)
SERVER_SETS = (10_000, 20_000, 30_000, 40_000)  # Figure 13; four fifths of them are trained on
CENTRALISED: dict[str, dict[str, Any]] = {
    "centralised-40k": {"client_rows": 40_000, "test_share": 0.4},  # 0.4 x 20,000: the same 8,000 test images
    "centralised-50k": {},  # all train images, the official test set
}


def method_of(row: str, pair: tuple[str, str], **changes: Any) -> str:
    """FedDF and FedBE as the paper ran them: hard labels, learnt as D2C-FL's student learns them."""
    options = {"feddf": FEDDF, "fedbe": FEDBE, "d2cfl": {**LITERAL, **ROLLBACK[pair]}}.get(row, {})
    student = {**options.get("student", {}), **changes.pop("student", {})}
    return write(row, {**options, **changes, **({"student": student} if student else {})})


def partition(split: str, data: str) -> dict[str, Any]:
    """Clients draw from queues of the pool's classes and share images; IID is equally many of every class."""
    common = {"clients": 100, "size": SIZES[data]}
    if split == "0.8-bias":
        return {"scheme": "bias", "bias": 0.8, **common}
    classes = 2 if split == "2-class" else CLASSES[data]
    return {"scheme": "n_class", "classes_per_client": classes, **common}


def source(data: str) -> dict[str, Any]:
    return {"source": f"uoft-cs/{data}", **LABELS[data]}


def scene(pair: tuple[str, str], split: str, *, unlabeled: int = UNLABELED, **changes: Any) -> Experiment:
    """One network, data set and split without its method; unlabeled: images that the server may learn from."""
    model, data = pair
    rows = {**source(data), **SHARED_OUT, **({} if unlabeled == UNLABELED else {"unlabeled_limit": unlabeled})}
    kept = {"data": rows, "partition": partition(split, data), "model": MODELS[model], "local": LOCAL}
    return SETTING.replace(**{**kept, **changes})


def column(pair: tuple[str, str], split: str) -> str:
    return f"{pair[0]}-{pair[1]}-{split}"


def compared(pair: tuple[str, str], split: str, rows: Iterable[str] = ROWS) -> tuple[Cell, ...]:
    setting = scene(pair, split)
    return tuple(Cell(row, column(pair, split), setting.replace(method=method_of(row, pair))) for row in rows)


def centralised(row: str, pair: tuple[str, str]) -> Cell:
    """One client with all the labels: five epochs a round at the clients' own schedule, FedAvg of one."""
    data = {**source(pair[1]), **CENTRALISED[row]}
    alone = {"scheme": "iid", "clients": 1}
    setting = scene(pair, "iid", data=data, partition=alone, cohort=1, method="fedavg")
    return Cell(row, f"{pair[0]}-{pair[1]}", setting)


def figure_4() -> Iterator[Cell]:
    """Both rollbacks; at alpha = 1 it is FedAvg for every beta, so that stands once."""
    for split in ("0.8-bias", "2-class"):
        setting = scene(DEFAULT, split, unlabeled=8_000)
        for alpha in ALPHAS:
            for beta in BETAS if alpha < 1 else BETAS[:1]:
                method = method_of("d2cfl", DEFAULT, mix_alpha=alpha, beta=beta)
                place = (f"alpha-{alpha:g}", f"{split}-beta-{beta:g}")
                yield Cell(*place, setting.replace(method=method))


def figure_8() -> Iterator[Cell]:
    for pair in ROLLBACK:
        for split in SPLITS:
            yield Cell(f"d2cfl-{split}", f"{pair[0]}-{pair[1]}", compared(pair, split, ("d2cfl",))[0].experiment)
        for row in CENTRALISED:
            yield centralised(row, pair)


def figure_13() -> Iterator[Cell]:
    for split in SPLITS:
        for count in SERVER_SETS:
            setting = scene(DEFAULT, split, unlabeled=count * 4 // 5)
            for row in ("feddf", "fedbe", "d2cfl"):
                yield Cell(row, f"{split}-u-{count}", setting.replace(method=method_of(row, DEFAULT)))


def figure_14() -> Iterator[Cell]:
    for split in SPLITS:
        setting = scene(DEFAULT, split)
        for count in TEACHERS:
            changes = {} if count == 10 else {"past": count}
            method = method_of("d2cfl", DEFAULT, **changes)
            yield Cell(f"teachers-{count}", column(DEFAULT, split), setting.replace(method=method))


def figure_15() -> Iterator[Cell]:
    sgd = {"student": {"optimizer": "sgd", "lr_epoch_decay": 1.0}, "mix_alpha": 0.2, "beta": 0.8}
    for split in SPLITS:
        for row, momentum in (("sgd", 0.0), ("sgd-momentum", 0.9)):
            training = {**PLAIN_SGD, "momentum": momentum}
            method = method_of("d2cfl", DEFAULT, **sgd)
            yield Cell(row, column(DEFAULT, split), scene(DEFAULT, split, local=training, method=method))
        yield Cell("adam", column(DEFAULT, split), compared(DEFAULT, split, ("d2cfl",))[0].experiment)


def rules() -> Iterator[Cell]:
    for split in SPLITS:
        setting = scene(DEFAULT, split)
        for rule in ("max", "mean"):
            method = method_of("d2cfl", DEFAULT, **({} if rule == "max" else {"rule": rule}))
            yield Cell(f"rule-{rule}", column(DEFAULT, split), setting.replace(method=method))


def defaults() -> Iterator[Cell]:
    """The library's own form of D2C-FL beside FedAvg, whose runs are those of Figures 5 to 7."""
    for pair in ROLLBACK:
        for split in SPLITS:
            setting = scene(pair, split)
            yield Cell("fedavg", column(pair, split), setting.replace(method="fedavg"))
            yield Cell("d2cfl-defaults", column(pair, split), setting.replace(method="d2cfl"))


def accuracy_figures() -> Iterator[Table]:
    drawn = "The paper draws curves; its text says how far D2C-FL is above the best of the others, at most"
    named: Mapping[str, tuple[str, str]] = {
        "figure-5": ("iid", "IID clients"),
        "figure-6": ("0.8-bias", "Clients with a favourite class (80 %)"),
        "figure-7": ("2-class", "Clients with two classes"),
    }
    for name, (split, title) in named.items():
        cells = tuple(cell for pair in ROLLBACK for cell in compared(pair, split))
        yield Table(name, title, cells, note=f"{drawn}.")


def label_figures() -> Iterator[Table]:
    titles = {"cnn": "CNN", "resnet8": "ResNet-8", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
    pairs = (("cnn", "cifar10"), ("cnn", "cifar100"), ("resnet8", "cifar10"), ("resnet8", "cifar100"))
    for number, pair in enumerate(pairs, 9):
        cells = tuple(cell for split in SPLITS for cell in compared(pair, split))
        title = f"Accuracy and number of the pseudo-labels ({titles[pair[0]]}, {titles[pair[1]]})"
        yield Table(f"figure-{number}", title, cells, note="The runs of Figures 5 to 7.")


def tables() -> Iterator[Table]:
    guess = "The paper prints no numbers"
    yield Table(
        "figure-4",
        "Rollback of teacher and student (CNN, CIFAR-10)",
        tuple(figure_4()),
        note=f"{guess} and does not say its grid. alpha = 1 is FedAvg, whatever beta is.",
    )
    yield from accuracy_figures()
    yield Table(
        "figure-8",
        "Beside training on labels in one place",
        tuple(figure_8()),
        note=f"{guess}. It has 40,000 and 60,000 labels; 60,000 would be all images, those of the test too.",
    )
    yield from label_figures()
    yield Table("figure-13", "Size of the unlabeled set (CNN, CIFAR-10)", tuple(figure_13()), note=f"{guess}.")
    yield Table(
        "figure-14",
        "Number of teachers (CNN, CIFAR-10)",
        tuple(figure_14()),
        note=f"{guess}; its text names 1 and 10 teachers, the other numbers are ours.",
    )
    yield Table(
        "figure-15",
        "SGD with a constant rate instead of Adam (CNN, CIFAR-10)",
        tuple(figure_15()),
        note=f"{guess}. It does not say whether SGD has momentum: both.",
    )
    yield Table(
        "options",
        "Who labels: the surest teacher or the mean of all (CNN, CIFAR-10)",
        tuple(rules()),
        note="Not among the paper's figures: Section 3.2 defines both rules and compares them nowhere.",
    )
    yield Table(
        "defaults",
        "What the name alone gives: the library's form of D2C-FL",
        tuple(defaults()),
        note="Not in the paper. Soft labels, a bounded share of the student, and the average is sent to the clients.",
    )


RECIPE = Recipe(
    paper="d2cfl",
    title="Migrating Federated Learning to Centralized Learning with Unlabeled Data: D2C-FL (Wang et al., 2022)",
    presets=PRESETS,
    tables={preset: {table.name: table for table in tables()} for preset in PRESETS},
)
