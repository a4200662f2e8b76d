"""Headless Chromium for pages: start, theme and size, and axe's accessibility rules."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver: apt-get install chromium chromium-driver"
)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
#: The wheel with axe-core; it is not imported, because its dependencies are not installed.
AXE = find_spec("axe_playwright_python")
needs_axe = pytest.mark.skipif(AXE is None, reason="no axe-core: scripts/test installs the wheel axe-playwright-python")
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def start(folder: Path) -> Any:
    """Start Chromium with a new profile in ``folder``."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.set_script_timeout(180)  # axe on a long page
    return driver


def emulate(browser: Any, *, theme: str, width: int, mobile: bool) -> None:
    """Set the preferred color scheme, and the size of the screen."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def axe(browser: Any) -> dict[str, Any]:
    """Return axe's result for the page: passes and violations."""
    assert AXE is not None
    assert AXE.origin is not None
    browser.execute_script(Path(AXE.origin).with_name("axe.min.js").read_text(encoding="utf-8"))
    run = "const done = arguments[1]; axe.run(document, {runOnly: arguments[0]}).then(done)"
    verdict: dict[str, Any] = browser.execute_async_script(run, TAGS)
    return verdict


def violations(verdict: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the violated rules, with some elements of each."""
    return [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in verdict["violations"]]
