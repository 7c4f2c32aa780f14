"""Prove that a change of the code changes no number that fedstill computes.

    python tools/same_results.py record FOLDER              run every case, write weights and rows to FOLDER
    python tools/same_results.py check FOLDER               run every case again and compare with FOLDER
    python tools/same_results.py check FOLDER --only scaf   only the cases whose name contains "scaf"
    python tools/same_results.py compare OLD_SRC NEW_SRC    record both source trees, each in its own process, compare

A case is a small experiment of three rounds on one CPU thread. Two runs are equal if every tensor has the same name,
type, shape and values, without any tolerance, and every round the same accuracy, loss, accepted uploads and bytes.
The exit code is 1 if one case differs or fails. PYTHONPATH decides which fedstill is run.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
Table = dict[str, Any]

TENSORS_FILE = "weights.safetensors"
SUMMARY_FILE = "summary.json"
ROW_KEYS = (
    "accuracy", "train_loss", "accepted", "bytes_up", "bytes_down", "bytes_prepared", "bytes_prepared_down",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One experiment: the method's text, and the sections that differ from the small standard experiment.

    `old` and `new` are laid over the table for a tree whose experiments have the key `algorithm`, or `method`.
    Either may hold the key `method`, which replaces the text.
    """

    name: str
    method: str
    table: Table = field(default_factory=dict)
    old: Table = field(default_factory=dict)
    new: Table = field(default_factory=dict)


class Outcome(NamedTuple):
    """All numbers of one run that are compared."""

    tensors: dict[str, Tensor]
    summary: dict[str, Any]


# ---- The cases ------------------------------------------------------------------------------------------------------

STANDARD: Table = {
    "rounds": 3,
    "cohort": 4,
    "seed": 5,
    "data": {"source": "digits", "test_limit": 120},
    "partition": {"scheme": "lda", "clients": 12, "alpha": 1.0},
    "model": {"name": "mlp", "hidden": [16], "init": "torch"},
    "local": {"steps": 8, "batch_size": 16, "lr": 0.2},
    "engine": {"name": "auto", "device": "cpu"},
}

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
POOL: Table = {"data": {"unlabeled": 96}}
VALIDATED: Table = {"data": {"unlabeled": 96, "validation": 60}}
TWO_NETWORKS: Table = {
    "model": {"name": "mixed", "prototypes": ['mlp(hidden=[16], init="torch")', 'mlp(hidden=[12, 8], init="torch")']}
}
MIXED: Table = {**TWO_NETWORKS, **POOL}
BATCH_NORM: Table = {"model": {"name": "resnet8"}, "local": {"steps": 2, "batch_size": 8}, "data": {"test_limit": 40}}
LETTERS: Table = {
    "data": {"source": "plays.csv", "inputs": ["text"], "window": 8},
    "partition": {"scheme": "natural", "clients": 0, "keys": ["user"]},
    "model": {"name": "char_lstm", "hidden": 8, "layers": 1},
}
NEWS: Table = {
    "data": {"source": "news.csv", "inputs": ["text"], "label": "label", "tokens": 10, "unlabeled": 24},
    "partition": {"scheme": "iid", "clients": 6},
    "model": {"name": "bert", "layers": 1, "hidden": 8, "heads": 2, "inner": 8},
    "local": {"steps": 2, "batch_size": 4, "optimizer": "adamw", "lr": 0.01},
}
FASHION: Table = {"source": "fashion-mini", "test_limit": 40}
STUDENT = "steps=5, batch_size=16"
HARD = 'labels="hard", threshold=0.3, epochs=2, batch_size=16'
DISTILLING = "avglogit|avgprob|feddf|fedaux|fedbe|mrtf|d2cfl"  # methods whose student's options became dotted
DOTTED = {
    **{key: f"student.{key}" for key in ("steps", "epochs", "batch_size", "optimizer", "clip", "temperature", "part")},
    **{key: f"student.{key}" for key in ("lr_schedule", "lr_epoch_decay", "keep_optimizer", "patience", "look_every")},
    "server_lr": "student.lr",
    "cycle": "student.lr_cycle",
    "swa_after": "student.average_after",
}
INVENTING = {"generator_steps": "generator.steps", "student_steps": "student.steps", "noise": "generator.noise"}
PRETRAINED = {key: f"training.{key}" for key in ("epochs", "batch_size")} | {"pretrain_seed": "training.seed"}
OF_GENERATORS = {
    **dict.fromkeys(("fedftg", "feddf_gen"), INVENTING),
    **dict.fromkeys(("simclr", "masked_lm", "next_token"), PRETRAINED),
    "fedgen": {key: f"generator.{key}" for key in ("steps", "batch_size", "noise")},
}
AS_MRTF = 'student.lr=3e-4, student.lr_schedule="constant", student.batch_size=64, student.clip=none'
AS_FEDAUX = 'student.epochs=1, student.lr=5e-5, student.lr_schedule="constant", student.clip=none'
AS_D2CFL = (
    'labels="hard", warm_up=0, threshold=0.3, student.epochs=5, student.lr_schedule="constant", '
    "student.lr_epoch_decay=0.95, student.clip=none"
)
HARD_SAMPLES = "iterations=2, student_steps=2, batch_size=8, noise=6"
FEATURES = "gen_batch=5, steps=4, batch_size=8, noise=6"
INVENTED = "generator_steps=3, student_steps=3, batch_size=8, noise=6"


def dotted(text: str) -> str:
    """Return a method's text with the options of its student, its generator and its pre-training in the new words."""

    def inside(call: re.Match[str]) -> str:
        words = OF_GENERATORS.get(call[1], DOTTED)
        return re.sub(r"\b(\w+)=", lambda key: f"{words.get(key[1], key[1])}=", call[0])

    return re.sub(rf"\b({DISTILLING}|{'|'.join(OF_GENERATORS)})\([^()]*\)", inside, text)


def released(paper: str, method: str) -> Table:
    """Return the new words of a form that only a paper's public code has."""
    return {"method": f"{BENCHMARKS / paper / 'released.py'}:{dotted(method)}"}


def cnn(*, network: str = "convnet", **sections: Any) -> Table:
    """A table with a small convolutional network."""
    return {"model": {"name": network}, "local": {"steps": 2, "batch_size": 8}, **sections}


CASES = (
    # Every method alone
    Case("fedavg", "fedavg"),
    Case("fedprox", "fedprox(mu=0.1)"),
    Case("fedavgm", "fedavgm(beta=0.7)"),
    Case("fedadam", "fedadam(server_lr=0.01)"),
    Case("fedyogi", "fedyogi"),
    Case("fedadagrad", "fedadagrad"),
    Case("fedopt_sgd", "fedopt"),
    Case("fedopt_adam", 'fedopt(optimizer="adam", server_lr=0.001)'),
    Case("scaffold", "scaffold"),
    Case("scaffold_option_1", 'scaffold(option="I", global_lr=0.5)'),
    Case(
        "scaffold_control_weighting",
        'scaffold(weighting="size", control_weighting="uniform")',
        new=released("fedlmd", "scaffold"),
    ),
    Case("fednova", "fednova", {"local": {"steps": None, "epochs": 2}}),
    Case(
        "fednova_released",
        'fednova(correction="released")',
        {"local": {"momentum": 0.9}},
        new=released("fedlmd", "fednova"),
    ),
    Case("feddyn", "feddyn(alpha=0.1)"),
    Case("fedcurv", "fedcurv(lam=0.1)"),
    Case("fedcurv_per_sample", 'fedcurv(lam=0.1, fisher="per_sample")'),
    Case("moon", "moon(mu=1.0)", {"cohort": 8}),
    Case(
        "moon_start",
        'moon(mu=1.0, previous="start")',
        {"cohort": 8, "model": {"projection": 8}},
        new={"method": f'{BENCHMARKS}/fedlmd/released.py:moon(mu=1.0, previous="start")'},
    ),
    Case(
        "moon_init",
        'moon(mu=1.0, previous="init")',
        {"cohort": 8},
        new={"method": f"{BENCHMARKS}/fedlmd/released.py:moon(mu=1.0)"},
    ),
    Case("fedmmd", "fedmmd(lam=0.1)"),
    Case("kd", "kd(tau=2.0)"),
    Case("fedntd", "fedntd"),
    Case("fedntd_tf", "fedntd_tf"),
    Case("fedlmd", "fedlmd"),
    Case("fedlmd_tf", "fedlmd_tf(tau=2.0)"),
    Case("label_smoothing", "label_smoothing"),
    Case("fedrs", "fedrs"),
    Case("fedrs_proportional", 'fedrs(rule="proportional")'),
    Case("avglogit", f"avglogit({STUDENT}, clip=1.0)", POOL),
    Case("avgprob", f"avgprob({STUDENT}, temperature=2.0)", POOL),
    Case("feddf", f"feddf({STUDENT})", POOL),
    Case("feddf_sgd_head", f'feddf({STUDENT}, optimizer="sgd", part="head", distill_share=0.8, warm_up=1)', POOL),
    Case("feddf_keep_optimizer", f"feddf({STUDENT}, keep_optimizer=true, feedback=false)", POOL),
    Case("feddf_hard_labels", f"feddf({HARD}, lr_epoch_decay=0.9)", POOL),
    Case("feddf_probabilities", f'feddf({STUDENT}, pool="probabilities", temperature=2.0, exponent=2.0)', POOL),
    Case("feddf_gen", f"feddf_gen({INVENTED})"),
    Case("feddf_gen_classes", f'feddf_gen({INVENTED}, ensemble="class", pool="logits", labels="uniform")'),
    Case("fedaux", f"fedaux({STUDENT})", POOL),
    Case("fedaux_odds", f'fedaux({STUDENT}, score="odds", intercept=true, gamma="both", feedback=false)', POOL),
    Case(
        "fedaux_one_class_svm",
        f'fedaux({STUDENT}, scorer="one_class_svm", teacher_mode="train")',
        POOL,
        new=released(
            "fedaux",
            f'fedaux({STUDENT}, scorer="one_class_svm", server_lr=1e-3, lr_schedule="cosine", clip=5.0, '
            "keep_optimizer=false)+average",
        ),
    ),
    Case("fedbe", "fedbe(epochs=4, batch_size=32, server_lr=0.05, cycle=2)", POOL),
    Case(
        "fedbe_dirichlet",
        'fedbe(sampling="dirichlet", epochs=2, batch_size=32, swa_after=1, per_class=true)',
        POOL,
        new=released(
            "fedbe", 'fedbe(sampling="dirichlet", epochs=2, batch_size=32, swa_after=1, lr_schedule="cyclic")'
        ),
    ),
    Case("mrtf", f"mrtf({STUDENT}, warm_up=1)", POOL),
    Case("mrtf_feedback", f'mrtf({STUDENT}, warm_up=0, feedback=true, bounded=false, lr_schedule="cosine")', POOL),
    Case("d2cfl", "d2cfl(warm_up=1, threshold=0.2, epochs=2, batch_size=16)", POOL),
    Case("d2cfl_mean", 'd2cfl(past=2, threshold=0.15, epochs=2, rule="mean", batch_size=16)', POOL),
    Case("fedftg", f"fedftg({HARD_SAMPLES})"),
    Case("fedftg_features", f'fedftg({HARD_SAMPLES}, input="feature")'),
    Case("fedgen", f"fedgen({FEATURES})"),
    Case("update_noise", "update_noise(sigma=0.001, clip=1.0)"),
    Case("dp_fedavg", "dp_fedavg(clip=1.0, noise_multiplier=0.3)"),
    Case("simclr", "simclr(epochs=1, batch_size=32, projection=4, hidden=8)", cnn(data={"unlabeled": 64})),
    Case("masked_lm", "masked_lm(epochs=2, share=0.3, batch_size=8)", NEWS),
    Case("next_token", "next_token(epochs=2, batch_size=8, pretrain_seed=3)", NEWS),
    # The forms that a paper, or its released code, has
    Case(
        "preset_feddf_paper",
        'feddf(preset="paper", steps=5, patience=2, look_every=2)',
        VALIDATED,
        new={"method": "feddf(student.steps=5, student.patience=2, student.look_every=2)"},
    ),
    Case(
        "preset_feddf_mrtf", 'feddf(preset="mrtf", steps=5)', POOL, new={"method": f"feddf({AS_MRTF}, student.steps=5)"}
    ),
    Case(
        "preset_feddf_mrtf_released",
        'feddf(preset="mrtf_released", steps=5)',
        POOL,
        new=released("mrtf", "feddf(steps=5)"),
    ),
    Case(
        "preset_feddf_fedaux",
        'feddf(preset="fedaux", steps=5)',
        POOL,
        new={"method": f"feddf({AS_FEDAUX}, distill_share=0.8)+average"},
    ),
    Case(
        "preset_feddf_fedaux_released",
        'feddf(preset="fedaux_released", steps=5)',
        POOL,
        new=released("fedaux", "feddf"),
    ),
    Case(
        "preset_feddf_d2cfl",
        'feddf(preset="d2cfl", steps=5, warm_up=0, threshold=0.3)',
        POOL,
        new={"method": f"feddf({AS_D2CFL})+average"},
    ),
    Case(
        "preset_feddf_released",
        'feddf(preset="released", steps=5, patience=2, look_every=2)',
        cnn(**VALIDATED),
        new=released("feddf", "feddf(steps=5, patience=2, look_every=2)"),
    ),
    Case(
        "preset_fedaux_paper",
        'fedaux(preset="paper", epsilon=0.9)',
        POOL,
        new={"method": f'fedaux({AS_FEDAUX}, epsilon=0.9, mechanism="classic", form="mean", lam=0.1, gamma="both")'},
    ),
    Case(
        "preset_fedaux_released",
        'fedaux(preset="released", form="mean", intercept=false, epsilon=0.9)',
        POOL,
        new=released("fedaux", 'fedaux(form="mean", intercept=false, epsilon=0.9)'),
    ),
    Case("preset_fedbe_paper", 'fedbe(preset="paper", epochs=2)', POOL, new={"method": "fedbe(student.epochs=2)"}),
    Case("preset_fedbe_released", 'fedbe(preset="released", epochs=2)', POOL, new=released("fedbe", "fedbe(epochs=2)")),
    Case(
        "preset_fedbe_d2cfl",
        'fedbe(preset="d2cfl", warm_up=0, threshold=0.3)',
        POOL,
        new={
            "method": f'fedbe({AS_D2CFL}, sampling="dirichlet", with_average=false, with_clients=false, '
            'student.optimizer="adam", student.weight_decay=0.0, student.average_after=none, '
            "student.reestimate=false)"
        },
    ),
    Case(
        "preset_mrtf_paper",
        f'mrtf(preset="paper", {STUDENT})',
        POOL,
        new={"method": dotted(f"mrtf({STUDENT}, bounded=false, feedback=true)")},
    ),
    Case("preset_mrtf_released", f'mrtf(preset="released", {STUDENT})', POOL, new=released("mrtf", f"mrtf({STUDENT})")),
    Case(
        "preset_fedftg_paper",
        f'fedftg(preset="paper", {HARD_SAMPLES})',
        new={
            "method": f'{BENCHMARKS}/fedftg/released.py:{dotted(f"fedftg({HARD_SAMPLES})")[:-1]}, discrepancy="kl", '
            'discrepancy_through="both", student_loss="reverse_kl", student_scale="batch", '
            'student.batch_norm="train")+average(weighting="uniform")'
        },
    ),
    Case(
        "preset_fedftg_released",
        f'fedftg(preset="released", {HARD_SAMPLES})',
        new={
            "method": f'{BENCHMARKS}/fedftg/released.py:{dotted(f"fedftg({HARD_SAMPLES})")[:-1]}, clients="each", '
            'cls_weights="client", student.batch_norm="train")'
        },
    ),
    Case(
        "preset_fedgen_paper",
        f'fedgen(preset="paper", {FEATURES})',
        new={"method": f'{dotted(f"fedgen({FEATURES})")[:-1]}, match_weight=0.0, generator.noise_kind="normal")'},
    ),
    Case(
        "preset_fedgen_released",
        f'fedgen(preset="released", {FEATURES})',
        new={"method": f"{BENCHMARKS}/fedgen/released.py:{dotted(f'fedgen({FEATURES})')}"},
    ),
    Case(
        "preset_fedgen_fedftg",
        f'fedgen(preset="fedftg", generator="dense", {FEATURES})',
        new={
            "method": f'{dotted(f"fedgen({FEATURES})")[:-1]}, ratio=0.64, generator.noise_kind="normal", '
            "generator.lr=0.01, generator.lr_decay=0.998)"
        },
    ),
    # Several methods at once
    Case("mix_fedlmd_fedprox_fedavgm", "fedlmd+fedprox(mu=0.01)+fedavgm"),
    Case("mix_scaffold_feddf", f"scaffold+feddf({STUDENT})", POOL),
    Case("mix_fedntd_mrtf", f"fedntd+mrtf({STUDENT}, warm_up=1)", POOL),
    Case("mix_feddyn_fedrs", "feddyn+fedrs"),
    Case("mix_fedgen_fedprox", f"fedgen({FEATURES})+fedprox"),
    Case("mix_fedaux_simclr", f"fedaux({STUDENT})+simclr(epochs=1, batch_size=32, hidden=8)", cnn(**POOL)),
    Case("mix_feddf_masked_lm", f"feddf({STUDENT})+masked_lm(epochs=1, batch_size=8)", NEWS),
    # Methods in turn
    Case("phases_fedlmd", "fedlmd_tf until 1 then fedlmd"),
    Case("phases_scaffold", "scaffold until 2 then fedavg"),
    Case("phases_three", f"fedavgm until 1 then feddyn+fedprox until 2 then feddf({STUDENT})", POOL),
    Case("phases_keep_optimizer", "fedavg until 1 then fedprox", {"local": {"momentum": 0.9, "keep_optimizer": True}}),
    # Clients with different networks
    Case("mixed_fedavg", "fedavg", TWO_NETWORKS),
    Case("mixed_feddf", f"feddf({STUDENT})", MIXED),
    Case("mixed_fedaux", f"fedaux({STUDENT})", MIXED),
    Case("mixed_fedavgm_fedprox", "fedavgm+fedprox", TWO_NETWORKS),
    Case("mixed_phases", f"scaffold until 1 then feddf({STUDENT})", MIXED),
    Case("mixed_report_one", f"feddf({STUDENT})", {**POOL, "model": {**MIXED["model"], "report": "mlp_2"}}),
    Case("mixed_kinds", "fedavg", {"model": {"name": "mixed", "prototypes": ["mlp(hidden=[8])", "convnet"]}}),
    # Privacy
    Case("private_nobody_trusted", 'dp_fedavg(clip=1.0, noise_multiplier=0.3, trust="nobody")'),
    Case(
        "private_poisson_budget",
        "dp_fedavg(clip=1.0, noise_multiplier=2.0)",
        {"sampling": "poisson", "privacy": {"epsilon": 50.0}},
    ),
    Case("private_fedaux", f'fedaux({STUDENT}, epsilon=4.0, form="mean")', POOL),
    Case("private_fedaux_classic", f'fedaux({STUDENT}, epsilon=0.9, mechanism="classic", form="mean")', POOL),
    Case(
        "private_label_counts",
        f'feddf_gen({INVENTED}, ensemble="class")',
        {"privacy": {"label_counts": "dp", "label_epsilon": 2.0}},
    ),
    Case("private_update_noise_fedprox", "update_noise(sigma=0.001)+fedprox"),
    # Local training
    Case("head_only", "fedavg", {"local": {"part": "head"}}),
    Case("head_only_feddf", f'feddf({STUDENT}, part="head")', {**POOL, "local": {"part": "head"}}),
    Case("head_only_private", "dp_fedavg(clip=1.0, noise_multiplier=0.3)", {"local": {"part": "head"}}),
    Case("momentum", "fedavg", {"local": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.001, "clip": 1.0}}),
    Case("keep_optimizer", "fedavg", {"cohort": 8, "local": {"momentum": 0.9, "keep_optimizer": True}}),
    Case("keep_adam", "fedavg", {"cohort": 8, "local": {"optimizer": "adam", "lr": 0.01, "keep_optimizer": True}}),
    Case(
        "schedules",
        "fedavg",
        {"local": {"steps": None, "epochs": 2, "lr_decay": 0.9, "lr_epoch_decay": 0.8, "lr_schedule": "cosine"}},
    ),
    Case("cyclic", "fedavg", {"local": {"lr_schedule": "cyclic", "lr_cycle": 2, "lr_low": 0.01}}),
    Case(
        "augment", "fedavg", cnn(local={"steps": 2, "batch_size": 8, "augment": ["crop", "flip", "cutout"], "lr": 0.1})
    ),
    Case("epochs", "fedavg", {"local": {"steps": None, "epochs": 2}, "cohort": 0.25}),
    # BatchNorm
    *(
        Case(
            f"buffers_{policy}",
            f'fedavg(buffers="{policy}")',
            BATCH_NORM,
            new={"method": "fedavg", "server": {"buffers": policy}},
        )
        for policy in ("average", "pooled", "reset", "local")
    ),
    Case(
        "batch_norm_feddf",
        'feddf(steps=2, batch_size=8, teacher_mode="train")',
        {**BATCH_NORM, "data": {"unlabeled": 16, "test_limit": 40}},
        new=released(
            "fedaux",
            'feddf(distill_share=1.0, steps=2, batch_size=8, server_lr=1e-3, lr_schedule="cosine", clip=5.0, '
            'keep_optimizer=false)+average(weighting="uniform")',
        ),
    ),
    Case("batch_norm_fedftg", "fedftg(iterations=1, student_steps=1, batch_size=4, noise=6)", BATCH_NORM),
    Case("weighting_uniform", 'fedprox(weighting="uniform")', new={"method": 'fedprox+average(weighting="uniform")'}),
    # Networks
    Case("network_cnn", "fedavg", cnn(network="cnn")),
    Case("network_fecnn", "fedavg", cnn(network="fecnn")),
    Case("network_lenet", "fedavg", cnn(network="lenet", data=FASHION)),
    Case("network_lenet5", "fedavg", cnn(network="lenet5", data=FASHION)),
    Case("network_resnet20", "fedavg", {**BATCH_NORM, "model": {"name": "resnet20"}}),
    Case("network_mobilenet", "fedavg", {**BATCH_NORM, "model": {"name": "mobilenet_v2", "width": 0.25}}),
    Case("network_shufflenet", "fedavg", {**BATCH_NORM, "model": {"name": "shufflenet"}}),
    Case("network_group_norm", "moon", {**BATCH_NORM, "model": {"name": "resnet8", "norm": "group", "projection": 8}}),
    # Engines
    Case("looped", "scaffold+fedprox", {"engine": {"name": "looped"}}),
    Case("batched", "scaffold+fedprox", {"engine": {"name": "batched"}}),
    Case("batched_chunk", "fedcurv", {"engine": {"name": "batched", "chunk": 3}}),
    Case("batched_cnn", "fedntd", cnn(engine={"name": "batched"})),
    Case("looped_cnn", "fedntd", cnn(engine={"name": "looped"})),
    Case("float64", "feddyn", {"engine": {"precision": "float64"}}),
    Case("float64_feddf", f"feddf({STUDENT})", {**POOL, "engine": {"precision": "float64"}}),
    Case(
        "evaluate_in_train_mode",
        "fedavg",
        {"evaluate_every": 2},
        old={"evaluate_batch": 100},
        new={"evaluate": f"{ROOT}/benchmarks/fedaux/train_mode.py:in_train_mode"},
    ),
    # Guard
    Case("guard_norm_bound", "fedavg", {"guard": {"norm_bound": 1.2}}),
    Case("guard_quorum", "scaffold", {"guard": {"norm_bound": 1.2, "quorum": 4}}),
    # Data the server has
    Case("unlabeled_test", f"feddf({STUDENT})", {"data": {"unlabeled": "test", "unlabeled_limit": 80}}),
    Case("unlabeled_central", f"feddf({STUDENT})", {"data": {"client_rows": 900, "unlabeled": "central"}}),
    Case("unlabeled_other", f"feddf({STUDENT})", {"data": {"unlabeled": "fashion-mini", "unlabeled_limit": 60}}),
    Case(
        "scale_unlabeled", f"feddf({STUDENT})", {"data": {"unlabeled": 96, "scale": "unlabeled"}, "sampling": "poisson"}
    ),
    Case("scale_given", "fedavg", {"data": {"mean": [0.5], "std": [0.25]}}),
    Case(
        "validation_patience",
        'feddf(steps=8, batch_size=16, patience=2, look_every=2, teacher_weighting="validation")',
        VALIDATED,
    ),
    Case("validation_drop_worst", f'avglogit({STUDENT}, teacher_weighting="drop_worst")', VALIDATED),
    # Partitions
    Case("partition_iid", "fedavg", {"partition": {"scheme": "iid", "clients": 12, "stratified": True}}),
    Case("partition_shards", "fedavg", {"partition": {"scheme": "shards", "clients": 10}}),
    Case("partition_lda_legacy", "fedavg", {"partition": {"scheme": "lda", "clients": 12, "legacy_seed": 3}}),
    Case("partition_hsu", "fedavg", {"partition": {"scheme": "hsu", "clients": 12}}),
    Case("partition_feddf", "fedavg", {"partition": {"scheme": "feddf", "clients": 12}}),
    Case("partition_fedaux", "fedavg", {"partition": {"scheme": "fedaux", "clients": 12}}),
    Case("partition_mrtf", "fedavg", {"partition": {"scheme": "mrtf", "clients": 12, "held_out": 0.1}}),
    Case("partition_feddyn", "fedavg", {"partition": {"scheme": "feddyn", "clients": 12, "sigma": 0.3}}),
    Case("partition_label_split", "fedavg", {"partition": {"scheme": "label_split", "clients": 12}}),
    Case("partition_bias", "fedavg", {"partition": {"scheme": "bias", "clients": 12}}),
    Case("partition_n_class", "fedavg", {"partition": {"scheme": "n_class", "clients": 12}}),
    Case(
        "partition_natural",
        "fednova",
        {
            "data": {"source": "measures.csv", "label": "kind"},
            "partition": {"scheme": "natural", "clients": 0, "keys": ["owner"]},
        },
    ),
    # Texts
    Case("letters", "fedavg", LETTERS),
    Case("letters_fedprox", "fedprox+fedavgm", LETTERS),
    Case("words", "fedavg", NEWS),
    Case("words_mean_pool", f"feddf({STUDENT})", {**NEWS, "model": {**NEWS["model"], "pool": "mean", "dropout": 0.1}}),
)


def write_sources(folder: Path) -> None:
    """Write the three small tables that some cases read: measurements, plays and news."""
    draw = random.Random(11)
    kinds = ("low", "middle", "high")
    measures = [
        (f"owner{draw.randrange(8)}", *(f"{draw.gauss(mean, 1):.4f}" for _ in range(3)), kind)
        for mean, kind in ((kinds.index(kind), kind) for kind in draw.choices(kinds, k=320))
    ]
    words = ["the", "king", "and", "queen", "of", "night", "shall", "never", "sleep", "while", "winds", "do", "blow"]
    plays = [(f"user{user}", " ".join(draw.choices(words, k=24))) for user in range(8)]
    topics = {"sport": "the team won the final match", "money": "the bank raised its interest rates"}
    news = [
        (f"user{number % 4}", f"{topics[topic]} {draw.choice(words)} again {number}", topic)
        for number, topic in enumerate(draw.choices(list(topics), k=120))
    ]
    files: dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = {
        "measures.csv": (("owner", "width", "height", "depth", "kind"), measures),
        "plays.csv": (("user", "text"), plays),
        "news.csv": (("user", "text", "label"), news),
    }
    for name, (header, rows) in files.items():
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *rows])


# ---- Running --------------------------------------------------------------------------------------------------------


def has_method_key() -> bool:
    """Whether the fedstill that is imported calls the section of an experiment `method`, not `algorithm`."""
    import fedstill

    return "method" in fedstill.Experiment.model_fields


def table_of(case: Case, sources: Path) -> Table:
    """Return the experiment's whole table, in the words of the fedstill that is imported."""
    renamed = has_method_key()
    table: Table = {"method": dotted(case.method) if renamed else case.method}
    for layer in (STANDARD, case.table, case.new if renamed else case.old):
        table = laid_over(table, layer)
    place = table["data"]["source"]
    if place.endswith(".csv"):
        table["data"] = {**table["data"], "source": str(sources / place)}
        table["data"].pop("test_limit", None)
    if not renamed:
        table["algorithm"] = table.pop("method")
    return table


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> Table:
    """Return `below` with the keys of `above`; sections are joined key by key.

    A section that names another network or another scheme replaces the whole section, because its keys differ.
    """
    table = dict(below)
    for key, value in above.items():
        fresh = isinstance(value, Mapping) and (("name" in value and key == "model") or "scheme" in value)
        joined = isinstance(value, Mapping) and isinstance(table.get(key), Mapping) and not fresh
        table[key] = laid_over(table[key], value) if joined else value
    return table


def fix_noise_seed() -> None:
    """Let protecting noise depend on the run's seed alone.

    In a real run it also depends on the names of all options, because two different runs must not share their noise.
    Those names differ between the trees that are compared.
    """
    import fedstill.experiment

    fedstill.run  # noqa: B018 (a lazy name: the look-up imports the loop)
    for name, module in list(sys.modules.items()):
        if name.startswith("fedstill.") and callable(getattr(module, "noise_seed", None)):
            module.noise_seed = lambda seed, run: seed  # type: ignore[attr-defined]


def outcome_of(case: Case, sources: Path) -> Outcome:
    """Run one case with an empty cache and return its numbers."""
    import fedstill

    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEDSTILL_CACHE"] = cache
        experiment = fedstill.Experiment(**table_of(case, sources))
        fix_noise_seed()
        result = fedstill.run(experiment)
    tensors: dict[str, Tensor] = {}
    for place, weights in (("last", result.weights), ("best", result.best_weights)):
        for kind, tree in (("params", weights.params), ("buffers", weights.buffers)):
            tensors |= {f"{place}:{kind}:{name}": tensor for name, tensor in tree.items()}
    if result.targets is not None:
        tensors |= {"targets:probabilities": result.targets.probabilities, "targets:kept": result.targets.kept}
    if result.samples is not None:
        tensors |= {"samples:x": result.samples.x, "samples:y": result.samples.y}
    claims = () if result.privacy is None else result.privacy.claims
    summary = {
        "rows": [{key: row.get(key) for key in ROW_KEYS} for row in result.history.rows],
        "bytes_up": result.history.bytes_up,
        "bytes_down": result.history.bytes_down,
        "privacy": [[claim.unit, claim.against, claim.epsilon] for claim in claims],
    }
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return Outcome(copies, json.loads(json.dumps(summary)))


def outcomes(cases: tuple[Case, ...]) -> Iterator[tuple[str, Outcome | None]]:
    """Run the cases one after another on one thread; a case that fails gives None and its error on stderr."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        for case in cases:
            began = time.perf_counter()
            try:
                yield case.name, outcome_of(case, Path(folder))
            except Exception:
                print(f"{case.name} FAILED\n{traceback.format_exc(limit=-4)}", file=sys.stderr)
                yield case.name, None
            if os.environ.get("SAME_RESULTS_TIMES"):
                print(f"{time.perf_counter() - began:6.2f} s  {case.name}", file=sys.stderr)


def record(folder: Path) -> int:
    """Run every case and write the numbers to `folder`; return 1 if a case fails."""
    from safetensors.torch import save_file

    began, tensors, summaries = time.perf_counter(), dict[str, Any](), dict[str, Any]()
    for name, outcome in outcomes(CASES):
        if outcome is not None:
            tensors |= {f"{name}|{key}": tensor for key, tensor in outcome.tensors.items()}
            summaries[name] = outcome.summary
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS_FILE)
    (folder / SUMMARY_FILE).write_text(json.dumps(summaries, indent=1) + "\n", encoding="utf-8")
    print(f"{len(summaries)} of {len(CASES)} compositions recorded in {time.perf_counter() - began:.0f} s")
    return int(len(summaries) < len(CASES))


# ---- Comparing ------------------------------------------------------------------------------------------------------


def read_recording(folder: Path) -> dict[str, Outcome]:
    """Return the numbers of every case that `record` wrote to `folder`."""
    from safetensors.torch import load_file

    summaries = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    recorded = {name: Outcome({}, summary) for name, summary in summaries.items()}
    for key, tensor in load_file(folder / TENSORS_FILE).items():
        name, _, place = key.partition("|")
        recorded[name].tensors[place] = tensor
    return recorded


def differences(before: Outcome, after: Outcome) -> list[str]:
    """Return in words how two runs of a case differ, an empty list if they are equal."""
    import torch

    found = []
    if missing := sorted(before.tensors.keys() - after.tensors.keys()):
        found.append(f"{len(missing)} tensors are missing ({missing[0]})")
    if extra := sorted(after.tensors.keys() - before.tensors.keys()):
        found.append(f"{len(extra)} tensors are new ({extra[0]})")
    largest, where = 0.0, ""
    for name in before.tensors.keys() & after.tensors.keys():
        one, other = before.tensors[name], after.tensors[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append(f"{name} is {other.dtype} {tuple(other.shape)}, was {one.dtype} {tuple(one.shape)}")
        elif not torch.equal(one, other):
            distance = (one.double() - other.double()).abs().max().item()
            if not where or not distance <= largest:
                largest, where = distance, name
    if where:
        found.append(f"largest difference {largest:.3g} in {where}")
    if before.summary != after.summary:
        found.append(first_difference(before.summary, after.summary))
    return found


def first_difference(before: Any, after: Any, place: str = "") -> str:
    """Return in words the first place where two JSON values differ."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        key = next(key for key in before if before[key] != after[key])
        return first_difference(before[key], after[key], f"{place}.{key}")
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        index = next(index for index in range(len(before)) if before[index] != after[index])
        return first_difference(before[index], after[index], f"{place}[{index}]")
    return f"{place.lstrip('.')} is {after}, was {before}"


def verdict(pairs: Iterator[tuple[str, Outcome | None, Outcome | None]]) -> int:
    """Print a line for each case that differs and a closing line; return 1 if any differs or failed."""
    equal = total = 0
    for name, before, after in pairs:
        total += 1
        if before is None or after is None:
            print(f"{name}: {'not recorded' if before is None else 'failed'}", flush=True)
        elif found := differences(before, after):
            print(f"{name}: {'; '.join(found)}", flush=True)
        else:
            equal += 1
    print(f"{equal} of {total} compositions equal")
    return int(equal < total or not total)


def check(folder: Path, only: str) -> int:
    """Run the cases whose names contain `only` and compare them with the recording in `folder`."""
    recorded = read_recording(folder)
    cases = tuple(case for case in CASES if only in case.name)
    for name in sorted(recorded.keys() - {case.name for case in CASES}):
        print(f"{name}: recorded, but no longer a case")
    return verdict((name, recorded.get(name), outcome) for name, outcome in outcomes(cases))


def compare(old_source: Path, new_source: Path) -> int:
    """Record two source trees, each in a process of its own, and compare the recordings."""
    recordings = []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in (("old", old_source), ("new", new_source)):
            environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
            command = [sys.executable, __file__, "record", f"{folder}/{name}"]
            subprocess.run(command, env=environment, check=False)  # a failed case is named below
            recordings.append(read_recording(Path(folder) / name))
    before, after = recordings
    return verdict((case.name, before.get(case.name), after.get(case.name)) for case in CASES)


def main() -> int:
    """Read the command line and return the exit code."""
    for library in ("OMP", "MKL", "OPENBLAS"):  # before numpy and torch are imported
        os.environ[f"{library}_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("folder", type=Path)
    checking = commands.add_parser("check")
    checking.add_argument("folder", type=Path)
    checking.add_argument("--only", default="", metavar="PATTERN", help="a part of the names of cases")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old_source", type=Path)
    comparing.add_argument("new_source", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        return record(given.folder)
    if given.command == "check":
        return check(given.folder, given.only)
    return compare(given.old_source, given.new_source)


if __name__ == "__main__":
    sys.exit(main())
