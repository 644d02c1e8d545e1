"""What takes longer than two seconds says so, to somebody who looks on."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpulaunch.launcher.cli.waiting import told_while

WAIT_S = 30.0
SLOW = """
import sys
from gpulaunch.launcher.cli.waiting import told_while
with told_while("reading A", patience_s=0.1, again_s=0.01) as doing:
    sys.stdin.readline()
    doing("reading B")
    sys.stdin.readline()
print("the answer", file=sys.stderr)
"""


class Terminal:
    """A program whose stderr is a terminal, and what stands there."""

    def __init__(self, program: str) -> None:
        self.screen, stderr = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stderr=stderr, bufsize=0
        )
        os.close(stderr)

    def goes_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def wait_for(self, text: str) -> None:
        until_s = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert select.select([self.screen], [], [], max(0.0, until_s - time.monotonic()))[0], self.shown
            self.shown += os.read(self.screen, 65536).decode()

    def close(self) -> None:
        with self.process:
            self.process.kill()
        os.close(self.screen)


def test_on_a_terminal_it_says_what_it_does_and_wipes_it_away() -> None:
    terminal = Terminal(SLOW)
    try:
        terminal.wait_for("\rreading A, 0 s")
        terminal.goes_on()
        terminal.wait_for("\rreading B, ")
        terminal.goes_on()
        terminal.wait_for("the answer")
        before = terminal.shown.partition("the answer")[0]
        assert before.endswith(" \r"), "the line is gone when the answer comes"
        assert "\n" not in before
        assert "\x1b" not in before, "no terminal has to understand anything"
    finally:
        terminal.close()


def test_what_is_quick_says_nothing() -> None:
    terminal = Terminal(SLOW.replace("patience_s=0.1", f"patience_s={WAIT_S}"))
    try:
        terminal.goes_on()
        terminal.goes_on()
        terminal.wait_for("the answer")
        assert terminal.shown.startswith("the answer")
    finally:
        terminal.close()


def test_where_nobody_looks_on_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with told_while("reading", patience_s=0.0, again_s=0.001) as doing:
        doing("reading more")
        time.sleep(0.05)

    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("verb", ["report", "compare", "flame", "top"])
def test_every_verb_that_reads_a_run_waits_like_that(verb: str) -> None:
    """By its source: what a verb does within it is in the verb's own tests."""
    from gpulaunch.launcher import cli

    assert "with told_while(" in (Path(cli.__file__).parent / f"{verb}.py").read_text()
