"""Texts become token ids: the tokenizer learns from texts that the server may read; mistakes are told in one line."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
from data_files import fails, write_parquet
from text_files import SMALL, experiment, news, table

from fedstill import Experiment
from fedstill.data import load, owners, read_unlabeled, split_unlabeled, text, tokenise, tokens
from fedstill.data.source import Reading
from fedstill.experiment.build import build, build_federation, load_source
from fedstill.experiment.model import build_network
from fedstill.experiment.run import resume_run, run
from fedstill.loop.evaluate import label_counts
from fedstill.loop.federate import check_built
from fedstill.prediction import predict

AG_NEWS = Path(__file__).parents[3] / "shared" / "data" / "ag_news"


def words(ids, tokenizer) -> list[str]:
    """Ids back to tokens."""
    package = tokenizers.Tokenizer.from_str(tokenizer.file)
    return [package.id_to_token(one) for one in np.asarray(ids).tolist()]


def test_a_text_is_cls_its_words_in_lower_case_sep_and_padding(source):
    task, _ = tokenise(source, length=12, vocabulary=400)
    tokenizer = task.train.tokenizer
    ids = tokens.encode(["The TEAM won!", "the " * 30, ""], tokenizer)
    assert ids.dtype == np.int32
    assert words(ids[0], tokenizer) == ["[CLS]", "the", "team", "won", "[UNK]", "[SEP]", *["[PAD]"] * 6]
    assert words(ids[1], tokenizer) == ["[CLS]", *["the"] * 10, "[SEP]"]
    assert words(ids[2], tokenizer) == ["[CLS]", "[SEP]", *["[PAD]"] * 10]
    assert ids[2].tolist() == [2, 3, *[0] * 10]


def test_labels_keys_and_rows_stay_with_their_texts(source):
    task, _ = tokenise(source, length=16, vocabulary=400)
    assert task.train.classes == ("money", "sport")
    assert (task.train.text, task.train.x.dtype, tuple(task.train.x.shape)) == (True, torch.int32, (32, 16))
    assert (task.train.mean, task.train.std) == ((0.0,), (1.0,))
    assert task.texts is None
    users = owners(task, "user")
    rows = news()
    for split, data in (("train", task.train), ("test", task.test)):
        for place, row in enumerate(task.rows[split].tolist()):
            user, text, label = rows[row]
            assert data.x[place].tolist() == tokens.encode([text], data.tokenizer)[0].tolist()
            assert data.classes[int(data.y[place])] == label
            assert split == "test" or users[place] == user


def test_the_vocabulary_is_as_large_as_asked_for_or_as_the_text_gives(source):
    small, _ = tokenise(source, length=8, vocabulary=60)
    large, _ = tokenise(source, length=8, vocabulary=8192)
    assert small.train.tokenizer.size == 60
    assert 60 < large.train.tokenizer.size < 300
    assert int(large.train.x.max()) < large.train.tokenizer.size
    known = tokenizers.Tokenizer.from_str(small.train.tokenizer.file).get_vocab()
    assert [known[name] for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]


def test_the_same_texts_give_the_same_tokenizer_in_any_order():
    """The package's own trainer gives another one in every call: it numbers pieces in the order of a hash table."""
    lines = [f"{text} {'abcdefghijklmnopqrstuvwxyz'[i % 26 :]}" for i, (_, text, _) in enumerate(news(80))]
    here = tokens.train_tokenizer(lines, 120)
    assert all(tokens.train_tokenizer(lines, 120) == here for _ in range(4))
    assert tokens.train_tokenizer(lines[::-1], 120) == here


def test_pieces_occur_twice_and_rare_letters_are_unknown(monkeypatch):
    known = json.loads(tokens.train_tokenizer(["once twice", "twice ab"], 8192))["model"]["vocab"]
    assert "twice" in known
    assert "once" not in known
    monkeypatch.setattr(tokens, "MOST_LETTERS", 2)  # a, which is there four times, and b, before c
    known = json.loads(tokens.train_tokenizer(["aa bc", "aa cb"], 8192))["model"]["vocab"]
    assert set(known) - set(tokens.SPECIAL) == {"a", "b", "##a", "##b", "aa"}


def test_a_text_cannot_smuggle_in_a_special_token(source):
    task, _ = tokenise(source, length=12, vocabulary=400)
    found = tokens.encode(["the [MASK] [PAD] team [CLS]"], task.train.tokenizer)[0].tolist()
    assert found[0] == 2
    assert not {0, 4} & set(found[: found.index(3)])
    assert found.count(2) == 1


def test_half_a_character_is_read_as_something_unknown(source):
    task, _ = tokenise(source, length=6, vocabulary=400)
    assert tokens.encode(["the \ud800 team"], task.train.tokenizer).shape == (1, 6)


def test_without_unlabeled_text_the_tokenizer_reads_the_clients_texts_and_a_warning_says_so(source, caplog):
    with caplog.at_level(logging.WARNING, logger="fedstill.run"):
        task, none = tokenise(source, length=8, vocabulary=400)
    assert none is None
    assert "trained on the clients' private texts" in caplog.text
    assert "set data.unlabeled or data.tokenizer" in caplog.text
    assert "match" in tokenizers.Tokenizer.from_str(task.train.tokenizer.file).get_vocab()


def test_with_unlabeled_text_the_tokenizer_reads_that_alone(tmp_path, source, caplog):
    """The clients' word 'match' is in no unlabeled line; 'zebra' is in no text of theirs."""
    (tmp_path / "lines.txt").write_text("a zebra ran\n\n  the zebra   ran home\nzebra zebra\n", encoding="utf-8")
    rest, unlabeled = split_unlabeled(source, str(tmp_path / "lines.txt"), seed=0)
    with caplog.at_level(logging.WARNING, logger="fedstill.run"):
        task, unlabeled = tokenise(rest, unlabeled, length=8, vocabulary=400)
    assert not caplog.text
    known = tokenizers.Tokenizer.from_str(task.train.tokenizer.file).get_vocab()
    assert "zebra" in known
    assert "match" not in known
    assert unlabeled.ids == ("0", "1", "2")
    wanted = tokens.encode(["a zebra ran", "the zebra ran home", "zebra zebra"], task.train.tokenizer)
    assert unlabeled.x.tolist() == wanted.tolist()


def test_rows_that_are_held_out_teach_the_tokenizer_and_those_of_clients_do_not(tmp_path):
    """Each text says its own number twice; numbers of clients' rows are no word of the tokenizer."""
    names = [f"qqq{first}{second}" for first in "ab" for second in "abcdefghijklmnopqrstuvwxyz01234"]
    rows = [("u", f"row {name} {name}", i % 2) for i, name in enumerate(names[:60])]
    raw = load(table(tmp_path / "rows.csv", rows), inputs=["text"], text=True)
    for seed in (0, 1):
        rest, unlabeled = split_unlabeled(raw, 20, seed=seed)
        task, held = tokenise(rest, unlabeled, length=8, vocabulary=8192)
        known = tokenizers.Tokenizer.from_str(task.train.tokenizer.file).get_vocab()
        mine = {rows[int(name.split("/")[1])][1].split()[1] for name in unlabeled.ids}
        theirs = {rows[row][1].split()[1] for row in task.rows["train"].tolist()}
        assert mine <= set(known)
        assert not theirs & set(known)
        assert len(held.x) == len(held.truth) == 20


def test_the_test_inputs_and_a_central_pool_can_teach_it_too(tmp_path):
    path = table(tmp_path / "news.csv", news(60))
    for choice in ({"unlabeled": "test"}, {"unlabeled": "central", "client_rows": 20}):
        experiment = Experiment(data={"source": str(path), "inputs": ["text"], "tokens": 8, **choice}, **SMALL)
        federation = build_federation(experiment)
        assert federation.unlabeled.dtype == torch.int32
        assert federation.unlabeled.shape[1] == 8
        package = tokenizers.Tokenizer.from_str(federation.train.tokenizer.file)
        assert len(federation.unlabeled) == len(federation.unlabeled_ids)
        assert package.get_vocab_size() == federation.train.tokenizer.size


def test_an_experiment_file_is_enough_and_the_network_knows_as_many_ids_as_the_tokenizer(tmp_path):
    one = experiment(table(tmp_path / "news.csv", news()))
    federation = build_federation(one)
    weights = build_network(one, federation).init(0)
    assert weights.params["encoder.tokens.weight"].shape == (federation.train.tokenizer.size, 8)
    assert "vocabulary" not in one.resolved()["model"]  # the data decide
    result = run(one, run_dir=tmp_path / "run")
    contract = json.loads((tmp_path / "run" / "contract.json").read_text(encoding="utf-8"))
    assert contract["data"]["tokenizer"]["file"] == federation.train.tokenizer.file
    assert 0.0 <= result.history.rows[-1]["accuracy"] <= 1.0


def test_seeds_share_the_texts_and_each_has_a_tokenizer_of_its_own_unlabeled_rows(tmp_path):
    one = experiment(table(tmp_path / "news.csv", news()))
    source = load_source(one)
    first, again, other = (build_federation(one.replace(seed=seed), source) for seed in (0, 0, 1))
    assert first.train.tokenizer == again.train.tokenizer
    assert first.train.tokenizer.file != other.train.tokenizer.file
    assert torch.equal(first.test.y, other.test.y)


def test_new_texts_are_read_as_the_run_read_its_own_even_when_the_data_are_gone(tmp_path):
    path = table(tmp_path / "news.csv", news())
    (tmp_path / "more.txt").write_text("zebras run home\n" * 5, encoding="utf-8")
    one = experiment(path, unlabeled=str(tmp_path / "more.txt"))
    run(one, run_dir=tmp_path / "run")
    (tmp_path / "more.txt").unlink()
    inside = table(tmp_path / "new.csv", [("a7", "the team won"), ("b9", "interest rates")], header=("id", "text"))
    found = predict(tmp_path / "run", inside)
    assert found.ids == ("a7", "b9")
    assert set(found.labels) <= {"money", "sport"}
    (tmp_path / "new.txt").write_text("the team won\ninterest rates\n", encoding="utf-8")
    lines = predict(tmp_path / "run", tmp_path / "new.txt")
    assert lines.ids == ("0", "1")
    assert torch.equal(lines.probabilities, found.probabilities)


def test_a_run_goes_on_with_its_tokenizer_and_not_with_another(tmp_path):
    one = experiment(table(tmp_path / "news.csv", news()))
    run(one, run_dir=tmp_path / "run")
    resume_run(tmp_path / "run")
    table(tmp_path / "news.csv", [(user, text.replace("again", "anew"), label) for user, text, label in news()])
    assert "texts are cut into other tokens" in fails(resume_run, tmp_path / "run")


def test_a_tokenizer_can_be_given_and_its_path_is_kept_in_full(tmp_path, source, monkeypatch):
    task, _ = tokenise(source, length=8, vocabulary=100)
    given = tmp_path / "own.json"
    given.write_text(task.train.tokenizer.file)
    again, _ = tokenise(source, length=8, tokenizer=given)
    assert torch.equal(again.train.x, task.train.x)
    monkeypatch.chdir(tmp_path)
    run(experiment(table(tmp_path / "news.csv", news()), tokenizer="own.json"), run_dir=tmp_path / "run")
    assert f'tokenizer = "{given}"' in (tmp_path / "run" / "config.toml").read_text()


def as_bert(own: str) -> str:
    """The same pieces behind bert-base-uncased's marks: [PAD], 99 free places, [UNK] ... [MASK], 895 free places."""
    changed = json.loads(own)
    pieces = [name for name in changed["model"]["vocab"] if name not in tokens.SPECIAL]
    free = [f"[unused{i}]" for i in range(994)]
    marks = ["[PAD]", *free[:99], *tokens.SPECIAL[1:], *free[99:]]
    changed["model"]["vocab"] = {name: place for place, name in enumerate([*marks, *pieces])}
    for name, mark in changed["post_processor"]["special_tokens"].items():
        mark["ids"] = [marks.index(name)]
    return json.dumps(changed)


def test_a_tokenizer_tells_which_id_is_mask_and_where_words_begin():
    own = tokens.train_tokenizer([text for _, text, _ in news()], 100)
    assert (tokens.opened(own, 8).mask, tokens.opened(own, 8).first_word) == (4, 5)
    bert = tokens.opened(as_bert(own), 8)
    assert (bert.mask, bert.first_word) == (103, 999)
    assert (tokens.encode(["the team"], bert)[0, [0, 3]]).tolist() == [101, 102]
    without = tokens.opened(own.replace("[MASK]", "[OTHER]"), 8)
    assert (without.mask, without.first_word) == (None, 5)
    other = tokens.opened(own.replace("[MASK]", "<mask>"), 8)
    assert (other.mask, other.first_word) == (4, 5)
    package = tokenizers.Tokenizer.from_str(own)
    package.add_special_tokens([package.id_to_token(5)])  # a mark, whatever it is called
    assert tokens.opened(package.to_str(), 8).first_word == 6


def test_pretraining_that_does_not_fit_the_text_is_told_before_a_run_starts(tmp_path):
    one = experiment(table(tmp_path / "news.csv", news()))
    federation = build_federation(one)

    def told(method: str) -> str:
        return fails(lambda: check_built(build(one.replace(method={"name": method}), federation)))

    assert "mask_id = 103 is not [MASK], which is 4" in told("masked_lm(mask_id=103, first_word_id=999)")
    assert "on text use masked_lm or next_token" in told("fedavg+simclr")
    assert "next_token would replace the model that 1 round has trained" in told("fedavg until 1 then next_token")
    check_built(build(one.replace(method={"name": "masked_lm"}), federation))


def test_with_a_tokenizer_that_is_given_hidden_words_are_its_own(tmp_path, source):
    task, _ = tokenise(source, length=8, vocabulary=100)
    (tmp_path / "bert.json").write_text(as_bert(task.train.tokenizer.file))
    one = experiment(table(tmp_path / "news.csv", news()), tokenizer=str(tmp_path / "bert.json"))
    row = run(one.replace(method={"name": "masked_lm(training.epochs=1)"})).history.rows[0]
    assert row["prepare/masked_lm_loss"] > 1.0  # near ln of a thousand ids; 0 is a training on nothing


def test_a_tokenizer_is_trained_once(monkeypatch):
    lines = [text for _, text, _ in news()]
    first = tokens.kept_tokenizer(lines, 100)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "train_tokenizer", lambda *_: pytest.fail("trained twice"))
        assert tokens.kept_tokenizer(lines, 100) == first
    assert tokens.kept_tokenizer(lines, 90) != first
    assert tokens.kept_tokenizer(lines[1:], 100) is not first


def test_texts_come_back_from_the_cache_letter_by_letter(tmp_path, monkeypatch):
    rows = [("u", f"naïve 😀 {i}\nline", i % 2) for i in range(10)]
    path = tmp_path / "odd.parquet"
    write_parquet(path, {"text": [row[1] for row in rows], "label": [row[2] for row in rows]})
    first = load(path, text=True)
    monkeypatch.setattr(sys.modules["fedstill.data.load"], "read_files", lambda *_: pytest.fail("read twice"))
    second = load(path, text=True)
    assert first.texts.tolist() == second.texts.tolist()
    assert torch.equal(first.train.x, second.train.x)
    packed = text.pack(np.array(["", "ä", "\ud800"], object))
    assert text.unpack(*packed).tolist() == ["", "ä", "\ud800"]


def test_another_table_of_texts_is_read_in_the_tasks_tokens_and_its_labels_are_matched_by_name(tmp_path, source):
    task, _ = tokenise(source, length=8, vocabulary=400)
    other = table(tmp_path / "other.csv", [("sport", "the final"), ("money", "the bank")], header=("label", "body"))
    found = read_unlabeled(other, task)
    assert found.x.tolist() == tokens.encode(["the final", "the bank"], task.train.tokenizer).tolist()
    assert [task.train.classes[one] for one in found.truth.tolist()] == ["sport", "money"]
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "one.txt").write_text("the final\n", encoding="utf-8")
    (folder / "two.txt").write_text("the bank\n", encoding="utf-8")
    assert torch.equal(read_unlabeled(folder, task).x, found.x)
    assert "call tokenise first" in fails(read_unlabeled, other, source)


def test_the_test_set_can_be_another_table(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    table(elsewhere / "train.csv", news(10))
    table(elsewhere / "test.csv", [("u", "a final match far away", "sport"), ("u", "the bank", "money")])
    one = experiment(table(tmp_path / "news.csv", news()), test=str(elsewhere))
    federation = build_federation(one)
    wanted = tokens.encode(["a final match far away", "the bank"], federation.train.tokenizer)
    assert federation.test.x.tolist() == wanted.tolist()
    assert federation.test.y.tolist() == [1, 0]


@pytest.mark.slow
@pytest.mark.skipif(not AG_NEWS.is_dir(), reason="AG News is not at hand")
def test_ten_clients_of_ag_news_with_few_topics_each_train_a_small_bert_in_two_minutes(tmp_path):
    """The part of AG News at hand (6,902 train, 7,600 test), FedAUX's split at alpha = 0.01, on a CPU."""
    one = Experiment(
        rounds=2,
        cohort=10,
        data={"source": str(AG_NEWS), "tokens": 64, "unlabeled": 3000, "test_limit": 1000},
        partition={"scheme": "fedaux", "clients": 10, "alpha": 0.01},
        model={"name": "bert", "layers": 2, "hidden": 64, "heads": 4, "inner": 128, "positions": 64},
        local={"batch_size": 32, "optimizer": "adam", "lr": 1e-3},
    )
    federation = build_federation(one)
    assert federation.train.classes == ("World", "Sports", "Business", "Sci/Tech")
    sizes = federation.offsets.diff()
    assert int(sizes.sum()) == 3902
    assert 0.8 * 390 < int(sizes.min()) <= int(sizes.max()) < 1.25 * 390  # classes are not of one size here
    counts = label_counts(federation)
    assert float((counts.max(1).values / counts.sum(1)).mean()) > 0.75
    assert federation.train.tokenizer.size == 8192
    assert float((federation.test.x == 1).float().mean()) < 0.01  # unknown letters
    began = time.perf_counter()
    result = run(one, federation=federation, run_dir=tmp_path / "run")
    assert time.perf_counter() - began < 120
    assert len(result.history.rows) == 2
    assert len(predict(tmp_path / "run").ids) == 3000


def test_columns_that_are_no_text_or_too_many_are_told(tmp_path):
    numbers = table(tmp_path / "numbers.csv", [(1, 2, "a"), (3, 4, "b")] * 6, header=("age", "size", "label"))
    assert "one column of text of numbers; it has none among age, size, label" in fails(load, numbers, text=True)
    two = table(tmp_path / "two.csv", [("a b", "c d", "a"), ("e f", "g h", "b")] * 6, header=("title", "body", "label"))
    assert "one column of text of two; it has title, body; set data.inputs to one of them" in fails(
        load, two, text=True
    )
    assert load(two, inputs=["body"], text=True).train.columns[0].name == "body"
    assert "reads one column of text of two, not title and body" in fails(
        load, two, inputs=["title", "body"], text=True
    )
    assert "of two, not bodi; it has title, body; did you mean 'body'" in fails(load, two, inputs=["bodi"], text=True)
    named = table(tmp_path / "ids.csv", [("a1", "c d", "a"), ("b2", "g h", "b")] * 6, header=("id", "body", "label"))
    assert load(named, text=True).train.columns[0].name == "body"
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
    assert "data.tokenizer: cannot read" in fails(tokenise, source, length=8, tokenizer="/dev/zero")
    assert "this is no tokenizer.json of the tokenizers package" in given("{}")
    own = json.loads(tokens.train_tokenizer([text for _, text, _ in news()], 100))
    own["model"]["vocab"] = {("!" if name == "[PAD]" else name): id for name, id in own["model"]["vocab"].items()}
    assert "id 0 fills texts up, but is '!' there" in given(json.dumps(own))
    own = json.loads(tokens.train_tokenizer([text for _, text, _ in news()], 100))
    wordy = {"type": "WordLevel", "vocab": {"[PAD]": 0, "a": 1}, "unk_token": "[UNK]"}
    assert "cannot cut these texts" in given(json.dumps({**own, "model": wordy}))
    letters = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}  # the package would take 8 GB for it
    assert "shorter than it says" in given(json.dumps({**own, "normalizer": letters}))
    letters["precompiled_charsmap"] = "AAAAAA=="  # the package panics, which is no Exception
    assert "cannot cut these texts" in given(json.dumps({**own, "normalizer": letters}))
    tenfold = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    copies = {"type": "TemplateProcessing", "single": [one] * 2000, "pair": [one, two], "special_tokens": {}}
    for change in (
        {"normalizer": {"type": "Sequence", "normalizers": [tenfold] * 9}},
        {"post_processor": copies},
        {"model": {**own["model"], "max_input_chars_per_word": 10**9}},
        {"model": {**wordy, "vocab": {"[PAD]": 0, "[UNK]": 2**31}}},
    ):
        assert "ids, cuts words of more than" in given(json.dumps({**own, **change}))
    good, _ = tokenise(source, length=8, vocabulary=100)
    assert "data.tokens = 2 leaves no room for words" in fails(tokens.opened, good.train.tokenizer.file, 2)
    assert "holds no texts: load it with text=True" in fails(tokenise, good, length=8)


def test_networks_that_cannot_read_tokens_are_told_which_can(tmp_path):
    path = table(tmp_path / "news.csv", news())
    tokens_of = experiment(path)
    federation = build_federation(tokens_of)
    lstm, mlp = (tokens_of.replace(model={"name": name}) for name in ("char_lstm", "mlp"))
    assert "'char_lstm' reads characters, not tokens: use 'bert', or data.window" in fails(
        lambda: check_built(build(lstm, federation))
    )
    assert "'mlp' cannot read text: use 'bert' or 'char_lstm'" in fails(lambda: check_built(build(mlp, federation)))
    digits = Experiment(data="digits", model="bert", partition={"scheme": "iid", "clients": 10})
    assert "'bert' reads text, digits holds numbers: set data.tokens" in fails(
        lambda: check_built(build(digits, build_federation(digits)))
    )


def test_without_the_package_the_extra_is_named(monkeypatch, source):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert fails(tokenise, source, length=8) == "tokenizers is not installed; run: pip install 'fedstill[text]'"
