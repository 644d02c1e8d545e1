"""Faults as values, and a random choice, repeatable for the same seed. No process, no clock, no file."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verb(Enum):
    """The kind of fault; the value is its name on the command line."""

    KILL_RANK = "kill-rank"
    HANG_RANK = "hang-rank"
    OOM_RANK = "oom-rank"
    SLOW_RANK = "slow-rank"
    KILL_LOADER = "kill-loader"
    KILL_STORE = "kill-store"
    KILL_FORK_SERVER = "kill-fork-server"
    KILL_SIDECAR = "kill-sidecar"
    KILL_AGENT = "kill-agent"
    CORRUPT_CHECKPOINT = "corrupt-checkpoint"


OF_A_RANK = frozenset({Verb.KILL_RANK, Verb.HANG_RANK, Verb.OOM_RANK, Verb.SLOW_RANK, Verb.KILL_LOADER})
DAMAGES = ("truncate", "flip", "remove")
DEADLY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""The signals that a random kill-rank chooses from."""
RANDOM = tuple(verb for verb in Verb if verb is not Verb.KILL_AGENT)
"""What `random` chooses from by default: everything that a job is meant to survive."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to inject."""

    verb: Verb
    rank: int = 0
    """The global rank, for faults of a rank."""
    signum: int = signal.SIGKILL
    """The signal of kill-rank."""
    factor: float = 4.0
    """The factor by which slow-rank slows a rank."""
    for_s: float = 30.0
    """The duration of that."""
    how: str = DAMAGES[0]
    """The damage of corrupt-checkpoint."""


def choose(rng: random.Random, verbs: Sequence[Verb], ranks: Sequence[int], *, for_s: float = 30.0) -> Fault:
    """Choose a fault. The number of draws is always the same, so the n-th choice depends only on the seed."""
    verb = rng.choice(list(verbs))
    rank = rng.choice(sorted(ranks))
    signum = rng.choice(DEADLY)
    how = rng.choice(DAMAGES)
    return Fault(verb=verb, rank=rank, signum=signum, how=how, for_s=for_s)
