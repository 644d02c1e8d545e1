"""Programs that run beside each other for a while: started, waited for, and ended together, whatever happens."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self, TypeVar

T = TypeVar("T")

EVERY_S: Final = 0.2
"""How often is asked what no descriptor tells: whether a server answers yet."""
ENDS_S: Final = 30.0
"""How long they may take to end when they are asked to."""
LAST_LINES: Final = 12
"""Of what a program said, where it matters what it said last."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAIL_BYTES: Final = 1 << 14


class Asked(Exception):  # noqa: N818 - no error: Ctrl-C is how this is meant to end
    """Somebody wants it to end."""


class Failed(Exception):  # noqa: N818 - what has happened, not what kind of error it is
    """It cannot go on: why, for people, and what the program said last."""


class Bell:
    """Signals that ask for an end, as a descriptor: none interrupts what is being tidied up."""

    def __enter__(self) -> Self:
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        # nohup: whoever ignores the end of the terminal goes on to.
        heard = [each for each in _SIGNALS if (each, signal.getsignal(each)) != (signal.SIGHUP, signal.SIG_IGN)]
        self._before = {each: signal.signal(each, _hear) for each in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._ear.close()
        self._mouth.close()

    def rest(self, pidfds: Sequence[int], longest_s: float | None) -> None:
        """Wait until one of these processes ends, at most so long. Raises Asked."""
        ear = self._ear.fileno()
        ready, _, _ = select.select([ear, *pidfds], [], [], longest_s)
        if ear in ready:
            self._ear.recv(64)
            raise Asked


def _hear(signum: int, frame: FrameType | None) -> None:
    """Do nothing: that there is a handler makes the signal arrive as a byte."""


class Program:
    """One of them, and a file with what it says."""

    def __init__(
        self, name: str, argv: Sequence[str], *, directory: Path, env: Mapping[str, str], goodbye: signal.Signals
    ) -> None:
        """Start it.

        Args:
            name: what people are told of it.
            argv: the command.
            directory: where it works, and where its log is.
            env: its environment.
            goodbye: the signal that asks it to end.
        """
        self.name = name
        self.goodbye = goodbye
        self._log = directory / f"{name}.log"
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal comes to us only, and each is ended in its own way.
            self._process = subprocess.Popen(
                argv,
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def code(self) -> int | None:
        """What it ended with, as subprocess gives it; None while it runs."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """What it has said, as far as it is the last."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")

    def last_words(self) -> str:
        """Its last lines, indented, without what a terminal would obey."""
        lines = self.said.splitlines()[-LAST_LINES:]
        shown = ["".join(char if char.isprintable() else "?" for char in line) for line in lines]
        return "".join(f"\n  {line}" for line in shown) or "\n  (nothing)"

    def tell(self, signum: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        self._process.send_signal(signum)

    def close(self) -> None:
        """End it at once, if it has not ended."""
        self._process.kill()
        self._process.wait()
        os.close(self.pidfd)


class Programs:
    """All of them. None outlives the block that they were started in."""

    def __init__(self, bell: Bell, directory: Path) -> None:
        self._bell = bell
        self._directory = directory
        self._all: list[Program] = []

    def __enter__(self) -> Self:
        return self

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        goodbye: signal.Signals = signal.SIGTERM,
    ) -> Program:
        """Start one. Raises Failed."""
        try:
            program = Program(
                name, argv, directory=self._directory, env=os.environ if env is None else env, goodbye=goodbye
            )
        except OSError as err:
            raise Failed(f"cannot start {argv[0]}: {err.strerror}") from None
        self._all.append(program)
        return program

    def rest(self, longest_s: float | None = None) -> None:
        """Wait until one of them ends, at most so long. Raises Asked."""
        self._bell.rest([each.pidfd for each in self._living()], longest_s)

    def until(self, gives: Callable[[], T | None], what: str, *, needs: Sequence[Program], longest_s: float) -> T:
        """Wait until something is there.

        Args:
            gives: it, or None as long as it is not there.
            what: it will have happened then, in words that go on "before ...".
            needs: who bring it about; if one of them ends, it never will be.
            longest_s: no longer than this.

        Raises:
            Asked: to end.
            Failed: it will not come, or took too long.
        """
        end_s = time.monotonic() + longest_s
        while (found := gives()) is None:
            for each in needs:
                if each.code is not None:
                    raise Failed(f"{each.name} ended with {each.code} before {what}. It said last:{each.last_words()}")
            if time.monotonic() >= end_s:
                said = "".join(f"\n{each.name} said last:{each.last_words()}" for each in needs)
                raise Failed(f"{longest_s:.0f} s have gone by before {what}{said}")
            self.rest(EVERY_S)
        return found

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        for each in self._living():
            each.tell(each.goodbye)
        end_s = time.monotonic() + ENDS_S
        while self._living() and (left_s := end_s - time.monotonic()) > 0:
            try:
                self.rest(left_s)
            except Asked:  # once more means: now. gpulaunch takes a second Ctrl-C so, too, and tidies up
                for each in self._living():
                    each.tell(signal.SIGINT if each.goodbye == signal.SIGINT else signal.SIGKILL)
        for each in self._all:
            each.close()

    def _living(self) -> list[Program]:
        return [each for each in self._all if each.code is None]
