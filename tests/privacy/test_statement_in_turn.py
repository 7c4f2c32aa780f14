"""Methods in turn: until when something is covered, and from whom what comes later is not protected."""

from dataclasses import replace

import torch

from fedstill.core.types import Release, Weights
from fedstill.loop.privacy_plan import stretches_of
from fedstill.methods.lookup import build_method
from fedstill.privacy import Privacy, Stretch, statement

DELTA = 1e-5
LEAVES = {"model": "trained models", "numbers": "sizes and losses"}
ALL = ("model", "buffers", "numbers")
CENTRAL = Release("model updates", "client", 2.0, "round", "public", covers=ALL)
LOCAL = Release("model updates", "client", 2.0, "round", "server", covers=ALL)
SCORES = Release("scores", "sample", 3.0, "once", "server", why="features are clipped")


def of(*stretches: Stretch):
    return statement(stretches, DELTA)


def plain(*releases, rounds=3, **facts) -> Stretch:
    return Stretch(releases, rounds, facts.pop("leaves", LEAVES), **facts)


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
    assert of(plain(SCORES), plain()).claim("sample", "server").covered == ("scores",)
    assert of(plain(LOCAL), plain(LOCAL)).claim("client", "server").covered == ("model updates",)
    assert of(plain(LOCAL), plain(rounds=0)).claim("client", "server").covered == ("model updates",)


def test_things_that_are_open_from_different_rounds_on_have_a_line_each():
    more = {**LEAVES, "extra": "control"}
    lines = of(plain(SCORES), plain(leaves=more)).text().split("\n")
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
