"""What the door to the SuperLink lets through."""

from __future__ import annotations

import pytest

from fedstill.deploy.flower.proxy import is_allowed


@pytest.mark.parametrize("name", ["activate-node", "pull-messages", "push-messages", "push-object", "get-fab"])
def test_a_node_may_fetch_and_hand_in(name):
    assert is_allowed("POST", f"/v1/fleet/{name}")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/register-node",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet//control",
        "//v1/fleet/get-fab",
        "/V1/fleet/get-fab",
        "/v1/fleet/get-fab\n",
        "/v1/fleet/",
        "/docs",
        "/",
        "",
    ],
)
def test_nothing_else_is_let_through(path):
    assert not is_allowed("POST", path)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
def test_only_posts_are_let_through(method):
    assert not is_allowed(method, "/v1/fleet/get-fab")
