"""Targets in `predict`: of which rows and which round they are, when they may answer, and why they do not."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.loop.callbacks import Callback
from fedstill.loop.resume import TARGETS_FILE, rows_digest

FEDDF = {"name": "feddf", "steps": 10}
MRTF = {"name": "mrtf", "steps": 10, "warm_up": 0}


def experiment(method, unlabeled="test", rounds=3):
    return fedstill.Experiment(
        rounds=rounds,
        cohort=3,
        checkpoint_every=1,
        data={"source": "digits", "unlabeled": str(unlabeled)},
        partition={"scheme": "lda", "clients": 6, "alpha": 0.5},
        model={"name": "mlp", "hidden": [8], "init": "torch"},
        local={"batch_size": 20, "lr": 0.1},
        method=method,
    )


@pytest.fixture(autouse=True)
def no_log_left():
    yield
    logging.getLogger("fedstill.run").handlers.clear()


def run(folder, method, **changes):
    fedstill.run(experiment(method, **changes), run_dir=folder, pictures=False)
    return folder


def draw(folder, rows):
    """Rows of the digits' test set as files, in the order of their names."""
    folder.mkdir(exist_ok=True)
    for place, row in enumerate(rows):
        Image.fromarray(fedstill.load("digits").test.x[row, 0].numpy()).save(folder / f"{place:02}.png")
    return folder


def about(folder):
    with safe_open(folder / TARGETS_FILE, framework="numpy") as file:
        return file.metadata()


def doctor(folder, change):
    """Targets that name another class than the model wherever `change` says so, all rows kept."""
    answers = np.array([int(name) for name in fedstill.predict(folder, from_="model").labels])
    answers = np.where(change(len(answers)), (answers + 1) % 10, answers)
    believed = np.full((len(answers), 10), 0.01, np.float32) + 0.9 * np.eye(10, dtype=np.float32)[answers]
    save_file({"probabilities": believed, "kept": np.ones(len(answers), bool)}, folder / TARGETS_FILE, about(folder))


def everywhere(count):
    return np.ones(count, bool)


def keep_only(folder, kept):
    saved = load_file(folder / TARGETS_FILE)
    save_file({**saved, "kept": kept}, folder / TARGETS_FILE, about(folder))


def refused(folder):
    with pytest.raises(FedstillError) as told:
        fedstill.predict(folder, from_="targets")
    assert "\n" not in str(told.value)
    return str(told.value)


def test_targets_of_images_that_were_exchanged_since_the_run_are_not_handed_out(tmp_path):
    photos = draw(tmp_path / "photos", range(12))
    folder = run(tmp_path / "run", FEDDF, unlabeled=photos)
    assert fedstill.predict(folder, from_="targets").source == "targets"
    draw(photos, reversed(range(12)))  # the same names, the same number
    assert "the data have changed since the run" in refused(folder)
    found = fedstill.predict(folder)
    assert found.source == "model"
    assert "the data have changed since the run" in found.why


def test_targets_of_files_that_were_renamed_since_the_run_are_not_handed_out(tmp_path):
    photos = draw(tmp_path / "photos", range(12))
    folder = run(tmp_path / "run", FEDDF, unlabeled=photos)
    (photos / "11.png").rename(photos / "99.png")
    assert "the data have changed since the run" in refused(folder)


def test_rows_are_told_apart_by_their_bytes_their_order_their_form_and_their_names():
    x = torch.arange(24, dtype=torch.uint8).reshape(2, 1, 3, 4)
    other = [
        (x.flip(0), ("a", "b")),
        (x.reshape(2, 1, 4, 3), ("a", "b")),
        (x.to(torch.int64), ("a", "b")),
        (x, ("b", "a")),
        (x, ("a, b",)),
        (x, None),
    ]
    first = rows_digest(x, ("a", "b"))
    assert rows_digest(x.clone().permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2), ("a", "b")) == first
    assert first not in {rows_digest(*one) for one in other}


class Stop(Callback):
    def on_round(self, row):
        if row["round"] == 3:
            raise KeyboardInterrupt


def test_an_interrupted_run_has_the_targets_of_its_last_checkpoint(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fedstill.run(experiment(FEDDF, rounds=5), run_dir=tmp_path, callbacks=[Stop()], pictures=False)
    found = fedstill.predict(tmp_path, from_="targets")
    assert found.round == 2
    assert "the server's targets of round 2" in found.why
    fedstill.resume_run(tmp_path)
    assert "the server's targets of round 5" in fedstill.predict(tmp_path, from_="targets").why


@pytest.mark.parametrize("stops", [(3,), (2, 3)], ids=["at once", "resumed"])
def test_targets_of_an_earlier_round_say_so_and_are_not_chosen(tmp_path, stops):
    method = {**MRTF, "every": 2}
    for rounds in stops:
        more = experiment(method, rounds=rounds)
        fedstill.run(more, run_dir=tmp_path, pictures=False, resume=rounds != stops[0])
    doctor(tmp_path, everywhere)
    asked = fedstill.predict(tmp_path, from_="targets")
    assert (asked.round, asked.summary()["round"]) == (2, 2)
    assert "the server's targets of round 2" in asked.why
    found = fedstill.predict(tmp_path)
    assert (found.source, found.round) == ("model", 3)
    assert "they are of round 2, the model of round 3" in found.why


def test_a_model_that_is_refined_but_not_sent_answers_before_its_targets(tmp_path):
    sent, reported = (run(tmp_path / name, {**MRTF, "feedback": name == "sent"}) for name in ("sent", "reported"))
    for folder in (sent, reported):
        doctor(folder, everywhere)
    assert fedstill.predict(sent).source == "targets"
    found = fedstill.predict(reported)
    assert found.source == "model"
    assert "is not the one that clients get" in found.why


def test_targets_that_the_server_did_not_learn_from_are_not_chosen(tmp_path):
    folder = run(tmp_path / "run", FEDDF)
    doctor(folder, everywhere)
    keep_only(folder, np.zeros(359, bool))
    found = fedstill.predict(folder)
    assert found.source == "model"
    assert "the server learnt from none of them" in found.why


@pytest.mark.parametrize("learnt", [True, False])
def test_whether_the_model_has_learnt_them_is_seen_in_the_rows_it_was_taught(tmp_path, learnt):
    folder = run(tmp_path / "run", FEDDF)
    half = np.arange(359) < 180
    doctor(folder, lambda count: ~half if learnt else half)
    keep_only(folder, half)
    found = fedstill.predict(folder)
    assert found.source == ("model" if learnt else "targets")
    assert f"{'the same' if learnt else 'another'} class for 100.0 % of the 180 rows" in found.why


def test_the_choice_says_why_there_are_no_targets(tmp_path):
    folder = run(tmp_path / "run", FEDDF)
    (folder / TARGETS_FILE).write_bytes(b"no tensors")
    assert "targets.safetensors cannot be read" in fedstill.predict(folder).why
    (folder / TARGETS_FILE).unlink()
    (folder / TARGETS_FILE).mkdir()
    assert "targets.safetensors cannot be read" in fedstill.predict(folder).why
    (folder / TARGETS_FILE).rmdir()
    assert f"targets.safetensors is missing in '{folder}'" in fedstill.predict(folder).why
    assert "is missing" in refused(folder)


def test_targets_of_another_version_do_not_tell_their_rows(tmp_path):
    folder = run(tmp_path / "run", FEDDF)
    save_file(load_file(folder / TARGETS_FILE), folder / TARGETS_FILE)
    assert "does not tell which rows" in refused(folder)
    assert "does not tell which rows" in fedstill.predict(folder).why


def test_a_run_that_stopped_before_its_first_targets_is_to_be_resumed(tmp_path):
    method = {**MRTF, "every": 4}
    with pytest.raises(KeyboardInterrupt):
        fedstill.run(experiment(method, rounds=5), run_dir=tmp_path / "run", callbacks=[Stop()], pictures=False)
    assert "has formed none by round 2 of 5" in fedstill.predict(tmp_path / "run").why
