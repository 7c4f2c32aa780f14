"""What a resume refuses: another training, and a checkpoint of an older version."""

from __future__ import annotations

import dataclasses

import pytest
from run_helpers import LoopEngine, fedavg, linear_model, toy_federation
from running import federate

from fedstill.core.errors import FedstillError
from fedstill.core.types import Training
from fedstill.loop.checkpoint import load_newest, save_checkpoint

TRAINING = Training(batch_size=6, lr=0.2)


def run(folder, *, rounds, training=TRAINING, **settings):
    federation, model = toy_federation(), linear_model()
    return federate(
        method=fedavg(), model=model, federation=federation, engine=LoopEngine(model, federation), run_dir=folder,
        training=training, rounds=rounds, cohort=5, checkpoint_every=1, **settings,
    )  # fmt: skip


def test_a_refusal_names_the_keys_that_differ_and_no_others(tmp_path):
    run(tmp_path, rounds=1)
    other = dataclasses.replace(TRAINING, keep_optimizer=True, momentum=0.9)
    with pytest.raises(FedstillError) as refused:
        run(tmp_path, rounds=2, resume=True, training=other)
    assert ": training.momentum was 0.0 and is 0.9 now, training.keep_optimizer was False and is True now; use" in str(
        refused.value
    )


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line(tmp_path):
    run(tmp_path, rounds=1)
    state = load_newest(tmp_path / "checkpoints", LoopEngine.device)
    older = {key: value for key, value in state.identity.items() if key != "sampling"}
    save_checkpoint(dataclasses.replace(state, identity=older), tmp_path / "checkpoints")
    with pytest.raises(FedstillError, match=r"written by an older fedstill \(no sampling in its checkpoint\)"):
        run(tmp_path, rounds=2, resume=True)
