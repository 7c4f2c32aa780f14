"""Which claims are made, which are not, and what is said about the rest."""

import json
import math
from dataclasses import replace

import pytest
import torch
from mixed_runs import mixed, network
from mixed_runs import run as run_of_six

from fedstill.about.toy import trial_model
from fedstill.core.tree import byte_size
from fedstill.core.types import Model, Release, Training, Weights
from fedstill.loop.privacy_plan import stretches_of
from fedstill.methods.lookup import build_method
from fedstill.privacy.plan import Privacy
from fedstill.privacy.statement import Stretch, shown, statement

DELTA = 1e-5
ALL = ("model", "buffers", "numbers")
LEAVES = {"model": "trained models", "numbers": "sizes and losses"}
CENTRAL = Release("model updates", "client", 2.0, "round", "public", covers=ALL)
LOCAL = Release("model updates", "client", 2.0, "round", "server", covers=ALL)
SCORES = Release("scores", "sample", 3.0, "once", "server")


def of(*stretches: Stretch):
    return statement(stretches, DELTA)


def plain(*releases, rounds=3, **facts) -> Stretch:
    return Stretch(releases, rounds, facts.pop("leaves", LEAVES), **facts)


def test_noise_by_clients_holds_against_the_server_and_so_against_everybody():
    made = of(plain(LOCAL))
    server, public = made.claim("client", "server"), made.claim("client", "public")
    assert server.epsilon == public.epsilon
    assert server.complete
    assert public.complete
    assert made.strongest() == (server,)
    assert made.not_covered == ()
    assert made.text().startswith("epsilon = ")
    assert "NOT protected" not in made.text()


def test_noise_by_a_trusted_server_holds_against_the_others_only():
    made = of(plain(CENTRAL, sealed=True))
    assert made.claim("client", "server") is None
    assert made.claim("client", "public").complete
    assert "which must be trusted" in made.text()
    assert "NOT protected from the server: trained models; sizes and losses" in made.text()
    assert "from anybody" not in made.text()


def test_a_client_level_claim_is_one_for_each_sample_and_not_the_other_way_round():
    assert of(plain(LOCAL)).claim("sample", "server").epsilon == of(plain(LOCAL)).claim("client", "server").epsilon
    only_samples = Release("model updates", "sample", 2.0, "round", "server", covers=ALL)
    assert of(plain(only_samples)).claim("client", "server") is None
    assert of(plain(only_samples)).claim("sample", "server").complete


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"sealed": True, "individual": True}, "not from the noisy average alone"),
        ({"sealed": False}, "nothing keeps the server's other steps from the uploads without noise"),
    ],
)
def test_a_trusted_servers_noise_is_void_when_its_steps_look_past_it(facts, why):
    made = of(plain(CENTRAL, **facts))
    assert made.claims == ()
    assert why in made.text()
    assert made.text().startswith("no claim")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("extra", "control_delta"),
        ("buffers", "BatchNorm statistics"),
        ("label_counts", "label counts"),
        ("numbers", "sizes"),
    ],
)
def test_one_thing_that_leaves_without_noise_voids_the_rounds_since_it_steers_them(part, told):
    covers = tuple(name for name in ALL if name != part)
    release = Release("model updates", "client", 2.0, "round", "server", covers=covers)
    made = of(plain(release, leaves={"model": "trained models", part: told}))
    assert made.claims == ()
    assert f"{told} leave without noise and steer what follows" in made.text()
    assert told in made.not_covered


def test_a_question_that_was_answered_without_a_release_voids_the_rounds():
    assert of(plain(LOCAL, asks=True)).claims == ()
    assert "the clients' answers before the first round" in of(plain(LOCAL, asks=True)).text()


def test_scores_of_a_first_preparation_are_claimed_alone_while_models_leave_as_they_are():
    made = of(plain(SCORES))
    claim = made.claim("sample", "server")
    assert claim.covered == ("scores",)
    assert not claim.complete
    assert claim.not_covered == ("trained models", "sizes and losses")
    assert "scores (nothing else that leaves is covered)" in made.text()
    assert "NOT protected from anybody: trained models; sizes and losses" in made.text()
    assert made.claim("client", "server") is None


def test_after_rounds_without_noise_nothing_is_claimed_any_more():
    made = of(plain(), plain(LOCAL, SCORES))
    assert made.claims == ()
    assert "left without noise in the rounds before" in made.text()


def test_rounds_without_noise_after_private_ones_leave_the_claim_about_those_and_say_so():
    alone, followed = of(plain(LOCAL)), of(plain(LOCAL), plain())
    assert followed.claim("client", "server").epsilon == alone.claim("client", "server").epsilon
    assert not followed.claim("client", "server").complete
    assert "trained models" in followed.not_covered


def test_methods_in_turn_add_up():
    assert of(plain(LOCAL), plain(LOCAL)).claim("client", "server").epsilon == pytest.approx(
        of(plain(LOCAL, rounds=6)).claim("client", "server").epsilon
    )


def test_a_release_without_a_claim_says_why():
    none = Release("scores", "sample", None, "once", "server", why="the sum form has no bound")
    made = of(plain(none))
    assert made.claims == ()
    assert "no claim for scores: the sum form has no bound" in made.text()
    assert "scores" in made.not_covered


def test_what_a_claim_rests_on_is_written_down():
    rests = Release("scores", "sample", 3.0, "once", "server", why="features are clipped to a public bound")
    assumptions = of(plain(rests)).assumptions
    assert "scores: features are clipped to a public bound" in assumptions
    assert any("seed" in line for line in assumptions)
    assert any("run's folder" in line for line in assumptions)


def test_a_statement_is_plain_data():
    made = of(plain(LOCAL), plain(LOCAL, SCORES))
    data = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert data["rounds"] == 6
    assert {(one["unit"], one["against"]) for one in data["claims"]} == {
        ("client", "server"),
        ("client", "public"),
        ("sample", "server"),
        ("sample", "public"),
    }
    assert data["claims"][0]["complete"] is False  # scores of the second method are no client-level release
    assert data["text"] == made.text()


def test_noise_for_clients_before_a_method_that_protects_samples_gives_two_lines():
    lines = of(plain(LOCAL), plain(LOCAL, SCORES)).text().split("\n")
    assert [line.split(" for ")[1].split(",")[0] for line in lines[:2]] == [
        "all that one client holds",
        "each single sample",
    ]


VOID = Release("scores", "sample", None, "once", "server", why="no noise")
DP_AND_FEDAUX = 'dp_fedavg(trust="nobody", noise_multiplier=8)+fedaux({})'


def after_ten_rounds(options: str):
    phases, weights = build_method(DP_AND_FEDAUX.format(options)), Weights({"w": torch.zeros(3, 2)}, {})
    return statement(stretches_of(phases, weights, Privacy())(10), DELTA)


@pytest.mark.parametrize("options", ["", 'scorer="kde"', "intercept=true"])
def test_scores_without_a_claim_void_the_rounds_that_they_steer(options):
    """It said epsilon = 3.341 for all that one client holds, against the server: false, the shares are open."""
    made = after_ten_rounds(options)
    assert made.claims == ()
    assert "no claim for model updates: certainty scores leave without noise and steer what follows" in made.text()
    assert made.not_covered == ("model updates", "certainty scores")


def test_scores_that_hide_samples_leave_the_claim_for_samples_and_void_the_one_for_clients():
    """Ten rounds of multiplier 4 (3.3414 alone), and scores of multiplier 3.7306: dp-accounting says 3.5557."""
    made = after_ten_rounds(', form="mean", epsilon=1.0')
    assert {(one.unit, one.against) for one in made.claims} == {("sample", "server"), ("sample", "public")}
    assert made.claim("sample", "server").epsilon == pytest.approx(3.5557, abs=1e-4)
    assert made.claim("sample", "server").complete


def test_what_is_sent_once_without_a_claim_voids_later_methods_and_what_else_is_sent_once():
    for later in (of(plain(VOID), plain(LOCAL)), of(plain(VOID, LOCAL), plain(LOCAL))):
        assert later.claims == ()
    assert of(plain(VOID, replace(SCORES, what="other scores"))).claims == ()
    assert of(plain(SCORES, asks=True)).claims == ()
    assert of(plain(SCORES, rounds=0), plain(LOCAL)).claim("client", "server") is None


def test_rounds_that_are_covered_in_the_first_method_alone_are_told_as_such():
    made = of(plain(LOCAL), plain(LOCAL, VOID))
    claim = made.claim("client", "server")
    assert claim.epsilon == of(plain(LOCAL)).claim("client", "server").epsilon
    assert claim.covered == ("model updates until round 3",)
    assert set(claim.not_covered) == {"model updates", "scores"}


def test_a_shown_epsilon_is_never_below_the_true_one():
    """1/3 and 2/3 of a last digit go up alike; 1e-9 of an epsilon is not more than it can be computed to."""
    found = [shown(one) for one in (3.34133, 3.34167, 969.61, 0.00654211, 12345.6, 1.0 + 1e-12, 0.0, math.inf)]
    assert found == ["3.342", "3.342", "969.7", "0.006543", "1.235e+04", "1", "0", "inf"]
    assert "epsilon = 3.342 at" in of(Stretch((replace(LOCAL, multiplier=4.0),), 10, LEAVES)).text()  # 3.34141


def test_a_statement_says_that_runs_add_up_and_that_a_client_holds_something():
    sealed, local = of(plain(CENTRAL, sealed=True)).assumptions, of(plain(LOCAL)).assumptions
    for told in ("several on the same data", "each holds at least one sample"):
        assert any(told in line for line in sealed)
        assert any(told in line for line in local)
    assert any("a quorum above 1 is refused" in line for line in sealed)
    assert not any("quorum" in line for line in local)


# Methods in turn: until when something is covered, and from whom what comes later is not protected.

CLIPPED_SCORES = Release("scores", "sample", 3.0, "once", "server", why="features are clipped")


def test_a_trusted_servers_noise_and_then_none_is_open_to_everybody_from_then_on():
    """It said NOT protected from the server only, and nothing of round 3."""
    phases = build_method("dp_fedavg(clip=0.5,noise_multiplier=4.0) until 3 then fedavg")
    made = statement(stretches_of(phases, Weights({"w": torch.zeros(3, 2)}, {}), Privacy())(6), DELTA)
    claim, anybody, server = made.text().split("\n")
    assert claim.endswith("must be trusted: model updates until round 3 (nothing else that leaves is covered)")
    rest = "trained models; numbers of samples and steps, training losses"
    assert anybody == f"NOT protected from anybody from round 4 on: {rest}"
    assert server == f"NOT protected from the server: {rest}"


def test_clients_own_noise_and_then_none_is_one_line_for_everybody():
    claim, anybody = of(plain(LOCAL), plain()).text().split("\n")
    assert "the server included: model updates until round 3 (nothing" in claim
    assert anybody == "NOT protected from anybody from round 4 on: trained models; sizes and losses"


def test_clients_own_noise_and_then_a_trusted_servers_is_open_to_the_server_from_then_on():
    made = of(plain(LOCAL), plain(CENTRAL, sealed=True))
    assert made.claim("client", "public").covered == ("model updates",)
    assert made.claim("client", "public").complete
    assert made.claim("client", "server").covered == ("model updates until round 3",)
    assert "NOT protected from the server from round 4 on: trained models; sizes and losses" in made.text()
    assert "from anybody" not in made.text()


def test_what_is_sent_once_has_no_last_round_and_what_is_covered_to_the_end_neither():
    assert of(plain(CLIPPED_SCORES), plain()).claim("sample", "server").covered == ("scores",)
    assert of(plain(LOCAL), plain(LOCAL)).claim("client", "server").covered == ("model updates",)
    assert of(plain(LOCAL), plain(rounds=0)).claim("client", "server").covered == ("model updates",)


def test_things_that_are_open_from_different_rounds_on_have_a_line_each():
    more = {**LEAVES, "extra": "control"}
    lines = of(plain(CLIPPED_SCORES), plain(leaves=more)).text().split("\n")
    assert lines[1:] == [
        "NOT protected from anybody: trained models; sizes and losses",
        "NOT protected from anybody from round 4 on: control",
    ]


def test_what_a_claim_about_the_first_rounds_rests_on_is_written_down_too():
    rests = replace(LOCAL, why="moves are clipped")
    assert "model updates: moves are clipped" in of(plain(rests), plain()).assumptions


def test_plain_data_say_against_whom_a_claim_is_complete_and_what_is_open_to_whom():
    data = of(plain(CENTRAL, sealed=True)).as_dict()
    assert {one["complete_against"] for one in data["claims"]} == {"everybody but the server, which must be trusted"}
    assert data["open_to_public"] == {}
    assert data["open_to_server"] == {"trained models": 1, "sizes and losses": 1}
    assert data["not_covered"] == ("trained models", "sizes and losses")
    (local, *_) = of(plain(LOCAL)).as_dict()["claims"]
    assert local["complete_against"] == "everybody, the server included"
    followed = of(plain(LOCAL), plain()).as_dict()
    assert {one["complete_against"] for one in followed["claims"]} == {None}
    assert followed["open_to_public"] == {"trained models": 4, "sizes and losses": 4}


# Where clients train the head alone, the statement names what leaves them then: heads, and no BatchNorm statistics.

HEADS, WHOLE = Training(batch_size=8, lr=0.05, part="head"), Training(batch_size=8, lr=0.05)

FEDAUX = 'fedaux(student.steps=2, form="mean", epsilon=1.0, student.part="{}")'

NUMBERS = "numbers of samples and steps, training losses"

NORMED = network("b")


def run(model: Model, training: Training, method: str = FEDAUX):
    return run_of_six(method.format(training.part), model, training=training, rounds=1)


def test_statistics_that_stay_with_a_client_are_not_said_to_leave_it():
    whole, heads = run(NORMED, WHOLE), run(NORMED, HEADS)
    assert whole.privacy.not_covered == ("trained models", NUMBERS, "BatchNorm statistics")
    assert heads.privacy.not_covered == ("trained heads", NUMBERS)
    assert f"NOT protected from anybody: trained heads; {NUMBERS}" in heads.privacy.text()
    assert heads.history.bytes_up < 6 * byte_size(NORMED.init(0).buffers) < whole.history.bytes_up


def test_each_of_several_architectures_sends_its_head():
    assert run(mixed(), WHOLE).privacy.not_covered == ("trained models", NUMBERS, "BatchNorm statistics")
    assert run(mixed(), HEADS).privacy.not_covered == ("trained heads", NUMBERS)


def test_a_model_without_statistics_says_heads_too():
    assert run(trial_model(), HEADS).privacy.not_covered == ("trained heads", NUMBERS)


@pytest.mark.parametrize(("training", "trained"), [(WHOLE, "trained models"), (HEADS, "trained heads")])
def test_what_a_method_sends_beside_the_model_is_told_all_the_same(training, trained):
    told = run(trial_model(), training, FEDAUX + "+scaffold").privacy.not_covered
    assert told == (trained, NUMBERS, "control_delta")
