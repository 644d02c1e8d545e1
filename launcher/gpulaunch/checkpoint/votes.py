"""Finds the step at which all ranks save or end together, without stalling a step.

A notice reaches the ranks at different times, and they must act at the same step. So they vote: a reduction that is
launched at one step boundary and read at a later one, when it has long completed. Every rank acts on the result at the
step where it is read. The number of steps between is part of the vote, so that there are about two votes per second:
each rank proposes a number based on its own step time, and the greatest wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from gpulaunch.checkpoint.notice import Notice
from gpulaunch.checkpoint.ranks import Vote

INTERVAL_S = 0.5
MOST_STEPS = 10_000


class Votes:
    """Called at every step boundary; all ranks get the same answers at the same steps."""

    def __init__(
        self,
        notice: Notice,
        launch: Callable[[Sequence[int]], Vote] | None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`launch` begins the reduction (maximum of each); None: a single rank need not vote."""
        self._notice = notice
        self._launch = launch
        self._now = now
        self._vote: Vote | None = None
        self._launched_s = 0.0
        self._distance = 1
        self._steps_left = 0
        self._requests = 0

    def at_boundary(self) -> tuple[bool, bool]:
        """(end here, save here), for the step that ends now."""
        if self._launch is None:
            return self._notice.preempted, self._asked_to_save()
        if self._vote is None:
            self._begin(proposal=1)
            return False, False
        self._steps_left -= 1
        if self._steps_left:
            return False, False
        end, save, distance = self._vote.result()
        self._vote = None
        if end:
            return True, bool(save)
        if save:
            self._asked_to_save()  # this save also answers a request that came after this rank's vote
        step_s = (self._now() - self._launched_s) / self._distance
        proposal = int(min(INTERVAL_S / max(step_s, 1e-9), 2 * distance, MOST_STEPS))
        self._distance = distance
        self._begin(proposal=max(proposal, 1))
        return False, bool(save)

    def close(self) -> None:
        """Wait for the vote in progress. Every rank has launched it."""
        if self._vote is not None:
            self._vote.result()
            self._vote = None

    def _begin(self, proposal: int) -> None:
        assert self._launch is not None, "a single rank does not vote"
        self._vote = self._launch((int(self._notice.preempted), int(self._asked_to_save()), proposal))
        self._launched_s = self._now()
        self._steps_left = self._distance

    def _asked_to_save(self) -> bool:
        """Whether a save was requested since the last call: how often does not matter."""
        before, self._requests = self._requests, self._notice.save_requests
        return self._requests > before
