"""Saves in the background, one at a time: written by every rank, committed by rank 0 when all have succeeded; where
each node has a directory of its own, by the first rank of each (`nodes`).

`torch.distributed.checkpoint.async_save` is not used: on torch 2.6 it does not copy tensors on the CPU or sharded ones,
it uses a new thread and new memory each time, and a call that comes too early makes two saves at once. The planner, the
file format and the writer below it are used; they run in the thread below, over a separate process group.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from gpulaunch.checkpoint import plain_values
from gpulaunch.checkpoint.messages import CheckpointError, say, why
from gpulaunch.checkpoint.nodes import Nodes
from gpulaunch.checkpoint.ownership import InUseError
from gpulaunch.checkpoint.ranks import Ranks
from gpulaunch.checkpoint.store import Keep, StaleError, Store, sync_file
from gpulaunch.launcher.checkpoint.manifest import Manifest, ManifestFile, digest
from gpulaunch.profiler.probe import progress

SHARED_FILE = "gpulaunch-shared.pt"
TAKEN_OVER = "taken over by"
UNREACHABLE = "unreachable"


def rank_file(rank: int) -> str:
    """The name of one rank's own file."""
    return f"gpulaunch-rank-{rank:05d}.pt"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one rank saves: a copy, and when it was captured."""

    step: int
    over: bool
    """Whether it was taken between two epochs: one of the same step within the epoch is a different state."""
    captured_ns: int
    tensors: Mapping[str, torch.Tensor]
    shared: Mapping[str, Any]
    """Rank 0 writes it."""
    own: Mapping[str, Any]
    ready: Callable[[], None]
    """Wait until the copy is complete."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one rank has written; rank 0's time and generation are those of the checkpoint."""

    step: int
    problem: str
    files: tuple[ManifestFile, ...]
    saved_s: float
    generation: int


def _problem_of(parts: Sequence[_Part]) -> str:
    """Why these are no checkpoint, "" if they are one."""
    steps = sorted({part.step for part in parts})
    if len(steps) > 1:
        return f"ranks are at different steps, {steps[0]} to {steps[-1]}: all must call step() equally often"
    return next((part.problem for part in parts if part.problem), "")


class Saver:
    """Saves snapshots. All ranks call `start` at the same steps."""

    def __init__(self, store: Store, ranks: Ranks, nodes: Nodes, keep: Keep) -> None:
        self._store = store
        self._ranks = ranks
        self._nodes = nodes
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()
        self.spare: str | None = None
        """A checkpoint that is never deleted: the one that this run was resumed from."""
        self.problem = ""
        """Why the last save failed."""
        self.saved: tuple[int, bool] | None = None
        """(step, over) of the last committed checkpoint."""

    @property
    def stale(self) -> bool:
        """Whether a newer run has taken over the directory: nothing is saved any more."""
        return self.problem.startswith(TAKEN_OVER)

    def start(self, snapshot: Snapshot) -> None:
        """Save in the background. Waits first for a save in progress."""
        self.wait()
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name="gpulaunch-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no save is in progress."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- in the thread

    def _save(self, snapshot: Snapshot) -> None:
        try:
            size_bytes, problem = self._attempt_to(snapshot)
        except Exception:  # of the collectives between the ranks; a rank that has ended is reported elsewhere
            size_bytes, problem = 0, UNREACHABLE
        if problem:
            self.failed(snapshot.step, problem)
        else:
            self._told.clear()
            self.problem = ""
            self.saved = (snapshot.step, snapshot.over)
            progress.checkpoint_saved(
                step=snapshot.step, captured_ns=snapshot.captured_ns, stall_ns=0, size_bytes=size_bytes
            )

    def _attempt_to(self, snapshot: Snapshot) -> tuple[int, str]:
        """(bytes of this rank, "" or why the commit failed); the same outcome on every rank."""
        path, problem = self._nodes.from_leader(self._begin(snapshot.step) if self._nodes.leads else ("", ""))
        if self._nodes.several:
            problem = self._nodes.first_problem(problem)
        if problem:
            if self._nodes.leads and path:
                self._store.abandon(path)
            return 0, problem
        files: list[ManifestFile] = []
        try:
            snapshot.ready()
            self._write_tensors(snapshot, path)
            files = self._write_rest(snapshot, path)
        except CheckpointException as err:  # torch's own, of one rank or several, sent to all
            rank, (cause, _) = min(err.failures.items())
            problem = self._blame(rank, why(cause, path))
        except Exception as err:
            problem = self._blame(self._ranks.rank, why(err, path))
        parts = self._ranks.gather(
            _Part(
                step=snapshot.step,
                problem=problem,
                files=tuple(files),
                saved_s=time(),
                generation=self._store.generation or 0,
            )
        )
        problem = _problem_of(parts)
        if self._nodes.several and not problem:
            everywhere = [(rank, file) for rank, part in enumerate(parts) for file in part.files]
            problem = self._nodes.first_problem(self._nodes.exchange(everywhere, path) if self._nodes.leads else "")
        if self._nodes.leads and problem:
            self._store.abandon(path)
        if not problem:
            problem = self._nodes.first_problem(self._commit(path, parts) if self._nodes.leads else "")
        return sum(file.size_bytes for file in files), problem

    def _begin(self, step: int) -> tuple[str, str]:
        """On a leader: (the directory to write into, "" or why there is none)."""
        try:
            if self._store.generation is None:
                self._store.claim()
            return self._store.begin(step), ""
        except StaleError as err:
            return "", f"{TAKEN_OVER} {err}"
        except InUseError as err:
            return "", str(err)
        except OSError as err:
            return "", why(err, self._store.directory)

    def _write_tensors(self, snapshot: Snapshot, path: str) -> None:
        quiet()
        save_tensors(
            dict(snapshot.tensors),
            storage_writer=FileSystemWriter(path, sync_files=True, per_thread_copy_ahead=0),
            process_group=self._ranks.group,
        )

    def _write_rest(self, snapshot: Snapshot, path: str) -> list[ManifestFile]:
        """Write this rank's other files; return all that it has written."""
        parts = {rank_file(self._ranks.rank): snapshot.own}
        if self._ranks.first:
            parts[SHARED_FILE] = snapshot.shared
        for name, part in parts.items():
            torch.save(dict(part), os.path.join(path, name))
            sync_file(os.path.join(path, name))
            if self.saved is None:
                self._look_at(os.path.join(path, name))
        ours = [name for name in os.listdir(path) if name in parts or name.startswith(f"__{self._ranks.rank}_")]
        if self._ranks.first:
            ours.append(".metadata")
        return [
            ManifestFile(name=name, size_bytes=os.path.getsize(each), sha256=digest(each))
            for name, each in ((name, os.path.join(path, name)) for name in sorted(ours))
        ]

    def _look_at(self, path: str) -> None:
        """Report at the first save, not at a later resume, that a file is not made of plain values."""
        try:
            plain_values.load(path)
        except CheckpointError as err:
            if self._ranks.first:
                say(f"{err}; restarts of this run still resume from it")
        except Exception:  # noqa: S110 # errors in it show when it is read back
            pass

    def _commit(self, path: str, parts: Sequence[_Part]) -> str:
        """On a leader: commit what all ranks have written; "" or why not."""
        manifest = Manifest(
            step=parts[0].step,
            run=self._store.owner.run,
            attempt=self._store.owner.attempt,
            generation=parts[0].generation,
            world_size=self._ranks.size,
            saved_s=parts[0].saved_s,
            files=tuple(file for part in parts for file in part.files),
        )
        try:
            self._store.commit(path, manifest, self._keep, self.spare)
        except (StaleError, OSError) as err:
            self._store.abandon(path)
            return f"{TAKEN_OVER} {err}" if isinstance(err, StaleError) else why(err, path)
        return ""

    def _blame(self, rank: int, text: str) -> str:
        return f"rank {rank}: {text}" if self._ranks.size > 1 else text

    def failed(self, step: int, problem: str) -> None:
        """Count the failure and report it: once for each cause until a save succeeds again."""
        progress.checkpoint_failed()
        self.problem = problem
        if not self._nodes.leads or problem in self._told:
            return
        self._told.add(problem)
        where = self._store.directory
        if self.stale:
            say(f"step {step} was not saved: {where} was {problem}; this run cannot save, and will end with an error")
        elif problem == UNREACHABLE:
            say(f"step {step} was not saved: the other ranks cannot be reached")
        else:
            say(f"step {step} could not be saved in {where}: {problem}; training continues, the next save tries again")


def quiet() -> None:
    """Silence torch's warnings when saving or loading without a process group, which is valid; 2.6 also of itself."""
    warnings.filterwarnings("ignore", message="torch.distributed is .*unavailable or uninitialized")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module=r"torch\.distributed\.checkpoint")
