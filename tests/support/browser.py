"""A headless Chromium for tests of pages: what it drew, what it asked for, what it complained about."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORDS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def why_no_browser() -> str:
    """Return why no browser can be driven here; empty where one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    missing = [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Page:
    """An open page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self,
        place: Path | str,
        *,
        width: int = 1100,
        height: int = 900,
        dark: bool = False,
        scripts: bool = True,
        ready: str = "document.body.dataset.ready === 'yes'",
    ) -> None:
        """Open a file or an address, and wait until it is ready."""
        command = self.driver.execute_cdp_cmd
        command("Emulation.setScriptExecutionDisabled", {"value": not scripts})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command("Emulation.setEmulatedMedia", {"media": "screen", "features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        command("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(place if isinstance(place, str) else place.resolve().as_uri())
        if scripts:
            self.wait(ready)

    def wait(self, condition: str, seconds: float = 30) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds).until(lambda driver: driver.execute_script(f"return {condition}"))

    def value(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return every address that pages asked for since the last call; pictures inside a page are left out."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith("data:")]

    def picture(self, file: Path) -> None:
        """Draw the whole page into a PNG."""
        box = self.value("document.documentElement.getBoundingClientRect().toJSON()")
        clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
        words = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        file.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", words)["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own in `folder`, and end it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for word in (*WORDS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield Page(driver)
    finally:
        driver.quit()
