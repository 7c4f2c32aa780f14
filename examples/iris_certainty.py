"""Why an ensemble of clients should be weighted by certainty: FedAUX's toy example (its Fig. 2) on the Iris flowers.

    python examples/iris_certainty.py --picture iris.png

Three clients hold one species each, so each learns to answer that species everywhere. The plain mean of their logits is
no better than a guess. Weighted at every point by how densely a client's own data lie there, the same three models
name most flowers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from torch import Tensor, nn

from fedstill import Dataset, Federation, Training, from_module
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import zeros_like
from fedstill.engine import build_engine
from fedstill.local import cross_entropy
from fedstill.methods.fedaux.certainty import log_scores, normalised, relative
from fedstill.server.distill.targets import pool_targets

COLOURS = ("#D55E00", "#009E73", "#0072B2")
EDGE = 200  # points of the map along each side


def three_clients() -> Federation:
    """Return the flowers on their two principal components; client k holds species k.

    They are not centred, because around zero a linear model that has seen one species would not answer it everywhere.
    """
    iris = load_iris()
    x = torch.from_numpy(iris.data @ PCA(2, svd_solver="full").fit(iris.data).components_.T).float()
    y = torch.from_numpy(iris.target).long()
    flowers = Dataset("iris", x, y, tuple(iris.target_names))
    return Federation(flowers, flowers, torch.argsort(y, stable=True), torch.tensor([0, 50, 100, 150]))


def clients_logits(federation: Federation, places: Tensor) -> Tensor:
    """Train a linear classifier for each client, alone and from zero; return their logits at places, (3, M, 3)."""
    model = from_module(lambda: nn.Linear(2, 3), input_shape=(2,), classes=3, name="linear")
    engine = build_engine(device="cpu", model=model, federation=federation)
    start, everybody = zeros_like(model.init(0)), np.arange(3)
    training = Training(epochs=20, batch_size=10, lr=0.1)
    trained = engine.train(LocalWork(cross_entropy(), training, start), everybody, {})
    return engine.outputs(trained.uploads.weights, places, stacked=True).logits


def certainties(federation: Federation, places: Tensor) -> Tensor:
    """Return each client's share at each place, (3, M), from a Gaussian kernel estimate of its data."""
    x, parts = federation.train.x, federation.indices.split(50)
    return normalised(relative(torch.stack([log_scores("kde", x[rows], x, places, 0) for rows in parts])))


def accuracy(federation: Federation, belief: Tensor) -> float:
    """Return the share of flowers for which the largest belief is on their species."""
    return float((belief.argmax(-1) == federation.train.y).double().mean())


def draw(federation: Federation, path: Path) -> None:
    """Draw the answers of every client (paler where it is less certain) and of both ensembles over the whole plane."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    x, y = federation.train.x, federation.train.y
    low, high = x.min(0).values - 0.6, x.max(0).values + 0.6
    across, up = (torch.linspace(float(low[i]), float(high[i]), EDGE) for i in (0, 1))
    places = torch.cartesian_prod(across, up)
    logits, share = clients_logits(federation, places), certainties(federation, places)
    at_flowers, weights = clients_logits(federation, x), certainties(federation, x)
    panels = [(f"client {k + 1}", logits[k], at_flowers[k], 0.15 + 0.65 * share[k]) for k in range(3)]
    for title, on_map, on_flowers in (("uniform ensemble", None, None), ("weighted ensemble", share, weights)):
        panels.append((title, pool_targets(logits, share=on_map), pool_targets(at_flowers, share=on_flowers), None))
    figure = Figure(figsize=(12.5, 3.0), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    colours = torch.tensor([to_rgb(colour) for colour in COLOURS])
    for axes, (title, belief, answers, certain) in zip(figure.subplots(1, 5, sharey=True), panels, strict=True):
        opacity = torch.full((len(places), 1), 0.45) if certain is None else certain.unsqueeze(1)
        pixels = 1.0 - opacity * (1.0 - colours[belief.argmax(-1)])
        extent = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
        axes.imshow(pixels.reshape(EDGE, EDGE, 3).transpose(0, 1).numpy(), origin="lower", extent=extent, aspect="auto")
        for species, colour in enumerate(COLOURS):
            held = y == species
            axes.scatter(*x[held].T.numpy(), s=9, color=colour, edgecolor="white", linewidth=0.4)
        axes.set_title(f"{title}: {100 * accuracy(federation, answers):.0f} %", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--picture", type=Path, help="write a PNG (needs matplotlib)")
    picture = parser.parse_known_args()[0].picture
    federation = three_clients()
    flowers = federation.train.x
    logits = clients_logits(federation, flowers)
    for client in range(3):
        print(f"accuracy of client {client + 1} alone: {accuracy(federation, logits[client]):.1%}")
    print(f"accuracy of the uniform ensemble: {accuracy(federation, pool_targets(logits)):.1%}")
    weighted = pool_targets(logits, share=certainties(federation, flowers))
    print(f"accuracy of the ensemble weighted by certainty: {accuracy(federation, weighted):.1%}")
    if picture is not None:
        draw(federation, picture)


if __name__ == "__main__":
    main()
