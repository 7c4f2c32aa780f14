from __future__ import annotations

import os
import socket
import stat
import threading
import time
from contextlib import contextmanager

import pytest

from fedstill.core.errors import FedstillError
from fedstill.deploy import socket as sockets
from fedstill.deploy.socket import LENGTH, Sockets, hand_over, serve

SOON = 10.0  # seconds


class Echo:
    """Answers with what it was given, and counts how many orders it works on at a time."""

    def __init__(self, seconds=0.0):
        self.seconds, self.now, self.most = seconds, 0, 0

    def answer(self, common, own):
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        self.now -= 1
        return common + b"|" + own


@contextmanager
def service(path, desk=None, **how):
    stop, ready = threading.Event(), threading.Event()
    desk = Echo() if desk is None else desk
    thread = threading.Thread(target=serve, args=(desk, path), kwargs={"stop": stop, "ready": ready.set, **how})
    thread.start()
    try:
        assert ready.wait(SOON)
        yield desk
    finally:
        stop.set()
        thread.join(SOON)
        assert not thread.is_alive()


def talk(path):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(SOON)
    with sockets._address(path) as address:
        peer.connect(address)
    return peer


def test_an_order_comes_back_with_its_answer_and_the_socket_goes_with_its_service(tmp_path):
    path = tmp_path / "socket" / "desk.sock"
    with service(path):
        large = os.urandom(3 << 20)
        assert hand_over(path, large, b"own", timeout=SOON) == large + b"|own"
        assert hand_over(path, b"", b"", timeout=SOON) == b"|"
    assert not path.exists()


def test_only_its_user_reaches_the_socket(tmp_path):
    path = tmp_path / "socket" / "desk.sock"
    with service(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_group_may_be_let_in_and_nobody_else(tmp_path):
    import grp

    path = tmp_path / "socket" / "desk.sock"
    with service(path, group=grp.getgrgid(os.getgid()).gr_name):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o710
    with pytest.raises(FedstillError, match="no such group"):
        serve(Echo(), path, group="nobody-has-this-group")


def test_a_name_that_the_system_refuses_as_too_long_is_reached_all_the_same(tmp_path):
    path = tmp_path / ("long" * 30) / "desk.sock"
    with service(path):
        assert hand_over(path, b"a", b"b", timeout=SOON) == b"a|b"


def test_several_callers_are_served_one_order_at_a_time(tmp_path):
    path, answers = tmp_path / "desk.sock", []
    with service(path, Echo(0.05)) as desk:
        callers = [
            threading.Thread(target=lambda n=n: answers.append(hand_over(path, b"%d" % n, b"", timeout=SOON)))
            for n in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(SOON)
    assert sorted(answers) == [b"0|", b"1|", b"2|", b"3|"]
    assert desk.most == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"short",
        LENGTH.pack(1 << 62),
        LENGTH.pack(100) + b"half",
        LENGTH.pack(1) + b"a" + LENGTH.pack(sockets.OWN_LIMIT + 1),
        LENGTH.pack(1) + b"a" + LENGTH.pack(1) + b"b",
    ],
    ids=["nothing", "no length", "too long", "half", "own part too long", "no wish for the answer"],
)
def test_a_peer_that_dies_or_sends_garbage_never_ends_the_service(tmp_path, sent):
    path = tmp_path / "desk.sock"
    with service(path):
        peer = talk(path)
        peer.sendall(sent)
        peer.close()
        assert hand_over(path, b"a", b"b", timeout=SOON) == b"a|b"


def test_silent_peers_hold_no_place_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets, "PATIENCE", 0.1)
    monkeypatch.setattr(sockets, "CONNECTIONS", 2)
    path = tmp_path / "desk.sock"
    with service(path):
        silent = [talk(path) for _ in range(2)]
        assert hand_over(path, b"a", b"b", timeout=SOON) == b"a|b"
        for peer in silent:
            peer.close()


def test_a_desk_that_fails_ends_one_connection_only(tmp_path):
    class Broken(Echo):
        def answer(self, common, own):
            if common == b"bad":
                raise OSError("no space left")
            return super().answer(common, own)

    path = tmp_path / "desk.sock"
    with service(path, Broken()):
        with pytest.raises(FedstillError, match="ended before it answered"):
            hand_over(path, b"bad", b"", timeout=SOON)
        assert hand_over(path, b"a", b"b", timeout=SOON) == b"a|b"


def test_why_there_is_no_answer_is_one_line_without_a_folder(tmp_path):
    path = tmp_path / "desk.sock"
    with pytest.raises(FedstillError, match="is not there: start `fedstill site`") as nobody:
        hand_over(path, b"", b"", timeout=1.0)
    with service(path, Echo(0.5)), pytest.raises(FedstillError, match=r"no answer within 0\.1 seconds") as late:
        hand_over(path, b"", b"", timeout=0.1)
    assert str(tmp_path) not in f"{nobody.value}{late.value}"


def test_the_socket_of_a_killed_service_is_taken_over_and_one_at_work_is_not(tmp_path):
    path = tmp_path / "desk.sock"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()  # as kill -9 leaves it: a file that nobody listens at
    with service(path):
        assert hand_over(path, b"a", b"b", timeout=SOON) == b"a|b"
        with pytest.raises(FedstillError, match="another service listens"):
            serve(Echo(), path)


def test_the_transport_over_sockets_names_who_is_away_and_ends_with_its_deadline(tmp_path):
    paths = {0: tmp_path / "a" / "s", 1: tmp_path / "b" / "s", 2: tmp_path / "c" / "s"}
    with service(paths[0]), service(paths[1], Echo(1.0)):
        began = time.monotonic()
        transport = Sockets(paths, deadline=0.4)
        heard = dict(transport.exchange(b"order", {0: b"0", 1: b"1", 2: b"2", 3: b"3"}))
        assert time.monotonic() - began < 0.9
    assert heard[0] == b"order|0"
    assert "is not there" in str(heard[2])
    assert "away" in str(heard[3])
    assert not isinstance(heard.get(1), bytes)
