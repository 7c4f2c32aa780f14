from __future__ import annotations

import json
import threading

import pytest
from deployments import a_deployment, opened

from fedstill.core.errors import FedstillError
from fedstill.deploy.folder import read_site
from fedstill.deploy.server import federate_over
from fedstill.deploy.site import open_site, serve_site
from fedstill.deploy.socket import Sockets, hand_over

SOON = 20.0  # seconds


@pytest.fixture
def deployment(tmp_path):
    return a_deployment(tmp_path, rounds=2)


def serving(sites, told):
    """Serve all sites in threads; return a function that ends them."""
    stop, threads = threading.Event(), []
    for site in sites.values():
        ready = threading.Event()

        def tell(line, name=site.folder.name, ready=ready):
            told.append((name, line))
            ready.set()

        threads.append(threading.Thread(target=serve_site, args=(site,), kwargs={"tell": tell, "stop": stop}))
        threads[-1].start()
        assert ready.wait(SOON)

    def end():
        stop.set()
        for thread in threads:
            thread.join(SOON)

    return end


def test_sites_answer_a_run_at_their_sockets_and_say_a_line_for_each_order(deployment):
    sites, told = opened(deployment), []
    end = serving(sites, told)
    try:
        transport = Sockets({client: site.folder.socket for client, site in sites.items()}, deadline=SOON)
        result = federate_over(deployment, transport)
    finally:
        end()
    assert [row["accepted"] for row in result.history.rows] == [3, 3]
    north = [line for name, line in told if name == "north"]
    assert north[0].startswith("ready: north waits")
    assert [line.split(": answered")[0] for line in north[1:]] == [
        "round 1: trained", "round 1: question 'evaluation'", "round 2: trained",
        "round 2: question 'evaluation'", "round 2: question 'evaluation'",
    ]  # fmt: skip


def test_the_audit_of_a_site_has_a_line_for_each_order_with_the_bytes_that_left(deployment):
    sites = opened(deployment)
    end = serving(sites, [])
    try:
        transport = Sockets({client: site.folder.socket for client, site in sites.items()}, deadline=SOON)
        federate_over(deployment, transport)
        refusal = hand_over(sites[0].folder.socket, b"no order", b"", timeout=SOON)
    finally:
        end()
    lines = [json.loads(line) for line in (sites[0].folder.memory / "audit.jsonl").read_text().splitlines()]
    assert [line["sent"] for line in lines] == ["upload", "answer", "upload", "answer", "answer", "refused"]
    assert lines[-1]["bytes_out"] == len(refusal)
    text = (sites[0].folder.folder / "metrics.prom").read_text()
    assert 'fedstill_site_answers_total{run="' in text
    assert 'site="north",kind="refused"} 1.0' in text


def test_two_services_over_one_memory_are_refused(deployment):
    site = {0: open_site(read_site(deployment.site_folder("north")))}
    end = serving(site, [])
    try:
        with pytest.raises(FedstillError, match="at work already"):
            serve_site(site[0], tell=lambda line: None)
    finally:
        end()


def test_a_site_reads_its_rows_and_keeps_them_from_the_orders(deployment):
    """The federation of a desk has this site's rows only, and holds back a fifth of each class to measure on."""
    site = open_site(read_site(deployment.site_folder("west")))
    federation = site.desk.task.federation
    assert federation.offsets.tolist() == [0, 0, 0, 16]
    assert len(federation.train.y) == 20
    held = set(federation.client_test[0].tolist())
    assert len(held) == 4
    assert held.isdisjoint(federation.indices.tolist())
