"""The page in a browser: it draws, obeys no name, asks nobody, works by keyboard, on a phone, in the dark, on paper."""

from __future__ import annotations

import pytest
from browser import browser, why_no_browser
from run_folders import write_comparison, write_hostile

from fedstill.report.charts import LINE_COLOURS, ON_DARK
from fedstill.report.page import write_report

pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "there is one"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.driver.get("about:blank")
        opened.requests()
        yield opened


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    methods = {f"method-{place}": [[0.1 * place, 0.15 * place], [0.2, 0.1 * place]] for place in range(6)}
    plain = write_comparison(folder / "plain", methods, parties=("Ulm", "Aix"))
    return {
        "plain": write_report([plain], folder / "plain.html"),
        "hostile": write_report([write_hostile(folder / "all")], folder / "hostile.html"),
    }


@pytest.mark.parametrize("name", ["plain", "hostile"])
@pytest.mark.parametrize("look", [{}, {"dark": True}, {"width": 390}, {"width": 390, "dark": True}])
def test_all_charts_are_drawn_without_a_complaint_or_a_request(page, files, name, look):
    page.open(files[name], **look)
    drawn = page.value("Array.from(document.querySelectorAll('figure'), f => f.dataset.drawn)")
    assert drawn
    assert set(drawn) == {"yes"}
    assert page.complaints() == []
    assert set(page.requests()) == {files[name].resolve().as_uri()}
    assert page.value("window.hacked") is None
    assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_nothing_of_a_hostile_name_runs_when_a_reader_points_at_it(page, files):
    from selenium.webdriver import ActionChains

    page.open(files["hostile"])
    for place in ("#holdings rect, #holdings path[aria-roledescription]", "#confusion path[aria-roledescription]"):
        for mark in page.driver.find_elements("css selector", place)[:5]:
            page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
            ActionChains(page.driver).move_to_element(mark).perform()
    shown = page.value("document.querySelector('#vg-tooltip-element')?.innerHTML || ''")
    assert "class" in shown
    assert "<img" not in shown
    assert "<script" not in shown
    assert page.value("window.hacked") is None
    assert page.complaints() == []


def test_a_line_is_switched_off_and_on_by_the_keyboard(page, files):
    from selenium.webdriver.common.keys import Keys

    page.open(files["plain"])
    lines = "document.querySelectorAll('#curves .live path[aria-roledescription=\"line mark\"]').length"
    before = page.value(lines)
    assert before == 6
    box = page.driver.find_element("css selector", "#curves .toggles input")
    box.send_keys(Keys.SPACE)
    page.wait(f"{lines} === {before - 1}")
    box.send_keys(Keys.SPACE)
    page.wait(f"{lines} === {before}")


def test_the_wheel_zooms_with_the_control_key_only(page, files):
    page.open(files["plain"])
    ticks = "Array.from(document.querySelectorAll('#curves .live .role-axis-label text'), t => t.textContent).join()"
    page.value("document.querySelector('#curves .live').scrollIntoView({block: 'center'})")
    box = page.value("document.querySelector('#curves .live').getBoundingClientRect().toJSON()")
    middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "deltaX": 0, "deltaY": -300}

    def turn(modifiers: int) -> None:
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **middle})
        words = {"type": "mouseWheel", "modifiers": modifiers, **middle}
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", words)

    before = page.value(ticks)
    turn(0)
    page.wait(f"document.querySelector('#curves .live').getBoundingClientRect().y !== {box['y']}")  # it scrolled
    assert page.value(ticks) == before
    page.value("document.querySelector('#curves .live').scrollIntoView({block: 'center'})")
    turn(2)
    page.wait(f"{ticks} !== {before!r}")


def test_an_open_page_follows_the_system_into_the_dark(page, files):
    page.open(files["plain"])
    paper = "getComputedStyle(document.body).backgroundColor"
    label = "getComputedStyle(document.querySelector('#curves .live .role-axis-label text')).fill"
    marks = "document.querySelectorAll('#curves .live path[aria-roledescription=\"line mark\"]')"
    lines = f"Array.from({marks}, mark => mark.getAttribute('stroke'))"
    light = page.value(paper)
    assert contrast(page.value(label), light) > 4.5
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": [scheme]})
    page.wait(f"{lines}.includes('{ON_DARK[0]}')")
    dark = page.value(paper)
    assert dark != light
    assert contrast(page.value(label), dark) > 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_coloured_lines_have_contrast_enough_for_graphics(page, files, dark):
    page.open(files["plain"], dark=dark)
    paper = page.value("getComputedStyle(document.body).backgroundColor")
    for place in range(len(LINE_COLOURS)):
        stroke = page.value(f"getComputedStyle(document.querySelector('#curves .line-{place}')).stroke")
        assert contrast(stroke, paper) > 2.9  # WCAG 2.1 asks for 3; the pink of Okabe & Ito has 2.95 on white


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours 'rgb(r, g, b)' (WCAG 2.1)."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(first), light(second)))
    return (high + 0.05) / (low + 0.05)


def test_without_scripts_every_chart_is_a_picture(page, files):
    page.open(files["plain"], scripts=False)
    found = page.driver.execute_cdp_cmd("DOM.getDocument", {"depth": 1})["root"]["nodeId"]
    ask = page.driver.execute_cdp_cmd
    pictures = ask("DOM.querySelectorAll", {"nodeId": found, "selector": "figure img.static"})["nodeIds"]
    assert len(pictures) > 8
    for node in pictures:
        box = ask("DOM.getBoxModel", {"nodeId": node})["model"]
        assert box["width"] > 300
        assert box["height"] > 40
    assert page.complaints() == []


def test_paper_shows_the_pictures_and_not_the_drawn_charts(page, files):
    page.open(files["plain"])
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    display = "Array.from(document.querySelectorAll('{}'), each => getComputedStyle(each).display)"
    assert set(page.value(display.format("figure .live"))) == {"none"}
    assert set(page.value(display.format("figure img.static"))) == {"block"}
