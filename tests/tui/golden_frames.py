"""The frames that are kept as text beside the tests; `python tests/tui/golden_frames.py` writes them anew, to be read
before they are committed."""

from __future__ import annotations

from pathlib import Path

import views

from gpulaunch.exporters.tui.cells import text_of
from gpulaunch.exporters.tui.frame import frame, once
from gpulaunch.exporters.tui.look import Look, Output, Page
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
TRACE = Output(title="trace of rank 1", lines=("rank 1: a trace of 500ms begins in 9 s",), running=True, follow=True)

FRAMES: dict[str, tuple[RunView, Look, int, int]] = {
    "healthy": (views.healthy(), Look(), 80, 24),
    "input-bound": (views.input_bound(), Look(), 80, 24),
    "input-bound-findings": (views.input_bound(), Look(page=Page.FINDINGS), 80, 24),
    "input-bound-input": (views.input_bound(), Look(page=Page.INPUT), 80, 24),
    "input-bound-copies": (views.input_bound(), Look(page=Page.COPIES), 80, 24),
    "input-bound-memory": (views.input_bound(), Look(page=Page.MEMORY, rank=1), 80, 24),
    "input-bound-rank": (views.input_bound(), Look(page=Page.RANK, rank=1), 100, 48),
    "straggler": (views.straggling(), Look(rank=3), 80, 24),
    "straggler-first": (views.straggling(), Look(sort="own step time"), 120, 16),
    "restarted": (views.restarted(), Look(), 80, 24),
    "failed": (views.failed(), Look(page=Page.HISTORY), 80, 30),
    "finished": (views.finished(), Look(), 80, 24),
    "ranks-64": (views.crowd(64), Look(rank=37), 120, 30),
    "ranks-64-only": (views.crowd(64), Look(rank=37, only="! n1"), 80, 24),
    "ranks-256": (views.crowd(256), Look(rank=200), 80, 24),
    "nothing": (views.nothing(), Look(), 80, 24),
    "ascii": (views.healthy(), Look(ascii_only=True), 80, 24),
    "log": (views.healthy(), Look(page=Page.LOG, rank=1, log=LOG), 80, 24),
    "trace": (views.healthy(), Look(page=Page.OUTPUT, rank=1, output=TRACE), 80, 24),
    "help": (views.healthy(), Look(page=Page.HELP), 80, 24),
    "narrow": (views.straggling(), Look(), 40, 12),
}
ONCE: dict[str, tuple[RunView, int]] = {
    "once-input-bound": (views.input_bound(), 100),
    "once-failed": (views.failed(), 80),
    "once-stopped": (views.stopped(), 80),
    "once-nothing": (views.nothing(), 80),
}


def drawn(name: str) -> str:
    """One of the frames above, as text."""
    if name in ONCE:
        view, width = ONCE[name]
        return once(view, width)
    view, look, width, height = FRAMES[name]
    return "".join(f"{text_of(each).rstrip()}\n" for each in frame(view, look, width, height))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in (*FRAMES, *ONCE):
        (GOLDEN / f"{each}.txt").write_text(drawn(each), encoding="utf-8")
