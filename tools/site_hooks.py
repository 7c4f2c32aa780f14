"""What mkdocs does beside its work for the site of `make docs`: files of the repository, methods in the menu, formulas.

Pages in docs/ link to files outside docs/, as a reader on a forge needs it. The site has no address of a forge to send
its readers to, so it holds these files itself, under repository/: Markdown as pages, all other files as code. Formulas
become MathML while the site is built, because a browser draws MathML without scripts, fonts or a network.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INSIDE = "repository"  # the folder of the site that holds the repository's files
BLOCK = re.compile(r"^(`{3,}).*?^\1$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s#]+)([^)\s]*\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
COMMANDS = re.compile(r"^```text\n((?:\$ .*\n)+)```", re.MULTILINE)
PUBLIC = re.compile(r"^- \[`(\w+)`\]\(\.\./src/([\w/]+?)(?:/__init__)?\.py\)$", re.MULTILINE)  # a name in docs/api.md
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "sh", ".cff": "yaml", ".yml": "yaml"}


def place_in_site(path: Path) -> str:
    """Return where the site's sources hold a file or a folder of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{INSIDE}/{name}/index.md"
    return f"{INSIDE}/{name}" if path.suffix == ".md" else f"{INSIDE}/{name}.md"


def outside_links(page: Path, text: str) -> Iterator[tuple[re.Match[str], Path]]:
    """Yield the links of a page of the repository that lead to another file of it."""
    code = [match.span() for match in BLOCK.finditer(text)]
    for link in LINK.finditer(text):
        inside_code = any(start <= link.start() < end for start, end in code)
        if not inside_code and "://" not in link[2]:
            yield link, (page.parent / link[2]).resolve()


def shown(path: Path) -> str:
    """Return a file that is not Markdown, or the list of a folder's files, as a page."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        lines = [f"- [{each.name}]({each.name})" for each in sorted(path.iterdir()) if each.suffix in {".py", ".toml"}]
        return f"# {name}/\n\n" + "\n".join(lines) + "\n"
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def rewritten(page: Path, text: str) -> str:
    """Return a page's text with links that work where the site holds the page and its targets."""
    here = os.path.dirname(place_in_site(page))
    pieces, end = [], 0
    for link, target in outside_links(page, text):
        if not (page.is_relative_to(DOCS) and target.is_relative_to(DOCS)):
            place = os.path.relpath(place_in_site(target), here or ".")
            pieces += [text[end : link.start()], link[1], place, link[3]]
            end = link.end()
    return "".join([*pieces, text[end:]])


def on_config(config: Any) -> Any:
    """Put the page of every method into the menu, in the order and with the names of docs/methods/README.md."""
    table = (DOCS / "methods" / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    pages = [{name: f"methods/{file}"} for name, file in re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", table, re.M)]
    (reference,) = (group["Reference"] for group in config.nav if "Reference" in group)
    next(item for item in reference if "Methods" in item)["Methods"] = ["methods/README.md", *pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ to which a page of the site leads, over any number of links."""
    waiting = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
    added: set[Path] = set()
    while waiting:
        page = waiting.pop()
        if page in added:
            continue
        text = page.read_text(encoding="utf-8") if page.suffix == ".md" else shown(page)
        base = page / "_" if page.is_dir() else page  # links of a folder's list are relative to the folder
        if not page.is_relative_to(DOCS):
            added.add(page)
            content = rewritten(base, text) if page.suffix == ".md" or page.is_dir() else text
            place, level = place_in_site(page), InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place, content=content, inclusion=level))
        if page.suffix == ".md" or page.is_dir():
            waiting += [target for _, target in outside_links(base, text) if not target.is_relative_to(DOCS)]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to where the site holds their files, and docs/api.md show the docstrings of the names it lists.

    Blocks of commands lose their prompts, because the site's button copies a whole block.
    """
    if page.file.generated_by:
        return markdown
    if page.file.src_uri == "api.md":
        markdown = PUBLIC.sub(lambda link: f"::: {link[2].replace('/', '.')}.{link[1]}", markdown)
    markdown = COMMANDS.sub(
        lambda block: "```sh\n" + re.sub(r"^\$ ", "", block[1], flags=re.MULTILINE) + "```", markdown
    )
    return rewritten(DOCS / page.file.src_uri, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Draw the formulas of a page."""

    def drawn(match: re.Match[str]) -> str:
        formula = html.unescape(match[2]).strip().replace(r"\arg", r"\operatorname{arg}")  # which the converter lacks,
        formula = re.sub(r"\\[bB]ig(?=\\)", "", formula)  # as it lacks the large form of \| and \{
        mathml: str = convert(formula, display="block" if match[1] == "div" else "inline")
        if "\\" in mathml:  # the converter passes on a command that it does not know
            raise PluginError(f"{page.file.src_uri}: the site cannot draw all of the formula {formula}")
        return mathml

    return FORMULA.sub(drawn, content)
