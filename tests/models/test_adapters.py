"""Adapters: a low-rank update of each dense layer, whose own weights stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.core.errors import FedstillError
from fedstill.core.types import Weights
from fedstill.models import build_model
from fedstill.models.adapters import Adapted, on_base

WIDE = {"input_shape": (3,), "classes": 2, "hidden": (4,)}


def networks(rank: int = 2):
    return build_model("mlp", **WIDE), build_model("mlp", **WIDE, adapters=rank)


def test_worked_numbers():
    """x (1, 2), W = I, b = 0, down = (1 1), up = (10 20)^T: W x = (1, 2), down x = 3, y = (31, 62)."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
        layer.bias.zero_()
        adapter = Adapted(layer, 1)
        adapter.down.copy_(torch.ones(1, 2))
        adapter.up.copy_(torch.tensor([[10.0], [20.0]]))
    assert adapter(torch.tensor([[1.0, 2.0]])).tolist() == [[31.0, 62.0]]


def test_it_begins_as_the_network_without_adapters():
    plain, adapted = networks()
    x, first, base = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), adapted.init(7), plain.init(7)
    assert torch.equal(adapted.apply(first, x)[0].logits, plain.apply(base, x)[0].logits)
    assert set(first.params) == {"encoder.1.down", "encoder.1.up", "head.weight", "head.bias"}
    assert set(adapted.frozen_names) == {"encoder.1.weight", "encoder.1.bias"} == set(first.buffers)
    assert float(first.params["encoder.1.down"].abs().max()) > 0.0


def test_factors_are_a_dense_update_by_their_product():
    plain, adapted = networks()
    x, first = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), adapted.init(0)
    up, down = torch.randn(4, 2), torch.randn(2, 3)
    moved = Weights({**first.params, "encoder.1.up": up, "encoder.1.down": down}, first.buffers)
    dense = plain.init(0)
    dense.params["encoder.1.weight"] += up @ down
    torch.testing.assert_close(adapted.apply(moved, x)[0], plain.apply(dense, x)[0])


def test_the_gradients_are_the_dense_gradient_seen_through_the_other_factor():
    plain, adapted = networks()
    x, first = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double(), adapted.init(0)
    up, down = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 2), (2, 3)))
    numbers = {name: leaf.double() for name, leaf in {**first.params, **first.buffers}.items()}
    weight = (numbers["encoder.1.weight"] + up @ down).detach().requires_grad_()
    beside = {name: leaf for name, leaf in numbers.items() if name in adapted.frozen_names}
    head = {name: leaf for name, leaf in numbers.items() if name.startswith("head")}
    factors = adapted.apply(Weights({**head, "encoder.1.up": up, "encoder.1.down": down}, beside), x)[0].logits
    dense = plain.apply(
        Weights({**head, "encoder.1.weight": weight, "encoder.1.bias": beside["encoder.1.bias"]}, {}), x
    )
    (gradient,) = torch.autograd.grad(dense[0].logits.square().sum(), weight)
    of_up, of_down = torch.autograd.grad(factors.square().sum(), (up, down))
    torch.testing.assert_close(of_up, gradient @ down.detach().T)
    torch.testing.assert_close(of_down, up.detach().T @ gradient)


def test_a_network_without_adapters_is_the_base_of_one_that_has_them():
    plain, adapted = networks()
    trained, first = plain.init(3), adapted.init(5)
    weights = on_base(trained, first, adapted)
    assert torch.equal(weights.buffers["encoder.1.weight"], trained.params["encoder.1.weight"])
    assert torch.equal(weights.params["head.weight"], trained.params["head.weight"])
    assert torch.equal(weights.params["encoder.1.down"], first.params["encoder.1.down"])
    x = torch.randn(5, 3)
    assert torch.equal(adapted.apply(weights, x)[0].logits, plain.apply(trained, x)[0].logits)


@pytest.mark.parametrize("weights", [networks()[1].init(3), build_model("mlp", **{**WIDE, "hidden": ()}).init(0)])
def test_weights_of_another_form_come_back_as_they_are(weights):
    adapted = networks()[1]
    assert on_base(weights, adapted.init(5), adapted) is weights


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapters": 5}, r"model\.adapters = 5: the layer encoder\.1 of 3 inputs .* has at most rank 3"),
        ({"adapters": -1}, r"model\.adapters = -1 must be a whole number"),
        ({"hidden": (), "adapters": 1}, r"no dense layer below its head"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options, says):
    with pytest.raises(FedstillError, match=says):
        build_model("mlp", **{**WIDE, **options})


def test_every_dense_layer_of_the_small_bert_has_its_factors():
    """Of each layer attend, out, wide and narrow; the pooler; of rank 1 as many numbers as inputs and outputs."""
    small = {"vocabulary": 20, "positions": 8, "layers": 2, "hidden": 8, "heads": 2, "inner": 12, "adapters": 1}
    weights = build_model("bert", input_shape=(8,), classes=3, **small).init(0)
    block = (8 + 24) + (8 + 8) + (8 + 12) + (12 + 8)
    assert sum(leaf.numel() for leaf in weights.params.values()) == 2 * block + (8 + 8) + (8 * 3 + 3)
    assert "encoder.tokens.weight" in weights.buffers
