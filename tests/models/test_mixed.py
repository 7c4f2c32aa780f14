"""A union of prototypes as one Model."""

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill.compose.groups import part_of
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator
from fedstill.models import build_model, from_module, mixed_model

SHAPE = (1, 8, 8)


def network(name, **options):
    return build_model(name, input_shape=SHAPE, classes=3, **options)


NETS = {"small": network("mlp", hidden=(8,)), "norm": network("resnet8", norm="batch")}


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        return self.layers(x)


def images(count=4):
    return torch.rand(count, *SHAPE, generator=torch_generator(0))


def test_each_prototype_starts_as_it_would_alone():
    weights = mixed_model(NETS, 4).init(5)
    for name, net in NETS.items():
        alone = net.init(5)
        found = part_of(weights, name)
        assert found.params.keys() == alone.params.keys()
        assert all(torch.equal(found.params[key], leaf) for key, leaf in alone.params.items())
        assert found.buffers.keys() == alone.buffers.keys()


def test_the_ensemble_is_the_mean_of_the_prototypes_logits():
    model = mixed_model(NETS, 4)
    weights, x = model.init(1), images()
    output, _ = model.apply(weights, x)
    said = [net.apply(part_of(weights, name), x)[0] for name, net in NETS.items()]
    torch.testing.assert_close(output.logits, (said[0].logits + said[1].logits) / 2)
    assert output.features.shape == (4, 8 + 64)


def test_a_reported_prototype_answers_alone():
    model = mixed_model(NETS, 4, report="small")
    weights, x = model.init(1), images()
    assert torch.equal(model.apply(weights, x)[0].logits, NETS["small"].apply(part_of(weights, "small"), x)[0].logits)


def test_training_moves_the_statistics_of_the_prototype_that_has_some():
    model = mixed_model(NETS, 4)
    weights = model.init(1)
    _, buffers = model.apply(weights, images(), training=True)
    assert buffers.keys() == weights.buffers.keys()
    moved = {name for name, leaf in buffers.items() if not torch.equal(leaf, weights.buffers[name])}
    assert moved
    assert all(name.startswith("norm/") for name in moved)


def test_it_is_what_any_of_its_prototypes_is():
    model = mixed_model(NETS, 4)
    assert model.traits.convolutional
    assert model.traits.batch_statistics
    assert model.traits.features
    assert model.head is None
    assert model.traits.unbatchable is None


def test_users_own_modules_and_members_chosen_by_hand():
    own = from_module(Own, input_shape=SHAPE, classes=3)
    model = fedstill.mixed_model({"mine": own, "theirs": NETS["small"]}, ["mine", "mine", "theirs"], report="mine")
    assert model.groups.member == ("mine", "mine", "theirs")
    assert model.apply(model.init(0), images())[0].logits.shape == (4, 3)


def test_members_may_come_from_numpy():
    assert mixed_model(NETS, np.int64(3)).groups.member == ("small", "norm", "small")
    assert mixed_model(NETS, np.array(["norm", "small"])).groups.member == ("norm", "small")


@pytest.mark.parametrize(
    ("prototypes", "member", "report", "told"),
    [
        ({}, 2, "ensemble", "at least one prototype"),
        ({"a/b": NETS["small"]}, 2, "ensemble", "cannot be called 'a/b'"),
        ({"ensemble": NETS["small"]}, 2, "ensemble", "cannot be called 'ensemble'"),
        (NETS, 1, "ensemble", "no client runs the prototype 'norm'"),
        (NETS, ["small", "norms"], "ensemble", "client 1 runs 'norms'.*did you mean 'norm'"),
        (NETS, 4, "smal", "model.report = 'smal' is unknown.*did you mean 'small'"),
        ({"a": mixed_model(NETS, 2)}, 2, "ensemble", "'a' is itself a mixture"),
        ({"a": Own()}, 2, "ensemble", r"'a' is no Model but Own: wrap it: fedstill\.from_module\("),
        ({"a": "mlp"}, 2, "ensemble", "'a' is no Model but 'mlp': wrap it"),
        ([NETS["small"]], 2, "ensemble", "models by their names, not list: write {'small': model"),
        (NETS["small"], 2, "ensemble", "models by their names, not Model"),
        ({1: NETS["small"]}, 2, "ensemble", "cannot be called '1'"),
        (NETS, 2.0, "ensemble", r"a number of clients or a list.*, not 2\.0: write 10, or \['small', \.\.\.\]"),
        (NETS, None, "ensemble", "a number of clients or a list.*, not None"),
        (NETS, "small", "ensemble", "a number of clients or a list.*, not 'small'"),
        (NETS, True, "ensemble", "a number of clients or a list.*, not True"),
        (NETS, {0: "small"}, "ensemble", "a number of clients or a list.*, not dict"),
        (NETS, iter(["small", "norm"]), "ensemble", "a number of clients or a list.*, not list_iterator"),
        (NETS, [0, 1], "ensemble", "client 0 runs 0, which is no prototype: choose one of: norm, small"),
        (
            {**NETS, "wide": build_model("mlp", input_shape=SHAPE, classes=4)},
            3,
            "small",
            r"different numbers of classes \(small 3, norm 3, wide 4\)",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(prototypes, member, report, told):
    with pytest.raises(FedstillError, match=told) as error:
        mixed_model(prototypes, member, report)
    assert "\n" not in str(error.value)
