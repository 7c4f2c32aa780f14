"""What cannot run for many clients at once is found before round 1, with the layer and the cure."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core.errors import FedstillError
from fedstill.models import from_module, why_unbatchable

X = torch.linspace(0.0, 1.0, 8).reshape(2, 4)


def layer(function) -> nn.Module:
    """A two-layer net with the function between."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return nn.Sequential(nn.Linear(4, 4), Own(), nn.Linear(4, 3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


class DoubledWithRule(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


def write_into_shared(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    out[:, 0] = x[:, 0]
    return out + x


def write_into_own(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    return out + x


BAD = {
    "item": (lambda x: x * x.mean().item(), "calls .item()", "keep it a tensor"),
    "float": (lambda x: x * float(x.sum()), "calls .item()", "keep it a tensor"),
    "if": (lambda x: x if x.sum() > 0 else -x, "branches on the value", "use torch.where"),
    "mask": (lambda x: x * x[x > 0].sum(), "shape that depends on values", "masked_fill"),
    "unique": (lambda x: x * len(torch.unique(x)), "shape that depends on values", "torch.where"),
    "in place": (write_into_shared, "all clients share", "torch.zeros_like"),
    "numpy": (lambda x: x * torch.from_numpy(x.detach().numpy()), "leaves PyTorch", "tensor operations"),
    "function": (Doubled.apply, "without a vmap rule", "generate_vmap_rule = True"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_message_names_the_layer_the_reason_and_the_cure(case):
    function, reason, cure = BAD[case]
    module = layer(function)
    told = why_unbatchable(module, X)
    assert told is not None
    assert told.startswith("layer 1 (Own) ")
    assert reason in told
    assert cure in told
    assert "engine.name = 'looped'" in told
    assert "\n" not in told
    assert from_module(module, input_shape=(4,)).traits.unbatchable == told


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x.sum() > 0, x, -x),
        lambda x: x.masked_fill(x > 0, 0.0),
        DoubledWithRule.apply,
        write_into_own,
        lambda x: F.layer_norm(x, (4,)),
    ],
)
def test_what_the_message_recommends_works(function):
    assert why_unbatchable(layer(function), X) is None


def test_a_module_that_cannot_be_batched_still_runs_one_client_at_a_time():
    model = from_module(layer(lambda x: x * x.mean().item()), input_shape=(4,))
    weights = model.init(0)
    output, _ = model.apply(weights, X.repeat(2, 1), training=True, weight=torch.ones(4), seed=torch.tensor(0))
    assert output.logits.shape == (4, 3)


def test_a_recurrent_layer_that_is_not_replaced_is_unbatchable_and_says_which_it_is():
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = nn.GRU(1, 4, batch_first=True)
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.reader(x.unsqueeze(-1))[0][:, -1])

    model = from_module(Text, input_shape=(5,))
    assert "layer reader (GRU) uses aten::gru" in model.traits.unbatchable
    weights = model.init(0)
    module = Text()
    module.load_state_dict(weights.params)
    x = torch.linspace(0.0, 1.0, 10).reshape(2, 5)
    assert torch.allclose(model.apply(weights, x)[0].logits, module(x), atol=1e-6)


def test_dropout_and_batchnorm_layers_are_no_obstacle():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(8, 3))
    assert why_unbatchable(module, torch.linspace(0.0, 1.0, 32).reshape(2, 1, 4, 4)) is None


def negative() -> nn.Linear:
    """RReLU draws for negative values only: some must be there whatever the global stream gave."""
    linear = nn.Linear(4, 4)
    nn.init.constant_(linear.weight, -1.0)
    nn.init.constant_(linear.bias, -1.0)
    return linear


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (layer(lambda x: F.dropout(x, 0.5)), r"layer 1 \(Own\)"),
        (layer(lambda x: x + torch.randn_like(x)), r"layer 1 \(Own\)"),
        (nn.Sequential(negative(), nn.RReLU(), nn.Linear(4, 3)), r"layer 1 \(RReLU\)"),
    ],
)
def test_random_numbers_drawn_in_forward_are_refused_with_the_layer_that_draws(module, named):
    with pytest.raises(FedstillError, match=named + " draws random numbers.*use nn.Dropout"):
        from_module(module, input_shape=(4,))


def test_a_module_that_fails_only_in_training_is_told_with_its_layer():
    class OnlyEval(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("no training here\nsecond line")
            return x

    module = nn.Sequential(nn.Linear(4, 4), OnlyEval(), nn.Linear(4, 3))
    with pytest.raises(FedstillError, match=r"in layer 1 \(OnlyEval\): no training here$"):
        from_module(module, input_shape=(4,))


def test_a_module_without_parameters_is_no_obstacle():
    assert why_unbatchable(nn.Flatten(), X) is None
