"""Decides how many steps are observed, so that the probe stays within its budget (`--profile-budget`); pure.

Steps are observed in blocks of `BLOCK`. While the probe is within its budget, all blocks are observed; above it, one of
two blocks, or of four, and so on up to `MOST_BLOCKS`: as many as the budget allows.

    observed  unobserved  unobserved  unobserved  observed  unobserved
    --------  ----------  ----------  ----------  --------  ----------      one of four

The overhead of a step has two parts: the work of the taps, which is saved in unobserved steps, and the calls of the
taps, which are not (`cost`).

Which blocks are observed is a function of the number of steps alone. So all ranks of a job skip the same steps (a rank
that runs ahead only waits for the others in the next collective), and ranks that observe fewer observe a subset.
"""

from __future__ import annotations

from typing import Final, NamedTuple

BLOCK: Final = 8
"""Steps of a block. Their edges are processed together: by all ranks after the same steps, so that delays coincide."""

DEFAULT_BUDGET_PPM: Final = 5_000
"""Share of a step, in millionths."""

MOST_BLOCKS: Final = 16
"""One of this many blocks is always observed: the calls of the taps are then most of the remaining overhead."""

NEVER: Final = 1 << 62
"""A number of steps that no program reaches."""

_LONGEST_NS: Final = 2_000_000_000  # in which no step is observed: the rank's region is unknown meanwhile
WINDOW_NS: Final = 10_000_000_000
"""Between two checks of the cost."""
PATIENCE: Final = 3
"""Consecutive checks with the same result: the first half minute is observed completely."""
_SPARE: Final = 0.7  # share of the budget that must suffice to observe more blocks, or the next check would undo it


class Totals(NamedTuple):
    """Totals of a rank's steps up to one moment."""

    now_ns: int
    steps: int
    unobserved: int
    """Number of observed steps."""
    step_ns: int
    """Total duration of the steps."""
    cost_ns: int
    """The probe's part of that, including unobserved steps."""


class Budget:
    """Decides which fraction of the blocks is observed."""

    __slots__ = ("_looks", "_since", "one_of", "ppm")

    def __init__(self, ppm: int) -> None:
        self.ppm = ppm
        """Share of a step that the probe may take, in millionths; 0: no limit."""
        self.one_of = 1
        """One of this many blocks is observed, a power of two; 1: all of them."""
        self._since: Totals | None = None  # at the last check
        self._looks = 0  # consecutive checks that wanted to skip more blocks; negative: fewer

    def look(self, totals: Totals, calls_ns: int) -> None:
        """Check the cost if it is due, and set `one_of`; call it regularly.

        Args:
            totals: the totals so far.
            calls_ns: the cost of calling the taps in each step.
        """
        since = self._since
        if since is None:
            self._since = totals
        if since is None or not self.ppm or totals.now_ns - since.now_ns < WINDOW_NS:
            return
        self._since = totals
        steps = totals.steps - since.steps
        observed = steps - (totals.unobserved - since.unobserved)
        if observed <= 0:
            return
        step_ns = (totals.step_ns - since.step_ns) / steps
        # Negative if the calibrated cost of the calls has decreased meanwhile.
        observed_ns = max(0.0, (totals.cost_ns - since.cost_ns - steps * calls_ns) / observed)
        limit_ns = self.ppm * step_ns / 1e6
        wanted = one_of(observed_ns, calls_ns, step_ns, limit_ns)
        if wanted < self.one_of:
            wanted = min(self.one_of, one_of(observed_ns, calls_ns, step_ns, _SPARE * limit_ns))
        direction = (wanted > self.one_of) - (wanted < self.one_of)
        self._looks = self._looks + direction if self._looks * direction > 0 else direction
        if abs(self._looks) >= PATIENCE:
            self._looks = 0
            self.one_of = wanted


def one_of(observed_ns: float, calls_ns: float, step_ns: float, limit_ns: float) -> int:
    """Return one of how many blocks may be observed, so that a step costs at most `limit_ns` on average.

    Args:
        observed_ns: the cost of observing a step.
        calls_ns: the cost of calling the taps in each step, observed or not.
        step_ns: the duration of a step: with long steps, the skipped blocks last at most `_LONGEST_NS`.
        limit_ns: the maximum cost.
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
    """The number of steps after which the next unobserved ones begin, if one of `blocks` blocks is observed, after this
    many steps: always a later one."""
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
