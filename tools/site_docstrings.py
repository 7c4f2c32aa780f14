"""Make our docstrings into what mkdocstrings expects: a list of arguments, fenced doctests, the fields of a class.

A docstring of ours says `name: text` where mkdocstrings expects a list below `Args:`. Comments explain the fields of a
class, so the site shows the lines of the source that declare them.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Class, Docstring, Extension, Function

ITEM = re.compile(r"^(\w+): ")


def for_the_site(text: str, names: set[str]) -> str:
    """Return a docstring with `Args:` before a paragraph that explains one of the names, and fenced doctests."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        first = ITEM.match(paragraph)
        if first and first[1] in names:
            lines = paragraph.splitlines()
            begins = [(item := ITEM.match(line)) is not None and item[1] in names for line in lines]
            indented = [
                f"    {line}" if begin else f"        {line.strip()}" for line, begin in zip(lines, begins, strict=True)
            ]
            paragraph = "\n".join(["Args:", *indented])
        elif paragraph.startswith(">>> "):
            paragraph = f"```pycon\n{paragraph}\n```"
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


class HouseDocstrings(Extension):
    """Changes the docstrings of functions and classes before mkdocstrings reads them."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        self.change(func.docstring, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: Class, **_: Any) -> None:
        self.change(cls.docstring, {*cls.members, *(parameter.name for parameter in cls.parameters)})
        enumerated = any(str(base) == "Enum" for base in cls.bases)
        public = [field for field in cls.attributes.values() if not field.name.startswith("_") and not field.docstring]
        fields = [field for field in public if "property" not in field.labels and (field.annotation or enumerated)]
        shown = "\n".join(dedent(field.source.rstrip()) for field in fields)
        if cls.docstring is not None and fields and "Annotated[" not in shown:  # the keys of an experiment have a page
            cls.docstring.value += f"\n\n```python\n{shown}\n```"

    def change(self, docstring: Docstring | None, names: set[str]) -> None:
        if docstring is not None:
            docstring.value = for_the_site(docstring.value, {name.lstrip("*") for name in names})
