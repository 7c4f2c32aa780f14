"""Targets as answers: of which rows and which round they are, and why they are not handed out."""

import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.loop.callbacks import Callback
from fedstill.loop.checkpoint import load_tensors, save_tensors
from fedstill.loop.resume import TARGETS_FILE, rows_digest

FEDDF = {"name": "feddf", "student": {"steps": 10}}
MRTF = {"name": "mrtf", "student": {"steps": 10}, "warm_up": 0}


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


def run(folder, method, **changes):
    fedstill.run(experiment(method, **changes), run_dir=folder, pictures=False)
    return folder


def draw(folder, rows):
    """Rows of the digits' test set as files, in the order of their names."""
    folder.mkdir(exist_ok=True)
    for place, row in enumerate(rows):
        Image.fromarray(fedstill.load("digits").test.x[row, 0].numpy()).save(folder / f"{place:02}.png")
    return folder


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
    assert "the same 12 rows stand in another order" in refused(folder)
    draw(photos, range(12))
    (photos / "11.png").rename(photos / "99.png")
    assert "data have changed since the run" in refused(folder)


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


def test_targets_of_an_earlier_round_say_so(tmp_path):
    folder = run(tmp_path, {**MRTF, "every": 2})
    found = fedstill.predict(folder, from_="targets")
    assert (found.round, found.summary()["round"]) == (2, 2)
    assert found.why == "the server's targets of round 2"
    assert fedstill.predict(folder).round == 3


def test_targets_that_are_absent_or_cannot_be_read_are_one_line(tmp_path):
    folder = run(tmp_path / "run", FEDDF)
    save_file(load_file(folder / TARGETS_FILE), folder / TARGETS_FILE)  # without a word on its rows
    assert "targets.safetensors' has no seal" in refused(folder)
    (folder / TARGETS_FILE).unlink()
    (folder / TARGETS_FILE).mkdir()
    assert "targets.safetensors cannot be read" in refused(folder)
    (folder / TARGETS_FILE).rmdir()
    assert "has no targets.safetensors" in refused(folder)


def test_targets_of_another_form_are_one_line_although_their_seal_is_right(tmp_path):
    file = run(tmp_path, FEDDF) / TARGETS_FILE
    right, about = load_tensors(file)
    for change in (
        {"kept": torch.tensor(True)},
        {"kept": right["kept"].double() * torch.nan},
        {"probabilities": right["probabilities"][:, 0].clone()},
        {"probabilities": right["probabilities"].repeat(1, 2)},
        {"probabilities": right["probabilities"][:3].clone()},
    ):
        save_tensors(file, {**right, **change}, about)
        assert "holds no targets for this run's classes" in refused(tmp_path)
    save_tensors(file, right, {**about, "round": "x"})
    assert "cannot be read" in refused(tmp_path)


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
