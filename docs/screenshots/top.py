"""Screenshots of `gpulaunch top` as SVG files, for the documentation.

    python docs/screenshots/top.py RUN --out DIR [--pages ranks findings]

RUN is a run directory; with --rank N that rank is selected. It writes a file for each page, or for those named:
top-ranks.svg, top-findings.svg ... Needs pip install 'gpulaunch[top]'.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from textual.pilot import Pilot

from gpulaunch.exporters.tui.app import Top

WAIT_S = 30.0
PAGES = ("ranks", "findings", "input", "copies", "memory", "history", "rank", "log", "help")


async def take(
    run_dir: Path, out: Path, *, rank: int | None = None, size: tuple[int, int], pages: Sequence[str] = PAGES
) -> list[Path]:
    """Write a picture of each page; give the files."""
    app = Top(run_dir)
    files: list[Path] = []
    async with app.run_test(size=size) as pilot:
        await _until(pilot, lambda: app.view is not None)
        app.select(rank)
        for page in pages:
            app.action_page(page)
            if page == "log":
                await _until(pilot, lambda: app.log_tail is not None)
            await pilot.pause()
            file = out / f"top-{page}.svg"
            picture = app.export_screenshot(title=f"gpulaunch top {run_dir.name}")
            # Whoever looks at it has a font of his own: none is asked for elsewhere.
            picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
            file.write_text(picture, encoding="utf-8")
            files.append(file)
    return files


async def _until(pilot: Pilot[None], ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not ready():
            await pilot.pause(0.05)


def main() -> None:
    """Read the words and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("screenshots"))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", default="100x24")
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES, metavar="PAGE")
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    given.out.mkdir(parents=True, exist_ok=True)
    files = asyncio.run(take(given.run, given.out, rank=given.rank, size=(width, height), pages=given.pages))
    for file in files:
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
