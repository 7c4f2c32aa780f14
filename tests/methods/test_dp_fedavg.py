"""DP-FedAvg: what is bounded, what is hidden, and that the server's steps see nothing else.

Worked by hand on moves of length 5 and 13 at a bound of 2, from a model of (1, 1 | 2).
"""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from running import run_on_trial
from weighed import weighed

from fedstill.compose.join import join
from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import draw_cohort
from fedstill.core.tree import select, stack
from fedstill.core.types import Phase, Round, ServerStep, Stage, Uploads, Weights
from fedstill.loop.checkpoint import load_checkpoint
from fedstill.methods import dp_fedavg, fedavg
from fedstill.methods.dp_fedavg import follow_quantile
from fedstill.methods.lookup import build_method
from fedstill.models import build_model
from fedstill.privacy.accountant import epsilon_of
from fedstill.privacy.mechanisms import bit_noise, noisy_mean, noisy_moves
from fedstill.privacy.plan import Privacy

START = Weights({"a": torch.tensor([1.0, 1.0]), "b": torch.tensor(2.0)}, {"mean": torch.tensor([7.0])})
MOVES = [(3.0, 0.0, 4.0), (3.0, 4.0, 12.0), (0.0, 0.0, 0.0), (0.3, 0.0, 0.4)]  # of length 5, 13, 0 and 0.5


def uploads_of(moves, ids=None) -> Uploads:
    ends = [Weights({"a": START.params["a"] + torch.tensor(m[:2]), "b": START.params["b"] + m[2]}, {}) for m in moves]
    numbers = torch.arange(1.0, len(moves) + 1, dtype=torch.float64)
    weights = stack(ends)._replace(buffers={"mean": torch.rand(len(moves), 1, generator=torch.Generator())})
    ids = torch.arange(len(moves)) if ids is None else torch.tensor(ids)
    return Uploads(weights, 10 * numbers, numbers, numbers, numbers, {}, None, ids)


def moves_of(uploads: Uploads) -> torch.Tensor:
    params = uploads.weights.params
    return torch.cat([params["a"] - START.params["a"], (params["b"] - START.params["b"]).unsqueeze(1)], dim=1)


def wide(clients: int, width: int = 20_000) -> tuple[Uploads, Weights]:
    start = Weights({"w": torch.zeros(width)}, {})
    ones = torch.ones(clients, dtype=torch.float64)
    return Uploads(stack([start] * clients), ones, ones, ones, ones, {}, None, torch.arange(clients)), start


def run(method, **how):
    return run_on_trial(build_method(method) if isinstance(method, str) else method, **how)


def test_a_trusted_party_shows_the_sum_of_bounded_moves_over_the_expected_cohort():
    """(2/5 (3, 0, 4) + 2/13 (3, 4, 12) + 0 + (0.3, 0, 0.4)) / 5, where five were expected and four came."""
    seen = noisy_mean(2.0, 0.0)(uploads_of(MOVES), START, 0, 5)
    wanted = torch.tensor([1.2 + 6 / 13 + 0.3, 8 / 13, 1.6 + 24 / 13 + 0.4]) / 5
    assert len(seen.ids) == 5
    assert torch.allclose(moves_of(seen), wanted.expand(5, 3), atol=1e-6)


def test_the_denominator_does_not_tell_how_many_came():
    one, two = (noisy_mean(2.0, 0.0)(uploads_of(MOVES[:count]), START, 0, 4) for count in (1, 2))
    assert torch.allclose(moves_of(one)[0], torch.tensor([1.2, 0.0, 1.6]) / 4, atol=1e-6)
    assert len(one.ids) == len(two.ids) == 4


def test_nothing_else_gets_past_a_trusted_party():
    """Sizes, steps, travel, losses, ids and BatchNorm statistics are the same whoever came."""
    ours = noisy_mean(2.0, 1.0)(uploads_of(MOVES, ids=[3, 5, 7, 9]), START, 0, 3)
    theirs = noisy_mean(2.0, 1.0)(uploads_of(MOVES[::-1][:2], ids=[1, 2]), START, 0, 3)
    for field in ("size", "steps", "travel", "loss", "ids"):
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
    assert torch.equal(ours.weights.buffers["mean"], START.buffers["mean"].expand(3, 1))
    assert ours.extra == {}
    assert ours.label_counts is None


@pytest.mark.parametrize("clients", [0, 1, 9])
def test_a_trusted_partys_noise_is_z_times_the_bound_over_the_expected_cohort(clients):
    """20,000 draws: the estimate of a standard deviation is off by 0.5 % (one sigma)."""
    uploads, start = wide(9)
    uploads = select(uploads, torch.arange(clients))
    values = noisy_mean(0.5, 3.0)(uploads, start, 1, 10).weights.params["w"][0]
    assert float(values.std()) == pytest.approx(3.0 * 0.5 / 10, rel=0.025)


def test_each_clients_own_noise_is_z_times_the_bound_and_unrelated_to_the_others():
    uploads, start = wide(3)
    values = noisy_moves(0.5, 3.0)(uploads, start, 1).weights.params["w"]
    assert values.std(dim=1).tolist() == pytest.approx([1.5] * 3, rel=0.025)
    assert float((torch.corrcoef(values) - torch.eye(3)).abs().max()) < 0.03


def test_clients_that_trust_nobody_send_bounded_moves_and_constants():
    sent = noisy_moves(2.0, 0.0)(uploads_of(MOVES), START, 0)
    wanted = torch.tensor([[1.2, 0.0, 1.6], [6 / 13, 8 / 13, 24 / 13], [0.0, 0.0, 0.0], [0.3, 0.0, 0.4]])
    assert torch.allclose(moves_of(sent), wanted, atol=1e-6)
    assert torch.equal(sent.weights.buffers["mean"], START.buffers["mean"].expand(4, 1))
    for field, constant in (("size", 1), ("steps", 1), ("travel", 1), ("loss", 0)):
        assert getattr(sent, field).tolist() == [constant] * 4, field


def test_a_move_just_beyond_the_bound_is_cut_to_it():
    """4/5 of (3, 0, 4)."""
    one = uploads_of(MOVES[:1])
    for sent in (noisy_moves(4.0, 0.0)(one, START, 0), noisy_mean(4.0, 0.0)(one, START, 0, 1)):
        assert moves_of(sent)[0].tolist() == pytest.approx([2.4, 0.0, 3.2], abs=1e-6)


def test_a_clients_noise_follows_the_client_and_changes_with_the_round():
    transmit = noisy_moves(2.0, 1.0)
    everybody = transmit(uploads_of(MOVES, ids=[4, 9, 1, 6]), START, 5).weights.params["a"]
    assert torch.equal(transmit(uploads_of(MOVES[1:2], ids=[9]), START, 5).weights.params["a"][0], everybody[1])
    assert not torch.equal(transmit(uploads_of(MOVES[1:2], ids=[9]), START, 6).weights.params["a"][0], everybody[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_move_is_sent_as_no_move_with_its_noise(bad):
    """An upload of NaN would be an event without noise that one client's data decide."""
    broken, still = uploads_of([MOVES[0], (bad, 0.0, 0.0)]), uploads_of([MOVES[0], (0.0, 0.0, 0.0)])
    for sent in (noisy_moves(2.0, 1.0), lambda *those: noisy_mean(2.0, 1.0)(*those, 2)):
        assert torch.equal(moves_of(sent(broken, START, 0)), moves_of(sent(still, START, 0)))


@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_without_noise_and_with_a_bound_nobody_reaches_it_is_uniform_fedavg(trust):
    found = run(dp_fedavg(clip=1e6, noise_multiplier=0.0, trust=trust)).weights.params
    wanted = run(weighed(fedavg(), "uniform")).weights.params
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


def peeking():
    """A server step that tries to use whatever it can see of the uploads."""
    seen = []

    def apply(candidate, state, round):
        seen.append(round.uploads)
        return candidate, state

    return ServerStep("peek", apply, stage=Stage.REFINE), seen


def test_later_steps_of_the_server_see_only_the_noisy_mean():
    """FedDyn's step takes the mean of uploads anew: behind a seal it gets the noisy one."""
    step, seen = peeking()
    method = dp_fedavg(noise_multiplier=1.0)
    result = run(dataclasses.replace(method, server=(step,)), rounds=1, privacy=Privacy(reproducible=True))
    (uploads,) = seen
    assert uploads.size.tolist() == [1.0, 1.0]
    assert uploads.loss.tolist() == [0.0, 0.0]
    for name, leaf in uploads.weights.params.items():
        assert torch.equal(leaf[0], leaf[1]), name
        assert torch.allclose(leaf[0], result.weights.params[name], atol=1e-6)
    assert result.history.rows[0]["train_loss"] > 0  # the trusted server's own log


def test_batchnorm_statistics_are_never_taken_from_clients():
    for trust in ("server", "nobody"):
        model = build_model("resnet8", input_shape=(1, 8, 8), classes=3, norm="batch")
        result = run(dp_fedavg(trust=trust), model=model, rounds=1)
        first = model.init(0).buffers
        assert first
        assert all(torch.equal(result.weights.buffers[name], leaf) for name, leaf in first.items())


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            "dp_fedavg+feddf(student.steps=2)",
            "each client's model: use dp_fedavg(trust='nobody'), or another method beside it",
        ),
        (
            "dp_fedavg+scaffold",
            "control_delta: use another method beside it (dp_fedavg(trust='nobody') would run, and claim nothing: it "
            "puts no noise on control_delta)",
        ),
    ],
)
def test_a_method_that_needs_more_than_the_noisy_mean_is_refused_in_words(method, told):
    with pytest.raises(FedstillError, match=re.escape(told)):
        run(method)


def test_another_sealed_method_is_not_told_to_use_this_one():
    """A release names its own way to do without trust, or none."""
    joined = phases_of(build_method("dp_fedavg+scaffold"))[0].method
    (release,) = joined.releases
    for way, told in (("", "use another method beside it"), ("mine(local=true)", r"\(mine\(local=true\) would run")):
        other = dataclasses.replace(
            joined,
            way=tuple(
                dataclasses.replace(
                    stage, releases=(dataclasses.replace(release, without_trust=way),) if stage.releases else ()
                )
                for stage in joined.way
            ),
        )
        with pytest.raises(FedstillError, match=told) as refused:
            run(other)
        assert "dp_fedavg" not in str(refused.value)


@pytest.mark.parametrize(
    "method",
    [
        "dp_fedavg+fedprox(mu=0.1)",
        "dp_fedavg+fedadam",
        "dp_fedavg+feddyn",
        'dp_fedavg(trust="nobody")+feddf(student.steps=2)',
        'dp_fedavg(trust="nobody")+feddyn',
    ],
)
def test_it_joins_others_and_the_claim_stays(method):
    made = run(method).privacy
    assert made.claim("client", "public").complete
    assert (made.claim("client", "server") is not None) == ("nobody" in method)


def test_beside_scaffold_nothing_is_claimed_since_the_control_has_no_noise():
    made = run('dp_fedavg(trust="nobody")+scaffold').privacy
    assert made.claims == ()
    assert "control_delta leave without noise" in made.text()


def test_without_noise_nothing_is_claimed():
    made = run(dp_fedavg(noise_multiplier=0.0)).privacy
    assert made.claims == ()
    assert "no noise: set noise_multiplier" in made.text()


def test_two_of_them_cannot_stand_between_clients_and_server():
    with pytest.raises(FedstillError, match="one and other both stand between clients and server"):
        join({"one": dp_fedavg(), "other": dp_fedavg()})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"clip": 0.0}, "method.clip = 0.0 must be a number above 0"),
        ({"noise_multiplier": -1.0}, "method.noise_multiplier = -1.0 must be a number, at least 0"),
        ({"noise_multiplier": 1e-6}, "method.noise_multiplier = 1e-06 is impossible: it must be from 0.0001 to 1e+06"),
        ({"noise_multiplier": 1e160}, "method.noise_multiplier = 1e+160 is impossible"),
        ({"trust": "everybody"}, 'method.trust = "everybody" is unknown'),
    ],
)
def test_impossible_options_are_one_line(options, told):
    with pytest.raises(FedstillError) as refused:
        build_method("dp_fedavg", options)
    assert str(refused.value).startswith(told)


# A bound that follows a quantile of the moves.


def test_the_bound_follows_the_share_of_moves_that_it_does_not_cut():
    """Of lengths 5, 13, 0 and 0.5 two are at most 2: at a quantile of 1/4 the bound falls by exp(-0.2 / 4)."""
    seen = noisy_mean(2.0, 0.0, counts_below=True)(uploads_of(MOVES), START, 0, 4)
    assert seen.extra["below"].tolist() == [0.5] * 4
    step = follow_quantile(2.0, 0.25)
    look = weighed_round(seen)
    _, state = step.apply(START, step.init(START), look)
    assert float(state["clip"]) == pytest.approx(2.0 * math.exp(-0.05))
    assert look.metrics["clip"] == float(state["clip"])


def weighed_round(uploads):
    return Round(1, START, uploads, build_model("mlp", input_shape=(4,), classes=2, hidden=(2,)), 4, None, 0, None)


def test_the_count_and_the_moves_are_one_release_of_the_noise_multiplier():
    """1 / z^2 = 1 / z_d^2 + 1 / (2 s_b)^2, s_b = max(m / 20, z): a cohort of 20 at z = 2 has z_d = 2 / sqrt(3/4)."""
    uploads, start = wide(4)
    seen = noisy_mean(0.5, 2.0, counts_below=True)(uploads, start, 1, 20)
    assert bit_noise(2.0, 20) == 2.0
    assert bit_noise(2.0, 400) == 20.0
    assert float(seen.weights.params["w"][0].std()) == pytest.approx(2 / math.sqrt(0.75) * 0.5 / 20, rel=0.025)
    counts = [
        float(noisy_mean(0.5, 2.0, counts_below=True)(*wide(4, 2), seed, 20).extra["below"][0]) for seed in range(2000)
    ]
    assert torch.tensor(counts).mean() == pytest.approx(0.5 + 2 / 20, abs=0.01)  # four bits of 1/2
    assert torch.tensor(counts).std() == pytest.approx(2.0 / 20, rel=0.06)


def test_the_bound_ends_at_the_quantile_of_the_moves_and_the_claim_stays():
    plain = run(dp_fedavg(clip=4.0, noise_multiplier=0.001), cohort=4, rounds=40)
    method = dp_fedavg(clip=4.0, noise_multiplier=0.001, quantile=0.5)
    followed = run(method, cohort=4, rounds=40)
    bounds = [row["server/clip"] for row in followed.history.rows]
    assert bounds[-1] < 1.0 < 3.0 < bounds[0]
    assert bounds[-1] == pytest.approx(bounds[-5], rel=0.5)
    assert followed.privacy.claims[0].epsilon == plain.privacy.claims[0].epsilon


def test_with_a_bound_that_adapts_a_round_without_clients_is_played_by_noise_alone():
    """A run that ended there would say that nobody was drawn."""
    shown = noisy_mean(1.0, 2.0, counts_below=True)(
        select(uploads_of(MOVES), torch.tensor([], dtype=torch.int64)), START, 3, 4
    )
    assert float(moves_of(shown).norm()) > 0
    assert float(shown.extra["below"][0]) != 0.5
    how = {"rounds": 12, "cohort": 1, "sampling": "poisson", "privacy": SEED_IS_PUBLIC}
    drawn = [draw_cohort(np.arange(4), 1, seed=0, round=number, sampling="poisson") for number in range(1, 13)]
    assert min(map(len, drawn)) == 0
    assert len(run(dp_fedavg(noise_multiplier=2.0, quantile=0.5), **how).history.rows) == 12


def test_a_resumed_run_goes_on_with_its_bound(tmp_path):
    method = dp_fedavg(clip=4.0, noise_multiplier=1.0, quantile=0.5)
    how = {"privacy": Privacy(reproducible=True), "checkpoint_every": 1}
    whole = run(method, rounds=4, run_dir=tmp_path / "whole", **how)
    run(method, rounds=2, run_dir=tmp_path / "cut", **how)
    resumed = run(method, rounds=4, run_dir=tmp_path / "cut", resume=True, **how)
    assert all(torch.equal(leaf, whole.weights.params[name]) for name, leaf in resumed.weights.params.items())
    assert resumed.history.rows[-1]["server/clip"] == whole.history.rows[-1]["server/clip"] != 4.0


def test_a_quantile_needs_a_trusted_server():
    with pytest.raises(FedstillError, match=r"method\.quantile needs method.trust = 'server'"):
        dp_fedavg(trust="nobody", quantile=0.5)


# Noise that later rounds take back.

BANDED = dp_fedavg(clip=0.5, noise_multiplier=4.0, bands=4)
SEED_IS_PUBLIC = Privacy(reproducible=True)


def claim_of(method, **how):
    """The claim of a run in which each of four clients comes every fourth round, unless `how` says otherwise."""
    how = {"rounds": 8, "cohort": 1, "sampling": "cyclic", **how}
    made = run(method, privacy=SEED_IS_PUBLIC, **how).privacy
    return next(one for one in made.with_a_secret if (one.unit, one.against) == ("client", "public"))


def test_bands_cost_nothing_where_no_client_comes_again_within_them():
    """Two visits, four rounds apart, at z / 2 = 2: one Gaussian of multiplier 2 / sqrt 2, banded or not."""
    assert claim_of(BANDED) == claim_of(dp_fedavg(clip=0.5, noise_multiplier=4.0))
    assert claim_of(BANDED).epsilon == epsilon_of(1e-5, 2 / math.sqrt(2))


def test_clients_that_come_sooner_pay_more_by_the_rows_that_they_move_twice():
    """Everybody in three rounds of two bands, a = (2, 1): rows of 2, 3 and 3, so 22 / 5 rounds in place of three."""
    how = {"rounds": 3, "cohort": 4, "sampling": "fixed"}
    found = claim_of(dp_fedavg(clip=0.5, noise_multiplier=4.0, bands=2), **how)
    assert found.epsilon == pytest.approx(epsilon_of(1e-5, 2 / math.sqrt(22 / 5)), rel=1e-9)
    assert found.epsilon > claim_of(dp_fedavg(clip=0.5, noise_multiplier=4.0), **how).epsilon


def test_with_bands_no_effect_of_secret_cohorts_is_claimed_and_the_statement_says_why():
    how = {"rounds": 8, "cohort": 2, "sampling": "poisson", "privacy": SEED_IS_PUBLIC}
    banded, plain = run(BANDED, **how).privacy, run(dp_fedavg(clip=0.5, noise_multiplier=4.0), **how).privacy
    cohorts = [draw_cohort(np.arange(4), 2, seed=0, round=number, sampling="poisson") for number in range(1, 9)]
    visits = np.bincount(np.concatenate(cohorts)).max()
    assert banded.with_a_secret[0].epsilon > epsilon_of(1e-5, 2 / math.sqrt(visits)) > plain.with_a_secret[0].epsilon
    assert any("(4 bands)" in line and "no effect of a secret cohort is counted" in line for line in banded.assumptions)
    assert not any("its own coin" in line for line in banded.assumptions)


def test_the_first_rounds_noise_is_the_columns_norm_over_its_first_number():
    """z C |a| / a_0 / m, with |a|^2 = 16^2 + 8^2 + 6^2 + 5^2: the noise of a round is louder, what adds up is not."""
    uploads, start = wide(9)
    (stage,) = BANDED.way
    values = [stage.by_round({}, tuple(range(number)))(uploads, start, number, 10) for number in range(4)]
    noises = torch.stack([one.weights.params["w"][0] for one in values]).double()
    once = 4.0 * 0.5 / 10
    assert float(noises[0].std()) == pytest.approx(once * math.sqrt(381) / 16, rel=0.025)
    inverse = np.linalg.inv(sum(a / math.sqrt(381) * np.eye(4, k=-lag) for lag, a in enumerate((16, 8, 6, 5))))
    assert float(noises.sum(0).std()) == pytest.approx(once * np.linalg.norm(inverse.sum(0)), rel=0.025)
    assert float(noises.sum(0).std()) < 0.8 * once * math.sqrt(4)  # of independent ones


@pytest.mark.parametrize("privacy", [SEED_IS_PUBLIC, Privacy()], ids=["public seed", "secret"])
def test_a_resumed_run_draws_the_noise_of_its_past_again(privacy, tmp_path):
    def played(folder, rounds, **how):
        method = dp_fedavg(clip=0.5, noise_multiplier=4.0, bands=3)  # another one each time: nothing is in its memory
        how = {"privacy": privacy, "checkpoint_every": 1, "secret": b"the same for all", **how}
        return run(method, rounds=rounds, cohort=1, sampling="cyclic", run_dir=tmp_path / folder, **how).weights.params

    whole = played("whole", 5)
    played("cut", 2)
    resumed = played("cut", 5, resume=True)
    assert all(torch.equal(leaf, whole[name]) for name, leaf in resumed.items())


def test_nothing_of_the_noise_is_in_a_checkpoint(tmp_path):
    run(BANDED, run_dir=tmp_path, checkpoint_every=1)
    state = load_checkpoint(tmp_path / "checkpoints" / "round-000003.zip", torch.device("cpu"))
    assert not any(state.server.values())


def test_the_noise_begins_anew_with_a_phase_as_the_accountant_has_it():
    """Phases of two, one and two rounds, everybody in each: rows of 16 and 16 + 8, of 16, and again of 16 and 24."""
    pasts = []

    def noted(state, past):
        pasts.append(len(past))
        return stage.by_round(state, past)

    (stage,) = BANDED.way
    method = dataclasses.replace(BANDED, way=(dataclasses.replace(stage, by_round=noted),))
    phases = (Phase(method, 2), Phase(method, 3), Phase(method))
    made = run(phases, rounds=5, cohort=4, privacy=SEED_IS_PUBLIC).privacy.with_a_secret[0]
    assert pasts == [0, 1, 0, 0, 1]
    pair = (16**2 + (16 + 8) ** 2) / 381  # of the two rows that two rounds show
    alone = 16**2 / 381
    assert made.epsilon == pytest.approx(epsilon_of(1e-5, 2 / math.sqrt(2 * pair + alone)), rel=1e-9)


@pytest.mark.parametrize("options", [{"trust": "nobody"}, {"quantile": 0.5}])
def test_bands_need_one_party_and_one_bound(options):
    with pytest.raises(
        FedstillError, match=r"method\.bands = 2 needs method\.trust = 'server' and no method\.quantile"
    ):
        dp_fedavg(bands=2, **options)


@pytest.mark.parametrize("bands", [0, 65, 2.0])
def test_impossible_bands_are_one_line(bands):
    with pytest.raises(FedstillError, match=r"method\.bands"):
        build_method("dp_fedavg", {"bands": bands})
