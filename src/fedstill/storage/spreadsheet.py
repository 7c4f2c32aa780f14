"""Words in a CSV file that people open in a spreadsheet: none of them is a formula, and they read back as they were.

A spreadsheet computes a cell that begins with one of these signs, also one from somebody else's file name. As OWASP
proposes, such a word gets a quotation mark before it, which spreadsheets take for "this is text". Numbers stay numbers.
A word that begins with quotation marks and such a sign gets one more, so that reading takes away what writing added.
"""

from __future__ import annotations

import re

_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
_MARKED = re.compile(r"'+[=+\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def as_cell(word: str) -> str:
    """Return a word as a CSV file holds it.

    >>> [as_cell(word) for word in ("cat", "=1+1", "-3.5", "'=x")]
    ['cat', "'=1+1", '-3.5', "''=x"]
    """
    return f"'{word}" if _FORMULA.match(word) and not _NUMBER.fullmatch(word) else word


def from_cell(cell: str) -> str:
    """Return the word that `as_cell` wrote.

    >>> [from_cell(cell) for cell in ("cat", "'=1+1", "-3.5", "''=x", "'tis")]
    ['cat', '=1+1', '-3.5', "'=x", "'tis"]
    """
    return cell[1:] if cell[:1] == "'" and _MARKED.match(cell) else cell
