"""Finds reductions that the program asks for, of tensors that are the same on all ranks already.

DistributedDataParallel averages gradients in backward; a program that then calls `all_reduce` for them averages what is
the same. That shows in the values: the sum over the ranks is a multiple of what each has had, the mean is the same.
A few values are read before and after some calls, of float32 on a CPU. On a GPU they would have to be waited for, and a
call takes no time there.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

from gpulaunch.profiler.probe.sites import place_of
from gpulaunch.profiler.probe.tensor_memory import some_values

_LINES: Final = 64
"""No more are known."""
CALLS: Final = 64
"""That are read between two looks, a second apart: 20 to 30 us each (one core of two, torch 2.13), 2 ms at most."""
_ENOUGH: Final = 8
"""Calls whose values were the same."""
_ERROR: Final = 1e-4
"""Of a sum of float32 over ranks."""


class Reductions:
    """What each line of the program has all ranks add up: the one that has most is told."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], _Line] = {}
        self._left = CALLS

    def before(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[float]:
        """Return some values of what is going to be reduced; empty: they cannot be read, or have been often enough.

        Args:
            args: of `all_reduce`: tensor, op, group, async_op.
            kwargs: the same.
        """
        if not self._left or len(args) > 3 or kwargs.get("async_op") or not args:
            return ()
        self._left -= 1
        return _some_values(args[0])

    def after(self, frame: FrameType, tensor: Any, size_bytes: int, before: Sequence[float], *, step: int) -> None:
        """A line has reduced a tensor of such a size, after so many steps of the optimizer."""
        key = (id(frame.f_code), frame.f_lasti)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _LINES:
                return
            line = self._lines[key] = _Line(frame)
        if line.step != step:
            line.step, line.steps = step, line.steps + 1
        line.bytes += size_bytes
        if before and (multiple := _multiple(before, _some_values(tensor))) is not None:
            line.same += multiple
            line.other += not multiple

    def told(self) -> dict[str, Any]:
        """What is told of the line that has reduced most: it, its bytes in a step, and whether they were the same."""
        self._left = CALLS
        line = max(self._lines.values(), key=lambda each: each.bytes, default=None)
        if line is None:
            return {}
        size_bytes = float(f"{line.bytes / line.steps:.1e}")  # so that it seldom changes
        return {"line": line.place, "bytes": size_bytes, "same": line.same >= _ENOUGH and not line.other}


class _Line:
    """A line that reduces."""

    __slots__ = ("bytes", "code", "other", "place", "same", "step", "steps")

    def __init__(self, frame: FrameType) -> None:
        self.code = frame.f_code  # kept, so its id stays unique
        self.place = place_of(frame)
        self.step = -1  # the last one in which it has
        self.steps = 0
        self.bytes = 0
        self.same = 0  # calls that were read
        self.other = 0


def _some_values(tensor: Any) -> Sequence[float]:
    is_read = type(tensor).__name__ in ("Tensor", "Parameter") and str(tensor.dtype) == "torch.float32"
    return tuple(memoryview(some_values(tensor)).cast("f")) if is_read else ()


def _multiple(before: Sequence[float], after: Sequence[float]) -> bool | None:
    """Whether the values after are one whole multiple of those before; None: too few are not zero. Where only another
    rank had something, they are not."""
    pairs = list(zip(before, after, strict=False))
    if any(late for early, late in pairs if not early):
        return False
    ratios = [late / early for early, late in pairs if early]
    if len(ratios) < 2:
        return None
    whole = round(ratios[0]) if abs(ratios[0]) < 1e6 else 0
    return whole >= 1 and all(abs(ratio - whole) <= _ERROR * whole for ratio in ratios)
