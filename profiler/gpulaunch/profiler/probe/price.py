"""Estimates the probe's overhead by comparing blocks of steps without the probe with those around them; pure.

    before   bare   after          each of `BLOCK` steps; most of the time there is none of them
    ------- ------- -------

The typical step of the two outer blocks less that of the one between them is the cost of a step, once. A typical step
is the mean of the middle half of them: a loop that logs every ten steps does so in one block and not in the next. What
it took to take steps up is done once for all steps of a block: it is measured where it is done, and added. One
such comparison says little all the same, for steps are noisy; the median of many says it, and how they spread tells how
well.

What is measured is what the probe does to a typical step, whatever it is: caches that torch loses, the other ranks
that wait for this one. Not in it: that its taps are called at all, that batches are counted and ends of steps are
noted, which stays in the bare steps too, and is a third of all (warm, 5 of 12 us where the same machine called a
function in 0.1 us; `benchmarks/probe.py` has both in it); and what is done in few steps only, once a second or in one
of eight.

All ranks of a job make their bare steps together: their position is a function of the number of steps alone, because a
rank that runs ahead only waits for the others in the next collective. They are not evenly spaced, or a program that
logs every 256 steps would log in all of them, or in none.

Above the budget, optional parts are switched off, one after the other in the order of `SHED`, until the rest is within
it. Either figure can exceed it: the comparison, or the time that the taps have measured inside themselves. The call of
the taps is in neither, and is added. The parts that detect step ends and phases are never switched off. If they alone
are too expensive, the blocks between are bare: of two blocks one is observed, then of four, and so on up to
`MOST_BLOCKS`.

    observed  bare  bare  bare  observed  bare  bare  bare  observed
    -------- ----- ----- -----  -------- ----- ----- -----  --------

Which ones are observed is a function of the number of steps alone, again; ranks that observe fewer observe some of the
same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from gpulaunch.profiler.channel.layout import Hook

BLOCK: Final = 8
"""Steps of a block."""

DEFAULT_BUDGET_PPM: Final = 5_000
"""Of a step, in millionths."""

SHED: Final = (Hook.GPU_TIME, Hook.COPIES | Hook.SYNCS)
"""The order of switching off. Not `LOADER_QUEUE`: without it no rule about the dataloader can judge, and a
data-bound program of 20 ms steps lost its finding after 30 s to 90 s."""

MOST_BLOCKS: Final = 16
"""Of this many blocks one is always observed: then most of the remaining overhead is that of the bare steps."""

_FIRST: Final = 256  # the first steps are not typical: kernels are chosen, memory is allocated
_APART: Final = 256  # from one comparison to the next, on average, while there are few; later four times as much
_FEW: Final = 64
_KEPT: Final = 128
_ENOUGH: Final = 16  # comparisons before their median is reported
_SURE: Final = 32  # and before it alone has something switched off
_LONGEST_NS: Final = 2_000_000_000  # in bare steps a rank's region is not observed; and long steps need no estimate

_SIGMAS: Final = 3  # it is looked at again and again, and what is looked at is mostly the same
_PATIENCE: Final = 3  # times in a row that the overhead was too high
_SETTLED_NS: Final = 30_000_000_000  # before that, a program is rather told about than spared
_SEEN_NS: Final = 10_000_000_000  # and after that, so long is looked at what the last one has saved
_UNSEEN: Final = 0.5  # of what the figures tell is on top: that the taps are called, in bare steps too
_MAD_TO_SIGMA: Final = 1.4826  # of a normal distribution
_MEDIAN_ERROR: Final = 1.2533  # of the median beside that of the mean, of a normal distribution

_IDLE, _BEFORE, _BARE, _AFTER = range(4)


class Comparison:
    """Decides when to make bare steps, and evaluates them. Times are nanoseconds of one clock."""

    __slots__ = (
        "_at",
        "_bare_ns",
        "_before_ns",
        "_begun",
        "_differences",
        "_found",
        "_planned",
        "_seed",
        "blocks",
        "cost_ns",
        "entered",
        "error_ns",
        "one_of",
        "pairs",
        "turn",
    )

    def __init__(self) -> None:
        self.pairs = 0
        """Number of comparisons behind the next two; while it is 0, those are invalid."""
        self.cost_ns = 0
        self.error_ns = 0
        self.entered = 0
        """Comparisons that were ever made."""
        self.turn = _FIRST
        """The number of steps at which `take` is to be called."""
        self.one_of = 1
        """Of this many blocks one is observed, a power of two; 1: all are, except those for comparison."""
        self.blocks = 1
        """How many blocks are to be bare, when `take` has said that steps are."""
        self._differences = array("q", bytes(8 * _KEPT))  # all of it from the beginning: a rank must not grow
        self._found = 0
        self._planned = _FIRST  # where the current one begins, or the next
        self._begun = 0  # how many were planned
        self._seed = 1
        self._at = _IDLE
        self._before_ns = self._bare_ns = 0

    def take(self, steps: int, lasted_ns: Sequence[int], apart_ns: int = 0) -> bool:
        """A block of `BLOCK` steps has ended.

        Args:
            steps: the number of steps so far.
            lasted_ns: duration of each of the last `BLOCK`, without the next.
            apart_ns: what was spent on all of them in one or two.

        Returns:
            True: the next `blocks` of them are to be bare. Then comes `bare_ended`, or `give_up`.
        """
        if steps != self.turn:
            self.give_up(steps)
            return False
        if self._at == _IDLE:
            self._turn_to(_BEFORE, steps)
            return False
        typical_ns = _typical(lasted_ns) + apart_ns // BLOCK
        if self._at == _AFTER:
            if self.one_of == 1 or steps >= self._planned:
                self._enter((self._before_ns + typical_ns) // 2 - self._bare_ns)
            self._plan(steps)
            if self.one_of == 1:
                self.give_up(steps)
                return False
        self.blocks = min(max(1, self.one_of - 1), _LONGEST_NS // max(1, BLOCK * typical_ns))
        if not self.blocks:
            self.give_up(steps)
            return False
        self._before_ns = typical_ns
        self._turn_to(_BARE, steps)
        return True

    def bare_ended(self, steps: int, lasted_ns: Sequence[int]) -> None:
        """The bare steps have been made, and the last `BLOCK` of them took so long."""
        self._bare_ns = _typical(lasted_ns)
        if self.one_of == 1 or steps % (self.one_of * BLOCK) == 0:
            self._turn_to(_AFTER, steps)
        else:
            self.give_up(steps)

    def give_up(self, steps: int) -> None:
        """Abandon the current comparison, if any, and go to the next.

        Its position depends only on the number of steps: the ranks stay together even if one of them gives up.
        """
        self._plan(steps)
        if self.one_of == 1:
            self._at = _IDLE
            self.turn = self._planned
        else:
            cycle = self.one_of * BLOCK
            self._turn_to(_BEFORE, -(-steps // cycle) * cycle)

    def start_over(self) -> None:
        """Discard the results so far: something has been switched off."""
        self._found = 0
        self.pairs = self.cost_ns = self.error_ns = 0

    def observe_one_of(self, blocks: int, steps: int) -> None:
        """From now on, after step number `steps`, observe one of `blocks` blocks."""
        self.one_of = blocks
        self.start_over()
        self.give_up(steps)

    def _plan(self, steps: int) -> None:
        while self._planned <= steps:
            self._begun += 1
            self._seed = (self._seed * 1103515245 + 12345) % (1 << 31)
            apart = _APART if self._begun <= _FEW else 4 * _APART
            self._planned += apart // 2 + (self._seed >> 8) % apart

    def _turn_to(self, at: int, steps: int) -> None:
        self._at = at
        self.turn = steps + BLOCK

    def _enter(self, difference_ns: int) -> None:
        self.entered += 1
        self._differences[self._found % _KEPT] = difference_ns
        self._found += 1
        found = self._differences[: min(self._found, _KEPT)]
        if len(found) < _ENOUGH:
            return
        self.pairs = len(found)
        self.cost_ns = _median(found)
        spread_ns = _MAD_TO_SIGMA * _median([abs(each - self.cost_ns) for each in found])
        self.error_ns = round(_MEDIAN_ERROR * spread_ns / len(found) ** 0.5)


class Budget:
    """Decides when the overhead is too high, and what to switch off then."""

    __slots__ = ("_acted", "_left", "_price", "_since", "_times", "ppm")

    def __init__(self, ppm: int) -> None:
        self.ppm = ppm
        """Of a step, in millionths; 0: there is no limit."""
        self._left = list(SHED)
        self._times = 0
        self._price = 0.0  # of a step that is observed, in limits
        self._since = (0, 0, 0, 0)  # time, steps, their duration, own price: when something was switched off last
        self._acted = False  # nothing was yet, and that is when it was first looked at

    def too_high(self, now_ns: int, steps: int, step_ns_total: int, own_ns_total: int, comparison: Comparison) -> bool:
        """Check the overhead; called after each comparison.

        Args:
            now_ns: the time now.
            steps: that have ended.
            step_ns_total: how long they took.
            own_ns_total: overhead that the taps have measured inside themselves.
            comparison: the comparisons so far.

        Returns:
            True: something must be switched off now: `next_of`. If that is nothing, `blocks`.
        """
        since_ns, since_steps, since_step_ns, since_own_ns = self._since
        if not since_ns:
            self._since = now_ns, steps, step_ns_total, own_ns_total
            return False
        made = steps - since_steps
        if not (self.ppm and made and (self._left or comparison.one_of < MOST_BLOCKS)):
            return False
        limit_ns = self.ppm * (step_ns_total - since_step_ns) / 1e6 / made
        own_ns = (own_ns_total - since_own_ns) / made
        surely_ns = comparison.cost_ns - _SIGMAS * comparison.error_ns if comparison.pairs >= _SURE else 0
        self._price = max(own_ns * comparison.one_of, surely_ns) / max(1.0, limit_ns)
        self._times = self._times + 1 if self._excess(comparison.one_of) > 1.0 else 0
        if self._times < _PATIENCE or now_ns - since_ns < (_SEEN_NS if self._acted else _SETTLED_NS):
            return False
        self._times, self._acted = 0, True
        self._since = now_ns, steps, step_ns_total, own_ns_total
        return True

    def next_of(self, armed: int) -> Hook:
        """The next part in service to switch off; none if there is nothing left."""
        while self._left:
            hook = Hook(self._left.pop(0) & armed)
            if hook:
                return hook
        return Hook(0)

    def blocks(self, one_of: int) -> int:
        """The new number of blocks of which one is observed, if it was `one_of` until now."""
        while one_of < MOST_BLOCKS:
            one_of *= 2
            if self._excess(one_of) <= 1.0:
                break
        return one_of

    def _excess(self, one_of: int) -> float:
        """The overhead of a step, in units of the limit, if one of `one_of` blocks is observed."""
        return self._price * (1 / one_of + _UNSEEN)


def budget_ppm(percent: str) -> int:
    """Parse the share of a step that the launcher passes; the default if it is not a number."""
    try:
        return max(0, round(float(percent) * 10_000))
    except (ValueError, OverflowError):
        return DEFAULT_BUDGET_PPM


def _typical(numbers: Sequence[int]) -> int:
    """The mean of the middle half."""
    quarter = len(numbers) // 4
    middle = sorted(numbers)[quarter : len(numbers) - quarter]
    return sum(middle) // len(middle)


def _median(numbers: Sequence[int]) -> int:
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
