"""Pre-training on text: which words are hidden, what the loss is, and which weights come back."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from answering import clients_of
from whole_server import whole

from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.seeds import uniform
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.types import Batch, Dataset, Federation, Outlook, Stage, Tokenizer, Training, Weights
from fedstill.engine import build_engine
from fedstill.loop.setup import Asked
from fedstill.methods import fedavg
from fedstill.methods.lookup import build_method
from fedstill.methods.pretraining.words import (
    Words,
    choose_places,
    guess_loss,
    hide_words,
    masked_tokens,
    masked_words,
    next_words,
    reader_of,
    words_of,
)
from fedstill.models import build_model

WORDS, VOCABULARY, LENGTH = Words(4, 5), 30, 10
OURS = Tokenizer("", LENGTH, VOCABULARY, mask=4, first_word=5)  # as fedstill trains one
TRAINING = Training(epochs=1, batch_size=8, optimizer="adamw", lr=1e-3)
SMALL = {"layers": 1, "hidden": 12, "heads": 2, "inner": 16, "positions": LENGTH}


def seed(number: int) -> torch.Tensor:
    return torch.tensor(number)


def texts(count: int, *, words: int = 6, number: int = 0) -> torch.Tensor:
    """[CLS], words, [SEP], padding up to LENGTH; after word w mostly comes w + 1."""
    generator = np.random.default_rng(number)
    first = generator.integers(5, VOCABULARY, (count, 1))
    body = 5 + (first - 5 + np.arange(words)) % (VOCABULARY - 5)
    x = np.zeros((count, LENGTH), np.int64)
    x[:, 0], x[:, 1 : words + 1], x[:, words + 1] = 2, body, 3
    return torch.from_numpy(x)


def network(**options):
    return build_model("bert", input_shape=(LENGTH,), classes=3, vocabulary=VOCABULARY, **{**SMALL, **options})


def strong(weights: Weights) -> Weights:
    """Weights so large that it matters who sees whom."""
    return Weights(
        {name: 8.0 * leaf if leaf.ndim == 2 else leaf for name, leaf in weights.params.items()}, weights.buffers
    )


def by_hand(logits: np.ndarray, told: np.ndarray, counts: np.ndarray, weight: np.ndarray) -> float:
    """One token after the other, in float64."""
    total, mass = 0.0, 0.0
    for text in range(len(told)):
        for place in range(told.shape[1]):
            scores = logits[text, place].astype(np.float64)
            share = counts[text, place] * weight[text]
            total += share * (np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[told[text, place]])
            mass += share
    return total / max(mass, 1.0)


def test_the_loss_is_the_mean_cross_entropy_of_tokens_that_count():
    generator = np.random.default_rng(1)
    logits, told = generator.normal(size=(4, 3, 7)).astype(np.float32), generator.integers(0, 7, (4, 3))
    counts, weight = generator.integers(0, 2, (4, 3)).astype(np.float32), np.array([1, 1, 0, 1], np.float32)
    found = guess_loss(*(torch.from_numpy(part) for part in (logits, told, counts, weight)))
    assert float(found) == pytest.approx(by_hand(logits, told, counts, weight), rel=1e-5)
    nothing = guess_loss(*(torch.from_numpy(part) for part in (logits, told, 0 * counts, weight)))
    assert float(nothing) == 0.0


def test_fifteen_percent_of_the_words_are_chosen_at_least_one_and_never_marks_or_padding():
    """20 words: 3; 6 words: round(0.9) = 1; 2 words: at least 1; no word: none."""
    long = torch.tensor([2, *range(5, 25), 3])
    x = torch.zeros(4, 22, dtype=torch.int64)
    x[0], x[1, :8], x[2, :4], x[3, :2] = long, torch.tensor([2, 5, 6, 7, 8, 9, 10, 3]), torch.tensor([2, 5, 5, 3]), 2
    for number in range(20):
        places = choose_places(x, seed(number), 0.15, WORDS)
        assert places.counts.sum(1).tolist() == [3, 1, 1, 0]
        chosen = x.gather(1, places.at)[places.counts > 0]
        assert bool((chosen >= 5).all())
        assert len(set(places.at[0, :3].tolist())) == 3


def test_every_word_is_chosen_alike():
    x = texts(1, words=8).expand(2000, LENGTH)
    places = choose_places(x, seed(3), 0.25, WORDS)  # 2 of 8
    often = torch.bincount(places.at[places.counts > 0], minlength=LENGTH)
    assert often[[0, 9]].tolist() == [0, 0]
    assert bool(((often[1:9] - 500).abs() < 5 * (2000 * 0.25 * 0.75) ** 0.5).all())


def test_of_the_hidden_words_80_percent_are_masked_10_percent_replaced_and_10_percent_left():
    x = texts(3000, words=8)
    places = choose_places(x, seed(5), 0.25, WORDS)
    hidden = hide_words(x, places, seed(5), VOCABULARY, WORDS)
    chosen = torch.zeros_like(x, dtype=torch.bool).scatter(1, places.at, places.counts > 0)
    assert torch.equal(hidden[~chosen], x[~chosen])
    before, after = x[chosen], hidden[chosen]
    count = len(before)
    assert count == 6000
    masked, left = float((after == 4).sum()), float((after == before).sum())
    assert masked == pytest.approx(0.8 * count, abs=5 * (count * 0.16) ** 0.5)
    assert left == pytest.approx((0.1 + 0.1 / 25) * count, abs=5 * (count * 0.1) ** 0.5)  # a drawn word may be the same
    drawn = after[(after != 4) & (after != before)]
    assert sorted(set(drawn.tolist())) == list(range(5, VOCABULARY))


def test_masks_are_a_function_of_the_seed_and_more_texts_in_a_batch_change_none():
    x = texts(6)

    def hidden(rows: torch.Tensor, number: int) -> torch.Tensor:
        places = choose_places(rows, seed(number), 0.3, WORDS)
        return hide_words(rows, places, seed(number), VOCABULARY, WORDS)

    assert torch.equal(hidden(x, 1), hidden(x, 1))
    assert torch.equal(hidden(x[:4], 1), hidden(x, 1)[:4])
    assert not torch.equal(hidden(x, 1), hidden(x, 2))


def test_dropout_of_the_same_seed_draws_other_numbers():
    x = torch.full((1, LENGTH), 7)
    order = uniform(seed(9), (1, LENGTH)).argsort(1)
    assert choose_places(x, seed(9), 0.9, WORDS).at.tolist() != order[:, :9].tolist()


def looked_at(pretext, x: torch.Tensor, *, weight: torch.Tensor | None = None, number: int = 11) -> tuple[float, dict]:
    """(loss, gradients) of a pretext on some texts, as a training step has them."""
    model = pretext.model(network())
    weights = strong(model.init(0))
    params = {name: leaf.requires_grad_() for name, leaf in weights.params.items()}
    output, _ = model.apply(Weights(params, weights.buffers), x, training=True, seed=seed(number))
    local = type("Local", (), {"seed": seed(number)})()
    batch = Batch(x, pretext.targets(x), torch.ones(len(x)) if weight is None else weight)
    loss = pretext.objective.loss(output, batch, local)
    loss.backward()
    return float(loss.detach()), {name: leaf.grad for name, leaf in params.items()}


def head_by_hand(params: dict, states: np.ndarray, embedding: np.ndarray) -> np.ndarray:
    """Dense, GELU, LayerNorm, embedding: in float64, from BERT's description."""
    erf = np.vectorize(lambda value: float(torch.erf(torch.tensor(value, dtype=torch.float64))))
    part = {name: leaf.detach().double().numpy() for name, leaf in params.items() if name.startswith("language.")}
    inner = states @ part["language.dense.weight"].T + part["language.dense.bias"]
    inner = inner * 0.5 * (1 + erf(inner / np.sqrt(2)))
    spread = np.sqrt(inner.var(-1, keepdims=True) + 1e-5)
    inner = (inner - inner.mean(-1, keepdims=True)) / spread * part["language.norm.weight"] + part["language.norm.bias"]
    return inner @ embedding.T + part["language.bias"]


def test_next_token_prediction_by_hand():
    """Each state tells the token after it; three of the nine transitions of a text of six words lead into padding."""
    x, model = texts(5), network()
    weights = strong(next_words(TRAINING).model(model).init(0))
    states = model.tokens(weights, x, causal=True).detach().double().numpy()
    embedding = weights.params["encoder.tokens.weight"].double().numpy()
    logits = head_by_hand(weights.params, states[:, :-1], embedding)
    told = x[:, 1:].numpy()
    wanted = by_hand(logits, told, (told != 0).astype(float), np.ones(5))
    assert (told != 0).sum(1).tolist() == [7] * 5  # six words and [SEP]
    assert looked_at(next_words(TRAINING), x)[0] == pytest.approx(wanted, rel=1e-5)


def test_masked_prediction_by_hand():
    x, model, number = texts(5), network(), 11
    weights = strong(masked_words(0.3, WORDS, TRAINING).model(model).init(0))
    places = choose_places(x, seed(number), 0.3, WORDS)
    hidden = hide_words(x, places, seed(number), VOCABULARY, WORDS)
    states = model.tokens(weights, hidden, causal=False).detach().double().numpy()
    states = np.stack([row[at] for row, at in zip(states, places.at.numpy(), strict=True)])
    logits = head_by_hand(weights.params, states, weights.params["encoder.tokens.weight"].double().numpy())
    told = np.stack([row[at] for row, at in zip(x.numpy(), places.at.numpy(), strict=True)])
    wanted = by_hand(logits, told, places.counts.numpy(), np.ones(5))
    assert looked_at(masked_words(0.3, WORDS, TRAINING), x)[0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("pretext", [masked_words(0.3, WORDS, TRAINING), next_words(TRAINING)], ids=lambda p: p.name)
def test_padding_of_texts_and_of_batches_never_counts(pretext):
    x = texts(4)
    loss, gradients = looked_at(pretext, x)
    padded = torch.cat([x, texts(3, number=8)])
    again, others = looked_at(pretext, padded, weight=torch.tensor([1.0] * 4 + [0.0] * 3))
    assert again == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)
    if pretext.name == "next_token":  # words alone are to be told: id 0 gets a gradient only as a wrong answer
        shorter, _ = looked_at(pretext, x[:, :8])
        assert shorter == pytest.approx(loss, rel=1e-6)


def test_a_token_sees_none_that_come_after_it_when_the_next_one_is_to_be_told():
    """The loss of the first transitions stays when the end of the text is another one."""
    model = next_words(TRAINING).model(network())
    weights, x = model.init(0), texts(3)
    other = x.clone()
    other[:, 5:8] = 9
    first, second = (model.apply(weights, rows)[0].logits for rows in (x, other))
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.equal(first[:, 5:], second[:, 5:])


def test_the_embedding_is_found_and_pooling_and_classifier_have_no_part_in_it():
    reader = reader_of(network())
    assert (reader.embedding, reader.vocabulary, reader.width) == ("encoder.tokens.weight", VOCABULARY, 12)
    kept = set(network().init(0).params) - set(reader.read)
    assert kept == {"encoder.pooler.weight", "encoder.pooler.bias", "head.weight", "head.bias"}


def test_a_network_without_states_of_tokens_is_told_which_one_has_them():
    model = build_model("mlp", input_shape=(4,), classes=2)
    with pytest.raises(FedstillError, match="'mlp' has no states of tokens to pre-train: use 'bert'"):
        next_words(TRAINING).model(model)


def federation() -> Federation:
    x = texts(40, number=2)
    data = Dataset("words", x, torch.arange(40) % 3, ("a", "b", "c"), tokenizer=OURS)
    return Federation(data, data, torch.arange(40), torch.tensor([0, 20, 40]), unlabeled=texts(64, number=3))


def method_of(text: str):
    return build_method(text)[0].method


def prepared(method: str, *, cache=None, number: int = 1):
    """(weights before, weights after, preparation) of a method's preparation."""
    model, data = network(), federation()
    engine = build_engine("batched", "cpu", model=model, federation=data)
    asked = Asked(clients_of(data), np.arange(2), engine.device, 1)
    look = Preparation(
        1, model, 2, data.unlabeled, number, engine, asked.ask, cache=cache, tokenizer=OURS,
    )  # fmt: skip
    server, start = whole(method_of(method)), model.init(number)
    after, _ = server.prepare(start, server.init(start), look)
    return start, after, look


@pytest.mark.parametrize(
    "method", ["masked_lm(training.epochs=6, share=0.3, training.batch_size=8)", "next_token(training.epochs=6)"]
)
def test_the_network_learns_and_only_its_extractor_changes(method):
    start, after, look = prepared(method)
    assert look.metrics[f"{method.split('(')[0]}_loss"] < 0.99 * np.log(VOCABULARY)  # knowing nothing is ln 30
    moved = {name for name, leaf in after.params.items() if not torch.equal(leaf, start.params[name])}
    assert moved == set(reader_of(network()).read)
    assert after.params.keys() == start.params.keys()


class Shelf:
    """A cache in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, dict] = {}

    def load(self, identity):
        return self.kept.get(repr(sorted(identity.items())))

    def save(self, identity, tree):
        self.kept[repr(sorted(identity.items()))] = tree

    def alone(self, identity, tell):
        return nullcontext()


def test_another_run_takes_the_same_extractor_from_the_shelf_and_another_share_does_not():
    shelf = Shelf()
    _, first, _ = prepared("masked_lm(training.epochs=1, training.batch_size=16)", cache=shelf)
    _, second, look = prepared("masked_lm(training.epochs=1, training.batch_size=16)", cache=shelf)
    assert look.metrics["masked_lm_epochs"] == 0
    assert all(torch.equal(first.params[name], leaf) for name, leaf in second.params.items())
    _, _, look = prepared("masked_lm(training.epochs=1, training.batch_size=16, share=0.3)", cache=shelf)
    assert look.metrics["masked_lm_epochs"] == 1


def test_both_tasks_in_one_run_report_their_own_losses():
    _, _, look = prepared("masked_lm(training.epochs=2)+next_token(training.epochs=1)")
    assert look.metrics.keys() == {"masked_lm_epochs", "masked_lm_loss", "next_token_epochs", "next_token_loss"}
    assert (look.metrics["masked_lm_epochs"], look.metrics["next_token_epochs"]) == (2, 1)
    assert look.metrics["masked_lm_loss"] != look.metrics["next_token_loss"]


BERT = Tokenizer("", LENGTH, 30522, mask=103, first_word=999)


@pytest.mark.parametrize(
    ("tokenizer", "given", "wanted"),
    [
        (OURS, {}, Words(4, 5)),
        (BERT, {}, Words(103, 999)),
        (BERT, {"mask_id": 103}, Words(103, 999)),
        (OURS, {"first_word_id": 9}, Words(4, 9)),
        (Tokenizer("", LENGTH, 30), {"mask_id": 2, "first_word_id": 3}, Words(2, 3)),  # it has no [MASK] of its own
        (None, {"mask_id": 2, "first_word_id": 29}, Words(2, 29)),
    ],
)
def test_which_ids_are_words_is_told_by_the_tokenizer_unless_it_is_given(tokenizer, given, wanted):
    assert words_of(Outlook(1, texts(40), tokenizer), **given) == wanted


@pytest.mark.parametrize(
    ("tokenizer", "given", "told"),
    [
        (OURS, {"mask_id": 103, "first_word_id": 999}, r"mask_id = 103 is not \[MASK\], which is 4.*: leave it out"),
        (OURS, {"first_word_id": 30}, "first_word_id = 30 leaves no word .* end at 29; leave it out"),
        (OURS, {"first_word_id": 4}, r"words have larger ids than \[MASK\], 4"),
        (Tokenizer("", LENGTH, 30), {}, r"no \[MASK\]: use next_token, or another data.tokenizer"),
        (None, {}, "set data.tokens, or method.mask_id and method.first_word_id"),
        (None, {"mask_id": 4}, "these ids come without a tokenizer"),
        (None, {"mask_id": 4, "first_word_id": 30}, "first_word_id = 30 leaves no word"),
    ],
)
def test_ids_that_would_train_on_nothing_are_refused_before_a_run_starts(tokenizer, given, told):
    options = "".join(f", {key}={value}" for key, value in given.items())
    steps = method_of(f"feddf+masked_lm(training.epochs=1{options})").steps
    with pytest.raises(FedstillError, match=told):
        next(step for step in steps if step.name == "masked_lm").check(Outlook(1, texts(40), tokenizer))


def test_the_same_tokenizer_gives_the_same_task_and_it_masks_with_its_own_ids():
    task = masked_tokens(0.3, TRAINING)
    assert task.suited(Outlook(1, texts(4), OURS)) is task.suited(Outlook(1, texts(9), OURS))
    assert task.suited(Outlook(1, texts(4), OURS)).identity == {"share": 0.3, "mask": 4, "first": 5}
    assert task.suited(Outlook(1, texts(4), BERT)).identity == {"share": 0.3, "mask": 103, "first": 999}


def test_an_id_that_the_network_does_not_know_is_refused():
    with pytest.raises(FedstillError, match="masked_lm uses id 30, and the network knows 30"):
        masked_words(0.3, Words(30, 5), TRAINING).model(network())


def test_joined_with_a_method_that_refines_it_stands_before_the_refinement():
    steps = method_of("feddf(student.steps=2)+next_token(training.epochs=1)").steps
    assert [step.stage for step in steps] == [Stage.AGGREGATE, Stage.KEEP, Stage.REFINE]
    assert [step.prepare is not no_preparation for step in steps] == [False, True, False]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"share": 0.0}, "method.share = 0.0 must be"),
        ({"share": 1.0}, "above 0 and below 1"),
        ({"training": {"epochs": -1}}, "method.training.epochs = -1 must be"),
        ({"training": {"lr": 0.0}}, "method.training.lr = 0.0 must be"),
        ({"mask_id": 0}, "method.mask_id = 0 must be"),
        ({"first_word_id": -5}, "method.first_word_id = -5 must be"),
        ({"training": {"seed": -2}}, "method.training.seed = -2 must be"),
    ],
)
def test_impossible_options_are_refused(options, told):
    with pytest.raises(FedstillError, match=told):
        build_method("masked_lm", options)


def test_without_epochs_it_asks_for_nothing():
    assert needs_of(build_method("next_token", {"training": {"epochs": 0}})[0].method) == needs_of(fedavg())
