"""The tests of the page share the runs of the tests of the view and of the store, the node of tests/prometheus, and a
browser."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

for room in ("store", "view", "web", "report"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

from scenes import Scene, Served  # noqa: E402 - found by the lines above
from tab import CHROMIUM, FLAGS, Tab  # noqa: E402

_spec = importlib.util.spec_from_file_location(
    "node_of_prometheus", Path(__file__).parents[1] / "prometheus/conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
node = _module.node


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:

        def start(scene: Scene, **more: Any) -> Served:
            served = Served(scene, **more)
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Scene]:
    """Scenes, each made once: who shows them only reads."""
    made: dict[tuple[str, str], Scene] = {}

    def set_up(make: Callable[..., Scene], **how: Any) -> Scene:
        key = make.__name__, repr(how)
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp(make.__name__), **how)
        return made[key]

    return set_up


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's chromium, driven by playwright; no browser is fetched from anywhere.

    Of one module and not of the session: while it runs, playwright's event loop is this thread's.
    """
    with _driver() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        yield browser
        browser.close()


@contextmanager
def _driver() -> Iterator[Any]:
    if CHROMIUM is None:
        _missing("no chromium on PATH (Debian's package chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed (gpulaunch[test])")
        return
    with sync_playwright() as playwright:
        yield playwright


def _missing(what: str) -> None:
    assert not os.environ.get("CI"), f"{what}: required in CI"
    pytest.skip(what)


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Open a page; at the end nothing may have been complained of, and nobody else been asked."""
    tabs: list[Tab] = []

    def start(url: str, **context: Any) -> Tab:
        tabs.append(Tab(browser, url, **context))
        return tabs[-1]

    yield start
    for tab in tabs:
        tab.context.close()
        assert tab.strangers == []
        assert tab.complaints == []
