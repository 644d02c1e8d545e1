"""Writes a rank's facts about its environment to `facts-<rank>.json` next to its segment, for the sidecar.

    version       1
    torch         its version
    omp_threads   OMP_NUM_THREADS, null if it is not set; torch_threads: what torch uses
    device        type, index, uuid, name, capability; null while no GPU is in use
    loaders       one object for each dataloader: site, split (train, eval, null: not used yet), made_anew (for each
                  epoch) and its settings
    precision     of the newest optimizer: parameters (dtype), sharded, optimizer (its class); default (dtype), autocast
                  (dtype or false), matmul (of float32)
    dataparallel  the line that makes a DataParallel, or null
    ddp           the last log of DistributedDataParallel, with the number of its modules and how often each of them
                  reduces in a step, the line of the newest, and whether it searches in vain; or null
    fsdp          how often FSDP reduces in a step of the optimizer, how long that takes (seconds), and its gathers of
                  parameters for each of a unit's reductions; these per step, the bytes of one, and the seconds of its
                  collectives without the first one of each step; the parameters of a unit; not on a GPU
    graph         nodes: of the autograd graph of a backward pass, the mean of some; at_least: one had too many;
                  repeated: the share that a pass before it had gone through, see `probe.repeats`
    gradients     of the same passes: what is computed for nothing, see `probe.gradients`; null if that is not known
    reduced       the line whose `all_reduce` has most, its bytes in a step, and whether they are the same on all ranks
                  already, see `probe.reductions`
    saved         the newest `torch.save` that wrote more memory than its tensors have, see `probe.saved_views`
    padding       of batches of token sequences, see `probe.padding`
    targets       of batches, those that a loss ignores, see `probe.targets`
    losses        with GPULAUNCH_TRIAL only: the mean of each four losses in turn; null: not finite
    changes       with GPULAUNCH_TUNE only: what was applied (old and new value) and refused (reason)

Any module of the probe sets its facts with `set_fact`, in memory; at most once a second all of them are written, if
they have changed. Nothing blocks: the file is on tmpfs, and readers see the old or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Final

from gpulaunch.profiler.files import write_file
from gpulaunch.profiler.probe.user_signals import raised_by_program

VERSION: Final = 1

FACTS_BYTES: Final = 16384
"""The file is not longer than this; lists lose their last entries first."""


class Facts:
    """The facts of this process, and where they go."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {"loaders": [], "device": None, "dataparallel": None, "ddp": None}
        self.changed = False
        self.path = ""
        self.pid = 0
        self.look: Callable[[], None] | None = None
        self.failed: Callable[[str], None] | None = None


rank_facts = Facts()


def set_fact(key: str, value: Any) -> None:
    """Set a fact about this rank, as a JSON value; a value is replaced, never changed."""
    if key not in rank_facts.known or rank_facts.known[key] != value:
        rank_facts.known[key] = value
        rank_facts.changed = True


def start(path: str, look: Callable[[], None], failed: Callable[[str], None]) -> None:
    """Write the facts to `path` from now on.

    Args:
        path: where.
        look: called before each write, to set facts that must be polled.
        failed: called with the reason if they can no longer be written.
    """
    rank_facts.path, rank_facts.look, rank_facts.failed = path, look, failed
    rank_facts.pid = os.getpid()
    rank_facts.changed = True


def stop() -> None:
    """Stop writing."""
    rank_facts.path = ""


def flush() -> None:
    """Write the facts if they have changed; once a second is often enough. A forked child writes nothing."""
    facts = rank_facts
    if not facts.path or facts.pid != os.getpid():
        return
    try:
        if facts.look is not None:
            facts.look()
        if facts.changed:
            facts.changed = False
            write_file(facts.path, [_encode({"version": VERSION, **facts.known})])
    except Exception as error:
        if raised_by_program(error):
            raise
        stop()
        if facts.failed is not None:
            facts.failed(repr(error))


def _encode(facts: dict[str, Any]) -> str:
    while len(data := json.dumps(facts, separators=(",", ":"))) > FACTS_BYTES:  # all of it is ASCII
        longest = max((key for key in facts if isinstance(facts[key], list)), key=lambda key: len(facts[key]))
        if not facts[longest]:
            raise ValueError(f"{len(data)} bytes of facts")
        facts[longest] = facts[longest][:-1]
    return data
