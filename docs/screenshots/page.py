"""Takes the pictures of the documentation: the page, `top` and the report, of a real run that is made for it.

    python docs/screenshots/page.py                     # docs/screenshots/*.png and *.svg; some three minutes
    python docs/screenshots/page.py --ranks 64 --seconds 120 --out pictures
    python docs/screenshots/page.py http://127.0.0.1:9464/ --out pictures           # the page of a run of yours, whole

The run is examples/digits_ddp.py; once it has gone on for a while, one of its ranks is killed (`gpulaunch chaos`).
Needs `pip install -e '.[test,examples]'` and a Chromium; none is fetched. A token goes behind the address:
`http://127.0.0.1:9464/#token=...`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
COMMAND = os.path.join(sysconfig.get_path("scripts"), "gpulaunch")
LONGEST_S = 600.0
WIDTH, HEIGHT = 1200, 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="take pictures of this page, and make no run")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=75.0, help="how long the run goes on before the first picture")
    parser.add_argument("--browser", default=shutil.which("chromium") or "chromium")
    args = parser.parse_args()
    with a_camera(args.out, args.browser) as camera:
        if args.url:
            for scheme in ("light", "dark"):
                camera.page(args.url, f"page-{scheme}", scheme=scheme, whole=True)
            camera.page(args.url, "page-narrow", width=390, whole=True)
        else:
            of_a_run(camera, ranks=args.ranks, seconds=args.seconds)
    return 0


@contextmanager
def a_camera(out: Path, chromium: str) -> Iterator[Camera]:
    """One that puts its pictures into a directory, which it makes."""
    from playwright.sync_api import sync_playwright

    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        # Without a sandbox: it looks at pages of ours, and root has none.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield Camera(browser, out)
        browser.close()


def of_a_run(camera: Camera, *, ranks: int, seconds: float) -> None:
    """While it goes on, after a rank was killed, and when it is over."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # its last act is a report, too
        run_dir = Path(directory, "digits")
        with a_run(run_dir, ranks) as run:
            run.wait(lambda view: (view.get("elapsed_seconds") or 0) >= seconds and view["steps"] > 0)
            for scheme in ("light", "dark"):
                camera.page(run.url, f"page-{scheme}", scheme=scheme)
            before = run.view()["steps"]
            subprocess.run([COMMAND, "chaos", "kill-rank", str(ranks - 1), "--job-dir", run_dir], check=True)
            run.wait(lambda view: bool(view.get("restarts")) and view["attempt"] == 1)
            run.wait(lambda view: view["steps"] > before + 200)
            camera.page(run.url, "page-restarts", part="#failures")
            words = [run_dir, "--out", camera.out, "--pages", "ranks", "findings"]
            subprocess.run([sys.executable, HERE / "top.py", *words], check=True)
        report = Path(directory, "report.html")
        subprocess.run([COMMAND, "report", run_dir, "--html", report], check=True)
        camera.report(report, "report")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job that goes on, and where its page is."""

    process: subprocess.Popen[str]
    url: str

    def view(self) -> dict[str, Any]:
        """The run as its page has it."""
        with urllib.request.urlopen(f"{self.url}api/run.json", timeout=30) as answer:  # noqa: S310 - of ours
            view: dict[str, Any] = json.load(answer)
            return view

    def wait(self, until: Callable[[dict[str, Any]], bool]) -> None:
        """Look once a second."""
        last_s = time.monotonic() + LONGEST_S
        while (view := self.view()).get("starting") or not until(view):
            if self.process.poll() is not None or time.monotonic() > last_s:
                raise SystemExit("the run did not get to where its picture is taken: look at what it has said")
            time.sleep(1)


@contextmanager
def a_run(run_dir: Path, ranks: int) -> Iterator[Run]:
    """Have the example learn for as long as this lasts."""
    home = run_dir.parent
    shutil.copytree(EXAMPLES, home / EXAMPLES.name)
    argv = [COMMAND, "--nproc", str(ranks), "--job-dir", run_dir.name, "--max-restarts", "1"]
    argv += ["examples/digits_ddp.py", "--epochs", "100000", "--workers", "1", "--save-every", "500"]
    said = run_dir.with_suffix(".txt")
    with said.open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, text=True, cwd=home)
    try:
        yield Run(process=process, url=_address(process, said))
    except BaseException:
        sys.stderr.write(said.read_text()[-4000:])
        raise
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _address(process: subprocess.Popen[str], said: Path) -> str:
    last_s = time.monotonic() + LONGEST_S
    while not (found := re.search(r"metrics (http://\S+/)metrics", said.read_text())):
        if process.poll() is not None or time.monotonic() > last_s:
            raise SystemExit("the run gave no address")
        time.sleep(0.2)
    return found[1]


class Camera:
    """Takes pictures with a browser, into a folder."""

    def __init__(self, browser: Any, out: Path) -> None:
        self._browser = browser
        self.out = out

    def page(
        self, url: str, name: str, *, scheme: str = "light", width: int = WIDTH, whole: bool = False, part: str = ""
    ) -> None:
        """The first screen of a run's page, the whole of it, or one part."""
        with self._opened(url, scheme, width) as page:
            page.wait_for_selector('#connection[data-state="live"]')
            if whole or part:  # charts are drawn when they come into view
                height = page.evaluate("document.documentElement.scrollHeight")
                page.set_viewport_size({"width": width, "height": height + 400})
            while not page.evaluate(DRAWN):  # the page's policy forbids playwright's own way of waiting
                page.wait_for_timeout(100)
            if whole:  # drawn, charts may take less than the room that was left for them
                height = page.evaluate("document.body.getBoundingClientRect().bottom")
                page.set_viewport_size({"width": width, "height": round(height)})
            if part:
                page.locator(part).screenshot(path=self._named(name))
            else:
                page.screenshot(path=self._named(name), full_page=whole)

    def report(self, file: Path, name: str) -> None:
        """The first screen of a report."""
        with self._opened(file.as_uri(), "light", WIDTH) as page:
            page.wait_for_load_state()
            page.screenshot(path=self._named(name))

    @contextmanager
    def _opened(self, url: str, scheme: str, width: int) -> Iterator[Any]:
        context = self._browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(LONGEST_S * 1000)  # the sidecar steps back behind ranks that take all cores
        page.goto(url)
        yield page
        context.close()

    def _named(self, name: str) -> str:
        path = self.out / f"{name}.png"
        print(path)
        return str(path)


# Of the charts in sight.
DRAWN = """() => [...document.querySelectorAll("figure")].every((one) => {
    const {top, bottom} = one.getBoundingClientRect();
    const drawn = !window.Plotly || one.querySelector(".live .main-svg");
    return !one.checkVisibility() || bottom < 0 || top > innerHeight || drawn;
})"""


if __name__ == "__main__":
    raise SystemExit(main())
