"""The application on a terminal that is not there: what it shows, as text, and stories that are played on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.strip import Strip

from gpulaunch.exporters.tui.app import Top
from gpulaunch.exporters.tui.reader import Reader, Snapshot
from gpulaunch.exporters.tui.tail import LogPlace, Tail
from gpulaunch.exporters.view.model import RunView

WAIT_S = 30.0
LINES = tuple(f"line {at}" for at in range(200))


def strips(app: Top) -> list[Strip]:
    """The lines of the screen, top down."""
    return app.screen._compositor.render_strips()


def shown(app: Top) -> str:
    return "\n".join(strip.text.rstrip() for strip in strips(app))


def drive(
    app: Top,
    story: Callable[[Pilot[None]], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
    *,
    notifications: bool = True,
) -> None:
    """Have the story played on the application."""

    async def play() -> None:
        async with app.run_test(size=size, notifications=notifications) as pilot:
            await story(pilot)

    asyncio.run(play())


async def until(pilot: Pilot[None], text: str) -> str:
    """Wait until this is on the screen."""
    app = pilot.app
    assert isinstance(app, Top)
    for _ in range(int(WAIT_S / 0.02)):
        await pilot.pause(0.02)
        if text in shown(app):
            return shown(app)
    pytest.fail(f"{text!r} never came on the screen:\n{shown(app)}")


def top(view: RunView, log: Tail | None = None, **more: object) -> Top:
    """The application on a view that no disk is read for."""

    def tail(run_dir: Path, place: LogPlace) -> Tail:
        said = f"{place.stream} of rank {place.rank} attempt {place.attempt}"
        return log or Tail(place=place, path="log", lines=(*LINES, said))

    def reader(tell: Callable[[Snapshot], None]) -> Reader:
        return Reader(Path("run"), tell, load=lambda run_dir, window_s: view, tail=tail)

    return Top(Path("run"), reader=reader, **more)  # type: ignore[arg-type]
