"""Waits, bounded, until the memory of dead ranks is freed: the next attempt must not find its cards full.

The driver frees a process's memory when its last thread has left the kernel, which can be seconds after the death
was reported. Memory that stays belongs to a live process: one that outlived its rank, or another user's.

NVML is called in a short-lived child: its calls block on the driver, for seconds exactly when a process is being torn
down there, and the agent's loop must not block. The child's answer is one text; without one in time, it is killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpulaunch.launcher.job.host_info import Gpu
from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.forked_call import ForkedCall
from gpulaunch.launcher.loop.loop import Loop

TOLERANCE_BYTES = 512 << 20
"""A card counts as freed at its baseline plus this: a display, a monitor, small use by others."""

_POLL_S = (0.02, 0.5)
"""Interval between two readings: the first, and, doubled each time, the maximum. The driver has no notification."""
ANSWER_GRACE_S = 1.0
"""Time after the bound for the child to report; then the driver is blocking it."""
_COMM = "gpulaunch-gpus"
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""linux/proc_ns.h: PROC_PID_INIT_INO; NVML then counts pids as this process does."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process with memory on a card."""

    pid: int
    used_bytes: int | None
    """None if NVML does not know."""
    command: str
    """From /proc; "" if the process is gone."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One card at one time."""

    index: int
    uuid: str
    used_bytes: int
    holders: tuple[Holder, ...]


def busy(used: Mapping[str, int]) -> frozenset[str]:
    """The UUIDs of the cards, given by `measure`, that are in use."""
    return frozenset(uuid for uuid, used_bytes in used.items() if used_bytes > TOLERANCE_BYTES)


def still_used(readings: Iterable[Reading], baseline: Mapping[str, int]) -> list[Reading]:
    """The cards whose memory has not been freed. One without a baseline is assumed to have been empty."""
    return [card for card in readings if card.used_bytes > baseline.get(card.uuid, 0) + TOLERANCE_BYTES]


def still_used_message(
    held: Sequence[Reading], baseline: Mapping[str, int], dead: frozenset[int], waited_s: float
) -> str:
    """The message to the user when the wait is over and these cards are still in use; "" for none."""
    return "; ".join(
        f"GPU {card.index} still has {_gib(card.used_bytes - baseline.get(card.uuid, 0))} of memory in use "
        f"{waited_s:.0f} s after the ranks ended: {_who(card, dead)}"
        for card in held
    )


def _who(card: Reading, dead: frozenset[int]) -> str:
    if not card.holders:
        # Also in a container, where NVML gives the host's pids, which would name unrelated processes.
        return "no process visible from here uses it; run nvidia-smi on the host"
    largest = max(card.holders, key=lambda holder: holder.used_bytes or 0)
    size = "" if largest.used_bytes is None else f" with {_gib(largest.used_bytes)}"
    if largest.pid in dead or not largest.command:
        return f"the driver still lists process {largest.pid}{size}, which has ended"
    return f"held by process {largest.pid} ({largest.command}){size}; end it if it is yours"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


class MemoryWait:
    """The agent's interface. One request at a time; `pid` is the child's while it runs."""

    def __init__(self, loop: Loop, *, control_device: str = "/dev/nvidiactl") -> None:
        """`control_device`: exists if there is an NVIDIA driver; tests use another."""
        self._loop = loop
        self._control_device = control_device
        self._aside = ForkedCall(loop, comm=_COMM)
        self._asked = 0

    @property
    def pid(self) -> int | None:
        """The child's pid, while it runs."""
        return self._aside.pid

    def measure(self, cards: Sequence[Gpu], bound_s: float, done: Callable[[dict[str, int]], None]) -> None:
        """Pass the memory in use on each card, by UUID, to `done`, as a baseline; {} without NVML or past the bound."""

        def used() -> str:
            return "\n".join(f"{card.uuid} {card.used_bytes}" for card in _read(cards))

        def heard(text: str | None) -> None:
            lines = [line.split() for line in (text or "").splitlines()]
            done({line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()})

        self._ask(cards, used, bound_s, heard)

    def start(
        self,
        cards: Sequence[Gpu],
        dead_pids: Iterable[int],
        baseline: Mapping[str, int],
        bound_s: float,
        done: Callable[[str], None],
    ) -> None:
        """Call `done("")` when the cards' memory is freed, or, at the bound, with a message for the user."""
        dead = frozenset(dead_pids)

        def heard(text: str | None) -> None:
            silent = f"the GPU driver did not respond within {bound_s:g} s; it is unknown whether memory was freed"
            done(silent if text is None else text)

        self._ask(cards, lambda: _wait(cards, dead, baseline, bound_s), bound_s, heard)

    def cancel(self) -> None:
        """Cancel; `done` will not be called."""
        self._asked += 1
        self._aside.cancel()

    def _ask(
        self, cards: Sequence[Gpu], question: Callable[[], str], bound_s: float, heard: Callable[[str | None], None]
    ) -> None:
        self.cancel()
        mine = self._asked
        if not cards or not os.path.exists(self._control_device):
            self._loop.call_at(self._loop.now(), lambda: heard("") if self._asked == mine else None)
            return
        try:
            self._aside.ask(
                lambda: _answer(question),
                bound_s + ANSWER_GRACE_S,
                lambda answer, _: heard(None if answer is None else answer.decode(errors="replace")),
            )
        except OSError:
            self._loop.call_at(self._loop.now(), lambda: heard(None) if self._asked == mine else None)


# -- in the child


def _answer(question: Callable[[], str]) -> bytes:
    try:
        return question().encode()
    except Exception as err:  # NVML raises its own family of errors
        return f"it is unknown whether GPU memory was freed: NVML: {err}".encode()


def _wait(cards: Sequence[Gpu], dead: frozenset[int], baseline: Mapping[str, int], bound_s: float) -> str:
    started_s = time.monotonic()
    pause_s = _POLL_S[0]
    while True:
        held = still_used(_read(cards), baseline)
        waited_s = time.monotonic() - started_s
        if not held or waited_s + pause_s > bound_s:
            return still_used_message(held, baseline, dead, waited_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])


def _read(cards: Sequence[Gpu]) -> list[Reading]:
    """Read the cards that respond; a lost card has no memory to wait for."""
    from gpulaunch.profiler.samplers.nvml import driver

    names_processes = os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
    readings: list[Reading] = []
    with driver.session() as nvml:
        for card in cards:
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(card.uuid)  # also of a MIG instance
                used_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
                holders: tuple[Holder, ...] = ()
                if names_processes:
                    with contextlib.suppress(nvml.NVMLError):
                        holders = tuple(
                            Holder(pid=process.pid, used_bytes=process.usedGpuMemory, command=_command(process.pid))
                            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                        )
                readings.append(Reading(index=card.index, uuid=card.uuid, used_bytes=used_bytes, holders=holders))
    return readings


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(256).replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return ""
    return " ".join(words)[:80] or linux.comm_of(pid)
