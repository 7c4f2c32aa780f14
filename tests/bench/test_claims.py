"""Claims of papers: differences of runs with equal seeds, and the word that follows; the numbers are done by hand."""

import pytest
from bench_cases import EXPECTED, recipe_of, run_of, small, write_paper

from fedstill.bench import Cell
from fedstill.bench.claims import Claim, Difference, judge, load_claims, our_words, paper_words, verdict
from fedstill.bench.recipe import load_expected, load_recipe
from fedstill.core.errors import FedstillError

CELLS = {row: Cell(row, "digits", small(rounds=2, method=row, target=0.5)) for row in ("fedavg", "fedprox")}
CLAIM = """
[[claim]]
table = "1"
column = "digits"
setting = "digits"
order = ["fedprox > fedavg"]
measure = "best"
"""


def pair(*by_seed):
    return Difference("a", "b", by_seed)


def claim(measure="best", order="fedprox > fedavg"):
    return Claim(table="1", column="digits", setting="", order=[order], measure=measure)


def runs(**accuracies):
    """Runs of each row, one curve a seed."""
    return [
        {**run_of(CELLS[row].experiment, curve), "seed": seed}
        for row, curves in accuracies.items()
        for seed, curve in enumerate(curves)
    ]


def finding(measure="best", **accuracies):
    return judge(claim(measure), recipe_of(*CELLS.values()), runs(**accuracies), {})


def test_the_interval_is_the_t_interval_of_the_mean():
    low, high = pair(1.0, 2.0, 3.0).interval  # mean 2, deviation 1, t of two degrees of freedom 4.3027
    assert (low, high) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)


SURE, LIKELY_NOT, REFUTED = pair(9.0, 10.0, 11.0), pair(-9.0, 1.0, 10.0), pair(-9.0, -10.0, -11.0)


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([SURE, SURE], "holds"),
        ([SURE, LIKELY_NOT], "holds in part"),
        ([SURE, REFUTED], "holds in part"),
        ([LIKELY_NOT, REFUTED], "contradicted"),
        ([LIKELY_NOT], "not shown"),
        ([pair(50.0)], "not shown"),
        ([pair(-50.0, -51.0)], "not shown"),
        ([pair()], "not shown"),
        ([SURE, pair()], "holds in part"),
        ([], "not shown"),
    ],
)
def test_the_verdict_follows_from_the_intervals(differences, word):
    assert verdict(differences) == word


def test_methods_are_compared_by_the_runs_of_equal_seeds():
    one = finding(fedavg=[[30.0, 20.0], [10.0, 11.0]], fedprox=[[31.0, 32.0], [9.0, 10.0], [90.0, 99.0]])
    assert one.differences[0].by_seed == [2.0, -1.0]


def test_the_last_rounds_and_the_rounds_to_the_target_are_other_measures():
    curves = {"fedavg": [[20.0, 50.0]], "fedprox": [[60.0, 40.0]]}
    assert finding("last", **curves).differences[0].by_seed == [15.0]
    assert finding("rounds", **curves).differences[0].by_seed == [1], "one round fewer to 50 %"
    assert finding("rounds", fedavg=[[1.0, 2.0]], fedprox=[[60.0, 40.0]]).differences[0].by_seed == []


def test_a_method_is_compared_with_the_average_that_it_distils():
    distilled = {"beside": {"accuracy_aggregated": [30.0, None]}}  # in the second round nothing was distilled
    records = [{**run, **distilled} for run in runs(fedprox=[[40.0, 44.0]])]
    order = claim("last", "fedprox > fedprox before distillation")
    one = judge(order, recipe_of(*CELLS.values()), records, {})
    assert one.differences[0].by_seed == [42.0 - 37.0]
    assert our_words(one).startswith("fedprox 42.00, fedprox before distillation 37.00. Ahead by +5.00")


def test_words_of_one_and_of_three_seeds():
    assert our_words(finding(fedavg=[[1.0, 2.0]], fedprox=[[3.0, 5.0]])).endswith("Ahead by +3.00 (one seed)")
    three = finding(fedavg=[[1.0, 2.0]] * 3, fedprox=[[3.0, 5.0]] * 3)
    assert our_words(three).endswith("Ahead by +3.00 [+3.00, +3.00] (3 seeds)")
    assert our_words(finding()) == "not run"


def test_a_claim_is_read_beside_the_paper_s_numbers(tmp_path):
    folder = write_paper(tmp_path)
    (folder / "expected.toml").write_text(EXPECTED + CLAIM)
    recipe = load_recipe(folder)
    (read,) = load_claims(folder, recipe)
    expected = load_expected(folder, recipe)
    assert paper_words(judge(read, recipe, [], expected)) == "fedprox 41.50 > fedavg 33.02"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('table = "1"', 'table = "7"'), "has no table '7'"),
        (('column = "digits"', 'column = "digit"'), "no column 'digit'"),
        (("fedprox > fedavg", "fedprx > fedavg"), "no row 'fedprx'"),
        (("fedprox > fedavg", "fedprx before distillation > fedavg"), "no row 'fedprx'"),
        (("fedprox > fedavg", "fedprox"), "order needs two rows"),
        (('measure = "best"', 'measure = "top"'), "measure"),
    ],
)
def test_a_claim_about_nothing_is_refused(tmp_path, change, complaint):
    folder = write_paper(tmp_path)
    (folder / "expected.toml").write_text(EXPECTED + CLAIM.replace(*change))
    with pytest.raises(FedstillError, match=complaint):
        load_claims(folder, load_recipe(folder))
