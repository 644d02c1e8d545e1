"""Start one program: fork and exec with its own session, stdio, CPUs and life bound to the agent's.

Not `subprocess`: a rank must be bound to the agent (PR_SET_PDEATHSIG) between fork and exec without the cost and the
traps of `preexec_fn`, and the agent's loop, not a Popen object, waits for it.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping, Sequence
from typing import NoReturn

from gpulaunch.launcher.loop import linux

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""A job manager that gives notice may send it to every process of the job (Slurm's --signal without B: does), and
processes without a handler die of it. The agent handles these signals; its helpers and ranks start with them
ignored."""

_users_open_files: tuple[int, int] | None = None


def allow_many_files() -> int:
    """Raise this process's limit of open files to the maximum; child processes keep the user's. Return the new limit.

    The agent holds several descriptors for each rank, and the usual soft limit is 1024.
    """
    global _users_open_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _users_open_files is None and soft != hard:
        _users_open_files = (soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin_fd: int = 0,
    stdout_fd: int = 1,
    stderr_fd: int = 2,
    pass_fds: Sequence[int] = (),
    new_session: bool = True,
    affinity: Sequence[int] = (),
    nice: int = 0,
    deaf_to: Sequence[int] = NOTICES,
    tracer_pid: int = 0,
) -> int:
    """Start `argv` and return its pid once exec has succeeded.

    Raises OSError with the program's name if it cannot be executed. Descriptors in `pass_fds` keep their numbers.
    Signals in `deaf_to` are ignored until the program sets a handler. `tracer_pid`: it and
    its descendants may read the program's stacks, though they are not its ancestors; 0: none may.
    """
    told_read, told_write = os.pipe2(os.O_CLOEXEC)
    agent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        become(
            argv,
            env,
            stdio=(stdin_fd, stdout_fd, stderr_fd),
            pass_fds=pass_fds,
            parent_pid=agent_pid,
            told_write=told_write,
            new_session=new_session,
            affinity=affinity,
            nice=nice,
            deaf_to=deaf_to,
            tracer_pid=tracer_pid,
            open_files=_users_open_files,
        )
    os.close(told_write)
    with os.fdopen(told_read, "rb") as told:
        trouble = told.read()  # ends at exec, which closes the other end
    if trouble:
        os.waitpid(pid, 0)
        number = int(trouble)
        raise OSError(number, f"cannot run {argv[0]!r}: {os.strerror(number)}")
    return pid


def become(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdio: tuple[int, int, int],
    pass_fds: Sequence[int],
    parent_pid: int,
    told_write: int,
    new_session: bool = True,
    affinity: Sequence[int] = (),
    nice: int = 0,
    deaf_to: Sequence[int] = NOTICES,
    tracer_pid: int = 0,
    open_files: tuple[int, int] | None = None,
) -> NoReturn:
    """In a child that was just forked: execute `argv`. The arguments are those of `start`, and:

    Args:
        parent_pid: this process ends with that one, its parent.
        told_write: the error number is written to it if `argv` cannot be executed.
        open_files: limits to set, soft and hard.
    """
    number = 1
    try:
        # Away from 0..2 first, so that no dup2 overwrites a source that is still needed.
        sources = [os.dup(fd) if fd < 3 and fd != at else fd for at, fd in enumerate(stdio)]
        for at, fd in enumerate(sources):
            if fd == at:
                os.set_inheritable(fd, True)
            else:
                os.dup2(fd, at)
        for fd in pass_fds:
            os.set_inheritable(fd, True)
        _close_all_but({*range(3), *pass_fds, told_write})
        if new_session:
            os.setsid()
        if affinity:
            os.sched_setaffinity(0, affinity)
        if nice:
            os.nice(nice)
        # Python ignores these; a program expects the defaults (subprocess.Popen does the same).
        for name in ("SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        for signum in deaf_to:
            signal.signal(signum, signal.SIG_IGN)
        if open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        if tracer_pid:
            linux.allow_ptrace_by(tracer_pid)
        linux.die_with_parent(parent_pid)
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as err:
        number = err.errno or 1
    finally:
        os.write(told_write, str(number).encode())
        os._exit(127)


def _close_all_but(kept: set[int]) -> None:
    """Close what the launcher's caller had left open, as subprocess does: ranks must not inherit it."""
    first = 0
    for fd in sorted(kept):
        if first < fd:  # an empty range reaches close_range(2) with -1 as its end, which means all (CPython 3.11)
            os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 20)
