"""Every method gives the same bits in one process and on Ray."""

from __future__ import annotations

import pytest
from crews import over
from elsewhere import RUNS, RecipeOf
from method_rows import ROWS, row_of
from on_ray import room_for_two, two_actors  # noqa: F401
from quick import first_quick, quick_if
from test_scattered import MIXED
from toy import same_bits

from fedstill.loop import federate as loop

pytestmark = pytest.mark.ray
FIRST = ("scaffold", "fedlmd", "dp_fedavg")


def check_equal(case, crew) -> None:
    recipe = RecipeOf(case)
    plain, spread = loop.federate(recipe.run()), loop.federate(over(recipe, crew))
    assert same_bits(spread.weights, plain.weights)
    assert spread.history.audit == plain.history.audit == []


@pytest.mark.parametrize(
    "row",
    quick_if(lambda row: row.name in FIRST, [row for row in ROWS if row is row_of(row.name)]),
    ids=lambda row: row.id,
)
def test_a_method_has_the_same_bits_on_ray(row, two_actors):  # noqa: F811
    check_equal(row.id, two_actors)


@pytest.mark.parametrize("case", first_quick([*RUNS, *MIXED], 3))
def test_a_mixture_has_the_same_bits_on_ray(case, two_actors):  # noqa: F811
    check_equal(case, two_actors)
