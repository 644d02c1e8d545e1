"""The real command at a terminal: what a rank that prints alone sees, and what its user sees of it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

_PROGRAM = """
import os, sys, time
print("terminal", sys.stdout.isatty(), sys.stderr.isatty(), flush=True)
if sys.stdout.isatty():
    print("size", *os.get_terminal_size(1), flush=True)
for percent in (10, 20):
    print(f"\\r{percent:3d}%", end="", file=sys.stderr, flush=True)
"""


def at_a_terminal(*words: str) -> tuple[int, str]:
    """Run the command with stdin, stdout and stderr on a terminal of its own, which it controls."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 111, 0, 0))
        os.execv(sys.executable, [sys.executable, "-m", "gpulaunch", "--no-profile", "--start-method", "spawn", *words])
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # EIO: everybody has let it go
            break
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    Path("bar.py").write_text(_PROGRAM)


def files(rank: int) -> tuple[bytes, bytes]:
    (directory,) = Path("gpulaunch-runs").glob(f"*/attempts/0/rank-{rank}")
    return (directory / "stdout.log").read_bytes(), (directory / "stderr.log").read_bytes()


def test_the_only_rank_has_a_terminal_and_its_bytes_pass_as_they_are() -> None:
    code, shown = at_a_terminal("bar.py")

    assert code == 0
    # Two streams are two terminals: which comes first to ours is not kept within a moment.
    assert "terminal True True\r\nsize 111 40\r\n" in shown
    assert "\r 10%\r 20%" in shown
    assert "[0]" not in shown
    assert shown.count("\n\x1b[1m[gpulaunch] ") == shown.count("[gpulaunch] ") - 1, "our own lines begin new ones"
    assert files(0) == (b"terminal True True\nsize 111 40\n", b"\r 10%\r 20%")


def test_the_rank_that_is_shown_alone_has_one_and_the_others_have_not() -> None:
    code, shown = at_a_terminal("--nproc", "2", "--console", "1", "bar.py")

    assert code == 0
    assert "terminal True True\r\n" in shown
    assert files(0)[0] == b"terminal False False\n"
    assert files(1)[0] == b"terminal True True\nsize 111 40\n"


def test_teed_and_redirected_streams_are_files_as_with_torchrun() -> None:
    code, shown = at_a_terminal("--tee", "1", "--redirects", "2", "bar.py")

    assert code == 0
    assert "[default0]:" in shown
    assert files(0)[0] == b"terminal False False\n"


def test_a_pipe_is_no_terminal() -> None:
    """And nothing stands in front of what a program alone writes there: `gpulaunch ... | jq`, as with torchrun."""
    command = [sys.executable, "-m", "gpulaunch", "--no-profile", "--start-method", "spawn", "bar.py"]
    done = subprocess.run(command, capture_output=True, timeout=100, check=True)

    assert done.stdout == b"terminal False False\n"
    assert b"\r 10%\r 20%\n" in done.stderr
    assert b"[0]" not in done.stderr
