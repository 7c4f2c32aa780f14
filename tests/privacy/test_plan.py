"""Noise that protects: it cannot be tried out, no other run has it, and what is stated keeps up with what is saved."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from running import changed_on_the_way, run_on_trial
from students import student_of

import fedstill
from fedstill.about.toy import trial_federation, trial_model
from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.core.types import Training
from fedstill.experiment.config import Experiment
from fedstill.loop.callbacks import Callback
from fedstill.loop.checkpoint import list_checkpoints
from fedstill.loop.guard import Guard
from fedstill.methods import dp_fedavg, fedaux
from fedstill.methods.lookup import build_method
from fedstill.privacy.plan import Privacy

FOUR = dp_fedavg(clip=0.5, noise_multiplier=4.0)


def run(method=FOUR, **how):
    return run_on_trial(method, **{"rounds": 1, "cohort": 4, **how})


def repeated(method=FOUR, **how):
    """A run whose noise follows from its seed, so that only what differs between two runs changes it."""
    return run(method, privacy=Privacy(reproducible=True), **how)


def vector(result) -> torch.Tensor:
    return torch.cat([leaf.double().flatten() for leaf in flatten(result.weights).values()])


def test_the_noise_of_compared_methods_does_not_cancel():
    """With one seed, twice the model at z = 4 less that at z = 8 was the model without noise, to six digits."""
    exact = vector(repeated(dp_fedavg(clip=0.5, noise_multiplier=0.0)))
    louder = vector(repeated(dp_fedavg(clip=0.5, noise_multiplier=8.0)))
    left = 2 * vector(repeated()) - louder - exact
    assert float(left.norm()) > 0.5 * float((louder - exact).norm())


def other_sample():
    whole = trial_federation()
    x = whole.train.x.clone()
    x[0, 0, 0, 0] += 1
    return dataclasses.replace(whole, train=dataclasses.replace(whole.train, x=x))


@pytest.mark.parametrize(
    "change",
    [
        {"method": dp_fedavg(clip=0.5 + 1e-9, noise_multiplier=4.0)},
        {"settings": "fedprox(mu=0.1)"},
        {"training": Training(batch_size=8, lr=0.05 + 1e-9)},
        {"federation": other_sample()},
        {"seed": 1},
        {"guard": Guard(size_cap=1e8)},
        {"engine_options": {"precision": "bf16"}},
        {"engine": "batched"},
        {"start": trial_model().init(7)},
    ],
    ids=["clip", "settings", "training", "one pixel", "seed", "guard", "precision", "engine", "start"],
)
@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_runs_that_differ_in_anything_share_no_noise(change, trust):
    """The move hardly changes; with the noise of the other run, neither would the model."""
    options = {"trust": trust}
    if "method" in change:
        change = {"method": dp_fedavg(clip=0.5 + 1e-9, noise_multiplier=4.0, **options)}
    plain = dp_fedavg(clip=0.5, noise_multiplier=4.0, **options)
    one, other = vector(repeated(plain)), vector(repeated(**{"method": plain, **change}))
    assert float((one - other).norm()) > 0.5 * float((one - vector(repeated(dp_fedavg(noise_multiplier=0.0)))).norm())
    assert torch.equal(one, vector(repeated(plain)))


@pytest.mark.parametrize(("method", "same"), [("dp_fedavg", True), ("feddf(student.steps=1)+dp_fedavg", False)])
def test_the_server_s_own_data_count_where_it_learns_from_them(method, same):
    """From the second round on clients start from what it has learnt, and two runs would tell how they moved."""
    seeds = []

    def watched(uploads, start, seed):
        seeds.append(seed)
        return inner(uploads, start, seed)

    (phase,) = build_method(f"{method}(trust='nobody')", {})
    (inner,) = phase.method.per_client
    method, whole = changed_on_the_way(phase.method, watched), trial_federation()
    for federation in (whole, dataclasses.replace(whole, unlabeled=whole.unlabeled[1:])):
        repeated(method, federation=federation)
    assert (seeds[0] == seeds[1]) == same


def test_the_scores_of_two_epsilons_do_not_give_away_those_without_noise():
    """w + s e and w + 2 s e are w."""
    sent = {}

    def scores(epsilon):
        method = fedaux(student=student_of(fedaux, steps=1), form="mean", lam=0.01, epsilon=epsilon)
        (step,) = method.server

        def watched(candidate, state, look):
            def ask(question, *given, **how):
                answers = look.ask(question, *given, **how)
                sent[epsilon] = answers.values["w"].double()
                return answers

            return step.prepare(candidate, state, dataclasses.replace(look, ask=ask))

        repeated(dataclasses.replace(method, server=(dataclasses.replace(step, prepare=watched),)))

    for epsilon in (0.1, 0.2, None):
        scores(epsilon)
    noise = {epsilon: sent[epsilon] - sent[None] for epsilon in (0.1, 0.2)}
    alike = torch.nn.functional.cosine_similarity(noise[0.1].flatten(), noise[0.2].flatten(), dim=0)
    assert abs(float(alike)) < 0.9


SETTING = {
    "rounds": 3, "cohort": 2, "checkpoint_every": 1, "engine": {"device": "cpu"},
    "model": {"name": "mlp", "hidden": [8]},
    "partition": {"scheme": "lda", "clients": 6, "alpha": 0.5},
    "method": {"name": "dp_fedavg", "clip": 0.5, "noise_multiplier": 4.0},
}  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"partition": {**SETTING["partition"], "alpha": 5.0}}, {"method": {**SETTING["method"], "clip": 5.0}}]
)
def test_a_private_run_is_not_resumed_with_another_split_or_other_options(tmp_path, change):
    """Rounds since the last checkpoint would come again with the same noise on other moves."""
    fedstill.run(Experiment.model_validate(SETTING), run_dir=tmp_path)
    (tmp_path / "config.toml").write_text(Experiment.model_validate({**SETTING, **change, "rounds": 5}).to_toml())
    differing = r"of another experiment: (partition\.alpha|method\.clip) was 0\.5 and is 5\.0"
    with pytest.raises(FedstillError, match=differing):
        fedstill.resume_run(tmp_path)


def test_without_noise_that_protects_a_run_draws_as_it_always_did():
    """Nor is it held against its data when it is resumed: FedAUX's sum of losses makes no claim."""
    plain, told = (
        run(fedaux(student=student_of(fedaux, steps=1), form="sum"), settings=settings)
        for settings in ("", "other words")
    )
    assert torch.equal(vector(plain), vector(told))


def test_a_private_run_is_resumed_for_more_rounds_with_another_budget(tmp_path):
    fedstill.run(Experiment.model_validate({**SETTING, "privacy": {"reproducible": True}}), run_dir=tmp_path / "cut")
    more = Experiment.model_validate({**SETTING, "rounds": 5, "privacy": {"epsilon": 50.0, "reproducible": True}})
    (tmp_path / "cut" / "config.toml").write_text(more.to_toml())
    resumed = fedstill.resume_run(tmp_path / "cut")
    assert torch.equal(vector(resumed), vector(fedstill.run(more, run_dir=tmp_path / "whole")))


OWN = """
from fedstill.methods import fedavg


def own():
    return fedavg()
"""


def test_a_private_run_of_an_own_method_is_resumed_from_wherever_its_file_was_named(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    method = "mine.py:own+dp_fedavg(noise_multiplier=4.0)"
    fedstill.run(Experiment.model_validate({**SETTING, "method": method}), run_dir="run")
    assert fedstill.resume_run("run").privacy.claims


class Stop(Callback):
    def on_round(self, row):
        if row["round"] == 6:
            raise KeyboardInterrupt


def test_what_is_stated_is_about_the_models_that_are_saved(tmp_path):
    """It was written at the end alone: a run that went on and was stopped spoke of its first rounds."""
    how = {"run_dir": tmp_path, "privacy": Privacy(), "checkpoint_every": 2}
    run(rounds=3, **how)
    first = json.loads((tmp_path / "privacy.json").read_text())
    with pytest.raises(KeyboardInterrupt):
        run(rounds=9, resume=True, callbacks=[Stop()], **how)
    stated = json.loads((tmp_path / "privacy.json").read_text())
    assert [first["rounds"], stated["rounds"]] == [3, 4]
    assert list_checkpoints(tmp_path / "checkpoints")[0][0] == 4
    assert stated["claims"][0]["epsilon"] > first["claims"][0]["epsilon"]


@pytest.mark.parametrize(
    "method",
    [FOUR, fedaux(student=student_of(fedaux, steps=1), form="mean", lam=0.01, epsilon=1.0)],
    ids=["updates", "scores"],
)
def test_nothing_is_claimed_where_everybody_knows_statistics_of_the_clients_rows(method):
    """One row of one client moved the inputs of all, and with them every client's move."""
    plain = trial_federation()
    assert run(method, federation=plain).privacy.claims
    told = dataclasses.replace(plain, public_facts=("the mean of all inputs",))
    stated = run(method, federation=told).privacy
    assert not stated.claims
    assert "the mean of all inputs leave without noise and steer what follows" in stated.text()
    with pytest.raises(FedstillError, match="the mean of all inputs"):
        run(method, federation=told, privacy=Privacy(epsilon=50.0, unit="sample"))


def test_one_band_keeps_the_noise_of_runs_from_before_there_were_bands():
    """Noise follows from the text of all options, so that a run with one band has none of them in it."""
    texts = {
        bands: Experiment.model_validate({"method": {"name": "dp_fedavg", **bands_of}}).options_text()
        for bands, bands_of in (("none", {}), ("one", {"bands": 1}), ("two", {"bands": 2}))
    }
    assert texts["none"] == texts["one"] != texts["two"]
    assert "bands" not in texts["one"]
