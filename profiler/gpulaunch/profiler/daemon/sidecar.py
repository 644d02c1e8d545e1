"""The sidecar's loop: once a second, or as often as its overhead allows, read every sampler and publish the state.

It must never affect training. So every collector is guarded on its own, the result is an immutable state that a
server may show as long as it likes, and the ledger beside the segments lets the next sidecar continue if this one is
killed.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gpulaunch.profiler.channel import clock as clocks
from gpulaunch.profiler.daemon.findings import Findings
from gpulaunch.profiler.record import (
    Collector,
    CollectorState,
    Finding,
    HostState,
    NodeState,
    RankProcesses,
    Reading,
    RunState,
    Sampler,
    SidecarState,
)
from gpulaunch.profiler.samplers.collectives import CollectivesSampler
from gpulaunch.profiler.samplers.host import HostSampler
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.nvml.reader import NvmlReader
from gpulaunch.profiler.samplers.phases import STACK_PHASES
from gpulaunch.profiler.samplers.process import ProcessSampler, parse_resident_pages
from gpulaunch.profiler.samplers.ranks import RankSampler
from gpulaunch.profiler.samplers.run import RunSampler
from gpulaunch.profiler.samplers.stacks import Stacks
from gpulaunch.profiler.samplers.workers import WorkersSampler

T = TypeVar("T")
LEDGER_FILE = "sidecar.json"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHARE_OF_A_CORE = 0.0045
"""Of a core, per eight ranks: where refreshes take more (a slow machine), they are made less often."""
_RANKS = 8
_LONGEST_S = 5.0
"""The longest interval between refreshes: older values are of no use."""


class _Guard:
    """Runs one collector and records its state; catches everything that it raises."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._available = True
        self._reason = ""
        self._errors = 0
        self._spent_s = 0.0

    def run(self, collect: Callable[[float], Reading[T]]) -> T | None:
        now = self._clock()
        try:
            reading = collect(now)
        except Exception as error:  # a bug of ours in one collector must not stop the others
            self._available = False
            self._errors += 1
            self._reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            return None
        finally:
            self._spent_s += self._clock() - now
        self._available = not reading.absent
        self._errors += len(reading.errors)
        self._reason = reading.errors[-1] if reading.errors else reading.absent or self._reason
        return reading.values

    @property
    def state(self) -> CollectorState:
        return CollectorState(
            available=self._available, reason=self._reason, errors=self._errors, spent_s=self._spent_s
        )


class Sidecar:
    """Reads all samplers at a steady pace and publishes a `NodeState` after each round."""

    def __init__(
        self,
        channel_dir: Path,
        publish: Callable[[NodeState], None],
        *,
        interval_s: float = 1.0,
        proc: Path = Path("/proc"),
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`interval_s`: between refreshes, if their overhead is within its limit; `cpu`: seconds on a core."""
        self._publish = publish
        self._interval_s = interval_s
        self._clock = clock
        self._cpu = cpu
        self._proc = proc
        self._ledger = MonotonicTotals()
        self._ledger_path = channel_dir / LEDGER_FILE
        self._takes_over = self._ledger.load(self._ledger_path)
        self._ranks = RankSampler(channel_dir, self._ledger, clock=clock)
        self._processes: Sampler[tuple[RankProcesses, ...]] = ProcessSampler(
            lambda: self._ranks.group, self._ledger, proc=proc, clock=clock
        )
        self._host: Sampler[HostState] = HostSampler(root=root, clock=clock)
        self._run: Sampler[RunState | None] = RunSampler(channel_dir, self._ledger, clock=clock)
        self._workers = WorkersSampler(lambda: self._ranks.group, channel_dir, self._ledger, clock=clock)
        self._collectives = CollectivesSampler(lambda: self._ranks.group, channel_dir, self._ledger, clock=clock)
        self._nvml = NvmlReader(channel_dir, self._ledger, root=root, clock=clock)
        self._findings = Findings(root=root)
        self._stacks = Stacks(
            channel_dir,
            lambda: self._ranks.group,
            heard=self._findings.add_stack,
            workers=self._workers.pids,
            heard_worker=self._findings.add_worker_stack,
            goes_on=self._takes_over,
        )
        self._guards = {each: _Guard(clock) for each in Collector if each is not Collector.STORE}
        self._source = f"{os.getpid()}:{time.monotonic_ns()}"
        self._last: NodeState | None = None
        self._refreshes = 0
        self._late_refreshes = 0
        self._refresh_s = 0.0

    def run(self, stopped: Callable[[float], bool]) -> None:
        """Refresh until asked to stop, then read the ranks' progress a last time.

        Missed refreshes are not made up for.

        Args:
            stopped: waits at most the given seconds and returns whether to stop (e.g. `threading.Event.wait`).
        """
        due = self._clock()
        while not stopped(max(0.0, due - self._clock())):
            before_s = self._cpu()
            self.refresh()
            interval_s = self._pace_s(self._cpu() - before_s)
            due += interval_s
            behind = int((self._clock() - due) / interval_s)
            if behind > 0:
                self._late_refreshes += 1
                due += behind * interval_s
        self._look_last()
        self.close()

    def _pace_s(self, spent_s: float) -> float:
        """Seconds from a refresh with this CPU time to the next one."""
        group = self._ranks.group
        share = SHARE_OF_A_CORE * max(1.0, len(group.ranks) / _RANKS if group is not None else 0.0)
        return max(self._interval_s, min(_LONGEST_S, spent_s / share))

    def close(self) -> None:
        """Close all sources."""
        self._stacks.close()
        self._nvml.close()
        self._collectives.close()
        self._workers.close()
        self._ranks.close()

    def _look_last(self) -> None:
        """Publish the ranks' progress since the last refresh, and the agent's state of the run. The ranks may have
        ended: their segments still hold their progress, and nothing else is read."""
        at = clocks.anchor()
        training = self._guards[Collector.RANKS].run(self._ranks.read)
        run = self._guards[Collector.RUN].run(self._run.read)
        found = self._guards[Collector.FINDINGS].run(lambda now: self._judge(now, self._findings.conclude))
        if self._last is not None and (training or run is not None):
            self._publish(
                replace(
                    self._last,
                    taken_monotonic_ns=at.monotonic_ns,
                    taken_wall_ns=at.realtime_ns,
                    training=training or self._last.training,
                    run=run or self._last.run,
                    findings=self._last.findings if found is None else found,
                )
            )

    def refresh(self) -> NodeState:
        """Read everything once and publish it."""
        started = self._clock()
        at = clocks.anchor()
        training = self._guards[Collector.RANKS].run(self._ranks.read)
        processes = self._guards[Collector.PROCESS].run(self._processes.read)
        host = self._guards[Collector.HOST].run(self._host.read)
        run = self._guards[Collector.RUN].run(self._run.read)
        gpus = self._guards[Collector.GPU].run(self._nvml.health.read)
        devices = self._guards[Collector.DEVICE].run(self._nvml.gpus.read)
        workers = self._guards[Collector.WORKERS].run(self._workers.read)
        collectives = self._guards[Collector.COLLECTIVES].run(self._collectives.read)
        stacks = self._guards[Collector.STACKS].run(self._stacks.read)
        if stacks is not None:  # samples not yet written are lost if the sidecar is killed
            seen = stacks.samples
            held = {
                phase: self._ledger.total(f"stacks/{phase}", {"": (seen.get(phase, 0),)}, width=1)[0]
                for phase in STACK_PHASES
            }
            stacks = replace(stacks, samples={phase: count for phase, count in held.items() if count})
        # Its own CPU time is in the ledger too: a restarted sidecar continues the overhead of this run.
        (cpu_ns,) = self._ledger.total("sidecar", {self._source: (process_cpu_ns(),)}, width=1)
        self._guards[Collector.LEDGER].run(self._save)
        state = NodeState(
            taken_monotonic_ns=at.monotonic_ns,
            taken_wall_ns=at.realtime_ns,
            group=self._ranks.group,
            training=training or (),
            processes=processes or (),
            host=host,
            run=run,
            gpus=gpus or (),
            devices=devices or (),
            workers=workers or (),
            collectives=collectives or (),
            stacks=stacks,
            collectors={collector: guard.state for collector, guard in self._guards.items()},
            sidecar=SidecarState(
                cpu_s=cpu_ns / 1e9,
                rss_bytes=self._rss_bytes(),
                refreshes=self._refreshes,
                late_refreshes=self._late_refreshes,
                refresh_s=self._refresh_s,
            ),
        )
        found = self._guards[Collector.FINDINGS].run(lambda now: self._judge(now, lambda: self._findings.look(state)))
        conditions = {**state.collectors, Collector.FINDINGS: self._guards[Collector.FINDINGS].state}
        judged = self._findings.judged or not self._takes_over
        state = replace(state, findings=found or (), judged=judged, collectors=conditions)
        self._publish(state)
        self._last = state
        self._refreshes += 1
        self._refresh_s = self._clock() - started
        return state

    def _judge(self, now: float, judge: Callable[[], tuple[Finding, ...]]) -> Reading[tuple[Finding, ...]]:
        found = judge()
        return Reading(values=found, errors=self._findings.troubles(), late_s=self._clock() - now)

    def _save(self, now: float) -> Reading[None]:
        self._ledger.save(self._ledger_path)
        return Reading(values=None, late_s=self._clock() - now)

    def _rss_bytes(self) -> int | None:
        try:
            return parse_resident_pages((self._proc / "self/statm").read_bytes()) * _PAGE_BYTES
        except OSError:  # a /proc that does not know us: the figure is missing, nothing else
            return None


def process_cpu_ns() -> int:
    """CPU time of this process and of its ended children: py-spy."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() + round((of_children.ru_utime + of_children.ru_stime) * 1e9)
