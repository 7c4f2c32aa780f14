"""What SimCLR pre-training promises: better features, one extractor for all methods, FedAvg when it is off."""

import inspect

import numpy as np
import pytest
import torch
from pretraining_cases import net, picture_federation
from running import federate
from torch import nn
from toy import same_bits

from fedstill import Experiment, mixed_model
from fedstill import run as run_experiment
from fedstill.core.errors import FedstillError
from fedstill.core.types import Dataset, Federation, ServerStep, Training
from fedstill.methods import METHODS, fedavg
from fedstill.methods.lookup import build_method
from fedstill.models import build_model, from_module
from fedstill.server.pretrain import Pretraining
from fedstill.storage.cache import Cache

SIDE = 12
SMALL = "training.batch_size=8, projection=4, hidden=8"


def patterns(count, seed):
    """Rows, columns, checks or nothing: that is the class; phase, colours and brightness tell nothing about it."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 4, count)
    i, j = np.mgrid[:SIDE, :SIDE]
    a, b = generator.uniform(0, 2 * np.pi, (2, count, 1, 1))
    rows, columns = np.sin(a + 1.6 * i), np.sin(b + 1.6 * j)
    shape = np.stack([rows, columns, rows * columns, np.sin(a) + 0.0 * rows])[y, np.arange(count)]
    base, tint = generator.uniform(0, 0.4, (count, 3, 1, 1)), generator.uniform(0.1, 1, (count, 3, 1, 1))
    x = base + tint * (0.3 + 0.3 * shape[:, None]) + 0.03 * generator.normal(size=(count, 3, SIDE, SIDE))
    return torch.from_numpy((255 * np.clip(x, 0, 1)).astype(np.uint8)), torch.from_numpy(y)


class Textures(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        features = self.body(x).mean((2, 3))
        return features, self.head(features)


@pytest.mark.slow
def test_features_tell_what_no_label_said():
    """A random extractor sees colours first; views of other colours teach to look at the pattern."""
    form = {"mean": (0.4,) * 3, "std": (0.25,) * 3}
    train, test = (Dataset("patterns", *patterns(40, seed), tuple("abcd"), **form) for seed in (0, 2))
    x, truth = patterns(600, 1)
    data = Federation(train, test, torch.arange(40), torch.tensor([0, 40]), x, unlabeled_truth=truth)
    training = {"epochs": 10, "batch_size": 100, "lr": 3e-3}
    options = {"training": training, "hidden": 64, "projection": 32, "neighbours": 20}
    result = federate(
        method=build_method("simclr", options)[0].method, model=from_module(Textures, input_shape=(3, SIDE, SIDE)),
        federation=data, training=Training(lr=0.1), rounds=1, cohort=1, device="cpu",
    )  # fmt: skip
    row = result.history.rows[0]
    assert row["prepare/knn_accuracy"] > row["prepare/knn_accuracy_before"] + 0.1
    assert row["prepare/simclr_loss"] < np.log(199) - 0.5  # of 200 views that all look alike


def pictures(text, **how):
    phases = build_method(text)
    settings = {
        "method": phases, "model": net(), "federation": picture_federation(), "rounds": 2, "cohort": 2,
        "training": Training(batch_size=8, lr=0.05), "device": "cpu",
    }  # fmt: skip
    return federate(**{**settings, **how})


@pytest.mark.parametrize("method", ["fedavg", "fedprox(mu=0.1)", "scaffold+average"])
def test_without_an_epoch_it_is_the_other_method_bit_for_bit(method):
    assert same_bits(pictures(f"{method}+simclr(training.epochs=0)").weights, pictures(method).weights)
    assert not same_bits(pictures(f"{method}+simclr(training.epochs=1, {SMALL})").weights, pictures(method).weights)


def test_every_method_starts_from_the_same_extractor(tmp_path, monkeypatch):
    """What a refining step is shown when it prepares is the pre-trained model, from one file for all methods."""
    cache, seen = Cache("prepared", tmp_path), []

    def look(candidate, state, preparation):
        seen.append((candidate, preparation.metrics["simclr_epochs"]))
        return candidate, state

    def watched():
        method = fedavg()
        return type(method)(method.objective, method.aggregate, (ServerStep("look", prepare=look),))

    monkeypatch.setitem(METHODS, "watched", watched)
    simclr, feddf = f"simclr(training.epochs=2, {SMALL})", "feddf(student.steps=2)+average"
    for text in (f"watched+{simclr}", f"{simclr}+watched", f"watched+fedprox+{simclr}", f"watched+{feddf}+{simclr}"):
        pictures(text, cache=cache, rounds=1)
    assert [epochs for _, epochs in seen] == [2.0, 0.0, 0.0, 0.0]
    assert all(same_bits(weights, seen[0][0]) for weights, _ in seen[1:])


def test_digits_in_seconds_from_an_experiment_and_the_extractor_stays_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    experiment = Experiment(
        data={"source": "digits", "unlabeled": 200, "test_limit": 100},
        partition={"scheme": "iid", "clients": 4},
        model={"name": "resnet8"},
        method={"name": "fedavg+simclr(training.epochs=2, training.batch_size=64, neighbours=10)"},
        rounds=1,
        cohort=2,
        name="digits",
        engine={"device": "cpu"},
    )
    first, second = (run_experiment(experiment) for _ in range(2))
    row, later = first.history.rows[0], second.history.rows[0]
    assert (row["prepare/simclr_epochs"], later["prepare/simclr_epochs"]) == (2.0, 0.0)
    assert row["prepare/knn_accuracy"] == later["prepare/knn_accuracy"] > 0.3
    assert same_bits(first.weights, second.weights)
    assert (tmp_path / "cache" / "prepared").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training": {"epochs": -1}}, "method.training.epochs = -1"),
        ({"training": {"batch_size": 1}}, "2 or more"),
        ({"training": {"lr": 0.0}}, "method.training.lr"),
        ({"training": {"weight_decay": -1.0}}, "method.training.weight_decay"),
        ({"temperature": 0.0}, "method.temperature"),
        ({"projection": 0}, "method.projection"),
        ({"hidden": 0}, "method.hidden"),
        ({"neighbours": -1}, "method.neighbours"),
        ({"training": {"seed": 0.5}}, "method.training.seed"),
    ],
)
def test_an_impossible_option_is_refused_by_name(options, message):
    with pytest.raises(FedstillError, match=message):
        build_method("simclr", options)


def test_options_are_the_reference_codes_by_default():
    """leftthomas/SimCLR: Adam 1e-3, decay 1e-6, batch 512, temperature 0.5, 512 -> 128, k = 200; FedAUX: 100 epochs."""
    chosen = {name: option.default for name, option in inspect.signature(METHODS["simclr"]).parameters.items()}
    wanted = {"training": Pretraining(100, 512, 1e-3, 1e-6, clip=None, seed=None), "temperature": 0.5}
    wanted |= {"projection": 128, "hidden": 512, "neighbours": 200}
    assert wanted.items() <= chosen.items()


def test_tables_are_refused_in_words():
    x, y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    table = Dataset("table", x, y, tuple("ab"))
    data = Federation(table, table, torch.arange(6), torch.tensor([0, 6]), x)
    with pytest.raises(FedstillError, match=r"simclr needs images.*shape \(4,\)"):
        pictures("simclr", model=build_model("mlp", input_shape=(4,), classes=2), federation=data, cohort=1)


def test_of_several_architectures_each_is_pretrained_and_kept_on_its_own(tmp_path):
    prototypes = {"net": net(), "mlp": build_model("mlp", input_shape=(3, 6, 6), classes=3, hidden=(8,))}
    cache, mixed = Cache("prepared", tmp_path), mixed_model(prototypes, ["net", "mlp"])
    rows = [pictures(f"fedavg+simclr(training.epochs=2, {SMALL})", model=mixed, cache=cache, rounds=1).history.rows[0]]
    rows += [pictures(f"fedavg+simclr(training.epochs=2, {SMALL})", model=mixed, cache=cache, rounds=1).history.rows[0]]
    for prototype in prototypes:
        assert [row[f"prepare/{prototype}/simclr_epochs"] for row in rows] == [2.0, 0.0]
    assert len(list((tmp_path / "prepared").iterdir())) == 2
