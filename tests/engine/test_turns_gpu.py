"""On a GPU: a game of two models, captured as a CUDA graph, gives what the CPU gives; strict float32."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from engine_cases import IMAGE, assert_close, engine_for, network

from fedstill.core.seeds import normal, torch_generator
from fedstill.core.tree import stack, to_device
from fedstill.core.types import Player, Training, Weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = "cuda"
TEACHERS, BATCH, NOISE, EXCHANGES = 3, 6, 5, 4
CALLS = ((0.01, 0.05, 1), (0.003, 0.02, 2))  # the generator's rate, the student's, the seed


def invent(weights, z):
    return torch.tanh(z @ weights.params["w"]).reshape(-1, *IMAGE)


def game(net: str) -> dict[str, Player]:
    """A generator looks for images on which the student and its teachers differ; the student learns them."""
    model = network(net)

    def hunt(own, scene):
        x = invent(own, scene.drawn["z"])
        said = scene.each(scene.given["teachers"], x).logits.mean(0)
        answer = model.apply(scene.weights["student"], x, training=False)[0].logits
        return -(said - answer).square().mean(), own.buffers

    def look(scene):
        x = invent(scene.weights["generator"], scene.drawn["z"])
        x = x + 0.1 * normal(scene.seed, x.shape).to(x.dtype)
        return {"x": x, "said": scene.each(scene.given["teachers"], x).logits.mean(0)}

    def learn(own, scene):
        x = scene.seen["x"] + 0.1 * normal(scene.seed, scene.seen["x"].shape).to(scene.seen["x"].dtype)
        output, buffers = model.apply(own, x, training=True, seed=scene.seed)
        return (output.logits - scene.seen["said"]).square().mean() * (1.0 + scene.step), buffers

    return {
        "generator": Player(hunt, Training(steps=1, lr=0.0, optimizer="adam")),
        "student": Player(learn, Training(steps=2, lr=0.0, momentum=0.9), look),
    }


def played(net: str, device: str, **options) -> list:
    """Two calls of one game: other rates, teachers, noise and seeds, and the optimisers of the first go on."""
    engine, players, results, kept = engine_for("looped", net, device=device, **options), game(net), [], {}
    for generator_rate, student_rate, seed in CALLS:
        rates = {"generator": generator_rate, "student": student_rate}
        now = {name: replace(p, training=replace(p.training, lr=rates[name])) for name, p in players.items()}
        draw = torch_generator(seed)
        first = Weights({"w": torch.randn(NOISE, math.prod(IMAGE), generator=draw)}, {})
        start = {"generator": first, "student": engine.model.init(10 + seed)}
        drawn = {"z": torch.randn(EXCHANGES, BATCH, NOISE, generator=draw)}
        given = {"teachers": stack([engine.model.init(20 * seed + i) for i in range(TEACHERS)])}
        inputs = (to_device(part, engine.device) for part in (start, drawn, given))
        found = engine.take_turns(now, *inputs, seed, optimizers=kept)
        kept = {name: fitted.optimizer for name, fitted in found.items()}
        results.append({name: fitted._asdict() for name, fitted in found.items()})
    assert len(engine.turns) == 1
    assert all((turns.graph is not None) == engine.graphs for turns in engine.turns.values())
    return results


@pytest.mark.parametrize("net", ["cnn", "convnorm"])
def test_a_captured_game_is_that_of_the_cpu_and_serves_a_second_call(net):
    captured = played(net, GPU, precision="float32", graphs=True)
    eager = played(net, GPU, precision="float32", graphs=False)
    on_cpu = played(net, "cpu")
    for replayed, stepped, wanted in zip(captured, eager, on_cpu, strict=True):
        assert replayed["student"]["loss"].device.type == GPU
        assert_close(replayed, stepped, tolerance=1e-4)
        assert_close(replayed, wanted, tolerance=1e-4)
