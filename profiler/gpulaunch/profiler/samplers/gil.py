"""What samples of stacks tell of Python's GIL: whether a thread waits for it, and what its holder runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gpulaunch.profiler.samplers.paths import PYTHON_DIR
from gpulaunch.profiler.samplers.sampled_calls import below_fetch
from gpulaunch.profiler.stack import Frame

_OF_STEPS: Final = ("forward", "backward", "optimizer", "other", "unsettled")
"""Phases in which the training thread computes itself."""
_WAITED_ON: Final = range(24, 216)
"""Where CPython's `_gil_runtime_state` has its condition variables and mutexes, in bytes from its pointer to the last
holder. Those of aarch64 are longer than those of x86-64; what follows has none."""
_THREAD: Final = re.compile(rf"{PYTHON_DIR}threading\.py Thread\._bootstrap")
"""Where each thread that Python starts begins."""
_WAITS: Final = re.compile(
    rf"{PYTHON_DIR}(?:threading|queue|selectors|socket|ssl|subprocess|(?:multiprocessing|concurrent|asyncio)/.+)\.py"
)
"""Modules whose functions wait for other threads and processes."""


def waits_for_gil(pid: int, gil: int) -> bool:
    """Whether the main thread of a process waits for the GIL: it sleeps in the kernel, on a word of the GIL.

    So does no thread that waits for data, a lock, a child or a GPU, or for threads of OpenMP.

    Args:
        pid: of the process.
        gil: the address of the GIL's pointer to its last holder, in the memory of the process.

    Raises:
        OSError: the process has ended, or may not be read.
        ValueError: the kernel has written something else.
    """
    with open(f"/proc/{pid}/task/{pid}/syscall", encoding="ascii") as file:
        number, *arguments = file.read(256).split()  # "running"; or the system call, and its arguments in hexadecimal
    return number != "running" and bool(arguments) and int(arguments[0], 16) - gil in _WAITED_ON


def is_of_thread(frames: Sequence[Frame]) -> bool:
    """Whether a stack, the deepest frame first, is a whole one of a thread that Python has started: one that was torn
    has another end."""
    return bool(frames) and _THREAD.fullmatch(f"{frames[-1].file} {frames[-1].name}") is not None


def waits_for_thread(frames: Sequence[Frame]) -> bool:
    """Whether a stack, the deepest frame first, is in a function that waits for another thread or process."""
    return bool(frames) and _WAITS.fullmatch(frames[0].file) is not None


def computes(phase: str, frames: Sequence[Frame]) -> bool:
    """Whether a main thread computes for a step, by its phase and its stack: without workers, also its batches."""
    return phase in _OF_STEPS or (phase == "data_wait" and below_fetch(frames) is not None)
