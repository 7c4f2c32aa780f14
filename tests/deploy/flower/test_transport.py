"""Orders and answers over a grid that is Flower's in form, and delivers as a test says."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower import transport as module
from fedstill.deploy.flower.transport import ANSWER, COMMON, OWN, Gone, OverFlower, bytes_of, record_of

pytestmark = pytest.mark.flower
ROSTER = {b"key a": 0, b"key b": 1, b"key c": 2}
NODES = {b"key a": 71, b"key b": 72, b"key c": 73}


def upper(message):
    """Answer as a site that sets everything in capitals."""
    from flwr.app import Message, RecordDict

    data = bytes_of(message.content[COMMON]) + bytes_of(message.content[OWN])
    return Message(RecordDict({ANSWER: record_of(data.upper())}), reply_to=message)


def failed(code):
    from flwr.app import Error, Message

    return lambda message: Message(Error(code=code, reason="what Flower says"), reply_to=message)


class Grid:
    """A grid whose nodes answer by a function each: it gives a reply, None for none, or an exception."""

    def __init__(self, **sites):
        self.sites = {NODES[f"key {name}".encode()]: site for name, site in sites.items()}
        self.since = dict.fromkeys(self.sites, "monday")
        self.sent, self.pulls = {}, 0

    def get_nodes(self):
        keys = {node: key for key, node in NODES.items()}
        return [
            SimpleNamespace(node_id=node, public_key=keys[node] + b"\n", last_activated_at=since, name="client 2")
            for node, since in self.since.items()
        ]

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = f"message {len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent[name] = message
            names.append(name)
        return names

    def pull_messages(self, names):
        self.pulls += 1
        replies = []
        for name in names:
            message = self.sent[name]
            reply = self.sites[message.metadata.dst_node_id](message)
            if isinstance(reply, Exception):
                raise reply
            if reply is not None:
                reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
                replies.append(reply)
        return replies


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)  # Flower sets them where it starts a ServerApp
    monkeypatch.setattr(module, "POLL", 0.005)
    monkeypatch.setattr(module, "LOOK_AT_NODES", 0.01)


def exchanged(grid, deadline=0.3, clients=(0, 1, 2)):
    each = {client: f" for {client}".encode() for client in clients}
    return dict(OverFlower(grid, ROSTER, deadline=deadline).exchange(b"order", each))


def test_each_client_gets_the_order_and_its_own_part_by_its_key():
    assert exchanged(Grid(a=upper, b=upper, c=upper)) == {0: b"ORDER FOR 0", 1: b"ORDER FOR 1", 2: b"ORDER FOR 2"}


def test_a_key_that_the_roster_does_not_name_is_nobody():
    grid = Grid(a=upper, b=upper)
    assert OverFlower(grid, {b"key a": 0}, deadline=1.0).connected().keys() == {0}


def test_a_client_whose_node_is_not_connected_is_left_out_at_once():
    began = time.monotonic()
    answers = exchanged(Grid(a=upper, b=upper), deadline=30.0)
    assert (answers[0], answers[1]) == (b"ORDER FOR 0", b"ORDER FOR 1")
    assert str(answers[2]) == "its SuperNode is not connected"
    assert time.monotonic() - began < 5


def test_the_common_part_is_one_object_for_all_nodes():
    grid = Grid(a=upper, b=upper)
    exchanged(grid, clients=(0, 1))
    first, second = (message.content for message in grid.sent.values())
    assert first[COMMON].object_id == second[COMMON].object_id
    assert first[OWN].object_id != second[OWN].object_id


def test_an_order_lives_as_long_as_its_deadline():
    grid = Grid(a=upper)
    exchanged(grid, deadline=40.0, clients=(0,))
    assert 39 < next(iter(grid.sent.values())).metadata.ttl <= 40


def test_a_failed_app_is_an_exception_and_the_others_answer():
    answers = exchanged(Grid(a=failed(7), b=upper), clients=(0, 1))
    assert "Flower's error 7" in str(answers[0])
    assert "what Flower says" not in str(answers[0])  # it may hold a path of the site
    assert answers[1] == b"ORDER FOR 1"


@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_an_order_that_was_lost_goes_out_again(code):
    tries = []

    def lost_once(message):
        tries.append(message)
        return failed(code)(message) if len(tries) == 1 else upper(message)

    assert exchanged(Grid(a=lost_once), clients=(0,)) == {0: b"ORDER FOR 0"}
    assert bytes_of(tries[0].content[COMMON]) == bytes_of(tries[1].content[COMMON])


def test_a_node_that_was_started_again_gets_the_order_again():
    grid = Grid(a=upper)

    def away_until_tuesday(message):
        grid.since[71] = "tuesday"
        return upper(message) if message is not first(grid) else None

    grid.sites[71] = away_until_tuesday
    assert exchanged(grid, deadline=5.0, clients=(0,)) == {0: b"ORDER FOR 0"}
    assert len(grid.sent) == 2


def first(grid):
    return next(iter(grid.sent.values()))


def test_why_an_order_was_lost_is_said_at_the_deadline():
    answers = exchanged(Grid(a=failed(5)), clients=(0,))
    assert str(answers[0]) == "no answer before the deadline: its SuperNode went away"


def test_a_broken_answer_harms_nobody_else():
    answers = exchanged(Grid(a=lambda message: ValueError("no such object"), b=upper), clients=(0, 1))
    assert "cannot be read: ValueError" in str(answers[0])
    assert answers[1] == b"ORDER FOR 1"


def other_records(message):
    from flwr.app import ConfigRecord, Message, RecordDict

    return Message(RecordDict({ANSWER: ConfigRecord({"bytes": b"model"})}), reply_to=message)


def no_records(message):
    from flwr.app import Message, RecordDict

    return Message(RecordDict({}), reply_to=message)


def an_array_of_numbers(message):
    import numpy as np
    from flwr.app import Array, ArrayRecord, Message, RecordDict

    return Message(RecordDict({ANSWER: ArrayRecord({"bytes": Array(np.ones(3))})}), reply_to=message)


@pytest.mark.parametrize("odd", [other_records, no_records, an_array_of_numbers])
def test_an_answer_of_another_form_is_refused(odd):
    assert "something else than a parcel" in str(exchanged(Grid(a=odd), clients=(0,))[0])


def test_an_answer_in_another_nodes_name_is_refused():
    grid = Grid(a=upper)
    delivered = grid.pull_messages

    def forged(names):
        replies = delivered(names)
        for reply in replies:
            reply.metadata.__dict__["_src_node_id"] = 72
        return replies

    grid.pull_messages = forged
    assert "another node" in str(exchanged(grid, clients=(0,))[0])


def test_a_client_that_is_silent_is_not_yielded_and_the_deadline_ends_the_round():
    began = time.monotonic()
    assert exchanged(Grid(a=lambda message: None, b=upper), clients=(0, 1)) == {1: b"ORDER FOR 1"}
    assert 0.25 < time.monotonic() - began < 3


def test_who_has_not_answered_at_half_the_deadline_is_named_once(caplog):
    grid = Grid(a=upper, b=lambda message: None, c=upper)
    over = OverFlower(grid, ROSTER, deadline=2.0, names=("north", "south", "west"))
    dict(over.exchange(b"order", {0: b"", 1: b"", 2: b""}))
    assert [record.getMessage() for record in caplog.records if "south" in record.getMessage()] == [
        "no answer from south after 1 s of at most 2 s"
    ]


def test_a_node_without_its_site_is_said_to_be_so():
    answers = exchanged(Grid(a=upper, b=failed(2), c=upper))
    assert "no `fedstill site` answers" in str(answers[1])


def test_who_stops_early_asks_no_more():
    grid = Grid(a=upper, b=lambda message: None)
    answers = OverFlower(grid, ROSTER, deadline=30.0).exchange(b"order", {0: b"", 1: b""})
    assert next(answers) == (0, b"ORDER")
    answers.close()
    pulls = grid.pulls
    time.sleep(0.05)
    assert grid.pulls == pulls


@pytest.mark.parametrize("call", ["get_nodes", "push_messages", "pull_messages"])
def test_without_a_superlink_the_run_ends(call, monkeypatch):
    import httpx
    from flwr.supercore.run import RunNotRunningException

    for error in (httpx.ConnectError("refused"), RunNotRunningException()):
        grid = Grid(a=upper)

        def broken(*_, error=error):
            raise error

        monkeypatch.setattr(grid, call, broken)
        with pytest.raises(Gone, match=f"the SuperLink is gone: {type(error).__name__}"):
            exchanged(grid, clients=(0,))


def test_the_server_waits_until_all_are_connected():
    grid = Grid(a=upper, b=upper)
    over = OverFlower(grid, ROSTER, deadline=1.0)
    assert over.wait_for({0, 1}, 10.0) == set()
    assert over.wait_for({0, 2}, 0.05) == {2}


def test_bytes_come_back_as_they_were():
    assert bytes_of(record_of(bytes(range(256)))) == bytes(range(256))
    assert bytes_of(record_of(b"")) == b""


def test_lost_is_a_mistake_of_one_line():
    assert issubclass(module.Lost, FedstillError)
