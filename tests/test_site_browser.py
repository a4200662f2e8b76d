"""The built site in Chromium: accessible in both themes, nothing wider than a phone, and its search answers."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
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
#: One page of each kind: prose, a wide table, a command, Python, formulas, a copy of a page of the root, variables.
PAGES = (
    *("index", "reference/types", "reference/commands/quantize", "reference/api", "explanation/error-feedback"),
    *("explanation/architecture", "reference/models", "questions", "how-to/cache"),
)
#: Questions as people type them, and the section of docs/questions.md with the answer: of 15 tasks, of forums.
QUESTIONS = {
    "split gguf": "split",
    "merge split gguf files": "join",
    "edit chat template": "chat-template",
    "mmproj": "mmproj",
    "upload to hugging face": "upload",
    "download by name": "download",
    "quantize embedding model": "embedding",
    "what fits in 24 GB": "fits",
    "chat with the model": "chat",
    "hellaswag": "tasks",
    "merge lora into gguf": "lora",
    "quantize the kv cache": "kv-cache",
    "multiple gpus tensor-split": "gpus",
    "draft model": "draft",
    "use in ollama": "ollama",
    "prune experts": "prune",
    "target size": "target-size",
    "which quant for 24 GB": "fits",
    "what is imatrix": "imatrix",
    "convert safetensors to gguf": "safetensors",
    "failed to load model missing tensor": "missing-tensor",
    "unknown pre-tokenizer": "pre-tokenizer",
    "unsloth dynamic quant UD": "dynamic",
    "IQ4_XS vs Q4_K_M": "iq4-xs",
    "perplexity vs KLD": "kld",
    "resume after crash": "resume",
    "no space left on device": "disk",
    "LM Studio": "ollama",
    "requantize": "requantize",
    "bf16 or f16": "bf16",
    "MXFP4": "mxfp4",
    "fp8 checkpoint deepseek": "fp8",
    "out of memory": "memory",
    "imatrix calibration text": "calibration",
    "AWQ GPTQ to gguf": "gptq",
    "windows": "windows",
    "add eos token metadata": "metadata",
    "model architecture not supported": "architecture",
    "how long does it take": "time",
}


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


def build_site(folder: Path) -> Path:
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", folder]
    result = run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built with all warnings as errors; .ci/run has built it."""
    site = os.environ.get("QUANTKIT_SITE")
    folder = Path(site) if site else build_site(tmp_path_factory.mktemp("site") / "site")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    if not site:
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


_LINKS = "return [...document.querySelectorAll('a.md-search-result__link')].map((a) => a.href)"


def open_search(browser: Any, address: str) -> Any:
    """Return the box of the search, whose index is loaded."""
    show(browser, f"{address}/index.html")
    box = browser.find_element("css selector", "input.md-search__input")
    browser.execute_script("document.querySelector('label[for=__search]').click()")
    WebDriverWait(browser, 30).until(lambda b: box.is_displayed())
    return box


def ask(browser: Any, address: str, box: Any, words: str) -> list[str]:
    """Return pages and sections (page#section) that the search finds for ``words``, best first."""
    send = """arguments[0].value = arguments[1];
        for (const name of ["input", "keyup"]) arguments[0].dispatchEvent(new Event(name, {bubbles: true}))"""
    browser.execute_script(send, box, "")
    WebDriverWait(browser, 30).until(lambda b: not b.execute_script(_LINKS))
    browser.execute_script(send, box, words)
    results: list[list[str]] = [[]]

    def is_settled(_: Any) -> bool:  # results come in portions
        time.sleep(0.2)
        results.append(browser.execute_script(_LINKS))
        return bool(results[-1]) and results[-1] == results[-2]

    WebDriverWait(browser, 60).until(is_settled)
    return [re.sub(r"\?[^#]*", "", link).removeprefix(f"{address}/") for link in results[-1]]


def pages_of(links: list[str]) -> list[str]:
    """Return the pages of links, each once."""
    return list(dict.fromkeys(link.partition("#")[0] for link in links))


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("QK-E115", "reference/errors.html"),
        ("QUANTKIT_CACHE", "reference/environment.html"),
        ("GPTQ", "how-to/error-feedback.html"),
        ("--split-max-size", "how-to/split-join-edit.html"),
        ("mmproj", "how-to/vision.html"),
    ],
)
def test_search_finds_pages(browser: Any, address: str, words: str, page: str) -> None:
    assert page in pages_of(ask(browser, address, open_search(browser, address), words))[:4]


def test_search_answers_questions(browser: Any, address: str) -> None:
    """The page of questions is among the first three, and of its sections the one with the answer comes first."""
    box, page, failures = open_search(browser, address), "questions.html", []
    for words, section in QUESTIONS.items():
        links = ask(browser, address, box, words)
        sections = [link.partition("#")[2] for link in links if link.startswith(f"{page}#")]
        if page not in pages_of(links)[:3] or sections[:1] != [section]:
            failures.append((words, section, links[:6]))
    assert failures == []


def test_every_answer_is_two_clicks_from_the_start(browser: Any, address: str) -> None:
    """The start page links to the questions, whose table of contents has each of them."""
    show(browser, f"{address}/index.html")
    links = "return [...document.querySelectorAll('article a')].map((a) => a.href)"
    assert f"{address}/questions.html" in browser.execute_script(links)
    show(browser, f"{address}/questions.html")
    contents = "return [...document.querySelectorAll('.md-nav--secondary a')].filter((a) => a.checkVisibility())"
    targets = set(browser.execute_script(f"{contents}.map((a) => a.hash.slice(1))"))
    assert set(QUESTIONS.values()) <= targets
