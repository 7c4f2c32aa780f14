"""A column of text becomes windows: so many characters in, the next one out, each owner by itself."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import fails, write_parquet

from fedstill import Experiment
from fedstill.data import load, owners
from fedstill.data.text import CLASSES, LETTERS, cut_windows, encode
from fedstill.experiment.build import build, build_federation
from fedstill.experiment.run import run
from fedstill.loop.federate import check_built

SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "shakespeare"


def read(ids) -> str:
    """Ids back to characters."""
    return "".join((*LETTERS, "?!")[id] if id < 80 else "~" for id in np.asarray(ids).tolist())


def plays(folder: Path, rows: list[tuple[str, str, str]]) -> Path:
    path = folder / "plays.parquet"
    write_parquet(path, {name: [row[i] for row in rows] for i, name in enumerate(("play", "role", "text"))})
    return path


def test_there_are_leafs_80_characters_and_one_for_all_others():
    assert len(LETTERS) == len(set(LETTERS)) == 80
    assert len(CLASSES) == len(set(CLASSES)) == 81
    assert encode("\tAz}|é😀 ").tolist() == [LETTERS.index("A"), LETTERS.index("z"), 79, 80, 80, 80]
    assert encode("a \n\n b").tolist() == [LETTERS.index("a"), 1, LETTERS.index("b")]


def test_windows_of_a_short_text_by_hand():
    """'abcdef' in windows of 3: abc-d, bcd-e, cde-f; 'xyz' has no character after its window, 'wxyz' one."""
    train, test = cut_windows([encode("abcdef"), encode("xyz"), encode("wxyz"), encode("")], 3, held_out=0.0)
    assert [read(x) for x in train.x] == ["abc", "bcd", "cde", "wxy"]
    assert read(train.y) == "defz"
    assert train.owner.tolist() == [0, 0, 0, 2]
    assert len(test.y) == 0
    assert test.x.shape == (0, 3)


def test_the_last_windows_are_held_out_and_those_that_read_what_training_reads_are_left_out():
    """26 letters, windows of 3: 23 windows, int(0.8 * 23) = 18 to train; the test begins at window 18 + 3 - 1 = 20."""
    train, test = cut_windows([encode("abcdefghijklmnopqrstuvwxyz")], 3, held_out=0.2)
    assert [read(x) for x in train.x][0::17] == ["abc", "rst"]
    assert read(train.y)[-1] == "u"
    assert [read(x) for x in test.x] == ["uvw", "vwx", "wxy"]
    assert read(test.y) == "xyz"
    assert not set(read(train.x.reshape(-1))) & set(read(test.x.reshape(-1)))


def test_rows_of_one_owner_are_joined_in_order_and_never_mixed_with_another(tmp_path):
    """Each (play, role) has its own letters, and the same role speaks in two plays."""
    said = [("p1", "ann", "a" * 9), ("p1", "bob", "b" * 20), ("p2", "ann", "c" * 20), ("p1", "ann", "A" * 9)]
    source = load(plays(tmp_path, said), inputs=["text"], keys=["play", "role"], window=4)
    for split in (source.train, source.test):
        for x, y in zip(split.x, split.y, strict=True):
            assert len({{"A": "a", " ": "a"}.get(letter, letter) for letter in read([*x, y])}) == 1
    first = source.train.x[(source.keys["play"] == 0) & (source.keys["role"] == 0)]
    whole = "a" * 9 + " " + "A" * 9
    assert [read(x) for x in first] == [whole[i : i + 4] for i in range(int(0.8 * 15))]
    assert sorted(set(owners(source, "play", "role").tolist())) == [0, 1, 2]
    assert source.train.x.dtype == torch.uint8
    assert source.train.text
    assert (source.train.mean, source.train.std) == ((0.0,), (1.0,))


def test_without_keys_every_row_is_a_text_of_its_own(tmp_path):
    source = load(plays(tmp_path, [("p", "r", "a" * 30), ("p", "r", "b" * 30)]), inputs=["text"], window=3)
    assert {read([*x, y]) for x, y in zip(source.train.x, source.train.y, strict=True)} == {"aaaa", "bbbb"}
    assert not source.keys


def test_a_test_split_of_its_own_is_read_whole_and_nothing_is_held_out(tmp_path):
    for split, text in (("train", "abcdefgh"), ("test", "stuvwxyz")):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", {"text": [text]})
    source = load(tmp_path, window=3)
    assert (len(source.train.y), len(source.test.y)) == (5, 5)
    assert read(source.test.y) == "vwxyz"


def test_texts_too_short_are_left_out_and_counted(tmp_path):
    rows = [("p", "long", "abcdefgh" * 10), ("p", "short", "abc"), ("p", "just", "abcd")]
    source = load(plays(tmp_path, rows), inputs=["text"], keys=["play", "role"], window=3)
    assert "1 of 3 texts have no more than 3 characters and are left out" in source.notes
    assert sorted(np.unique(source.keys["role"]).tolist()) == [0, 1]  # just, long; short is 2


def test_windows_come_back_from_the_cache_as_they_went_in(tmp_path):
    path = plays(tmp_path, [("p", "r", "To be, or not to be: that is the question." * 3)])
    first, again = (load(path, inputs=["text"], keys=["play", "role"], window=6) for _ in range(2))
    assert torch.equal(first.train.x, again.train.x)
    assert again.train.x.dtype == torch.uint8
    assert torch.equal(first.test.y, again.test.y)
    assert again.keys["role"].tolist() == first.keys["role"].tolist()
    assert load(path, inputs=["text"], keys=["play", "role"], window=7).train.x.shape[1] == 7


def test_mistakes_are_one_line_that_names_the_key(tmp_path):
    path = plays(tmp_path, [("p", "r", "abcdefgh" * 10)])
    for options, told in (
        ({"inputs": ["txt"]}, "did you mean 'text'?"),
        ({"inputs": ["text", "role"]}, "data.inputs: fedstill reads one column of text of plays, not text and role"),
        ({}, "of text of plays; it has play, role, text; set data.inputs"),
        ({"inputs": ["text"], "label": "role"}, "data.label: with data.window the label is the next character"),
        ({"inputs": ["text"], "keys": ["rolle"]}, "did you mean 'role'?"),
        ({"inputs": ["text"], "window": 80}, "data.window = 80: no text of plays is long enough for a window to train"),
        ({"inputs": ["text"], "window": 40}, "data.window = 40: no text of plays is long enough for a window to test"),
        ({"inputs": ["text"], "window": 0}, "data.window = 0 is too small"),
    ):
        assert told in fails(load, path, **{"window": 3, **options})
    assert "of text of digits; it has none among image, label" in fails(load, "digits", window=3)


def experiment(path: Path, **changes) -> Experiment:
    return Experiment(
        **{
            "rounds": 2,
            "cohort": 2,
            "data": {"source": str(path), "inputs": ["text"], "window": 5},
            "partition": {"scheme": "natural", "keys": ["play", "role"], "clients": 0},
            "model": {"name": "char_lstm", "embedding": 3, "hidden": 8, "layers": 1},
            "local": {"steps": 20, "batch_size": 10, "lr": 2.0},
            **changes,
        }
    )


def test_an_experiment_learns_the_next_character_of_every_role(tmp_path):
    """'abcabc...': after two rounds of 20 steps the next letter is known; chance is a third."""
    path = tmp_path / "plays.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("play", "role", "text"), *(("p", f"r{k}", "abc" * 40) for k in range(3))])
    what = experiment(path)
    federation = build_federation(what)
    assert federation.population == 3
    assert len(federation.train.classes) == 81
    result = run(what, federation=federation)
    assert result.history.evaluated[-1]["accuracy"] > 0.9


def test_some_roles_train_and_a_part_of_all_roles_windows_is_tested_on_as_in_mrtf(tmp_path):
    """MrTF keeps a tenth of the clients and a tenth of a test set pooled from all users, trained or not."""
    path = plays(tmp_path, [("p", f"r{k}", "abcdefghijklmnopqrst"[k] * 60) for k in range(20)])
    data = {"source": str(path), "inputs": ["text"], "window": 5, "unlabeled": "test"}
    partition = {"scheme": "natural", "keys": ["play", "role"], "clients": 2}
    whole, part = (
        build_federation(experiment(path, data=d, partition=partition)) for d in (data, {**data, "test_limit": 50})
    )
    assert part.population == 2
    assert len(part.test.y) == len(part.unlabeled) == 50
    assert len(whole.test.y) > 100
    trained = set(part.train.y[part.indices].tolist())
    assert len(trained) == 2
    assert len(set(part.test.y.tolist()) - trained) > 10
    assert part.unlabeled_ids is not None
    assert set(part.unlabeled_ids) < set(whole.unlabeled_ids)


def test_networks_for_text_and_for_numbers_are_not_confused(tmp_path):
    path = plays(tmp_path, [("p", "r", "abcdefgh" * 10)])
    mlp = experiment(path, cohort=1, model="mlp")
    told = "model.name = 'mlp' cannot read text: use 'bert' or 'char_lstm'"
    assert told in fails(lambda: check_built(build(mlp, build_federation(mlp))))
    table = tmp_path / "table.csv"
    table.write_text("a,b,label\n" + "\n".join(f"{i},{i * i},{i % 2}" for i in range(20)), encoding="utf-8")
    numbers = experiment(table, cohort=1, data={"source": str(table)}, partition={"scheme": "iid", "clients": 1})
    told = "model.name = 'char_lstm' reads text, table holds numbers: set data.window"
    assert told in fails(lambda: check_built(build(numbers, build_federation(numbers))))


def test_numbered_owners_of_several_columns_are_told_apart(tmp_path):
    """(1, 11) is not (11, 1), and owners come in the order of their columns."""
    path = tmp_path / "t.csv"
    pairs = [(1, 11), (11, 1), (2, 1), (1, 2)] * 5
    path.write_text("u,v,x,label\n" + "\n".join(f"{u},{v},{i},{i % 2}" for i, (u, v) in enumerate(pairs)), "utf-8")
    source = load(path, keys=["u", "v"])
    rank = {(1, 2): 0, (1, 11): 1, (2, 1): 2, (11, 1): 3}
    wanted = [rank[pair] for pair in zip(source.keys["u"].tolist(), source.keys["v"].tolist(), strict=True)]
    assert owners(source, "u", "v").tolist() == wanted


@pytest.mark.slow
@pytest.mark.skipif(not SHAKESPEARE.is_dir(), reason="needs ../shared/data/shakespeare")
def test_shakespeare_has_leafs_number_of_windows_and_its_roles_are_clients():
    """LEAF counts 4,226,158 windows of 1,129 roles in another edition of the plays."""
    what = experiment(SHAKESPEARE, data={"source": str(SHAKESPEARE), "inputs": ["text"], "window": 80})
    federation = build_federation(what)
    assert federation.population == pytest.approx(1129, rel=0.05)
    gaps = 79 * federation.population  # at most
    assert 0 < 4_226_158 - len(federation.train.y) - len(federation.test.y) < gaps + 0.01 * 4_226_158
    assert federation.train.x.shape[1] == 80
    assert bool((torch.bincount(federation.train.y, minlength=81)[80] / len(federation.train.y)) < 1e-4)
    counts = federation.offsets.diff()
    assert int(counts.min()) >= 1
    assert int(counts.sum()) == len(federation.train.y)
