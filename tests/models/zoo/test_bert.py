"""The text encoder: against PyTorch's own layer, what padding and order do, one client against many."""

import numpy as np
import pytest
import torch
from engine_cases import trained_in_float64
from torch import Tensor, nn
from torch.func import vmap

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator, torch_stream
from fedstill.core.tree import rows, stack, tree_map
from fedstill.core.types import Model, Training, Weights
from fedstill.models import MODELS, build_model, from_module, why_unbatchable

SMALL = {"vocabulary": 11, "positions": 9, "layers": 2, "hidden": 12, "heads": 3, "inner": 20}
TEXTS = torch.tensor([[2, 5, 7, 3, 0, 0], [2, 9, 9, 4, 6, 3], [2, 3, 0, 0, 0, 0]])


def small(**options: object) -> Model:
    return build_model("bert", input_shape=(6,), classes=4, **{**SMALL, **options})


def lively(weights: Weights) -> Weights:
    """Weights in double precision that are large enough to tell texts apart: at 0.02 attention is almost even."""
    generator = torch_generator(5)
    noise = {name: torch.randn(leaf.shape, generator=generator) for name, leaf in weights.params.items()}
    return Weights({name: (leaf + 0.4 * noise[name]).double() for name, leaf in weights.params.items()}, {})


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({"vocabulary": 30522, "positions": 512}, 14_350_248),  # the card's: TinyBERT
        ({}, 14_350_248 - (30522 - 8192) * 312),
        (SMALL, 11 * 12 + 9 * 12 + 4 * 12 + 2 * (4 * 12 * 13 + 4 * 12 + 12 * 20 + 20 + 20 * 12 + 12) + 12 * 13),
    ],
)
def test_it_has_the_parameters_of_tinybert(options, body):
    model = build_model("bert", input_shape=(6,), classes=4, **options)
    weights = model.init(0)
    hidden = options.get("hidden", 312)
    assert sum(leaf.numel() for leaf in weights.params.values()) == body + 4 * (hidden + 1)
    output, buffers = model.apply(weights, TEXTS)
    assert output.features.shape == (3, hidden)
    assert output.logits.shape == (3, 4)
    assert buffers == {}
    assert model.head is not None
    torch.testing.assert_close(model.head(weights.params, output.features), output.logits)
    assert not any((model.traits.convolutional, model.traits.batch_statistics))


def torchs_layer(params: dict[str, Tensor], at: str) -> nn.TransformerEncoderLayer:
    """PyTorch's encoder layer with the weights of one of ours."""
    shape = {"d_model": 12, "nhead": 3, "dim_feedforward": 20, "dropout": 0.0, "layer_norm_eps": 1e-12}
    layer = nn.TransformerEncoderLayer(**shape, activation="gelu", batch_first=True, norm_first=False).double().eval()
    theirs = {"attend": "self_attn.in_proj_", "out": "self_attn.out_proj.", "wide": "linear1.", "narrow": "linear2."}
    theirs |= {"first_norm": "norm1.", "second_norm": "norm2."}
    layer.load_state_dict({f"{b}{w}": params[f"{at}.{a}.{w}"] for a, b in theirs.items() for w in ("weight", "bias")})
    return layer


@pytest.mark.parametrize("causal", [False, True])
def test_the_layers_are_pytorchs_own_in_values_and_gradients(causal):
    model = small()
    params = {name: leaf.requires_grad_() for name, leaf in lively(model.init(0)).params.items()}
    embedded = params["encoder.tokens.weight"][TEXTS] + params["encoder.positions.weight"][:6]
    norm = params["encoder.norm.weight"], params["encoder.norm.bias"]
    expected = nn.functional.layer_norm(embedded + params["encoder.types.weight"][0], (12,), *norm, 1e-12)
    layers = [torchs_layer(params, f"encoder.blocks.{number}") for number in range(2)]
    ahead = torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else None
    for layer in layers:
        expected = layer(expected, src_mask=ahead, src_key_padding_mask=TEXTS == 0)
    found = model.tokens(Weights(params, {}), TEXTS, causal=causal)
    real = (TEXTS != 0)[..., None]  # what stands in the place of padding is nobody's
    torch.testing.assert_close(found * real, expected * real, rtol=0.0, atol=1e-9)
    read = ["encoder.tokens.weight", "encoder.positions.weight", "encoder.norm.weight"]
    leaves = [params[name] for name in read]
    ours, theirs = (torch.autograd.grad((states.sin() * real).sum(), leaves) for states in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-9)


def test_in_single_precision_and_at_full_size_a_layer_is_pytorchs_to_five_digits():
    with torch_stream(0):
        network = MODELS["bert"]((64,), 4, vocabulary=50, layers=1)
        theirs = nn.TransformerEncoderLayer(312, 12, 1200, 0.1, "gelu", 1e-12, batch_first=True).eval()
    block, own = network.encoder.blocks[0], theirs.state_dict()
    names = {"attend": "self_attn.in_proj_", "out": "self_attn.out_proj.", "wide": "linear1.", "narrow": "linear2."}
    names |= {"first_norm": "norm1.", "second_norm": "norm2."}
    block.load_state_dict({f"{a}.{w}": own[f"{b}{w}"] for a, b in names.items() for w in ("weight", "bias")})
    x = torch.randn(2, 64, 312, generator=torch_generator(1))
    found = block(x.flatten(0, 1), torch.zeros(2, 1, 1, 64)).unflatten(0, (2, 64))
    torch.testing.assert_close(found, theirs(x), rtol=0.0, atol=1e-5)


def test_the_features_are_tanh_of_a_dense_layer_on_the_first_token():
    model = small()
    weights = lively(model.init(0))
    first = model.tokens(weights, TEXTS, causal=False)[:, 0]
    params = weights.params
    pooled = (first @ params["encoder.pooler.weight"].T + params["encoder.pooler.bias"]).tanh()
    torch.testing.assert_close(model.apply(weights, TEXTS)[0].features, pooled)


def test_the_mean_pool_is_the_mean_of_the_real_tokens_and_has_no_weights():
    model = build_model(
        "bert", input_shape=(6,), classes=3, vocabulary=20, layers=1, hidden=12, heads=3, inner=8, pool="mean"
    )
    weights, x = model.init(0), torch.tensor([[2, 7, 9, 0, 0, 0], [2, 5, 3, 4, 8, 6]])
    states, features = model.tokens(weights, x, causal=False), model.apply(weights, x)[0].features
    torch.testing.assert_close(features[0], states[0, :3].mean(0))
    torch.testing.assert_close(features[1], states[1].mean(0))
    assert not any("pooler" in name for name in weights.params)
    nothing = model.apply(weights, torch.zeros(1, 6, dtype=torch.int64))[0]
    assert not nothing.features.any()  # no token at all: zeros, no division by zero


def test_padding_changes_no_text():
    model = small()
    weights = lively(model.init(0))
    for row, length in ((0, 4), (2, 2)):
        cut = TEXTS[row : row + 1, :length]
        filled, alone = (model.apply(weights, x)[0].features for x in (TEXTS[row : row + 1], cut))
        torch.testing.assert_close(filled, alone, rtol=1e-12, atol=1e-12)


def test_a_text_of_padding_alone_is_a_number_with_a_gradient():
    model = small()
    for weights in (model.init(0), lively(model.init(0))):
        params = {name: leaf.requires_grad_() for name, leaf in weights.params.items()}
        output, _ = model.apply(Weights(params, {}), torch.zeros(2, 6, dtype=torch.int64))
        gradients = torch.autograd.grad(output.logits.square().sum(), list(params.values()))
        assert all(bool(leaf.isfinite().all()) for leaf in (*output, *gradients))


def test_every_token_and_their_order_change_the_features():
    model = small()
    weights = lively(model.init(0))
    variants = torch.tensor([[2, 5, 7, 3, 6, 1], [2, 7, 5, 3, 6, 1], [2, 5, 7, 3, 6, 9], [1, 5, 7, 3, 6, 1]])
    features = model.apply(weights, variants)[0].features
    assert all(float((features[0] - other).abs().max()) > 1e-3 for other in features[1:])


def test_a_causal_state_does_not_see_what_follows_and_the_other_does():
    model = small()
    weights = lively(model.init(0))
    one, two = torch.tensor([[2, 5, 7, 3, 6, 1]]), torch.tensor([[2, 5, 7, 9, 1, 1]])
    blind, seeing = (
        (model.tokens(weights, one, causal=causal) - model.tokens(weights, two, causal=causal)).abs().amax(2)[0]
        for causal in (True, False)
    )
    assert blind[:3].max() == 0.0
    assert blind[3] > 1e-3
    assert seeing[:3].min() > 1e-4


def test_token_states_read_the_models_own_weights_but_not_its_pooling_and_head():
    model = small()
    params = {name: leaf.requires_grad_() for name, leaf in lively(model.init(0)).params.items()}
    states = model.tokens(Weights(params, {}), TEXTS)
    gradients = torch.autograd.grad(states.sin().sum(), list(params.values()), allow_unused=True)
    unread = {name for name, gradient in zip(params, gradients, strict=True) if gradient is None}
    assert unread == {"encoder.pooler.weight", "encoder.pooler.bias", "head.weight", "head.bias"}
    without = Weights({name: leaf for name, leaf in params.items() if name not in unread}, {})
    assert torch.equal(model.tokens(without, TEXTS), states)


def test_a_users_text_network_has_token_states_if_its_encoder_gives_them():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 3)

        def token_states(self, x: Tensor, *, causal: bool) -> Tensor:
            return self.embedding(x) * (2.0 if causal else 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.token_states(x, causal=False).mean(1)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Encoder(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    model = from_module(Own, input_shape=(5,), input_dtype=torch.int64)
    weights, x = model.init(0), torch.tensor([[1, 8, 0]])
    assert torch.equal(model.tokens(weights, x), 2.0 * weights.params["encoder.embedding.weight"][x])
    assert build_model("mlp", input_shape=(5,), classes=2).tokens is None


def test_vmap_can_train_it():
    with torch_stream(0):
        assert why_unbatchable(MODELS["bert"]((6,), 4, **SMALL), TEXTS) is None


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("causal", [None, True])
def test_many_clients_at_once_equal_one_after_the_other_whatever_the_padding_rows(dropout, causal):
    model = small(dropout=dropout)
    weights = stack([lively(model.init(seed)) for seed in (1, 2)])
    leaves = [leaf.requires_grad_() for leaf in weights.params.values()]
    x = torch.randint(0, 11, (2, 3, 6), generator=torch_generator(0))
    weight, seeds = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64), torch.tensor([11, 12])

    def client(weights: Weights, x: Tensor, weight: Tensor, seed: Tensor) -> Tensor:
        if causal is not None:
            states = model.tokens(weights, x, causal=causal, training=True, seed=seed)
            return (states.sin().sum((1, 2)) * weight).sum()
        output, _ = model.apply(weights, x, training=True, weight=weight, seed=seed)
        return ((output.logits.square().sum(1) + output.features.sin().sum(1)) * weight).sum()

    losses = vmap(client)(weights, x, weight, seeds)
    together = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
    real = [(x[0], weight[0]), (x[1, :2], weight[1, :2])]
    alone = [client(rows(weights, i), *real[i], seeds[i]) for i in range(2)]
    one_by_one = torch.autograd.grad(alone[0] + alone[1], leaves, materialize_grads=True)
    torch.testing.assert_close(losses, torch.stack(alone), rtol=1e-10, atol=1e-10)
    for ours, wanted in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)


def test_dropout_is_a_function_of_the_seed_and_sleeps_outside_training():
    model, plain = small(dropout=0.3), small()
    weights = lively(model.init(0))
    first, again, other = (
        model.apply(weights, TEXTS, training=True, seed=torch.tensor(seed))[0].features for seed in (1, 1, 2)
    )
    asleep = model.apply(weights, TEXTS)[0].features
    assert torch.equal(first, again)
    assert float((first - other).abs().max()) > 1e-3
    assert float((first - asleep).abs().max()) > 1e-3
    assert torch.equal(asleep, plain.apply(weights, TEXTS, training=True)[0].features)


def test_dropout_draws_a_mask_after_the_embedding_and_three_in_each_layer(monkeypatch):
    shapes = []
    drawn = torch.ones(())

    def noted(seed: Tensor, shape: tuple[int, ...]) -> Tensor:
        shapes.append(tuple(shape))
        return drawn.expand(shape)

    monkeypatch.setattr("fedstill.models.stateless.uniform", noted)
    model = small(dropout=0.3)
    model.apply(model.init(0), TEXTS, training=True, seed=torch.tensor(0))
    assert [int(np.prod(shape)) for shape in shapes] == [3 * 6 * 12, *2 * [3 * 3 * 6 * 6, 3 * 6 * 12, 3 * 6 * 12]]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_both_engines_train_clients_of_different_sizes_to_the_same_models(optimizer):
    model = small(dropout=0.1)
    x = torch.randint(0, 11, (13, 6), generator=torch_generator(0))
    training = Training(batch_size=4, epochs=2, lr=0.1 if optimizer == "sgd" else 0.01, optimizer=optimizer)
    texts = x, torch.arange(13) % 4
    (start, batched), (_, looped) = (
        trained_in_float64(engine, model, texts, (6, 2, 5), training) for engine in ("batched", "looped")
    )
    for name in ("encoder.tokens.weight", "encoder.blocks.0.attend.weight", "encoder.blocks.1.narrow.weight"):
        assert float((batched.params[name][0] - start.params[name]).abs().max()) > 1e-5, name
    torch.testing.assert_close(batched, looped, rtol=1e-7, atol=1e-9)


def test_it_runs_in_bfloat16_for_many_clients():
    model = small()
    alone = lively(model.init(1))
    weights = tree_map(lambda leaf: leaf.float(), stack([alone, alone]))
    x = torch.stack([TEXTS, TEXTS])
    exact = vmap(lambda weights, x: model.apply(weights, x)[0].features)(weights, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = vmap(lambda weights, x: model.apply(weights, x)[0].features)(weights, x)
    assert not torch.equal(rough.float(), exact)
    torch.testing.assert_close(rough.float(), exact, rtol=0.0, atol=0.1)


def test_it_starts_as_bert_does():
    params = small(vocabulary=500, hidden=48).init(0).params
    drawn = ("tokens", "blocks.0.attend", "blocks.1.wide", "pooler")
    assert all(params[f"encoder.{name}.weight"].std().item() == pytest.approx(0.02, rel=0.1) for name in drawn)
    assert params["head.weight"].std().item() == pytest.approx(0.02, rel=0.2)
    assert not any(leaf.any() for name, leaf in params.items() if name.endswith("bias"))
    assert torch.equal(params["encoder.blocks.0.first_norm.weight"], torch.ones(48))
    again, other = (small(vocabulary=500, hidden=48).init(seed).params for seed in (0, 1))
    assert all(torch.equal(params[name], again[name]) for name in params)
    assert not torch.equal(params["encoder.tokens.weight"], other["encoder.tokens.weight"])


@pytest.mark.parametrize(
    ("shape", "options", "told"),
    [
        ((3, 8, 8), {}, "needs text (tokens,), this data has shape (3, 8, 8)"),
        ((600,), {}, "model.positions = 512 is less than the 600 tokens of a text: set model.positions = 600"),
        ((6,), {"heads": 7}, "model.heads = 7 must divide model.hidden = 312"),
        ((6,), {"layers": 0}, "model.layers = 0 must be a whole number of at least 1"),
        ((6,), {"vocabulary": 2.5}, "model.vocabulary = 2.5 must be a whole number"),
        ((6,), {"inner": True}, "model.inner = True must be a whole number"),
        ((6,), {"dropout": 1.0}, "model.dropout = 1.0 must be at least 0 and below 1"),
        ((6,), {"dropout": "little"}, "model.dropout = little must be at least 0"),
        ((6,), {"hiden": 3}, "did you mean 'hidden'?"),
    ],
)
def test_mistakes_are_told_in_one_line(shape, options, told):
    with pytest.raises(FedstillError) as caught:
        build_model("bert", input_shape=shape, classes=4, **options)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
