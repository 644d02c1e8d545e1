"""What the watch, the collector and the judge say to each other; all of it survives a trip through JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from gpulaunch.profiler.channel.layout import Region

__all__ = [
    "TRAINING",
    "Category",
    "Frame",
    "Group",
    "Limits",
    "Sample",
    "Standing",
    "Verdict",
    "standing_from",
    "to_json",
    "verdict_from",
]

TRAINING = frozenset({Region.LOADER, Region.FORWARD, Region.BACKWARD, Region.STEPPING, Region.OPTIMIZER})
"""Where a rank that trains is never long; OTHER may be a validation or a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every number of hang detection."""

    cap_s: float = 1800.0
    """No training thread may stand still for longer than this, whatever the evidence says."""
    first_step_s: float = 3600.0
    """The same until the first step has ended: compilation, the first epoch's data."""
    floor_s: float = 10.0
    """Nobody is looked at before, however short the learnt intervals are."""
    safety: float = 5.0
    """An allowance is so many times the longest interval seen (nvidia-resiliency-ext takes the same factor)."""
    pause_s: float = 120.0
    """Between steps a rank may rest for so long: a validation, a save or an upload may look like that."""
    stopped_s: float = 3.0
    """Stopped by a signal for so long: meant, and not a debugger that comes and goes."""
    deadlock_s: float = 8.0
    """All ranks seen waiting for each other for so long, with nothing moving."""
    idle_s: float = 20.0
    """One rank seen idle in one place for so long."""
    sample_s: float = 1.0
    """Between the two samples of a look: a clock tick of CPU time is 10 ms, so this resolves 1 % of a core."""
    again_s: float = 4.0
    """Between two looks while there is something to confirm."""
    rest_s: float = 60.0
    """The longest pause between looks at a rank that is quiet and has a reason to be."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one rank stands, by its page and the watch: everything that is known without looking into it."""

    rank: int
    pid: int
    region: Region
    steps: int
    armed: bool
    """Its probe reports; a rank without one is never judged by time."""
    begun: bool
    """Its first step has ended."""
    saving: bool
    """Inside a save of `gpulaunch.checkpoint`."""
    quiet_s: float
    """Since its training thread last moved on."""
    allowed_s: float
    """How long it may: learnt, or the long allowance where a pause is to be expected."""
    stopped_s: float
    """For how long it has been in state T; 0: it is not."""

    @property
    def pauses(self) -> bool:
        """Past its first step, between an optimizer's step and the next edge: validation, logging, or its own save."""
        return self.armed and self.begun and not self.saving and self.region in (Region.OTHER, Region.VALIDATION)

    @property
    def trains(self) -> bool:
        """Past its first step and between two edges that are never far apart."""
        return self.armed and self.begun and not self.saving and self.region in TRAINING

    @property
    def beyond(self) -> bool:
        """It has been quiet for longer than its learnt allowance."""
        return (self.trains or self.pauses) and self.quiet_s >= self.allowed_s


@dataclass(frozen=True)
class Frame:
    """One Python frame, as py-spy and faulthandler both tell it."""

    name: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look into one rank."""

    at_s: float
    state: str
    """State letter of the main thread, which is the training thread; "" when it is gone."""
    frames: tuple[Frame, ...] = ()
    """Its stack, deepest frame first; empty: unknown."""
    main_ticks: int = 0
    own_ticks: int = 0
    tree_ticks: int = 0
    """CPU time of the main thread, of the process, and of the process with all its descendants, dead ones included."""
    io_bytes: int = 0
    """What main thread and loader workers have read and written."""
    gil_thread: int = 0
    """The idle thread that holds the GIL; 0: none does, or the source of the stack cannot tell."""
    gil_frames: tuple[Frame, ...] = ()
    worker_pid: int = 0
    worker_frames: tuple[Frame, ...] = ()
    """A dataloader worker that is in the user's code while the rank waits for data."""
    gpu: bool = False
    """It has a GPU open."""
    traced: bool = False
    """A debugger is attached."""


class Category(Enum):
    """What a rank is doing, as far as a verdict needs it; see the table in `judge`."""

    GONE = "gone"
    TRACED = "traced"
    STOPPED = "stopped"
    HELD = "held"
    ALIVE = "alive"
    WAITING = "waiting"
    PAUSED = "paused"
    STUCK = "stuck"
    IDLE = "idle"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that do the same thing in the same place."""

    ranks: tuple[int, ...]
    category: Category
    what: str
    """A phrase with a verb for one rank: `waits in all_reduce`, `is in train.py:88 open()`."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Hung or not, and in which words."""

    hung: bool
    rule: str
    """Which line of the table in `judge` decided."""
    sentence: str
    odd: tuple[int, ...] = ()
    """The ranks to blame; empty where all are in the same place."""
    groups: tuple[Group, ...] = ()
    again_s: float = 0.0
    """When to look again, if not hung."""
    notes: tuple[str, ...] = ()
    """Where the stacks came from and why no better way was open; what torch's flight recorder says."""
    path: str = ""
    """The file with the whole evidence."""


def to_json(value: Standing | Sample | Group | Verdict | Limits) -> dict[str, Any]:
    """As a dict that json can write."""

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


def standing_from(document: dict[str, Any]) -> Standing:
    """Read back what `to_json` made of a Standing."""
    given = dict(document)
    return Standing(region=Region(given.pop("region")), **given)


def verdict_from(document: dict[str, Any]) -> Verdict:
    """Read back what `to_json` made of a Verdict. Raises KeyError, TypeError or ValueError for anything else."""
    groups = tuple(
        Group(
            ranks=tuple(group["ranks"]),
            category=Category(group["category"]),
            what=group["what"],
            frames=tuple(Frame(**frame) for frame in group["frames"]),
        )
        for group in document["groups"]
    )
    return Verdict(
        hung=document["hung"],
        rule=document["rule"],
        sentence=document["sentence"],
        odd=tuple(document["odd"]),
        groups=groups,
        again_s=document["again_s"],
        notes=tuple(document["notes"]),
        path=document["path"],
    )
