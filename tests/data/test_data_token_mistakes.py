"""Texts, tokenizers and networks that do not fit each other are told in one line."""

from __future__ import annotations

import json
import sys

import pyarrow
import pyarrow.parquet
import pytest
from data_files import fails
from text_files import experiment, news, table

from fedstill import Experiment
from fedstill.data import load, tokenise, tokens
from fedstill.data.source import Reading
from fedstill.experiment.build import build_federation, check_ready


def test_columns_that_are_no_text_or_too_many_are_told(tmp_path):
    numbers = table(tmp_path / "numbers.csv", [(1, 2, "a"), (3, 4, "b")] * 6, header=("age", "size", "label"))
    assert "one column of text of numbers; it has none among age, size, label" in fails(load, numbers, text=True)
    two = table(tmp_path / "two.csv", [("a b", "c d", "a"), ("e f", "g h", "b")] * 6, header=("title", "body", "label"))
    assert "one column of text of two; it has title, body; set data.inputs to one of them" in fails(
        load, two, text=True
    )
    assert load(two, inputs=["body"], text=True).columns[0].name == "body"
    assert "reads one column of text of two, not title and body" in fails(
        load, two, inputs=["title", "body"], text=True
    )
    assert "of two, not bodi; it has title, body; did you mean 'body'" in fails(load, two, inputs=["bodi"], text=True)
    named = table(tmp_path / "ids.csv", [("a1", "c d", "a"), ("b2", "g h", "b")] * 6, header=("id", "body", "label"))
    assert load(named, text=True).columns[0].name == "body"
    empty = table(tmp_path / "empty.csv", [("a b", "a"), ("", "b")] * 6, header=("text", "label"))
    assert "column 'text' of empty has no value in row 2" in fails(load, empty, text=True)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_text_of_spaces_is_none_in_every_kind_of_file(tmp_path, kind):
    texts, labels = ["a b", "   "] * 6, ["a", "b"] * 6
    file = tmp_path / f"blank.{kind}"
    if kind == "csv":
        table(file, zip(texts, labels, strict=True), header=("text", "label"))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": labels}), file)
    assert "column 'text' of blank has no value in row 2" in fails(load, file, text=True)


def test_window_and_tokens_exclude_each_other():
    told = fails(Experiment, data={"source": "x.csv", "window": 8, "tokens": 8})
    assert told.startswith("data.window and data.tokens both say how text is read")
    assert "use one of them" in fails(Reading, window=8, text=True)
    assert "set data.tokens" in fails(Experiment, data={"source": "x.csv", "tokenizer": "t.json"})
    assert "data.tokens = 2" in fails(Experiment, data={"source": "x.csv", "tokens": 2})


def test_a_vocabulary_below_the_letters_of_the_text_is_too_small(source):
    told = fails(tokenise, source, length=8, vocabulary=30)
    assert told.startswith("data.vocabulary = 30 is too small: the letters of the text alone take ")
    assert told.endswith("use e.g. 8192")
    needed = int(told.split(" take ")[1].split(";")[0])
    assert tokenise(source, length=8, vocabulary=needed)[0].train.tokenizer.size == needed


def test_a_tokenizer_file_that_will_not_do_is_told(tmp_path, source):
    def given(content: str) -> str:
        (tmp_path / "bad.json").write_text(content)
        return fails(tokenise, source, length=8, tokenizer=tmp_path / "bad.json")

    assert "data.tokenizer: cannot read" in fails(tokenise, source, length=8, tokenizer=tmp_path / "none.json")
    assert "this is no tokenizer.json of the tokenizers package" in given("{}")
    own = json.loads(tokens.train_tokenizer([text for _, text, _ in news()], 100))
    own["model"]["vocab"] = {("!" if name == "[PAD]" else name): id for name, id in own["model"]["vocab"].items()}
    assert "id 0 fills texts up, but is '!' there" in given(json.dumps(own))
    good, _ = tokenise(source, length=8, vocabulary=100)
    assert "data.tokens = 2 leaves no room for words" in fails(tokens.opened, good.train.tokenizer.file, 2)
    assert "holds no texts: load it with text=True" in fails(tokenise, good, length=8)


def test_networks_that_cannot_read_tokens_are_told_which_can(tmp_path):
    path = table(tmp_path / "news.csv", news())
    tokens_of = experiment(path)
    federation = build_federation(tokens_of)
    lstm, mlp = (tokens_of.replace(model={"name": name}) for name in ("char_lstm", "mlp"))
    assert "'char_lstm' reads characters, not tokens: use 'bert', or data.window" in fails(
        check_ready, lstm, federation
    )
    assert "'mlp' cannot read text: use 'bert' or 'char_lstm'" in fails(check_ready, mlp, federation)
    digits = Experiment(data="digits", model="bert", partition={"scheme": "iid", "clients": 10})
    assert "'bert' reads text, digits holds numbers: set data.tokens" in fails(
        check_ready, digits, build_federation(digits)
    )


def test_without_the_package_the_extra_is_named(monkeypatch, source):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert fails(tokenise, source, length=8) == "tokenizers is not installed; run: pip install 'fedstill[text]'"
