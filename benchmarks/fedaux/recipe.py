"""FedAUX (Sattler et al., 2021): Tables I to III, Figures 4 and 6 to 9 as experiments. Choices: see README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedstill.bench import Cell, Recipe, Table
from fedstill.experiment.config import Experiment
from fedstill.methods.lookup import write

PRESETS = {
    "correct": "the form that can give the tables: the sum of losses, no noise and no claim; everything in eval mode",
    "paper": "what the text says: the mean of losses, lambda = 0.1, epsilon = 0.1, which leaves the scores nearly flat",
    "released": "the public code: the sum, an intercept, noise for the mean; BatchNorm by the batch, Adam goes on",
}

CIFAR10 = {"source": "uoft-cs/cifar10"}
AUXILIARY = {  # a folder of this name below --data; tiny is for those who have none of the paper's
    "stl10": "stl10",
    "cifar100": "uoft-cs/cifar100",
    "svhn": "ufldl-stanford/svhn:cropped_digits",
    "tiny": "tiny_imagenet",
}
MAIN, SIDE = ("stl10", "cifar100", "tiny"), ("stl10", "tiny")
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet8": {"name": "resnet8_wide"},
    "mobilenet": {"name": "mobilenet_v2", "width": 0.5},
    "shufflenet": {"name": "shufflenet"},
    "mixed": {"name": "mixed", "prototypes": ["resnet8_wide", "mobilenet_v2(width=0.5)", "shufflenet"]},
}

# Section VI-A: clients Adam 1e-3, batches of 32, one epoch; distillation Adam 5e-5, batches of 128, one epoch.
LOCAL = {"optimizer": "adam", "lr": 1e-3, "batch_size": 32, "epochs": 1}
TRAIN_MODE = f"{Path(__file__).parent}/train_mode.py:in_train_mode"  # as the released code measures
SETTING = Experiment(name="fedaux", rounds=100, checkpoint_every=25, local=LOCAL)
STUDENT: dict[str, Any] = {"lr": 5e-5, "lr_schedule": "constant", "clip": None}
STEPS_LIKE_STL10 = {"tiny": 5}  # epochs: 16,000 rows five times are the 625 steps that 80,000 of STL-10 are
# One extractor for all seeds and methods of a network and an auxiliary set: these words must be the same everywhere.
SIMCLR = {"training.epochs": 100, "training.seed": 0}
EVENLY = {"aggregate": 'average(weighting="uniform")', "buffers": "local"}  # as the released code averages
BY_SIZE = {"aggregate": "average"}  # FedDF's own average would be even
RELEASED_FORMS = Path(__file__).with_name("released.py")  # FedDF and FedAUX of the public code

SCORES: dict[str, dict[str, Any]] = {
    "correct": {"form": "sum", "lam": 0.01},
    "paper": {"form": "mean", "lam": 0.1, "gamma": "both"},
}
FEDBE: dict[str, Any] = {
    "samples": 10,
    "distill_share": 0.8,  # as FedDF and FedAUX
    "student": {"optimizer": "adam", "lr": 5e-5, "lr_schedule": "constant", "weight_decay": 0.0},
}

PLAIN = ("fedavg", "fedprox", "feddf", "fedbe")
TABLE_1 = (*PLAIN, *(f"{name}+p" for name in PLAIN), "fedaux")
TABLE_3 = ("fedavg", "fedprox", "feddf", "fedavg+p", "fedprox+p", "feddf+p", "fedaux")
DISTILLED = ("feddf", "feddf+p", "fedaux")
LINEAR = (*(f"{name}+p" for name in PLAIN), "fedaux")
TEXT = ("fedavg+p", "feddf+p", "fedaux")
ALPHAS = (0.01, 0.04, 0.16, 10.24, 100.0)  # those of Tables I and III
ONE_SHOT = (0.01, 0.04, 0.16, 10.24)
SHARES = (0.2, 0.4, 0.8)  # C
SCORERS = ("uniform", "kde", "isolation_forest", "one_class_svm", "two_class_svm", "logistic")
LAMBDAS = (1e-1, 1e-2, 1e-3, 1e-4)
BUDGETS = {  # Figure 8; the text names 0.04 with 1e-6, and 0.1 with 1e-5 as its default
    "epsilon-1": (1.0, 1e-5),
    "epsilon-0.1": (0.1, 1e-5),
    "epsilon-0.04": (0.04, 1e-6),
    "epsilon-0.01": (0.01, 1e-5),
}
EPSILONS = (8.0, 1.0, 0.1)  # of ours
MUS = (0.001, 0.01, 0.1, 1.0)
CLIENTS: dict[str, dict[str, Any]] = {  # how they train; the first is the paper's
    "adam-0.001": {},
    "adam-0.0001": {"lr": 1e-4},
    "adam-goes-on": {"keep_optimizer": True},
    "sgd-0.01": {"optimizer": "sgd", "lr": 0.01},
}

# Text: the supplement that says how is not to be had; all of it is our choice.
WORDS = {"source": "fancyzhx/ag_news", "tokens": 64, "vocabulary": 8192}
TEXTS: dict[str, dict[str, Any]] = {
    "bookcorpus": {"unlabeled": "bookcorpus/bookcorpus", "unlabeled_limit": 100_000},
    "shakespeare": {"unlabeled": "shakespeare"},
    "held-out": {"unlabeled": 3000},
}
NEXT_TOKEN = {"bookcorpus": 3, "shakespeare": 10, "held-out": 30}  # epochs: about 9,000, 10,000 and 2,800 steps
TEXT_LOCAL, TEXT_STUDENT, TEXT_EPOCHS = {"lr": 5e-4}, {"lr": 5e-4}, 5


def method_of(row: str, preset: str, auxiliary: str, **changes: Any) -> str:
    """`feddf+p` as `feddf(...)+simclr(training.epochs=100, training.seed=0)`; FedAUX is always pre-trained."""
    name, _, pretrained = row.partition("+")
    text = written(name, preset, options(name, preset, passes(preset, auxiliary)), changes)
    return f"{text}+{write('simclr', SIMCLR)}" if pretrained or name == "fedaux" else text


def written(name: str, preset: str, defaults: dict[str, Any], changes: dict[str, Any]) -> str:
    """The text of one method. FedDF and FedAUX of the public code stand in released.py."""
    full = {**defaults, **changes}
    if "student" in changes:
        full["student"] = {**defaults.get("student", {}), **changes["student"]}
    released = preset == "released" and name in ("feddf", "fedaux")
    return write(f"{RELEASED_FORMS}:{name}" if released else name, full)


def passes(preset: str, auxiliary: str) -> int:
    """Over the rows that are distilled on, in a round."""
    return STEPS_LIKE_STL10.get(auxiliary, 1) if preset == "correct" else 1


def options(name: str, preset: str, epochs: int) -> dict[str, Any]:
    """Of a method in a preset; epochs of the distillation."""
    if name == "fedaux":
        return {**bare(preset, epochs), **({} if preset == "correct" else noise(preset, 0.1, 1e-5))}
    if name == "feddf":
        if preset == "released":
            return {} if epochs == 1 else {"student": {"epochs": epochs}}
        return {"distill_share": 0.8, "student": {"epochs": epochs, **STUDENT}}
    if name == "fedbe":
        return {**FEDBE, "student": {"epochs": epochs, **FEDBE["student"]}}
    return {"fedavg": {}, "fedprox": {"mu": 0.1}}[name]


def noise(preset: str, epsilon: float, delta: float) -> dict[str, Any]:
    """The noise that the paper prints; the public code has no other."""
    return {"epsilon": epsilon, "delta": delta, **({} if preset == "released" else {"mechanism": "classic"})}


def bare(preset: str, epochs: int) -> dict[str, Any]:
    """FedAUX without noise."""
    if preset == "released":
        return {} if epochs == 1 else {"student": {"epochs": epochs}}
    return {**SCORES[preset], "student": {"epochs": epochs, **STUDENT}}


def setting(preset: str, data: dict[str, Any], *, clients: int, alpha: float, **changes: Any) -> Experiment:
    """A scene without its method; changes: `local` is merged, other keys replace."""
    local = {**LOCAL, **changes.pop("local", {})}
    keys: dict[str, Any] = {
        "data": data,
        "partition": {"scheme": "fedaux", "clients": clients, "alpha": alpha},
        "model": NETWORKS["resnet8"],
        "server": EVENLY if preset == "released" else BY_SIZE,
        **changes,
    }
    if preset == "released":
        local, keys = {**local, "keep_optimizer": True}, {**keys, "evaluate": TRAIN_MODE}
    return SETTING.replace(**keys, local=local)


def pictures(preset: str, auxiliary: str, **changes: Any) -> Experiment:
    return setting(preset, {**CIFAR10, "unlabeled": AUXILIARY[auxiliary]}, **changes)


def cells(
    rows: Iterable[str], column: str, scene: Experiment, preset: str, auxiliary: str, **changes: Any
) -> Iterator[Cell]:
    for row in rows:
        options = {} if row.startswith(("fedavg", "fedprox")) else changes
        yield Cell(row, column, scene.replace(method=method_of(row, preset, auxiliary, **options)))


def table_1(preset: str) -> Iterator[Cell]:
    for auxiliary in MAIN:
        for alpha in (0.01, 100.0):
            for share in SHARES:
                scene = pictures(preset, auxiliary, clients=20, alpha=alpha, cohort=share)
                yield from cells(TABLE_1, f"{auxiliary}-alpha-{alpha:g}-c-{share:g}", scene, preset, auxiliary)


def table_2(preset: str) -> Iterator[Cell]:
    for alpha in (0.01, 100.0):
        for auxiliary in AUXILIARY:
            scene = pictures(preset, auxiliary, clients=40, alpha=alpha, cohort=0.4)
            yield from cells(DISTILLED, f"{auxiliary}-alpha-{alpha:g}", scene, preset, auxiliary)


def table_3(preset: str) -> Iterator[Cell]:
    how: dict[str, Any] = {"clients": 100, "cohort": 100, "rounds": 1, "local": {"epochs": 40}}
    for auxiliary in SIDE:
        for network in ("mobilenet", "shufflenet"):
            for alpha in ONE_SHOT:
                scene = pictures(preset, auxiliary, alpha=alpha, model=NETWORKS[network], **how)
                yield from cells(TABLE_3, f"{auxiliary}-{network}-alpha-{alpha:g}", scene, preset, auxiliary)


def figure_4(preset: str) -> Iterator[Cell]:
    """Without noise: of the scorers only the logistic one could have it."""
    for auxiliary in SIDE:
        scene = pictures(preset, auxiliary, clients=10, alpha=0.01, cohort=10, rounds=10)
        for scorer in SCORERS:
            yield scored(scorer, auxiliary, scene, preset, auxiliary, scorer=scorer)


def scored(row: str, column: str, scene: Experiment, preset: str, auxiliary: str, **changes: Any) -> Cell:
    """FedAUX with scores of another kind, and noise only where `changes` say so."""
    text = written("fedaux", preset, bare(preset, passes(preset, auxiliary)), changes)
    return Cell(row, column, scene.replace(method=f"{text}+{write('simclr', SIMCLR)}"))


def figure_6(preset: str) -> Iterator[Cell]:
    for auxiliary in SIDE:
        for network, model in NETWORKS.items():
            for clients in (20, 80):
                for alpha in ALPHAS:
                    scene = pictures(preset, auxiliary, clients=clients, alpha=alpha, cohort=0.4, model=model)
                    column = f"{auxiliary}-{network}-n{clients}-alpha-{alpha:g}"
                    yield from cells(DISTILLED, column, scene, preset, auxiliary)


def figure_7(preset: str) -> Iterator[Cell]:
    """After the first round and after the last: cohorts and rates do not know how many rounds there are."""
    for name, auxiliary in TEXTS.items():
        for alpha in (0.01, 1.0):
            for rounds in (1, 20):
                how: dict[str, Any] = {"cohort": 10, "rounds": rounds, "local": TEXT_LOCAL, "model": reader(preset)}
                scene = setting(preset, {**WORDS, **auxiliary}, clients=10, alpha=alpha, **how)
                for row in TEXT:
                    method = on_text(row, preset, NEXT_TOKEN[name])
                    yield Cell(row, f"{name}-alpha-{alpha:g}-t{rounds}", scene.replace(method=method))


def reader(preset: str) -> dict[str, Any]:
    """Pre-training on tokens does not reach the layer that BERT reads its first token with; the mean has none."""
    return {"name": "bert", "pool": "mean"} if preset == "correct" else {"name": "bert"}


def on_text(row: str, preset: str, epochs: int) -> str:
    name = row.partition("+")[0]
    changes = {} if name == "fedavg" else {"student": TEXT_STUDENT}
    text = written(name, preset, options(name, preset, TEXT_EPOCHS), changes)
    return f"{text}+{write('next_token', {'training.epochs': epochs, 'training.seed': 0})}"


def figure_8(preset: str) -> Iterator[Cell]:
    """The noise that the paper prints; with the sum of losses it protects nothing."""
    for auxiliary in SIDE:
        scene = pictures(preset, auxiliary, clients=40, alpha=0.01, cohort=0.4, rounds=10)
        for lam in LAMBDAS:
            column = f"{auxiliary}-lambda-{lam:g}"
            yield scored("no-noise", column, scene, preset, auxiliary, lam=lam)
            for row, (epsilon, delta) in BUDGETS.items():
                yield scored(row, column, scene, preset, auxiliary, lam=lam, **noise(preset, epsilon, delta))


def figure_9(preset: str) -> Iterator[Cell]:
    for auxiliary in SIDE:
        for alpha in ALPHAS:
            scene = pictures(preset, auxiliary, clients=80, alpha=alpha, cohort=0.4, local={"part": "head"})
            column = f"{auxiliary}-alpha-{alpha:g}"
            yield from cells(LINEAR, column, scene, preset, auxiliary, student={"part": "head"})


def privacy(preset: str) -> Iterator[Cell]:
    """Figure 8's setting with noise that proves what it says; delta is 1e-5."""
    for auxiliary in SIDE:
        scene = pictures(preset, auxiliary, clients=40, alpha=0.01, cohort=0.4, rounds=10)
        for lam in LAMBDAS:
            column = f"{auxiliary}-lambda-{lam:g}"
            yield scored("sum", column, scene, preset, auxiliary, lam=lam)
            yield scored("mean", column, scene, preset, auxiliary, lam=lam, form="mean")
            for epsilon in EPSILONS:
                claim = {"form": "mean", "lam": lam, "epsilon": epsilon}
                yield scored(f"mean-epsilon-{epsilon:g}", column, scene, preset, auxiliary, **claim)
            yield from cells(("feddf+p",), column, scene, preset, auxiliary)


def searched(preset: str) -> Iterator[Cell]:
    for auxiliary in SIDE:
        scene = pictures(preset, auxiliary, clients=20, alpha=0.01, cohort=0.4)
        for row in ("fedprox", "fedprox+p"):
            for mu in MUS:
                method = method_of(row, preset, auxiliary, mu=mu)
                yield Cell(f"{row}-mu-{mu:g}", auxiliary, scene.replace(method=method))


def clients(preset: str) -> Iterator[Cell]:
    for auxiliary in SIDE:
        for name, local in CLIENTS.items():
            scene = pictures(preset, auxiliary, clients=20, alpha=0.01, cohort=0.4, local=local)
            yield from cells(("fedavg+p", "feddf+p", "fedaux"), f"{auxiliary}-{name}", scene, preset, auxiliary)


def defaults() -> Iterator[Cell]:
    """Table I's hardest columns, the first 30 rounds, with two ways to train clients; FedAUX also with its defaults."""
    for auxiliary in MAIN:
        for images, limit in (("", None), ("-20k", 20_000)):
            data = {**CIFAR10, "unlabeled": AUXILIARY[auxiliary], **({"unlabeled_limit": limit} if limit else {})}
            for training in ("sgd-0.01", "adam-0.001"):
                for share in (0.4, 0.8):
                    how: dict[str, Any] = {"cohort": share, "rounds": 30, "local": CLIENTS[training]}
                    scene = setting("correct", data, clients=20, alpha=0.01, **how)
                    column = f"{auxiliary}{images}-{training}-c-{share:g}"
                    yield from cells(("fedavg+p", "feddf+p", "fedaux"), column, scene, "correct", auxiliary)
                    yield Cell("fedaux-defaults", column, scene.replace(method=f"fedaux+{write('simclr', SIMCLR)}"))


def tables(preset: str) -> Iterator[Table]:
    measure = "Best over rounds, as the paper"
    yield Table("1", "Participation (CIFAR-10, ResNet-8, 20 clients)", tuple(table_1(preset)), note=f"{measure}.")
    yield Table(
        "2",
        "Auxiliary data (CIFAR-10, ResNet-8, 40 clients, C = 0.4)",
        tuple(table_2(preset)),
        note=f"{measure}. The subsets of ImageNet are not published; tiny_imagenet is ours.",
    )
    yield Table(
        "3",
        "One round (CIFAR-10, 100 clients, all of them, 40 epochs)",
        tuple(table_3(preset)),
        note="One round, so that best and last are the same.",
    )
    yield Table(
        "figure-4",
        "Kinds of certainty scores (10 clients, 10 rounds, alpha = 0.01)",
        tuple(figure_4(preset)),
        note="The paper draws bars without numbers; uniform is FedDF+P.",
    )
    yield Table(
        "figure-6",
        "Networks and numbers of clients (CIFAR-10, C = 0.4)",
        tuple(figure_6(preset)),
        note="The paper draws curves; its text names two points. In mixed, each network has a third of the clients.",
    )
    yield Table(
        "figure-7",
        "AG News (10 clients, all of them)",
        tuple(figure_7(preset)),
        note="The paper draws curves; all settings are ours. t1 is after the first round, t20 after the last.",
    )
    yield Table(
        "figure-8",
        "The paper's noise on the scores (40 clients, 10 rounds, alpha = 0.01)",
        tuple(figure_8(preset)),
        note="The noise is the paper's formula. What it says about privacy does not hold in any preset.",
    )
    yield Table(
        "figure-9",
        "Linear evaluation: only the head is trained (80 clients, C = 0.4)",
        tuple(figure_9(preset)),
        note="The paper draws curves without numbers.",
    )
    if preset == "correct":
        yield Table(
            "privacy",
            "What true privacy of the scores costs (40 clients, 10 rounds, alpha = 0.01)",
            tuple(privacy(preset)),
            note="Not in the paper. The sum claims nothing; the mean with epsilon keeps it (delta = 1e-5, one sample).",
        )
        yield Table(
            "options",
            "FedProx's strength, which the paper tuned and does not print (20 clients, C = 0.4, alpha = 0.01)",
            tuple(searched(preset)),
            note="Not in the paper.",
        )
        yield Table(
            "clients",
            "How clients train (20 clients, C = 0.4, alpha = 0.01)",
            tuple(clients(preset)),
            note="Not in the paper, whose clients have Adam at 0.001, new every round.",
        )
        yield Table(
            "defaults",
            "What the name alone gives, and how clients train (20 clients, alpha = 0.01, 30 rounds)",
            tuple(defaults()),
            note="Not in the paper. fedaux has the paper's student, fedaux-defaults the library's. 20k: 20,000 images.",
        )


RECIPE = Recipe(
    paper="fedaux",
    title="FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning (Sattler et al., 2021)",
    presets=PRESETS,
    tables={preset: {table.name: table for table in tables(preset)} for preset in PRESETS},
)
