"""The built site in Chromium: accessible in both themes, nothing wider than a phone, and its search answers."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from subprocess import run
from typing import Any

import pytest
from selenium.webdriver.support.ui import WebDriverWait

from browser import axe, emulate, needs_axe, needs_browser, start, violations
from site_sources import ROOT

pytestmark = [
    needs_browser,
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="no mkdocs: scripts/test installs the group docs"),
]
WIDE, NARROW = 1280, 390
#: One page of each kind: prose, a wide table, a command, Python, formulas, a copy of a page of the root.
PAGES = (
    *("index", "reference/types", "reference/commands/quantize", "reference/api", "explanation/error-feedback"),
    *("explanation/architecture", "reference/models"),
)


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built with all warnings as errors."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", folder]
    result = run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()


def show(browser: Any, url: str, *, theme: str = "light", width: int = WIDE) -> None:
    emulate(browser, theme=theme, width=width, mobile=width == NARROW)
    browser.get(url)
    WebDriverWait(browser, 30).until(lambda b: b.execute_script("return document.readyState") == "complete")


@needs_axe
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing(browser: Any, address: str, page: str, theme: str) -> None:
    show(browser, f"{address}/{page}.html", theme=theme)
    scheme = browser.execute_script("return document.body.dataset.mdColorScheme")
    assert scheme == {"light": "default", "dark": "slate"}[theme]
    # A page's name in the sidebar is scrolled to, which hides others in part.
    browser.execute_script("document.querySelectorAll('.md-sidebar__scrollwrap').forEach((e) => e.scrollTop = 0)")
    verdict = axe(browser)
    assert len(verdict["passes"]) > 20
    assert violations(verdict) == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_fit_a_phone(browser: Any, address: str, page: str) -> None:
    """Wide tables and code scroll within the page."""
    show(browser, f"{address}/{page}.html", width=NARROW)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= NARROW
    beyond = """return [...document.querySelectorAll("article *")]
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
        .filter((e) => !e.closest(".md-typeset__scrollwrap, pre, .formula")).map((e) => e.outerHTML.slice(0, 200))"""
    assert browser.execute_script(beyond) == []


def test_the_site_makes_no_external_request(browser: Any, address: str) -> None:
    show(browser, f"{address}/explanation/error-feedback.html")
    names = browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert names
    assert [name for name in names if not name.startswith(address)] == []
    assert browser.execute_script("return document.querySelectorAll('math').length") > 10


def search(browser: Any, address: str, words: str) -> list[str]:
    """Return the pages that the site's search finds, best first."""
    show(browser, f"{address}/index.html")
    box = browser.find_element("css selector", "input.md-search__input")
    browser.execute_script("document.querySelector('label[for=__search]').click()")
    WebDriverWait(browser, 30).until(lambda b: box.is_displayed())
    box.send_keys(words)
    link = "a.md-search-result__link"
    # Results of the first letters come before those of the words.
    marked = f"return document.querySelector('{link}')?.href.includes('h=')"
    WebDriverWait(browser, 30).until(lambda b: b.execute_script(marked))
    time.sleep(1)
    script = f"return [...document.querySelectorAll('{link}')].map((a) => a.href)"
    pages = (re.split(r"[?#]", page)[0].removeprefix(f"{address}/") for page in browser.execute_script(script))
    return list(dict.fromkeys(pages))


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("QK-E115", "reference/errors.html"),
        ("QUANTKIT_CACHE", "reference/environment.html"),
        ("GPTQ", "how-to/error-feedback.html"),
        ("--split-max-size", "reference/commands/quantize.html"),
        ("mmproj", "explanation/limits.html"),
    ],
)
def test_search_finds_pages(browser: Any, address: str, words: str, page: str) -> None:
    assert page in search(browser, address, words)[:4]
