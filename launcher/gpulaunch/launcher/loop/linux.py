"""Linux calls that Python's standard library lacks, by ctypes, and queries of /proc.

Standard library only: the agent, the fork server and the ranks all use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Set
from typing import Literal

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61


def prctl(option: int, value: object) -> int:
    """Call prctl(2) with one argument; return its errno, or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    return 0 if result == 0 else ctypes.get_errno()


def become_subreaper() -> None:
    """Let every orphaned descendant become a child of this process, prctl(2) PR_SET_CHILD_SUBREAPER."""
    failed = prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    if failed:
        raise OSError(failed, f"PR_SET_CHILD_SUBREAPER: {os.strerror(failed)}")


LOADER_WORKER = "pt_data_worker"
"""The name that dataloader workers set, as `comm_of` returns it (torch/utils/data/_utils/worker.py)."""


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` when the parent dies; end at once if it already has."""
    if not bind_to_parent(parent_pid, signum):
        os._exit(128 + signum)


def bind_to_parent(parent_pid: int, signum: int = signal.SIGKILL) -> bool:
    """Have the kernel send `signum` when the parent dies; False if it already has.

    PR_SET_PDEATHSIG is bound to the parent at the moment of ITS death, so a process that is re-parented must call
    this after the re-parenting, and the check closes the gap in between.
    """
    prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum))
    return os.getppid() == parent_pid


def default_action(signum: int) -> None:
    """signal(2) with SIG_DFL, from any thread: Python's own signal.signal works in the main one only."""
    ctypes.CDLL(None).signal(ctypes.c_int(signum), ctypes.c_void_p(0))


def wait_for_signal(signums: Set[int], wait_s: float) -> int:
    """Wait up to this long for one of these signals, which the caller has blocked; return its number, or 0.

    If the wait is interrupted, for instance by a debugger that attaches, and the time is then over, CPython returns
    uninitialized memory instead of None (Modules/signalmodule.c of CPython 3.11 to 3.14).
    """
    heard = signal.sigtimedwait(signums, wait_s)
    return heard.si_signo if heard is not None and heard.si_signo in signums else 0


def set_comm(name: str) -> None:
    """Name this process as `ps -o comm` shows it (15 bytes at most)."""
    prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def allow_ptrace_by(pid: int) -> None:
    """Under Yama's mode 1 only an ancestor may ptrace; also allow `pid` and its descendants. Otherwise no effect.

    It stays in force over an exec (security/yama/yama_lsm.c, task_is_descendant).
    """
    prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid))


def set_cmdline(argv: list[str]) -> None:
    """Write `argv` over this process's own argument area, so that ps and `pkill -f` see the script that runs.

    At most as many bytes as the area has are written (the fork server is started with a padded one). The environment
    that follows it in memory is left alone: it holds the run's mark by which leftovers are found.
    """
    start, end = _own_memory(_ARG_START)
    room = end - start
    if room <= 1:
        return
    text = b"\0".join(os.fsencode(arg) for arg in argv)[: room - 1]
    ctypes.memmove(start, text + b"\0" * (room - len(text)), room)


def set_run(run_id: str) -> None:
    """Write the id of a run over `NO_RUN` in the environment that this process was started with; see `is_of_run`."""
    start, end = _own_memory(_ENV_START)
    environ = ctypes.string_at(start, end - start).replace(NO_RUN.encode(), run_id.encode())
    if len(environ) == end - start:
        ctypes.memmove(start, environ, len(environ))


def _own_memory(field: int) -> tuple[int, int]:
    """Where an area of this process's memory begins and ends, by this field of its stat and the next one."""
    return _stat_field("self", field) or 0, _stat_field("self", field + 1) or 0


def children_of(pid: int) -> list[int]:
    """The live and zombie children of `pid`; by /proc/PID/task/*/children, else by a walk over /proc."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        for task in tasks:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as children:
                found += [int(child) for child in children.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
            found = [child for child in all_pids() if _stat_field(child, 1) == pid]
    return found


def descendants_of(pid: int) -> list[int]:
    """All processes below `pid`, parents before children."""
    found: list[int] = []
    level = children_of(pid)
    while level:
        found += level
        level = [grandchild for child in level for grandchild in children_of(child)]
    return found


def all_pids() -> list[int]:
    """Every process that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def group_of(pid: int) -> int | None:
    """The process group of a process, or None when it is gone."""
    return _stat_field(pid, 2)


def session_of(pid: int) -> int | None:
    """The session of a process, or None when it is gone."""
    return _stat_field(pid, 3)


def parent_of(pid: int) -> int | None:
    """The parent of a process, or None when it is gone."""
    return _stat_field(pid, 1)


def cgroup_of(pid: int | str) -> str:
    """The cgroups of a process as /proc/PID/cgroup lists them, or "" when it is gone."""
    return _read(pid, "cgroup").decode(errors="replace")


def cmdline_of(pid: int) -> list[str]:
    """The command line of a process; [] when it is gone or has none."""
    return _read(pid, "cmdline").decode(errors="replace").rstrip("\0").split("\0")


def is_resource_tracker(pid: int) -> bool:
    """Whether this is multiprocessing's resource tracker: when the last of its users ends, it removes what they left in
    /dev/shm, and ends."""
    return any(word.startswith("from multiprocessing.resource_tracker import main") for word in cmdline_of(pid))


def comm_of(pid: int) -> str:
    """The kernel's short name of a process, or "" when it is gone."""
    return _read(pid, "comm").decode(errors="replace").rstrip("\n")


def _read(pid: int | str, name: str) -> bytes:
    """A file of /proc/PID; b"" when it cannot be read."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def state_of(pid: int) -> str:
    """The state letter of a process (R, S, D, Z, T ...), or "" when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def is_ending(pid: int) -> bool:
    """Whether a process is gone, or exiting and past the point where the kernel releases its memory."""
    flags, vsize_bytes = _stat_field(pid, _FLAGS), _stat_field(pid, _VSIZE)
    return flags is None or (not vsize_bytes and not flags & _PF_KTHREAD)


def catches(pid: int, signum: int) -> bool:
    """Whether a process has its own handler for a signal (SigCgt of /proc/PID/status); False when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            lines = status.read().splitlines()
    except OSError:
        return False
    caught = next((line for line in lines if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def _stat_field(pid: int | Literal["self"], index: int) -> int | None:
    """One number of /proc/PID/stat, counted after the command name: 0 state, 1 ppid, 2 pgrp, 3 session."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[index])
    except (OSError, IndexError, ValueError):
        return None


# proc(5): fields of /proc/PID/stat after the command name; linux/sched.h
_FLAGS, _VSIZE, _ARG_START, _ENV_START, _ENV_END = 6, 20, 45, 47, 48
_PF_KTHREAD = 0x00200000
_EXEC_MS = 50

RUNS_VARIABLE = "GPULAUNCH_RUNS"
"""Names, separated by colons, the process's run and those around it: a launcher can run inside a rank."""
NO_RUN = "no-run-known-yet"
"""In the place of a run's id, as long as one, where it is not known yet."""


def _environ_of(pid: int) -> bytes:
    """The environment that a process was started with; b"" when it cannot be read.

    In the middle of an exec there is none for milliseconds; this waits for it.
    """
    environ = b""
    with contextlib.suppress(OSError):
        for _ in range(_EXEC_MS):
            with open(f"/proc/{pid}/environ", "rb") as file:
                environ = file.read()
            if environ or _stat_field(pid, _ENV_END) or not _stat_field(pid, _VSIZE):
                break
            time.sleep(0.001)
    return environ


def is_of_run(pid: int, run_id: str) -> bool:
    """Whether the environment that `pid` was started with names this run; False when it cannot be read."""
    prefix = f"{RUNS_VARIABLE}=".encode()
    entries = _environ_of(pid).split(b"\0")
    return any(run_id.encode() in entry[len(prefix) :].split(b":") for entry in entries if entry.startswith(prefix))
