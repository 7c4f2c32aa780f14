"""A small part of the storm of damaged inputs; `python benchmarks/storm/fuzz.py` plays 100,000."""

import pytest
from quick import first_quick

pytest.importorskip("pyarrow")

from storm import fuzz, inputs

OF_A_RUN = ("bundle", "checkpoint", "weights")  # their valid files come from a run, which takes a second


@pytest.mark.parametrize("kind", [kind for kind in inputs.KINDS if kind not in OF_A_RUN and kind != "tokenizer"])
@pytest.mark.parametrize("count", first_quick([12, 60]))
def test_hostile_inputs_are_answered_or_refused_in_one_line(kind, count):
    outcomes = list(fuzz.storm(seed=7, count=count, kind=kind, heavy=False))
    assert [each for each in outcomes if each.outcome not in (fuzz.ANSWERED, fuzz.REFUSED)] == []
    assert fuzz.REFUSED in {each.outcome for each in outcomes}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_A_RUN)
def test_damaged_files_of_a_run_are_answered_or_refused_in_one_line(kind):
    outcomes = list(fuzz.storm(seed=7, count=60, kind=kind))
    assert [each for each in outcomes if each.outcome not in (fuzz.ANSWERED, fuzz.REFUSED)] == []


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("no"), "ESCAPED: ValueError: no"),
        (MemoryError(), "ESCAPED: MemoryError: "),
        (fuzz.FedstillError("a plain line"), "refused: one line"),
    ],
)
def test_anything_but_a_line_of_ours_is_an_escape(monkeypatch, error, outcome):
    def read(content, name, folder):
        raise error

    kind = inputs.Kind(lambda: {"good": b"1"}, dict, read)
    monkeypatch.setitem(inputs.KINDS, "broken", kind)
    assert {each.outcome for each in fuzz.storm(seed=0, count=3, kind="broken")} == {outcome}


def test_the_same_seed_damages_the_same_bytes():
    first, second, other = (fuzz._input("npz", 60, seed, heavy=False) for seed in (1, 1, 2))
    assert first == second != other
