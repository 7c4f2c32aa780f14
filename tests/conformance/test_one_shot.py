"""One-shot: a single round in which everybody takes part is a run like any other, for every method."""

from __future__ import annotations

import math

import pytest
from method_rows import ROWS, SIZES, is_first, network, run
from quick import quick_if
from toy import same_bits

from fedstill.core.seeds import seed_for
from fedstill.core.tree import leaves


@pytest.mark.parametrize("row", quick_if(is_first, ROWS), ids=lambda row: row.id)
def test_one_round_is_a_run(row):
    net = getattr(row, "net", "mlp")
    result = run(row.build(), net=net, rounds=1, cohort=len(SIZES))
    (line,) = result.history.rows
    assert line["accepted"] == line["cohort"] == len(SIZES)
    assert math.isfinite(line["train_loss"])
    assert 0.0 <= line["accuracy"] <= 1.0
    assert result.audit == []
    assert all(bool(leaf.isfinite().all()) for leaf in leaves(result.weights) if leaf.is_floating_point())
    assert not same_bits(result.weights.params, network(net).init(seed_for(5, "model")).params)
    # the only evaluated model is the last and the best one, whichever of the server's it is
    assert same_bits(result.weights, result.best_weights)
    assert result.history.best is result.history.last is line
    summary = result.summary()
    assert summary["accuracy_last"] == summary["accuracy_best"] == result.history.mean_last(10) == line["accuracy"]
