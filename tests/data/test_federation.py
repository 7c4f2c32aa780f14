"""Rows have one owner; the server's unlabeled rows have none."""

from __future__ import annotations

import csv
import itertools
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import HYPOTHESIS, fails, image_folder, pictures, write_parquet
from hypothesis import given
from hypothesis import strategies as st
from text_files import experiment as of_texts
from text_files import news
from text_files import table as text_table

import fedstill
from fedstill import Experiment, Federation
from fedstill.bench.results import cell_key
from fedstill.data import (
    Source,
    federation_from_tensors,
    from_tensors,
    hold_client_tests,
    hold_validation,
    load,
    make_federation,
    scale_inputs,
    split_unlabeled,
    tokenise,
)
from fedstill.data.source import KNOWN_STATISTICS
from fedstill.engine.device_data import Feed
from fedstill.experiment.build import build_federation, load_source
from fedstill.experiment.run import resume_run
from fedstill.experiment.run_folder import read_description


def numbered(rows: int) -> Source:
    """Every input is the number of its row, so that rows can be followed."""
    x = np.arange(rows, dtype=np.float32)[:, None]
    source = from_tensors(x, np.arange(rows) % 3, test=(-x[:4] - 1, [0, 1, 2, 0]))
    return source._replace(keys={"row": np.arange(rows)})


@HYPOTHESIS
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 3))
def test_each_client_gets_its_own_rows_in_order(sizes: list[int], spare: int) -> None:
    total = sum(sizes)
    source = numbered(total + spare + 3)
    rows = np.random.default_rng(0).permutation(total + spare + 3)[:total]
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    federation = make_federation(source, parts, partition="by hand")
    assert federation.population == len(sizes)
    assert federation.partition == "by hand"
    for k, part in enumerate(parts):
        mine = federation.indices[federation.offsets[k] : federation.offsets[k + 1]]
        assert mine.tolist() == part.tolist()
    assert federation.indices.dtype == federation.offsets.dtype == torch.int64


@HYPOTHESIS
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=6).filter(any),
    st.floats(0.01, 0.99),
    st.integers(0, 100),
)
def test_no_row_is_both_trained_on_and_tested_on(labels: list[list[int]], share: float, seed: int) -> None:
    sizes = [len(own) for own in labels]
    y = np.array([label for own in labels for label in own])
    source = from_tensors(np.zeros((len(y), 1), np.float32), y, test=(np.zeros((1, 1)), [0]), classes=["a", "b", "c"])
    whole = make_federation(source, np.split(np.random.default_rng(seed).permutation(len(y)), np.cumsum(sizes)[:-1]))
    held = hold_client_tests(whole, share, seed=seed)
    tested, offsets = held.client_test
    assert not set(held.indices.tolist()) & set(tested.tolist())
    assert held.population == whole.population == len(offsets) - 1
    for k, size in enumerate(sizes):
        trains = held.indices[held.offsets[k] : held.offsets[k + 1]].tolist()
        tests = tested[offsets[k] : offsets[k + 1]].tolist()
        own = whole.indices[whole.offsets[k] : whole.offsets[k + 1]].tolist()
        assert sorted(trains + tests) == sorted(own)
        assert len(tests) == (min(max(1, round(share * size)), size - 1) if size > 1 else 0)
        for label in range(3):  # a class has its share of the test, within one row
            count = sum(int(y[row]) == label for row in tests)
            assert abs(count - len(tests) * sum(int(y[row]) == label for row in own) / max(1, size)) <= 1
    again = hold_client_tests(whole, share, seed=seed)
    assert torch.equal(again.client_test[0], tested)
    assert torch.equal(again.indices, held.indices)


def test_the_seed_chooses_test_rows_and_nothing_else_moves() -> None:
    whole = make_federation(numbered(60), np.split(np.arange(60), 3))
    first, other = (hold_client_tests(whole, 0.2, seed=seed) for seed in (0, 1))
    assert not torch.equal(first.client_test[0], other.client_test[0])
    assert first.client_test[1].tolist() == other.client_test[1].tolist() == [0, 4, 8, 12]
    assert torch.equal(first.train.x, whole.train.x)


def test_clients_that_share_rows_hold_none_back() -> None:
    shared = make_federation(numbered(6), [np.array([0, 1]), np.array([1, 2])], shared_rows=True)
    assert "several clients share a row" in fails(hold_client_tests, shared, 0.5, seed=0)
    assert "data.client_test_share = 1: give a share" in fails(hold_client_tests, shared, 1.0, seed=0)


def test_owners_keep_their_names(tmp_path: Path) -> None:
    lines = [
        "town,ward,x,ill",
        *(f"{town},{ward},{ward},{ward % 2}" for ward in (2, 1) for town in "ba" for _ in "123"),
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    for keys, names in (("town", ("a", "b")), (["ward"], ("1", "2")), (["town", "ward"], ("a / 1", "a / 2"))):
        partition = {"scheme": "natural", "keys": keys, "clients": 0}
        data = {"source": str(tmp_path / "t.csv"), "label": "ill", "inputs": ["x"]}
        assert build_federation(Experiment(cohort=1, data=data, partition=partition)).names[:2] == names
    assert build_federation(Experiment.quickstart()).names == ()
    assert "2 names for 1 clients" in fails(make_federation, numbered(4), [np.arange(4)], names=["a", "b"])


def test_a_hundred_thousand_clients_are_put_together_in_a_moment() -> None:
    source = numbered(200_000)
    parts = list(np.arange(200_000).reshape(100_000, 2))
    start = time.monotonic()
    federation = make_federation(source, parts)
    assert time.monotonic() - start < 2.0
    assert federation.population == 100_000


def test_clients_may_be_empty_and_may_share_rows_where_the_procedure_says_so() -> None:
    source = numbered(6)
    empty = np.array([], np.int64)
    assert make_federation(source, [np.array([0, 1]), empty]).offsets.tolist() == [0, 2, 2]
    shared = make_federation(source, [np.array([0, 1]), np.array([1, 2])], shared_rows=True)
    assert shared.indices.tolist() == [0, 1, 1, 2]


def test_rows_that_cannot_be_shared_out_so_are_refused() -> None:
    source = numbered(6)
    a = np.array([0, 1])
    assert "row 1 belongs to clients 0 and 2" in fails(make_federation, source, [a, np.array([2]), np.array([1, 3])])
    assert "no client holds" in fails(make_federation, source, [np.array([], np.int64)])
    assert "row 6 is not in 0..5" in fails(make_federation, source, [a, np.array([6])])
    assert "row -1" in fails(make_federation, source, [np.array([-1])])
    assert "no client" in fails(make_federation, source, [])
    assert "integers" in fails(make_federation, source, [np.array([0.5])])
    assert "data.unlabeled" in fails(make_federation, source, [a], unlabeled=torch.zeros(3, 2))


def test_a_federation_carries_names_and_truth_of_what_the_server_holds() -> None:
    source = numbered(10)
    rest, unlabeled = split_unlabeled(source, 4, seed=0)
    rest, validation = hold_validation(rest, 3, seed=0)
    federation = make_federation(rest, [np.arange(3)], unlabeled=unlabeled, validation=validation)
    assert torch.equal(federation.unlabeled, unlabeled.x)
    assert federation.unlabeled_ids == unlabeled.ids
    assert federation.unlabeled_truth.tolist() == [int(x) % 3 for x in federation.unlabeled[:, 0]]
    assert federation.validation is validation
    plain = make_federation(source, [np.arange(3)], unlabeled=unlabeled.x)
    assert plain.unlabeled_ids == ("0", "1", "2", "3")
    assert plain.unlabeled_truth is None
    assert plain.validation is None
    wrong = (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
    assert "data.validation" in fails(make_federation, source, [np.arange(3)], validation=wrong)


def test_a_federation_from_one_pair_a_client() -> None:
    pixels = pictures(9)
    clients = [(pixels[:2], [5, 7]), (torch.from_numpy(pixels[2:6]), torch.tensor([7, 7, 5, 5])), (pixels[6:7], [5])]
    federation = federation_from_tensors(clients, test=(pixels[7:], [7, 5]), unlabeled=pixels[:3])
    assert federation.population == 3
    assert federation.offsets.tolist() == [0, 2, 6, 7]
    assert np.array_equal(federation.train.x[federation.indices], pixels[:7].transpose(0, 3, 1, 2))
    assert federation.train.classes == ("5", "7")
    assert federation.unlabeled is not None
    assert federation.unlabeled.shape == (3, 3, 5, 4)
    wrong = [(pixels[:2], [5, 7]), (pixels[:2, :3], [5, 7])]
    assert "client 1" in fails(federation_from_tensors, wrong, test=(pixels[7:], [7, 5]))
    assert "none" in fails(federation_from_tensors, [], test=(pixels[7:], [7, 5]))


# Whose mean and deviation inputs are scaled by, and what everybody knows of the clients' data by that.


CLIENTS_STATISTICS = ("mean and deviation of all clients' inputs (data.scale can change that)",)


CLIENTS_WORDS = ("a tokenizer trained on all clients' texts (data.tokenizer can change that)",)


def hospitals(path: Path, *, changed: int | None = None, rows: int = 120, seed: int = 0) -> Path:
    """A table of three hospitals; one row may hold something else."""
    x = np.random.default_rng(seed).normal(3.0, 2.0, (rows, 3)).round(3)
    if changed is not None:
        x[changed, :2] = 1e4
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(["a", "b", "c", "hospital", "label"])
        csv.writer(file).writerows([*row, f"h{i % 3}", "yn"[i % 2]] for i, row in enumerate(x.tolist()))
    return path


def of_table(path: Path, **data) -> Experiment:
    return Experiment(
        rounds=1,
        cohort=3,
        data={"source": str(path), "label": "label", **data},
        partition={"scheme": "natural", "keys": "hospital", "clients": 0},
        model={"name": "mlp", "hidden": [4], "init": "torch"},
        local={"steps": 2},
        engine={"device": "cpu"},
    )


def digits_of(**data) -> Experiment:
    return Experiment(data={"source": "digits", **data}, partition={"scheme": "iid", "clients": 4}, cohort=2)


def inputs(federation: Federation, x: torch.Tensor) -> torch.Tensor:
    """As a model would read them."""
    feed = Feed(x, torch.zeros(len(x), dtype=torch.int64), federation.train, torch.device("cpu"), torch.float32)
    return feed.inputs(slice(None))


def of_clients(federation: Federation) -> list[torch.Tensor]:
    rows, cuts = federation.indices, federation.offsets.tolist()
    return [inputs(federation, federation.train.x[rows[a:b]]) for a, b in itertools.pairwise(cuts)]


def differing(tmp_path: Path, **data) -> list[int]:
    """Clients whose inputs differ after a row that a client holds has changed."""
    plain = build_federation(of_table(hospitals(tmp_path / "plain.csv"), **data))
    row = int(load_rows(of_table(tmp_path / "plain.csv", **data))[plain.indices[0]])
    other = build_federation(of_table(hospitals(tmp_path / "changed.csv", changed=row), **data))
    pairs = list(zip(of_clients(plain), of_clients(other), strict=True))
    return [number for number, (one, two) in enumerate(pairs) if not torch.equal(one, two)]


def load_rows(experiment: Experiment) -> np.ndarray:
    """The row in its file of each train row that clients share."""
    data = experiment.data
    source, _ = split_unlabeled(load_source(experiment), data.unlabeled, seed=experiment.seed)
    return source.rows["train"]


def test_by_default_a_row_of_one_client_moves_the_inputs_of_all(tmp_path: Path) -> None:
    assert differing(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize(
    "data", [{"scale": "none"}, {"scale": "unlabeled", "unlabeled": 20}, {"mean": [1.0], "std": [2.0]}]
)
def test_a_row_of_one_client_leaves_the_inputs_of_others_as_they_are(tmp_path: Path, data: dict) -> None:
    assert differing(tmp_path, **data) == [0]


def test_inputs_without_a_scale_are_those_of_the_file_and_images_reach_from_0_to_1(tmp_path: Path) -> None:
    table = build_federation(of_table(hospitals(tmp_path / "t.csv"), scale="none"))
    assert torch.equal(inputs(table, table.train.x), table.train.x)
    digits = build_federation(digits_of(scale="none"))
    read = inputs(digits, digits.train.x)
    assert torch.equal(read, digits.train.x.float() / 255)
    assert (read.min(), read.max()) == (0.0, 1.0)


@pytest.mark.parametrize("limit", [None, 10])
def test_the_unlabeled_set_has_mean_0_and_deviation_1_in_its_own_scale(tmp_path: Path, limit: int | None) -> None:
    other = hospitals(tmp_path / "public.csv", seed=5, rows=40)
    data = {"scale": "unlabeled", "unlabeled": str(other), "unlabeled_limit": limit, "validation": 6}
    federation = build_federation(of_table(hospitals(tmp_path / "t.csv"), **data))
    read = inputs(federation, federation.unlabeled)
    assert len(read) == (limit or 40)
    assert torch.allclose(read.mean(0), torch.zeros(3), atol=1e-5)
    assert torch.allclose(read.std(0, correction=0), torch.ones(3), atol=1e-5)
    assert (federation.test.mean, federation.test.std) == (federation.train.mean, federation.train.std)


@pytest.mark.parametrize(
    "data", [{"unlabeled": "test"}, {"unlabeled": "central", "client_rows": 600}, {"unlabeled": 50}]
)
def test_images_are_scaled_by_whatever_the_server_holds(data: dict) -> None:
    federation = build_federation(digits_of(scale="unlabeled", **data))
    stored = federation.unlabeled.double() / 255
    assert federation.train.mean == pytest.approx([float(stored.mean())])
    assert federation.train.std == pytest.approx([float(stored.std(correction=0))])
    assert federation.public_facts == ()


def test_published_constants_give_way_only_when_asked_to() -> None:
    plain, own = (build_federation(Experiment(data={"source": "fashion-mini", **data})) for data in DEFAULT_AND_OWN)
    assert (plain.train.mean, plain.train.std) == KNOWN_STATISTICS["fashionmini"]
    assert own.train.mean != plain.train.mean


DEFAULT_AND_OWN = ({"unlabeled": 500}, {"unlabeled": 500, "scale": "unlabeled"})


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        ({}, CLIENTS_STATISTICS),
        ({"unlabeled": 20, "validation": 10}, CLIENTS_STATISTICS),
        ({"client_rows": 50}, CLIENTS_STATISTICS),
        ({"scale": "none"}, ()),
        ({"scale": "unlabeled", "unlabeled": 20}, ()),
        ({"mean": [1.0, 2.0, 3.0], "std": [1.0]}, ()),
    ],
)
def test_what_everybody_knows_of_a_table(tmp_path: Path, data: dict, facts: tuple[str, ...]) -> None:
    path = hospitals(tmp_path / "t.csv")
    assert build_federation(of_table(path, **data)).public_facts == facts
    assert build_federation(of_table(path, **data)).public_facts == facts  # from the cache


def test_what_everybody_knows_of_images(tmp_path: Path) -> None:
    for name, facts in (("zoo", CLIENTS_STATISTICS), ("cifar10", ())):  # known by its name: published constants
        image_folder(tmp_path / name, {"a": 8, "b": 8})
        own = Experiment(data=str(tmp_path / name), partition={"scheme": "iid", "clients": 2}, cohort=2)
        assert build_federation(own).public_facts == facts
    assert build_federation(digits_of()).public_facts == ()
    assert build_federation(digits_of(size=4)).public_facts == ()
    assert build_federation(Experiment(data="fashion-mini")).public_facts == ()


def test_an_own_folder_called_as_an_embedded_set_is_no_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_folder(tmp_path / "digits", {"a": 8, "b": 8})
    monkeypatch.chdir(tmp_path)
    assert build_federation(digits_of(source="./digits")).public_facts == CLIENTS_STATISTICS


def test_what_everybody_knows_of_texts(tmp_path: Path) -> None:
    path = text_table(tmp_path / "news.csv", news())
    assert build_federation(of_texts(path, unlabeled="none")).public_facts == CLIENTS_WORDS
    assert build_federation(of_texts(path)).public_facts == ()
    source, _ = tokenise(load(path, inputs=["text"], text=True), length=12)
    given = tmp_path / "tokenizer.json"
    given.write_text(source.train.tokenizer.file)
    assert build_federation(of_texts(path, unlabeled="none", tokenizer=str(given))).public_facts == ()
    windows = load(path, inputs=["text"], window=5)
    assert make_federation(windows, [np.arange(4)]).public_facts == ()


def test_tensors_tell_their_statistics_unless_scaled_otherwise() -> None:
    x, y = np.random.default_rng(0).normal(2.0, 3.0, (40, 2)), np.arange(40) % 2
    clients, more = [(x[:20], y[:20]), (x[20:], y[20:])], {"test": (x[:4], y[:4]), "unlabeled": x[:10] + 1}
    found = {
        how: fedstill.federation_from_tensors(clients, scale=how, **more) for how in ("train", "unlabeled", "none")
    }
    facts = {how: federation.public_facts for how, federation in found.items()}
    assert facts == {"train": CLIENTS_STATISTICS, "unlabeled": (), "none": ()}
    assert found["train"].train.mean == pytest.approx(x.mean(0), rel=1e-6)
    assert found["unlabeled"].train.mean == pytest.approx(x[:10].mean(0) + 1, rel=1e-6)


def task(**shape) -> Source:
    random = np.random.default_rng(0)
    return from_tensors(random.normal(size=(20, 3)), np.arange(20) % 2, **shape)


def test_mistakes_teach(tmp_path: Path, source: Source) -> None:
    table = of_table(hospitals(tmp_path / "t.csv"), scale="unlabeled")
    assert fails(build_federation, table) == (
        "data.scale = 'unlabeled': the server has no unlabeled set to take mean and deviation from; set data.unlabeled "
        "(a number of rows, a folder or a file), or data.scale = 'none'"
    )
    assert "the server has no unlabeled set" in fails(scale_inputs, task(), torch.zeros(0, 3), "unlabeled")
    assert fails(scale_inputs, task(), torch.zeros(4, 2), "unlabeled") == (
        "data.scale = 'unlabeled': samples are (2,) torch.float32, the task's are (3,) torch.float32; give "
        "samples of the same kind, or data.scale = 'none'"
    )
    assert "are (3,) torch.uint8" in fails(scale_inputs, task(), torch.zeros(4, 3, dtype=torch.uint8), "unlabeled")
    assert "did you mean 'unlabeled'?" in fails(scale_inputs, task(), None, "unlabelled")
    path = text_table(tmp_path / "texts.csv", news())
    told = fails(build_federation, of_texts(path, scale="unlabeled"))
    assert told == "data.scale = 'unlabeled': texts is read as text, which is not scaled; leave it out"
    assert build_federation(of_texts(path, scale="none")).train.mean == (0.0,)
    assert "data.mean: texts is read as text" in fails(build_federation, of_texts(path, mean=[0.0], std=[1.0]))


def test_an_unlabeled_set_of_another_kind_is_refused(tmp_path: Path) -> None:
    image_folder(tmp_path / "web", {"x": 3})
    path = hospitals(tmp_path / "t.csv")
    told = fails(build_federation, of_table(path, scale="unlabeled", unlabeled=str(tmp_path / "web")))
    assert told.startswith("data.unlabeled")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"scale": "trian"}, "data.scale = \"trian\" is unknown: did you mean 'train'?"),
        ({"mean": [0.5]}, "data.mean needs data.std beside it: set both, e.g. data.std = [0.5]"),
        ({"std": [0.5]}, "data.std needs data.mean beside it: set both, e.g. data.mean = [0.5]"),
        ({"mean": [0.5], "std": [0.0]}, "data.std = 0.0 must be a number above 0"),
        ({"mean": ["a"], "std": [1.0]}, 'data.mean = "a" must be a number: e.g. data.mean = [0.5]'),
        (
            {"mean": [0.5], "std": [1], "scale": "none"},
            "data.scale = 'none' and data.mean both say how inputs are scaled: remove one of them",
        ),
    ],
)
def test_mistakes_of_the_file(data: dict, told: str) -> None:
    assert told in fails(Experiment, data=data)


def test_numbers_fit_the_inputs() -> None:
    told = "data.mean has 2 numbers, tensors has 3 columns (a word of a column counts as one): give 1 or 3"
    assert fails(scale_inputs, task(), mean=(0.0, 0.0), std=(1.0, 1.0)) == told
    assert "data.std holds 0; deviations are above 0" in fails(scale_inputs, task(), mean=(0.0,), std=(0.0,))
    digits = digits_of(mean=[0.1, 0.2], std=[1.0])
    assert fails(build_federation, digits) == "data.mean has 2 numbers, digits has 1 channels: give 1"


def test_the_default_changes_no_name_of_a_result() -> None:
    assert cell_key(digits_of()) == cell_key(digits_of(scale="train", mean=[], std=[]))
    assert cell_key(digits_of()) != cell_key(digits_of(scale="none"))


def photos(folder: Path, rows: range) -> Path:
    from PIL import Image

    folder.mkdir()
    for row in rows:
        Image.fromarray(load("digits").test.x[row, 0].numpy()).save(folder / f"{row:03}.png")
    return folder


@pytest.mark.parametrize("fate", ["stays", "grows", "goes"])
def test_predictions_and_resumed_runs_scale_as_the_run_did_whatever_becomes_of_the_unlabeled_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    public, new = photos(tmp_path / "public", range(12)), photos(tmp_path / "new", range(20, 26))
    one = digits_of(scale="unlabeled", unlabeled=str(public)).replace(rounds=1, model={"name": "mlp", "hidden": [4]})
    federation = build_federation(one)
    fedstill.run(one, run_dir=tmp_path / "run", pictures=False)
    used = (federation.train.mean, federation.train.std)
    written = read_description(tmp_path / "run").data
    assert (written.scale, written.mean, written.std) == ("unlabeled", *used)
    if fate == "grows":
        shutil.copy(new / "020.png", public)
    if fate == "goes":
        shutil.rmtree(public)
    seen = watched(monkeypatch)
    fedstill.predict(tmp_path / "run", new)
    assert seen
    assert set(seen) == {used}
    if fate == "stays":
        assert resume_run(tmp_path / "run").history.rows
        fedstill.run(one, run_dir=tmp_path / "run", pictures=False, resume=True)
        assert set(seen) == {used}


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Mean and deviation of every set that is brought to a device from now on."""
    seen, begin = [], Feed.__init__

    def begin_and_tell(self, x, y, dataset, *rest, **more):
        seen.append((dataset.mean, dataset.std))
        begin(self, x, y, dataset, *rest, **more)

    monkeypatch.setattr(Feed, "__init__", begin_and_tell)
    return seen


@pytest.mark.parametrize("data", [{}, {"scale": "none"}, {"scale": "unlabeled", "unlabeled": 20}])
def test_predictions_about_a_table_read_the_same_inputs_as_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict
) -> None:
    one = of_table(hospitals(tmp_path / "t.csv"), **data)
    federation = build_federation(one)
    fedstill.run(one, run_dir=tmp_path / "run", pictures=False)
    seen = watched(monkeypatch)
    fedstill.predict(tmp_path / "run", hospitals(tmp_path / "new.csv", seed=9, rows=12))
    assert set(seen) == {(federation.train.mean, federation.train.std)}
    pinned = read_description(tmp_path / "run").data.mean
    assert pinned == (federation.train.mean if data.get("scale") == "unlabeled" else ())


def test_another_test_set_is_scaled_alike(tmp_path: Path) -> None:
    path, other = hospitals(tmp_path / "t.csv"), hospitals(tmp_path / "other.csv", seed=3)
    federation = build_federation(of_table(path, scale="unlabeled", unlabeled=20, test=str(other)))
    assert federation.test.mean == federation.train.mean
    plain = build_federation(of_table(path, unlabeled=20, test=str(other)))
    assert federation.test.mean != plain.test.mean
    assert torch.equal(federation.test.x, plain.test.x)


def test_columns_of_words_and_columns_that_never_change(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    columns = {"word": ["a", "b"] * 20, "same": [7.0] * 40, "label": ([0] * 4 + [1] * 4) * 5}
    write_parquet(path, columns)
    source, unlabeled = split_unlabeled(load(path, label="label"), 10, seed=0)
    scaled = scale_inputs(source, unlabeled, "unlabeled")
    assert scaled.train.mean[2] == 7.0
    assert scaled.train.std[2] == 1.0
    assert scaled.train.columns == source.train.columns
    assert scaled.train.x is source.train.x
