"""Takes pictures of the page in all states that it can be in, to be looked at: nothing of them is kept here.

    python docs/screenshots/states.py OUT                      # OUT/<state>-light.png, -dark.png; some two minutes
    python docs/screenshots/states.py OUT --only live faulty

The states are those of tests/web: before the first rank, a run that goes on, one that is over, one that failed and
goes on, one of 64 ranks, one of 10^5 steps. Each picture has the whole page. Needs `pip install -e '.[test]'` and a
Chromium, as page.py does.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from page import Camera, a_camera

for room in ("store", "view", "web"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / room))

import kept_run  # noqa: E402 - found by the lines above
import scenes  # noqa: E402

# How each is made, and for how many seconds it has gone on by then.
STATES = {
    "empty": (scenes.empty, 0),
    "live": (scenes.live, 90),
    "finished": (scenes.finished, 90),
    "faulty": (scenes.faulty, 90),
    "64-ranks": (scenes.large, 60),
    "100000-steps": (scenes.long_run, 10_000),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=STATES, default=list(STATES), metavar="STATE")
    parser.add_argument("--browser", default=shutil.which("chromium") or "chromium")
    args = parser.parse_args()
    with a_camera(args.out, args.browser) as camera:
        for state in args.only:
            take(camera, state)
    return 0


def take(camera: Camera, state: str) -> None:
    """One state, light and dark."""
    make, seconds = STATES[state]
    kept_run.WALL_S = time.time() - seconds  # the tests have a clock of their own, which stands still: here it is now
    with tempfile.TemporaryDirectory() as directory:
        served = scenes.Served(make(Path(directory)))
        try:
            for scheme in ("light", "dark"):
                camera.page(served.url, f"{state}-{scheme}", scheme=scheme, whole=True)
        finally:
            served.close()


if __name__ == "__main__":
    raise SystemExit(main())
