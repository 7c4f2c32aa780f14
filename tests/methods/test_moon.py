"""Golden values of the MOON card: z = (1, 0), z_global = (1, 0), z_previous = (0, 1), T = 0.5."""

import math

import pytest
import torch
from by_hand import blobs, federate_by_hand, linear, local_view, number, scalar, seeing_model
from hypothesis import given
from hypothesis import strategies as st
from papers import released

from fedstill.compose.combine import combine
from fedstill.core.errors import FedstillError
from fedstill.core.types import Batch, Need, Output, Weights
from fedstill.local import cross_entropy, not_true_distillation
from fedstill.methods import fedavg, moon
from fedstill.methods.moon import contrast_loss, model_contrast, previous_model

X, Y = number([[1.0, 0.0]]), number([[0.0, 1.0]])
POLICIES = ("skip", "init", "start")


def term_at(z, z_global, z_previous, *, seen=1.0, weight=(1.0,), mu=1.0, **options):
    """The term's value for given features."""
    frozen = {"start": Output(z_global, z_global), "previous": Output(z_previous, z_previous)}
    view = local_view(scalar(0.0), frozen=frozen, state={"seen": number(seen)})
    batch = Batch(z, torch.zeros(len(z), dtype=torch.int64), number(list(weight)))
    return model_contrast(mu, **options).loss(Output(z, z), batch, view)


def slope_of(z, *others, **how):
    z = z.clone().requires_grad_()
    loss = term_at(z, *others, **how)
    return loss.item(), torch.autograd.grad(loss, z)[0]


def test_the_contrast_has_the_cards_values():
    assert contrast_loss(X, X, Y).item() == pytest.approx(0.126928, abs=1e-6)
    assert contrast_loss(X, Y, X).item() == pytest.approx(2.126928, abs=1e-6)


def test_where_both_models_agree_it_costs_ln_2_and_pulls_nowhere():
    z = number([[0.3, -2.0]])
    loss, slope = slope_of(z, Y, Y)
    assert loss == pytest.approx(math.log(2.0), abs=1e-15)
    assert slope.abs().max() == 0.0


def test_the_first_visit_costs_nothing_ln_2_or_the_contrast_with_the_first_model():
    z = number([[0.6, 0.8]])
    for policy, expected, pulls in (("skip", 0.0, False), ("start", math.log(2.0), False), ("init", None, True)):
        loss, slope = slope_of(z, X, Y, seen=0.0, previous=policy)
        assert bool(slope.abs().max() > 0) == pulls
        assert loss == pytest.approx(math.log1p(math.exp(0.4)) if expected is None else expected, abs=1e-12)


def test_after_the_first_visit_all_policies_are_one():
    z = number([[0.6, 0.8]])
    losses = [term_at(z, X, Y, seen=1.0, previous=policy).item() for policy in POLICIES]
    assert losses == pytest.approx([math.log1p(math.exp(0.4))] * 3, abs=1e-12)  # cos 0.8 and 0.6, T = 0.5


def test_a_small_step_goes_towards_the_global_and_away_from_the_previous():
    z = number([[1.0, 1.0]])
    _, slope = slope_of(z, X, Y)
    moved = z - 0.1 * slope
    cosines = [torch.cosine_similarity(moved, other).item() for other in (X, Y)]
    assert cosines[0] > math.sqrt(0.5) > cosines[1]


def test_the_term_is_mu_times_the_mean_over_real_samples():
    z, near, far = torch.cat([X, X, X]), torch.cat([X, Y, X]), torch.cat([Y, X, X])
    loss = term_at(z, near, far, weight=(1.0, 1.0, 0.0), mu=3.0)
    assert loss.item() == pytest.approx(3.0 * (0.126928 + 2.126928) / 2, abs=1e-5)
    _, slope = slope_of(z + 0.1, near, far, weight=(1.0, 1.0, 0.0))
    assert slope[2].abs().max() == 0.0


def test_mu_zero_leaves_no_gradient():
    _, slope = slope_of(number([[0.6, 0.8]]), X, Y, mu=0.0)
    assert slope.abs().max() == 0.0


vectors = st.lists(st.floats(-5, 5), min_size=3, max_size=3).filter(lambda v: math.hypot(*v) > 0.1)


@given(z=vectors, near=vectors, far=vectors, scale=st.floats(0.1, 50.0), temperature=st.floats(0.1, 5.0))
def test_it_is_the_cross_entropy_of_two_cosines_and_lengths_do_not_matter(z, near, far, scale, temperature):
    z, near, far = (number([v]) for v in (z, near, far))
    cosines = torch.stack([torch.cosine_similarity(z, other) for other in (near, far)], dim=-1)
    expected = torch.nn.functional.cross_entropy(cosines / temperature, torch.tensor([0]))
    for factor in (1.0, scale):
        loss = contrast_loss(factor * z, near / factor, far, temperature=temperature)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)


def test_no_gradient_reaches_the_frozen_features():
    near, far = X.clone().requires_grad_(), Y.clone().requires_grad_()
    assert not contrast_loss(X, near, far).requires_grad


def test_features_that_are_all_zero_give_no_nan():
    """A sample that no unit answers to: its cosines are 0."""
    z = torch.zeros(1, 2, dtype=torch.float64).requires_grad_()
    loss = contrast_loss(z.relu(), X, Y).sum()
    assert loss.item() == pytest.approx(math.log(2.0))
    assert torch.autograd.grad(loss, z)[0].abs().max() == 0.0


def test_half_precision_features_are_compared_in_float32():
    assert contrast_loss(X.bfloat16(), X.bfloat16(), Y.bfloat16()).dtype == torch.float32


FIRST = Weights({"w": number([1.0, 2.0])}, {"count": torch.tensor(3)})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_keeps_the_model_it_sent_with_its_buffers(policy):
    term = model_contrast(1.0, previous=policy)
    first = term.init(FIRST)
    assert previous_model(local_view(FIRST, state=first)).params["w"].tolist() == [1.0, 2.0]
    trained = local_view(
        FIRST, params={"w": number([5.0, 6.0])}, buffers={"count": torch.tensor(9)}, state=first, size=number(7.0)
    )
    state, extra = term.finish(trained, {})
    last = previous_model(local_view(FIRST, state=state))
    assert (last.params["w"].tolist(), last.buffers["count"].item()) == ([5.0, 6.0], 9)
    assert extra == {}
    assert ("seen" in first) == (policy != "init")
    if policy != "init":
        assert (first["seen"].item(), state["seen"].item()) == (0.0, 1.0)


def test_what_a_client_keeps_does_not_change_when_the_upload_does():
    params = {"w": number([5.0, 6.0])}
    state, _ = model_contrast(1.0).finish(local_view(FIRST, params=params, size=number(1.0)), {})
    params["w"][0] = -1.0
    assert state["previous"]["params"]["w"].tolist() == [5.0, 6.0]


def test_contrast_and_distillation_share_the_received_model():
    both = combine(cross_entropy(), not_true_distillation(), model_contrast(1.0))
    assert set(both.frozen) == {"start", "previous"}
    assert both.needs == {Need.CLIENT_STATE, Need.FEATURES}


def test_two_contrasts_clash_over_the_clients_memory():
    with pytest.raises(FedstillError, match="client state slot 'previous'"):
        combine(model_contrast(1.0), model_contrast(2.0)).init(FIRST)


# Over rounds, on softmax regression whose logits are its features.


DATA = [blobs(k, 8 + 4 * k) for k in range(3)]
START = linear(3, 4, seed=1)
released_moon = released("fedlmd", "moon")
HOW = {"steps": 3, "lr": 0.2, "momentum": 0.5}


def train(method, rounds, cohorts=None, **how):
    return federate_by_hand(method, seeing_model(), DATA, START, rounds=rounds, cohorts=cohorts, **{**HOW, **how})


def gap(ours: Weights, other: Weights) -> float:
    return max(float((ours.params[name] - other.params[name]).abs().max()) for name in other.params)


@pytest.mark.parametrize("previous", ["skip", "init", "start"])
def test_the_first_round_of_moon_is_fedavg(previous):
    """Whatever stands for the last model then is the received one, or nothing."""
    ours, plain = train(released_moon(mu=5.0, previous=previous), 2).weights, train(fedavg(), 2).weights
    assert gap(ours[0], plain[0]) < 1e-14
    assert gap(ours[1], plain[1]) > 1e-3


def test_skipping_the_first_visit_and_contrasting_with_the_received_model_give_the_same_weights():
    cohorts = [[0], [1, 2], [0, 1], [2]]
    skip, start, init = (
        train(released_moon(mu=5.0, previous=policy), 4, cohorts).weights for policy in ("skip", "start", "init")
    )
    assert all(gap(a, b) < 1e-12 for a, b in zip(skip, start, strict=True))
    assert gap(skip[1], init[1]) > 1e-4  # clients 1 and 2 come first in round 2, when the first model is the past


def test_only_clients_that_come_back_feel_the_contrast():
    cohorts = [[0], [1], [2]]
    ours, plain = (train(method, 3, cohorts).weights for method in (moon(mu=5.0), fedavg()))
    assert all(gap(a, b) == 0.0 for a, b in zip(ours, plain, strict=True))


def test_the_previous_model_is_the_clients_own_last_upload():
    cohorts = [[0, 1], [2, 1], [0]]
    history = train(moon(mu=0.0), 3, cohorts)
    at_start = [START, *history.weights]
    for client, last_seen in ((0, 2), (1, 1), (2, 1)):
        alone = federate_by_hand(
            fedavg(), seeing_model(), [DATA[client]], at_start[last_seen], rounds=1, **HOW
        ).weights[0]
        kept = history.clients[client]["previous"]
        assert gap(Weights(kept["params"], {}), alone) < 1e-14


def test_moon_ends_nearer_to_the_global_features_than_to_its_own_last_ones():
    """One client comes back after a round with all: cos(z, z_global) - cos(z, z_previous), compared with FedAvg's."""
    last = train(moon(), 1, steps=5).clients[0]["previous"]["params"]

    def lead(method):
        result = train(method, 2, [[0, 1, 2], [0]], steps=5)
        models = (result.weights[1], result.weights[0], Weights(last, {}))
        z, near, far = (seeing_model().apply(weights, DATA[0].x)[0].features for weights in models)
        return float((torch.cosine_similarity(z, near) - torch.cosine_similarity(z, far)).mean())

    assert lead(moon(mu=5.0)) > lead(fedavg()) + 0.05
