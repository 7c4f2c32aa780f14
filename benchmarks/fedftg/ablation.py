"""What the parts of FedFTG do to accuracy with small networks, on data that come with the package.

    python benchmarks/fedftg/ablation.py [--scene mild] [--seeds 3] [--first-seed 0] [--rounds 30]
                                         [--rows fedavg,default,no-hsm] [--json FILE]

The modules and losses of the paper's Table 4, each of them left out, and forms of the method, one at a time, in one of
these scenes:

    mild, skewed, all    Fashion-MNIST in small, an MLP: LDA 0.3 and 10 of 20 clients a round; the quick start's split,
                         LDA 0.05 and 5 of 50; LDA 0.2 and all of 8
    norm, norm-skewed    ResNet-8 with BatchNorm on digits of 8x8 pixels, 5 of 10 clients: LDA 0.3; LDA 0.1

A seed decides the split, the first model, the cohorts and the noise, the same for all rows. A row takes 6 to 20 seconds
a seed on one core, `each` up to 45.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedstill import Experiment, run
from fedstill.experiment.build import build_federation
from fedstill.methods.lookup import write
from fedstill.report.table import align

LOCAL = {"steps": 10, "batch_size": 50, "lr": 0.1, "lr_decay": 0.98}
MILD = Experiment(
    name="ablation",
    rounds=30,
    cohort=10,
    data={"source": "fashion-mini"},
    partition={"scheme": "lda", "clients": 20, "alpha": 0.3},
    model={"name": "mlp", "hidden": [64], "init": "torch"},
    local=LOCAL,
    engine={"device": "cpu", "threads": 1},
)
NORM = MILD.replace(
    rounds=15,
    cohort=5,
    data={"source": "digits"},
    partition={"scheme": "lda", "clients": 10, "alpha": 0.3},
    model={"name": "resnet8"},
)
SCENES = {
    "mild": MILD,
    "skewed": MILD.replace(
        rounds=40,
        cohort=5,
        data={"source": "fashion-mini", "unlabeled": 1000},
        partition={"scheme": "lda", "clients": 50, "alpha": 0.05},
    ),
    "all": MILD.replace(cohort=8, partition={"scheme": "lda", "clients": 8, "alpha": 0.2}),
    "norm": NORM,
    "norm-skewed": NORM.replace(partition={"scheme": "lda", "clients": 10, "alpha": 0.1}),
}
NOTHING_ASKED = {"labels": "uniform", "ensemble": "uniform"}  # and no label counts sent
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-hsm": {"discrepancy": "none"},
    "no-cls": {"labels": "uniform"},
    "no-abe": {"ensemble": "uniform"},
    "no-hsm-cls-abe": {"discrepancy": "none", **NOTHING_ASKED},
    "no-loss-cls": {"generator.lam_cls": 0.0},
    "no-loss-dis": {"generator.lam_dis": 0.0},
    "no-loss-cls-dis": {"generator.lam_cls": 0.0, "generator.lam_dis": 0.0},
    "mse": {"discrepancy": "mse", "student_loss": "mse"},
    "each": {"clients": "each"},
    "joint": {"clients": "joint"},
    "kl": {"discrepancy": "kl"},
    "low-rate": {"student.lr": 0.01},
    "short": {"iterations": 4},
    "no-hsm-short": {"discrepancy": "none", "iterations": 4},
    "class-scale": {"student_scale": "class"},
    "batch-scale": {"student_scale": "batch"},
    "paper": {
        "discrepancy": "kl",
        "discrepancy_through": "both",
        "student_loss": "reverse_kl",
        "student_scale": "batch",
        "student.batch_norm": "train",
    },
    "released": {"clients": "each", "cls_weights": "client", "student.batch_norm": "train"},
    "bn-train": {"student.batch_norm": "train"},
    "bn-frozen": {"student.batch_norm": "frozen"},
    "bn-restore": {"student.batch_norm": "restore"},
    "bn-reestimate": {"student.batch_norm": "train", "reestimate": True},
}
RELEASED = f"{Path(__file__).resolve().with_name('released.py')}:fedftg"  # with fedftg's defaults it is fedftg
ROWS = {"fedavg": "fedavg", **{name: write(RELEASED, options) for name, options in FORMS.items()}}
ROWS["paper"] += '+average(weighting="uniform")'
ROWS |= {name: name for name in ("scaffold", "scaffold+fedftg")}
POOLED = {"pool": "probabilities"}  # the paper's code; feddf_gen's default is FedDF's own, the mean of logits
ROWS["feddf_gen"] = write("feddf_gen", POOLED)
ROWS |= {
    f"feddf_gen-{name}": write("feddf_gen", {**POOLED, **FORMS[name]})
    for name in ("bn-train", "bn-frozen", "bn-restore")
}
TAIL = 5  # rounds that "last" is the mean of: single rounds jump by several points
BASE = "fedavg"


@dataclass
class Measurements:
    """One row over its seeds, in percent."""

    last: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


Study = dict[str, Measurements]


def setting_of(options: argparse.Namespace, seed: int) -> Experiment:
    setting = SCENES[options.scene]
    return setting.replace(seed=seed, rounds=options.rounds or setting.rounds)


def study(options: argparse.Namespace) -> Study:
    by_row: Study = {row: Measurements() for row in options.rows}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        setting = setting_of(options, seed)
        federation = build_federation(setting)
        for row in options.rows:
            begun = time.perf_counter()
            history = run(setting.replace(method=ROWS[row]), federation=federation, pictures=False).history
            accuracy = [100 * row["accuracy"] for row in history.rows]
            by_row[row].seconds.append(time.perf_counter() - begun)
            by_row[row].last.append(statistics.fmean(accuracy[-TAIL:]))
            by_row[row].best.append(max(accuracy))
            line = f"{accuracy[-1]:.1f} {by_row[row].last[-1]:.1f} in {by_row[row].seconds[-1]:.1f} s"
            print(f"seed {seed} {row} {line}", file=sys.stderr, flush=True)
    return by_row


def mean_text(seeds: Sequence[float], sign: str = "") -> str:
    spread = f" ± {statistics.stdev(seeds):.1f}" if len(seeds) > 1 else ""
    return f"{statistics.fmean(seeds):{sign}.1f}{spread}"


def gain(by_row: Mapping[str, Measurements], row: str) -> str:
    """Over FedAvg of the same seed: the spread is that of the differences."""
    if BASE not in by_row or row == BASE:
        return "-"
    return mean_text([value - base for value, base in zip(by_row[row].last, by_row[BASE].last, strict=True)], "+")


def table(by_row: Mapping[str, Measurements]) -> list[tuple[str, ...]]:
    lines = [("row", f"last {TAIL}", "over FedAvg", "best", "seconds")]
    for row, numbers in by_row.items():
        lines.append(
            (
                row,
                mean_text(numbers.last),
                gain(by_row, row),
                mean_text(numbers.best),
                f"{statistics.fmean(numbers.seconds):.1f}",
            )
        )
    return lines


def some_rows(text: str) -> list[str]:
    names = list(ROWS) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"no row {', '.join(unknown)}: there are {', '.join(ROWS)}")
    return names


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scene", default="mild", choices=tuple(SCENES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="fresh seeds, for what was picked by looking at 0 to 2"
    )
    parser.add_argument("--rounds", type=int, default=0, help="0: the scene's")
    parser.add_argument("--rows", type=some_rows, default="all", help=f"all, or some of {', '.join(ROWS)}")
    parser.add_argument("--json", default="")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    by_row = study(options)
    print(align(table(by_row)))
    if options.json:
        numbers_by_row = {row: asdict(numbers) for row, numbers in by_row.items()}
        Path(options.json).write_text(json.dumps(numbers_by_row, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
