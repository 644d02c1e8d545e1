"""What the agent publishes while ranks run: their processes, the state of the run, and progress lines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from gpulaunch.launcher.agent import summary
from gpulaunch.launcher.agent.goodput_tracker import GoodputTracker
from gpulaunch.launcher.agent.rank_group import RankGroup
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.profiler.channel.segment import SegmentSnapshot

_TICK_S = 1.0
_PROGRESS_S = (10.0, 30.0, 60.0)
"""When progress is shown; then every `_PROGRESS_EVERY_S`."""
_PROGRESS_EVERY_S = 60.0


class StatusWriter:
    """Writes for the sidecar (shared memory), for people and `gpulaunch chaos` (run directory), and on the console."""

    def __init__(
        self,
        context: RunContext,
        *,
        goodput: GoodputTracker,
        say: Callable[[str], None],
        group: Callable[[], RankGroup | None],
        helpers: Callable[[], dict[str, int | None]],
    ) -> None:
        """`helpers`: pids by name, such as `store_pid`, of the processes alongside the ranks."""
        self._context = context
        self._loop = context.loop
        self._goodput = goodput
        self._say = say
        self._group = group
        self._helpers = helpers
        self._began_s = self._loop.now()

    def begin(self) -> None:
        """Start publishing."""
        self._show_progress_at(0)
        self._tick()

    def segments(self) -> dict[int, SegmentSnapshot]:
        """What the live ranks have published."""
        segments, group = self._context.segments, self._group()
        if segments is None or group is None:
            return {}
        read = {rank: segments.read(rank) for rank in map(group.rank_of, group.live)}
        return {rank: segment for rank, segment in read.items() if segment is not None}

    def listening(self) -> bool:
        """Whether a rank uses `gpulaunch.checkpoint`: it then ends by itself when asked to."""
        return any(segment.listens for segment in self.segments().values())

    def publish(self) -> None:
        """Record which processes run."""
        group, context = self._group(), self._context
        if group is None or not group.live:
            return
        content = group.describe()
        if context.segments is not None:
            context.segments.announce(content)
        with contextlib.suppress(OSError):
            context.rundir.write_json(
                "group.json",
                {
                    **content,
                    "attempt": context.rundir.number_of(content["attempt"]),
                    "agent_pid": os.getpid(),
                    "store_pid": group.store_pid,
                    **self._helpers(),
                    "checkpoint_dirs": context.checkpoint_dirs,
                    "channel_dir": context.segments.directory if context.segments is not None else "",
                },
            )

    def _tick(self) -> None:
        """Poll what no event reports: the ranks' progress, and the cgroup whose counter would show an OOM kill."""
        group = self._group()
        if group is not None:
            group.watch_cgroups()
        self._goodput.update(self.segments().values())
        self._goodput.write()
        self._loop.call_at(self._loop.now() + _TICK_S, self._tick)

    def _show_progress_at(self, index: int) -> None:
        more = index - len(_PROGRESS_S) + 1
        after_s = _PROGRESS_S[index] if more <= 0 else _PROGRESS_S[-1] + _PROGRESS_EVERY_S * more
        self._loop.call_at(self._began_s + after_s, lambda: self._show_progress(index))

    def _show_progress(self, index: int) -> None:
        now_s = self._loop.now()
        line = summary.progress(self.segments(), now_s - self._began_s, now_s)
        if line:
            self._say(line)
        self._show_progress_at(index + 1)
