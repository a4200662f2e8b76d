"""The page of a report in Chromium: drawn without an error, accessible in both themes, narrow, printed, by keyboard."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from browser import axe, emulate, needs_axe, needs_browser, start, violations
from quantkit.report.charts import charts
from quantkit.report.page import page_text
from report_data import report_of
from test_report import HOSTILE, example

pytestmark = needs_browser
WIDE, NARROW = 1200, 390


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(page_text(example(HOSTILE)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    """Return the browser with the reloaded page, in the light theme, wide; log entries fail the test."""
    show(browser, page)
    yield browser
    assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []


def show(browser: Any, page: Path, *, theme: str = "light", width: int = WIDE) -> None:
    emulate(browser, theme=theme, width=width, mobile=width == NARROW)
    browser.get(page.as_uri())
    wait_until_drawn(browser)


def wait_until_drawn(browser: Any) -> None:
    state = "return document.documentElement.dataset.drawn || 'no'"
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(state) != "no")
    assert browser.execute_script(state) == "yes"


def test_every_chart_is_drawn(opened: Any) -> None:
    script = """return Object.fromEntries([...document.querySelectorAll("[id^=chart-]:is(.chart, .maps)")].map(
        (c) => [c.id, c.querySelectorAll("svg .role-mark path, svg .role-mark line, svg .role-mark rect").length]))"""
    n_charts = opened.execute_script(script)
    assert n_charts.keys() == {chart.name for chart in charts(example())}
    assert all(n_charts.values()), n_charts
    labels = opened.execute_script(
        """return [...document.querySelectorAll("#chart-divergence .role-mark text")]
        .filter((t) => t.textContent && t.getAttribute("opacity") !== "0").map((t) => t.textContent)"""
    )
    assert len(labels) == len(example().files)


def test_links_have_targets_and_headings_are_in_order(opened: Any) -> None:
    bad = """return [...document.querySelectorAll("a")].map((a) => a.getAttribute("href"))
        .filter((to) => !to.startsWith("#") || !document.getElementById(to.slice(1)))"""
    assert opened.execute_script(bad) == []
    levels = opened.execute_script("return [...document.querySelectorAll('h1,h2,h3')].map((h) => +h.tagName[1])")
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:], strict=False))


@needs_axe
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(opened: Any, page: Path, theme: str) -> None:
    show(opened, page, theme=theme)
    for details in opened.find_elements("css selector", "details"):
        opened.execute_script("arguments[0].open = true", details)
    verdict = axe(opened)
    assert len(verdict["passes"]) > 20
    assert "target-size" in {rule["id"] for rule in verdict["passes"]}  # of WCAG 2.2
    assert violations(verdict) == []


def test_a_theme_change_applies_immediately(opened: Any) -> None:
    ink = "return getComputedStyle(document.querySelector('#chart-divergence .role-axis-title text')).fill"
    before = opened.execute_script(ink)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    assert opened.execute_script(ink) != before


def test_pages_fit_a_phone(opened: Any, page: Path) -> None:
    show(opened, page, width=NARROW)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= NARROW


def test_the_keyboard_reaches_everything(opened: Any) -> None:
    script = """return [...document.querySelectorAll("a, button, select, summary, [tabindex='0']")]
        .filter((e) => e.checkVisibility()).length"""
    elements, names = opened.execute_script(script), set()
    for _ in range(elements):
        ActionChains(opened).send_keys(Keys.TAB).perform()
        names.add(opened.switch_to.active_element.id)
    assert len(names) == elements


def test_headings_sort_by_number_and_are_labelled(opened: Any) -> None:
    head = opened.find_elements("css selector", "#table-files thead th")[3]
    column = "return [...document.querySelectorAll('#table-files tbody tr')].map((r) => +r.cells[3].dataset.value)"
    button = head.find_element("css selector", "button")
    button.send_keys(Keys.ENTER)
    values = opened.execute_script(column)
    assert (head.get_attribute("aria-sort"), values) == ("ascending", sorted(values))
    button.send_keys(Keys.SPACE)
    assert opened.execute_script(column) == sorted(values, reverse=True)
    assert opened.switch_to.active_element == button


def test_maps_show_the_chosen_file(opened: Any) -> None:
    cells = "return [...document.querySelectorAll('#chart-types .cells_marks path')].map((c) => c.getAttribute('fill'))"
    before = opened.execute_script(cells)
    Select(opened.find_element("id", "choose-file")).select_by_index(2)
    WebDriverWait(opened, 10).until(lambda b: b.execute_script(cells) != before)


def test_a_deep_model_is_rendered(opened: Any, tmp_path: Path) -> None:
    """Also where charts have no width while they are made, as in a long page that is not laid out yet."""
    page, text = tmp_path / "deep.html", page_text(example(layers=100))
    page.write_text(text.replace("</head>", "<style>.chart { width: 0 }</style></head>", 1), encoding="utf-8")
    show(opened, page)
    page.write_text(text, encoding="utf-8")
    show(opened, page, width=NARROW)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= NARROW
    cells = "return document.querySelectorAll('#chart-types .cells_marks path').length"
    assert opened.execute_script(cells) == 301


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Return pages by their number of files and layers."""
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for files, layers in ((3, 90), (20, 30)):
        paths[files, layers] = folder / f"{files}-{layers}.html"
        paths[files, layers].write_text(page_text(report_of(files, layers)), encoding="utf-8")
    return paths


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("size", [(3, 90), (20, 30)])
def test_types_have_labels_in_deep_models(
    opened: Any, pages: dict[Any, Path], size: tuple[int, int], width: int
) -> None:
    """Each cell has a text that the legend explains and that is not wider than the cell."""
    show(opened, pages[size], width=width)
    texts, cell = opened.execute_script(
        """const map = document.querySelector("#chart-types");
        const cells = map.querySelectorAll(".cells_marks path");
        return [[...map.querySelectorAll(".texts_marks text")].map((t) => [t.textContent, t.getBBox().width]),
                Math.min(...[...cells].map((c) => c.getBBox().width))]"""
    )
    legend = opened.execute_script("return [...document.querySelectorAll('.key')].map((k) => k.textContent)")
    assert len(set(legend)) == len(legend)
    assert len(texts) == 7 * size[1] + 2
    assert {text for text, _ in texts} <= set(legend)
    assert max(wide for _, wide in texts) <= cell + 1
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("size", [(3, 90), (20, 30)])
def test_numbers_of_layers_are_apart(opened: Any, pages: dict[Any, Path], size: tuple[int, int], width: int) -> None:
    """The first layer and the tensors outside of layers have labels, and no label touches the next one."""
    show(opened, pages[size], width=width)
    script = """const texts = document.querySelectorAll(`#${arguments[0]} .role-axis-label text`);
        return [...texts].filter((t) => /^(\\d+|none)$/.test(t.textContent))
            .map((t) => { const b = t.getBoundingClientRect(); return [b.left, b.right, t.textContent]; })"""
    for name, last in (("chart-types", "none"), ("chart-errors", "none"), ("chart-coverage", None)):
        labels = sorted(opened.execute_script(script, name))
        assert labels[0][2] == "0"
        assert last is None or labels[-1][2] == last
        assert len(labels) >= 6
        gaps = [b[0] - a[1] for a, b in zip(labels, labels[1:], strict=False)]
        assert min(gaps) >= 4


def test_the_table_of_files_scrolls_with_fixed_names(opened: Any, pages: dict[Any, Path]) -> None:
    show(opened, pages[20, 30], width=NARROW)
    area = "document.querySelector('#table-files').parentElement"
    assert opened.execute_script(f"return {area}.scrollHeight <= {area}.clientHeight + 1")
    assert opened.execute_script(f"return {area}.scrollWidth > {area}.clientWidth")
    assert opened.execute_script(f"return {area}.nextElementSibling.checkVisibility()")  # the hint
    left = "return document.querySelector('#table-files tbody th').getBoundingClientRect().left"
    before = opened.execute_script(left)
    opened.execute_script(f"{area}.scrollLeft = 200")
    assert opened.execute_script(left) == before


def test_labels_without_space_are_listed(opened: Any, pages: dict[Any, Path]) -> None:
    show(opened, pages[20, 30], width=NARROW)
    for name in ("chart-divergence", "chart-perplexity"):
        texts = opened.execute_script(
            f"""return [...document.querySelectorAll("#{name} .names_marks text")]
            .map((t) => [t.textContent, t.getAttribute("opacity") !== "0"])"""
        )
        assert len(texts) == 20
        note = opened.find_element("id", f"{name}-left-out").text
        assert [text for text, is_placed in texts if not is_placed and f"{text}" not in note] == []
        assert bool(note) == any(not is_placed for _, is_placed in texts)


def test_no_label_overlaps_the_base_line(opened: Any, pages: dict[Any, Path]) -> None:
    show(opened, pages[20, 30])
    line, labels = opened.execute_script(
        """const box = (e) => { const b = e.getBoundingClientRect(); return [b.top, b.bottom, e.textContent]; };
        const chart = document.querySelector("#chart-perplexity");
        const texts = [...chart.querySelectorAll(".names_marks text")].filter((t) => t.getAttribute("opacity") !== "0");
        return [box(chart.querySelector(".zero_marks line")), texts.map(box)]"""
    )
    assert labels
    assert [text for top, bottom, text in labels if top + 2 < line[0] < bottom - 2] == []


def test_all_files_can_be_selected_with_names(opened: Any, pages: dict[Any, Path]) -> None:
    show(opened, pages[3, 90])
    names = "return [...document.querySelectorAll('#chart-types .file-name')].map((n) => n.textContent)"
    files = report_of(3, 90).by_size().files
    assert opened.execute_script(names) == [files[0].name]
    Select(opened.find_element("id", "choose-file")).select_by_value("all")
    WebDriverWait(opened, 60).until(lambda b: len(b.execute_script(names)) == len(files))
    wait_until_drawn(opened)
    assert opened.execute_script(names) == [f.name for f in files]
    maps = "return document.querySelectorAll('#chart-types svg').length"
    assert opened.execute_script(maps) == len(files)


def test_the_page_prints(opened: Any) -> None:
    pdf = opened.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert base64.b64decode(pdf["data"]).startswith(b"%PDF-")


def test_print_has_names_and_no_controls(opened: Any) -> None:
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    visible = "return [...document.querySelectorAll(arguments[0])].map((e) => e.checkVisibility())"
    assert set(opened.execute_script(visible, ".file-name")) == {True}
    assert set(opened.execute_script(visible, ".chooser, nav, .hint")) == {False}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen"})
