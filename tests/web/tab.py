"""A page that is open in a browser, and what went wrong on it."""

from __future__ import annotations

import shutil
import time
from typing import Any

__all__ = ["CHROMIUM", "FLAGS", "WAIT_MS", "Tab"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Root has no sandbox of its own, and /dev/shm of a container is small. The others: ask nobody for anything.
FLAGS = [
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-gpu", "--force-color-profile=srgb"),
]
WAIT_MS = 90_000.0  # bounds every wait; nothing here takes it unless something is broken


class Tab:
    """A page that is open, and what went wrong on it."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(
            locale="en-GB", **{"viewport": {"width": 1280, "height": 1000}, "service_workers": "block", **context}
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.origin = url.rstrip("/")
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._see)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _see(self, request: Any) -> None:
        if not request.url.startswith((f"{self.origin}/", "data:")):
            self.strangers.append(request.url)

    def open(self, fragment: str = "") -> Any:
        self.page.goto(f"{self.origin}/{fragment}")
        return self.page

    def until(self, state: str) -> Any:
        """Wait until the page says that its connection is in this state."""
        self.page.wait_for_selector(f'#connection[data-state="{state}"]')
        return self.page

    def draw(self, chart: str) -> Any:
        """Go to a chart, and wait until it is drawn."""
        self.page.locator(f"#figure-{chart}").scroll_into_view_if_needed()
        self.page.wait_for_selector(f"#figure-{chart} .live .main-svg")
        return self.page

    def until_so(self, expression: str) -> Any:
        """Wait until an expression is true on the page.

        Playwright's own `wait_for_function` has the page evaluate a string, which the page's policy forbids.
        """
        last_s = time.monotonic() + WAIT_MS / 1000
        while not (value := self.page.evaluate(expression)):
            assert time.monotonic() < last_s, f"never so: {expression}"
            self.page.wait_for_timeout(50)
        return value
