"""Toy ranks: small programs that get stuck in one way each, without the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gpulaunch.launcher.hang.stacks import Target
from gpulaunch.launcher.loop import linux

WAIT_S = 120.0
RESTS_S = 1.0
"""Saying that it is ready is one call; where it wants to be is the next one."""
PYTHON = sys.executable  # a test may replace it to hide what lies beside it


class Toys:
    """Starts toy ranks and ends them after the test."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, source: str, *, rank: int = 0, armed: bool = True, env: Mapping[str, str] | None = None) -> Target:
        """Start one and wait until it is where it wants to be; `armed`: with what the launcher puts into its ranks."""
        home = self.where / f"rank-{rank}"
        home.mkdir()
        ready = home / "ready"
        arming = "from gpulaunch.launcher.failure import inside; inside.arm('error.json')\n" if armed else ""
        script = home / "train.py"
        script.write_text(f"def READY(): open({str(ready)!r}, 'w').close()\n{source}")
        code = f"import runpy\n{arming}runpy.run_path({str(script)!r}, run_name='__main__')"
        process = subprocess.Popen([PYTHON, "-c", code], cwd=home, env={**os.environ, **(env or {})})
        self._running.append(process)
        wait_until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, "the toy ended before it was ready"
        until_s = time.monotonic() + RESTS_S
        while linux.state_of(process.pid) != "S" and time.monotonic() < until_s:  # some work for ever
            time.sleep(0.02)
        return Target(rank=rank, pid=process.pid, rank_dir=str(home))

    def close(self) -> None:
        """End all of them, stopped ones too."""
        for process in self._running:
            process.send_signal(signal.SIGKILL)
            process.wait()


def wait_until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def toys(tmp_path: Path, census: None) -> Iterator[Toys]:
    toys = Toys(tmp_path)
    yield toys
    toys.close()
