"""Sealed rounds: sums in the place of uploads, the same model, and nothing of one client within reach."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from running import changed_on_the_way, run_on_trial

from fedstill.compose.sealed import OfSums, clipped, mean_of, of_sums, sums_of, why_not_sealed
from fedstill.compose.wrappers import after, every, report_only, rollback
from fedstill.core.errors import FedstillError
from fedstill.core.types import Round, SealedRound, ServerStep, Uploads, Weights
from fedstill.loop.guard import Guard
from fedstill.methods import METHODS
from fedstill.methods.lookup import build_method
from fedstill.server.aggregate import average, with_buffers
from fedstill.server.optimizers import sgd

START = Weights({"w": torch.tensor([1.0, 2.0])}, {"mean": torch.tensor([0.5]), "seen": torch.tensor(7)})


def cohort() -> Uploads:
    """Three clients of 10, 20 and 0 samples; the third one counts for nothing."""
    weights = Weights(
        {"w": torch.tensor([[2.0, 2.0], [1.0, 5.0], [9.0, 9.0]])},
        {"mean": torch.tensor([[1.0], [4.0], [9.0]]), "seen": torch.tensor([8, 9, 10])},
    )
    size = torch.tensor([10.0, 20.0, 0.0], dtype=torch.float64)
    ones = torch.ones(3)
    return Uploads(
        weights, size, ones, ones, torch.tensor([0.3, 0.6, 0.0]), {"slot": {"w": ones}}, None, torch.arange(3)
    )


def method_of(text: str):
    (phase,) = build_method(text)
    return phase.method


def test_sums_are_over_samples_or_over_clients_that_hold_some():
    sums = sums_of(cohort(), START)
    assert sums["size"].weights.params["w"].tolist() == [2.0 * 10 + 20, 2.0 * 10 + 5 * 20]
    assert float(sums["size"].mass) == 30.0
    assert sums["uniform"].weights.params["w"].tolist() == [3.0, 7.0]
    assert sums["uniform"].extra["slot"]["w"].tolist() == 2.0
    assert (sums["uniform"].clients, float(sums["uniform"].mass)) == (2, 2.0)


def test_the_mean_of_a_sum_has_the_servers_own_integer_buffers():
    mean = mean_of(sums_of(cohort(), START)["size"], START)
    assert mean.params["w"].tolist() == pytest.approx([4 / 3, 4.0])
    assert mean.buffers["mean"].tolist() == pytest.approx([3.0])
    assert int(mean.buffers["seen"]) == 7


def test_a_sealed_round_has_no_uploads():
    assert "uploads" in Round.__dataclass_fields__
    assert "uploads" not in SealedRound.__dataclass_fields__
    assert not hasattr(SealedRound, "uploads")
    assert {"ids", "size"}.isdisjoint(SealedRound.__dataclass_fields__)


@pytest.mark.slow
def test_mypy_refuses_a_step_of_sums_that_reads_uploads(tmp_path):
    source = """
from fedstill.compose.sealed import of_sums
from fedstill.core.types import Round, SealedRound, Tree, Weights


def good(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
    return candidate, {"number": round.number}


def peeks(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
    return candidate, {"ids": round.uploads.ids}


def plain(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
    return candidate, {"ids": round.uploads.ids}


of_sums(good)
of_sums(plain)
"""
    (tmp_path / "steps.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "steps.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Item "SealedRound" of "Round | SealedRound" has no attribute "uploads"' in done.stdout
    assert 'Argument 1 to "of_sums" has incompatible type' in done.stdout
    assert "Found 2 errors" in done.stdout


@pytest.mark.parametrize("text", ["fedavg", "fedavgm", "fedadam", "scaffold", "feddyn", "fedcurv", "fedprox+fedadam"])
def test_a_sealed_run_is_the_open_one_up_to_rounding(text):
    method = method_of(text)
    open_, sealed = (run_on_trial(method, sealed=sealed, guard=Guard(norm_bound=1e6)) for sealed in (False, True))
    for name, leaf in open_.weights.params.items():
        assert torch.allclose(leaf, sealed.weights.params[name], atol=1e-5), name
    losses = ([row["train_loss"] for row in made.history.rows] for made in (open_, sealed))
    assert next(losses) == pytest.approx(next(losses))


def test_steps_of_a_sealed_run_get_sums_and_nothing_else():
    seen = []

    def look(candidate, state, round):
        seen.append(round)
        return candidate, state

    method = method_of("fedavg")
    run_on_trial(dataclasses.replace(method, server=(ServerStep("look", of_sums(look)),)), sealed=True)
    assert [type(round) for round in seen] == [SealedRound] * 3
    with pytest.raises(AttributeError):
        _ = seen[0].uploads


def test_a_step_that_does_not_say_that_it_reads_sums_is_refused_by_name_before_round_1():
    method = dataclasses.replace(method_of("fedavg"), server=(ServerStep("mine", lambda c, s, r: (c, s)),))
    with pytest.raises(
        FedstillError, match="cannot run sealed: the server step 'mine' may read the uploads one by one"
    ):
        run_on_trial(method, sealed=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("feddf", "the server step 'distill' looks at each client's model"),
        ("fedavg+median", "the server step 'median' looks at each client's model"),
        (
            "fednova",
            "the server step 'normalized_average' may read the uploads one by one (it is not marked with of_sums)",
        ),
        ("fedaux", "it asks each client for certainty scores"),
        ("feddf_gen", "it needs each client's label counts"),
        ("dp_fedavg", "its trusted party looks at each upload"),
    ],
)
def test_a_refusal_names_the_part_that_needs_single_uploads(text, reason):
    assert reason in why_not_sealed(method_of(text))


def test_each_method_says_whether_it_can_run_sealed_and_those_that_learn_from_averages_can():
    can = {name for name in METHODS if not why_not_sealed(method_of(name))}
    assert {"fedavg", "fedprox", "scaffold", "feddyn", "fedcurv", "moon", "fedntd", "fedlmd"} <= can
    assert can.isdisjoint({"feddf", "fedbe", "mrtf", "d2cfl", "fedgen", "fedftg", "fedaux"})


def test_several_architectures_are_refused():
    assert why_not_sealed(method_of("fedavg"), networks=2) == ["clients have several architectures"]


@pytest.mark.parametrize(
    "wrap", [lambda s: every(2, s), lambda s: after(1, s), lambda s: rollback(s, 0.5), report_only]
)
def test_a_step_around_another_reads_no_more_than_that_one(wrap):
    assert isinstance(wrap(sgd(0.5)).apply, OfSums)
    assert not isinstance(wrap(ServerStep("mine", lambda c, s, r: (c, s))).apply, OfSums)


@pytest.mark.parametrize(("policy", "sealed"), [("average", True), ("reset", True), ("local", True), ("pooled", False)])
def test_variances_of_the_union_need_each_clients_statistics(policy, sealed):
    assert isinstance(with_buffers(average(), policy).apply, OfSums) == sealed


def test_clients_cut_their_own_moves_and_slots_to_the_bounds():
    """Moves of length 1, 3 and sqrt(113); the first one keeps its bits."""
    cut = clipped(cohort(), START, 1.5, 0.25)
    moves = cut.weights.params["w"] - START.params["w"]
    assert moves.norm(dim=1).tolist() == pytest.approx([1.0, 1.5, 1.5])
    assert torch.equal(cut.weights.params["w"][0], cohort().weights.params["w"][0])
    assert cut.extra["slot"]["w"].tolist() == [0.25] * 3
    assert clipped(cohort(), START, None, None).weights is not None


def test_one_huge_upload_moves_a_sealed_model_by_its_bound_only():
    def huge(uploads, start, seed):
        params = {name: leaf.clone() for name, leaf in uploads.weights.params.items()}
        for leaf in params.values():
            leaf[0] += 1000.0
        return uploads._replace(weights=uploads.weights._replace(params=params))

    method = changed_on_the_way(method_of("fedavg"), huge)
    found = run_on_trial(method, sealed=True, guard=Guard(norm_bound=0.5), rounds=1)
    start = run_on_trial(method_of("fedavg"), rounds=1).weights
    apart = [(found.weights.params[name] - leaf).norm() for name, leaf in start.params.items()]
    assert float(torch.stack(apart).norm()) < 2.0
