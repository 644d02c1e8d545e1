"""Injects one fault from outside, and describes it.

A rank must not stay stopped when the fault is meant to pass, so `slow` blocks and polls the signals that would end this
process, and undoes its work before it exits.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from dataclasses import dataclass

from gpulaunch.launcher.chaos.damage import damage
from gpulaunch.launcher.chaos.faults import Fault, Verb
from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.runs.processes import (
    AGENT,
    FORK_SERVER,
    SIDECAR,
    STORE,
    Process,
    RunError,
    RunProcesses,
    loaders_of,
    take_helper,
    take_rank,
)

_HELPER = {
    Verb.KILL_STORE: STORE,
    Verb.KILL_FORK_SERVER: FORK_SERVER,
    Verb.KILL_SIDECAR: SIDECAR,
    Verb.KILL_AGENT: AGENT,
}
_PERIOD_S = 0.1
"""One cycle of stop and continue: short compared with a noticeably slow step."""
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """One injected fault."""

    fault: Fault
    pid: int | None
    attempt: int
    what: str
    """What was done, and to which process, as a phrase."""
    interrupted_by: int = 0
    """The signal that ended this process's work early, or 0."""


def inject(fault: Fault, group: RunProcesses, rng: random.Random) -> InjectedFault:
    """Inject `fault` into the run that `group` describes; unspecified details are chosen by `rng`.

    Raises:
        RunError: it is impossible, and nothing was done.
    """
    if fault.verb is Verb.CORRUPT_CHECKPOINT:
        return _done(fault, group, None, _corrupt(fault, group, rng))
    if fault.verb in _HELPER:
        name = _HELPER[fault.verb]
        with take_helper(group, name) as helper:
            helper.send(signal.SIGKILL)
            return _done(fault, group, helper.pid, f"SIGKILL to the {name}, pid {helper.pid}")
    rank = fault.rank
    if fault.verb is Verb.KILL_LOADER:
        return _kill_loader(fault, group, rank, rng)
    with take_rank(group, rank) as process:
        who = f"rank {rank}, pid {process.pid}"
        if fault.verb is Verb.KILL_RANK:
            process.send(fault.signum)
            return _done(fault, group, process.pid, f"{signal.Signals(fault.signum).name} to {who}")
        if fault.verb is Verb.HANG_RANK:
            process.send(signal.SIGSTOP)
            return _done(fault, group, process.pid, f"SIGSTOP to {who}")
        if fault.verb is Verb.OOM_RANK:
            size = _starve(process)
            return _done(
                fault, group, process.pid, f"limited the memory of {who}: its address space cannot grow ({size})"
            )
        signum = slow(process, factor=fault.factor, for_s=fault.for_s)
        what = f"slowed {who}, by a factor of {fault.factor:g} for {fault.for_s:g} s"
        return _done(fault, group, process.pid, what, interrupted_by=signum)


def _done(fault: Fault, group: RunProcesses, pid: int | None, what: str, *, interrupted_by: int = 0) -> InjectedFault:
    return InjectedFault(fault=fault, pid=pid, attempt=group.attempt, what=what, interrupted_by=interrupted_by)


def _kill_loader(fault: Fault, group: RunProcesses, rank: int, rng: random.Random) -> InjectedFault:
    workers = loaders_of(group, rank)
    if not workers:
        raise RunError(f"rank {rank} has no DataLoader worker")
    with Process(rng.choice(sorted(workers)), group) as worker:
        worker.send(signal.SIGKILL)
        return _done(fault, group, worker.pid, f"SIGKILL to a DataLoader worker of rank {rank}, pid {worker.pid}")


def _starve(process: Process) -> str:
    """Limit a process's address space to its present size, so that its next allocation from the kernel fails."""
    try:
        with open(f"/proc/{process.pid}/statm", "rb") as statm:
            size = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
        # Keep the hard limit: it could not be raised again.
        resource.prlimit(process.pid, resource.RLIMIT_AS, (size, hard))
    except OSError as err:
        raise RunError(f"cannot limit process {process.pid}: {err.strerror}") from None
    return f"{size / (1 << 20):.0f} MiB"


def slow(process: Process, *, factor: float, for_s: float) -> int:
    """Stop and continue a process in turns for `for_s` seconds, so that it takes `factor` times as long.

    Returns early when the process exits. Returns the signal that asked this process to end meanwhile, or 0; in every
    case the process is running at the end.
    """
    process.send(signal.SIGCONT)  # checks that it may be signalled, or raises
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    until_s = time.monotonic() + for_s
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            for signum, share in ((signal.SIGSTOP, 1 - 1 / factor), (signal.SIGCONT, 1 / factor)):
                process.send(signum)
                if told := linux.wait_for_signal(_ENDING, min(_PERIOD_S, left_s) * share):
                    return told
    except RunError:
        return 0  # it has exited
    finally:
        with contextlib.suppress(RunError):
            process.send(signal.SIGCONT)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _corrupt(fault: Fault, group: RunProcesses, rng: random.Random) -> str:
    from gpulaunch.launcher.checkpoint.find import find

    local = [place for place in group.checkpoint_dirs if "://" not in place]
    if not local:
        raise RunError("this run has no local checkpoint directory")
    found = find(local).found
    if not found:
        raise RunError(f"no complete checkpoint yet in {', '.join(local)}")
    newest = found[0]
    return f"{damage(newest.path, fault.how, rng)} of checkpoint {newest.path}"
