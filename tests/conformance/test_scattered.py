"""Every method gives the same bits in one process and with its clients spread over workers."""

from __future__ import annotations

from functools import partial

import pytest
from crews import in_turn, over
from elsewhere import REFINED, RUNS, RecipeOf
from method_rows import ROWS, row_of
from quick import first_quick, quick_if
from toy import same_bits

from fedstill.loop import federate as loop

MIXED = [f"fedaux({REFINED})", "scaffold()", f"feddf({REFINED})"]  # of several networks; "scaffold" is a row


def check_equal(case: str, workers: int) -> None:
    recipe = RecipeOf(case)
    plain, spread = loop.federate(recipe.run()), loop.federate(over(recipe, partial(in_turn, count=workers)))
    assert same_bits(spread.weights, plain.weights)
    assert spread.history.audit == plain.history.audit == []


QUICK = ("fedavg", "scaffold", "fedaux", "fedgen", "mrtf")  # Loopback plays every row in the quick run


@pytest.mark.parametrize(
    "row", quick_if(lambda row: row.name in QUICK and row is row_of(row.name), ROWS), ids=lambda row: row.id
)
def test_a_method_has_the_same_bits_on_workers(row):
    check_equal(row.id, workers=2)


@pytest.mark.parametrize("case", first_quick([*RUNS, *MIXED], 5))
def test_a_mixture_has_the_same_bits_on_workers(case):
    check_equal(case, workers=3)
