"""FedAvg on handwritten digits in plain PyTorch: the whole method on one screen, nothing imported from fedstill.

    python examples/fedavg_in_one_file.py

Read it first. tests/docs/test_examples.py trains the same clients with this file and with the library, and compares the
weights.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

clients = 20  # parties that never show their data
cohort = 5  # clients that take part in a round
alpha = 0.1  # small: clients are unlike, each has few classes
rounds = 30
epochs = 5  # passes over a client's data in a round
batch_size = 20
lr = 0.1
seed = 0


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images of 8 x 8 pixels and their classes, to train and to test; every fifth of 1,797 is for testing."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    test = torch.arange(len(x)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def split(y: Tensor, random: np.random.Generator) -> list[Tensor]:
    """Return each client's rows: a draw from Dirichlet(alpha) spreads each class, again until all clients have ten."""
    while True:
        parts: list[list[Tensor]] = [[] for _ in range(clients)]
        for c in range(10):
            rows = torch.from_numpy(random.permutation(np.flatnonzero(y.numpy() == c)))
            cuts = (np.cumsum(random.dirichlet([alpha] * clients))[:-1] * len(rows)).astype(int)
            for part, piece in zip(parts, torch.tensor_split(rows, cuts.tolist()), strict=True):
                part.append(piece)
        owned = [torch.cat(part) for part in parts]
        if min(len(rows) for rows in owned) >= 10:
            return owned


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train_client(received: nn.Module, x: Tensor, y: Tensor, shuffle: torch.Generator) -> nn.Module:
    """Return the model that a client trains: SGD on its data, from the model it received."""
    model = copy.deepcopy(received)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=shuffle).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model


def average(models: list[nn.Module], sizes: list[int]) -> nn.Module:
    """Return the model that the server computes: w = sum_k n_k w_k / sum_k n_k."""
    result = copy.deepcopy(models[0])
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            parts = [n * dict(m.named_parameters())[name] for n, m in zip(sizes, models, strict=True)]
            parameter.copy_(torch.stack(parts).sum(0) / sum(sizes))
    return result


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    torch.manual_seed(seed)
    random, shuffle = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    x, y, test_x, test_y = load_data()
    owned = split(y, random)
    model = make_model()
    for number in range(1, rounds + 1):
        chosen = random.choice(clients, cohort, replace=False)
        trained = [train_client(model, x[owned[k]], y[owned[k]], shuffle) for k in chosen]
        model = average(trained, [len(owned[k]) for k in chosen])
        if number % 5 == 0:
            print(f"round {number:2d}  accuracy {100 * accuracy(model, test_x, test_y):.1f} %")


if __name__ == "__main__":
    main()
