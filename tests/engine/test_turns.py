"""Models trained in turns: each player's steps are torch's own optimiser on its own loss, in the order of the turns."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engine_cases import assert_close, engine_for, network

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator
from fedstill.core.tree import clone, stack
from fedstill.core.types import Output, Player, Training, Weights
from fedstill.engine import turns


def engine():
    return engine_for("looped")


class Replay:
    """A captured exchange without a GPU: the exchange itself, run again on the static tensors."""

    def __init__(self, game):
        self.replay = game._once


def towards(other):
    """(own - other - drawn)^2 / 2: a player that follows another one."""

    def loss(own, scene):
        goal = scene.weights[other].params["w"] + scene.drawn["shift"] + scene.given["shift"]
        return 0.5 * (own.params["w"] - goal).square().sum(), own.buffers

    return loss


def one(value):
    return Weights({"w": torch.tensor([value])}, {})


def game(steps=(1, 2), rates=(0.5, 0.1), optimizers=("sgd", "adam")):
    names = ("hunter", "hare")
    return {
        name: Player(towards(other), Training(steps=count, lr=rate, optimizer=kind))
        for name, other, count, rate, kind in zip(names, reversed(names), steps, rates, optimizers, strict=True)
    }


def by_hand(players, start, shifts, given):
    now = {name: torch.nn.Parameter(start[name].params["w"].clone()) for name in players}
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizers = {n: kinds[p.training.optimizer]([now[n]], lr=p.training.lr) for n, p in players.items()}
    for shift in shifts:
        for name, other in zip(players, reversed(list(players)), strict=True):
            for _ in range(players[name].training.steps):
                optimizers[name].zero_grad()
                (0.5 * (now[name] - now[other].detach() - shift - given).square().sum()).backward()
                optimizers[name].step()
    return {name: value.detach() for name, value in now.items()}


def test_players_step_by_turns_as_torch_optimisers_would():
    players, start = game(), {"hunter": one(3.0), "hare": one(-1.0)}
    shifts, given = torch.tensor([[0.1], [0.4], [-0.3]]), torch.tensor([0.25])
    found = engine().take_turns(players, start, {"shift": shifts}, {"shift": given}, 7)
    wanted = by_hand(players, start, shifts, given)
    for name in players:
        torch.testing.assert_close(found[name].weights.params["w"], wanted[name])
    assert float(start["hunter"].params["w"]) == 3.0


def test_one_step_of_each_in_numbers():
    """Hunter: 3 - 0.5 (3 - (-1)) = 1; the hare then sees 1: -1 - 0.1 (-1 - 1) = -0.8. Losses 8 and 2."""
    players = game(steps=(1, 1), optimizers=("sgd", "sgd"))
    nothing = {"shift": torch.zeros(1, 1)}
    found = engine().take_turns(players, {"hunter": one(3.0), "hare": one(-1.0)}, nothing, {"shift": torch.zeros(1)}, 0)
    assert found["hunter"].weights.params["w"].tolist() == [1.0]
    assert found["hare"].weights.params["w"].tolist() == pytest.approx([-0.8])
    assert [float(found[name].loss) for name in players] == [8.0, 2.0]


def test_a_game_in_two_parts_is_the_game_in_one():
    players, start, trainer = game(), {"hunter": one(3.0), "hare": one(-1.0)}, engine()
    shifts, given = torch.tensor([[0.1], [0.4], [-0.3], [0.2]]), {"shift": torch.zeros(1)}
    whole = trainer.take_turns(players, start, {"shift": shifts}, given, 1)
    half = trainer.take_turns(players, start, {"shift": shifts[:2]}, given, 1)
    rest = trainer.take_turns(
        players, {name: part.weights for name, part in half.items()}, {"shift": shifts[2:]}, given, 1,
        optimizers={name: part.optimizer for name, part in half.items()},
    )  # fmt: skip
    for name in players:
        assert torch.equal(whole[name].weights.params["w"], rest[name].weights.params["w"])


def test_no_exchange_and_no_step_leave_everything_as_it_was():
    start, given = {"hunter": one(3.0), "hare": one(-1.0)}, {"shift": torch.zeros(1)}
    for steps, rows in (((1, 2), 0), ((0, 0), 3)):
        found = engine().take_turns(game(steps=steps), start, {"shift": torch.zeros(rows, 1)}, given, 0)
        assert all(torch.equal(found[name].weights.params["w"], start[name].params["w"]) for name in start)


def test_a_turn_begins_with_one_look_and_each_look_and_step_knows_its_number_and_has_a_seed_of_its_own():
    looked, steps, seeds = [], [], []

    def look(scene):
        looked.append((float(scene.weights["a"].params["w"]), int(scene.step)))
        seeds.append(int(scene.seed))
        return {"then": scene.weights["a"].params["w"].clone()}

    def loss(own, scene):
        steps.append(int(scene.step))
        seeds.append(int(scene.seed))
        assert not scene.seen["then"].requires_grad
        return (own.params["w"] - scene.seen["then"] - 1.0).square().sum(), own.buffers

    player = Player(loss, Training(steps=3, lr=0.5), look)
    engine().take_turns({"a": player}, {"a": one(0.0)}, {"row": torch.zeros(2, 1)}, {}, 5)
    assert looked == [(0.0, 0), (1.0, 0)]
    assert steps == [0, 1, 2, 0, 1, 2]
    assert len(set(seeds)) == 2 * (1 + 3)
    assert len(seeds) == 2 * (1 + 3)


def test_players_of_one_exchange_share_no_seed():
    seeds = []

    def loss(own, scene):
        seeds.append(int(scene.seed))
        return own.params["w"].sum(), own.buffers

    players = {name: Player(loss, Training(steps=2, lr=0.1), lambda scene: seeds.append(int(scene.seed)) or {})
               for name in ("a", "b")}  # fmt: skip
    engine().take_turns(players, {"a": one(0.0), "b": one(0.0)}, {"row": torch.zeros(3, 1)}, {}, 5)
    assert len(set(seeds)) == len(seeds) == 3 * 2 * (1 + 2)


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (4, 1, 3, 3)])
def test_filters_come_back_in_the_memory_order_of_a_checkpoint(shape):
    """With one input channel both orders are contiguous, so it is the strides that must be equal."""
    start = Weights({"w": torch.rand(shape, generator=torch_generator(0))}, {})
    player = Player(lambda own, scene: (own.params["w"].square().sum(), own.buffers), Training(steps=1, lr=0.1))
    trained = engine().take_turns({"a": player}, {"a": start}, {"row": torch.zeros(1, 1)}, {}, 5)["a"].weights
    assert trained.params["w"].stride() == start.params["w"].stride() == torch.empty(shape).stride()


def test_an_eager_game_lets_go_of_what_it_was_given():
    trainer, teacher, row = engine(), torch.zeros(1), torch.zeros(1, 1)
    alive = [weakref.ref(teacher), weakref.ref(row)]
    trainer.take_turns(game(), {"hunter": one(3.0), "hare": one(-1.0)}, {"shift": row}, {"shift": teacher}, 0)
    del teacher, row
    gc.collect()
    assert len(trainer.turns) == 1
    assert [one() for one in alive] == [None, None]


def test_four_games_are_kept_and_the_oldest_goes_before_a_new_one_is_built(monkeypatch):
    trainer, built = engine(), []
    make = turns.Turns
    count = "fedstill.engine.engine.Turns"
    monkeypatch.setattr(count, lambda *a, **how: (built.append(len(trainer.turns)), make(*a, **how))[1])
    start, games = {"hunter": one(3.0), "hare": one(-1.0)}, [game() for _ in range(5)]

    def play(*numbers):
        for number in numbers:
            trainer.take_turns(games[number], start, {"shift": torch.zeros(1, 1)}, {"shift": torch.zeros(1)}, 0)

    play(0, 1, 2, 3, 0, 1, 2, 3)
    assert built == [0, 1, 2, 3]
    play(0, 4, 0)  # 1 is the oldest now
    assert built == [0, 1, 2, 3, 3]
    play(1)
    assert built == [0, 1, 2, 3, 3, 3]


def test_static_inputs_serve_later_rounds_with_other_rates_teachers_and_lengths(monkeypatch):
    """What a GPU captures: addresses stay, values change, a longer game makes new ones."""

    def captured(self):
        self.graph = self.graph or Replay(self)
        return self.graph

    monkeypatch.setattr(turns.Turns, "_captured", captured)
    start, eager, static = {"hunter": one(3.0), "hare": one(-1.0)}, engine(), engine()
    static.graphs = True
    functions = game()
    for rows, rate, given in ((3, 0.5, 0.1), (3, 0.25, -0.2), (2, 0.25, 0.3), (5, 0.1, 0.0)):
        players = {
            name: Player(p.loss, Training(steps=p.training.steps, lr=rate, optimizer=p.training.optimizer))
            for name, p in functions.items()
        }
        inputs = {"shift": torch.linspace(-1, 1, rows)[:, None]}, {"shift": torch.tensor([given])}
        wanted, found = (one.take_turns(players, start, *inputs, 3) for one in (eager, static))
        for name in players:
            torch.testing.assert_close(found[name].weights.params["w"], wanted[name].weights.params["w"])
    assert len(static.turns) == 1


@pytest.mark.parametrize("net", ["mlp", "cnn", "convnorm"])
@pytest.mark.parametrize("in_turn", [True, False])
def test_many_models_answer_as_each_alone_together_and_in_turn_and_inputs_get_their_gradient(monkeypatch, net, in_turn):
    trainer, model, generator = engine_for("looped", net), network(net), torch_generator(0)
    vmaps = []
    vmap = torch.func.vmap
    monkeypatch.setattr(torch.func, "vmap", lambda f: (vmaps.append(1), vmap(f))[1])
    monkeypatch.setattr(trainer, "_in_turn", lambda *_: in_turn)
    alone = [model.init(seed) for seed in range(3)]
    x = torch.rand(5, *model.input_shape, generator=generator).requires_grad_()

    def told(said):
        weighed = sum((leaf * torch.linspace(-1, 2, leaf.numel()).reshape(leaf.shape)).sum() for leaf in said)
        return {"said": clone(said), "gradient": torch.autograd.grad(weighed, x)[0]}

    found = told(trainer._each(stack(alone), x))
    assert bool(vmaps) != in_turn
    answers = [model.apply(weights, x, training=False)[0] for weights in alone]
    wanted = told(Output(torch.stack([a.logits for a in answers]), torch.stack([a.features for a in answers])))
    assert_close(found, wanted, tolerance=1e-5)
    assert float(wanted["gradient"].abs().min()) > 0


def test_what_cannot_be_played_is_refused_with_a_reason():
    start, given = {"hunter": one(0.0), "hare": one(0.0)}, {"shift": torch.zeros(1)}
    with pytest.raises(FedstillError, match="a row for each exchange"):
        engine().take_turns(game(), start, {"shift": torch.zeros(2, 1), "other": torch.zeros(3)}, given, 0)
    player = Player(towards("a"), Training(epochs=1, lr=0.1))
    with pytest.raises(FedstillError, match=r"training\.steps"):
        engine().take_turns({"a": player}, {"a": one(0.0)}, {"shift": torch.zeros(1, 1)}, given, 0)
