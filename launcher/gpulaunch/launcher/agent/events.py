"""The values of the agent's decisions: the state, the events that change it, the resulting actions.

`state.py` says which follows from which.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Where an attempt is; see the module's docstring."""

    JOINING = "joining"
    STARTING = "starting"
    RUNNING = "running"
    SETTLING = "settling"
    STOPPING = "stopping"
    WAITING = "waiting"
    CLEARING = "clearing"
    PAUSING = "pausing"
    DONE = "done"


class Outcome(Enum):
    """How an attempt, and finally the job, ended."""

    OPEN = "open"
    SUCCESS = "success"
    FAILURE = "failure"
    """A rank of this node failed, or could not be started."""
    PEER_FAILURE = "peer failure"
    """A rank of another node failed."""
    SIGNAL = "signal"
    """This launcher, or that of another node, was asked to end."""


class Deadline(Enum):
    """The bounded waits."""

    SETTLE = "settle"
    GRACE = "grace"
    KILL = "kill"
    PAUSE = "pause"


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that decisions depend on."""

    phase: Phase
    attempt: int = 0
    """Attempts of this run, from 0: TORCHELASTIC_RESTART_COUNT."""
    restarts_left: int = 0
    grace_s: float = 30.0
    failure_grace_s: float = 1.0
    live: frozenset[int] = frozenset()
    """Local ranks that have not ended."""
    outcome: Outcome = Outcome.OPEN
    final: bool = False
    """No restart after this, whatever remains of the budget."""
    signum: int = 0
    """The first signal sent to the launcher, 0 for none."""
    preempted: bool = False
    """The signal means: save, then end; the job will be run again."""
    fenced: bool = False
    """The others may go on without this node: ranks that are being started are killed."""
    peers_told: bool = False
    """The other nodes know that this attempt failed here."""


# -- events


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Every node has joined; this one may start."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The ranks run."""

    ranks: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class StartFailed:
    """The nodes did not find each other, or ranks could not be started; `final`: trying again would not help."""

    ranks: frozenset[int] = frozenset()
    final: bool = True


@dataclass(frozen=True, kw_only=True)
class RankEnded:
    """A rank ended and was reaped; `echo`: it failed the way ranks do when another rank dies."""

    local_rank: int
    ok: bool
    echo: bool = False


@dataclass(frozen=True, kw_only=True)
class StoreLost:
    """The ranks' store ended while they ran: the next request to it would block forever."""


@dataclass(frozen=True, kw_only=True)
class Hung:
    """The ranks make no progress and will make none; `final`: the user wants no restart after that."""

    final: bool = False


@dataclass(frozen=True, kw_only=True)
class PeerFailed:
    """A rank of another node failed, or a node is gone; `final`: the job is given up."""

    final: bool = False
    fenced: bool = False
    """The others may go on without this node in a moment: the ranks are killed at once."""
    saves: bool = False
    """That node was asked to save and leave: the ranks of all save before they are ended."""


@dataclass(frozen=True, kw_only=True)
class PeerPreempted:
    """Another node was asked to save and end."""


@dataclass(frozen=True, kw_only=True)
class PeersDone:
    """The ranks of every node have ended successfully."""


@dataclass(frozen=True, kw_only=True)
class Signalled:
    """The launcher received a signal to end; `preempted`: save first, the job will be run again."""

    signum: int
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class Expired:
    """A wait has reached its deadline."""

    deadline: Deadline


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """Nothing of the attempt is left; `again`: the restart policy allows another attempt, after this pause."""

    again: bool = True
    pause_s: float = 0.0


Event = (
    Joined | Started | StartFailed | RankEnded | StoreLost | Hung
    | PeerFailed | PeerPreempted | PeersDone | Signalled | Expired | Cleared
)  # fmt: skip
EVENT_TYPES: tuple[type, ...] = Event.__args__


# -- actions


@dataclass(frozen=True, kw_only=True)
class Join:
    """Agree with the other nodes on this attempt."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start the store and the ranks of this attempt."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Ask the ranks to save at their next step and end, within this time."""

    signum: int
    within_s: float


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Send the signal to every live rank."""

    signum: int


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill every live rank."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Set a deadline this many seconds from now; it replaces the one armed before."""

    deadline: Deadline
    after_s: float


@dataclass(frozen=True, kw_only=True)
class Disarm:
    """Forget the armed deadline."""


@dataclass(frozen=True, kw_only=True)
class Clear:
    """End the processes left behind by the ranks; `gently`: let them exit by themselves first."""

    gently: bool


@dataclass(frozen=True, kw_only=True)
class TellPeers:
    """Tell the other nodes how this attempt ended here."""

    ok: bool
    final: bool
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write and show the failure; `restarting`: in one line, because the job continues."""

    restarting: bool


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Leave the loop with this outcome."""

    outcome: Outcome


Action = Join | Start | Notice | Stop | Kill | Arm | Disarm | Clear | TellPeers | Report | Finish
