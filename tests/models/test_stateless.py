"""Masked BatchNorm and planned dropout against PyTorch's own layers and against their definitions."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for, torch_generator
from fedstill.models import stateless as layers
from fedstill.models.stateless import Context, MaskedBatchNorm, PaddedMean, PlannedDropout, Step, convert

SHAPES = {nn.BatchNorm1d: (6, 3), nn.BatchNorm2d: (6, 3, 2, 4), nn.BatchNorm3d: (6, 3, 2, 2, 2)}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed), dtype=torch.float64)


def norm_pair(kind: type[nn.Module], **options: object) -> tuple[nn.Module, MaskedBatchNorm]:
    """The same BatchNorm twice, with statistics and affine parameters that are not the trivial ones."""
    native = kind(3, **options).double()
    for number, tensor in enumerate((*native.parameters(), *native.buffers())):
        if tensor.is_floating_point():
            tensor.data.copy_(draw(3, seed=number).abs() + 0.5)
    return native, convert(copy.deepcopy(native), Context())


def run(norm: nn.Module, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Output, gradients (x, then parameters) of a loss on the real rows, and buffers."""
    if isinstance(norm, MaskedBatchNorm):
        norm.context.step = Step(weight=weight)
    x = x.clone().requires_grad_()
    out = norm(x)
    real = out if weight is None else out[weight > 0]
    loss = (real * draw(*real.shape, seed=9)).sum() + real.square().sum()
    return out, list(torch.autograd.grad(loss, [x, *norm.parameters()])), list(norm.buffers())


def assert_same(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-10) -> None:
    for left, right in zip(a, b, strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_on_a_cpu_channels_that_lie_last_stay_last_so_that_no_convolution_copies_them_back():
    native, ours = norm_pair(nn.BatchNorm2d)
    x = draw(6, 3, 2, 4).contiguous(memory_format=torch.channels_last)
    assert ours(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours(x), native(x.contiguous()))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3, "eps": 1e-2}],
    ids=lambda options: "-".join(options) or "default",
)
@pytest.mark.parametrize("weighted", [True, False])
def test_with_all_rows_real_it_is_pytorchs_batchnorm(kind, options, weighted):
    native, masked = norm_pair(kind, **options)
    for seed in range(3):
        x = draw(*SHAPES[kind], seed=seed) * 3 + 5
        expected = run(native, x)
        found = run(masked, x, torch.ones(len(x), dtype=torch.float64) if weighted else None)
        for left, right in zip(found, expected, strict=True):
            assert_same(list(left), list(right))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e9])
@pytest.mark.parametrize("track", [True, False])
def test_padding_changes_nothing_whatever_it_holds(kind, garbage, track):
    native, masked = norm_pair(kind, track_running_stats=track)
    x = draw(*SHAPES[kind])
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    padded = torch.where(weight.reshape(-1, *[1] * (x.dim() - 1)) > 0, x, garbage)
    out, gradients, buffers = run(native, x[weight > 0])
    masked_out, masked_gradients, masked_buffers = run(masked, padded, weight)
    assert_same([masked_out[weight > 0]], [out])
    assert_same([masked_gradients[0][weight > 0], *masked_gradients[1:]], gradients)
    assert torch.equal(masked_gradients[0][weight == 0], torch.zeros_like(x[weight == 0]))
    assert_same(masked_buffers, buffers)


def test_running_statistics_by_hand():
    _, masked = norm_pair(nn.BatchNorm1d, momentum=0.25)
    masked.running_mean.fill_(1.0)
    masked.running_var.fill_(2.0)
    x = torch.tensor([[1.0] * 3, [3.0] * 3, [8.0] * 3, [99.0] * 3], dtype=torch.float64)
    run(masked, x, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert masked.running_mean[0] == pytest.approx(0.75 * 1 + 0.25 * 4)  # mean of 1, 3, 8
    assert masked.running_var[0] == pytest.approx(0.75 * 2 + 0.25 * 13)  # (9 + 1 + 16) / (3 - 1)


@pytest.mark.parametrize("weight", [None, torch.ones(1), torch.zeros(1)], ids=["no weights", "one row", "no row"])
def test_a_batch_of_one_value_per_channel_uses_the_running_statistics(weight):
    native, masked = norm_pair(nn.BatchNorm1d)
    before = [buffer.clone() for buffer in masked.buffers()]
    x = draw(1, 3)
    out, gradients, after = run(masked, x, weight)
    assert_same(after, before, 0.0)
    assert all(gradient.isfinite().all() for gradient in gradients)
    if weight is None or weight.any():
        assert_same([out], [native.eval()(x)])


def test_one_sample_with_several_positions_still_has_statistics():
    native, masked = norm_pair(nn.BatchNorm2d)
    x = draw(1, 3, 2, 2)
    for left, right in zip(run(masked, x, torch.ones(1)), run(native, x), strict=True):
        assert_same(list(left), list(right))


def test_without_running_statistics_a_single_value_gives_the_bias():
    _, masked = norm_pair(nn.BatchNorm1d, track_running_stats=False)
    out, gradients, _ = run(masked, draw(1, 3), torch.ones(1))
    assert_same([out], [masked.bias[None]])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_in_eval_mode_it_uses_the_running_statistics_and_keeps_them():
    native, masked = norm_pair(nn.BatchNorm2d)
    x, before = draw(*SHAPES[nn.BatchNorm2d]), [buffer.clone() for buffer in masked.buffers()]
    out, _, after = run(masked.eval(), x, torch.tensor([1.0, 1, 0, 0, 0, 0]))
    assert_same([out], [native.eval()(x)])
    assert_same(after, before, 0.0)


def test_buffers_are_replaced_never_written_into():
    for weight in (None, torch.ones(6)):
        _, masked = norm_pair(nn.BatchNorm1d)
        given = dict(masked.named_buffers())
        before = {name: buffer.clone() for name, buffer in given.items()}
        run(masked, draw(6, 3), weight)
        for name, buffer in given.items():
            assert torch.equal(buffer, before[name]), name
            assert not torch.equal(masked._buffers[name], before[name]), name
            assert not masked._buffers[name].requires_grad, name


def test_rows_that_do_not_match_the_weights_are_refused():
    _, masked = norm_pair(nn.BatchNorm1d)
    with pytest.raises(FedstillError, match=r"reads 6 rows where the batch has 2.*GroupNorm"):
        run(masked, draw(6, 3), torch.ones(2))


def dropout(layer: nn.Module, x: Tensor, seed: int | None = 5) -> Tensor:
    context = Context(Step(seed=None if seed is None else torch.tensor(seed)))
    return convert(copy.deepcopy(layer), context)(x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    out = dropout(nn.Dropout(p), torch.ones(200, 500))
    kept = out != 0
    deviation = math.sqrt(p * (1 - p) / out.numel())
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * deviation
    assert torch.allclose(out[kept], torch.tensor(1 / (1 - p)))
    assert abs(out.double().mean().item() - 1) < 4 * deviation / (1 - p)
    # neighbours in a row and in a column are uncorrelated
    centred = kept.double() - kept.double().mean()
    for shifted in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(shifted.mean().item()) < 4 * p * (1 - p) / math.sqrt(shifted.numel())


def test_dropout_is_a_function_of_the_seed():
    x = torch.ones(20, 30)
    assert torch.equal(dropout(nn.Dropout(), x, 1), dropout(nn.Dropout(), x, 1))
    assert not torch.equal(dropout(nn.Dropout(), x, 1), dropout(nn.Dropout(), x, 2))


def test_dropout_leaves_the_global_stream_alone():
    before = torch.random.get_rng_state()
    dropout(nn.Dropout(), torch.ones(20, 30))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_real_row_has_the_same_mask_however_much_padding_follows():
    assert torch.equal(dropout(nn.Dropout(), torch.ones(3, 7)), dropout(nn.Dropout(), torch.ones(50, 7))[:3])


def test_two_layers_and_two_uses_of_one_layer_have_independent_masks():
    shared = nn.Dropout(0.5)
    for pair in (nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)]), nn.ModuleList([shared, shared])):
        first, second = convert(pair, Context(Step(seed=torch.tensor(3))))
        a, b = (first(torch.ones(300, 300)) > 0).double(), (second(torch.ones(300, 300)) > 0).double()
        assert abs((a * b).mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / a.numel())


@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout1d, (40, 50, 3)), (nn.Dropout2d, (40, 50, 2, 3))])
def test_channel_dropout_drops_whole_maps(layer, shape):
    maps = dropout(layer(0.5), torch.ones(shape)).flatten(2)
    assert torch.equal(maps.amin(-1), maps.amax(-1))
    assert 0.4 < (maps[..., 0] == 0).double().mean().item() < 0.6


@pytest.mark.parametrize(("layer", "shape"), [(nn.AlphaDropout, (300, 300)), (nn.FeatureAlphaDropout, (300, 300, 2))])
def test_alpha_dropout_keeps_mean_and_variance_of_standard_normal_input(layer, shape):
    out = dropout(layer(0.3), torch.randn(shape, generator=torch_generator(0)))
    assert abs(out.mean().item()) < 0.03
    assert abs(out.var().item() - 1) < 0.03


def test_dropout_of_everything_is_zero_and_of_nothing_is_the_input():
    x = draw(4, 5)
    assert torch.equal(dropout(nn.Dropout(1.0), x), torch.zeros_like(x))
    assert dropout(nn.Dropout(0.0), x) is x
    assert dropout(nn.Dropout(0.5).eval(), x).shape == x.shape


def test_dropout_in_eval_mode_is_the_identity():
    x = draw(4, 5)
    layer = convert(nn.Dropout(0.5), Context()).eval()
    assert torch.equal(layer(x), x)


def test_training_with_dropout_and_no_seed_is_an_error_that_says_what_to_pass():
    with pytest.raises(FedstillError, match="needs a seed"):
        dropout(nn.Dropout(0.5), draw(2, 2), None)


def test_a_call_can_draw_any_number_of_masks_and_no_two_are_alike():
    """The counter of the draws wraps at 64 bits, as the seeds do."""
    layers = convert(nn.ModuleList(nn.Dropout(0.5) for _ in range(40)), Context(Step(seed=torch.tensor(3))))
    masks = torch.stack([layer(torch.ones(200)) > 0 for layer in layers]).double() - 0.5
    alike = (masks @ masks.T) / 50  # 1: the same mask; else about N(0, 1 / 200)
    assert alike.fill_diagonal_(0.0).abs().max() < 5 / math.sqrt(200)


def test_clients_have_different_masks_under_vmap_and_each_is_the_one_of_its_own_call():
    layer = nn.Dropout(0.5)
    context = Context()
    planned = convert(copy.deepcopy(layer), context)
    assert isinstance(planned, PlannedDropout)

    def client(x: Tensor, seed: Tensor) -> Tensor:
        context.step = Step(seed=seed)
        return planned(x)

    seeds = torch.from_numpy(seed_for(0, np.arange(4)).view(np.int64))
    stacked = vmap(client)(torch.ones(4, 9, 9), seeds)
    for row, seed in zip(stacked, seeds, strict=True):
        assert torch.equal(row, client(torch.ones(9, 9), seed))
    assert len({tuple(row.flatten().tolist()) for row in stacked}) == 4


def test_a_layer_that_changes_what_batchnorm_does_is_refused():
    class Odd(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Renamed(nn.BatchNorm1d):
        pass

    with pytest.raises(FedstillError, match=r"layer 0 \(Odd\).*use the torch.nn layer"):
        convert(nn.Sequential(Odd(3)), Context())
    assert isinstance(convert(nn.Sequential(Renamed(3)), Context())[0], MaskedBatchNorm)


def test_a_layer_used_at_two_places_stays_one_layer():
    norm = nn.BatchNorm1d(3)
    converted = convert(nn.Sequential(norm, nn.ReLU(), norm), Context())
    assert isinstance(converted[0], MaskedBatchNorm)
    assert converted[0] is converted[2]


@pytest.mark.parametrize("clients", [0, 1, 3])
def test_a_padded_mean_on_a_gpu_reads_images_in_the_layout_whose_gradient_is_right(clients, monkeypatch):
    """PyTorch 188344: of channels-last images with padding a GPU's gradient is wrong."""
    seen, native = [], torch.nn.functional.avg_pool2d

    def noted(x: Tensor, *how: object) -> Tensor:
        seen.append(x)
        return native(x, *how)

    monkeypatch.setattr(layers, "_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.nn.functional, "avg_pool2d", noted)
    pool = convert(nn.AvgPool2d(3, 2, padding=1), Context())
    x = draw(4, 3, 7, 6).contiguous(memory_format=torch.channels_last)
    wanted = native(x, 3, 2, 1)
    if not clients:
        torch.testing.assert_close(pool(x), wanted)
        assert seen[0].is_contiguous()
        return
    last = torch.stack([x] * clients, 1).permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
    many = vmap(pool, in_dims=1, out_dims=1)(last)
    torch.testing.assert_close(many, torch.stack([wanted] * clients, 1))
    physical = torch._C._functorch.get_unwrapped(seen[0])
    assert physical.is_contiguous()


@pytest.mark.parametrize(("padding", "kind"), [(0, nn.AvgPool2d), (1, PaddedMean), ((0, 1), PaddedMean)])
def test_only_a_padded_mean_is_another_layer(padding, kind):
    assert type(convert(nn.AvgPool2d(3, padding=padding), Context())) is kind
