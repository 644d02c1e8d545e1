"""Feeds the sidecar's refreshes, stack samples and the ranks' NUMA nodes to the rules and keeps the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpulaunch.profiler.analysis.advisor import Advisor
from gpulaunch.profiler.analysis.snapshots import Snapshots
from gpulaunch.profiler.analysis.thresholds import APPEARS, FEW_WINDOWS
from gpulaunch.profiler.analysis.window import Snapshot
from gpulaunch.profiler.daemon.stack_samples import StackSamples
from gpulaunch.profiler.record import AttemptGroup, Finding, NodeState, RankPlace
from gpulaunch.profiler.samplers import numa
from gpulaunch.profiler.samplers.pyspy import Look
from gpulaunch.profiler.stack import Frame

_NODES_EVERY: Final = 30
"""Refreshes between two reads of where ranks may run: a rank binds itself, if at all, after it was started."""


class Findings:
    """Takes every refresh, runs the rules at the end of each window of steps, and keeps the current findings."""

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._stacks = StackSamples(root)
        self._root = root
        self._history = Snapshots()
        self._advisor = Advisor()
        self._standing: tuple[Finding, ...] = ()
        self._told_of: set[str] = set()
        self._group: AttemptGroup | None = None
        self._cpu_nodes: Mapping[int, frozenset[int]] = {}
        self._nodes_in = 0

    def add_stack(self, place: RankPlace, phase: str, look: Look) -> None:
        """Take a stack sample of a rank. Any thread may call it, but one at a time."""
        self._stacks.add(place, phase, look.frames, look.holds_gil, look.gil_holder)

    def add_worker_stack(self, place: RankPlace, frames: Sequence[Frame]) -> None:
        """Take a stack sample of a dataloader worker of a rank; as `add_stack`."""
        self._stacks.add_worker(place, frames)

    def look(self, state: NodeState) -> tuple[Finding, ...]:
        """Take the state of this refresh; return the current findings, the largest loss first."""
        self._look_at_nodes(state)
        tally = self._stacks.tally
        window = self._history.look(
            Snapshot(
                state=state,
                samples=tally.samples,
                logged=tally.logged,
                calling=tally.calling,
                after_step=tally.after_step,
                innermost=tally.innermost,
                holding_gil=tally.holding_gil,
                before_backward=tally.before_backward,
                looping=tally.looping,
                loop_ends=tally.loop_ends,
                indexing=tally.indexing,
                saving=tally.saving,
                chained=tally.chained,
                gil_waits=tally.gil_waits,
                thread_waits=tally.thread_waits,
                backward=tally.backward,
                losses=tally.losses,
                around_model=tally.around_model,
                fetches=tally.fetches,
                locked=tally.locked,
                fetching=tally.fetching,
                calls=tally.calls,
                cpu_nodes=self._cpu_nodes,
            )
        )
        if window is not None:
            self._standing = self._advisor.add_window(window)
        return self._standing

    def conclude(self) -> tuple[Finding, ...]:
        """Return the findings at the end of the run: with all its stack samples; of one that was too short for two
        windows as a whole; and what only the last of a few windows had, if it is clear in the whole."""
        rest = self._history.last_window() if self._advisor.windows else None
        whole = self._history.short_run() if self._advisor.windows < FEW_WINDOWS.value else None
        self._standing = self._advisor.conclude(rest, whole)
        return self._standing

    @property
    def judged(self) -> bool:
        """Whether enough windows are over to report a finding."""
        return self._advisor.windows >= APPEARS.value

    def troubles(self) -> tuple[str, ...]:
        """Return the rules that have failed since the last call, each once: they would fail in every window."""
        new = {rule: error for rule, error in self._advisor.failed.items() if rule not in self._told_of}
        self._told_of.update(new)
        return tuple(f"rule {rule}: {error}" for rule, error in new.items())

    def _look_at_nodes(self, state: NodeState) -> None:
        """Read where the ranks may run, if that matters: on most machines all cores are equally near to every GPU."""
        if state.group != self._group:
            self._group, self._cpu_nodes, self._nodes_in = state.group, {}, 0
        if self._group is None or all(device.numa_node is None for device in state.devices):
            return
        if not self._nodes_in:
            self._cpu_nodes = {place.rank: numa.nodes_of(place.pid, root=self._root) for place in self._group.ranks}
            self._nodes_in = _NODES_EVERY
        self._nodes_in -= 1
