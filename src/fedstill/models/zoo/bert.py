"""Transformer encoders (Vaswani et al., NIPS 2017) in BERT's form (Devlin et al., NAACL 2019)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core.data import PAD
from fedstill.core.errors import FedstillError
from fedstill.models.adapters import adapted
from fedstill.models.network import Network, Shape, check_counts, choose

Pool = Literal["first", "mean"]
EPSILON = 1e-12  # BERT's, in every LayerNorm


class Block(nn.Module):
    """One layer on the tokens of B texts, as rows (B L, hidden): attention, two dense layers; each with a shortcut.

    a = LayerNorm(x + out(softmax(Q K^T / sqrt(d) + bias) V));  LayerNorm(a + narrow(gelu(wide(a))))

    Rows, not (B, L, hidden): under vmap a dense layer is then one product a client, and its gradient no sum over texts.
    The softmax is written out: PyTorch's fused attention has no batched form on a CPU, and at 64 tokens is no faster
    there (four clients of 32 texts, forward and backward: 243 ms written out, 251 fused; in a loop 240 and 237).
    """

    def __init__(self, hidden: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1.0 / math.sqrt(hidden // heads)
        self.attend = nn.Linear(hidden, 3 * hidden)  # queries, keys, values; of each its heads one after the other
        self.out = nn.Linear(hidden, hidden)
        self.first_norm = nn.LayerNorm(hidden, EPSILON)
        self.wide, self.narrow = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.second_norm = nn.LayerNorm(hidden, EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """`bias` (B, 1, 1 or L, L) is added to the scores: 0, or so low that no weight is left."""
        texts, length = bias.shape[0], bias.shape[-1]
        parts = self.attend(x).reshape(texts, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (3, B, heads, L, d)
        queries, keys, values = parts.unbind(0)
        scores = (queries * self.scale) @ keys.transpose(-1, -2) + bias
        seen = self.dropout(scores.softmax(-1)) @ values
        x = self.first_norm(x + self.dropout(self.out(seen.transpose(1, 2).reshape(x.shape))))
        out: Tensor = self.second_norm(x + self.dropout(self.narrow(F.gelu(self.wide(x)))))
        return out


class TextEncoder(nn.Module):
    """(B, L) token ids -> (B, hidden): tanh of a dense layer on the state of the first token, [CLS], or a mean.

    Id 0 is padding: no token attends to it and no mean counts it, so that it changes nothing.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        positions: int,
        layers: int,
        hidden: int,
        heads: int,
        inner: int,
        dropout: float,
        pool: Pool = "first",
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.types = nn.Embedding(2, hidden)  # of a pair of texts, first and second: here every token is of the first
        self.norm = nn.LayerNorm(hidden, EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, inner, dropout) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden) if pool == "first" else None

    def token_states(self, x: Tensor, *, causal: bool = False) -> Tensor:
        """Return the state (B, L, hidden) of each token after the last layer; no parameter of the pooling is read.

        causal: a token sees itself and earlier tokens, to predict the next one; otherwise it sees the whole text, to
        guess masked tokens. `Model.tokens` calls it with a model's weights.
        """
        length = x.shape[1]
        place = self.positions.weight[:length] + self.types.weight[0]
        states: Tensor = self.dropout(self.norm(self.tokens(x) + place)).flatten(0, 1)
        hides = (x == PAD)[:, None, None, :]
        if causal:
            hides = hides | torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        # Not minus infinity: a text of padding alone then sees all of it alike, and is no NaN.
        bias = hides.to(states.dtype) * torch.finfo(states.dtype).min
        for block in self.blocks:
            states = block(states, bias)
        return states.reshape(*x.shape, -1)

    def forward(self, x: Tensor) -> Tensor:
        states = self.token_states(x)
        if self.pooler is None:
            real = (x != PAD).to(states.dtype).unsqueeze(-1)
            return (states * real).sum(1) / real.sum(1).clamp_min(1.0)
        pooled: Tensor = self.pooler(states[:, 0]).tanh()
        return pooled


def bert(
    input_shape: Shape,
    classes: int,
    *,
    vocabulary: int = 8192,
    positions: int = 512,
    layers: int = 4,
    hidden: int = 312,
    heads: int = 12,
    inner: int = 1200,
    dropout: float = 0.0,
    pool: Pool = "first",
    adapters: int = 0,
) -> Network:
    """BERT-style encoder: token ids, 4 layers of 312 units, 12 heads, dense layers of 1200; features the pooled [CLS].

    vocabulary = 30522 is TinyBERT (Jiao et al., EMNLP 2020): 14,350,248 parameters before the head. `positions` is the
    longest text. `pool` makes the features: "first" is BERT's, whose dense layer pre-training on tokens does not reach;
    "mean" of all tokens has no weights of its own (a linear probe on AG News after 4 epochs of next_token, 2 layers of
    64: 46 % instead of 36; before training 42 instead of 25). Started as BERT is. `dropout` is where BERT has it, but
    for the classifier's input: what the head reads are the features.

    Cost: the gradient of the embedding is dense, and each client that trains at the same time has its own: vocabulary x
    hidden x 4 bytes, 10 MB a client at 8,192 tokens, 38 MB at 30,522, and as much again for the weights and for each
    moment of the optimiser (Adam: two). A client's attention weights take layers x heads x batch x L^2 x 4 bytes,
    several times over. On a CPU dropout's masks take a quarter more time (32 texts of 64 tokens: 749 ms a step, 921).

    `adapters` is the rank of the factors beside every dense layer: only they and the head train (models/adapters.py).
    """
    if len(input_shape) != 1:
        raise FedstillError(
            f"model.name = 'bert' needs text (tokens,), this data has shape {tuple(input_shape)}: use 'mlp' or 'cnn'"
        )
    numbers = {"vocabulary": vocabulary, "positions": positions, "layers": layers}
    numbers |= {"hidden": hidden, "heads": heads, "inner": inner}
    check_counts(**numbers)
    if hidden % heads:
        raise FedstillError(f"model.heads = {heads} must divide model.hidden = {hidden}: 312 has 12, 768 has 12")
    if input_shape[0] > positions:
        raise FedstillError(
            f"model.positions = {positions} is less than the {input_shape[0]} tokens of a text: "
            f"set model.positions = {input_shape[0]}, or cut the texts"
        )
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0.0 <= dropout < 1.0:
        raise FedstillError(f"model.dropout = {dropout} must be at least 0 and below 1: BERT's is 0.1")
    choose("pool", pool, get_args(Pool))
    network = Network(TextEncoder(**numbers, dropout=dropout, pool=pool), nn.Linear(hidden, classes))
    for layer in network.modules():  # dense layers and embeddings N(0, 0.02), biases 0
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)
    return adapted(network, adapters)
