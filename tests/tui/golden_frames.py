"""The screens that are kept as text beside the tests; `python tests/tui/golden_frames.py` writes them anew, to be read
before they are committed."""

from __future__ import annotations

import locale
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import views
from screen import drive, shown, top, until
from textual.pilot import Pilot

from gpulaunch.exporters.tui.once import once
from gpulaunch.exporters.tui.selection import Selection
from gpulaunch.exporters.tui.tail import LogPlace, Tail
from gpulaunch.exporters.view.model import RunView

GOLDEN = Path(__file__).parent / "golden"

LOG = Tail(
    place=LogPlace(node=0, attempt=0, rank=1, stream="stderr"),
    path="attempts/0/rank-1/stderr.log",
    lines=("epoch 1", "step 100 loss 0.31", "  File train.py, line 88, in main"),
    size_bytes=70_000,
    earlier=True,
)


class Trace:
    """A trace that is under way."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def run(self, say: Callable[[str], None]) -> None:
        say("rank 1: a trace of 500ms begins in 9 s")
        self._over.wait()

    def stop(self) -> None:
        self._over.set()


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A screen: of which run, after which keys."""

    view: RunView
    keys: str = ""
    selection: Selection = field(default_factory=Selection)
    until: str = "goodput"
    size: tuple[int, int] = (80, 24)
    encoding: str = "utf-8"


FRAMES: dict[str, Frame] = {
    "healthy": Frame(view=views.healthy()),
    "input-bound": Frame(view=views.input_bound()),
    "input-bound-findings": Frame(view=views.input_bound(), keys="2"),
    "input-bound-input": Frame(view=views.input_bound(), keys="3"),
    "input-bound-copies": Frame(view=views.input_bound(), keys="4"),
    "input-bound-memory": Frame(view=views.input_bound(), keys="5", selection=Selection(rank=1)),
    "input-bound-rank": Frame(view=views.input_bound(), keys="7", selection=Selection(rank=1), size=(100, 48)),
    "straggler": Frame(view=views.straggling(), selection=Selection(rank=3)),
    "straggler-first": Frame(view=views.straggling(), selection=Selection(sort="own step time"), size=(120, 16)),
    "restarted": Frame(view=views.restarted()),
    "failed": Frame(view=views.failed(), keys="6", size=(80, 30)),
    "finished": Frame(view=views.finished()),
    "ranks-64": Frame(view=views.crowd(64), selection=Selection(rank=37), size=(120, 30)),
    "ranks-64-only": Frame(view=views.crowd(64), selection=Selection(rank=37, only="! n1")),
    "ranks-256": Frame(view=views.crowd(256), selection=Selection(rank=200)),
    "nothing": Frame(view=views.nothing()),
    "ascii": Frame(view=views.healthy(), encoding="iso-8859-1"),
    "log": Frame(view=views.healthy(), keys="8", selection=Selection(rank=1), until="in main"),
    "trace": Frame(view=views.healthy(), keys="tt", selection=Selection(rank=1), until="begins in 9 s"),
    "help": Frame(view=views.healthy(), keys="?", until="filter ranks"),
    "narrow": Frame(view=views.straggling(), until="RUNNING", size=(40, 12)),
}
ONCE: dict[str, tuple[RunView, int]] = {
    "once-input-bound": (views.input_bound(), 100),
    "once-failed": (views.failed(), 80),
    "once-stopped": (views.stopped(), 80),
    "once-nothing": (views.nothing(), 80),
}


def drawn(name: str) -> str:
    """One of the screens above, as text."""
    if name in ONCE:
        view, width = ONCE[name]
        return once(view, width)
    frame, text = FRAMES[name], ""

    async def story(pilot: Pilot[None]) -> None:
        nonlocal text
        await until(pilot, "steps/s")
        app.selection = frame.selection
        app.select(frame.selection.rank)
        await pilot.press(*frame.keys)
        await until(pilot, frame.until)
        await pilot.pause()
        text = shown(app)

    with patch.object(locale, "getpreferredencoding", lambda _: frame.encoding):
        app = top(frame.view, log=LOG, trace=lambda _: Trace())
        drive(app, story, frame.size, notifications=False)
    return f"{text}\n"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in (*FRAMES, *ONCE):
        (GOLDEN / f"{each}.txt").write_text(drawn(each), encoding="utf-8")
