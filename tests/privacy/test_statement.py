"""Which claims are made, which are not, and what is said about the rest."""

import json

import pytest

from fedstill.core.types import Release
from fedstill.privacy import Stretch, statement

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


def test_a_client_level_claim_is_one_for_each_sample_and_not_the_other_way_round():
    assert of(plain(LOCAL)).claim("sample", "server").epsilon == of(plain(LOCAL)).claim("client", "server").epsilon
    only_samples = Release("model updates", "sample", 2.0, "round", "server", covers=ALL)
    assert of(plain(only_samples)).claim("client", "server") is None
    assert of(plain(only_samples)).claim("sample", "server").complete


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"sealed": True, "individual": True}, "no function of the noisy average"),
        ({"sealed": False}, "nothing keeps the server's other steps from what came without noise"),
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
    assert f"{told} leave without noise and steer the rounds that follow" in made.text()
    assert told in made.not_covered


def test_a_question_that_was_answered_without_a_release_voids_the_rounds():
    assert of(plain(LOCAL, asks=True)).claims == ()
    assert "what clients answer before the first round" in of(plain(LOCAL, asks=True)).text()


def test_scores_of_a_first_preparation_are_claimed_alone_while_models_leave_as_they_are():
    made = of(plain(SCORES))
    claim = made.claim("sample", "server")
    assert claim.covered == ("scores",)
    assert not claim.complete
    assert claim.not_covered == ("trained models", "sizes and losses")
    assert "scores (taken alone)" in made.text()
    assert "NOT protected from the server: trained models; sizes and losses" in made.text()
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
    made = of(plain(LOCAL, SCORES))
    data = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert data["rounds"] == 3
    assert {(one["unit"], one["against"]) for one in data["claims"]} == {
        ("client", "server"),
        ("client", "public"),
        ("sample", "server"),
        ("sample", "public"),
    }
    assert data["claims"][0]["complete"] is False  # the scores are no client-level release
    assert data["text"] == made.text()


def test_a_stronger_noise_for_clients_beside_a_weaker_one_for_samples_gives_two_lines():
    lines = of(plain(LOCAL, SCORES)).text().split("\n")
    assert [line.split(" for ")[1].split(",")[0] for line in lines[:2]] == [
        "all that one client holds",
        "each single sample",
    ]
