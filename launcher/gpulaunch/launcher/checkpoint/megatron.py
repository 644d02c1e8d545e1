"""Megatron's checkpoints: `latest_checkpointed_iteration.txt` names `iter_0000100/` (or `release/`).

Two layouts: a file for each model parallel rank (`mp_rank_00_001/model_optim_rng.pt`, with a distributed optimizer
also `distrib_optim.pt`), and a directory of torch.distributed.checkpoint with `metadata.json` next to it. Megatron
writes the tracker after every rank has finished, so a later iteration was not finished. The checkpoint's path is the
directory of the iteration: Megatron takes the directory above it (`--load`) and the number (`--ckpt-step`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection

from gpulaunch.launcher.checkpoint import dcp, parts
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.deepspeed import check_not_after
from gpulaunch.launcher.checkpoint.files import Files
from gpulaunch.launcher.checkpoint.names import step_of
from gpulaunch.launcher.checkpoint.source import Entry, join

TRACKER = "latest_checkpointed_iteration.txt"
_TRACKER_CAP_BYTES = 4096
_NAME = re.compile(r"iter_\d+|release")
_RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d{3}))?(?:_(\d{3}))?")
_RANK_FILE = "model_optim_rng.pt"
_OPTIMIZER_FILE = "distrib_optim.pt"
_DESCRIPTION = "metadata.json"


def matches(name: str, names: Collection[str], above: Collection[str]) -> bool:
    """Whether a directory is an iteration's; `above` are the names next to it."""
    if _NAME.fullmatch(name) is None:
        return False
    return TRACKER in above or _DESCRIPTION in names or any(_RANK.fullmatch(one) for one in names)


def directory_of(named: str) -> str:
    """The directory that a tracker's content refers to."""
    return f"iter_{int(named):07d}" if named.isdigit() and len(named) <= 18 else named


def check(files: Files, directory: str) -> int | None:
    """Verify an iteration that the tracker does not contradict; its number, None for a release. Raises Damaged."""
    above, _, name = directory.rpartition("/")
    tracker = files.look(join(above, TRACKER)) if directory else None
    if tracker is not None and not tracker.is_dir:
        named = files.content(tracker.path, _TRACKER_CAP_BYTES).decode("utf-8", "replace").strip()
        files.seen.pop(tracker.path)
        check_not_after(files, directory, directory_of(named), TRACKER, tracker.changed_s)
    names = files.listing(directory)
    if any(_RANK.fullmatch(one) for one in names):
        _check_ranks(files, directory, names)
    elif dcp.matches(names):
        if _DESCRIPTION in names:
            files.json(join(directory, _DESCRIPTION))
        dcp.check(files, directory)
    else:
        raise Damaged("it has neither a directory for each rank nor .metadata")
    parts.check_all(files, directory)
    return None if name == "release" else step_of(name)


def _check_ranks(files: Files, directory: str, names: dict[str, Entry]) -> None:
    """Every tensor, pipeline and expert parallel rank must have a directory with its file in it."""
    found = [match for name in names if (match := _RANK.fullmatch(name))]
    sizes = [1 + max((int(match[at]) for match in found if match[at]), default=-1) for at in (1, 2, 3)]
    split_optimizer = False
    for ranks in itertools.product(*(range(size) for size in sizes if size)):
        name = "_".join(["mp_rank", f"{ranks[0]:02d}", *(f"{rank:03d}" for rank in ranks[1:])])
        if name not in names:
            raise Damaged(f"{name} is missing")
        inside = files.listing(join(directory, name))
        if _RANK_FILE not in inside:
            raise Damaged(f"{name}/{_RANK_FILE} is missing")
        has_optimizer = _OPTIMIZER_FILE in inside
        # With experts some ranks have no optimizer; otherwise all have one, or none does.
        if any(ranks) and has_optimizer != split_optimizer and not sizes[2]:
            raise Damaged(f"{_OPTIMIZER_FILE} is missing for some ranks")
        split_optimizer = has_optimizer
