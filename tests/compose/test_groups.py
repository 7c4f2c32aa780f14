"""The union of prototypes: taken apart and put together without losing a bit, and a client's own part of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import same_bits
from wire import own_upload, whole_upload

from fedstill.about.toy import trial_federation
from fedstill.compose.groups import (
    bytes_received,
    bytes_sent,
    check_groups,
    merge,
    merge_uploads,
    only,
    part_of,
    places_of,
    reported_name,
    split,
    split_uploads,
    targets_together,
    together,
)
from fedstill.core.errors import FedstillError
from fedstill.core.needs import check_fits
from fedstill.core.seeds import torch_generator
from fedstill.core.tree import as_tree, select
from fedstill.core.types import Groups, Model, Output, Targets, Uploads, Weights
from fedstill.models import build_model, mixed_model

# "a" is a part of the name of "a.b": a prefix is more than the first letters
NAMES = ("a", "a.b", "c")


def groups_of(member, report="ensemble", names=NAMES):
    return Groups({name: Model(name, lambda seed: None, None) for name in names}, tuple(member), report)


def weights_of(width, seed):
    generator = torch_generator(seed)
    params = {"w": torch.randn(width, 2, generator=generator), "body.b": torch.randn(width, generator=generator)}
    return Weights(params, {"mean": torch.randn(3, generator=generator), "count": torch.tensor(seed)})


def union(names=NAMES):
    return merge({name: weights_of(place + 1, seed=place) for place, name in enumerate(names)})


def uploads_of(ids, groups, *, label_counts=False, extra=True):
    """A cohort of a mixed federation: every client's own part has its own numbers."""
    start, places = union(tuple(groups.models)), places_of(ids, groups)
    parts = {}
    for place, (name, here) in enumerate(places.items()):
        if len(here):
            own = torch.tensor([float(ids[at]) for at in here])
            parts[name] = Uploads(
                weights=Weights(
                    {
                        "w": torch.ones(len(here), place + 1, 2) * own.reshape(-1, 1, 1),
                        "body.b": own.repeat(place + 1, 1).T,
                    },
                    {"mean": own.repeat(3, 1).T, "count": own.long()},
                ),
                size=own.double() + 1,
                steps=own + 2,
                travel=own + 3,
                loss=own + 4,
                extra={"delta": {"w": own.reshape(-1, 1) + 5}} if extra else {},
                label_counts=own.repeat(4, 1).T if label_counts else None,
                ids=own.long(),
            )
    return parts, start, places


def test_a_prototypes_tensors_are_named_after_it_and_come_back_under_their_own_names():
    parts = {name: weights_of(place + 1, seed=place) for place, name in enumerate(NAMES)}
    whole = merge(parts)
    assert sorted(whole.params) == sorted(f"{name}/{leaf}" for name in NAMES for leaf in ("w", "body.b"))
    assert split(whole, NAMES).keys() == parts.keys()
    for name, part in parts.items():
        assert same_bits(split(whole, NAMES)[name], part)
        assert same_bits(merge({name: part}), only(whole, name))


def test_a_prototype_that_is_not_there_is_empty():
    assert part_of(union(), "b") == Weights({}, {})


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8), st.booleans(), st.booleans(), st.data())
def test_uploads_split_by_group_are_what_was_merged_and_nobody_moves_another_prototype(member, counts, extra, data):
    groups = groups_of(member)
    ids = data.draw(st.lists(st.sampled_from(range(len(member))), min_size=1, unique=True))
    parts, start, places = uploads_of(ids, groups, label_counts=counts, extra=extra)
    whole = merge_uploads(parts, start, places)
    assert whole.ids.tolist() == ids
    assert whole.size.tolist() == [client + 1.0 for client in ids]
    found = split_uploads(whole, groups)
    assert [name for name in groups.models if len(found[name].ids)] == list(parts)
    for name, part in parts.items():
        assert same_bits(as_tree(found[name]), as_tree(part))
    for place, client in enumerate(ids):
        for name in groups.models:
            if name != member[client]:
                row = part_of(select(whole, place).weights, name)
                assert same_bits(row, part_of(start, name)), "a client sent a prototype that is not its own"


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6), st.booleans())
def test_what_one_client_sends_alone_is_its_row_again(member, extra):
    groups, ids = groups_of(member), list(range(len(member)))
    parts, start, places = uploads_of(ids, groups, extra=extra)
    whole = merge_uploads(parts, start, places)
    for place in ids:
        own = own_upload(whole, place, member[place])
        assert own.weights.params.keys() == {"w", "body.b"}
        assert same_bits(as_tree(whole_upload(own, member[place], start, whole)), as_tree(select(whole, place)))


def test_a_client_is_charged_for_its_own_prototype_alone():
    groups, ids = groups_of(["a", "c", "c"]), [0, 1, 2]
    parts, start, places = uploads_of(ids, groups, label_counts=True)
    whole, model = merge_uploads(parts, start, places), Model("mixed", lambda seed: None, None, groups=groups)
    # "a": 1x2 + 1 + 3 floats and an int64; "c": 3x2 + 3 + 3. Extra: a float. Beside: a double, three floats, 4 counts
    own = {"a": 4 * (2 + 1 + 3) + 8, "c": 4 * (6 + 3 + 3) + 8}
    assert bytes_sent(whole, model) == own["a"] + 2 * own["c"] + 3 * (4 + 8 + 3 * 4 + 4 * 4)
    received = {"a": {"control": torch.zeros(5)}, "c": {"control": torch.zeros(7)}, "a.b": {"control": torch.zeros(9)}}
    assert bytes_received(start, received, ids, model) == own["a"] + 20 + 2 * (own["c"] + 28)


def test_an_ensemble_is_the_mean_of_logits_and_a_reported_prototype_speaks_alone():
    said = {
        "a": Output(torch.tensor([[1.0, 5.0]]), torch.tensor([[1.0]])),
        "c": Output(torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 3.0]])),
    }
    both = together(said, "ensemble")
    assert both.logits.tolist() == [[2.0, 2.5]]
    assert both.features.tolist() == [[1.0, 2.0, 3.0]]
    assert together(said, "c") is said["c"]
    assert together({"a": said["a"]}, "ensemble") is said["a"]
    assert together(said, "gone").logits.tolist() == [[2.0, 2.5]]


def test_prototypes_that_tell_different_numbers_of_classes_apart_are_refused_in_words():
    said = {name: Output(torch.zeros(1, width), torch.zeros(1, 1)) for name, width in (("a", 2), ("c", 3))}
    with pytest.raises(FedstillError, match="a 2, c 3"):
        together(said, "ensemble")


def test_the_reported_model_has_a_name():
    assert reported_name(groups_of(NAMES)) == "ensemble of a, a.b, c"
    assert reported_name(groups_of(NAMES, report="c")) == "c"


@pytest.mark.parametrize(
    ("member", "told"),
    [(["a", "c"], "each of 2 clients runs, and there are 4"), (["a", "a", "c", "c"], "runs the prototype 'a.b'")],
)
def test_every_client_has_a_prototype_and_every_prototype_a_client(member, told):
    with pytest.raises(FedstillError, match=told):
        check_groups(groups_of(member), trial_federation(clients=4))


def targets(*rows):
    return Targets(torch.tensor(rows), torch.tensor([True, False, False]))


def test_where_nothing_was_taught_targets_are_what_the_reported_model_says():
    logits = {"a": [4.0, 0.0], "c": [-1.0, 0.0]}
    said = {name: torch.tensor(row).softmax(0).tolist() for name, row in logits.items()}
    taught, unsure = [0.3, 0.7], [1.0, 0.0]  # asked about, but not kept: hard labels below the threshold
    found = {name: targets(taught, unsure, own) for name, own in said.items()}
    assert targets_together(found, "c") is found["c"]
    for order in (found, dict(reversed(found.items()))):
        both = targets_together(order, "ensemble")
        assert both.probabilities[:2].tolist() == found["a"].probabilities[:2].tolist()
        torch.testing.assert_close(both.probabilities[2], torch.tensor([1.5, 0.0]).softmax(0))
        assert both.kept.tolist() == [True, False, False]
    assert targets_together({"c": found["c"]}, "a") is found["c"]
    assert targets_together({}, "ensemble") is None


def test_certain_prototypes_that_disagree_have_finite_targets():
    found = {"a": targets([0.5, 0.5], [0.5, 0.5], [1.0, 0.0]), "c": targets([0.5, 0.5], [0.5, 0.5], [0.0, 1.0])}
    assert targets_together(found, "ensemble").probabilities[2].tolist() == [0.5, 0.5]


def dense(classes, shape=(64,)):
    return build_model("mlp", input_shape=shape, classes=classes, hidden=(4,))


def test_a_model_fits_a_federation_of_its_classes_whose_samples_it_can_read():
    check_fits(dense(3), 3, (1, 8, 8))
    check_fits(dense(12), 10, (64,))  # a head as wide as another data set's
    check_fits(mixed_model({"a": dense(3), "b": dense(3, (1, 8, 8))}, 2), 3, (1, 8, 8))
    check_fits(Model("own", lambda seed: Weights({}, {}), None), 3, (5,))  # nothing is known of it
    characters = build_model("char_lstm", input_shape=(5,), classes=9)
    check_fits(characters, 9, (7,))


@pytest.mark.parametrize(
    ("model", "classes", "shape", "told"),
    [
        (dense(9), 10, (64,), "model 'mlp' tells 9 classes apart, and the federation has 10: .*classes=10"),
        (
            mixed_model({"a": dense(3)}, 2),
            4,
            (64,),
            "the prototype 'a' tells 3 classes apart, and the federation has 4",
        ),
        (dense(3), 3, (1, 6, 6), r"reads samples of shape \(64,\), and the federation's have \(1, 6, 6\): build it"),
    ],
    ids=["plain", "mixed", "shape"],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(model, classes, shape, told):
    with pytest.raises(FedstillError, match=told) as error:
        check_fits(model, classes, shape)
    assert "\n" not in str(error.value)
