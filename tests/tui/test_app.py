"""The application, driven by Textual's own pilot: keys, sizes, help, logs, stacks, traces, a disk that stalls."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import views
from runs_on_disk import whole
from screen import WAIT_S, drive, shown, strips, top, until
from textual.pilot import Pilot
from textual.widgets import Input

from gpulaunch.exporters.tui.app import Top
from gpulaunch.exporters.tui.reader import Reader, Request, Snapshot
from gpulaunch.exporters.tui.tail import LogPlace, Tail
from gpulaunch.exporters.tui.task import Command
from gpulaunch.exporters.tui.widgets import RankTable
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.text import inert

# -- from a directory to the screen


def test_a_run_on_disk_comes_on_the_screen(tmp_path: Path) -> None:
    run_dir = whole(tmp_path / "run", 30)
    log = run_dir / "attempts" / "0" / "rank-1" / "stderr.log"
    log.parent.mkdir()
    log.write_text(f"first\nlast {views.HOSTILE}\n", errors="surrogateescape")

    async def story(pilot: Pilot[None]) -> None:
        text = await until(pilot, "FINISHED")
        assert "demo" in text
        await pilot.press("down", "l")
        text = await until(pilot, "last ared\\x1b]0;title")
        assert "attempts/0/rank-1/stderr.log" in text

    drive(Top(run_dir), story)


def test_a_directory_of_nothing_comes_on_the_screen_too(tmp_path: Path) -> None:
    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "UNKNOWN")

    drive(Top(tmp_path), story)


# -- keys


def test_every_page_opens_with_its_key_and_escape_goes_back() -> None:
    app = top(views.input_bound())

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        for key, text in [
            ("2", "Set num_workers to 4"),
            ("3", "CONTEND"),
            ("4", "WAITS FOR THE GPU"),
            ("5", "TRAINER"),
            ("6", "EVENTS"),
            ("7", "pid 4000"),
            ("8", "stderr of rank 0"),
            ("1", "PHASES"),
            ("question_mark", "filter ranks"),
        ]:
            await pilot.press(key)
            await until(pilot, text)
        await pilot.press("escape")
        await until(pilot, "PHASES")

    drive(app, story)


def test_tab_turns_the_pages_and_comes_round() -> None:
    app = top(views.healthy())

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        seen = [app.page]
        for _ in range(8):
            await pilot.press("tab")
            seen.append(app.page)
        assert seen[0] == seen[-1] == "ranks"
        assert len(set(seen)) == 8
        await pilot.press("shift+tab")
        assert app.page == "log"

    drive(app, story)


def test_arrows_select_a_rank_and_stop_at_the_ends() -> None:
    app = top(views.crowd(64))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "64 ranks")
        await pilot.press("up")
        assert app.selection.rank in (None, 0)
        await pilot.press("down", "j", "j", "k")
        assert app.selection.rank == 2
        await pilot.press("end")
        assert app.selection.rank == 63
        assert highlighted(app) == ["63"]
        await pilot.press("pageup")
        await pilot.press("enter")
        await until(pilot, f"rank {app.selection.rank}  node")

    drive(app, story)


def test_new_data_right_after_a_key_does_not_put_the_cursor_back() -> None:
    app = top(views.crowd(64))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "64 ranks")
        table = app.query_one("#ranks RankTable", RankTable)
        table.action_cursor_down()
        assert app.view is not None
        app.on_top_read(Top.Read(Snapshot(view=app.view, log=None, window_s=None)))  # before any message of the table
        assert app.selection.rank == 1
        await pilot.pause()
        assert highlighted(app) == ["1"]

    drive(app, story)


def highlighted(app: Top) -> list[str]:
    """The first words of the lines that are in reverse from their beginning, below the tabs."""
    lines = strips(app)[7:-1]
    return [line.text.split()[0] for line in lines if (style := next(iter(line)).style) and style.reverse]


@pytest.mark.parametrize("no_color", [False, True])
def test_the_selected_rank_is_seen_whichever_it_is_with_colours_or_without(
    no_color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    app = top(views.crowd(256))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "256 ranks")
        for page, number in product("135", (0, 1, 100, 254, 255)):
            await pilot.press(page)
            app.select(number)
            await pilot.pause()
            assert page == "3" or highlighted(app) == [str(number)]

    drive(app, story)


def test_the_selected_rank_stays_selected_when_the_order_changes() -> None:
    """Sorted by what changes from second to second, the cursor goes with the rank."""
    made = [views.crowd(64)]
    app = Top(Path("run"), reader=lambda tell: Reader(Path("run"), tell, load=lambda *_: made[0]))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "64 ranks")
        await pilot.press("s", "s", "down")
        chosen = app.selection.rank
        slow = [replace(rank, step_seconds_now=0.2 + rank.rank) for rank in made[0].ranks]
        made[0] = replace(made[0], ranks=tuple(slow), name="slower")
        await until(pilot, "slower")
        assert app.selection.rank == chosen
        assert highlighted(app) == [str(chosen)]
        made[0] = replace(made[0], ranks=tuple(slow[:8]), name="fewer")
        await until(pilot, "fewer")
        assert highlighted(app) == [str(chosen)] or highlighted(app) == ["7"]

    drive(app, story)


def test_ranks_are_sorted_and_filtered() -> None:
    app = top(views.crowd(64))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "64 ranks")
        await pilot.press("s")
        await until(pilot, "sorted by own step time")
        await pilot.press("home")
        assert shown(app).index("   37   n4") < shown(app).index("    0   n0")
        await pilot.press("slash")
        assert app.query_one("#filter", Input).has_focus
        await pilot.press(*"n1 37", "enter")
        text = await until(pilot, "9 ranks, own step time")
        assert "by own step time, only n1 37" in text
        await pilot.press("slash", *"xq", "enter")
        await until(pilot, "no filter: 'xq'")
        assert app.selection.only == "n1 37"
        await pilot.press("slash", "q", "escape")
        assert app.selection.only == "n1 37"
        assert app.is_running

    drive(app, story)


def _used_before() -> RunView:
    """A run of one attempt, in a directory that has another one of an earlier run."""
    view = views.failed()
    before, newest = view.attempts
    return replace(view, attempts=(replace(before, earlier=True), replace(newest, number=0, directory=1)), attempt=0)


@pytest.mark.parametrize("made", [views.failed, _used_before])
def test_the_log_changes_stream_attempt_and_rank(made: Callable[[], RunView]) -> None:
    app = top(made())

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "FAILED")
        await pilot.press("l")
        await until(pilot, "stderr of rank 0 attempt 1")
        await pilot.press("e")
        await until(pilot, "stdout of rank 0 attempt 1")
        await pilot.press("left_square_bracket")
        await until(pilot, "stdout of rank 0 attempt 0")
        await pilot.press("right_square_bracket")
        await until(pilot, "stdout of rank 0 attempt 1")
        await pilot.press("home")
        await until(pilot, "line 0")
        await pilot.press("end")
        await until(pilot, "attempt 1")
        await pilot.press("escape", "down", "l")
        await until(pilot, "stdout of rank 1 attempt 1")

    drive(app, story)


def test_the_window_of_the_curves_is_asked_of_the_reader() -> None:
    asked: list[float | None] = []

    def load(run_dir: Path, window_s: float | None) -> RunView:
        asked.append(window_s)
        return views.healthy()

    app = Top(Path("run"), reader=lambda tell: Reader(Path("run"), tell, load=load))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        await pilot.press("w")
        await until(pilot, "curves of the last 10 min")
        for _ in range(1000):
            await pilot.pause(0.02)
            if asked[-1] == 600.0:
                return
        pytest.fail(f"never read: {asked}")

    drive(app, story)


# -- sizes


@pytest.mark.parametrize("ranks", [2, 64, 256])
def test_a_terminal_of_any_size_is_filled_and_not_more(ranks: int) -> None:
    app = top(views.crowd(ranks) if ranks > 2 else views.healthy())

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        for width, height in [(80, 24), (200, 60), (40, 10), (20, 5), (81, 25)]:
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            lines = strips(app)
            assert len(lines) == height
            assert {line.cell_length for line in lines} == {width}

    drive(app, story)


def test_a_long_page_scrolls_to_its_end() -> None:
    app = top(views.input_bound())

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        await pilot.press("7")
        assert "found: sync-every-step" not in await until(pilot, "local rank")
        for key in ("end", "home", "G", "g", "pagedown", "home", "space"):
            await pilot.press(key)
            await until(pilot, "local rank" if key in ("home", "g") else "found: sync-every-step")

    drive(app, story)


def test_a_table_wider_than_the_screen_scrolls_sideways() -> None:
    app = top(views.input_bound())

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        await pilot.press("5")
        assert "OOM" not in await until(pilot, "TRAINER")
        await pilot.press(*["right"] * 40)
        await until(pilot, "OOM")

    drive(app, story, size=(40, 16))


# -- logs


def lines_of_log(app: Top) -> list[str]:
    return re.findall(r"^line \d+", shown(app), re.M)


def test_a_log_follows_its_end_until_it_is_scrolled() -> None:
    lines = [f"line {at}" for at in range(100)]

    def tail(run_dir: Path, place: LogPlace) -> Tail:
        return Tail(place=place, path="log", lines=tuple(lines))

    def reader(tell: Callable[[Snapshot], None]) -> Reader:
        return Reader(Path("run"), tell, load=lambda *_: views.healthy(), tail=tail)

    app = Top(Path("run"), reader=reader)

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        await pilot.press("l")
        await until(pilot, "line 99")
        lines.append("and another")
        await until(pilot, "and another")
        await pilot.press("pageup", "pageup")
        before = lines_of_log(app)
        lines.append("the last")
        while app.log_tail is None or app.log_tail.lines[-1] != "the last":
            await pilot.pause(0.02)
        await pilot.pause()
        assert lines_of_log(app) == before
        await pilot.press("end")
        await until(pilot, "the last")

    drive(app, story)


def test_the_log_of_another_rank_is_not_shown_as_this_one_s() -> None:
    """While it is read, nothing is: not what was read of the rank before."""
    answers = threading.Event()

    def tail(run_dir: Path, place: LogPlace) -> Tail:
        assert place.rank == 0 or answers.wait(WAIT_S)
        return Tail(place=place, path="log", lines=(f"of rank {place.rank}",))

    def reader(tell: Callable[[Snapshot], None]) -> Reader:
        return Reader(Path("run"), tell, load=lambda *_: views.healthy(), tail=tail)

    app = Top(Path("run"), reader=reader)

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        await pilot.press("l")
        await until(pilot, "of rank 0")
        await pilot.press("escape", "down", "l")
        assert "\nof rank" not in await until(pilot, "reading the log of rank 1")
        answers.set()
        await until(pilot, "of rank 1")

    drive(app, story)


# -- stacks and traces


def test_a_trace_is_asked_for_twice_and_shows_what_the_command_says() -> None:
    asked: list[int | None] = []

    def trace(rank: int | None) -> Command:
        asked.append(rank)
        told = f"rank {rank}: a trace of 500 ms begins \x1b[2J"
        return Command([sys.executable, "-u", "-c", f"print({told!r}); raise SystemExit(1)"])

    app = top(views.healthy(), trace=trace)

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        await pilot.press("down", "t")
        await until(pilot, "t once more to begin")
        assert asked == []
        await pilot.press("down", "t")  # another key in between: asked anew
        assert asked == []
        await pilot.press("t")
        text = await until(pilot, "exit code 1")
        assert "rank 1: a trace of 500 ms begins \\x1b[2J" in text
        assert asked == [1]
        await pilot.press("T", "T")
        await until(pilot, "trace of all ranks")
        await until(pilot, "exit code 1")
        assert asked == [1, None]

    drive(app, story)


def test_a_stack_is_shown_from_its_top_and_one_at_a_time() -> None:
    go = threading.Event()

    class Stack:
        def run(self, say: Callable[[str], None]) -> None:
            say("main thread (has the GIL)")
            assert go.wait(WAIT_S)
            for at in range(100):
                say(f"  frame {at} (train.py:{at})")

        def stop(self) -> None:
            go.set()

    app = top(views.healthy(), dump=lambda view, rank: Stack())

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        await pilot.press("d")
        await until(pilot, "main thread")
        await pilot.press("escape", "d")
        await until(pilot, "is not over yet")
        go.set()
        text = await until(pilot, "frame 10 ")
        assert "main thread" in text
        await pilot.press("end")
        await until(pilot, "frame 99 ")

    drive(app, story)


def test_a_run_that_is_over_has_no_stacks_and_no_traces() -> None:
    def never(*_: object) -> Command:
        raise AssertionError("asked of a run that is over")

    app = top(views.finished(), dump=never, trace=never)

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "FINISHED")
        await pilot.press("d")
        await until(pilot, "the run is finished")
        await pilot.press("t", "t")
        await until(pilot, "there is nothing to trace")

    drive(app, story)


def test_quitting_ends_a_trace_that_is_under_way() -> None:
    app = top(
        views.healthy(),
        trace=lambda rank: Command([sys.executable, "-u", "-c", "import time; print('began'); time.sleep(600)"]),
    )

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        await pilot.press("t", "t")
        await until(pilot, "began")
        await pilot.press("q")

    drive(app, story)  # the census sees that the command is gone


# -- what goes wrong


def test_before_anything_was_read_it_says_so() -> None:
    answers = threading.Event()

    def load(run_dir: Path, window_s: float | None) -> RunView:
        assert answers.wait(WAIT_S)
        raise RuntimeError("no such \x1b[2J")

    app = Top(Path("run"), reader=lambda tell: Reader(Path("run"), tell, load=load))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "reading the run")
        answers.set()
        await until(pilot, "cannot read the run: RuntimeError: no such \\x1b[2J")

    drive(app, story)


def test_a_run_that_can_no_longer_be_read_stays_on_the_screen_with_the_reason() -> None:
    gone: list[OSError] = []

    def load(run_dir: Path, window_s: float | None) -> RunView:
        if gone:
            raise gone[0]
        return views.healthy()

    app = Top(Path("run"), reader=lambda tell: Reader(Path("run"), tell, load=load))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        gone.append(FileNotFoundError("run"))
        text = await until(pilot, "cannot read the run: FileNotFoundError: run")
        assert "2 ranks" in text
        await pilot.press("2")
        await until(pilot, "nothing found")
        gone.clear()
        while "cannot read" in shown(app):
            await pilot.pause(0.02)

    drive(app, story)


def test_a_disk_that_stalls_stops_no_key() -> None:
    answers, clock = threading.Event(), [0.0]
    reads: list[int] = []

    def load(run_dir: Path, window_s: float | None) -> RunView:
        reads.append(1)
        if len(reads) > 1:
            assert answers.wait(WAIT_S)
        return views.healthy()

    readers: list[Reader] = []

    def reader(tell: Callable[[Snapshot], None]) -> Reader:
        readers.append(Reader(Path("run"), tell, load=load, now=lambda: clock[0]))
        return readers[0]

    app = Top(Path("run"), reader=reader)

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        clock[0] += 2.0  # time to read again
        readers[0].request(Request(window_s=60.0))
        while len(reads) < 2:
            await pilot.pause(0.02)
        clock[0] += 40.0
        await until(pilot, "the disk has not answered for 40s")
        await pilot.press("2")
        await until(pilot, "nothing found")
        await pilot.press("question_mark")
        await until(pilot, "filter ranks")

    drive(app, story)  # and it ends while the disk still stalls
    answers.set()


def test_a_frame_that_cannot_be_drawn_costs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    app = top(views.healthy())

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by \x1b[2J")

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "RUNNING")
        with monkeypatch.context() as patch:
            patch.setattr("gpulaunch.exporters.tui.summary.summary", broken)
            await pilot.press("2")
            await until(pilot, "cannot draw this: ZeroDivisionError: by \\x1b[2J")
        await pilot.press("1")
        await until(pilot, "RUNNING")

    drive(app, story)


def test_hostile_text_reaches_the_terminal_as_text() -> None:
    app = top(replace(views.hostile(), name="\x1b]0;title\x07[bold]not markup[/bold]"))

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, "\\x1b]0;title\\x07[bold]")
        for key in "12345678":
            await pilot.press(key)
            await pilot.pause()
            assert [line.text for line in strips(app) if inert(line.text) != line.text] == []

    drive(app, story)


def test_q_and_ctrl_c_quit() -> None:
    for key in ("q", "ctrl+c"):
        app = top(views.healthy())

        async def story(pilot: Pilot[None], key: str = key) -> None:
            await until(pilot, "RUNNING")
            await pilot.press(key)
            await pilot.pause()

        drive(app, story)
        assert app.return_code == 0
