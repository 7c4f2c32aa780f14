from __future__ import annotations

import re

from deployments import Faulty, a_deployment, opened

from fedstill.core.errors import FedstillError
from fedstill.deploy.metrics import Measure, write_metrics
from fedstill.deploy.server import federate_over

LINE = re.compile(r'[a-z_]+(\{([a-z_]+="(\\.|[^"\\])*",?)*\})? -?[0-9.e+-]+')  # of Prometheus' text format


def test_the_file_is_in_prometheus_text_format_whatever_the_names_are(tmp_path):
    odd = 'a "b" \\ c\nd'
    write_metrics(tmp_path / "m.prom", [Measure("x_total", "counter", "of x", {(("site", odd),): 3, (): 1.5})], run="r")
    assert (tmp_path / "m.prom").read_text() == (
        "# HELP x_total of x\n# TYPE x_total counter\n"
        'x_total{run="r",site="a \\"b\\" \\\\ c\\nd"} 3.0\nx_total{run="r"} 1.5\n'
    )


def test_the_server_counts_answers_failures_and_bytes_of_each_site(tmp_path):
    deployment, seen = a_deployment(tmp_path, rounds=2), {0: 0, 1: 0}

    def fault(order, client, answer):
        if client == 2:
            yield client, FedstillError("away")
        else:
            data = answer()
            seen[client] += len(data) if order < 5 else 0  # the last question comes after the last round
            yield client, data

    federate_over(deployment, Faulty(opened(deployment), fault))
    text = (deployment.run_dir / "metrics.prom").read_text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    run = f'run="{deployment.run}"'
    assert values[f"fedstill_round{{{run}}}"] == "2.0"
    assert values[f"fedstill_accepted{{{run}}}"] == "2.0"
    assert values[f'fedstill_site_failures_total{{{run},site="west"}}'] == "4.0"
    assert values[f'fedstill_site_answers_total{{{run},site="north"}}'] == "4.0"
    assert float(values[f'fedstill_site_received_bytes_total{{{run},site="north"}}']) == seen[0]
    assert all(LINE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
