"""The LSTM that vmap can run is PyTorch's LSTM; the network that reads characters."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.rnn import pack_sequence

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator, torch_stream
from fedstill.core.tree import rows, stack, tree_map
from fedstill.core.types import Weights
from fedstill.models import build_model, from_module
from fedstill.models.zoo.char_lstm import StepwiseLSTM

KINDS = {
    "plain": {},
    "deep": {"num_layers": 3, "batch_first": True},
    "both ways": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False, "batch_first": True},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed))


def pair(seed: int = 0, **options: object) -> tuple[nn.LSTM, StepwiseLSTM]:
    """PyTorch's LSTM and ours with its weights."""
    with torch_stream(seed):
        theirs, ours = nn.LSTM(5, 7, **options), StepwiseLSTM(5, 7, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("started", [False, True], ids=["from zero", "from a state"])
def test_outputs_states_and_gradients_are_those_of_pytorch(kind, started):
    layers = pair(**KINDS[kind])
    x = draw(6, 4, 5).requires_grad_()
    rows_in_batch = 6 if layers[0].batch_first else 4
    states = layers[0].num_layers * (2 if layers[0].bidirectional else 1)
    start = (draw(states, rows_in_batch, 7, seed=1), draw(states, rows_in_batch, 7, seed=2)) if started else None
    found = []
    for layer in layers:
        output, (h, c) = layer(x, start)
        total = output.square().sum() + h.sin().sum() + c.sum()
        found.append((output, h, c, *torch.autograd.grad(total, [x, *layer.parameters()])))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * (1.0 + theirs.abs().max().item()))


def test_the_gradient_can_be_differentiated_again():
    with torch_stream(0):
        layer = StepwiseLSTM(2, 3).double()
    names = [name for name, _ in layer.named_parameters()]
    x = draw(3, 2, 2).double().requires_grad_()

    def outputs(x: Tensor, *params: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, params, strict=True)), (x,))[0]

    assert torch.autograd.gradgradcheck(outputs, (x, *layer.parameters()))


def test_one_step_is_the_equation():
    """i, f, g, o = 0.5, 0, 0.8, 1 before the squashing; c = s(0) 2 + s(0.5) tanh(0.8), h = s(1) tanh(c)."""
    layer = StepwiseLSTM(1, 1)
    values = {"weight_ih_l0": [0.5, 0.0, 0.8, 1.0], "weight_hh_l0": [0.0] * 4, "bias_ih_l0": [0.25] * 4}
    values |= {"bias_hh_l0": [-0.25] * 4}
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name).copy_(torch.tensor(value).reshape(getattr(layer, name).shape))
    _, (h, c) = layer(torch.ones(1, 1, 1), (torch.zeros(1, 1, 1), torch.full((1, 1, 1), 2.0)))
    cell = 0.5 * 2.0 + math.tanh(0.8) / (1.0 + math.exp(-0.5))
    assert c.item() == pytest.approx(cell, abs=1e-6)
    assert h.item() == pytest.approx(math.tanh(cell) / (1.0 + math.exp(-1.0)), abs=1e-6)


def test_state_dicts_go_both_ways():
    theirs, ours = pair(num_layers=2, bidirectional=True)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
    theirs.load_state_dict(pair(seed=1, num_layers=2, bidirectional=True)[1].state_dict())


def test_packed_and_unbatched_sequences_are_read_as_pytorch_reads_them():
    theirs, ours = pair()
    packed = pack_sequence([draw(4, 5), draw(2, 5, seed=1)])
    assert torch.equal(ours(packed)[0].data, theirs(packed)[0].data)
    assert torch.equal(ours(draw(4, 5))[0], theirs(draw(4, 5))[0])


class Own(nn.Module):
    """A user's network: ids, embedding, PyTorch's LSTM, logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 3)
        self.reader = nn.LSTM(3, 4, num_layers=2, dropout=dropout, batch_first=True)
        self.out = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.reader(self.embedding(x))[0][:, -1])


def test_a_users_lstm_runs_for_many_clients_and_gives_what_the_module_gives():
    model = from_module(Own, input_shape=(5,), classes=9, input_dtype=torch.int64)
    assert model.traits.unbatchable is None
    assert model.traits.features
    weights = model.init(0)
    module = Own()
    module.load_state_dict(weights.params)
    x = torch.tensor([[1, 8, 0, 3, 3], [2, 2, 5, 0, 7]])
    torch.testing.assert_close(model.apply(weights, x)[0].logits, module(x), rtol=1e-6, atol=1e-6)
    assert type(module.reader) is nn.LSTM


def test_ids_for_a_module_that_reads_numbers_and_dropout_inside_an_lstm_are_refused_in_one_line():
    for options, source, told in (
        ({}, Own, "cannot run on a batch of shape (2, 5)"),
        ({"input_dtype": torch.int64}, lambda: Own(0.5), "layer reader (LSTM) draws random numbers"),
    ):
        with pytest.raises(FedstillError) as caught:
            from_module(source, input_shape=(5,), **options)
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("classes", "options", "parameters", "features"),
    [
        (81, {}, 820_185, 256),  # the card's
        (81, {"layers": 1}, 81 * 8 + 4 * 256 * (8 + 256 + 2) + 257 * 81, 256),
        (5, {"embedding": 3, "hidden": 4}, 5 * 3 + 16 * (3 + 4 + 2) + 16 * (4 + 4 + 2) + 5 * 5, 4),
    ],
)
def test_char_lstm_has_the_parameters_of_the_paper(classes, options, parameters, features):
    model = build_model("char_lstm", input_shape=(12,), classes=classes, **options)
    weights = model.init(0)
    assert sum(leaf.numel() for leaf in weights.params.values()) == parameters
    x = torch.arange(24).reshape(2, 12) % classes
    output, _ = model.apply(weights, x)
    assert output.logits.shape == (2, classes)
    assert output.features.shape == (2, features)
    assert model.head is not None
    assert torch.allclose(model.head(weights.params, output.features), output.logits, atol=1e-6)
    assert not any((model.traits.convolutional, model.traits.batch_statistics))


def small(**options: object):
    return build_model("char_lstm", input_shape=(6,), classes=7, **{"embedding": 3, "hidden": 5, **options})


def test_the_order_of_the_characters_matters_and_so_does_the_first():
    model = small()
    weights = model.init(0)
    texts = torch.tensor([[1, 2, 3, 4, 5, 6], [2, 1, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6]])
    first, swapped, other = model.apply(weights, texts)[0].logits
    assert float((first - swapped).abs().max()) > 1e-6
    assert float((first - other).abs().max()) > 1e-6


def test_many_clients_at_once_equal_one_after_the_other_whatever_the_padding():
    model = small()
    both = stack([model.init(seed) for seed in (1, 2)])
    weights = tree_map(lambda leaf: leaf.double(), both)
    leaves = [leaf.requires_grad_() for leaf in weights.params.values()]
    x = torch.randint(0, 7, (2, 3, 6), generator=torch_generator(0))
    weight = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)

    def client(weights: Weights, x: Tensor, weight: Tensor) -> Tensor:
        output, _ = model.apply(weights, x, training=True, weight=weight, seed=torch.tensor(0))
        return ((output.logits.square().sum(1) + output.features.sin().sum(1)) * weight).sum()

    together = torch.autograd.grad(vmap(client)(weights, x, weight).sum(), leaves)
    real = [(x[0], weight[0]), (x[1, :2], weight[1, :2])]
    alone = sum(client(rows(weights, i), *real[i]) for i in range(2))
    for ours, wanted in zip(together, torch.autograd.grad(alone, leaves), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


def test_the_state_of_each_character_is_the_feature_of_the_text_that_ends_there():
    model, x = small(), torch.tensor([[1, 2, 3, 4, 5, 6], [0, 0, 4, 1, 6, 2]])
    weights = model.init(0)
    states = model.tokens(weights, x)
    assert states.shape == (2, 6, 5)
    for length in (1, 4, 6):
        features = model.apply(weights, x[:, :length])[0].features
        torch.testing.assert_close(states[:, length - 1], features, rtol=1e-6, atol=1e-6)


def test_the_start_is_a_function_of_the_seed_and_the_head_starts_as_in_mrtf():
    model = build_model("char_lstm", input_shape=(6,), classes=81, init="paper")
    first, again, other = (model.init(seed).params for seed in (7, 7, 8))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["encoder.lstm.weight_hh_l1"], other["encoder.lstm.weight_hh_l1"])
    assert first["head.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert first["encoder.lstm.weight_hh_l0"].abs().max().item() == pytest.approx(1 / 16, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "options", "told"),
    [
        ((3, 8, 8), {}, "needs text"),
        ((6,), {"hidden": 0}, "model.hidden = 0"),
        ((6,), {"layers": True}, "model.layers = True"),
        ((6,), {"embedding": 2.5}, "model.embedding = 2.5"),
        ((6,), {"hiden": 3}, "did you mean 'hidden'?"),
    ],
)
def test_mistakes_are_told_in_one_line(shape, options, told):
    with pytest.raises(FedstillError) as caught:
        build_model("char_lstm", input_shape=shape, classes=7, **options)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fecnn_names_its_forms():
    with pytest.raises(FedstillError, match=r"model\.form = 'relesed' is unknown: did you mean 'released'\?"):
        build_model("fecnn", input_shape=(1, 28, 28), classes=62, form="relesed")
