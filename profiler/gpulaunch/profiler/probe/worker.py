"""Measures in a dataloader worker how long each fetch is on a core, waits for one, and is blocked otherwise.

A worker is slow for one of three reasons, each with its own remedy: preparing takes the core (more workers, a cheaper
transform), there is no core (fewer workers), or storage keeps it waiting (more workers, a cache). The kernel's figures
separate them: a thread's CPU clock is exact, `schedstat` has how long it was ready but not running, and the rest of the
wall time was spent blocked.

    wall time of a fetch = on a core + in the run queue + blocked

Other threads of the worker count too, and processes that it starts and waits for: while the fetching thread waits for a
decoding pool, or for `ffmpeg`, their computation is preparation, not waiting. Reads are counted by `io`, of
which `read_bytes` came from a device and `rchar` is everything, so the difference came from memory.

The taps sit on the `fetch` of torch's two fetcher classes, in the rank, and forked workers inherit them; in spawned
ones torch's import places them (`inject.arm`). Only a worker of the rank itself measures. It writes to its own
slot in `workers-<rank>.bin`, never to the rank's segment; a fault ends the measurement there, not the fetching.
"""

from __future__ import annotations

import functools
import importlib
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns, process_time_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpulaunch.profiler.channel import workers
from gpulaunch.profiler.channel.workers import KNOWS_IO, KNOWS_RUNQUEUE, WorkersWriter
from gpulaunch.profiler.probe.size import size_of
from gpulaunch.profiler.probe.taps import HookError, Undo, exclude_from_compile, function_of, put

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.state import Probe


SCHEDSTAT_PATH: Final = "/proc/thread-self/schedstat"
"""Of the thread that opens it."""
IO_PATH: Final = "/proc/self/io"
"""Of all threads: a pool may do the reading."""
_PR_SET_PTRACER: Final = 0x59616D61

_armed = False


def install(probe: Probe, torch: Any, undo: Undo) -> None:  # noqa: ARG001 - all `install` functions take the same
    """Have workers that this rank starts measure themselves.

    Raises:
        HookError: torch does not look as expected, or the agent has created no file for it.
    """
    path = _path()
    try:
        workers.claim(path)
    except (OSError, ValueError) as error:
        raise HookError(f"no file for workers: {error}") from error
    _tap(torch, path, undo)


def arm_worker(torch: Any) -> None:
    """Measure this process, if it turns out to be a dataloader worker of the rank. Idempotent.

    For processes that import torch themselves: spawned workers, and fork servers. Raises nothing: the rank has already
    reported any problem with this torch.
    """
    global _armed
    if not _armed:
        _armed = True
        with suppress(Exception):
            _tap(torch, _path(), [])


def _path() -> str:
    return os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], f"workers-{int(os.environ['RANK'])}.bin")


def _tap(torch: Any, path: str, undo: Undo) -> None:
    fetch = importlib.import_module("torch.utils.data._utils.fetch")
    worker = importlib.import_module("torch.utils.data._utils.worker")
    if not hasattr(worker, "_worker_info"):
        raise HookError("torch.utils.data._utils.worker has no _worker_info")
    meter = Meter(path, worker, torch.Tensor)
    classes = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
    originals = [
        function_of(vars(owner).get("fetch"), parameters=("self", "possibly_batched_index"), variadic=False)
        for owner in classes
    ]
    for owner, original in zip(classes, originals, strict=True):
        tap = tap_fetch(torch, meter, original)
        exclude_from_compile(torch, tap)
        put(owner, "fetch", tap, undo)


def tap_fetch(torch: Any, meter: Meter, original: Any) -> Callable[[Any, Any], Any]:
    """A fetcher's `fetch`, measured in a dataloader worker and passed through anywhere else."""
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(original)
    def tapped_fetch(self: Any, possibly_batched_index: Any) -> Any:
        if is_compiling() or not meter.begin(self):
            return original(self, possibly_batched_index)
        try:
            batch = original(self, possibly_batched_index)
        except BaseException:  # the exception is passed on; the time was spent
            meter.end()
            raise
        meter.end(self, batch)
        return batch

    return tapped_fetch


class Clocks(NamedTuple):
    """The kernel's counters of this process."""

    wall_ns: int
    thread_ns: int
    """On a core, this thread."""
    process_ns: int
    """On a core, all threads, and the processes of its own that have ended."""
    runqueue_ns: int
    storage_bytes: int
    read_bytes: int


def spent(before: Clocks, after: Clocks) -> tuple[int, int, int, int, int, int]:
    """The difference of two readings: wall_ns, cpu_ns, runqueue_ns, blocked_ns, storage_bytes, cached_bytes.

    The second to fourth sum to the first, whatever the resolution of the clocks.
    """
    wall_ns = max(0, after.wall_ns - before.wall_ns)
    thread_ns = min(wall_ns, max(0, after.thread_ns - before.thread_ns))
    runqueue_ns = min(wall_ns - thread_ns, max(0, after.runqueue_ns - before.runqueue_ns))
    others_ns = max(0, after.process_ns - before.process_ns - (after.thread_ns - before.thread_ns))
    blocked_ns = max(0, wall_ns - thread_ns - runqueue_ns - others_ns)
    storage_bytes = max(0, after.storage_bytes - before.storage_bytes)
    cached_bytes = max(0, after.read_bytes - before.read_bytes - storage_bytes)
    return wall_ns, wall_ns - runqueue_ns - blocked_ns, runqueue_ns, blocked_ns, storage_bytes, cached_bytes


class Meter:
    """Measures the fetches of one worker process. Never raises."""

    def __init__(self, path: str, worker: Any, tensor: type[Any]) -> None:
        """Store where to write; nothing is opened before the first fetch in a worker.

        Args:
            path: the rank's file of workers.
            worker: the module whose `_worker_info` is set in a dataloader worker.
            tensor: torch's.
        """
        self._path = path
        self._worker = worker
        self._tensor = tensor
        self._pid = 0  # of the process to which the rest belongs
        self._slot: WorkersWriter | None = None
        self._schedstat = self._io = -1
        self._inside = False
        self._before = Clocks(0, 0, 0, 0, 0, 0)
        self._collate: _Collate | None = None

    def begin(self, fetcher: Any) -> bool:
        """A fetch begins; False: it is not measured, and `end` must not be called."""
        info = self._worker._worker_info
        if info is None:
            return False
        try:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._open(info.id)
            if self._slot is None or self._inside:  # a dataset may read from a dataloader itself
                return False
            collate = fetcher.collate_fn
            if type(collate) is not _Collate:  # another epoch, another fetcher
                collate = fetcher.collate_fn = _Collate(collate)
            collate.spent_ns = 0
            self._collate = collate
            self._before = self._read_last_the_clocks()
        except Exception:
            self._slot = None
            return False
        self._inside = True
        return True

    def end(self, fetcher: Any = None, batch: Any = None) -> None:
        """The fetch has ended; without a fetcher, it returned no batch."""
        try:
            after = self._read_first_the_clocks()
            self._inside = False
            wall_ns, cpu_ns, runqueue_ns, blocked_ns, storage_bytes, cached_bytes = spent(self._before, after)
            collate, slot = self._collate, self._slot
            if collate is None or slot is None:
                return
            batches = samples = 0
            if fetcher is not None:
                batches = 1
                samples = collate.samples if fetcher.auto_collation else 0
                samples = samples or size_of(batch, self._tensor)[0]
            slot.add(
                (
                    *(batches, samples, wall_ns, cpu_ns, runqueue_ns, blocked_ns),
                    *(collate.spent_ns, storage_bytes, cached_bytes),
                )
            )
        except Exception:
            self._slot = None

    def _open(self, worker: int) -> None:
        """Take a slot, in a process that may have been forked from one that had one."""
        self._slot, self._inside = None, False
        process = sys.modules["multiprocessing.process"]
        parent = process.parent_process()
        if parent is None:
            return
        _show_stacks()
        self._schedstat, self._io = _opened(SCHEDSTAT_PATH), _opened(IO_PATH)
        # If the kernel does not count this, all values are zero: this process has had a core by now.
        if self._schedstat >= 0 and not any(_schedstat(self._schedstat)):
            os.close(self._schedstat)
            self._schedstat = -1
        knows = (KNOWS_RUNQUEUE if self._schedstat >= 0 else 0) | (KNOWS_IO if self._io >= 0 else 0)
        self._slot = WorkersWriter(self._path, parent_pid=parent.pid, worker=worker, knows=knows)

    def _read_last_the_clocks(self) -> Clocks:
        runqueue_ns = _schedstat(self._schedstat)[1] if self._schedstat >= 0 else 0
        storage_bytes, read_bytes = _reads(self._io, counts_itself=True) if self._io >= 0 else (0, 0)
        process_ns, thread_ns = process_time_ns() + _children_ns(), thread_time_ns()
        return Clocks(monotonic_ns(), thread_ns, process_ns, runqueue_ns, storage_bytes, read_bytes)

    def _read_first_the_clocks(self) -> Clocks:
        wall_ns, thread_ns, process_ns = monotonic_ns(), thread_time_ns(), process_time_ns() + _children_ns()
        storage_bytes, read_bytes = _reads(self._io, counts_itself=False) if self._io >= 0 else (0, 0)
        runqueue_ns = _schedstat(self._schedstat)[1] if self._schedstat >= 0 else 0
        return Clocks(wall_ns, thread_ns, process_ns, runqueue_ns, storage_bytes, read_bytes)


class _Collate:
    """A collate function whose calls are timed; otherwise it behaves as the user's."""

    __slots__ = ("_collate", "samples", "spent_ns")

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self.spent_ns = 0
        self.samples = 0

    def __call__(self, data: Any) -> Any:
        began_ns = monotonic_ns()
        try:
            return self._collate(data)
        finally:
            self.spent_ns += monotonic_ns() - began_ns
            self.samples = len(data) if type(data) is list else 0  # types of the user are not queried


def _show_stacks() -> None:
    """Let the launcher and its sidecar read the stacks of this process: under Yama only its ancestors may.

    prctl(2), PR_SET_PTRACER; a rank has done the same, but children do not inherit it.
    """
    with suppress(Exception):
        tracer_pid = int(os.environ["GPULAUNCH_TRACER_PID"])
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(tracer_pid), 0, 0, 0)


def _opened(path: str) -> int:
    """A descriptor, or -1 where there is no such file."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _children_ns() -> int:
    """On a core, the processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return int(1e9 * (used.ru_utime + used.ru_stime))


def _schedstat(schedstat: int) -> tuple[int, ...]:
    """Nanoseconds on a core (a tick too few while it runs), nanoseconds in the run queue, and time slices on a core."""
    return tuple(map(int, os.pread(schedstat, 128, 0).split()))


def _reads(io: int, *, counts_itself: bool) -> tuple[int, int]:
    """Bytes from a device, and bytes in total; those of this reading itself may be included in the next one."""
    text = os.pread(io, 512, 0)
    storage = total = 0
    for line in text.splitlines():
        name, _, value = line.partition(b":")
        if name == b"read_bytes":
            storage = int(value)
        elif name == b"rchar":
            total = int(value)
    return storage, total + len(text) if counts_itself else total
