"""The probe of MrTF's Fig. 3: worked numbers on quadratics, nothing for clients that are alike, more for skew."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from divergence import features_in_plane, gradient_variance, measure_divergence, principal_plane, weight_divergence

import fedstill
from fedstill.compose.combine import weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.types import Dataset, Federation, Model, Objective, Output, Training, Weights
from fedstill.data import make_federation
from fedstill.engine import build_engine
from fedstill.models import build_model
from fedstill.partition import PARTITIONS

PROBE = Path(__file__).parent / "probe.py"
either = pytest.mark.parametrize("engine", ["batched", "looped"])


def line_model() -> Model:
    """One parameter w; the logits are there only to be looked at."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        return Output(torch.cat([x * 0.0 + weights.params["w"], x], dim=1), x), {}

    return Model("line", init=lambda seed: Weights({"w": torch.tensor(1.0)}, {}), apply=apply)


def parabola() -> Objective:
    """mean (w - x)^2 / 2: its gradient is w minus the mean of the data."""

    def loss(output, batch, local):
        return weighted_mean(0.5 * (local.params["w"] - batch.x[:, 0]) ** 2, batch.weight)

    return Objective(loss)


def points(*clients: list[float], rows: list[int] | None = None) -> Federation:
    """Client k holds the given numbers; with `rows`, all clients hold these rows."""
    x = torch.tensor([value for part in clients for value in part]).reshape(-1, 1)
    data = Dataset("line", x, torch.zeros(len(x), dtype=torch.int64), ("a", "b"))
    if rows is not None:
        return Federation(data, data, torch.tensor(rows * 3), torch.arange(0, 3 * len(rows) + 1, len(rows)))
    offsets = torch.tensor([0, *np.cumsum([len(part) for part in clients])])
    return Federation(data, data, torch.arange(len(x)), offsets)


def probe(federation: Federation, engine: str = "batched", **options):
    how = {"objective": parabola(), "device": "cpu", "engine": engine, **options}
    return measure_divergence(line_model(), federation, Training(steps=2, batch_size=10, lr=0.5), **how)


@either
def test_two_clients_of_one_size_on_quadratics(engine):
    """From w = 1 two steps of rate 1/2 go 3/4 of the way: to 1/4 for the mean 0, to 13/4 for the mean 4.

    Their mean 7/4 is where central training ends, and both are 3/2 away from it.
    """
    divergence = probe(points([-1.0, 1.0], [3.0, 5.0]), engine)
    assert divergence.local.params["w"].tolist() == pytest.approx([0.25, 3.25])
    assert float(divergence.aggregated.params["w"]) == pytest.approx(1.75)
    assert divergence.gradient_variance == pytest.approx(2.25)
    assert divergence.weight_divergence == pytest.approx(0.0, abs=1e-12)


@either
def test_where_one_client_holds_more_the_plain_mean_is_not_the_central_model(engine):
    """Means 0 (one sample) and 4 (three): the average stays at 7/4, central training ends at 3 - 2/4 = 5/2."""
    divergence = probe(points([0.0], [4.0, 4.0, 4.0]), engine)
    assert float(divergence.central.params["w"]) == pytest.approx(2.5)
    assert divergence.weight_divergence == pytest.approx(0.75**2 / 2.5**2)
    assert divergence.gradient_variance == pytest.approx(2.25)


@either
def test_clients_that_are_alike_do_not_diverge(engine):
    divergence = probe(points([0.0, 2.0, 7.0], rows=[0, 1, 2]), engine)
    assert divergence.gradient_variance < 1e-12
    assert divergence.weight_divergence < 1e-12
    assert float(divergence.aggregated.params["w"]) != pytest.approx(1.0)  # and yet they moved


def test_all_begin_where_the_central_pre_training_ended():
    """One central step goes half of the way from 1 to the mean 3, three go 7/8 of it."""
    data = points([0.0], [4.0, 4.0, 4.0])
    assert float(probe(data, pretrain=1).start.params["w"]) == pytest.approx(2.0)
    assert float(probe(data, pretrain=3).start.params["w"]) == pytest.approx(2.75)
    assert float(probe(data).start.params["w"]) == 1.0
    given = Weights({"w": torch.tensor(9.0)}, {})
    assert float(probe(data, pretrain=given).start.params["w"]) == 9.0


def test_a_row_that_two_clients_hold_counts_once_in_the_union():
    """Rows 0 and 4, of which both hold the latter: the mean is 2, and 3/4 of the way from 1 is 7/4."""
    whole = points([0.0, 4.0])
    shared = Federation(whole.train, whole.test, torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]))
    assert float(probe(shared).central.params["w"]) == pytest.approx(1.75)


def test_another_seed_draws_other_batches():
    def ends(seed):
        data, single = points([0.0, 1.0, 2.0], [4.0, 5.0, 6.0]), Training(steps=2, batch_size=1, lr=0.5)
        divergence = measure_divergence(line_model(), data, single, objective=parabola(), device="cpu", seed=seed)
        return [*divergence.local.params["w"].tolist(), float(divergence.central.params["w"])]

    several = [ends(seed) for seed in range(4)]
    assert several[0] == ends(0)
    assert all(len({values[place] for values in several}) > 1 for place in range(3))


def test_a_client_without_data_is_left_out():
    data = points([-1.0, 1.0], [], [3.0, 5.0])
    assert probe(data).gradient_variance == pytest.approx(2.25)


def test_both_measures_on_paper():
    """Moves of (3, 4, 12) and its opposite: 169 from the middle each; 169 / (25 + 144) of a model of that length."""
    local = {"a": torch.tensor([[3.0, 4.0], [-3.0, -4.0]]), "b": torch.tensor([12.0, -12.0])}
    middle = {"a": torch.zeros(2), "b": torch.tensor(0.0)}
    model = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor(12.0)}
    assert gradient_variance(local, middle) == 169.0
    assert weight_divergence(middle, model) == 1.0
    assert weight_divergence({"a": 2 * model["a"], "b": 2 * model["b"]}, model) == 1.0
    assert weight_divergence(middle, middle) == 0.0
    assert weight_divergence(model, middle) == float("inf")


def test_skewed_clients_diverge_more_than_even_ones():
    source = fedstill.load("digits")
    labels = source.train.y.numpy()
    model = build_model("mlp", input_shape=tuple(source.train.x.shape[1:]), classes=10, hidden=(16,), init="torch")
    schemes = {"iid": ("iid", {}), "mild": ("mrtf", {"alpha": 1.0}), "skewed": ("mrtf", {"alpha": 0.1})}
    measured = {}
    for name, (scheme, keys) in schemes.items():
        data = make_federation(source, PARTITIONS[scheme](labels, 8, seed=1, **keys), partition=name)
        measured[name] = measure_divergence(model, data, Training(steps=30, batch_size=32, lr=0.1), device="cpu")
    variance, divergence = (
        [getattr(measured[name], measure) for name in schemes] for measure in ("gradient_variance", "weight_divergence")
    )
    assert variance == sorted(variance)
    assert divergence == sorted(divergence)
    assert variance[2] > 2 * variance[0]
    assert measured["skewed"].accuracy["local"] < measured["iid"].accuracy["local"]
    assert {"start", "central", "aggregated", "local"} == set(measured["iid"].accuracy)


def test_epochs_instead_of_steps_are_refused():
    with pytest.raises(FedstillError, match=r"equally many steps: give Training\(steps=50\)"):
        measure_divergence(line_model(), points([1.0], [2.0]), Training(epochs=2))


def test_the_plane_is_that_of_the_largest_variance():
    """Against NumPy's eigenvectors of the covariance."""
    generator = torch.Generator().manual_seed(0)
    cloud = torch.randn(200, 5, generator=generator, dtype=torch.float64) * torch.tensor([3.0, 0.1, 7.0, 0.2, 1.0])
    cloud = cloud @ torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))[0] + 4.0
    plane, centre = principal_plane(cloud)
    _, vectors = np.linalg.eigh(np.cov(cloud.numpy().T))
    for column, wanted in zip(plane.T.numpy(), vectors.T[::-1][:2], strict=True):
        assert np.abs(column) == pytest.approx(np.abs(wanted), abs=1e-8)
        assert column[np.abs(column).argmax()] > 0
    assert centre.tolist() == pytest.approx(cloud.mean(0).tolist())


def test_features_of_one_dimension_lie_on_a_line():
    plane, _ = principal_plane(torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64))
    assert plane.tolist() == [[1.0, 0.0]]


def test_models_share_one_plane_so_that_their_distance_is_seen():
    """Features are two numbers here: the plane is a rotation and keeps every distance, within and between models."""
    model = build_model("mlp", input_shape=(6,), classes=3, hidden=(2,), init="torch")
    x = torch.randn(11, 6, generator=torch.Generator().manual_seed(3))
    data = Dataset("toy", x, torch.zeros(11, dtype=torch.int64), tuple("abc"))
    federation = Federation(data, data, torch.arange(11), torch.tensor([0, 5, 11]))
    engine = build_engine("batched", "cpu", model=model, federation=federation)
    models = {"one": model.init(0), "other": model.init(1)}
    projected = np.concatenate(list(features_in_plane(engine, models, x).values()))
    wanted = np.concatenate([engine.outputs(weights, x).features.numpy() for weights in models.values()])

    def distances(cloud):
        return np.linalg.norm(cloud[:, None] - cloud[None], axis=-1)

    assert distances(wanted).max() > 0.1
    assert distances(projected) == pytest.approx(distances(wanted), abs=1e-5)
    assert projected.mean(axis=0) == pytest.approx([0.0, 0.0], abs=1e-6)


def test_the_script_prints_a_table_and_writes_numbers_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = "--data digits --hidden 8 --steps 3 --pretrain 2 --clients 4 --device cpu --alphas 0.1 --classes 3"
    options = [*words.split(), "--out", str(tmp_path / "p.png"), "--json", str(tmp_path / "p.json")]
    assert runpy.run_path(str(PROBE))["main"](options) == 0
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert "all start at" in first
    assert [line[:12].strip() for line in lines[:3]] == ["iid", "alpha = 0.1", "3 classes"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((tmp_path / "p.json").read_text())
    assert [record["clients"] for record in records] == ["iid", "alpha = 0.1", "3 classes"]
    assert all(record["accuracy"]["start"] == records[0]["accuracy"]["start"] for record in records)
    assert f"{records[0]['gradient_variance']:.4g}" in lines[0]
    assert "gradient variance" in head
