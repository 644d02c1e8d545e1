"""Measures how long training waits for other ranks in blocking collectives. DistributedDataParallel is `ddp`'s.

    collectives  the functions of torch.distributed, and `Work.wait`. On the CPU they block until completion; on CUDA
                 they enqueue on a stream and return, and take hardly any time. They are counted by kind when they
                 start, so that the file shows in which one a rank hangs (`channel.collectives`).
    all of them  are numbered by torch's flight recorder; see `recorder`.
    the end      destroy_process_group() of all groups: a rank that hangs after it has finished.

If a program imports a function from torch.distributed by name before the taps are placed (e.g. packages that are
imported with torch before the ranks are forked), its calls bypass the tap.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from types import FrameType
from typing import Any, Final

from gpulaunch.profiler.channel.collectives import CALL, COLLECTIVES_BYTES, KINDS, open_new, words_of_call
from gpulaunch.profiler.channel.layout import SITE_KINDS, Hook, Word
from gpulaunch.profiler.channel.quantities import Pauses
from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.account import COMM
from gpulaunch.profiler.probe.gradients import FLAT, groups_of_optimizers
from gpulaunch.profiler.probe.recorder import Recorder
from gpulaunch.profiler.probe.reductions import Reductions
from gpulaunch.profiler.probe.sites import Sites, asked_for, caller
from gpulaunch.profiler.probe.state import Nested, Probe
from gpulaunch.profiler.probe.taps import HookError, Undo, exclude_from_compile, put
from gpulaunch.profiler.probe.training_thread import OFF
from gpulaunch.profiler.probe.user_signals import raised_by_program

_CALLS: Final = Pauses.comm_calls
_BLOCKED: Final = Pauses.comm_blocked_ns_total
_COLLECTIVE: Final = SITE_KINDS.index("collective")
_SMALL_COLLECTIVE: Final = SITE_KINDS.index("small_collective")
_SMALL_BYTES: Final = 1024
"""Of a tensor: up to this, a collective takes as long as it takes to reach the other ranks."""
_SMALL_BESIDE_BYTES: Final = 1 << 16
"""The same where one line also has smaller ones, as in a loop over parameters: 64 KiB take 1.1 to 1.5 times as long as
256 bytes, and 256 KiB 1.6 times (gloo, 2 ranks, torch 2.13). On lines of their own such may be activations."""
_LARGE: Final = 1 << 62

COLLECTIVES: Final = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "monitored_barrier", "recv", "recv_object_list", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
    *("send_object_list", "_all_gather_base", "_reduce_scatter_base"),
)
"""Functions of torch.distributed that may wait for other ranks; not those that only start something (isend)."""

_FSDP: Final = "torch.distributed.fsdp."
_FUNCTION: Final = "torch.autograd.function"
_BETWEEN_TWO: Final = tuple(words_of_call(kind)[2] for kind in ("recv", "send"))
"""Calls that answer each other: they cannot be combined."""
_GATHER, _SCATTER, _REDUCE = (words_of_call(kind)[2] for kind in ("all_gather", "reduce_scatter", "all_reduce"))


def install(probe: Probe, torch: Any, undo: Undo) -> None:
    """Observe collectives, as far as this torch supports it.

    Raises:
        HookError: torch does not look as expected.
    """
    if not torch.distributed.is_available():
        return
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    names = [name for name in COLLECTIVES if hasattr(c10d, name)]
    if "all_reduce" not in names:
        raise HookError("torch.distributed has no all_reduce")
    calls = Calls(probe, open_words(probe), torch._C.DisableTorchFunction)
    for name in names:
        original = getattr(c10d, name)
        tap = tap_collective(probe, torch, calls, kind_of(name), original)
        exclude_from_compile(torch, tap)
        put(c10d, name, tap, undo)
        if getattr(torch.distributed, name, None) is original:
            put(torch.distributed, name, tap, undo)
    wait = tap_collective(probe, torch, calls, "wait", c10d.Work.wait)
    exclude_from_compile(torch, wait)
    put(c10d.Work, "wait", wait, undo)

    leave = tap_leave(probe, c10d, c10d.destroy_process_group)
    if torch.distributed.destroy_process_group is c10d.destroy_process_group:
        put(torch.distributed, "destroy_process_group", leave, undo)
    put(c10d, "destroy_process_group", leave, undo)

    undo.append(probe.each_second(Hook.NESTED, calls.look))
    undo.append(probe.each_second(Hook.NESTED, Recorder(torch, calls.words).look))


def kind_of(name: str) -> str:
    """Return the kind, of `channel.collectives.KINDS`, of a function of torch.distributed."""
    name = name.removeprefix("_").removeprefix("monitored_")
    return max((kind for kind in KINDS if name.startswith(kind)), key=len)


def open_words(probe: Probe) -> memoryview | list[int]:
    """The words of this rank's collectives file; if it cannot be created, private ones without a reader."""
    try:
        path = os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], f"collectives-{int(os.environ['RANK'])}.bin")
        return open_new(path, attempt=probe.writer.words[Word.ATTEMPT])
    except (OSError, KeyError, ValueError) as error:
        if raised_by_program(error):
            raise
        # E.g. no space: their time within the steps is in the segment anyway.
        return [0] * (COLLECTIVES_BYTES // 8)


def _is_of_model(frame: FrameType) -> bool:
    """Whether a frame is the forward or backward of an `autograd.Function`: what its collectives reduce, such as the
    statistics of a layer, depends on the layer before."""
    return frame.f_back is not None and frame.f_back.f_globals.get("__name__") == _FUNCTION


class Calls:
    """The training thread's calls, its waits for other ranks in them, and their lines."""

    def __init__(
        self,
        probe: Probe,
        words: memoryview | list[int],
        unobserved: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`unobserved`: in it, no `__torch_function__` of the program is called."""
        self.words = words
        self._probe = probe
        self._unobserved = unobserved
        self._sites = Sites(probe.writer)
        self._small_at = -1  # optimizers' steps before the last small one
        self._fsdp = _Fsdp()
        self._reductions = Reductions()

    def ended(self, began: Nested, call: int, args: tuple[Any, ...], is_small: bool, before: Sequence[float]) -> None:
        """A call has ended.

        Args:
            began: when it began.
            call: the value of CALL to publish.
            args: its arguments; the first tensor of the first two has its size.
            is_small: it transfers little, whatever they are.
            before: what `reductions` has read.
        """
        probe = self._probe
        blocked_ns = probe.nested_end(COMM, began)
        if probe.thread == OFF:
            return
        try:
            self.words[CALL] = call
            words = probe.writer.words
            words[_CALLS] += 1
            words[_BLOCKED] += blocked_ns
            line = caller()
            asking = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
            by_torch = line is not asking
            line = asked_for(line)
            if by_torch:
                is_small = False
                if call in (_GATHER, _SCATTER) and str(asking.f_globals.get("__name__")).startswith(_FSDP):
                    self._fsdp.called(
                        call,
                        blocked_ns,
                        edge=words[Word.LAST_EDGE],
                        step=probe.machine.optimized,
                        gathered_bytes=self._output_bytes(args) if call == _GATHER else 0,
                    )
            elif call in _BETWEEN_TWO or _is_of_model(asking):
                is_small = False
            elif not is_small:
                beside = self._sites.has(_SMALL_COLLECTIVE, line)
                size_bytes = self._size_bytes(args)
                is_small = size_bytes <= (_SMALL_BESIDE_BYTES if beside else _SMALL_BYTES)
                if call == _REDUCE and line is not None and size_bytes < _LARGE:
                    with self._unobserved():
                        self._reductions.after(line, args[0], size_bytes, before, step=probe.machine.optimized)
            kind = _SMALL_COLLECTIVE if is_small else _COLLECTIVE
            # The first one of a step waits for the ranks that are late, the others take as long as they take.
            steps = probe.machine.optimized
            follows_ns = blocked_ns if is_small and steps == self._small_at else 0
            if is_small:
                self._small_at = steps
            probe.writer.site(self._sites.row(kind, line), blocked_ns=blocked_ns, gpu_ns=follows_ns)
        except Exception as error:
            probe.fail(error)

    def values_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[float]:
        """Some values of what an `all_reduce` is going to reduce."""
        try:
            with self._unobserved():
                return self._reductions.before(args, kwargs)
        except Exception as error:
            if raised_by_program(error):
                raise
            return ()

    def look(self) -> None:
        """Publish what FSDP has called: in accumulation steps it need not reduce gradients; and what the program has
        reduced itself."""
        machine = self._probe.machine
        if machine.optimized and (told := self._fsdp.ratios(machine.microsteps, machine.optimized)):
            facts.set_fact("fsdp", told)
        if told := self._reductions.told():
            facts.set_fact("reduced", told)

    def _size_bytes(self, args: tuple[Any, ...]) -> int:
        """Of the first tensor of the first two arguments; very large if it has no size, as a sparse one."""
        try:
            with self._unobserved():
                sizes: Iterator[int] = (each.nbytes for each in args[:2] if hasattr(each, "nbytes"))
                return next(sizes, _LARGE)
        except Exception as error:
            if raised_by_program(error):
                raise
            return _LARGE

    def _output_bytes(self, args: tuple[Any, ...]) -> int:
        """Of what a gather fills: a tensor, or a list of them, as FSDP1 gives it on a CPU."""
        outputs: Any = args[0] if args else None
        return sum(self._size_bytes((each,)) for each in (outputs if isinstance(outputs, list) else [outputs]))


class _Fsdp:
    """The collectives of FSDP on the training thread, where backward runs if there is no GPU."""

    def __init__(self) -> None:
        self._gathers = 0
        self._scatters = 0
        self._scattered_ns = 0
        self._backwards = 0  # with at least one reduction
        self._edge = -1  # 0 is the word before the first edge
        self._gathered_bytes = 0
        self._following_ns = 0
        self._step = -1

    def called(self, call: int, blocked_ns: int, *, edge: int, step: int, gathered_bytes: int) -> None:
        """Count a call.

        Args:
            call: `_GATHER` or `_SCATTER`.
            blocked_ns: how long it took.
            edge: the last one of the phases, such as the start of this backward pass.
            step: steps of the optimizer before it.
            gathered_bytes: of the output of a gather.
        """
        if step == self._step:  # the first one of a step also waits for the ranks that are late
            self._following_ns += blocked_ns
        self._step = step
        if call == _GATHER:
            self._gathers += 1
            self._gathered_bytes += gathered_bytes
            return
        self._scatters += 1
        self._scattered_ns += blocked_ns
        self._backwards += edge != self._edge
        self._edge = edge

    def ratios(self, microsteps: int, optimized: int) -> dict[str, float]:
        """What is told of so many backward passes and steps of the optimizer; rounded, so that it seldom changes."""
        if not self._scatters:
            return {}
        groups = [of_group["params"] for _, of_group in groups_of_optimizers()]
        # FSDP1 makes one of all parameters of a unit: then it is not known how many it has.
        is_flat = any(type(each).__name__ == FLAT for of_group in groups for each in of_group[:1])
        parameters = 0 if is_flat else sum(map(len, groups))
        return {
            "reductions_per_step": round(min(self._backwards, microsteps) / optimized, 1),
            "seconds_per_reduction": float(f"{self._scattered_ns / 1e9 / self._backwards:.1e}"),
            "gathers_per_reduction": round(self._gathers / self._scatters, 1),
            "gathers_per_step": round(self._gathers / optimized, 1),
            "parameters_per_unit": round(parameters * self._backwards / self._scatters, 1),
            "bytes_per_gather": float(f"{self._gathered_bytes / max(1, self._gathers):.1e}"),
            "following_seconds_per_step": float(f"{self._following_ns / 1e9 / optimized:.1e}"),
        }


def tap_collective(
    probe: Probe, torch: Any, calls: Calls, kind: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    """A call that may wait for other ranks; nested calls are part of it."""
    is_compiling = torch.compiler.is_dynamo_compiling
    words = calls.words
    counter, running, returned = words_of_call(kind)
    is_small = kind == "barrier" or "object" in original.__name__

    @functools.wraps(original)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != probe.thread:
            return original(*args, **kwargs)
        began = probe.nested()
        before: Sequence[float] = ()
        if began is not None:
            words[counter] += 1
            words[CALL] = running
            before = calls.values_before(args, kwargs) if returned == _REDUCE else ()
        try:
            return original(*args, **kwargs)
        finally:
            if began is not None:
                calls.ended(began, returned, args, is_small, before)

    return tapped


def tap_leave(probe: Probe, c10d: Any, original: Callable[..., None]) -> Callable[..., None]:
    """`destroy_process_group`: a rank that hangs after it has finished, and hangs in its teardown."""

    @functools.wraps(original)
    def tapped_leave(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        try:
            if not c10d.is_initialized():
                probe.writer.words[Word.LEFT_GROUP_NS] = time.monotonic_ns()
        except Exception as error:
            probe.unavailable(Hook.NESTED, repr(error))

    return tapped_leave
