"""Quadratics w^2 / 2 and 3 / 2 (w - 4)^2 on one weight; their Fisher is the squared slope where a client stopped."""

import pytest
from by_hand import (
    blobs,
    federate_by_hand,
    number,
    quadratic,
    quadratic_data,
    scalar,
    scalar_model,
    train_client,
    with_quadratic,
)

from fedstill.methods import fedavg, fedcurv
from fedstill.methods.fedcurv import curvature

CLIENTS = [quadratic_data(1.0, 0.0), quadratic_data(3.0, 4.0), quadratic_data(2.0, -1.0)]
DATA = [blobs(k, 8 + 4 * k) for k in range(3)]


def run(lam=0.05, *, clients=CLIENTS, rounds=1, steps=2, lr=0.1, cohorts=None):
    method = with_quadratic(fedcurv(lam=lam), curvature(lam, risk=quadratic()))
    return federate_by_hand(
        method, scalar_model(), clients, scalar(1.0), rounds=rounds, steps=steps, lr=lr, cohorts=cohorts
    )


def plain(rounds, *, clients=CLIENTS, cohorts=None):
    return federate_by_hand(
        with_quadratic(fedavg()), scalar_model(), clients, scalar(1.0), rounds=rounds, steps=2, lr=0.1, cohorts=cohorts
    )


def values(history):
    return [weights.params["w"].item() for weights in history.weights]


def sums(history, round):
    kept = history.server[round]["curvature"]
    return kept["fisher"]["w"].item(), kept["fisher_weights"]["w"].item()


def pairs(history):
    return {
        k: (state["fisher"]["w"].item(), state["fisher_weights"]["w"].item()) for k, state in history.clients.items()
    }


def test_fedcurv_takes_the_path_worked_by_hand():
    """One step of 0.1 from 1: clients reach 0.9 and 1.9, slopes there 0.9 and -6.3, so u = (0.81, 39.69)."""
    history = run(0.01, clients=CLIENTS[:2], rounds=2, steps=1)
    u, theta = (0.81, 39.69), (0.9, 1.9)
    assert sums(history, 0) == pytest.approx((sum(u), u[0] * theta[0] + u[1] * theta[1]))
    w = values(history)[0]
    assert w == pytest.approx(1.4)
    first = w - 0.1 * (w + 2 * 0.01 * u[1] * (w - theta[1]))
    second = w - 0.1 * (3.0 * (w - 4.0) + 2 * 0.01 * u[0] * (w - theta[0]))
    assert values(history)[1] == pytest.approx((first + second) / 2, abs=1e-12)


def test_the_first_round_is_fedavg_bit_for_bit():
    assert values(run(lam=5.0)) == values(plain(1))
    assert values(run(lam=0.05, rounds=2))[1] != values(plain(2))[1]


def test_one_client_alone_is_fedavg_up_to_rounding():
    """U is the sum of changes, so U - u_k may differ from 0 in the last bits of u_k."""
    history = run(lam=5.0, clients=CLIENTS[1:2], rounds=8)
    assert values(history) == pytest.approx(values(plain(8, clients=CLIENTS[1:2])), rel=1e-13)
    assert sums(history, 7) == pytest.approx(pairs(history)[0], rel=1e-13, abs=1e-13)


def test_the_sums_are_those_of_the_latest_pairs_of_all_who_were_ever_seen():
    cohorts = [[0], [1], [0, 1], [2], [2], [0]]
    for rounds in range(1, 7):
        history = run(rounds=rounds, cohorts=cohorts)
        seen = {k for cohort in cohorts[:rounds] for k in cohort}
        latest = pairs(history)
        wanted = [sum(latest[k][i] for k in seen) for i in (0, 1)]
        assert sums(history, rounds - 1) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        assert all(latest[k] == (0.0, 0.0) for k in {0, 1, 2} - seen)


def test_a_client_that_stays_away_goes_on_holding_the_others():
    """Client 1 is seen once; its pair stays in the sums, and client 0 alone is held towards where client 1 was."""
    away = [[1], [0], [0], [0]]
    history = run(rounds=4, cohorts=away)
    assert pairs(history)[1] == pytest.approx(
        tuple(a - b for a, b in zip(sums(history, 3), pairs(history)[0], strict=True))
    )
    theta = values(history)[0]
    assert abs(values(history)[3] - theta) < abs(values(plain(4, cohorts=away))[3] - theta)


@pytest.mark.parametrize(("lam", "settled"), [(0.0, 0.0), (1.0, 0.25), (1000.0, 1000.0 / 3001.0)])
def test_a_client_settles_between_its_own_optimum_and_the_others(lam, settled):
    """P = 1.5 and Q = 0.5 of the card: w^2 / 2 + lam (1.5 w^2 - w) is least at lam / (1 + 3 lam), towards 1/3."""
    objective = with_quadratic(fedcurv(lam=lam), curvature(lam, risk=quadratic())).objective
    sums = {"fisher": {"w": number(3.5)}, "fisher_weights": {"w": number(2.5)}}
    own = {"fisher": {"w": number(2.0)}, "fisher_weights": {"w": number(2.0)}}
    weights, _, _, _ = train_client(
        objective,
        scalar_model(),
        scalar(1.0),
        CLIENTS[0],
        received=sums,
        state=own,
        steps=60,
        lr=0.5 / (1.0 + 3.0 * lam),
    )
    assert weights.params["w"].item() == pytest.approx(settled, abs=1e-9)
