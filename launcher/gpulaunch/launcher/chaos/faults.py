"""The faults, as values; and choosing one at random, the same one for the same seed. No process, no clock, no file."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verb(Enum):
    """What is done; the value is its name on the command line."""

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
"""What `random` chooses from unless it is told: everything that a job is meant to survive."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to make."""

    verb: Verb
    rank: int = 0
    """The global rank that it befalls, for those of a rank."""
    signum: int = signal.SIGKILL
    """What kill-rank sends."""
    factor: float = 4.0
    """How many times slower slow-rank makes a rank."""
    for_s: float = 30.0
    """For how long it does."""
    how: str = DAMAGES[0]
    """What corrupt-checkpoint does to the checkpoint."""


def choose(rng: random.Random, verbs: Sequence[Verb], ranks: Sequence[int], *, for_s: float = 30.0) -> Fault:
    """Choose a fault. The draws are the same whatever comes out, so the n-th choice depends on the seed only."""
    verb = rng.choice(list(verbs))
    rank = rng.choice(sorted(ranks))
    signum = rng.choice(DEADLY)
    how = rng.choice(DAMAGES)
    return Fault(verb=verb, rank=rank, signum=signum, how=how, for_s=for_s)
