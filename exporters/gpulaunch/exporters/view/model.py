"""The data model of a run's view: the only data that the terminal, the page, the report and every file show.

Plain frozen values. Units are in the names: timestamps are Unix seconds (`_s`, as in `began_s`), durations `_seconds`,
memory `_bytes`, ratios from 0 to 1 `_ratio`. An unknown value is None, never 0. Text is raw, as it comes from the
program, its user and its files: the renderer must escape it (`text.inert` for a terminal).

There is one time axis. `RunView.times_s` are the ends of equal intervals, and every `Curve` has one value for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from gpulaunch.exporters.view.rank_model import Curve, RankView, SiteView
from gpulaunch.profiler.channel.layout import PHASES
from gpulaunch.profiler.record import GOODPUT_BUCKETS, ends_job_soon

VERSION: Final = 1
"""Version of the JSON format of a view. It changes if a field is removed or redefined, not if one is added."""


class Status(Enum):
    """The status of a run, or of one attempt."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """Stopped by a person or a job manager: nothing failed."""
    LOST = "lost"
    """It did not record how it ended, and its launcher is gone: killed, or the node went down."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class CauseView:
    """The first cause of a failure."""

    kind: str
    """One of `record.RESTART_KINDS`."""
    headline: str
    """One line: which rank, and what happened to it."""
    rank: int | None = None
    why: str = ""
    """Why this one is considered the first."""
    advice: str = ""
    report: str = ""
    """Path of the whole report (failure.json); "" if there is none."""


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One start of all ranks."""

    number: int
    """Within its run, from 0, as in events.jsonl and `gpulaunch_attempt`."""
    status: Status
    directory: int | None = None
    """Its files are in `attempts/<directory>`, a number that is never used twice in a run directory; None: `number`."""
    earlier: bool = False
    """Of an earlier run in the same directory."""
    began_s: float | None = None
    """When its processes were requested or, if unknown, when they ran."""
    ended_s: float | None = None
    cause: CauseView | None = None
    """Why it failed; None if it did not, or nothing is known of it."""

    @property
    def place(self) -> int:
        """The number of its directory."""
        return self.number if self.directory is None else self.directory

    @property
    def name(self) -> str:
        """Its display name: the number alone is ambiguous for an attempt of an earlier run."""
        return f"attempts/{self.place}" if self.earlier else f"attempt {self.number}"


@dataclass(frozen=True, kw_only=True)
class EventView:
    """A line of the run's history."""

    at_s: float
    what: str
    """`run_started`, `phase`, `rank_ended`, `hung` ..."""
    fields: Mapping[str, Any]
    """All other fields of the line."""
    node: int = 0


@dataclass(frozen=True, kw_only=True)
class FindingView:
    """Something to change, and what it costs."""

    rule: str
    """docs/findings.md has a heading for each."""
    file: str | None
    line: int | None
    subject: str
    ranks: tuple[int, ...]
    seconds_per_step: float
    seconds_per_hour: float
    lost_seconds: float | None
    """Training time lost in all of this run while it was active; None if that was not stored."""
    confidence: float
    evidence: Mapping[str, float | str]
    advice: str
    active: bool
    """Whether it is active; for a finished run, whether it was to the end."""
    first_seen_s: float
    last_seen_s: float
    node: int = 0
    earlier: bool = False
    """Whether only an earlier run in the same directory had it."""

    @property
    def location(self) -> str:
        """`file:line`, as far as known."""
        return (self.file or "") + (f":{self.line}" if self.file and self.line is not None else "")

    @property
    def is_urgent(self) -> bool:
        """Whether it ends the job within the hour, such as memory that is full then."""
        return ends_job_soon(self.evidence)


@dataclass(frozen=True, kw_only=True)
class DeviceView:
    """One GPU, or MIG instance."""

    gpu: str
    """Its index, or the UUID of an instance."""
    node: int = 0
    uuid: str = ""
    model: str = ""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Current values by name: `utilization_ratio`, `memory_used_bytes`, `memory_total_bytes`, `clock_hertz`,
    `power_watts`, `temperature_celsius`, `sm_active_ratio`, `sm_occupancy_ratio`, `dram_active_ratio`; totals of the
    run: `energy_joules`, `pcie_receive_bytes`, `pcie_transmit_bytes`, `nvlink_receive_bytes`,
    `nvlink_transmit_bytes`, `pcie_replays`, `ecc_corrected`, `ecc_uncorrected`, `xid_errors`."""
    throttle_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By reason."""
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    """Over time: `utilization_ratio`, `memory_used_bytes`, `power_watts`, `temperature_celsius`, `sm_active_ratio`,
    `pcie_receive_bytes_per_second`, `pcie_transmit_bytes_per_second`; only what is known."""


@dataclass(frozen=True, kw_only=True)
class CollectorView:
    """Condition of one collector of a node's sidecar."""

    name: str
    """Of `record.Collector`."""
    available: bool
    reason: str
    """Why it is unavailable, or the last error; "" if there was none."""
    errors: int
    spent_seconds: float
    node: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node of the run, and the sidecar on it."""

    node: int
    host: str = ""
    seen_s: float | None = None
    """Time of its sidecar's last sample."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Current values by name: `memory_total_bytes`, `memory_available_bytes`, `page_cache_bytes`, `swap_used_bytes`,
    `shm_size_bytes`, `shm_used_bytes`, `cgroup_limit_bytes`, `cgroup_used_bytes`, `cores_allowed`, `cores_quota`."""
    pressure_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By `<resource>_<severity>`, such as `io_some`; since the node was started."""
    sidecar_cpu_seconds: float | None = None
    sidecar_rss_bytes: int | None = None
    refreshes: int | None = None
    late_refreshes: int | None = None
    memory_available_bytes: Curve = ()
    shm_used_bytes: Curve = ()
    cpu_pressure_ratio: Curve = ()
    """Share of the time in which a process on the node waited for a core."""
    cores_used: Curve = ()
    """By the ranks and their workers."""
    sidecar_cores: Curve = ()
    """CPU time of the sidecar per second."""


def whole_of(buckets: Mapping[str, float | None], elapsed_s: float | None) -> float:
    """Return the total time of these buckets; unknown ones account for the rest of the elapsed time."""
    known_s = sum(each for each in buckets.values() if each is not None)
    return max(known_s, elapsed_s or 0.0) if None in buckets.values() else known_s


@dataclass(frozen=True, kw_only=True)
class StallView:
    """Ranks without progress for longer than usual, as the launcher reports them while it lasts."""

    what: str
    """Which ranks, where they are, and what the others wait for."""
    since_s: float
    """When they last made progress."""
    due_s: float | None
    """When the launcher acts if there is no progress until then; None: it does not, or unknown."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run, during it or afterwards."""

    run_dir: str
    name: str
    run_id: str
    command: tuple[str, ...]
    """As typed, without secrets; () if unknown."""
    status: Status
    phase: str
    """What its agent did last: `joining`, `starting`, `running`, `waiting`, `clearing`, `done` ...; or ""."""
    live: bool
    """Whether a running sidecar made this from its memory, not from files."""
    made_s: float
    """When this view was made."""
    seen_s: float | None
    """Time of the newest data in it."""
    began_s: float | None
    ended_s: float | None
    """None while it runs, and if it was not recorded."""
    elapsed_seconds: float | None
    exit_code: int | None
    stopped_by: str = ""
    """The signal that stopped it (`SIGINT`); "" if there was none, or another node received it."""
    error: str
    """Why it failed, in one line; "" if it did not."""
    world_size: int | None
    num_nodes: int | None
    attempts: tuple[AttemptView, ...]
    """Oldest first, including those of earlier runs in the same directory."""
    attempt: int | None
    """The number of the newest; None if the run has none yet."""
    restarts: Mapping[str, int]
    """Number of restarts, by kind of the first cause (`record.RESTART_KINDS`)."""
    hang_suspicions: int
    """How often ranks were reported without progress for longer than usual."""
    hangs: int
    """How often the launcher acted on that."""
    stall: StallView | None = None
    """The current stall of this node's ranks."""
    preempted: bool
    goodput_seconds: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """By `record.GOODPUT_BUCKETS`, in that order; empty if all are unknown. Where no step was seen,
    `productive` and `checkpoint_stall` are unknown, and `startup` and `restart` end when the ranks run. Where the step
    an attempt resumed from is unknown, so is `lost_work`, and `productive` and the ratio are upper bounds."""
    goodput_ratio: float | None = None
    steps: int | None
    """Of the rank with the most steps, all attempts together."""
    steps_per_second_now: float | None = None
    """Of the slowest rank."""
    samples_per_second_now: float | None = None
    """Of all ranks together."""
    step_seconds_now: float | None = None
    """Mean length of a step, over the ranks."""
    phase_ratios_now: Mapping[str, float] = field(default_factory=dict[str, float])
    """Share of all ranks' steps, by phase."""
    recent_seconds: float = 0.0
    """What every `_now` value covers while the run is running: this many seconds up to `seen_s`."""
    checkpoint_step: int | None
    """Of the newest known checkpoint; a program may save others by itself."""
    resumed_step: int | None
    """The step that the newest attempt resumed from."""
    # over time
    times_s: tuple[float, ...] = ()
    """Ends of the intervals of every Curve, equally spaced; () if nothing was stored."""
    interval_seconds: float = 0.0
    """Length of an interval."""
    steps_per_second: Curve = ()
    samples_per_second: Curve = ()
    step_mean_seconds: Curve = ()
    phase_ratios: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    goodput_ratio_over_time: Curve = ()
    """Share of productive time from the beginning to each moment."""
    # in parts
    ranks: tuple[RankView, ...]
    devices: tuple[DeviceView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    collectors: tuple[CollectorView, ...] = ()
    findings: tuple[FindingView, ...]
    """Active ones first, then by loss, largest first."""
    sites: tuple[SiteView, ...] = ()
    """Lines that cost time, the largest first; at most 200."""
    events: tuple[EventView, ...]
    """The newest 500, oldest first."""
    watched: bool
    """Whether a profiler observed it at all, or does so now."""
    profiled: bool = True
    """Whether profiling was requested, as far as is known: not with --no-profile."""
    phases: tuple[str, ...] = PHASES
    """The names of the phases of a step, in the order in which they are shown."""
    goodput_buckets: tuple[str, ...] = GOODPUT_BUCKETS
    """The names of the buckets of goodput, in the order in which they are shown."""
    tried: tuple[str, ...] = ()
    """What `gpulaunch tune` has tried of this job and gained by it, one line each."""
    notes: tuple[str, ...] = ()
    """What is missing or damaged, one line each, ready for display (except for `inert`)."""

    @property
    def goodput_whole_seconds(self) -> float:
        """The time that goodput is a share of."""
        return whole_of(self.goodput_seconds, self.elapsed_seconds)

    @property
    def goodput_at_most(self) -> bool:
        """Whether goodput is an upper bound: it is unknown which steps were repeated."""
        return self.goodput_ratio is not None and self.goodput_seconds.get("lost_work", 0.0) is None
