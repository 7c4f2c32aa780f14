"""Any nn.Module as a Model: what it may return, what is found in it, what is left alone."""

import copy
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator
from fedstill.core.tree import leaves, stack
from fedstill.core.types import Weights
from fedstill.models import from_module, why_unbatchable


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed))


class LogitsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


class Pair(LogitsOnly):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return features, self.out(features)


class Tied(nn.Module):
    """One matrix at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Counting(nn.Module):
    """A module with state of its own, written in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.largest = torch.maximum(self.largest, x.amax(0))
        return self.line(x)


class Single(LogitsOnly):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.out(self.body(x)),)


@pytest.mark.parametrize("kind", [LogitsOnly, Pair, Single])
def test_features_are_what_the_last_linear_layer_reads(kind):
    model = from_module(kind, input_shape=(6,), classes=3)
    assert model.traits.features
    assert model.traits.batch_statistics
    assert not model.traits.convolutional
    assert model.traits.unbatchable is None
    weights, x = model.init(0), draw(4, 6)
    output, _ = model.apply(weights, x)
    module = kind()
    module.load_state_dict({**weights.params, **weights.buffers})
    module.eval()
    assert torch.allclose(output.features, module.body(x))
    assert torch.allclose(output.logits, module.out(module.body(x)))
    assert torch.allclose(model.head(weights.params, output.features), output.logits)


def test_captured_features_are_each_clients_own_under_vmap():
    model = from_module(LogitsOnly, input_shape=(6,))
    both, x = stack([model.init(1), model.init(2)]), draw(2, 4, 6)
    together = vmap(lambda weights, x: model.apply(weights, x)[0])(both, x)
    for i in range(2):
        alone, _ = model.apply(model.init(i + 1), x[i])
        assert torch.allclose(together.features[i], alone.features, atol=1e-6)
        assert torch.allclose(together.logits[i], alone.logits, atol=1e-6)


def test_without_a_last_linear_layer_the_features_are_the_logits():
    model = from_module(nn.Sequential(nn.Linear(6, 3), nn.Softplus()), input_shape=(6,))
    output, _ = model.apply(model.init(0), draw(4, 6))
    assert not model.traits.features
    assert model.head is None
    assert torch.equal(output.features, output.logits)


def test_a_head_of_several_layers_is_found_by_its_name_and_runs_without_dropout():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(1, 4, 3)
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            maps = self.body(x)
            return maps, self.head(maps)

    model = from_module(Deep, input_shape=(1, 4, 4))
    weights = model.init(0)
    output, _ = model.apply(weights, draw(2, 1, 4, 4))
    assert output.features.shape == (2, 16)
    assert torch.allclose(model.head(weights.params, output.features), output.logits, atol=1e-6)
    assert model.traits.convolutional


def test_a_last_layer_that_does_not_read_the_features_is_no_head():
    class Scaled(Pair):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = self.body(x)
            return features, self.out(2 * features)

    assert from_module(Scaled, input_shape=(6,)).head is None


def test_a_factory_is_built_anew_for_each_seed_and_a_module_keeps_its_own_weights():
    factory = from_module(LogitsOnly, input_shape=(6,))
    assert not torch.equal(factory.init(0).params["out.weight"], factory.init(1).params["out.weight"])
    assert torch.equal(factory.init(1).params["out.weight"], factory.init(1).params["out.weight"])
    module = LogitsOnly()
    own = from_module(module, input_shape=(6,))
    assert torch.equal(own.init(0).params["out.weight"], module.out.weight)
    assert torch.equal(own.init(5).params["out.weight"], module.out.weight)
    own.init(0).params["out.weight"].zero_()
    assert module.out.weight.any()
    assert own.init(0).params["out.weight"].any()


def test_the_users_module_is_left_exactly_as_it_was():
    module = LogitsOnly()
    module.body[1].eval()
    before = copy.deepcopy(module)
    model = from_module(module, input_shape=(6,))
    weights = model.init(0)
    model.apply(weights, draw(4, 6), training=True, weight=torch.ones(4), seed=torch.tensor(1))
    for (name, a), (_, b) in zip(before.state_dict().items(), module.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert [type(layer) for layer in module.modules()] == [type(layer) for layer in before.modules()]
    assert [layer.training for layer in module.modules()] == [layer.training for layer in before.modules()]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


@pytest.mark.parametrize("training", [True, False])
def test_buffers_come_back_in_a_new_dict_and_the_given_ones_are_not_touched(training):
    for kind, shape in ((LogitsOnly, (6,)), (Counting, (4,))):
        model = from_module(kind, input_shape=shape)
        weights = model.init(0)
        before = {name: buffer.clone() for name, buffer in weights.buffers.items()}
        _, after = model.apply(weights, draw(4, *shape).abs(), training=training, seed=torch.tensor(0))
        assert after is not weights.buffers
        assert all(torch.equal(weights.buffers[name], before[name]) for name in before)
        assert [after[name].dtype for name in before] == [before[name].dtype for name in before]
        for name in before:
            assert torch.equal(after[name], before[name]) != training, name


@pytest.mark.parametrize("training", [True, False])
def test_it_computes_what_functional_call_computes(training):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 3)
            self.norm = nn.BatchNorm2d(3)
            self.out = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.conv(x)).relu().flatten(1))

    module = Plain().train(training)
    model = from_module(module, input_shape=(1, 4, 4))
    weights, x = model.init(0), draw(5, 1, 4, 4)
    output, buffers = model.apply(weights, x, training=training)
    lent = {name: buffer.clone() for name, buffer in weights.buffers.items()}
    expected = functional_call(module, (weights.params, lent), (x,))
    assert torch.equal(output.logits, expected)
    assert all(torch.equal(buffers[name], lent[name]) for name in lent)


def test_tied_weights_are_stored_once_and_get_the_gradient_of_both_uses():
    model = from_module(Tied, input_shape=(4,))
    weights, x = model.init(0), draw(3, 4)
    assert list(weights.params) == ["first.weight", "first.bias", "second.bias"]
    leaf = weights.params["first.weight"].requires_grad_()
    (gradient,) = torch.autograd.grad(model.apply(weights, x)[0].logits.sum(), leaf)
    w, (b1, b2) = leaf.detach().clone().requires_grad_(), (weights.params[f"{i}.bias"] for i in ("first", "second"))
    (expected,) = torch.autograd.grad((F.linear(F.linear(x, w, b1).relu(), w, b2)).sum(), w)
    assert torch.allclose(gradient, expected)


def test_frozen_parameters_are_carried_with_the_buffers():
    def factory() -> nn.Module:
        module = LogitsOnly()
        module.body.requires_grad_(False)
        return module

    model = from_module(factory, input_shape=(6,))
    weights = model.init(0)
    assert list(weights.params) == ["out.weight", "out.bias"]
    assert "body.0.weight" in weights.buffers
    _, after = model.apply(weights, draw(4, 6), training=True, seed=torch.tensor(0))
    assert after["body.0.weight"] is weights.buffers["body.0.weight"]


def test_parametrised_layers_work():
    model = from_module(lambda: parametrizations.weight_norm(nn.Linear(4, 3)), input_shape=(4,))
    weights, x = model.init(0), draw(2, 4)
    g, v = weights.params["parametrizations.weight.original0"], weights.params["parametrizations.weight.original1"]
    expected = x @ (g * v / v.norm(dim=1, keepdim=True)).T + weights.params["bias"]
    assert torch.allclose(model.apply(weights, x)[0].logits, expected, atol=1e-6)
    assert model.traits.unbatchable is None


def test_an_error_in_a_call_leaves_the_model_usable():
    model = from_module(LogitsOnly, input_shape=(6,))
    weights = model.init(0)
    with pytest.raises(RuntimeError):
        model.apply(weights, draw(4, 7))
    with pytest.raises(FedstillError, match="needs a seed"):
        model.apply(weights, draw(4, 6), training=True)
    output, _ = model.apply(weights, draw(4, 6))
    assert output.logits.isfinite().all()


def test_a_call_keeps_no_reference_to_the_weights_it_was_lent():
    model = from_module(LogitsOnly, input_shape=(6,))
    weights = model.init(0)
    references = [weakref.ref(leaf) for leaf in leaves(weights)]
    model.apply(weights, draw(4, 6), training=True, seed=torch.tensor(0))
    del weights
    assert [reference() for reference in references] == [None] * len(references)


def test_a_call_inside_a_call_gives_the_outer_call_its_weights_back():
    class Nested(nn.Module):
        inner = None

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            before = self.line(x)
            inner, Nested.inner = Nested.inner, None
            if inner is not None:
                inner()
            return before + self.line(x)

    model = from_module(Nested, input_shape=(4,))
    ours, other, x = model.init(0), model.init(1), draw(3, 4)
    Nested.inner = lambda: model.apply(other, x)
    logits = model.apply(ours, x)[0].logits
    assert Nested.inner is None
    assert torch.allclose(logits, 2 * F.linear(x, ours.params["line.weight"], ours.params["line.bias"]))


def test_a_module_that_cannot_be_copied_is_told_so():
    module = nn.Linear(4, 2)
    module.lock = threading.Lock()
    with pytest.raises(FedstillError, match="Linear cannot be copied"):
        from_module(module, input_shape=(4,))


def test_calls_from_several_threads_do_not_mix_their_weights():
    model = from_module(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), input_shape=(8,))
    x = draw(16, 8)
    weights = {seed: model.init(seed) for seed in range(4)}
    expected = {seed: model.apply(weights[seed], x)[0].logits for seed in range(4)}
    wrong = []

    def work(seed: int) -> None:
        for _ in range(50):
            if not torch.equal(model.apply(weights[seed], x)[0].logits, expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_calls_from_other_threads_wait_while_one_compiles():
    model = from_module(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), input_shape=(8,))
    x = draw(16, 8)
    weights = [model.init(seed) for seed in range(3)]
    expected = [model.apply(one, x)[0].logits for one in weights]
    wrong, done = [], threading.Event()

    def work(seed: int) -> None:
        while not done.is_set():
            if not torch.equal(model.apply(weights[seed], x)[0].logits, expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        for size in (2, 3, 4, 5):  # each a trace of its own
            traced = torch.compile(
                lambda one, some: model.apply(one, some)[0].logits, backend="aot_eager", dynamic=False
            )
            assert torch.allclose(traced(weights[0], x[:size]), expected[0][:size], atol=1e-6)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        torch.compiler.reset()
    assert not wrong


def test_stacked_buffers_and_integer_counters_survive_vmap():
    model = from_module(LogitsOnly, input_shape=(6,))
    both = stack([model.init(1), model.init(2)])

    def client(weights: Weights, x: Tensor, seed: Tensor) -> dict[str, Tensor]:
        return model.apply(weights, x, training=True, seed=seed)[1]

    buffers = vmap(client)(both, draw(2, 4, 6), torch.tensor([1, 2]))
    assert buffers["body.2.num_batches_tracked"].dtype == torch.int64
    assert buffers["body.2.num_batches_tracked"].tolist() == [1, 1]
    assert buffers["body.2.running_mean"].shape == (2, 5)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda x: {"logits": x}, "returned dict"),
        (lambda x: (x, x, x), r"returned \(Tensor, Tensor, Tensor\)"),
        (lambda x: (None, x), r"returned \(NoneType, Tensor\)"),
        (lambda x: x.mean(), r"logits of shape \(\)"),
        (lambda x: (x, x.repeat(1, 2)), r"logits of shape \(2, 8\).*\(features, logits\), in this order"),
    ],
)
def test_a_module_that_returns_something_else_is_told_what_to_return(returned, told):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> object:
            return returned(self.line(x))

    with pytest.raises(FedstillError, match=told):
        from_module(Odd, input_shape=(4,), classes=4)


def test_mistakes_around_the_module_are_one_line():
    for source, told in (
        (lambda: None, "factory returned NoneType"),
        (nn.Linear, "factory Linear is called without arguments"),
        (lambda seed: nn.Linear(4, 2), "missing a required argument: 'seed'"),
        ("resnet", "not str"),
        (nn.Linear(5, 2), r"cannot run on a batch of shape \(2, 4\)"),
        (nn.LazyLinear(3), "lazy layers"),
    ):
        with pytest.raises(FedstillError, match=told) as caught:
            from_module(source, input_shape=(4,))
        assert "\n" not in str(caught.value)


# What cannot run for many clients at once is found before round 1, with the layer and the cure.

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
