"""Turn texts into token ids, with a given tokenizer or with one trained on texts that the server may read."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedstill.core.data import PAD
from fedstill.core.errors import FedstillError
from fedstill.core.types import Tokenizer
from fedstill.data.source import Source, Unlabeled, as_tensor, first_line, require_extra
from fedstill.storage.cache import Cache
from fedstill.storage.files import read_text

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
MASKS = ("[MASK]", "<mask>")  # how tokenizers name it
MARK = re.compile(r"\[\w+\]|<\w+>")  # [CLS], <unk>, and places that were left free: [unused7]
MOST_LETTERS = 1000  # different characters; rarer ones are unknown (BERT's limit)
FORMAT = 1  # raise it when the same texts give another tokenizer
CLIENTS_WORDS = "a tokenizer trained on all clients' texts (data.tokenizer can change that)"
AT_ONCE = 4096  # texts; the package keeps far more than ids of each
MOST_IDS = 1 << 24
MOST_GROWTH = 64  # times that a tokenizer.json may lengthen a text before it cuts it
LONGEST_WORD = 10_000  # letters; the package's search for pieces takes their square

_log = logging.getLogger("fedstill.run")


def tokenise(
    source: Source,
    unlabeled: Unlabeled | None = None,
    *,
    length: int,
    vocabulary: int = 8192,
    tokenizer: str | Path | None = None,
    cache_dir: Path | None = None,
) -> tuple[Source, Unlabeled | None]:
    """Turn texts into ids (n, length), int32: [CLS] text [SEP], cut, or filled with id 0; return (source, unlabeled).

    tokenizer: a tokenizer.json; None trains one of at most `vocabulary` ids on the unlabeled texts, which are the
    server's. Without unlabeled texts the clients' texts train it, and a warning says so, because its words reveal
    something about them. The source must be loaded with text=True, and unlabeled texts split off before
    (`split_unlabeled`).
    """
    if source.texts is None:
        raise FedstillError(f"{source.train.name} holds no texts: load it with text=True (data.tokens)")
    if tokenizer is not None:
        chosen = read_tokenizer(tokenizer, length)
    else:
        if unlabeled is None:
            _log.warning(
                "data.tokens: the server has no unlabeled text, so the tokenizer is trained on the clients' private "
                "texts, and its vocabulary tells about them; set data.unlabeled or data.tokenizer"
            )
        rows = (source.train.x if unlabeled is None else unlabeled.x)[:, 0].numpy()
        chosen = opened(kept_tokenizer(source.texts[rows].tolist(), vocabulary, cache_dir=cache_dir), length)
    ids = None if unlabeled is None else unlabeled._replace(x=_ids(source.texts, unlabeled.x, chosen))
    facts = (CLIENTS_WORDS,) if tokenizer is None and unlabeled is None else ()
    return as_tokens(source, chosen)._replace(public_facts=facts), ids


def as_tokens(source: Source, tokenizer: Tokenizer) -> Source:
    """Return a source of texts as a source of the tokenizer's ids."""
    assert source.texts is not None
    train, test = (
        replace(part, x=_ids(source.texts, part.x, tokenizer), mean=(0.0,), std=(1.0,), tokenizer=tokenizer)
        for part in (source.train, source.test)
    )
    return source._replace(train=train, test=test, central=None, texts=None)


def _ids(texts: np.ndarray, rows: Tensor, tokenizer: Tokenizer) -> Tensor:
    return as_tensor(encode(texts[rows[:, 0].numpy()].tolist(), tokenizer))


def encode(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids (n, length) of texts as int32."""
    package = require_extra("tokenizers", extra="text").Tokenizer.from_str(tokenizer.file)
    package.enable_truncation(tokenizer.length)
    package.enable_padding(length=tokenizer.length, pad_id=PAD, pad_token=package.id_to_token(PAD))
    parts = [np.zeros((0, tokenizer.length), np.int32)]
    for first in range(0, len(texts), AT_ONCE):
        with _in_one_line("data.tokenizer cannot cut these texts: use another one"):
            encodings = package.encode_batch([_readable(text) for text in texts[first : first + AT_ONCE]])
        parts.append(np.array([encoding.ids for encoding in encodings], np.int32))
    return np.concatenate(parts)


def _readable(text: str) -> str:
    """Return a text without halves of characters, because they are no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def read_tokenizer(path: str | Path, length: int) -> Tokenizer:
    """Read a tokenizer.json of the tokenizers package, whose id 0 must be padding."""
    try:
        file = read_text(Path(path).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        raise FedstillError(f"data.tokenizer: cannot read '{path}' ({first_line(error)})") from error
    try:
        return opened(file, length)
    except FedstillError as error:
        raise FedstillError(f"data.tokenizer: '{path}': {error}") from error


def opened(file: str, length: int) -> Tokenizer:
    """Return the Tokenizer of a tokenizer.json's content, for texts of `length` ids."""
    tokenizers = require_extra("tokenizers", extra="text")
    with _in_one_line("this is no tokenizer.json of the tokenizers package, whose Tokenizer.save writes one"):
        growth = _growth(tree := json.loads(file))  # first, because the package takes memory for what a file says
        package = tokenizers.Tokenizer.from_str(file)
    size = max(package.get_vocab().values(), default=-1) + 1
    longest = tree["model"].get("max_input_chars_per_word", 0)
    if size > MOST_IDS or longest > LONGEST_WORD or growth > MOST_GROWTH:
        raise FedstillError(
            f"it has more than {MOST_IDS:,} ids, cuts words of more than {LONGEST_WORD:,} letters, or makes texts more "
            f"than {MOST_GROWTH} times as long: use another one"
        )
    pad = package.id_to_token(PAD) or ""
    if "pad" not in pad.lower():
        raise FedstillError(f"id 0 fills texts up, but is '{pad}' there; use a tokenizer whose id 0 is [PAD]")
    marks = package.num_special_tokens_to_add(False)
    if length <= marks:
        raise FedstillError(f"data.tokens = {length} leaves no room for words beside {marks} marks; use e.g. 64")
    mask = next((place for name in MASKS if (place := package.token_to_id(name)) is not None), None)
    special = {place for place, token in package.get_added_tokens_decoder().items() if token.special}
    ids = (place for place in range(size) if place not in special)  # marks come first, then words
    first_word = next((place for place in ids if not MARK.fullmatch(package.id_to_token(place) or "")), size)
    return Tokenizer(file, length, size, mask, first_word)


@contextmanager
def _in_one_line(wrong: str) -> Iterator[None]:
    """Turn whatever the tokenizers package raises into one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the package raises Exception itself, and a panic of Rust is none
        raise FedstillError(f"{wrong} ({first_line(error)})") from error


def _growth(tree: Mapping[str, Any]) -> float:
    """Return how many times as long a tokenizer.json may make a text, at most."""
    growth = 1.0
    inside = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
    for key, more in inside.items():
        parts = [tree.get(key) or {}]
        for part in parts:
            parts += part.get(more, ())
            kind, pattern = part.get("type"), part.get("pattern")
            if kind in ("Replace", "Prepend"):
                replaced = len(pattern.get("String", "")) if isinstance(pattern, dict) else 0
                growth *= max(1.0, len(part.get("content", part.get("prepend", ""))) / max(1, replaced))
            elif kind == "Precompiled":
                table = base64.b64decode(part["precompiled_charsmap"])
                if int.from_bytes(table[:4], "little") > len(table):
                    raise ValueError("its table of letters is shorter than it says")
            elif kind == "ByteLevel":  # a letter becomes one for each of its bytes
                growth *= 2
            elif kind == "TemplateProcessing":
                growth *= max(1, sum("Sequence" in piece for piece in part["single"]))
    return growth


def kept_tokenizer(texts: Sequence[str], vocabulary: int, *, cache_dir: Path | None = None) -> str:
    """Return the tokenizer that was trained on these texts before, else train one and keep it."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} ".encode() + text.encode("utf-8", "surrogatepass"))
    version = require_extra("tokenizers", extra="text").__version__
    identity = {"format": FORMAT, "package": version, "vocabulary": vocabulary, "texts": digest.hexdigest()}
    cache = Cache("tokenizers", cache_dir)
    if (tree := cache.load(identity)) is not None:
        return str(tree["file"])
    trained = train_tokenizer(texts, vocabulary)
    cache.save(identity, {"file": trained})
    return trained


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> str:
    """Train BERT's WordPiece on texts in lower case, of pieces that occur at least twice; return its tokenizer.json.

    The package's trainer numbers pieces inside words ("##e") in the order of a hash table, so that no two trainings
    agree. Here they come first, in order, and training has no choice left. Special tokens are not searched in texts: a
    text that says "[MASK]" holds a bracket, a word and a bracket.
    """
    package = require_extra("tokenizers", extra="text")
    learner, readable = _empty(package, {}), [_readable(text) for text in texts]
    letters, inside = _letters(learner, readable)
    needed = len(SPECIAL) + len(letters) + len(inside)
    if vocabulary < needed:
        raise FedstillError(
            f"data.vocabulary = {vocabulary} is too small: the letters of the text alone take {needed}; use e.g. 8192"
        )
    trainer = package.trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[*SPECIAL, *(f"##{letter}" for letter in inside)],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    learner.train_from_iterator(readable, trainer)
    return str(_empty(package, learner.get_vocab()).to_str())


def _empty(package: Any, vocabulary: dict[str, int]) -> Any:
    """Return a tokenizer that cuts words as BERT does, with this vocabulary."""
    made = package.Tokenizer(package.models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = package.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    made.decoder = package.decoders.WordPiece()
    made.post_processor = package.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")]
    )
    return made


def _letters(learner: Any, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the most frequent characters of words, those among them that continue words), each in order."""
    words: Counter[str] = Counter()
    for text in texts:
        cut = learner.pre_tokenizer.pre_tokenize_str(learner.normalizer.normalize_str(text))
        words.update(word for word, _ in cut)
    counts: Counter[str] = Counter()
    for word, often in words.items():
        for letter in word:
            counts[letter] += often
    letters = sorted(sorted(counts), key=lambda letter: -counts[letter])[:MOST_LETTERS]
    inside = {letter for word in words for letter in word[1:]}
    return sorted(letters), sorted(inside & set(letters))
