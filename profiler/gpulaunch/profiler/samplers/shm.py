"""Finds the shared memory that carries batches from dataloader workers to a rank, from outside the processes.

torch passes a tensor to another process in one of two ways (torch.multiprocessing.set_sharing_strategy):

- `file_descriptor`, the default on Linux: a file in /dev/shm that is unlinked right after creation, so that a listing
  shows nothing. It exists as long as a descriptor of it does: one of the worker's until the rank has fetched the batch,
  then one of the rank's until the batch is freed. torch keeps it open beside the mapping (ALLOCATOR_MAPPED_KEEPFD in
  ATen/MapAllocator.h), so the descriptors name every segment; /proc/PID/maps would, too, but has thousands of lines.
- `file_system`: a file that stays in the listing until it is freed, and that no process has open.

In both the name contains the pid of its creator: torch_<pid>_<random>_<count>.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

# As a descriptor shows it (the kernel adds " (deleted)" to unlinked files), or as it is listed.
_NAME: Final = re.compile(r"(?:\A|/dev/shm/)torch_([0-9]{1,10})_[^/]*\Z")
_MOST_DESCRIPTORS: Final = 4096  # 2 us each; a process that leaks them must not delay the refresh


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A shared-memory file of torch."""

    maker_pid: int
    size_bytes: int


def open_segments(proc: str, pid: int) -> dict[int, Segment]:
    """Return the segments that a process has open, by inode (several processes may hold one); none if it is gone.

    Raises:
        OSError: its descriptors may not be read.
    """
    segments: dict[int, Segment] = {}
    try:
        names = os.listdir(f"{proc}/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return segments
    for name in names[:_MOST_DESCRIPTORS]:
        path = f"{proc}/{pid}/fd/{name}"
        try:
            if (maker_pid := creator_pid(os.readlink(path))) is None:
                continue
            stat = os.stat(path)  # of the file itself, unlinked or not
        except (FileNotFoundError, ProcessLookupError):  # closed meanwhile
            continue
        segments[stat.st_ino] = Segment(maker_pid=maker_pid, size_bytes=stat.st_size)
    return segments


def listed_segments(directory: str) -> dict[int, Segment]:
    """Return the segments in the listing of /dev/shm, of all processes, by inode.

    Raises:
        OSError: it may not be read.
    """
    segments: dict[int, Segment] = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if (maker_pid := creator_pid(entry.name)) is None:
                    continue
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # freed meanwhile
                    continue
                segments[stat.st_ino] = Segment(maker_pid=maker_pid, size_bytes=stat.st_size)
    except FileNotFoundError:  # no shared memory on this node, which HostSampler reports
        pass
    return segments


def batches(proc: str, directory: str, pids: Collection[int], *, trainer_pid: int) -> dict[int, Segment]:
    """Return the segments that the workers of a rank made and that it has not freed, by inode.

    A segment made by the rank itself is not a batch; one made by an ended worker is, while the rank has it open.

    Args:
        proc: where /proc is.
        directory: where /dev/shm is.
        pids: the live processes of the rank that may hold batches.
        trainer_pid: the process of the rank itself.

    Raises:
        OSError: the descriptors of one of them, or the listing, may not be read.
    """
    segments = {inode: segment for inode, segment in listed_segments(directory).items() if segment.maker_pid in pids}
    for pid in pids:
        segments |= open_segments(proc, pid)
    return {inode: segment for inode, segment in segments.items() if segment.maker_pid != trainer_pid}


def creator_pid(path: str) -> int | None:
    """Return the pid in the path or the name of a segment; None for any other file."""
    match = _NAME.search(path)
    return int(match[1]) if match else None
