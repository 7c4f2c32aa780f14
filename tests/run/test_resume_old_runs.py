"""Run folders of earlier versions: what they did not write down is what was done then."""

from __future__ import annotations

import dataclasses

import pytest
from run_helpers import LoopEngine, fedavg, linear_model, toy_federation
from running import federate

from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.core.types import Training
from fedstill.loop.checkpoint import load_newest, save_checkpoint

TRAINING = Training(batch_size=6, lr=0.2)
LATER = ("part", "keep_optimizer")  # keys of a training that were added since


def run(folder, *, rounds, training=TRAINING, **settings):
    federation, model = toy_federation(), linear_model()
    return federate(
        method=fedavg(), model=model, federation=federation, engine=LoopEngine(model, federation), run_dir=folder,
        training=training, rounds=rounds, cohort=5, checkpoint_every=1, **settings,
    )  # fmt: skip


def make_older(folder):
    """The newest checkpoint, as it was written before there were these keys."""
    state = load_newest(folder / "checkpoints", LoopEngine.device)
    kept = {key: value for key, value in state.identity["training"].items() if key not in LATER}
    older = {key: value for key, value in state.identity.items() if key not in ("sampling", "noise", "privacy")}
    save_checkpoint(dataclasses.replace(state, identity={**older, "training": kept}), folder / "checkpoints")


def test_a_run_of_an_earlier_version_goes_on_with_the_same_result(tmp_path):
    whole = run(None, rounds=4)
    run(tmp_path / "cut", rounds=2)
    make_older(tmp_path / "cut")
    resumed = run(tmp_path / "cut", rounds=4, resume=True)
    assert [row["round"] for row in resumed.history.rows] == [1, 2, 3, 4]
    there, here = flatten(resumed.weights), flatten(whole.weights)
    assert all(bool((there[name] == here[name]).all()) for name in here)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lr": 0.5}, "training.lr was 0.2 and is 0.5 now"),
        ({"keep_optimizer": True, "momentum": 0.9},
         "training.momentum was 0.0 and is 0.9 now, training.keep_optimizer was False and is True now"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_keys_that_differ_and_no_others(tmp_path, change, told):
    run(tmp_path, rounds=1)
    make_older(tmp_path)
    with pytest.raises(FedstillError) as refused:
        run(tmp_path, rounds=2, resume=True, training=dataclasses.replace(TRAINING, **change))
    assert f": {told}; use the same" in str(refused.value)
    assert "batch_size" not in str(refused.value)
