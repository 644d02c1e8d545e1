"""Lightning's checkpoints: a `.ckpt` file of torch.save, or a directory where a strategy saves in shards.

FSDP and model parallel strategies write a directory of torch.distributed.checkpoint with `meta.pt` next to it, the
DeepSpeed strategy a directory with the tag `checkpoint`. The step is the one that Lightning stored inside, which also
`last.ckpt` has; the one in the name if that cannot be read.
"""

from __future__ import annotations

from collections.abc import Collection

from gpulaunch.launcher.checkpoint import dcp, deepspeed, parts, torchfile
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import Files
from gpulaunch.launcher.checkpoint.names import step_of
from gpulaunch.launcher.checkpoint.source import Entry, join

META = "meta.pt"
_TAG = "checkpoint"


def matches(name: str, names: Collection[str]) -> bool:
    """Whether a directory is a checkpoint saved in shards, finished or not."""
    return name.endswith(".ckpt") or (META in names and dcp.matches(names))


def check_file(files: Files, entry: Entry) -> int | None:
    """Verify a `.ckpt` file; return its step. Raises Damaged."""
    torchfile.check(files, entry)
    return _step(files, entry, "global_step")


def check_directory(files: Files, directory: str) -> int | None:
    """Verify a sharded checkpoint; return its step. Raises Damaged."""
    names = files.listing(directory)
    if _TAG in names and names[_TAG].is_dir:
        if deepspeed.LATEST not in names:
            raise Damaged(f"{deepspeed.LATEST} is missing: the save was not finished")
        deepspeed.check(files, join(directory, _TAG))
        return step_of(directory.rpartition("/")[2])
    if META not in names:
        raise Damaged(f"{META} is missing: the save was not finished")
    dcp.check(files, directory)
    parts.check_all(files, directory)
    step = _step(files, names[META], "global_step")
    return step_of(directory.rpartition("/")[2]) if step is None else step


def _step(files: Files, entry: Entry, key: str) -> int | None:
    step = torchfile.integer(torchfile.summary(files, entry).get(key))
    return step_of(entry.name) if step is None else step
