"""Whole checkpoints on every node, where each has a checkpoint directory of its own (`gpulaunch --replicate`).

Every rank writes its files into the directory of its node, as ever. Then the first rank of each node, its leader, sends
the files of its node to the leaders of the others, over a gloo group of their own, and every leader commits the whole:
whichever nodes are lost, one that is left has it. A node without the checkpoint that the job resumes from is sent it in
the same way. What arrives is compared with the SHA-256 of the manifest. A leader that cannot read or write goes on
with the collectives, which must match on all of them, and says so in the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from gpulaunch.checkpoint.messages import CheckpointError, say, why
from gpulaunch.checkpoint.ranks import SAVE_TIMEOUT, Ranks, T, new_group
from gpulaunch.checkpoint.store import sync_file
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.manifest import ManifestFile, check_digest

_CHUNK_BYTES = 8 << 20


class Nodes:
    """The nodes of the job. Those that share one checkpoint directory count as one, whose leader is rank 0.

    Created collectively. All ranks call the methods, unless they say otherwise.
    """

    def __init__(self, ranks: Ranks, environ: Mapping[str, str], directory: str) -> None:
        """Raises CheckpointError if some nodes share the directory, and others do not."""
        self._ranks = ranks
        self._leader_of = [0] * ranks.size
        self._names = ["0"] * ranks.size
        self._group: Any = None
        self.replicates = bool(environ.get("GPULAUNCH_CHECKPOINT_PER_NODE"))
        """Whether the launcher leaves it to the ranks to verify the checkpoint that they resume from."""
        if self.replicates and ranks.size > 1:
            self._names = ranks.gather(environ.get("GROUP_RANK", "0"))
            self._leader_of = [self._names.index(name) for name in self._names]
            self._find_shared(directory)
        if self.several:
            self._group = new_group(
                "gpulaunch.checkpoint nodes", ranks=sorted({*self._leader_of}), timeout=SAVE_TIMEOUT
            )

    @property
    def several(self) -> bool:
        """Whether there are several directories."""
        return any(self._leader_of)

    @property
    def leads(self) -> bool:
        """Whether this rank writes for all ranks of its node."""
        return self._leader_of[self._ranks.rank] == self._ranks.rank

    @property
    def leaders(self) -> frozenset[int]:
        """The ranks that lead."""
        return frozenset(self._leader_of)

    def from_leader(self, value: T) -> T:
        """The value of the leader of this node."""
        if not self.several:
            return self._ranks.broadcast(value)
        return self._ranks.gather(value)[self._leader_of[self._ranks.rank]]

    def first_problem(self, problem: str) -> str:
        """The problem of the first leader that has one, with its node, on every rank; "" for none."""
        if not self.several:
            return self._ranks.broadcast(problem)
        problems = self._ranks.gather(problem if self.leads else "")
        return next((f"{text} (node {self._names[rank]})" for rank, text in enumerate(problems) if text), "")

    def share(self, value: T, source: int) -> T:
        """On leaders: the value of the leader `source`."""
        if not self.several:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=source, group=self._group)
        shared: T = values[0]
        return shared

    def exchange(self, files: Iterable[tuple[int, ManifestFile]], path: str, *, writes: bool = True) -> str:
        """On leaders: send this node's files, receive those of the others; "" or what went wrong here.

        Args:
            files: the same on all leaders: a rank of the node that has the file, and the file.
            path: the directory of these files here.
            writes: keep what is received; otherwise it is here already.
        """
        problem = ""
        buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
        for rank, file in files:
            source = self._leader_of[rank]
            try:
                if source == self._ranks.rank:
                    self._send(file, os.path.join(path, file.name), buffer)
                elif problem or not writes:
                    self._pass(file, source, buffer)
                else:
                    self._receive(file, source, os.path.join(path, file.name), buffer)
            except OSError as err:
                problem = problem or why(err, path)
            except Damaged as err:
                problem = problem or str(err)
        return problem

    # -- one file: all of its chunks, and whether they could be read, are sent and received whatever happens

    def _send(self, file: ManifestFile, path: str, buffer: torch.Tensor) -> None:
        failed: OSError | None = None
        with contextlib.ExitStack() as stack:
            try:
                source = stack.enter_context(open(path, "rb", buffering=0))
            except OSError as err:
                source, failed = None, err
            for chunk in _chunks(file, buffer):
                try:
                    if source is not None and failed is None:
                        _fill(source, chunk)
                except OSError as err:
                    failed = err
                self._broadcast(chunk, self._ranks.rank)
        self._is_read(self._ranks.rank, is_read=failed is None)
        if failed is not None:
            raise failed

    def _receive(self, file: ManifestFile, source: int, path: str, buffer: torch.Tensor) -> None:
        failed: OSError | None = None
        digest = hashlib.sha256()
        with contextlib.ExitStack() as stack:
            try:
                target = stack.enter_context(open(path, "xb", buffering=0))
            except OSError as err:
                target, failed = None, err
            for chunk in _chunks(file, buffer):
                self._broadcast(chunk, source)
                data = chunk.numpy().data
                digest.update(data)
                try:
                    while target is not None and failed is None and data:
                        data = data[target.write(data) :]
                except OSError as err:
                    failed = err
        is_read = self._is_read(source)
        if failed is not None:
            raise failed
        if is_read:  # else the node that could not read it says so
            check_digest(file, digest.hexdigest())
            sync_file(path)

    def _pass(self, file: ManifestFile, source: int, buffer: torch.Tensor) -> None:
        for chunk in _chunks(file, buffer):
            self._broadcast(chunk, source)
        self._is_read(source)

    def _is_read(self, source: int, *, is_read: bool = False) -> bool:
        """Send or receive whether the source could read the file."""
        said = torch.tensor([is_read], dtype=torch.uint8)
        self._broadcast(said, source)
        return bool(said.item())

    def _broadcast(self, chunk: torch.Tensor, source: int) -> None:
        dist.broadcast(chunk, src=source, group=self._group)

    # -- what is shared

    def _find_shared(self, directory: str) -> None:
        """Nodes that see what others write into their directory share it."""
        if not self.several:
            return
        token = self._ranks.broadcast(secrets.token_hex(8))
        path = {rank: os.path.join(directory, f".replicate-{token}-{rank}") for rank in self.leaders}
        if self.leads:
            _touch(path[self._ranks.rank])
        self._ranks.gather(None)  # all are written
        seen = {rank for rank in self.leaders if self.leads and os.path.exists(path[rank])}
        counts = self._ranks.gather(len(seen - {self._ranks.rank}))
        if self.leads and self._ranks.rank in seen:
            os.unlink(path[self._ranks.rank])
        shared = [counts[rank] for rank in self.leaders]
        if all(count == len(self.leaders) - 1 for count in shared):
            self._leader_of = [0] * self._ranks.size
            if self._ranks.first:
                say(f"all nodes share {directory}: --replicate changes nothing")
        elif any(shared):
            raise CheckpointError(
                f"some nodes share {directory}, and others have one of their own; --replicate needs one for each node"
            )


def _touch(path: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb"):
            pass
    except OSError:  # the first save will tell
        pass


def _chunks(file: ManifestFile, buffer: torch.Tensor) -> Iterable[torch.Tensor]:
    """The parts of `buffer` in which a file is sent."""
    for begin in range(0, file.size_bytes, _CHUNK_BYTES):
        yield buffer[: min(_CHUNK_BYTES, file.size_bytes - begin)]


def _fill(source: io.FileIO, chunk: torch.Tensor) -> None:
    """Read into all of `chunk`; a file that ends early leaves what is there, which its digest will show."""
    room = chunk.numpy().data
    while room and (read := source.readinto(room)):
        room = room[read:]
