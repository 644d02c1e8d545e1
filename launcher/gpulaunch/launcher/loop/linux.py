"""The few Linux calls that Python's standard library lacks, by ctypes, and questions put to /proc.

Standard library only: the agent, the fork server and the ranks all use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Set

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def _prctl(option: int, value: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    return 0 if result == 0 else ctypes.get_errno()


def become_subreaper() -> None:
    """Let every orphaned descendant become a child of this process, prctl(2) PR_SET_CHILD_SUBREAPER."""
    failed = _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    if failed:
        raise OSError(failed, f"PR_SET_CHILD_SUBREAPER: {os.strerror(failed)}")


LOADER_WORKER = "pt_data_worker"
"""What dataloader workers call themselves, as `comm_of` gives it (torch/utils/data/_utils/worker.py)."""


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` when the parent dies; end at once if it already has."""
    if not bind_to_parent(parent_pid, signum):
        os._exit(128 + signum)


def bind_to_parent(parent_pid: int, signum: int = signal.SIGKILL) -> bool:
    """Have the kernel send `signum` when the parent dies; False if it already has.

    PR_SET_PDEATHSIG is bound to the parent at the moment of ITS death, so a process that is re-parented must call
    this after the re-parenting, and the check closes the gap in between.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum))
    return os.getppid() == parent_pid


def wait_for_signal(signums: Set[int], wait_s: float) -> int:
    """Wait at most so long for one of these signals, which the caller has blocked; give its number, or 0.

    A wait that is interrupted, by a debugger that attaches for instance, and whose time is then over, gives what lay in
    memory instead of None (Modules/signalmodule.c of CPython 3.11 to 3.14).
    """
    heard = signal.sigtimedwait(signums, wait_s)
    return heard.si_signo if heard is not None and heard.si_signo in signums else 0


def set_comm(name: str) -> None:
    """Name this process as `ps -o comm` shows it (15 bytes at most)."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def allow_ptrace_by_anyone_of_same_user() -> None:
    """Under Yama's mode 1 only an ancestor may ptrace; let the sidecar and py-spy do it too. Elsewhere: nothing."""
    _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)


def set_cmdline(argv: list[str]) -> None:
    """Write `argv` over this process's own argument area, so that ps and `pkill -f` see the script that runs.

    Only as many bytes as the area has are written (the fork server is started with a padded one). The environment
    that follows it in memory is left alone: it carries the mark by which leftovers are found.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as stat:
            # man proc(5): fields 48 and 49 are arg_start and arg_end; the second field may hold spaces.
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        if room <= 1:
            return
        text = b"\0".join(os.fsencode(arg) for arg in argv)[: room - 1]
        ctypes.memmove(start, text + b"\0" * (room - len(text)), room)


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


def comm_of(pid: int) -> str:
    """The kernel's short name of a process, or "" when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as comm:
            return comm.read().decode(errors="replace").rstrip("\n")
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """The state letter of a process (R, S, D, Z, T ...), or "" when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler of its own for a signal (SigCgt of /proc/PID/status); False when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            lines = status.read().splitlines()
    except OSError:
        return False
    caught = next((line for line in lines if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def _stat_field(pid: int, index: int) -> int | None:
    """One number of /proc/PID/stat, counted after the command name: 0 state, 1 ppid, 2 pgrp, 3 session."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[index])
    except (OSError, IndexError, ValueError):
        return None


RUNS_VARIABLE = "GPULAUNCH_RUNS"
"""Names, separated by colons, the run that a process belongs to and those around it: a launcher can run in a rank."""


def is_of_run(pid: int, run_id: str) -> bool:
    """Whether the environment that `pid` was started with names this run; False when it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            entries = environ.read().split(b"\0")
    except OSError:
        return False
    prefix = f"{RUNS_VARIABLE}=".encode()
    return any(run_id.encode() in entry[len(prefix) :].split(b":") for entry in entries if entry.startswith(prefix))
