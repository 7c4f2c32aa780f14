"""The live page in a browser: it follows runs without a reload, and keeps the things that its reader has done to it."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager

import pytest
from browser import browser, why_no_browser
from cli_runs import SMALL
from run_folders import row, write_comparison, write_hostile, write_run
from watching import start, watching

from fedstill.report.charts import ON_DARK
from fedstill.report.under_way import RUNNING_FILE
from fedstill.storage.files import lock

pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")
pytest.importorskip("uvicorn", reason="the extra 'watch' is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "there is one"),
]

HIGH = 25_000  # pixels
SAYS = "document.getElementById('progress').innerText"
LINES = "document.querySelectorAll('#{} .live path[aria-roledescription=\"line mark\"]').length"
TICKS = "Array.from(document.querySelectorAll('#curves .live .role-axis-label text'), t => t.textContent).join()"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.driver.get("about:blank")
        opened.requests()
        yield opened


@pytest.fixture(autouse=True)
def leave(page):
    """Close the page of a test before its server ends, because the browser would complain to the next test."""
    yield
    page.driver.get("about:blank")
    page.complaints()
    page.requests()


@contextmanager
def opened(page, *folders, tmp_path, port=None, **look):
    """Serve some folders, and open their page; a mark in it tells whether it was loaded again.

    The window is high, because the page draws charts near the window only.
    """
    with watching(*folders, cache=tmp_path / "cache", port=port) as address:
        page.open(address.text, height=HIGH, **look)
        page.driver.execute_script("window.mark = 'not reloaded'")
        yield address
        page.driver.get("about:blank")


def nothing_is_wrong(page, address) -> None:
    assert page.complaints() == []
    assert set(page.requests()) <= {address.text, f"{address.text}events"}
    assert page.value("window.hacked") is None
    assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def add_round(folder, number: int, accuracy: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(number, accuracy, 2)) + "\n")


def test_the_page_follows_a_comparison_that_is_killed_and_resumed(page, tmp_path):
    (tmp_path / "x.toml").write_text(SMALL + "rounds = 150\ncohort = 3\n")
    out = tmp_path / "trial"
    words = ("compare", tmp_path / "x.toml", "--methods", "fedavg,fedprox,scaffold", "--seeds", "2", "--out", out)
    with opened(page, out, tmp_path=tmp_path) as address:
        page.wait(f"{SAYS}.includes(\"Waiting for a run in 'trial'\")")
        first = start(*words, cache=tmp_path / "cache")
        page.wait(f"/^\\s*[\\d,]+ of 900 rounds are played: .* left\\.$/.test({SAYS})")
        page.wait(f"{LINES.format('curves')} >= 1")
        early = page.value("document.querySelector('progress').value")
        page.wait(f"document.querySelector('progress').value > {early}")
        page.wait(f"document.querySelector('#under_way') && {LINES.format('under_way')} >= 2")  # one at work, one ended
        first.send_signal(signal.SIGKILL)
        first.communicate()
        page.wait(f"{SAYS}.includes('Nothing is at work. Finished: ')")
        second = start("resume", out, cache=tmp_path / "cache")
        page.wait(f"{SAYS}.includes(' rounds are played: ')")
        page.wait(f"{SAYS}.includes('6 runs: all is done.')", 120)
        second.communicate()
        assert second.returncode == 0
        page.wait(f"{LINES.format('curves')} === 3")
        assert page.value("document.getElementById('under_way')") is None
        assert page.value("window.mark") == "not reloaded"
        assert page.value("document.title").startswith("100 % ")
        nothing_is_wrong(page, address)


def test_the_page_survives_a_restart_of_its_server(page, tmp_path):
    folder = write_run(tmp_path / "run", [0.5, 0.6])
    with watching(folder, cache=tmp_path / "cache") as address:
        page.open(address.text, height=HIGH)
        page.driver.execute_script("window.mark = 'not reloaded'")
        page.wait("document.getElementById('connection').textContent === 'Connected.'")
        page.wait(f"{LINES.format('curves')} === 1")
        os.kill(address.process.pid, signal.SIGKILL)
        page.wait("document.getElementById('connection').textContent.startsWith('Disconnected: ')")
    assert page.value(LINES.format("curves")) == 1  # the old numbers stay
    add_round(folder, 3, 0.731)
    with watching(folder, cache=tmp_path / "cache", port=address.port) as again:
        assert again.text == address.text
        page.wait("document.getElementById('connection').textContent === 'Connected.'")
        page.wait("document.getElementById('answer').innerText.includes('73.1 %')")
        assert page.value("window.mark") == "not reloaded"
        page.driver.get("about:blank")


def test_switched_lines_zoom_and_focus_stay_when_a_round_arrives(page, tmp_path):
    from selenium.webdriver.common.keys import Keys

    methods = {name: [[0.2, 0.3, 0.4, 0.5, 0.6, 0.7]] for name in ("fedavg", "fedprox", "feddf")}
    folder = write_comparison(tmp_path / "all", methods)
    with opened(page, folder, tmp_path=tmp_path) as address:
        page.wait(f"{LINES.format('curves')} === 3")
        box = page.driver.find_element("css selector", "#curves .toggles input")
        line = box.find_element("xpath", "ancestor::label//bdi").text
        for _ in range(60):
            if page.driver.switch_to.active_element == box:
                break
            page.driver.switch_to.active_element.send_keys(Keys.TAB)
        page.driver.switch_to.active_element.send_keys(Keys.SPACE)
        page.wait(f"{LINES.format('curves')} === 2")
        page.value("document.querySelector('#curves .live').scrollIntoView({block: 'center'})")
        place = page.value("document.querySelector('#curves .live').getBoundingClientRect().toJSON()")
        middle = {"x": place["x"] + place["width"] / 2, "y": place["y"] + place["height"] / 2}
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **middle})
        wheel = {"type": "mouseWheel", "modifiers": 2, "deltaX": 0, "deltaY": -300, **middle}
        before = page.value(TICKS)
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)
        page.wait(f"{TICKS} !== {before!r}")
        zoomed = page.value(TICKS)
        for method in range(3):
            add_round(folder / f"method-{method}/seed-0", 7, 0.71 + method / 100)
        page.wait("document.getElementById('answer').innerText.includes('73.0 %')")
        time.sleep(1)
        rows = "window.fedstillPage.drawn.get(document.querySelector('#curves figure')).view.data('rows')"
        assert page.value(f"{rows}.filter(row => row.x === 7).length") == 3  # the chart has the new round
        assert page.value(LINES.format("curves")) == 2
        assert page.value(TICKS) == zoomed
        focused = "document.activeElement.closest('label').querySelector('bdi').textContent"
        assert page.value(focused) == line  # feddf leads now, so that the boxes have another order
        assert page.value("document.activeElement.checked") is False
        assert page.value("window.mark") == "not reloaded"
        nothing_is_wrong(page, address)


def test_a_reader_who_points_at_a_line_sees_its_numbers(page, tmp_path):
    from selenium.webdriver import ActionChains

    folder = write_comparison(tmp_path / "all", {"fedavg": [[0.2, 0.3]], "feddf": [[0.4, 0.5]]})
    with opened(page, folder, tmp_path=tmp_path) as address:
        page.wait(f"{LINES.format('curves')} === 2")
        mark = page.driver.find_elements("css selector", "#curves .live .mark-symbol path")[0]
        page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
        ActionChains(page.driver).move_to_element(mark).perform()
        page.wait("/line.*round.*accuracy/s.test(document.querySelector('#vg-tooltip-element')?.innerText || '')")
        nothing_is_wrong(page, address)


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"width": 390}, {"width": 390, "dark": True}])
@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_it_is_drawn_in_light_and_dark_on_a_desk_and_a_phone(page, tmp_path, name, look):
    if name == "hostile":
        folder = write_hostile(tmp_path / "<img src=x onerror='window.hacked = 1'> \u202e \U0001f3e5")
    else:
        folder = write_comparison(tmp_path / "all", {"fedavg": [[0.2, 0.3]], "feddf": [[0.4, 0.5]]})
    (folder / "config.toml").write_text('name = "trial"\nrounds = 2\n')  # so that all runs but one have ended
    with (
        lock(folder / RUNNING_FILE, wait=False),
        lock(folder / "method-1/seed-0" / RUNNING_FILE, wait=False),
        opened(page, folder, tmp_path=tmp_path, **look) as address,
    ):
        page.wait("document.querySelectorAll('figure').length > 8")
        page.wait("Array.from(document.querySelectorAll('figure')).every(f => f.dataset.drawn === 'yes')")
        assert page.value("document.getElementById('under_way')") is not None
        if look.get("dark"):
            marks = "document.querySelectorAll('#under_way .live path[aria-roledescription=\"line mark\"]')"
            assert ON_DARK[0] in page.value(f"Array.from({marks}, mark => mark.getAttribute('stroke'))")
        nothing_is_wrong(page, address)


def test_an_open_page_follows_the_system_into_the_dark_and_goes_on(page, tmp_path):
    folder = write_run(tmp_path / "run", [0.5, 0.6])
    with opened(page, folder, tmp_path=tmp_path) as address:
        page.wait(f"{LINES.format('curves')} === 1")
        scheme = {"name": "prefers-color-scheme", "value": "dark"}
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": [scheme]})
        stroke = (
            "document.querySelector('#curves .live path[aria-roledescription=\"line mark\"]').getAttribute('stroke')"
        )
        page.wait(f"{stroke} === '{ON_DARK[0]}'")
        add_round(folder, 3, 0.731)
        page.wait("document.getElementById('answer').innerText.includes('73.1 %')")
        time.sleep(1)
        assert page.value(stroke) == ON_DARK[0]
        nothing_is_wrong(page, address)


def test_a_damaged_file_is_named_on_the_open_page(page, tmp_path):
    folder = write_run(tmp_path / "run", [0.5, 0.6])
    with opened(page, folder, tmp_path=tmp_path) as address:
        page.wait(f"{LINES.format('curves')} === 1")
        (folder / "env.json").write_text('{"python": ')
        page.wait("document.getElementById('audit').innerText.includes('env.json cannot be read')")
        nothing_is_wrong(page, address)
