"""What the tests of the library face share: a place to run in, and callers in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CALLER_TIMEOUT_S = 90.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, census: None) -> Path:
    """The test's own directory as the current one, and an environment that sets no option but these.

    Ranks are spawned, which lets programs without torch start before the fork server has imported it; tests of what
    callers get without asking delete PET_START_METHOD.
    """
    for name in list(os.environ):
        if name.startswith(("PET_", "GPULAUNCH_", "TORCHELASTIC_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PET_START_METHOD", "spawn")
    monkeypatch.setenv("GPULAUNCH_NO_PROFILE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Caller:
    """A Python program that uses the library: started, waited for, signalled."""

    def __init__(self, source: str, path: Path) -> None:
        path.write_text(textwrap.dedent(source))
        self.process = subprocess.Popen(
            [sys.executable, path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def until(self, text: str) -> None:
        """Read its output until a line with this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        pytest.fail(f"ended without saying {text!r}")

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self) -> tuple[int, str, str]:
        """The exit code, and what was printed and not read yet."""
        stdout, stderr = self.process.communicate(timeout=CALLER_TIMEOUT_S)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def start_caller(here: Path) -> Iterator[Callable[[str], Caller]]:
    """Start a program, given as source."""
    callers: list[Caller] = []

    def start(source: str) -> Caller:
        callers.append(Caller(source, here / f"caller{len(callers)}.py"))
        return callers[-1]

    yield start
    for caller in callers:
        if caller.process.poll() is None:
            caller.signal(signal.SIGKILL)
        caller.process.communicate()


@pytest.fixture
def call(start_caller: Callable[[str], Caller]) -> Callable[[str], str]:
    """Run a program to its good end and give what it printed."""

    def run(source: str) -> str:
        code, stdout, stderr = start_caller(source).wait()
        assert code == 0, f"exit {code}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
        return stdout

    return run
