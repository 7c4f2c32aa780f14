"""Data on which training breaks: that it did must not be told by a model that stays, or an answer that is missing."""

import dataclasses

import pytest
import torch
from running import federate
from students import student_of

from fedstill.about.toy import trial_federation, trial_model
from fedstill.core.seeds import seed_for
from fedstill.core.types import Training
from fedstill.loop.checkpoint import load_newest
from fedstill.loop.guard import is_finite
from fedstill.methods import dp_fedavg, fedaux
from fedstill.methods.fedaux.certainty import Scoring, client_answer
from fedstill.methods.lookup import build_method


def spoilt(client: int, samples: int | None = None):
    """The trial federation in float, with samples of one client that no training survives."""
    federation = trial_federation()
    x = federation.train.x.float() / 255
    first, last = federation.offsets[client : client + 2].tolist()
    x[federation.indices[first:last][:samples]] = 3e38
    unlabeled = federation.unlabeled.float() / 255
    return dataclasses.replace(federation, train=dataclasses.replace(federation.train, x=x), unlabeled=unlabeled)


def run(method, federation, **how):
    settings = {"rounds": 1, "cohort": 4, "training": Training(batch_size=8, lr=0.1), "engine": "looped"} | how
    return federate(method=method, model=trial_model(), federation=federation, device="cpu", **settings)


def every_client_spoilt():
    federation = spoilt(0)
    x = torch.full_like(federation.train.x, 3e38)
    return dataclasses.replace(federation, train=dataclasses.replace(federation.train, x=x))


@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_a_round_in_which_all_training_broke_moves_the_model_by_its_noise(trust):
    """z = 2, C = 1, four clients: a standard deviation of 2 / 4, or of 2 / sqrt(4). The model stayed as it was."""
    result = run(dp_fedavg(trust=trust, noise_multiplier=2.0), every_client_spoilt())
    start = trial_model().init(seed_for(0, "model")).params
    moves = torch.cat([(leaf - start[name]).flatten() for name, leaf in result.weights.params.items()])
    assert float(moves.std()) == pytest.approx(0.5 if trust == "server" else 1.0, rel=0.1)  # about 1,000 parameters


def test_clients_that_trust_nobody_do_not_tell_the_server_that_training_broke():
    result = run(dp_fedavg(trust="nobody"), spoilt(2))
    assert result.history.rows[0]["accepted"] == 4
    assert result.audit == []


def test_a_trusted_server_knows_that_and_adds_its_noise():
    result = run(dp_fedavg(), every_client_spoilt())
    assert result.history.rows[0]["accepted"] == 0
    assert result.audit[-1]["reason"] == "no sound upload is left; the model moves by noise alone"


def test_what_a_client_keeps_is_not_spoilt_by_a_round_that_broke(tmp_path):
    """FedDyn keeps a gradient on each client: the guard cannot see that it is NaN when the upload is hidden."""
    method = build_method('dp_fedavg(trust="nobody")+feddyn')
    run(method, spoilt(2), run_dir=tmp_path / "run", checkpoint_every=1, rounds=2)
    parts = load_newest(tmp_path / "run" / "checkpoints", torch.device("cpu")).clients
    kept = dict(zip(("ids", "states"), next(iter(parts)), strict=True))
    assert kept["ids"].tolist() == [0, 1, 3]
    assert is_finite(kept["states"])


def test_one_sample_does_not_decide_whether_a_client_sends_its_scores():
    """One of four clients fell out, which anybody could see at a stated epsilon of 1."""
    result = run(fedaux(student=student_of(fedaux, steps=2), form="mean", epsilon=1.0), spoilt(1, samples=1))
    assert result.history.rows[0]["prepare/scored_clients"] == 4
    assert not any("preparation" in record["reason"] for record in result.audit)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("gamma", ["negatives", "both"])
def test_features_that_are_not_finite_count_as_zero(bad, gamma):
    drawn = torch.randn(9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own, negatives, scoring = drawn[:4], drawn[4:], Scoring(form="mean", gamma=gamma, noise=1.0)
    broken, zero = own.clone(), own.clone()
    broken[1, 2], zero[1] = bad, 0.0
    found, wanted = (client_answer(rows, negatives, scoring, 7) for rows in (broken, zero))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
