"""Injects the probe into a rank: torch calls `arm` at the end of its import (entry point group torch.backends).

A rank that is forked after the import calls it itself, once its environment is set. Every other process that imports
torch calls it too: the fork server, dataloader workers, programs outside a run. There it does nothing, except that
workers of a rank measure themselves.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.state import Probe


_armed_pid = 0
_marked_pid = 0
_probe_pid = 0
_probe: Probe | None = None


def arm() -> None:
    """Observe this process if it is a rank of a gpulaunch run. Idempotent; raises nothing; does nothing elsewhere.

    The environment decides: RANK and GPULAUNCH_CHANNEL_DIR make it a rank to observe (GPULAUNCH_PROFILE=off: do
    not), GPULAUNCH_GPU_MEMORY_FRACTION one whose GPU memory is capped.
    """
    global _armed_pid
    try:
        torch = sys.modules.get("torch")
        if torch is None or "RANK" not in os.environ or _armed_pid == os.getpid():
            return
        observes = _observes()
        if _is_helper_process():
            if observes:
                _observe_worker(torch)
            return
        if "GPULAUNCH_CONTROL" in os.environ:
            from gpulaunch.profiler.probe.teardown import release_process_group_last
            from gpulaunch.profiler.probe.tempdir import keep_sockets_together

            keep_sockets_together()
            release_process_group_last()
        if observes:
            _armed_pid = os.getpid()
            _observe(torch)
        if "GPULAUNCH_GPU_MEMORY_FRACTION" in os.environ:
            _armed_pid = os.getpid()
            _cap_gpu_memory(torch)
    except Exception as error:  # an exception here would make `import torch` fail
        _say(f"the profiler is off: {error!r}")


def current() -> Probe | None:
    """The probe of this process, if it has one."""
    return _probe if _probe_pid == os.getpid() else None


def adopt(probe: Probe | None) -> None:
    """Make this the probe of this process, but not of its forked children; None: it has none."""
    global _probe, _probe_pid
    _probe, _probe_pid = probe, os.getpid()


def probe_for_marks() -> Probe | None:
    """The probe of this process for the program's own marks, also without torch (e.g. JAX).

    Such a probe has no hooks; `arm` places them if torch is imported later. Raises nothing.
    """
    global _marked_pid
    if _probe is None and _marked_pid != os.getpid():  # a forked child has its rank's, and its marks are ignored
        _marked_pid = os.getpid()
        from gpulaunch.profiler.channel.segment_writer import SegmentBusyError

        try:
            if "RANK" in os.environ and _observes() and not _is_helper_process():
                _claim()
        except SegmentBusyError:
            pass  # a program started by the rank
        except Exception as error:
            _say(f"the profiler is off: {error!r}")
    return current()


def _observes() -> bool:
    return "GPULAUNCH_CHANNEL_DIR" in os.environ and os.environ.get("GPULAUNCH_PROFILE") != "off"


def _observe(torch: Any) -> None:
    """Claim this rank's segment, if that has not been done for its marks, and place the hooks."""
    from gpulaunch.profiler.channel.segment_writer import SegmentBusyError
    from gpulaunch.profiler.probe.hooks import Hooks

    try:
        probe = current() or _claim()
    except SegmentBusyError:
        # A program started by the rank, with its environment, such as a fork server of its workers.
        _observe_worker(torch)
        return
    if probe is not None:
        probe.loader.tensor = torch.Tensor
        Hooks(probe, torch).install()


def _claim() -> Probe | None:
    """Make this process the writer of the rank's segment; None where the run has ended. Raises SegmentBusyError."""
    from gpulaunch.profiler.channel.segment_writer import SegmentWriter
    from gpulaunch.profiler.probe.state import Probe

    path = os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], f"rank-{int(os.environ['RANK'])}.bin")
    try:
        writer = SegmentWriter(path)
    except FileNotFoundError:
        return None
    probe = Probe(writer)
    adopt(probe)
    os.register_at_fork(after_in_child=probe.off)
    atexit.register(probe.ended)
    return probe


def _observe_worker(torch: Any) -> None:
    """Make this process measure itself if it turns out to be a dataloader worker of the rank, or forks one."""
    from gpulaunch.profiler.probe.worker import arm_worker

    arm_worker(torch)


def _cap_gpu_memory(torch: Any) -> None:
    from gpulaunch.profiler.channel.layout import Hook
    from gpulaunch.profiler.probe.device import apply_gpu_memory_fraction

    def failed(why: str) -> None:
        _say(why)
        if _probe is not None:
            _probe.unavailable(Hook.GPU_MEMORY_FRACTION, why)

    if apply_gpu_memory_fraction(torch.cuda, os.environ, failed) and _probe is not None:
        _probe.armed(Hook.GPU_MEMORY_FRACTION)


def _is_helper_process() -> bool:
    """True in a process that multiprocessing has started, such as a dataloader worker.

    A spawned one imports torch while it unpickles its work, before it knows its parent; until then it is "inheriting".
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)


def _say(text: str) -> None:
    """One line to the user, on stderr."""
    if sys.stderr is not None:
        sys.stderr.write(f"[gpulaunch] rank {os.environ.get('RANK')}: {text}\n")
