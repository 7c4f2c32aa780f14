"""The site of `make docs` in a browser: it asks nobody, its search answers, it goes dark, it fits a phone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Page, browser, why_no_browser
from doc_pages import ROOT

pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "there is one"),
]

READY = "document.readyState === 'complete' && document.documentElement.classList.contains('js')"
PAGES = ("index.html", "tutorial-method.html", "methods/d2cfl.html", "api.html", "choosing-a-method.html")
SLATE = "document.body.dataset.mdColorScheme === 'slate'"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert built.stderr == "", "the build warns"
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(site) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def page(tmp_path) -> Iterator[Page]:
    """A new browser, because the site remembers the colours that a reader chose."""
    with browser(tmp_path) as opened:
        opened.driver.get("about:blank")
        opened.requests()
        yield opened


def start_of(served: str, site: Path, way: str) -> str:
    return served if way == "served" else f"{site.resolve().as_uri()}/"


@pytest.mark.parametrize("way", ["served", "from disk"])
def test_pages_fit_their_window_and_ask_for_nothing_but_the_site(page, site, served, way):
    start = start_of(served, site, way)
    for name in PAGES:
        for look in ({"width": 1400}, {"width": 390}, {"width": 390, "dark": True}):
            page.open(start + name, ready=READY, **look)
            width = "document.documentElement"
            assert page.value(f"{width}.scrollWidth <= {width}.clientWidth"), f"{name} {look}: wider than the window"
            assert page.value(SLATE) == look.get("dark", False), f"{name} {look}: the colours are not the system's"
    assert page.complaints() == []
    assert [address for address in page.requests() if not address.startswith(start)] == []


@pytest.mark.parametrize("way", ["served", "from disk"])
def test_the_keyboard_reaches_the_search_and_the_search_finds_a_method(page, site, served, way):
    from selenium.webdriver import ActionChains, Keys

    page.open(start_of(served, site, way) + "index.html", width=1400, ready=READY)
    page.wait("document.querySelector('.md-search__input') !== null")
    ActionChains(page.driver).send_keys("/").perform()  # the key that Material gives to the search
    page.wait("document.activeElement.classList.contains('md-search__input')")
    ActionChains(page.driver).send_keys("fedlmd").perform()
    page.wait("document.querySelectorAll('.md-search-result__item').length > 0")
    found = page.value("Array.from(document.querySelectorAll('.md-search-result__link'), link => link.href)")
    assert any("methods/fedlmd.html" in link for link in found)
    ActionChains(page.driver).send_keys(Keys.ARROW_DOWN, Keys.ENTER).perform()
    page.wait("document.title.toLowerCase().includes('lmd')")
    assert page.complaints() == []


def test_tab_comes_to_the_skip_link_and_to_the_search(page, served):
    from selenium.webdriver import ActionChains, Keys

    page.open(served + "tutorial-method.html", width=1400, ready=READY)
    visited = []
    for _ in range(30):
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        visited.append(page.value("document.activeElement.className"))
    assert "md-skip" in visited[0]
    assert any("md-search__input" in name for name in visited)


def test_a_reader_chooses_light_or_dark_and_the_next_page_keeps_it(page, served):
    page.open(served + "index.html", width=1400, ready=READY)
    assert not page.value(SLATE)
    for _ in range(2):  # from the system's colours to light, from light to dark
        page.wait("document.querySelector('label.md-header__button[for^=__palette]:not([hidden])') !== null")
        page.driver.find_element("css selector", "label.md-header__button[for^=__palette]:not([hidden])").click()
    page.wait(SLATE)
    page.open(served + "api.html", width=1400, ready=READY)
    page.wait(SLATE)


def test_formulas_and_docstrings_are_drawn(page, served):
    page.open(served + "methods/fedlmd.html", width=1400, ready=READY)
    assert page.value("document.querySelectorAll('math').length") > 5
    page.open(served + "api.html", width=1400, ready=READY)
    assert page.value("document.getElementById('fedstill.experiment.run.run') !== null")
    assert "federation that is built already" in page.value("document.body.innerText")
