"""The GPU of a rank: its presence, torch's allocator figures, the memory cap, and a snapshot on out-of-memory. No
overhead in a rank without CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final

from gpulaunch.profiler.channel.declare import store
from gpulaunch.profiler.channel.quantities import GpuMemory

SNAPSHOT_FILE: Final = "gpu-memory.pickle"
"""The allocator's state when memory ran out, next to the rank's error file; pytorch.org/memory_viz shows it."""

_DRIVER_FILES: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvhost-ctrl-gpu")
"""NVIDIA, AMD, a GPU under WSL, NVIDIA Jetson."""

_SNAPSHOTS_AT_ONCE: Final = 3
_SNAPSHOT_EVERY_S: Final = 60.0


def accelerator_types(
    torch: Any, environ: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists
) -> frozenset[str]:
    """The types of device that count as accelerators here; empty where there can be none. Initialises nothing.

    GPULAUNCH_DEVICE_TYPES sets others, for tests: torch's own `meta` needs no hardware.
    """
    named = environ.get("GPULAUNCH_DEVICE_TYPES", "")
    if named:
        return frozenset(kind.strip() for kind in named.split(","))
    built_for_gpus = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    return frozenset({"cuda"} if built_for_gpus and any(map(exists, _DRIVER_FILES)) else ())


def memory_of(cuda: Any) -> GpuMemory | None:
    """The allocators' figures through `torch.cuda`, or None while CUDA is not initialised (never initialises it)."""
    if not cuda.is_initialized():
        return None
    # One nested read; memory_allocated, max_memory_allocated and memory_reserved would each build it again.
    stats = cuda.memory_stats_as_nested_dict()
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return GpuMemory(
        allocated_bytes=allocated["current"],
        peak_allocated_bytes=allocated["peak"],
        reserved_bytes=reserved["current"],
        peak_reserved_bytes=reserved["peak"],
        active_bytes=stats["active_bytes"]["all"]["current"],
        inactive_split_bytes=stats["inactive_split_bytes"]["all"]["current"],
        alloc_retries=stats["num_alloc_retries"],
        ooms=stats["num_ooms"],
        pinned_bytes=_pinned_bytes(cuda),
    )


def _pinned_bytes(cuda: Any) -> int:
    """torch 2.6 does not report it; later versions do, in two different forms."""
    tell = getattr(cuda, "host_memory_stats_as_nested_dict", None)
    figures = tell().get("allocated_bytes", {}) if tell is not None else {}
    return int(figures.get("all", figures).get("current", 0))


def write_memory(words: memoryview, cuda: Any) -> None:
    """Write the figures to the segment, if CUDA is in use."""
    memory = memory_of(cuda)
    if memory is not None:
        store(words, memory)


def apply_gpu_memory_fraction(cuda: Any, environ: Mapping[str, str], failed: Callable[[str], None]) -> bool:
    """Cap this rank's share of its GPU to GPULAUNCH_GPU_MEMORY_FRACTION, from the initialization of CUDA on.

    Args:
        cuda: `torch.cuda`.
        environ: contains the fraction and LOCAL_RANK.
        failed: called with one line if the cap could not be set; nothing is raised, now or later.

    Returns:
        True if a cap has been queued.
    """
    text = environ.get("GPULAUNCH_GPU_MEMORY_FRACTION")
    if not text:
        return False
    try:
        fraction = float(text)
        local_rank = int(environ.get("LOCAL_RANK", "0"))
    except ValueError as error:
        failed(f"no GPU memory cap: {error}")
        return False
    return _once_initialized(
        cuda, lambda: _cap_own_device(cuda, fraction, local_rank), lambda why: failed(f"no GPU memory cap: {why}")
    )


def _once_initialized(cuda: Any, call: Callable[[], None], failed: Callable[[str], None]) -> bool:
    """Call `call` once CUDA has been initialised in this process; `failed` gets what it raises.

    Returns:
        True if it has been queued.
    """
    owner_pid = os.getpid()

    def guarded() -> None:
        if os.getpid() != owner_pid:
            return  # a dataloader worker that uses CUDA is not the rank
        try:
            call()
        except Exception as error:  # an exception here would make the user's first CUDA call fail
            failed(str(error))

    try:
        cuda._lazy_call(guarded)
    except Exception as error:
        failed(str(error))
        return False
    return True


def _cap_own_device(cuda: Any, fraction: float, local_rank: int) -> None:
    """Cap the one device that is the rank's by torchrun's convention.

    Not all visible ones: torch's allocator makes each the current device to read its size, so every rank would hold a
    CUDA context (hundreds of MB) on every GPU of the node, and would continue with the last one as its default.
    """
    visible = cuda.device_count()
    if not visible:
        return
    before = cuda.current_device()
    device = local_rank % visible
    cuda.set_per_process_memory_fraction(fraction, device)
    if device != before:
        # Unlike set_device, this does not create a context on the device that it restores.
        cuda._maybe_exchange_device(before)


def watch_out_of_memory(
    torch: Any, words: memoryview, environ: Mapping[str, str], failed: Callable[[str], None]
) -> bool:
    """When GPU memory runs out, write the allocator's figures to the segment, and its state next to the error file.

    Args:
        torch: the rank's torch.
        words: the rank's segment.
        environ: contains TORCHELASTIC_ERROR_FILE; without it no state is written.
        failed: called if this cannot be done.

    Returns:
        True if it will be, once CUDA is initialised.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    directory = os.path.dirname(os.path.abspath(error_file)) if error_file else ""
    observer = _OutOfMemory(torch.cuda, words, directory)
    # Before CUDA is initialised the allocator does not keep observers: one attached earlier is lost.
    return _once_initialized(torch.cuda, lambda: torch._C._cuda_attach_out_of_memory_observer(observer.seen), failed)


class _OutOfMemory:
    """Called by the allocator, with none of its locks held, before the exception is thrown.

    Some programs run out of memory on purpose, to find the batch size that fits. So there are not many snapshots, and
    the last one stays.
    """

    def __init__(self, cuda: Any, words: memoryview, directory: str) -> None:
        self._cuda = cuda
        self._words = words
        self._directory = directory
        self._owner_pid = os.getpid()
        self._written = 0
        self._last_s = 0.0

    def seen(self, _device: int, _asked_bytes: int, _total_bytes: int, _free_bytes: int) -> None:
        """Memory has run out."""
        try:
            if os.getpid() != self._owner_pid:
                return
            write_memory(self._words, self._cuda)
            now_s = monotonic()
            if self._directory and (self._written < _SNAPSHOTS_AT_ONCE or now_s - self._last_s >= _SNAPSHOT_EVERY_S):
                self._written += 1
                self._last_s = now_s
                self._save(os.path.join(self._directory, SNAPSHOT_FILE))
        except Exception:  # noqa: S110 - it would take the place of the exception that the program is about to get
            pass

    def _save(self, path: str) -> None:
        making = f"{path}.{os.getpid()}.new"
        os.close(os.open(making, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._cuda.memory._dump_snapshot(making)
            os.rename(making, path)
        except BaseException:
            os.unlink(making)
            raise
