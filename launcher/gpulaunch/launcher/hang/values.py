"""Values exchanged by the watch, the collector and the judge; all of them survive a round trip through JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from gpulaunch.profiler.channel.layout import Region
from gpulaunch.profiler.stack import Frame

TOLD, ACTED, OVER = "told", "acted", "over"
"""The field `state` of `hang.json`: reported only; judged a hang; reported, and the ranks moved again."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every threshold of hang detection."""

    timeout_s: float = 600.0
    """A rank that has stood still for this long is acted on: --hang-timeout. NCCL's watchdog also takes 10 minutes
    (`torch.distributed.constants.default_pg_nccl_timeout`)."""
    first_step_s: float = 3600.0
    """The same until the first step has ended (compilation, the first epoch's data): --first-step-timeout."""
    settle_s: float = 60.0
    """How long no rank may have been at work before one that has stood still for `timeout_s` is acted on."""
    floor_s: float = 10.0
    """No rank is inspected before this, however short the learnt intervals are."""
    told_s: float = 30.0
    """No rank is reported before this."""
    told_at_most_s: float = 60.0
    """Latest time of a report, unless the program has been seen to take longer there and continue by itself."""
    told_patiently_s: float = 120.0
    """The same for what often takes minutes: by its name, at work, in a save, before the first step, or as learnt."""
    safety: float = 5.0
    """An allowance is this factor times the longest interval seen (nvidia-resiliency-ext uses the same factor)."""
    stopped_s: float = 3.0
    """Stopped by a signal for this long: on purpose, not by a debugger that attaches and detaches."""
    deadlock_s: float = 8.0
    """All ranks seen waiting for each other for this long, with nothing moving."""
    held_s: float = 120.0
    """The GIL held without use for this long: C code that holds it may wait for a slow file system or service."""
    sample_s: float = 1.0
    """Between the two samples of a look: a clock tick of CPU time is 10 ms, so this resolves 1 % of a core."""
    again_s: float = 4.0
    """Interval between two looks while there is something to confirm."""
    rest_s: float = 60.0
    """The longest interval between looks at a rank that is quiet for a known reason."""


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """The state of one rank by its segment and the watch: everything known without inspecting it."""

    rank: int
    pid: int
    region: Region
    steps: int
    armed: bool
    """Its probe reports; a rank without a probe is never judged by time."""
    begun: bool
    """Its first step has ended."""
    saving: bool
    """Inside a save of `gpulaunch.checkpoint`."""
    quiet_s: float
    """Time since its training thread last moved on."""
    allowed_s: float
    """Its learnt allowance until it is reported."""
    stopped_s: float
    """How long it has been in state T; 0: it is not."""
    left_group: bool = False
    """It has destroyed its process group, and passed no edge since."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of one rank."""

    at_s: float
    state: str
    """State letter of the main thread, which is the training thread; "" when it is gone."""
    frames: tuple[Frame, ...] = ()
    """Its stack, deepest frame first; empty: unknown."""
    main_ticks: int = 0
    own_ticks: int = 0
    tree_ticks: int = 0
    """CPU time of the main thread, of the process, and of the process with all its descendants, dead ones included."""
    main_delay_s: float = 0.0
    """How long the main thread has been ready to run without a core, since its start."""
    running: tuple[int, ...] = ()
    """Its descendants that run or wait for a core."""
    wanted_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """How long each descendant has run, or been ready to without a core, since its start."""
    io_bytes: int = 0
    """Bytes that the process and its loader workers have read and written."""
    gil_thread: int = 0
    """The thread that holds the GIL and sleeps or waits for another thread; 0: none, or unknown."""
    gil_frames: tuple[Frame, ...] = ()
    worker_pid: int = 0
    worker_frames: tuple[Frame, ...] = ()
    """A dataloader worker that is in the user's code while the rank waits for data."""
    gpu: bool = False
    """It has a GPU open."""
    traced: bool = False
    """A debugger is attached."""
    assisted: bool = False
    """Another thread is in the program's own code: it may be what the main thread waits for."""
    moved_s: float | None = None
    """When it was last seen to move or to work, in this and all earlier samples; None: never."""


class Category(Enum):
    """What a rank is doing, as far as a verdict needs it; see the table in `judge`."""

    GONE = "gone"
    TRACED = "traced"
    STOPPED = "stopped"
    HELD = "held"
    ALIVE = "alive"
    WAITING = "waiting"
    RESTING = "resting"


@dataclass(frozen=True, kw_only=True)
class Recorders:
    """The combined data of torch's flight recorders on all ranks; each rank's own is in `server`."""

    behind: tuple[int, ...] = ()
    """Ranks that have begun fewer collectives of a process group than others in it."""
    clashing: tuple[int, ...] = ()
    """Ranks whose newest collective of a group has the same number as the others' but is another operation."""
    agree: bool = False
    """The newest collective of all ranks is the same one."""


@dataclass(frozen=True, kw_only=True)
class RankCluster:
    """Ranks that do the same thing in the same place."""

    ranks: tuple[int, ...]
    category: Category
    what: str
    """A phrase with a verb for one rank: `waits in all_reduce`, `is in train.py:88 open()`."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to report, and whether to act."""

    tells: bool
    """Some rank has not moved for longer than usual."""
    acts: bool
    """A hang is proven, or the rank's time is over. Then it reports, too."""
    rule: str
    """Which line of the table in `judge` decided."""
    sentence: str
    odd: tuple[int, ...] = ()
    """The ranks that the others wait for; empty where all are in the same place."""
    groups: tuple[RankCluster, ...] = ()
    quiet_s: float = 0.0
    """How long the reported ranks have not moved; of several, the longest."""
    due_in_s: float | None = None
    """Acts after this time, if nothing moves until then; None: not in the present state."""
    due_by: str = ""
    """The option that sets this time."""
    again_s: float = 0.0
    """When to look again, if it does not act."""
    notes: tuple[str, ...] = ()
    """Where the stacks came from and why no better source was available; the data of torch's flight recorder."""
    path: str = ""
    """The file with all evidence."""
    works: bool = False
    """A rank of this node works, or may, or is held by a debugger."""


def spans(ranks: Sequence[int]) -> str:
    """`0-2,4-7` for sorted ranks."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def to_json(value: RankProgress | Sample | RankCluster | Verdict | Limits) -> dict[str, Any]:
    """Convert to a dict that json can write."""

    def plain(item: Any) -> Any:
        if isinstance(item, Enum):
            return item.value
        if isinstance(item, dict):
            return {name: plain(one) for name, one in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(one) for one in item]
        return item

    document: dict[str, Any] = plain(asdict(value))
    return document


def progress_from(document: dict[str, Any]) -> RankProgress:
    """Read back what `to_json` made of a RankProgress."""
    given = dict(document)
    return RankProgress(region=Region(given.pop("region")), **given)


def verdict_from(document: dict[str, Any]) -> Verdict:
    """Read back what `to_json` made of a Verdict. Raises KeyError, TypeError or ValueError for anything else."""
    groups = tuple(
        RankCluster(
            ranks=tuple(group["ranks"]),
            category=Category(group["category"]),
            what=group["what"],
            frames=tuple(Frame(**frame) for frame in group["frames"]),
        )
        for group in document["groups"]
    )
    return Verdict(
        tells=document["tells"],
        acts=document["acts"],
        rule=document["rule"],
        sentence=document["sentence"],
        odd=tuple(document["odd"]),
        groups=groups,
        quiet_s=document["quiet_s"],
        due_in_s=document["due_in_s"],
        due_by=document["due_by"],
        again_s=document["again_s"],
        notes=tuple(document["notes"]),
        path=document["path"],
        works=document["works"],
    )
