"""Recurrent layers that vmap can run, and the network that reads text."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core.errors import FedstillError
from fedstill.models.network import Network, Shape, check_counts, initialise


class _Chain(torch.autograd.Function):
    """Computes (h_1..h_L, c_1..c_L) of one layer from its projected inputs (L, B, 4H), W_hh, h_0 and c_0.

    The gradient of W_hh is one product over all steps; a sum over steps, as autograd would do it, writes the whole
    matrix of every client at each step (ten clients of 256 units on one core: 4.6 -> 3.1 s for three steps of SGD).
    Gates are computed a second time, all steps in one product, not kept.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(projected: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        states, cells = [], []
        for step in projected.unbind(0):
            i, f, g, o = (step + h @ weight.t()).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
            cells.append(c)
        return torch.stack(states), torch.stack(cells)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, d_cells: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        projected, weight, h, c, states, cells = ctx.saved_tensors
        before, kept = torch.cat([h[None], states[:-1]]), torch.cat([c[None], cells[:-1]])
        i, f, g, o = (projected + before @ weight.t()).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        squashed = cells.tanh()
        of_cell = torch.cat([g * i * (1 - i), kept * f * (1 - f), i * (1 - g * g)], -1)  # d c_t / d (i, f, g)
        of_state = squashed * o * (1 - o)  # d h_t / d o
        through = o * (1 - squashed * squashed)  # d h_t / d c_t
        dh, dc, gates = torch.zeros_like(h), torch.zeros_like(c), []
        for t in reversed(range(len(states))):
            dh = dh + d_states[t]
            dc = dc + d_cells[t] + dh * through[t]
            gates.append(torch.cat([torch.cat([dc, dc, dc], -1) * of_cell[t], dh * of_state[t]], -1))
            dh, dc = gates[-1] @ weight, dc * f[t]
        d_projected = torch.stack(gates[::-1])
        d_weight = d_projected.flatten(0, 1).t() @ before.flatten(0, 1)
        return d_projected, d_weight, dh, dc


class StepwiseLSTM(nn.LSTM):
    """nn.LSTM as a chain of torch operations: PyTorch's own kernel (aten::lstm, cuDNN) cannot run under vmap.

    (i, f, g, o) = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh;  c_t = s(f) c_{t-1} + s(i) tanh(g);  h_t = s(o) tanh(c_t)

    The inputs of all steps are projected in one product, each step then needs one more for its four gates. Names,
    shapes and values are the same as in nn.LSTM, which still runs packed or unbatched sequences, dropout between
    layers and projected states, because they have no such form.
    """

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        if not isinstance(input, Tensor) or input.dim() != 3 or self.proj_size or (self.dropout and self.training):
            return super().forward(input, hx)
        x = input.transpose(0, 1) if self.batch_first else input
        directions = ("", "_reverse") if self.bidirectional else ("",)
        last: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in directions:
                at = len(last)
                start = None if hx is None else (hx[0][at], hx[1][at])
                output, state = self._read(x, f"l{layer}{direction}", start)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        h, c = (torch.stack([state[i] for state in last]) for i in range(2))
        return (x.transpose(0, 1) if self.batch_first else x), (h, c)

    def _read(self, x: Tensor, name: str, start: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One layer in one direction: (L, B, hidden) and the state after the last step."""
        bias = getattr(self, f"bias_ih_{name}") + getattr(self, f"bias_hh_{name}") if self.bias else None
        x = x.flip(0) if name.endswith("_reverse") else x
        projected = F.linear(x, getattr(self, f"weight_ih_{name}"), bias)
        h, c = start if start is not None else (x.new_zeros(x.shape[1], self.hidden_size),) * 2
        states: Tensor
        states, cells = _Chain.apply(projected, getattr(self, f"weight_hh_{name}"), h, c)  # type: ignore[no-untyped-call]
        return (states.flip(0) if name.endswith("_reverse") else states), (states[-1], cells[-1])


class CharacterReader(nn.Module):
    """(B, L) character ids -> (B, hidden): the state of the last layer after the last character."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)

    def token_states(self, x: Tensor, *, causal: bool = True) -> Tensor:
        """Return the state (B, L, hidden) after each character, which never sees the following characters."""
        states: Tensor = self.lstm(self.embedding(x))[0]
        return states

    def forward(self, x: Tensor) -> Tensor:
        return self.token_states(x)[:, -1]


def char_lstm(
    input_shape: Shape, classes: int, *, embedding: int = 8, hidden: int = 256, layers: int = 2, init: str = "torch"
) -> Network:
    """MrTF's and LEAF's CharLSTM: character ids - embedding 8 - LSTM 256, 256 - next character.

    `classes` is also the number of different ids, because every character can follow another.
    """
    if len(input_shape) != 1:
        raise FedstillError(
            f"model.name = 'char_lstm' needs text (characters,), this data has shape {tuple(input_shape)}: "
            "set data.window, or use 'mlp'"
        )
    check_counts(embedding=embedding, hidden=hidden, layers=layers)
    reader = CharacterReader(classes, embedding, hidden, layers)
    return initialise(Network(reader, nn.Linear(hidden, classes)), init)
