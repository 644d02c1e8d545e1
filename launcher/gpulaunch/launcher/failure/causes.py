"""Why the attempt ended on one node, as far as the restart policy and the other nodes need it. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gpulaunch.launcher.failure.classify import Kind


class Tier(Enum):
    """How much a cause explains, the best first; see `failure.blame`."""

    OWN = 0
    """A failure of its own, or it was asked to end."""
    DOUBTFUL = 1
    """One that mentions a lost peer."""
    LEFT = 2
    """An early end with success."""
    NODE_LOST = 3
    """The whole node is gone."""
    ECHO = 4
    """It has only lost a peer."""
    NONE = 5
    """Nothing has failed: it was told to end."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One node's part in the end of an attempt."""

    text: str
    """One line for users, without the name of the node."""
    tier: Tier
    kind: Kind | None = None
    """None: not a rank has failed, but something else on this node."""
    age_s: float = 0.0
    """How long ago it happened; the clocks of two nodes cannot be compared."""
    signature: str = ""
    """As `policy.restart.signature` gives it; "" where no rank is to blame."""
    step: int | None = None
    """The last step, counted from the beginning of the training; None where no rank was seen to step."""
    resumed_step: int | None = None
    """The step of the checkpoint that the attempt had resumed from."""
    uptime_s: float = 0.0
    """From the start of its ranks to the failure."""
    exit_code: int = 1
    """The launcher's, if this is the first cause of the job's end."""
    final: bool = False
    """No node should try again: the job was asked to end, or the failure asks for it."""
    leaves: bool = False
    """This node was asked to end; in an elastic job the others go on if there are enough of them."""
    preempted: bool = False
    """It has not failed: it was asked to save and end, and the others must do so with it."""
