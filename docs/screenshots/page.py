"""Takes pictures of the page of a run: whole, in both schemes, and as a telephone has it.

    python docs/screenshots/page.py http://127.0.0.1:9464/ pictures/ [--browser /usr/bin/chromium]

Needs playwright (`pip install 'gpulaunch[test]'`) and a Chromium; none is fetched. A token goes behind the address:
`http://127.0.0.1:9464/#token=...`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SHOTS = {"light": (1280, "light"), "dark": (1280, "dark"), "narrow": (390, "light")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    args.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        # Without a sandbox: it looks at a page of ours, and root has none.
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        for name, (width, scheme) in SHOTS.items():
            context = browser.new_context(viewport={"width": width, "height": 1200}, color_scheme=scheme)
            _take(context.new_page(), args.url, args.folder / f"page-{name}.png")
            context.close()
        browser.close()
    return 0


def _take(page: Any, url: str, path: Path) -> None:
    page.goto(url)
    page.wait_for_selector('#connection[data-state="live"]')
    # Charts are drawn when they come into view: make everything come into view.
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height + 400})
    page.wait_for_function(
        "[...document.querySelectorAll('figure')].every((one) => !one.checkVisibility() || one.querySelector('svg'))"
    )
    page.screenshot(path=str(path), full_page=True)
    print(path)


if __name__ == "__main__":
    raise SystemExit(main())
