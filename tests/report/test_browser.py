"""The page in a browser, from file://: it asks for nothing, says nothing wrong, and draws. Skipped without one.

pip install playwright, and chromium from the system (playwright's own is not needed).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from reported import a_run, of_many_ranks, with_everything, with_text

from gpulaunch.exporters.report.content import report_of
from gpulaunch.exporters.report.library import plotly_js
from gpulaunch.exporters.report.page import as_html
from gpulaunch.exporters.view.model import RunView

WAIT_S = 30.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return with_everything(a_run(tmp_path_factory.mktemp("browser") / "run"))


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        missing("no chromium on PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    with sync_playwright() as playwright:
        # A container's /dev/shm may be small, and root has no sandbox.
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield started
        started.close()


def missing(what: str) -> NoReturn:
    assert not os.environ.get("CI"), f"{what}: required in CI"
    pytest.skip(what)


def opened(browser: Any, path: Path, **how: Any) -> tuple[Any, list[str]]:
    """The page, and what it asked for or complained of."""
    page = browser.new_page(**how)
    trouble: list[str] = []
    page.on("request", lambda request: trouble.append(request.url) if request.url != path.as_uri() else None)
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: trouble.append(f"dialog {dialog.message}"))
    page.goto(path.as_uri())
    return page, trouble


def test_without_the_library_the_charts_are_still(view: RunView, browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(as_html(report_of(of_many_ranks(view, 64))))

    page, trouble = opened(browser, path, color_scheme="dark", viewport={"width": 480, "height": 800})

    assert trouble == []
    assert page.locator("svg.still:visible").count() >= 8
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    # Wide tables scroll by themselves: the page does not, on a narrow screen.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the bottlenecks"
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_with_the_library_they_are_drawn_by_it(view: RunView, browser: Any, tmp_path: Path) -> None:
    library = plotly_js()
    if library is None:
        pytest.skip("plotly is not installed")
    path = tmp_path / "report.html"
    document = report_of(with_text(view, lambda text: text + "<b onclick=alert(1)>bold</b>"))
    path.write_text(as_html(document, library=library))

    page, trouble = opened(browser, path, color_scheme="light")

    for figure in page.locator("figure").all():  # each is drawn when it comes into view
        figure.scroll_into_view_if_needed()
        figure.locator("div.live .main-svg").first.wait_for()
    assert trouble == []
    assert page.locator("figure").count() == len(document.charts())
    assert page.locator("svg.still:visible").count() == 0
    page.locator("figure").first.scroll_into_view_if_needed()
    assert page.locator("b").count() == 0
    assert "rgb(255, 255, 255)" in page.locator("div.live .main-svg").first.get_attribute("style")
    page.emulate_media(color_scheme="dark")
    until_s = time.monotonic() + WAIT_S  # Playwright's own wait has the page evaluate a string, which it forbids
    while "rgb(29, 33, 38)" not in page.locator("div.live .main-svg").first.get_attribute("style"):
        assert time.monotonic() < until_s, "the charts stayed light"
        page.wait_for_timeout(20)
    page.emulate_media(media="print")
    assert page.locator("svg.still:visible").count() == len(document.charts())
    assert page.locator("div.live:visible").count() == 0
