"""What every scheme promises, on random labels, client counts and seeds."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.partition import PARTITIONS, class_counts
from fedstill.partition.skew import top_class_share

SMALL = {
    "iid": {},
    "shards": {"shards_per_client": 2},
    "lda": {"alpha": 1.0, "min_size": 1},
    "hsu": {"alpha": 1.0},
    "feddf": {"alpha": 5.0},
    "fedaux": {"alpha": 1.0},
    "mrtf": {"alpha": 1.0, "min_size": 1},
    "feddyn": {"beta": 0.3},
    "label_split": {"classes_per_client": 2, "min_size": 1},
    "bias": {"size": 5},
    "n_class": {"size": 4},
}
OVERLAPPING = {"bias", "n_class"}


def options_for(name: str, labels: np.ndarray) -> dict[str, object]:
    return {"keys": labels % 7} if name == "natural" else SMALL[name]


def clients_for(name: str) -> int:
    return {"feddf": 13, "natural": 0}.get(name, 6)


@st.composite
def label_arrays(draw: st.DrawFn) -> np.ndarray:
    """120-300 labels of 3 or 4 classes that need not be consecutive, in random order."""
    classes = draw(st.sampled_from([(0, 1, 2), (0, 2, 5), (1, 3, 4, 9)]))
    size = draw(st.integers(120, 300))
    return np.random.default_rng(draw(st.integers(0, 1000))).choice(classes, size)


@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=12, deadline=None)
@given(labels=label_arrays(), seed=st.integers(0, 2**64 - 1))
def test_every_scheme_returns_valid_disjoint_reproducible_rows(name: str, labels: np.ndarray, seed: int) -> None:
    options, clients = options_for(name, labels), clients_for(name)
    assume(name != "shards" or 2 * clients % len(np.unique(labels)) == 0)
    parts = PARTITIONS[name](labels, clients, seed=seed, **options)
    again = PARTITIONS[name](labels, clients, seed=seed, **options)
    assert len(parts) == len(again)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))
    for part in parts:
        assert part.dtype == np.int64
        assert part.size == 0 or (part.min() >= 0 and part.max() < len(labels))
        assert len(np.unique(part)) == len(part)
    rows = np.concatenate(parts)
    if name not in OVERLAPPING:
        assert len(np.unique(rows)) == len(rows)


@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=12, deadline=None)
@given(labels=label_arrays(), seed=st.integers(0, 1000))
def test_the_number_of_rows_handed_out_is_as_stated(name: str, labels: np.ndarray, seed: int) -> None:
    options, clients = options_for(name, labels), clients_for(name)
    assume(name != "shards" or 2 * clients % len(np.unique(labels)) == 0)
    sizes = [len(part) for part in PARTITIONS[name](labels, clients, seed=seed, **options)]
    n = len(labels)
    if name in ("iid", "shards", "lda", "fedaux", "feddyn", "natural"):
        assert sum(sizes) == n
    elif name in ("hsu", "feddf"):
        assert sizes == [n // clients] * clients
    elif name in OVERLAPPING:
        assert sizes == [options["size"]] * clients
    else:  # rounding loses at most one sample a client and class
        assert n - clients * 4 <= sum(sizes) <= n


@given(labels=label_arrays(), clients=st.integers(1, 9), seed=st.integers(0, 1000))
def test_the_histogram_is_a_recount(labels: np.ndarray, clients: int, seed: int) -> None:
    parts = PARTITIONS["feddyn"](labels, clients, seed=seed, beta=0.5)
    counts = class_counts(parts, labels, 10)
    for k, part in enumerate(parts):
        assert counts[k].tolist() == [sum(1 for row in part if labels[row] == c) for c in range(10)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("iid", {}),
        ("iid", {"stratified": True}),
        ("shards", {"shards_per_client": 4}),
        ("lda", {"alpha": 0.05}),
        ("hsu", {"alpha": 0.05}),
        ("fedaux", {"alpha": 0.05}),
        ("mrtf", {"alpha": 0.05}),
        ("feddyn", {"beta": 0.05}),
        ("feddyn", {"beta": 0.05, "sigma": 0.5}),
        ("label_split", {"classes_per_client": 4}),
        ("natural", {"keys": np.zeros(120)}),
        ("n_class", {"classes_per_client": 4}),
    ],
)
def test_one_client_gets_everything(name: str, options: dict[str, object]) -> None:
    labels = np.repeat([0, 1, 2, 5], 30)
    (part,) = PARTITIONS[name](labels, 1, seed=3, **options)
    assert sorted(part.tolist()) == list(range(120))


CONCENTRATION = {"lda": "alpha", "hsu": "alpha", "feddf": "alpha", "fedaux": "alpha", "mrtf": "alpha", "feddyn": "beta"}


@pytest.mark.parametrize(("name", "key"), CONCENTRATION.items())
def test_a_large_concentration_makes_clients_nearly_uniform(name: str, key: str) -> None:
    labels = np.repeat(np.arange(5), 2000)
    counts = class_counts(PARTITIONS[name](labels, 10, seed=1, **{key: 1e5}), labels, 5)
    # hsu and feddyn draw sample by sample, and their last clients take what is left over
    most = 0.1 if name in ("hsu", "feddyn") else 0.05
    assert np.abs(counts / counts.sum(axis=1, keepdims=True) - 0.2).max() < most


@pytest.mark.parametrize(("name", "key"), CONCENTRATION.items())
@pytest.mark.parametrize("tiny", [1e-2, 1e-3, 1e-5])
def test_a_tiny_concentration_puts_nearly_one_class_on_a_client(name: str, key: str, tiny: float) -> None:
    labels = np.repeat(np.arange(10), 300)
    options: dict[str, object] = {key: tiny}
    if name == "lda":
        options["min_size"] = 0  # most clients then get nothing, and no attempt would pass
    if name == "mrtf":
        options["min_size"] = 1
    if name == "feddf":
        options["recut"] = False
    parts = PARTITIONS[name](labels, 10, seed=2, **options)
    least = {"hsu": 0.6, "feddyn": 0.35}.get(name, 0.8)  # these two must fill clients with what is left over
    assert top_class_share(class_counts(parts, labels, 10)) > least


@pytest.mark.parametrize("name", PARTITIONS)
def test_another_seed_gives_another_partition(name: str) -> None:
    labels = np.repeat(np.arange(4), 50)
    options, clients = options_for(name, labels), clients_for(name)
    if name == "natural":
        clients = 2  # a random choice of the seven keys
    firsts = [PARTITIONS[name](labels, clients, seed=seed, **options)[0].tolist() for seed in range(8)]
    assert len({tuple(first) for first in firsts}) > 1


@pytest.mark.parametrize("name", PARTITIONS)
def test_own_keys_can_be_read_from_the_signature(name: str) -> None:
    scheme = PARTITIONS[name]
    parameters = inspect.signature(scheme).parameters
    assert list(parameters)[:3] == ["labels", "clients", "seed"]
    own = [p for key, p in parameters.items() if key not in ("labels", "clients", "seed")]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own)
    assert all(p.default is not inspect.Parameter.empty or p.name == "keys" for p in own)
    first_line = (inspect.getdoc(scheme) or "").splitlines()[0]
    assert first_line.endswith(".")


def one_line_error(name: str, labels: np.ndarray, clients: int, **options: object) -> str:
    with pytest.raises(FedstillError) as caught:
        PARTITIONS[name](labels, clients, seed=0, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("name", "key"), CONCENTRATION.items())
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_concentration_that_is_not_positive_names_its_key(name: str, key: str, bad: float) -> None:
    assert f"partition.{key}" in one_line_error(name, np.repeat(np.arange(4), 50), 12, **{key: bad})


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural"}))
@pytest.mark.parametrize("clients", [0, -3])
def test_no_clients_is_an_error_that_names_the_key(name: str, clients: int) -> None:
    assert "partition.clients" in one_line_error(name, np.repeat(np.arange(4), 50), clients)


@pytest.mark.parametrize("name", ["iid", "shards", "lda", "hsu", "feddf", "fedaux", "mrtf", "feddyn"])
def test_more_clients_than_samples_is_an_error_that_names_the_key(name: str) -> None:
    assert "partition.clients" in one_line_error(name, np.repeat(np.arange(2), 10), 21)


@pytest.mark.parametrize("bad", [np.zeros(0, int), np.zeros(5), np.zeros((5, 2), int), np.array(["a", "b"])])
@pytest.mark.parametrize("name", ["iid", "lda", "bias"])
def test_labels_that_are_no_class_indices_are_an_error(name: str, bad: np.ndarray) -> None:
    assert "labels" in one_line_error(name, bad, 1)
