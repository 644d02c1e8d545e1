"""What a verb says while it takes long and somebody looks on."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator

__all__ = ["told_while"]

_PATIENCE_S = 2.0
_AGAIN_S = 0.5


@contextlib.contextmanager
def told_while(
    what: str, *, patience_s: float = _PATIENCE_S, again_s: float = _AGAIN_S
) -> Generator[Callable[[str], None]]:
    """Say what is being done, and for how long already, once that takes longer than `patience_s`.

    On a terminal only, on stderr, in one line that is gone afterwards. The block is given a function that says what is
    being done from then on.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    done = threading.Event()
    doing = [what]
    thread = threading.Thread(target=_tell, args=(doing, done, patience_s, again_s), daemon=True)
    thread.start()
    try:
        yield lambda now: doing.__setitem__(0, now)
    finally:
        done.set()
        thread.join()


def _tell(doing: list[str], done: threading.Event, patience_s: float, again_s: float) -> None:
    began_s = time.monotonic()
    if done.wait(patience_s):
        return
    blank = " " * (shutil.get_terminal_size().columns - 1)
    with contextlib.suppress(OSError, ValueError):  # the terminal has gone: nobody looks on any more
        while True:
            line = f"{doing[0]}, {time.monotonic() - began_s:.0f} s"[: len(blank)]
            print(f"\r{line:<{len(blank)}}", end="", file=sys.stderr, flush=True)
            if done.wait(again_s):
                break
        print(f"\r{blank}\r", end="", file=sys.stderr, flush=True)
