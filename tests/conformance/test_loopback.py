"""Every method gives the same bits in one process and over the wire.

Over the wire a client has its own rows and its own memories, orders and answers are bytes, and the server has no rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mixed_runs
import pytest
from elsewhere import REFINED, RUNS, a_run
from method_rows import ROWS, Row, is_first, network
from quick import first_quick, quick_if
from toy import same_bits

from fedstill.loop import federate as loop
from fedstill.loop.federate import Built
from fedstill.loop.history import Result
from fedstill.methods.lookup import build_method
from fedstill.population import over_loopback


def both_ways(here: Built, folder: Path) -> tuple[Result, Result]:
    """Play a run in one process, and over the wire; nothing is refused in either."""
    plain, wired = loop.federate(here), loop.federate(over_loopback(here, folder))
    assert plain.history.audit == wired.history.audit == []
    assert all(row["accepted"] == row["cohort"] for row in wired.history.rows)
    return plain, wired


def has_secret_noise(row: Row) -> bool:
    """Whether noise covers what clients send: clients draw it from their secrets, a simulation from its seed.

    DP-FedAvg's noise in the server comes from a seed that follows from all rows of a simulation; a server has none.
    """
    return row.id == "update_noise" or any(release.multiplier is not None for release in row.build().releases)


@pytest.mark.parametrize("row", quick_if(is_first, ROWS), ids=lambda row: row.id)
def test_a_method_has_the_same_bits_over_the_wire(row, tmp_path):
    plain, wired = both_ways(a_run(row.build(), row.net), tmp_path)
    assert same_bits(wired.weights, plain.weights) != has_secret_noise(row)


@pytest.mark.parametrize("how", first_quick(RUNS, 4))
def test_a_mixture_has_the_same_bits_over_the_wire(how, tmp_path):
    changes = dict(RUNS[how])
    plain, wired = both_ways(a_run(build_method(changes.pop("method")), **changes), tmp_path)
    assert same_bits(wired.weights, plain.weights)


@pytest.mark.parametrize("method", first_quick([f"fedaux({REFINED})", "scaffold", f"feddf({REFINED})"]))
def test_clients_of_several_networks_have_the_same_bits_over_the_wire(method, tmp_path):
    here = a_run(
        build_method(method), model=mixed_runs.mixed(), federation=mixed_runs.federation(), cohort=6, rounds=2,
    )  # fmt: skip
    plain, wired = both_ways(here, tmp_path)
    assert same_bits(wired.weights, plain.weights)


def test_frozen_tensors_do_not_travel_and_a_client_with_others_refuses(tmp_path):
    here = a_run(build_method("fedavg"), net="adapted")
    wired = over_loopback(here, tmp_path)
    other = replace(wired, start=network("adapted").init(99))
    result = loop.federate(other)
    assert all(row["accepted"] == 0 for row in result.history.rows)
    assert any("the server's model has other frozen tensors" in line["reason"] for line in result.history.audit)
