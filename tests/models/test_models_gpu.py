"""On a GPU: the step can be captured as a CUDA graph, and gives what the CPU gives."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedstill.core.seeds import torch_generator
from fedstill.core.tree import stack, to_device, tree_map
from fedstill.core.types import Weights
from fedstill.models import MODELS, READS_TEXT, build_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in MODELS), ("bert", {"dropout": 0.1})])
def test_a_captured_step_of_several_clients_gives_the_gradients_of_the_cpu(name, options):
    shape = (12,) if name in READS_TEXT else (3, 32, 32)
    model = build_model(name, input_shape=shape, classes=10, **options)
    both = stack([model.init(1), model.init(2)])
    cpu = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, both)
    x = torch.randn(2, 4, *shape, generator=torch_generator(0), dtype=torch.float64)
    x = (x.abs() * 3).long().clamp_max(9) if name in READS_TEXT else x
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    seeds = torch.tensor([11, 12])

    def client(weights: Weights, x: Tensor, weight: Tensor, seed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        output, buffers = model.apply(weights, x, training=True, weight=weight, seed=seed)
        return (output.logits.square().sum(1) * weight).sum(), buffers

    def step(weights: Weights, *inputs: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        losses, buffers = vmap(client)(weights, *inputs)
        return torch.autograd.grad(losses.sum(), list(weights.params.values())), buffers

    gpu, inputs = to_device(cpu, "cuda"), [leaf.cuda() for leaf in (x, weight, seeds)]
    for weights in (cpu, gpu):
        for leaf in weights.params.values():
            leaf.requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(gpu, *inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients, buffers = step(gpu, *inputs)
    graph.replay()
    expected, expected_buffers = step(cpu, x, weight, seeds)
    for found, wanted in zip(gradients, expected, strict=True):
        small = 1e-9 + 1e-6 * wanted.abs().max().item()  # a bias before BatchNorm has no gradient but rounding
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=small)
    for key, wanted in expected_buffers.items():
        torch.testing.assert_close(buffers[key].cpu(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in READS_TEXT])
def test_a_step_of_one_model_gives_the_gradients_of_the_cpu_in_either_layout(name, channels_last):
    model = build_model(name, input_shape=(3, 32, 32), classes=10)
    start = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, model.init(1))
    x = torch.randn(4, 3, 32, 32, generator=torch_generator(0), dtype=torch.float64)

    def step(weights: Weights, x: Tensor) -> tuple[Tensor, ...]:
        for leaf in weights.params.values():
            leaf.requires_grad_()
        output, _ = model.apply(weights, x, training=True, seed=torch.tensor(3, device=x.device))
        return torch.autograd.grad(output.logits.square().sum(), list(weights.params.values()))

    there = x.cuda().contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    gpu = step(to_device(start, "cuda"), there)
    for found, wanted in zip(gpu, step(start, x), strict=True):
        small = 1e-9 + 1e-6 * wanted.abs().max().item()
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=small)
