"""Commands that are run beside the screen: what they say, how they end, and that they end."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

import views

from gpulaunch.exporters.tui.task import BackgroundTask, Command
from gpulaunch.exporters.view.text import inert

WAIT_S = 30.0


def python(code: str) -> Command:
    return Command([sys.executable, "-u", "-c", code])


def said(command: Command) -> list[str]:
    lines: list[str] = []
    command.run(lines.append)
    return lines


def test_it_says_what_the_command_prints_on_both_streams() -> None:
    assert said(python("import sys; print('one'); print('two', file=sys.stderr)")) == ["one", "two"]


def test_it_says_how_the_command_failed() -> None:
    assert said(python("print('no'); raise SystemExit(2)")) == ["no", "exit code 2"]


def test_a_command_that_is_not_there_is_told() -> None:
    assert said(Command(["no-such-command-anywhere"])) == [
        "cannot run no-such-command-anywhere: No such file or directory"
    ]


def test_what_it_prints_is_harmless_and_bounded() -> None:
    told = views.HOSTILE.encode("utf-8", "surrogateescape")

    lines = said(python(f"import sys; sys.stdout.buffer.write({told!r} + b'\\n' + b'x' * 10**5 + b'\\n')"))

    assert [line for line in lines if inert(line) != line] == []
    assert max(map(len, lines)) <= 4000


def test_a_command_that_takes_long_is_ended() -> None:
    """By the interrupt that Ctrl-C is; the census of the tests sees that nothing is left."""
    lines: queue.Queue[str | None] = queue.Queue()
    task = BackgroundTask(python("import time; print('began'); time.sleep(600)"), lines.put)
    task.start()
    assert lines.get(timeout=WAIT_S) == "began"

    task.close()

    rest = [lines.get(timeout=WAIT_S)]
    while rest[-1] is not None:
        rest.append(lines.get(timeout=WAIT_S))
    assert rest[-2] == "exit code -2"


def test_a_command_that_will_not_end_is_killed() -> None:
    lines: queue.Queue[str | None] = queue.Queue()
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('began'); time.sleep(600)"
    task = BackgroundTask(python(stubborn), lines.put)
    task.start()
    assert lines.get(timeout=WAIT_S) == "began"

    task.close()

    assert lines.get(timeout=WAIT_S) == "exit code -9"


def test_one_that_is_stopped_before_it_began_does_not_begin() -> None:
    command = python("print('began')")

    command.stop()

    assert said(command) == []


def test_a_task_that_fails_is_told_like_any_other() -> None:
    class Fails:
        def run(self, say: Callable[[str], None]) -> None:
            say("first")
            raise ValueError("bad\x1b[2J")

        def stop(self) -> None:
            pass

    lines: list[str | None] = []
    over = threading.Event()

    def say(line: str | None) -> None:
        lines.append(line)
        if line is None:
            over.set()

    BackgroundTask(Fails(), say).start()

    assert over.wait(WAIT_S)
    assert lines == ["first", "ValueError: bad\\x1b[2J", None]
