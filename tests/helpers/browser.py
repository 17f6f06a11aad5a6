"""A real browser for the tests of pages, whose console must stay silent."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    names = ("chromium", "chromium-browser", "google-chrome")
    binary = next((found for name in names if (found := shutil.which(name))), None)
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--force-device-scale-factor=1"):
        options.add_argument(word)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which root cannot have
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """The browser, whose console must have stayed silent."""
    chromium.get_log("browser")
    yield chromium
    said = [entry for entry in chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    chromium.get("about:blank")
    assert said == [], said


def sized(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def until(browser: Any, script: str, holds: Callable[[Any], bool] = bool, seconds: float = 60) -> Any:
    """What a script gives, once it holds."""
    deadline = time.monotonic() + seconds
    while not holds(found := browser.execute_script(script)):
        assert time.monotonic() < deadline, f"{script}: {found}"
        time.sleep(0.1)
    return found
