"""Pre-training on text: the network guesses masked tokens, or the next token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.data import PAD
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for, to_signed, torch_generator, uniform
from fedstill.core.types import (
    Batch,
    Local,
    Model,
    Need,
    Objective,
    Outlook,
    Output,
    Params,
    ReadTokens,
    Seed,
    Training,
    Weights,
)
from fedstill.server.pretrain import Pretext

MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens; the others stay as they are (BERT)
TOKENS = frozenset({Need.TOKENS})
HEAD = "language"  # where the parameters of the task's own head are
_STREAM = to_signed(seed_for(0, "masked tokens"))  # a step's dropout draws from the same seed


class Words(NamedTuple):
    """The id of [MASK] and the first id that is a word."""

    mask: int  # [MASK]
    first: int  # smaller ids are marks: neither masked nor put in place of a word


class Places(NamedTuple):
    """The tokens of each text that are to be guessed, in k places; a text with fewer leaves the last places empty."""

    at: Tensor  # (B, k) positions
    counts: Tensor  # (B, k) 1 for a token, 0 for an empty place


@dataclass(frozen=True)
class Reader:
    """How a model reads tokens into states, and its embedding, which also turns states back into tokens."""

    tokens: ReadTokens
    embedding: str  # name of the parameter (V, F)
    vocabulary: int
    width: int
    read: frozenset[str]  # parameters that the states depend on, without the pooling and the classifier


def choose_places(x: Tensor, seed: Tensor, share: float, words: Words) -> Places:
    """Choose round(share * words) random words of each text, at least one if it has any (BERT's rule)."""
    is_word = x >= words.first
    wanted = (share * is_word.sum(1)).round().clamp_min(1.0).minimum(is_word.sum(1))
    most = max(1, math.ceil(share * x.shape[1]))
    draws = uniform(seed ^ _STREAM, x.shape).masked_fill(~is_word, 2.0)
    at = draws.topk(most, dim=1, largest=False).indices
    places = torch.arange(most, device=x.device)
    return Places(at, (places < wanted.unsqueeze(1)).to(torch.float32))


def hide_words(x: Tensor, places: Places, seed: Tensor, vocabulary: int, words: Words) -> Tensor:
    """Return x with the chosen words hidden: 80 % become [MASK], 10 % any word, 10 % stay."""
    which, other = uniform((seed ^ _STREAM) + 1, (*places.at.shape, 2)).unbind(-1)
    before = x.gather(1, places.at)
    random = words.first + (other * (vocabulary - words.first)).to(x.dtype)
    hidden = torch.where(which < MASKED, words.mask, torch.where(which < MASKED + REPLACED, random, before))
    return x.scatter(1, places.at, torch.where(places.counts > 0, hidden, before))


def guess_loss(logits: Tensor, truth: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Return the mean cross-entropy of the guessed tokens: sum w c ce / max(sum w c, 1), with w (B,) of the texts.

    logits (B, k, V), truth (B, k) ids, counts (B, k).
    """
    losses = F.cross_entropy(logits.flatten(0, 1), truth.flatten(), reduction="none")
    mass = (counts * weight.unsqueeze(1)).flatten()
    return (losses * mass).sum() / mass.sum().clamp_min(1.0)


def masked_words(share: float, words: Words, training: Training) -> Pretext:
    """Guess every text's hidden words from its other words (masked prediction, Devlin et al. 2019)."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        truth = batch.y.long()
        places = choose_places(truth, local.seed, share, words)
        return guess_loss(output.logits, truth.gather(1, places.at), places.counts, batch.weight)

    def read(reader: Reader, weights: Weights, x: Tensor, training: bool, seed: Tensor) -> Tensor:
        places = choose_places(x, seed, share, words)
        hidden = hide_words(x, places, seed, reader.vocabulary, words)
        states = reader.tokens(weights, hidden, causal=False, training=training, seed=seed)
        return states.gather(1, places.at.unsqueeze(2).expand(-1, -1, reader.width))

    identity = {"share": share, **words._asdict()}
    model = _with_head(read, largest=max(words))
    return Pretext("masked_lm", model, Objective(loss), training, _themselves, identity, needs=TOKENS)


def masked_tokens(
    share: float, training: Training, *, mask_id: int | None = None, first_word_id: int | None = None
) -> Pretext:
    """Guess every text's hidden words (Devlin et al. 2019) with the ids of the run's tokenizer."""

    @cache
    def known(words: Words) -> Pretext:
        return masked_words(share, words, training)

    def suited(outlook: Outlook) -> Pretext:
        return known(words_of(outlook, mask_id, first_word_id))

    return replace(known(Words(PAD, PAD)), suited=suited)  # only the result of `suited` is ever trained


def words_of(outlook: Outlook, mask_id: int | None = None, first_word_id: int | None = None) -> Words:
    """Return which ids are words, from the options or the tokenizer; refuse ids that this text cannot have."""
    tokenizer = outlook.tokenizer
    if tokenizer is None:
        if mask_id is None or first_word_id is None:
            raise FedstillError(
                "masked_lm: these ids come without a tokenizer, which would name [MASK] and the first word: "
                "set data.tokens, or method.mask_id and method.first_word_id"
            )
        size = 0 if outlook.unlabeled is None else int(outlook.unlabeled.max()) + 1
        return _checked(Words(mask_id, first_word_id), size)
    mask = tokenizer.mask if mask_id is None else mask_id
    if mask is None:
        raise FedstillError("masked_lm: the tokenizer has no [MASK]: use next_token, or another data.tokenizer")
    if tokenizer.mask not in (mask, None):
        raise FedstillError(
            f"method.mask_id = {mask} is not [MASK], which is {tokenizer.mask} in the run's tokenizer: leave it out"
        )
    if first_word_id is None:
        return Words(mask, tokenizer.first_word)
    return _checked(Words(mask, first_word_id), tokenizer.size)


def _checked(words: Words, size: int) -> Words:
    if words.first >= size:
        raise FedstillError(
            f"method.first_word_id = {words.first} leaves no word to be hidden: the ids of this text end at "
            f"{size - 1}; leave it out, with data.tokens the tokenizer knows it"
        )
    if words.first <= words.mask:
        raise FedstillError(
            f"method.first_word_id = {words.first} is impossible: words have larger ids than [MASK], {words.mask}"
        )
    return words


def next_words(training: Training) -> Pretext:
    """Guess each token from those before it (next-token prediction); padding is not guessed."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        truth = batch.y[:, 1:].long()
        return guess_loss(output.logits, truth, (truth != PAD).to(torch.float32), batch.weight)

    def read(reader: Reader, weights: Weights, x: Tensor, training: bool, seed: Tensor) -> Tensor:
        return reader.tokens(weights, x, causal=True, training=training, seed=seed)[:, :-1]

    return Pretext("next_token", _with_head(read), Objective(loss), training, _themselves, needs=TOKENS)


def _themselves(x: Tensor) -> Tensor:
    return x


Read = Callable[[Reader, Weights, Tensor, bool, Tensor], Tensor]  # -> states (B, k, F) of the places to be guessed


def _with_head(states_of: Read, *, largest: int = 0) -> Callable[[Model], Model]:
    """Give the run's model BERT's head above its token states: dense, GELU, LayerNorm, then the embedding itself.

    largest: the largest id that the model must know.
    """

    def extend(model: Model) -> Model:
        reader = reader_of(model)
        if largest >= reader.vocabulary:
            raise FedstillError(
                f"masked_lm uses id {largest}, and the network knows {reader.vocabulary}: use its own ids"
            )

        def init(seed: Seed) -> Weights:
            params, buffers = model.init(seed)
            read = {name: leaf for name, leaf in params.items() if name in reader.read}
            return Weights({**read, **_head_params(reader, seed)}, buffers)

        def apply(
            weights: Weights,
            x: Tensor,
            *,
            training: bool = False,
            weight: Tensor | None = None,
            seed: Tensor | None = None,
        ) -> tuple[Output, Params]:
            drawn = torch.zeros((), dtype=torch.int64, device=x.device) if seed is None else seed
            states = states_of(reader, weights, x, training, drawn)
            logits = _guess(weights.params, states, weights.params[reader.embedding])
            return Output(logits, states[:, 0]), weights.buffers

        return replace(model, name=f"{model.name} with a language head", init=init, apply=apply, head=None, tokens=None)

    return extend


def _head_params(reader: Reader, seed: Seed) -> Params:
    generator, width = torch_generator(seed_for(seed, HEAD)), reader.width
    return {
        f"{HEAD}.dense.weight": 0.02 * torch.randn(width, width, generator=generator),
        f"{HEAD}.dense.bias": torch.zeros(width),
        f"{HEAD}.norm.weight": torch.ones(width),
        f"{HEAD}.norm.bias": torch.zeros(width),
        f"{HEAD}.bias": torch.zeros(reader.vocabulary),
    }


def _guess(params: Params, states: Tensor, embedding: Tensor) -> Tensor:
    states = F.gelu(F.linear(states, params[f"{HEAD}.dense.weight"], params[f"{HEAD}.dense.bias"]))
    norm = params[f"{HEAD}.norm.weight"], params[f"{HEAD}.norm.bias"]
    return F.linear(F.layer_norm(states, states.shape[-1:], *norm), embedding, params[f"{HEAD}.bias"])


def reader_of(model: Model) -> Reader:
    """Find a model's embedding of tokens by gradients: ids 1 and 3 move rows 1 and 3 of the embedding alone."""
    if model.tokens is None:
        raise FedstillError(f"model.name = '{model.name}' has no states of tokens to pre-train: use 'bert'")
    weights, x = model.init(0), torch.tensor([[1, 3, 1]])
    with torch.enable_grad():
        params = {name: leaf.detach().requires_grad_() for name, leaf in weights.params.items()}
        states = model.tokens(Weights(params, weights.buffers), x, causal=False)
        drawn = torch.linspace(-1.0, 1.0, states.numel()).reshape(states.shape)  # a plain sum is flat after LayerNorm
        gradients = torch.autograd.grad((states * drawn).sum(), list(params.values()), allow_unused=True)
    moved = {name: gradient for name, gradient in zip(params, gradients, strict=True) if gradient is not None}
    for name, gradient in moved.items():
        rows = gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist() if gradient.ndim == 2 else []
        if rows == [1, 3] and gradient.shape[1] == states.shape[2]:
            return Reader(model.tokens, name, gradient.shape[0], gradient.shape[1], frozenset(moved))
    raise FedstillError(f"model.name = '{model.name}' has no embedding of tokens as wide as their states: use 'bert'")
