"""What is gone on from: found by rank 0, told to all, and read by each."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from gpulaunch.checkpoint._ranks import Ranks
from gpulaunch.checkpoint._saver import SHARED_FILE, quiet, rank_file
from gpulaunch.checkpoint._state import Subject
from gpulaunch.checkpoint._store import Store
from gpulaunch.checkpoint._words import CheckpointError, first_line, say
from gpulaunch.launcher.checkpoint.manifest import MANIFEST, Damaged, Manifest, read, verify

_ANEW = "name another with --resume, or begin anew: --resume never, or another --job-dir"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was gone on from."""

    path: str
    step: int
    world_size: int
    own: Mapping[str, Any]
    """This rank's file; on another number of ranks the file of one of the ranks of then."""


def choose(environ: Mapping[str, str], store: Store) -> str:
    """The checkpoint to go on from, "" for none: what the launcher names, else the newest complete one. On rank 0."""
    named = environ.get("GPULAUNCH_RESUME_FROM")
    if named is not None:  # the launcher has verified it, whole; empty: it was told to begin anew
        return os.path.abspath(named) if named and "://" not in named else named
    for saved in store.complete():
        try:
            verify(saved.path)
        except Damaged as why:
            say(f"{saved.path} is skipped: {why}")
        else:
            return saved.path
    return ""


def load(path: str, subject: Subject, ranks: Ranks) -> Loaded:
    """Give the program's objects the state of a checkpoint.

    Raises:
        CheckpointError: it is not one of ours, cannot be read, or is the state of another program.
    """
    manifest = _manifest(path)
    try:
        shared = _read(path, SHARED_FILE)
        own = _read(path, rank_file(ranks.rank % manifest.world_size))
        skeleton = shared["skeleton"]
        tensors = subject.room_for(skeleton)
        quiet()
        load_tensors(tensors, storage_reader=FileSystemReader(path), process_group=ranks.group)
    except CheckpointException as err:
        cause = next(iter(err.failures.values()))[0]
        raise CheckpointError(f"cannot resume from {path}: {first_line(cause)}") from err
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as err:
        text = f"{err}; {_ANEW}" if isinstance(err, CheckpointError) else first_line(err)
        raise CheckpointError(f"cannot resume from {path}: {text}") from err
    subject.put(skeleton, tensors)
    if manifest.world_size == ranks.size:
        subject.put_own(own["own"])
        subject.put_buffers(own["buffers"])
    elif ranks.first:
        left_out = f"; not restored, because each rank had its own: {', '.join(subject.own)}" if subject.own else ""
        say(f"resuming on {ranks.size} ranks what {manifest.world_size} saved: new random numbers{left_out}")
    return Loaded(path=path, step=manifest.step, world_size=manifest.world_size, own=own)


def _manifest(path: str) -> Manifest:
    if "://" in path:
        raise CheckpointError(
            f"cannot resume from {path}: gpulaunch.checkpoint reads directories; mount it, or copy it"
        )
    if not os.path.exists(os.path.join(path, MANIFEST)):
        raise CheckpointError(
            f"cannot resume from {path}: gpulaunch.checkpoint did not save it (it has no {MANIFEST}); load it in the "
            f"program itself, or {_ANEW}"
        )
    try:
        return read(path)
    except Damaged as why:
        raise CheckpointError(f"cannot resume from {path}: {why}") from None


def _read(path: str, name: str) -> dict[str, Any]:
    # Our own file, which its manifest vouches for: like every checkpoint of torch's it may hold objects of any class.
    content: dict[str, Any] = torch.load(os.path.join(path, name), map_location="cpu", weights_only=False)
    return content
