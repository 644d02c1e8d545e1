"""The ledger of copies between CPU and GPU and of waits for the GPU: bytes moved, and how long the program was blocked.

A call is one entry, whatever torch does in it: it counts under its direction and kind of host memory (`COPIES`), under
what it waited by (`SYNCS`), or both, and at one line of the program.

    h2d   bytes as they arrive, since torch converts before it sends; pinned only where it need not convert
    d2h   the same; also a wait, by "cpu", unless it goes to pinned memory and was asked not to block
    d2d   from one GPU to another; copies within a GPU are not counted
    wait  item, tolist, nonzero, ...: a value is needed on the CPU, so all work queued before it must be done

Only the training thread waits. For other threads (such as one that prefetches) copies are counted, but not their time.
Their counts go into the same words without a lock: Python does not change threads within `words[...] += n`, and
without the GIL the only damage is a lost count.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from types import FrameType
from typing import Any, Final

from gpulaunch.profiler.channel.layout import COPIES, SITE_KINDS, SYNCS, Hook, Word
from gpulaunch.profiler.channel.quantities import COPY_WORDS, SYNC_WORDS, CopyTotals, SyncTotals
from gpulaunch.profiler.probe.account import H2D, SYNC
from gpulaunch.profiler.probe.built import built_at
from gpulaunch.profiler.probe.gpu_time import TIMED_EVERY, GpuClock
from gpulaunch.profiler.probe.originals import Originals
from gpulaunch.profiler.probe.sites import Sites, caller, path_of
from gpulaunch.profiler.probe.state import Probe
from gpulaunch.profiler.probe.training_thread import OFF
from gpulaunch.profiler.probe.user_signals import raised_by_program

_H2D: Final = tuple(index for index, (direction, _) in enumerate(COPIES) if direction == "h2d")
_D2H: Final = tuple(index for index, (direction, _) in enumerate(COPIES) if direction == "d2h")
_D2D: Final = COPIES.index(("d2d", ""))
_PINNED: Final = tuple(index for index, (_, memory) in enumerate(COPIES) if memory == "pinned")
_KIND_OF_COPY: Final = tuple(SITE_KINDS.index(direction) for direction, _ in COPIES)
_KIND_OF_SYNC: Final = tuple(SITE_KINDS.index(sync) if sync in SITE_KINDS else -1 for sync in SYNCS)
_BUILT_ON_CPU: Final = SITE_KINDS.index("built_on_cpu")
_CPU: Final = SYNCS.index("cpu")
_OTHER: Final = SYNCS.index("other")
_BRING_ALL: Final = (SYNCS.index("tolist"), SYNCS.index("numpy"))

_TAP_DEEP: Final = 4
"""Minimum of our frames between an entry and the program: `_enter_...`, `copies`, and a tap with its wrapper."""

Original = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

Spent = tuple[int, int, int]
"""When a call began and ended, and the step machine's `nested_ns` at its beginning."""

Copy = tuple[int, int, int]
"""Index in COPIES, bytes, index of the GPU."""


class Transfers:
    """Counts the calls reported by the taps of `copies` and writes them to the segment.

    A tap calls one of the first four instead of torch's own function. They call it once, and return its result or raise
    its exception, or that of a signal handler of the program; after a fault of ours they do only this.
    """

    __slots__ = (
        "_call",
        "_clock",
        "_far",
        "_inside",
        "_modules",
        "_no_dispatch",
        "_num_modes",
        "_off",
        "_probe",
        "_sites",
        "_torch",
        "_transform",
        "_types",
    )

    CALLING: Final = ("copies", "waits", "pins", "module_moves", "_timed")
    """The functions that make the user's call: code that it runs is not ours."""

    def __init__(self, probe: Probe, torch: Any, types: frozenset[str], clock: GpuClock) -> None:
        self._probe = probe
        self._torch = torch
        self._types = types
        self._far: dict[Any, bool] = {}  # by device; there are a few
        self._clock = clock
        self._sites = Sites(probe.writer)
        self._call = Originals(torch).call
        self._no_dispatch = torch._C._disabled_torch_dispatch_impl
        self._num_modes = torch._C._len_torch_dispatch_stack
        self._transform = torch._C._functorch.peek_interpreter_stack
        self._off = False
        self._inside: set[int] = set()  # threads inside one of our calls: what torch calls there is part of it
        self._modules: dict[int, dict[int, int]] = {}  # threads that move a module: bytes so far, by index in COPIES

    def copies(self, kind: int, original: Original, args: Args, kwargs: Kwargs, *, into: bool = False) -> Any:
        """A call that may copy its first argument to what it returns or, `into`, its second to the first.

        A line that copies to the CPU by it is of this `kind` (index in SITE_KINDS).
        """
        thread = get_ident()
        if self._off or thread in self._inside or self._probe.thread <= OFF:
            return self._call(original, args, kwargs)
        trains = self._probe.is_training()
        event = self._begin_timing() if trains and self._clock.timing else None
        try:
            result, spent = self._timed(thread, original, args, kwargs)
        except BaseException:
            if event is not None:
                self._clock.no_copy(event)
            raise
        try:
            source = args[0] if not into else args[1] if len(args) > 1 else kwargs.get("other")
            copy = None if result is source or source is None else self._look(source, result)
            row = -1
            if copy is not None:
                row = self._enter_copy(copy, spent if trains else None, kind, _flag(args, kwargs))
            if event is not None:
                self._end_timing(event, copy, row)
            if trains:
                self._measure(spent)
        except Exception as error:
            self._fail(error)
        return result

    def waits(self, sync: int, tensor: Any, original: Original, args: Args, kwargs: Kwargs) -> Any:
        """A call that waits for the GPU: for a value of `tensor`; in any case, if it is None."""
        thread = get_ident()
        if self._off or thread in self._inside or not self._probe.is_training():
            return self._call(original, args, kwargs)
        result, spent = self._timed(thread, original, args, kwargs)
        try:
            size_bytes = 0 if tensor is None else self._bytes_there(tensor)
            if size_bytes is not None:
                self._enter_wait(sync, spent, size_bytes)
                self._measure(spent)
        except Exception as error:
            self._fail(error)
        return result

    def pins(self, original: Original, args: Args, kwargs: Kwargs) -> Any:
        """`pin_memory`, in the training thread: a copy within the CPU's memory, in preparation of one to the GPU."""
        thread = get_ident()
        if self._off or thread in self._inside or not self._probe.is_training():
            return self._call(original, args, kwargs)
        result, spent = self._timed(thread, original, args, kwargs)
        try:
            if result is not args[0]:
                self._nest(H2D, spent)
                self._count_wait(_OTHER, spent[1] - spent[0])
                self._measure(spent)
        except Exception as error:
            self._fail(error)
        return result

    def module_moves(self, original: Original, args: Args, kwargs: Kwargs) -> Any:
        """`Module.to`, `cuda`, `cpu`: one entry for all its parameters together."""
        thread = get_ident()
        if self._off or thread in self._modules or thread in self._inside or self._probe.thread <= OFF:
            return original(*args, **kwargs)
        moved: dict[int, int] = {}
        nested_before_ns, began_ns = self._probe.machine.nested_ns, monotonic_ns()
        try:
            self._modules[thread] = moved  # within: a signal handler may raise wherever it likes
            result = original(*args, **kwargs)
        finally:
            self._modules.pop(thread, None)
        try:
            spent = (began_ns, monotonic_ns(), nested_before_ns) if self._probe.is_training() else None
            for index, size_bytes in sorted(moved.items()):
                self._enter_copy((index, size_bytes, 0), spent, _KIND_OF_COPY[index], 0)
                spent = None  # the time is in the first one
        except Exception as error:
            self._fail(error)
        return result

    # --- the user's call --------------------------------------------------------------------------------------------

    def _timed(self, thread: int, original: Original, args: Args, kwargs: Kwargs) -> tuple[Any, Spent]:
        nested_before_ns, began_ns = self._probe.machine.nested_ns, monotonic_ns()
        try:
            self._inside.add(thread)  # within: a signal handler may raise wherever it likes
            result = self._call(original, args, kwargs)
        finally:
            self._inside.discard(thread)
        return result, (began_ns, monotonic_ns(), nested_before_ns)

    # --- kind of call ------------------------------------------------------------------------------------------------

    def _look(self, source: Any, result: Any) -> Copy | None:
        """The kind of copy, if it was one."""
        tensor = self._torch.Tensor
        if not (isinstance(source, tensor) and isinstance(result, tensor)):
            return None  # torch.fx traces with objects that record every operation
        with self._torch._C.DisableTorchFunction():
            before, after = source.device, result.device
            if before == after:
                return None
            came, went = self._is_far(before), self._is_far(after)
            if not (came or went) or _is_fake(result):
                return None
            if came and went:
                return _D2D, _bytes(result), after.index or 0
            host = result if came else source
            pinned = source.dtype == result.dtype and self._is_pinned(host)  # else by an intermediate tensor
            return (_D2H if came else _H2D)[pinned], _bytes(result), (before if came else after).index or 0

    def _is_pinned(self, host: Any) -> bool:
        cuda = self._torch.cuda
        if type(host).__torch_dispatch__ is not self._no_dispatch or self._num_modes() or self._transform() is not None:
            return False  # the query is a torch operation: overrides and tracers would observe it
        if cuda.is_initialized() and cuda.is_current_stream_capturing():
            return True  # no other copy can be captured, and the driver should not be queried meanwhile
        try:
            return bool(host.is_pinned())
        except RuntimeError:  # a sparse tensor
            return False

    def _bytes_there(self, tensor: Any) -> int | None:
        """The bytes of a tensor that is on a GPU; None if it is not."""
        with self._torch._C.DisableTorchFunction():
            return None if _is_fake(tensor) or not self._is_far(tensor.device) else _bytes(tensor)

    def _is_far(self, device: Any) -> bool:
        """Whether a device is an accelerator. Cached, because torch creates a new string of its type each time."""
        far = self._far.get(device)
        if far is None:
            far = self._far[device] = device.type in self._types
        return far

    # --- the entries ------------------------------------------------------------------------------------------------

    def _enter_copy(self, copy: Copy, spent: Spent | None, kind: int, waits_not: int) -> int:
        """Count a copy; `spent` if it took the training thread's time.

        Returns:
            The row of its line; -1 while a module is moved, which is entered as a whole.
        """
        index, size_bytes, _ = copy
        moved = self._modules.get(get_ident())
        if moved is not None:
            moved[index] = moved.get(index, 0) + size_bytes
            return -1
        pinned = index in _PINNED
        blocked_ns = 0
        if spent is not None:
            blocked_ns = spent[1] - spent[0]
            if index in _H2D:
                self._nest(H2D, spent)
            elif index in _D2H:
                self._nest(SYNC, spent)
                if not (pinned and waits_not):
                    self._count_wait(_CPU, blocked_ns)
        self._count_copy(index, size_bytes, blocked_ns)
        row = self._sites.row(
            kind if index in _D2H else _KIND_OF_COPY[index],
            caller(_TAP_DEEP),
            self._tell_built if index in _H2D else None,
        )
        self._probe.writer.site(
            row, size_bytes=size_bytes, blocked_ns=blocked_ns, pinned=int(pinned), non_blocking=waits_not
        )
        return row

    def _enter_wait(self, sync: int, spent: Spent, size_bytes: int) -> None:
        blocked_ns = spent[1] - spent[0]
        self._nest(SYNC, spent)
        self._count_wait(sync, blocked_ns)
        if sync in _BRING_ALL:
            self._count_copy(_D2H[0], size_bytes, blocked_ns)
        row = self._sites.row(_KIND_OF_SYNC[sync], caller(_TAP_DEEP))
        self._probe.writer.site(row, size_bytes=size_bytes, blocked_ns=blocked_ns)

    def _count_copy(self, index: int, size_bytes: int, blocked_ns: int) -> None:
        words = self._probe.writer.words
        at = Word.COPY_FIRST + COPY_WORDS * index
        words[at + CopyTotals.count] += 1
        words[at + CopyTotals.size_bytes] += size_bytes
        words[at + CopyTotals.blocked_ns] += blocked_ns

    def _count_wait(self, sync: int, blocked_ns: int) -> None:
        words = self._probe.writer.words
        at = Word.SYNC_FIRST + SYNC_WORDS * sync
        words[at + SyncTotals.calls] += 1
        words[at + SyncTotals.blocked_ns] += blocked_ns

    def _nest(self, phase: int, spent: Spent) -> None:
        began_ns, ended_ns, nested_before_ns = spent
        self._probe.nest(phase, began_ns, ended_ns, nested_before_ns)

    def _tell_built(self, frame: FrameType) -> tuple[int, str] | None:
        """A line that moves a tensor built on the CPU to the GPU has its own kind."""
        line = built_at(frame, self._torch)
        if not line:
            return None
        path = path_of(frame.f_code)
        return _BUILT_ON_CPU, f"built at {path}:{line}, moved at {path}:{frame.f_lineno}"

    def _measure(self, spent: Spent) -> None:
        """Add the entry's overhead since the user's call ended."""
        cost = self._probe.cost
        if cost.measures:
            cost.spent(spent[1])

    # --- the GPU's time ---------------------------------------------------------------------------------------------

    def _begin_timing(self) -> Any | None:
        try:
            return self._clock.copy_begins()
        except Exception as error:
            self._untimed(error)
            return None

    def _end_timing(self, event: Any, copy: Copy | None, row: int) -> None:
        if copy is None or row < 0:
            self._clock.no_copy(event)
            return
        index, _, gpu = copy
        words, writer = self._probe.writer.words, self._probe.writer
        at = Word.COPY_FIRST + COPY_WORDS * index + CopyTotals.gpu_ns

        def told(gpu_ns: int) -> None:  # it represents those of the steps that were not timed
            words[at] += TIMED_EVERY * gpu_ns
            writer.site(row, gpu_ns=TIMED_EVERY * gpu_ns, count=0)

        try:
            self._clock.copy_ended(event, gpu, told)
        except Exception as error:
            self._untimed(error)

    def _untimed(self, error: Exception) -> None:
        if raised_by_program(error):
            raise error
        self._clock.timing = False
        self._probe.clock, self._probe.times = None, False
        self._probe.unavailable(Hook.GPU_TIME, repr(error))

    def _fail(self, error: Exception) -> None:
        """Our own fault: stop counting."""
        if raised_by_program(error):
            raise error
        self._off = True
        self._probe.unavailable(Hook.COPIES | Hook.SYNCS, repr(error))


def _flag(args: Args, kwargs: Kwargs) -> int:
    """`non_blocking`, which torch's signatures have as a keyword or as the first bool among the arguments."""
    if "non_blocking" in kwargs:
        return int(bool(kwargs["non_blocking"]))
    for each in args:
        if type(each) is bool:
            return int(each)
    return 0


def _bytes(tensor: Any) -> int:
    """A tensor's bytes; 0 for a sparse one, which does not report them."""
    try:
        return int(tensor.nbytes)
    except RuntimeError:
        return 0


def _is_fake(tensor: Any) -> bool:
    """True for objects that only have the shape of a tensor, as used by torch.compile."""
    return type(tensor).__module__.startswith("torch._subclasses")
