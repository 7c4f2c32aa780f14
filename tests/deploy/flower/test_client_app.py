"""The app at a site: it loads nothing heavy, and waits for a daemon that is started again."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower import client_app as module
from fedstill.deploy.socket import NotThere


def service(monkeypatch, *outcomes):
    left = list(outcomes)

    def hand_over(path, common, own, *, timeout):
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(module, "hand_over", hand_over)
    monkeypatch.setattr(module, "TRY_AGAIN", 0.01)
    return left


def patient(seconds):
    return module.patient(Path("desk.sock"), b"common", b"own", ends=time.time() + seconds)


def test_a_daemon_that_was_killed_gets_the_order_again(monkeypatch):
    left = service(monkeypatch, NotThere("not there"), NotThere("ended"), b"answer")
    assert patient(5) == b"answer"
    assert left == []


def test_the_deadline_ends_the_waiting(monkeypatch):
    service(monkeypatch, *[NotThere("not there")] * 1000)
    began = time.monotonic()
    with pytest.raises(NotThere):
        patient(0.1)
    assert time.monotonic() - began < 3


def test_what_no_second_try_mends_is_said_at_once(monkeypatch):
    left = service(monkeypatch, FedstillError("may not be opened by this user"), b"answer")
    with pytest.raises(FedstillError, match="may not be opened"):
        patient(5)
    assert left == [b"answer"]


def test_it_loads_no_torch():
    code = "import sys, fedstill.deploy.flower.client_app; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
