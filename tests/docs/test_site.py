"""The documentation as a site, without building it: its menu, its reference of the API, its docstrings."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from doc_pages import ROOT

import fedstill

DOCS = ROOT / "docs"


def menu() -> list[dict[str, Any]]:
    """The menu in mkdocs.yml; other keys may hold Python objects, which are not made here."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text[text.index("\nnav:") :])["nav"]


def pages(item: Any) -> Iterator[str]:
    if isinstance(item, str):
        yield item
        return
    for part in item.values() if isinstance(item, dict) else item:
        yield from pages(part)


def test_the_menu_has_every_page_once_and_no_other_file():
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    nav = menu()
    runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))["on_config"](SimpleNamespace(nav=nav))
    listed = list(pages(nav))
    assert len(set(listed)) == len(listed)
    outside = {name for name in listed if name.startswith("repository/")}
    assert all((ROOT / name.removeprefix("repository/")).is_file() for name in outside)
    assert set(listed) - outside == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_blocks_of_commands_lose_their_prompts_because_a_button_copies_them():
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    hook = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(generated_by="", src_uri="cli.md"))
    typed, shown = "```text\n$ fedstill run\n$ echo $ x\n```", "```text\n$ fedstill init t.csv\nt.csv: 3 rows\n```"
    made = hook(f"{typed}\n\n{shown}\n", page, None, None)
    assert made == f"```sh\nfedstill run\necho $ x\n```\n\n{shown}\n"


def test_the_first_page_has_the_groups_and_the_pages_of_the_menu_in_the_same_order():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    groups = {head: re.findall(r"^- \[.+?\]\((\S+?)\)", body, re.MULTILINE) for head, body in sections(text)}
    for group in menu()[1:]:
        ((name, content),) = group.items()
        shown = [link.replace("../", "repository/") for link in groups[name]]
        assert shown == [
            page for page in pages(content) if "/" not in page or "README" in page or "repository/" in page
        ]


def sections(text: str) -> list[tuple[str, str]]:
    return [(part.partition("\n")[0], part) for part in text.split("\n## ")[1:]]


def test_the_reference_has_every_public_name_where_it_is_defined():
    named = re.findall(
        r"^- \[`(\w+)`\]\(\.\./(src/\S+\.py)\)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(dict(named)) == len(named), "a name stands there twice"
    assert dict(named).keys() >= set(fedstill.__all__)
    for name, file in named:
        module = file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert getattr(import_module(module), name).__module__ == module, name
        assert getattr(import_module(module), name).__doc__, name


def test_arguments_and_doctests_of_a_docstring_are_marked_for_the_site():
    pytest.importorskip("griffe", reason="the extra 'docs' is not installed")
    for_the_site = runpy.run_path(str(ROOT / "tools" / "site_docstrings.py"))["for_the_site"]
    text = (
        "Run it.\n\ndata: rows,\n    or a table. note: no argument.\nseed: a number.\n\nnote: It ends.\n\n>>> 1 + 1\n2"
    )
    assert for_the_site(text, {"data", "seed"}) == (
        "Run it.\n\nArgs:\n    data: rows,\n        or a table. note: no argument.\n    seed: a number.\n\n"
        "note: It ends.\n\n```pycon\n>>> 1 + 1\n2\n```"
    )


def test_the_tutorials_are_the_first_that_the_readme_leads_to():
    (part,) = (
        body for head, body in sections((ROOT / "README.md").read_text(encoding="utf-8")) if head == "Where to go"
    )
    assert re.findall(r"\]\((\S+?)\)", part)[:2] == ["docs/tutorial-method.md", "docs/tutorial-data.md"]
