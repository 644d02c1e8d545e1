"""Stacks of ranks, from the best available source: py-spy, torch's worker server, faulthandler.

    py-spy         reads the rank's memory from outside; --nonblocking, so that the rank is not paused and a stopped one
                   can be read too (blocking mode fails there). It alone tells which thread holds the GIL.
                   Needs the right to ptrace: same user, and not forbidden by Yama or a container.
    worker server  a C++ thread of torch that answers on a unix socket, if the program runs one
                   (torch.distributed.elastic.control_plane); for a stack it needs the GIL.
    faulthandler   a signal for which `failure.inside` has registered it; works while the GIL is held, but makes
                   sleeping system calls of the rank return early, so it comes last. Sent only to a rank that catches
                   it: it would end any other.

The reason of every refusal is kept: the report says why no better source was available. Only pids that the caller names
are touched, and nothing is ever sent SIGCONT.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gpulaunch.launcher.hang import server
from gpulaunch.launcher.hang.frames import without_taps
from gpulaunch.launcher.loop import linux
from gpulaunch.profiler.samplers import pyspy
from gpulaunch.profiler.stack import Frame, Thread

STACKS_FILE = "stacks.log"  # these two as in failure/inside.py, which is for the rank
STACKS_SIGNAL = signal.SIGRTMIN + 7

_PYSPY_S = 4.0
_FAULTHANDLER_S = 1.5
_QUIET_S = 0.1
"""A dump has no end mark: it counts as complete when nothing has followed for this long."""
_AT_ONCE = 16
_THREADS = 64
_STACK_CAP_BYTES = 1 << 20

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One rank to inspect."""

    rank: int
    pid: int
    rank_dir: str
    stopped: bool = False
    may_signal: bool = True
    """It has been quiet long enough to be disturbed a little."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """What one process was doing, and the source."""

    threads: tuple[Thread, ...] = ()
    main: tuple[Frame, ...] = ()
    """The stack of the main thread, deepest frame first."""
    source: str = ""
    refused: tuple[str, ...] = ()
    """Why the better sources were not available."""


def take(targets: Sequence[Target]) -> dict[int, Stacks]:
    """Take the stacks of every target, by rank; bounded in time."""
    spied, refused = _pyspy([target.pid for target in targets])
    rest = [target for target in targets if target.pid not in spied]
    others = at_once(lambda target: _other(target, (refused.get(target.pid, "py-spy: it gave no answer"),)), rest)
    found = {target.rank: other for target, other in zip(rest, others, strict=True)}
    return {target.rank: spied.get(target.pid) or found[target.rank] for target in targets}


def take_workers(pids: Sequence[int]) -> dict[int, Stacks]:
    """Take the stacks of dataloader workers, by pid: with py-spy or not at all."""
    return _pyspy(pids)[0]


def at_once(ask: Callable[[T], R], whom: Sequence[T]) -> list[R]:
    """Query all of them in parallel: one that does not answer costs its own time, not the others'."""
    if not whom:
        return []
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=min(_THREADS, len(whom))) as pool:
        return list(pool.map(ask, whom))


def _other(target: Target, refused: tuple[str, ...]) -> Stacks:
    text = ""
    if target.stopped:
        return Stacks(refused=(*refused, "worker server, faulthandler: a stopped process answers nobody"))
    try:
        text, source = server.ask(server.socket_of(target.pid), "dump_traceback").decode("utf-8", "replace"), "server"
    except OSError as error:
        refused = (*refused, f"torch's worker server: {error.strerror or error}")
        try:
            text, source = _faulthandler(target), "faulthandler"
        except OSError as failed:
            return Stacks(refused=(*refused, f"faulthandler: {failed.strerror or failed}"))
    threads = parse_faulthandler(text)
    name = "torch's worker server" if source == "server" else source
    # The list of threads starts with the newest: the main thread is its last.
    return Stacks(threads=threads, main=threads[-1].frames if threads else (), source=name, refused=refused)


# -- py-spy


def _pyspy(pids: Sequence[int]) -> tuple[dict[int, Stacks], dict[int, str]]:
    """Stacks by pid; for the other pids, the reason there are none."""
    binary = pyspy.find_pyspy()
    if binary is None:
        return {}, dict.fromkeys(pids, "py-spy: it is installed neither next to this Python nor on PATH")
    found: dict[int, Stacks] = {}
    refused: dict[int, str] = {}
    for at in range(0, len(pids), _AT_ONCE):
        for pid, code, out, err in _run_all(binary, pids[at : at + _AT_ONCE]):
            threads = parse_pyspy(out) if code == 0 else ()
            if threads:
                main = next((thread.frames for thread in threads if thread.os_id == pid), ())
                found[pid] = Stacks(threads=threads, main=main, source="py-spy")
            else:
                refused[pid] = f"py-spy: {pyspy.reason_of(err) or 'it found no Python thread'}"
    return found, refused


def _run_all(binary: str, pids: Iterable[int]) -> Iterable[tuple[int, int, bytes, bytes]]:
    running: list[tuple[int, subprocess.Popen[bytes]]] = []
    for pid in pids:
        argv = [binary, "dump", "--json", "--nonblocking", "--pid", str(pid)]
        with contextlib.suppress(OSError):
            null, pipe = subprocess.DEVNULL, subprocess.PIPE
            running.append((pid, subprocess.Popen(argv, stdin=null, stdout=pipe, stderr=pipe)))
    until_s = time.monotonic() + _PYSPY_S
    for pid, process in running:
        with process:
            try:
                out, err = process.communicate(timeout=max(0.05, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                err = err or b"Error: it did not answer in time"
        yield pid, process.returncode, out, err


def parse_pyspy(out: bytes) -> tuple[Thread, ...]:
    """Parse the output of `py-spy dump --json`; empty if it is not that."""
    return tuple(replace(thread, frames=without_taps(thread.frames)) for thread in pyspy.parse_pyspy(out))


# -- faulthandler


def _faulthandler(target: Target) -> str:
    """Have the rank write its stacks to its file, and read what it wrote. Raises OSError with the reason."""
    if not target.may_signal:
        raise OSError("the rank moves, and a signal would disturb it")
    if not linux.catches(target.pid, STACKS_SIGNAL):
        raise OSError("the rank has no handler for it (not a Python program of this launcher)")
    path = os.path.join(target.rank_dir, STACKS_FILE)
    before = os.stat(path).st_size
    os.kill(target.pid, STACKS_SIGNAL)
    until_s = time.monotonic() + _FAULTHANDLER_S
    size, since_s = before, time.monotonic()
    while time.monotonic() < until_s:
        time.sleep(0.02)
        now = os.stat(path).st_size
        if now != size:
            size, since_s = now, time.monotonic()
        elif size > before and time.monotonic() - since_s > _QUIET_S:
            break
    if size == before:
        raise OSError("the rank did not write its stacks in time")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.pread(fd, _STACK_CAP_BYTES, before).decode("utf-8", "replace")
    finally:
        os.close(fd)


_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*?)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """Parse faulthandler's output for all threads; it does not tell which of them holds the GIL, or rests."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            threads.append((head["name"] or "", []))
            continue
        frame = _FRAME.match(line)
        if frame and threads:
            threads[-1][1].append(Frame(name=frame["name"], file=frame["file"], line=int(frame["line"])))
    return tuple(
        Thread(name=name, os_id=0, idle=True, owns_gil=False, frames=without_taps(frames)) for name, frames in threads
    )
