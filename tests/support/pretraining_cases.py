"""A small federation of images with unlabeled ones beside, and a network with BatchNorm to pre-train on them."""

import torch
from running import federate
from torch import nn

from fedstill.core.types import Dataset, Federation, Method, Training
from fedstill.local.terms import cross_entropy
from fedstill.methods.pretraining.contrastive import simclr_pretext
from fedstill.models import from_module
from fedstill.server.aggregate import average
from fedstill.server.pretrain import pretrain

CLASSES, SIDE, UNLABELED = 3, 6, 21
BRIEF = Training(epochs=3, batch_size=8, optimizer="adam", lr=1e-2, weight_decay=0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 16, CLASSES)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


def net():
    return from_module(Net, input_shape=(3, SIDE, SIDE), classes=CLASSES, name="net", check=False)


def picture_federation(unlabeled=UNLABELED, *, truth=False, seed=0, mean=(0.5,) * 3):
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        y = torch.randint(0, CLASSES, (count,), generator=generator)
        x = torch.randint(0, 256, (count, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        return x, y

    names = tuple("abc")
    train, test = (Dataset("pictures", *draw(count), names, mean, (0.25,) * 3) for count in (20, 20))
    x, y = draw(unlabeled)
    offsets = torch.tensor([0, 8, 20])
    return Federation(train, test, torch.arange(20), offsets, x, unlabeled_truth=y if truth else None)


def pretext(training=BRIEF, **options):
    return simclr_pretext(training, **{"projection": 4, "hidden": 8, **options})


def pretrained(*, save_seconds=30.0, task=None, **how):
    """FedAvg after a pre-training."""
    step = pretrain(task or pretext(), save_seconds=save_seconds, **how)
    return Method(cross_entropy(), average(), (step,))


def run(method, **how):
    settings = {
        "method": method, "model": net(), "federation": picture_federation(), "rounds": 1, "cohort": 2,
        "training": Training(batch_size=8, lr=0.05), "device": "cpu",
    }  # fmt: skip
    return federate(**{**settings, **how})


def sent_first(method, **how):
    """(the model that the first cohort is sent, the run's first row)."""
    result = run(method, **{"training": Training(batch_size=8, lr=0.0), "cohort": 1, **how})
    return result.weights, result.history.rows[0]
