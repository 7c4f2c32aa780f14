from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.storage.spreadsheet import as_cell, from_cell


@given(st.text(alphabet="'=+-@\t\r\n＝a1.e ", max_size=8))
def test_every_word_reads_back_as_it_was_and_none_begins_a_formula(word):
    cell = as_cell(word)
    assert from_cell(cell) == word
    if cell[:1] in set("=+-@\t\r\n"):
        float(cell)  # of a number nothing is computed


@pytest.mark.parametrize("word", ["7", "-7", "+1.5e-3", "-.5"])
def test_numbers_stay_numbers(word):
    assert as_cell(word) == word


@pytest.mark.parametrize("word", ["=cmd|' /C calc'!A0", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "+"])
def test_a_formula_is_marked_as_text(word):
    assert as_cell(word) == f"'{word}"
