"""Decides how many steps are observed, so that the probe stays within its budget (`--profile-budget`); pure.

Steps are observed in blocks of `BLOCK`. While the probe is within its budget, all of them are. Past it, one of two
blocks is observed, or of four, and so on up to `MOST_BLOCKS`: as many as are within the budget.

    observed  unobserved  unobserved  unobserved  observed  unobserved
    --------  ----------  ----------  ----------  --------  ----------      one of four

What a step costs has two parts: what the taps do in it, which is saved where it is not observed, and that they are
called at all, which is not (`cost`).

Which blocks are observed is a function of the number of steps alone. So all ranks of a job leave out the same steps (a
rank that runs ahead only waits for the others in the next collective), and those that observe fewer observe some of the
same.
"""

from __future__ import annotations

from typing import Final, NamedTuple

BLOCK: Final = 8
"""Steps of a block. Their edges are processed together: by all ranks after the same steps, so that delays coincide."""

DEFAULT_BUDGET_PPM: Final = 5_000
"""Of a step, in millionths."""

MOST_BLOCKS: Final = 16
"""Of this many blocks one is always observed: then most of what is left is that the taps are called."""

NEVER: Final = 1 << 62
"""A number of steps that no program makes."""

_LONGEST_NS: Final = 2_000_000_000  # for which no step is observed: a rank's region is not known meanwhile
_WINDOW_NS: Final = 10_000_000_000  # from one look at the cost to the next
_PATIENCE: Final = 3  # looks in a row that say the same. So the first half minute of a program is observed completely.
_SPARE: Final = 0.7  # of the budget must be enough for more blocks, or the next look would take them back


class Totals(NamedTuple):
    """What there was of a rank's steps up to a moment."""

    now_ns: int
    steps: int
    unobserved: int
    """Of the steps."""
    step_ns: int
    """How long they took, in all."""
    cost_ns: int
    """What the probe took of that, in unobserved steps too."""


class Budget:
    """Decides of how many blocks one is observed."""

    __slots__ = ("_looks", "_since", "one_of", "ppm")

    def __init__(self, ppm: int) -> None:
        self.ppm = ppm
        """What the probe may cost of a step, in millionths; 0: there is no limit."""
        self.one_of = 1
        """Of this many blocks one is observed, a power of two; 1: all steps are."""
        self._since: Totals | None = None  # at the last look
        self._looks = 0  # in a row that wanted more blocks left out; below zero: fewer

    def look(self, totals: Totals, calls_ns: int) -> None:
        """Check the cost, if it is time, and set `one_of`; to be called every now and then.

        Args:
            totals: what there was so far.
            calls_ns: what it costs in each step that the taps are called.
        """
        since = self._since
        if since is None:
            self._since = totals
        if since is None or not self.ppm or totals.now_ns - since.now_ns < _WINDOW_NS:
            return
        self._since = totals
        steps = totals.steps - since.steps
        observed = steps - (totals.unobserved - since.unobserved)
        if observed <= 0:
            return
        step_ns = (totals.step_ns - since.step_ns) / steps
        # Below zero where the calls were told to be cheaper meanwhile.
        observed_ns = max(0.0, (totals.cost_ns - since.cost_ns - steps * calls_ns) / observed)
        limit_ns = self.ppm * step_ns / 1e6
        wanted = one_of(observed_ns, calls_ns, step_ns, limit_ns)
        if wanted < self.one_of:
            wanted = min(self.one_of, one_of(observed_ns, calls_ns, step_ns, _SPARE * limit_ns))
        direction = (wanted > self.one_of) - (wanted < self.one_of)
        self._looks = self._looks + direction if self._looks * direction > 0 else direction
        if abs(self._looks) >= _PATIENCE:
            self._looks = 0
            self.one_of = wanted


def one_of(observed_ns: float, calls_ns: float, step_ns: float, limit_ns: float) -> int:
    """Of how many blocks one may be observed, so that a step costs no more than `limit_ns` on average.

    Args:
        observed_ns: what it costs to observe a step.
        calls_ns: what it costs in each step, observed or not, that the taps are called.
        step_ns: how long a step takes: where it is long, no more blocks are left out than last `_LONGEST_NS`.
        limit_ns: what it may cost.
    """
    blocks = 1
    while (
        observed_ns / blocks + calls_ns > limit_ns
        and blocks < MOST_BLOCKS
        and (2 * blocks - 1) * BLOCK * step_ns <= _LONGEST_NS
    ):
        blocks *= 2
    return blocks


def next_turn(steps: int, blocks: int) -> int:
    """The number of steps after which the next unobserved ones begin, if one of `blocks` blocks is observed and so many
    steps have ended: always a later one."""
    if blocks == 1:
        return NEVER
    turn = steps - steps % (blocks * BLOCK) + BLOCK
    return turn if turn > steps else turn + blocks * BLOCK


def budget_ppm(percent: str) -> int:
    """Parse the share of a step that the launcher passes; the default if it is not a number."""
    try:
        return max(0, round(float(percent) * 10_000))
    except (ValueError, OverflowError):
        return DEFAULT_BUDGET_PPM
