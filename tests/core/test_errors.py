from __future__ import annotations

import logging

import pytest

from fedstill.core.errors import FedstillError, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cat", "cat"),
        ("中文 é 🙂", "中文 é 🙂"),
        ("\x1b[2J", "?[2J"),
        ("a\u202eb\u200f", "a?b?"),
        ("a\r\nb\u2028c\td", "a  b c d"),
        ("\udcff\x00", "??"),
    ],
)
def test_no_sign_of_a_name_steers_a_terminal(text, shown):
    assert printable(text) == shown
    assert FedstillError(text).lines == (shown,)


def test_the_signs_to_keep_stay():
    assert printable("a\nb\x07", keep="\n") == "a\nb?"


def test_a_name_cannot_forge_a_line_of_the_log(caplog):
    logging.getLogger("fedstill.run").warning("column '%s'", "a\nWARNING all is well\x1b[1A")
    assert caplog.messages == ["column 'a WARNING all is well?[1A'"]
