"""MrTF's Fig. 3: what skewed clients do to one round of averaging, in numbers and in features.

    python benchmarks/mrtf/probe.py [--data fashion-mini] [--model mlp] [--alphas 10,1,0.1] [--classes 3]
                                    [--clients 10] [--steps 50] [--pretrain 100] [--out probe.png] [--json FILE]

From one model, trained centrally for a few steps, clients and a central model take the same number of SGD steps. The
clients hold an IID split, MrTF's Dirichlet splits, or with --classes a number of classes each. The default is small
enough for a laptop; the paper has MNIST with an MLP that ends in two features (--hidden 1024,1024,2), and SVHN with a
ConvNet and t-SNE instead of principal components.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from divergence import Divergence, features_in_plane, measure_divergence
from divergence_picture import Level, View, divergence_picture

from fedstill.core.seeds import seed_for
from fedstill.core.tree import rows
from fedstill.core.types import Federation, Model, Training
from fedstill.data import Source, load, make_federation
from fedstill.engine import build_engine
from fedstill.models import build_model
from fedstill.partition import PARTITIONS
from fedstill.report.table import align

POINTS = 500  # test samples in a view


def splits(options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (scheme, its keys), the mildest first."""
    schemes: dict[str, tuple[str, dict[str, Any]]] = {"iid": ("iid", {})}
    schemes |= {f"alpha = {alpha:g}": ("mrtf", {"alpha": alpha}) for alpha in options.alphas}
    schemes |= {f"{count} classes": ("label_split", {"classes_per_client": count}) for count in options.classes}
    return schemes


def federations(source: Source, options: argparse.Namespace) -> dict[str, Federation]:
    labels, seed = source.train.y.numpy(), int(seed_for(options.seed, "partition"))
    return {
        name: make_federation(source, PARTITIONS[scheme](labels, options.clients, seed=seed, **keys), partition=name)
        for name, (scheme, keys) in splits(options).items()
    }


def probe_all(model: Model, split: dict[str, Federation], options: argparse.Namespace) -> dict[str, Divergence]:
    """All levels from the start of the first, which is the one trained on all data."""
    training = Training(steps=options.steps, batch_size=options.batch, lr=options.lr, momentum=options.momentum)
    how = {"seed": options.seed, "device": options.device}
    probes: dict[str, Divergence] = {}
    for name, federation in split.items():
        start = next(iter(probes.values())).start if probes else options.pretrain
        probes[name] = measure_divergence(model, federation, training, pretrain=start, **how)
    return probes


def table(probes: dict[str, Divergence]) -> list[tuple[str, ...]]:
    head = ("clients", "gradient variance", "weight divergence", "clients' mean %", "average %", "central %")
    lines = [
        (name, f"{probe.gradient_variance:.4g}", f"{probe.weight_divergence:.4g}",
         *(f"{100 * probe.accuracy[key]:.1f}" for key in ("local", "aggregated", "central")))
        for name, probe in probes.items()
    ]  # fmt: skip
    return [head, *lines]


def draw(model: Model, federation: Federation, probes: dict[str, Divergence], options: argparse.Namespace) -> Path:
    first = next(iter(probes.values()))
    models = {"start": first.start, "central": first.central}
    accuracies = {"start": first.accuracy["start"], "central": first.accuracy["central"]}
    for name, probe in probes.items():
        models |= {f"average, {name}": probe.aggregated, f"client 0, {name}": rows(probe.local, 0)}
        accuracies[f"average, {name}"] = probe.accuracy["aggregated"]
    engine = build_engine("auto", options.device, model=model, federation=federation)
    x, y = federation.test.x[:POINTS].to(engine.device), federation.test.y[:POINTS]
    planes = features_in_plane(engine, models, x)
    for name in models.keys() - accuracies.keys():
        answers = engine.outputs(models[name], federation.test.x).logits.argmax(1).cpu()
        accuracies[name] = float((answers == federation.test.y).double().mean())
    views = [View(name, planes[name], accuracies[name]) for name in models]
    levels = [Level(name, probe.gradient_variance, probe.weight_divergence) for name, probe in probes.items()]
    title = f"{federation.train.name}, {model.name}: {options.clients} clients, {options.steps} steps"
    return divergence_picture(
        views, levels, Path(options.out), labels=y.numpy(), title=title, classes=federation.train.classes
    )


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion-mini", help="a source as in data.source")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--hidden", type=numbers, default=[200, 64], help="of the mlp; the last are the features")
    parser.add_argument("--alphas", type=numbers, default=[10.0, 1.0, 0.1], help="of MrTF's Dirichlet split")
    parser.add_argument("--classes", type=numbers, default=[], help="classes on each client, e.g. 10,5,3")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50, help="SGD steps of a client and of the central model")
    parser.add_argument("--pretrain", type=int, default=100, help="central steps before all that (r_0)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default="probe.png", help="the picture; empty: none")
    parser.add_argument("--json", default="")
    options = parser.parse_args(arguments)
    options.classes = [int(count) for count in options.classes]
    options.hidden = tuple(int(width) for width in options.hidden)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    source = load(options.data)
    split = federations(source, options)
    first = split["iid"]
    shape, widths = tuple(first.train.x.shape[1:]), {"hidden": options.hidden} if options.model == "mlp" else {}
    model = build_model(options.model, input_shape=shape, classes=len(first.train.classes), **widths)
    probes = probe_all(model, split, options)
    lines = table(probes)
    began = 100 * probes["iid"].accuracy["start"]
    print(f"{options.data}, {model.name}, torch {torch.__version__}; all start at {began:.1f} %")
    print(align(lines))
    if options.out:
        print(f"wrote {draw(model, first, probes, options)}")
    if options.json:
        records = [
            {"clients": name, "gradient_variance": probe.gradient_variance,
             "weight_divergence": probe.weight_divergence, "accuracy": dict(probe.accuracy)}
            for name, probe in probes.items()
        ]  # fmt: skip
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
