"""Warnings about a run: each fires on a minimal case, once, and says nothing about a sound run."""

import logging
import math
from dataclasses import replace

import pytest
import running
import torch
from run_helpers import fedavg, toy_federation
from toy import federation_of

import fedstill
from fedstill import Guard, Phase, Training
from fedstill.core.data import InputColumn
from fedstill.loop import cautions
from fedstill.loop.cautions import Cautions, Usage, all_refused, each_once, free_cores, label_columns, only_answer
from fedstill.loop.history import History
from fedstill.methods import METHODS

CPU = torch.device("cpu")
SOUND = {"cohort": 2, "accepted": 2}


@pytest.fixture
def warned(caplog):
    """The warnings about runs so far, as a function."""
    caplog.set_level(logging.WARNING, "fedstill.run")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def run(**settings):
    given = {
        "method": fedavg(),
        "model": fedstill.build_model("mlp", input_shape=(4,), classes=3, hidden=(8,)),
        "federation": toy_federation(),
        "training": Training(steps=5, batch_size=5, lr=0.1),
        "rounds": 6,
        "cohort": 5,
        "device": "cpu",
    }
    return running.federate(**{**given, **settings})


def watch(rows, audit=(), **settings):
    """Show rows of rounds to the cautions of a run, as `federate` does."""
    training = settings.pop("training", Training())
    look = Cautions("fedavg", toy_federation(), training)
    rows = [{"round": number, **SOUND, **row} for number, row in enumerate(rows, 1)]
    for row in rows:
        look.after_round(row, audit, CPU)
    look.at_end(History(rows, list(audit)))


def test_a_sound_run_gives_no_warning(warned):
    run(training=Training(steps=30, batch_size=5, lr=0.5))
    assert warned() == []


def test_one_class_for_everything_is_told_once_in_the_run_and_once_at_its_end(warned):
    constant = {"accuracy": 1 / 3, "class_accuracy": [0.0, 1.0, 0.0]}
    watch([constant] * 8, training=Training(lr=0.7))
    during, at_end = warned()
    assert during.startswith("fedavg: round 5: ")
    assert at_end.startswith("fedavg: the last model ")
    for line in (during, at_end):
        assert toy_federation().train.classes[1] in line
        assert "lower local.lr (now 0.7), a smaller network, or more rounds" in line


def test_a_model_that_learns_a_second_class_before_the_end_is_sound(warned):
    constant, better = ({"accuracy": 0.4, "class_accuracy": found} for found in ([0.0, 1.0, 0.0], [0.1, 1.0, 0.0]))
    watch([constant] * 4 + [better])
    assert warned() == []


def test_the_only_answer_is_read_from_the_accuracy_of_each_class():
    assert only_answer({"class_accuracy": [0.0, None, 1.0]}) == 2
    for sound in ([0.0, 0.9, 0.0], [1.0, None], [0.5, 0.5], [0.0, 0.0]):
        assert only_answer({"class_accuracy": sound}) is None
    assert only_answer({}) is None  # an evaluation of one's own need not have it


def test_a_loss_that_rises_is_told_with_the_round_it_was_lowest_in(warned):
    worse = [{"loss": 2.0 + number, "accuracy": 0.6} for number in range(7)]
    watch([{"loss": 1.0, "accuracy": 0.8}, *worse], training=Training(lr=0.7))
    (line,) = warned()
    assert (
        "round 6: since round 1 the test loss has risen from 1 to 6 and the accuracy fallen from 80.0 to 60.0" in line
    )
    assert "lower local.lr (now 0.7)" in line


@pytest.mark.parametrize(
    "row", [{"loss": 3.0, "accuracy": 0.8}, {"loss": 1.1, "accuracy": 0.6}], ids=["overconfident", "almost as low"]
)
def test_a_loss_that_rises_alone_or_hardly_rises_is_sound(warned, row):
    watch([{"loss": 1.0, "accuracy": 0.8}, *[row] * 7])
    assert warned() == []


def test_a_loss_that_comes_back_is_sound(warned):
    bad, good = {"loss": 2.0, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.8}
    watch([good, *[bad] * 4, good, *[bad] * 4, good])
    assert warned() == []


def test_a_run_whose_every_upload_is_refused_is_told_with_reason_and_cure(warned):
    result = run(training=Training(steps=5, batch_size=5, lr=1e30), rounds=3)
    assert all_refused(result.history)
    lines = [line for line in warned() if "accepted" in line]
    assert len(lines) == 2
    assert lines[0].startswith("round 1: no upload of 5 was accepted (")
    assert lines[1].startswith("no upload of the whole run was accepted")
    for line in lines:
        assert "NaN or Inf" in line
        assert "lower local.lr" in line


def test_a_round_without_uploads_in_a_run_that_goes_on_is_told_once(warned):
    refused = {"accepted": 0}
    watch([{}, refused, refused, {}], [{"round": 2, "client": 7, "reason": "update norm 9 exceeds the bound 1"}])
    (line,) = warned()
    assert line.startswith("fedavg: round 2: no upload of 2 was accepted")
    assert "guard.norm_bound" in line


def test_a_run_that_drew_nobody_refused_nobody():
    assert not all_refused(History([{"round": 1, "cohort": 0, "accepted": 0}]))


def test_the_bound_of_a_guard_that_refuses_all_is_named(warned):
    run(guard=Guard(norm_bound=1e-9), rounds=1)
    assert any("guard.norm_bound" in line for line in warned())


def table(columns, y):
    x = torch.stack([torch.as_tensor(column, dtype=torch.float32) for column in columns], 1)
    return replace(federation_of((x, y), (x, y), [len(y)]).train, x=x, y=y)


LABELS = torch.arange(60) % 3
NOISE = torch.randn(60, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("copy", [LABELS, 7.0 - 2.0 * LABELS], ids=["equal", "other values"])
def test_a_column_that_is_the_label_is_named(copy):
    assert label_columns(table([NOISE, copy], LABELS)) == ["input 2 (counted from 1)"]


def test_a_column_of_words_that_are_the_label_is_named():
    words = [kind == LABELS for kind in range(3)]
    data = replace(
        table([NOISE, *words], LABELS), columns=(InputColumn("age", 1), InputColumn("diagnosis", 3, ("a", "b", "c")))
    )
    assert label_columns(data) == ["column 'diagnosis'"]


@pytest.mark.parametrize(
    "column",
    [NOISE, torch.ones(60), LABELS == 1, LABELS + (torch.arange(60) == 59)],
    ids=["noise", "constant", "one class alone", "one row differs"],
)
def test_a_column_that_does_not_name_the_class_of_every_row_is_sound(column):
    assert label_columns(table([NOISE, column], LABELS)) == []


def test_the_label_among_the_inputs_is_told_before_training(warned):
    data = toy_federation()
    x = data.train.x.clone()
    x[:, 2] = data.train.y
    lines = []

    class Look(fedstill.Callback):
        def on_round(self, row):
            lines.extend(warned())

    run(federation=replace(data, train=replace(data.train, x=x)), rounds=1, callbacks=[Look()])
    (line,) = lines
    assert "input 3" in line
    assert "the label is among the inputs" in line


def test_data_of_one_class_are_told_before_training(warned):
    one = toy_federation()
    run(federation=replace(one, train=replace(one.train, y=torch.zeros_like(one.train.y))), rounds=1)
    assert any("have the class" in line and "data.label" in line for line in warned())


def test_a_phase_that_is_never_reached_is_told_from_python_too(warned):
    def lines(until):
        before = len(warned())
        run(method=(Phase(fedavg(), until), Phase(fedavg())), rounds=2)
        return warned()[before:]

    assert lines(1) == []
    (line,) = lines(2)
    assert "switches after round 2, the run has 2: its last phase is never reached" in line


def test_a_model_with_more_outputs_than_classes_is_told(warned):
    run(model=fedstill.build_model("mlp", input_shape=(4,), classes=5, hidden=(8,)), rounds=1)
    (line,) = warned()
    assert "5 outputs, and the data have 3 classes" in line
    assert "classes=3" in line


@pytest.mark.parametrize(("last", "count"), [(torch.nn.Softmax(1), 1), (torch.nn.LogSoftmax(1), 0)])
def test_a_softmax_before_the_loss_is_told_and_a_log_softmax_is_sound(warned, last, count):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3), last)
    run(model=fedstill.from_module(module, input_shape=(4,), classes=3), rounds=1)
    assert len(warned()) == count
    assert all("take the softmax layer out" in line for line in warned())


def test_more_threads_than_free_cores_are_told_once(warned, monkeypatch):
    looks = iter(Usage(idle=10.0 + second, used=0.0, now=3.0 * second) for second in range(9))
    monkeypatch.setattr(cautions, "read_usage", lambda: next(looks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    watch([{}] * 4)
    (line,) = warned()
    assert "8 threads, and 0.3 cores are free" in line
    assert "engine.threads = 1" in line


def test_as_many_threads_as_free_cores_are_sound(warned, monkeypatch):
    looks = iter(Usage(idle=0.0, used=6.0 * number, now=3.0 * number) for number in range(9))
    monkeypatch.setattr(cautions, "read_usage", lambda: next(looks))
    monkeypatch.setattr(cautions, "allowed_cores", lambda: 2.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    watch([{}] * 4)
    assert warned() == []


def test_free_cores_are_those_that_the_process_had_and_those_that_idled(monkeypatch):
    monkeypatch.setattr(cautions, "allowed_cores", lambda: 4.0)
    assert free_cores(Usage(100.0, 1.0, 0.0), Usage(102.0, 3.0, 2.0)) == 2.0  # one idle, one ours
    assert free_cores(Usage(0.0, 0.0, 0.0), Usage(60.0, 2.0, 2.0)) == 4.0  # never more than it may use
    assert free_cores(Usage(math.nan, 0.0, 0.0), Usage(math.nan, 1.0, 2.0)) == 4.0  # the machine does not say


def test_runs_of_a_comparison_give_each_warning_once(warned):
    said = set()
    for _ in range(2):
        with each_once(said):
            cautions.caution("the same")
    assert warned() == ["the same"]
    cautions.caution("the same")
    assert warned() == ["the same"] * 2


def test_a_warning_goes_to_stderr_once_where_the_log_is_only_written_to_files(tmp_path, capsys):
    run(model=fedstill.build_model("mlp", input_shape=(4,), classes=5, hidden=(8,)), rounds=1, run_dir=tmp_path)
    for text in (capsys.readouterr().err, (tmp_path / "log.txt").read_text()):
        assert text.count("5 outputs, and the data have 3 classes") == 1


def test_every_method_has_one_term_that_fits_the_labels():
    for name in METHODS:
        (phase,) = fedstill.build_method(name)
        assert len([term for term in phase.method.objective.terms or (phase.method.objective,) if term.risk]) == 1
