"""Every link inside the repository leads somewhere, and every page can be reached from the README."""

from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, anchors, links, name_of

LARGEST_PICTURE = 200_000


def resolve(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return ((page.parent / path).resolve() if path else page), anchor


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        target, anchor = resolve(page, link)
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        found = {resolve(page, link)[0] for link in links(page) if "://" not in link}
        waiting += [target for target in found if target.suffix == ".md" and target not in reached]
    assert {name_of(page) for page in PAGES} == {name_of(page) for page in reached}


def test_pictures_are_small_and_used():
    used = {resolve(page, link)[0] for page in PAGES for link in links(page) if ".png" in link}
    pictures = {*(ROOT / "docs" / "images").glob("*.png"), *(ROOT / "docs" / "results").rglob("*.png")}
    assert pictures == used
    assert all(picture.stat().st_size < LARGEST_PICTURE for picture in pictures)
