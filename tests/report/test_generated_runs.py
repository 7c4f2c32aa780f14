"""What a server's generator invents is handed over by the run, written into its folder, and told in its last lines."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from running import federate
from typer.testing import CliRunner

import fedstill
from fedstill.about.toy import trial_federation, trial_model
from fedstill.cli import app
from fedstill.compose.combine import samples
from fedstill.compose.groups import merge, per_group
from fedstill.core.types import Groups, Method, Phase, Round, ServerStep, Training, Uploads
from fedstill.methods import fedavg

METHOD = '''
import torch
from fedstill.methods import fedavg
from fedstill.core.seeds import torch_generator
from fedstill.core.types import Method, ServerStep
from fedstill.data import load
from fedstill.report.generated import inputs

def inventing(*, copies: int = 0):
    """Inventing: FedAvg and samples of noise, the first of them copied.

    Args:
        copies: samples that are training images.
    """
    train = load("digits").train

    def apply(candidate, state, round):
        x = torch.randn(20, 64, generator=torch_generator(round.number))
        x[:copies] = inputs(train.x[:copies], train).flatten(1)
        return candidate, {"samples": {"x": x, "y": torch.arange(20) % 10}}

    base = fedavg()
    step = ServerStep("invent", apply)
    return Method(base.objective, base.aggregate, (step,))
'''


def inventing() -> Method:
    """As many samples as rounds were played, all of the last round's number."""

    def apply(candidate, state, round):
        x, y = torch.full((round.number, 64), float(round.number)), torch.zeros(round.number, dtype=torch.int64)
        return candidate, {"samples": {"x": x, "y": y}}

    base = fedavg()
    step = ServerStep("invent", apply)
    return Method(base.objective, base.aggregate, (step,))


def run(method, **how):
    settings = {
        "model": trial_model(), "federation": trial_federation(), "training": Training(batch_size=8, lr=0.05),
        "rounds": 3, "cohort": 2, "engine": "looped", "device": "cpu",
    }  # fmt: skip
    return federate(method=method, **{**settings, **how})


def test_a_result_holds_what_was_invented_last_and_nothing_where_nothing_was():
    assert run(inventing()).samples.x.shape == (3, 64)
    assert run(fedavg()).samples is None


def test_a_resumed_run_has_the_same_samples_also_one_that_was_finished(tmp_path):
    where = {"run_dir": tmp_path / "run", "checkpoint_every": 1}
    run(inventing(), rounds=2, **where)
    for _ in range(2):
        assert run(inventing(), resume=True, **where).samples.x.unique().tolist() == [3.0]


def test_a_method_that_follows_another_has_its_own():
    assert run((Phase(inventing(), until=1), Phase(fedavg()))).samples is None
    assert run((Phase(fedavg(), until=1), Phase(inventing()))).samples.x.shape == (3, 64)


def test_of_several_architectures_those_of_the_first_that_has_some():
    model = trial_model()
    groups = Groups({"one": model, "two": model}, ("one", "two"))
    one, two = (ServerStep("invent"), inventing().server[0])
    step = per_group({"one": Method(None, one), "two": Method(None, two)}, groups)
    start = merge({name: model.init(0) for name in groups.models})
    nobody = Uploads(start, *[torch.ones(0)] * 4, {}, None, torch.ones(0, dtype=torch.int64))
    look = Round(5, start, nobody, model, 2, None, 0, SimpleNamespace(lend=lambda model: None))
    _, state = step.apply(start, step.init(start), look)
    assert samples(Method(None, step), {step.name: state}).x.shape == (5, 64)


@pytest.fixture
def experiment(tmp_path):
    (tmp_path / "inventing.py").write_text(METHOD)

    def make(copies: int = 0, method: str = "") -> fedstill.Experiment:
        own = f"{tmp_path / 'inventing.py'}:inventing(copies={copies})"
        return fedstill.Experiment(
            rounds=2, cohort=2, method={"name": method or own},
            data={"source": "digits"}, model={"name": "mlp", "hidden": [8]}, checkpoint_every=1,
            partition={"scheme": "iid", "clients": 4},
        )  # fmt: skip

    return make


def test_a_run_folder_tells_copies_from_noise(tmp_path, experiment):
    result = fedstill.run(experiment(copies=4), run_dir=tmp_path / "run", pictures=False)
    told = json.loads((tmp_path / "run" / "generated.json").read_text())
    assert (told["as_near"], told["samples"]) == (4, 20)
    assert told == result.generated
    assert [one["training_row"] for one in told["closest"][:4]] == [0, 1, 2, 3]


def test_the_files_are_there_after_a_resume_and_where_no_curves_are_drawn(tmp_path, experiment):
    first = fedstill.run(experiment(), run_dir=tmp_path / "run", pictures=False)
    folder, found = tmp_path / "run", (tmp_path / "run" / "generated.json").read_text()
    assert not (folder / "curves.png").exists()
    for name in ("generated.json", "generated.png", "generated_closest.png"):
        (folder / name).unlink()  # raises where it is not there
    again = fedstill.run(experiment(), run_dir=folder, resume=True)
    assert (folder / "generated.json").read_text() == found
    assert again.generated == first.generated
    assert fedstill.run(experiment()).generated is None  # no folder, no look


@pytest.mark.parametrize(
    "method", ["fedgen(generator.steps=1)", 'fedftg(input="feature", iterations=1, student.steps=1)']
)
def test_a_folder_of_a_method_that_invents_features_has_no_such_file(tmp_path, experiment, method):
    assert fedstill.run(experiment(method=method), run_dir=tmp_path / "run", pictures=False).generated is None
    assert not list((tmp_path / "run").glob("generated*"))


def test_the_last_lines_of_a_run_tell_what_was_found_and_what_it_is_not(tmp_path, experiment):
    (tmp_path / "e.toml").write_text(experiment(3).to_toml())
    done = CliRunner().invoke(app, ["run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0
    told = "generated      3 of 20 generated samples may be copied: nearest training sample at 0 (a copy: "
    assert told in done.stdout
    assert max(map(len, done.stdout.split("Everything is in")[0].splitlines())) <= 120
    assert "(a check against copies, no guarantee of privacy: see generated.json)" in done.stdout
