"""Samples the stacks of a Python process from outside with py-spy.

Always `--nonblocking`: py-spy reads the memory of the process while that runs (process_vm_readv) and does not stop it.
So a sample costs the process nothing. Occasionally it is torn: the stack changed while it was read, py-spy reports
invalid data, and the sample is lost.

It needs permission to ptrace: the same user, and not forbidden by Yama or a container (under Yama's mode 1 ranks permit
it to the launcher and what that starts, see `launcher.loop.linux`). A sample is expensive: most of it is py-spy reading
the symbols of the interpreter, again for each process and each sample. So every sample reports its CPU time.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.stack import Frame, Thread

_LONGEST_S: Final = 3.0
_LARGEST_BYTES: Final = 4 << 20
"""No stack is that large; a program that writes more is not py-spy."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The result of one stack sample of one process."""

    frames: tuple[Frame, ...] = ()
    """The stack of the main thread, the deepest frame first."""
    holds_gil: bool | None = None
    """Whether that thread held the GIL; None: not known."""
    gil_holder: tuple[Frame, ...] = ()
    """The stack of another thread, which holds the GIL while the main thread waits for it, the deepest frame first;
    empty: the main thread does not wait for it, or that is not known, as with py-spy."""
    failed: str = ""
    """Why there is none; "" with no frames: the process has ended, or has no Python frame now."""
    cpu_s: float = 0.0
    """CPU time of the processes started for this sample, without the caller's own."""


class PySpy:
    """Samples processes with `py-spy dump`, one py-spy process per sample."""

    name = "py-spy"

    def __init__(self, binary: str | None = None, *, longest_s: float = _LONGEST_S) -> None:
        """`binary`: None to search for it. `longest_s`: py-spy is killed after this time."""
        self._binary = binary
        self._longest_s = longest_s

    def absent(self) -> str:
        """Return why this cannot sample on this node, or ""."""
        self._binary = self._binary or find_pyspy()
        return "" if self._binary else "py-spy: it is installed neither next to this Python nor on PATH"

    def look(self, pid: int) -> Look:
        """Sample one process; blocks for some milliseconds, at most for `longest_s`, and never raises."""
        absent = self.absent()
        if absent or not self._binary:
            return Look(failed=absent)
        argv = (self._binary, "dump", "--json", "--nonblocking", "--pid", str(pid))
        try:
            code, out, err, cpu_s = _run(argv, self._longest_s)
        except OSError as error:
            return Look(failed=f"py-spy: {error.strerror}")
        threads = parse_pyspy(out) if code == 0 else ()
        if threads:
            main = _main_of(threads, pid)
            return Look(cpu_s=cpu_s) if main is None else Look(frames=main.frames, holds_gil=main.owns_gil, cpu_s=cpu_s)
        if not os.path.exists(f"/proc/{pid}"):  # it ended meanwhile: not an error
            return Look(cpu_s=cpu_s)
        return Look(failed=f"py-spy: {reason_of(err) or 'it found no Python thread'}", cpu_s=cpu_s)


def find_pyspy() -> str | None:
    """Return the path of py-spy: beside this Python, else from PATH."""
    for directory in (os.path.dirname(sys.executable), *os.get_exec_path()):
        path = os.path.join(directory, "py-spy")
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def parse_pyspy(out: bytes) -> tuple[Thread, ...]:
    """Parse the output of `py-spy dump --json`; empty if it is invalid."""
    try:
        return tuple(
            Thread(
                name=str(thread["thread_name"] or ""),
                os_id=int(thread["os_thread_id"] or 0),
                idle=not thread["active"],
                owns_gil=bool(thread["owns_gil"]),
                frames=tuple(
                    Frame(name=str(frame["name"]), file=str(frame["filename"]), line=int(frame["line"]))
                    for frame in thread["frames"]
                ),
            )
            for thread in json.loads(out)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()


def reason_of(err: bytes) -> str:
    """Return py-spy's error in one line: the last cause of the chain, without its own backtrace."""
    text = err.decode("utf-8", "replace").partition("Stack backtrace:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Caused by")]
    if any("ermission" in line for line in lines):
        return "permission denied (ptrace: another user, Yama, or a container without SYS_PTRACE)"
    return re.sub(r"^(Error|\d+): ", "", lines[-1]) if lines else ""


def _main_of(threads: Sequence[Thread], pid: int) -> Thread | None:
    """Return the main thread: by its id, or by its name where ids are of another namespace."""
    named = [thread for thread in threads if thread.name == "MainThread"]
    return next((thread for thread in threads if thread.os_id == pid), named[0] if named else None)


def _run(argv: tuple[str, ...], longest_s: float) -> tuple[int, bytes, bytes, float]:
    """Run a command; return its exit code (negative for a signal), stdout, stderr and CPU seconds. Raises OSError.

    Without `subprocess`, because that does not report the CPU time of a single child.
    """
    until_s = time.monotonic() + longest_s
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    try:
        actions = (
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out_end, 1),
            (os.POSIX_SPAWN_DUP2, err_end, 2),
        )
        # The sidecar blocks SIGTERM, which its children must not; and Python ignores SIGPIPE, which would let them
        # outlive it.
        pid = os.posix_spawn(
            argv[0], argv, os.environ, file_actions=actions, setsigmask=(), setsigdef=(signal.SIGPIPE,)
        )
    except BaseException:
        os.close(out)
        os.close(err)
        raise
    finally:
        os.close(out_end)
        os.close(err_end)
    ended = -1
    try:
        ended = os.pidfd_open(pid)
        read = _read_all((out, err), until_s)
        if read is not None and not _wait(ended, until_s):
            read = None
        if read is None:
            os.kill(pid, signal.SIGKILL)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        for fd in (out, err, ended):
            if fd >= 0:
                os.close(fd)
        _, status, usage = os.wait4(pid, 0)
    cpu_s = usage.ru_utime + usage.ru_stime
    code = os.waitstatus_to_exitcode(status)
    if read is None:
        return code or -signal.SIGKILL, b"", b"it did not answer in time", cpu_s
    return code, *read, cpu_s


def _read_all(fds: tuple[int, int], until_s: float) -> tuple[bytes, bytes] | None:
    """Read both pipes to their ends; None if that takes too long, or returns too much."""
    got = {fd: bytearray() for fd in fds}
    left = set(fds)
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    while left:
        ready = poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
        if not ready:
            return None
        for fd, _ in ready:
            if chunk := os.read(fd, 1 << 16):
                got[fd] += chunk
            else:
                poll.unregister(fd)
                left.discard(fd)
        if sum(map(len, got.values())) > _LARGEST_BYTES:
            return None
    return bytes(got[fds[0]]), bytes(got[fds[1]])


def _wait(pidfd: int, until_s: float) -> bool:
    """Wait for the end of a process; False if it takes too long."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, until_s - time.monotonic()) * 1000))
