"""Loads the checkpoint to resume from: chosen by rank 0, broadcast to all, and read by each."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from gpulaunch.checkpoint import plain_values
from gpulaunch.checkpoint.messages import CheckpointError, first_line, say
from gpulaunch.checkpoint.ranks import Ranks
from gpulaunch.checkpoint.saver import SHARED_FILE, quiet, rank_file
from gpulaunch.checkpoint.state import Subject
from gpulaunch.checkpoint.store import Store
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.manifest import MANIFEST, Manifest, read, verify

_ANEW = "specify another with --resume, or start from scratch: --resume never, or another --job-dir"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded."""

    path: str
    step: int
    world_size: int
    own: Mapping[str, Any]
    """This rank's file; on a different number of ranks, the file of one of the former ranks."""


def choose(environ: Mapping[str, str], store: Store) -> str:
    """The checkpoint to resume from, "" for none: named by the launcher, else the newest complete one. On rank 0."""
    named = environ.get("GPULAUNCH_RESUME_FROM")
    if named is not None:  # the launcher has verified it completely; empty: start from the beginning
        return os.path.abspath(named) if named and "://" not in named else named
    for saved in store.complete():
        try:
            verify(saved.path)
        except Damaged as why:
            say(f"{saved.path} is skipped: {why}")
        else:
            return saved.path
    return ""


def load(path: str, subject: Subject, ranks: Ranks, *, weights_only: bool, run: str) -> Loaded:
    """Give the program's objects the state of a checkpoint.

    Args:
        path: of the checkpoint.
        subject: the program's objects.
        ranks: all of this program.
        weights_only: whether to reject values that are not plain, unless `run`, this one, has saved them itself.
        run: $GPULAUNCH_RUN_ID, or its substitute.

    Raises:
        CheckpointError: it is not a gpulaunch checkpoint, cannot be read, or is the state of another program.
    """
    manifest = _manifest(path)

    def trusts(file: BinaryIO) -> bool:
        return not weights_only or (manifest.run == run and plain_values.is_mine(file))

    try:
        shared = plain_values.load(os.path.join(path, SHARED_FILE), trusts=trusts)
        own = plain_values.load(os.path.join(path, rank_file(ranks.rank % manifest.world_size)), trusts=trusts)
        skeleton = shared["skeleton"]
        tensors = subject.room_for(skeleton)
        quiet()
        load_tensors(tensors, storage_reader=plain_values.Reader(path, trusts=trusts), process_group=ranks.group)
    except CheckpointException as err:
        cause = next(iter(err.failures.values()))[0]
        text = str(cause) if isinstance(cause, CheckpointError) else first_line(cause)
        raise CheckpointError(f"cannot resume from {path}: {text}") from None if text == str(cause) else err
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as err:
        text = f"{err}; {_ANEW}" if isinstance(err, CheckpointError) else first_line(err)
        raise CheckpointError(f"cannot resume from {path}: {text}") from err
    subject.put(skeleton, tensors)
    if manifest.world_size == ranks.size:
        subject.put_own(own["own"])
        subject.put_buffers(own["buffers"])
    elif ranks.first:
        left_out = f"; not restored, because each rank had its own: {', '.join(subject.own)}" if subject.own else ""
        say(f"resuming on {ranks.size} ranks a checkpoint of {manifest.world_size}: new random numbers{left_out}")
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
