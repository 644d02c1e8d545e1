"""The stored runs below a directory: their state, size and age, and the removal of finished ones.

Only what is known to be gpulaunch's is touched: a directory of this user with a job.json of ours in it, never through a
symbolic link; in it, the names in OURS, and under names that programs use as well (`traces`, `report.html`) what is
identified by its own name or content. Everything else is the user's and stays. A run is removed under the lock that an
agent holds, so it cannot be removed while it runs, or started while it is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gpulaunch.exporters.store.locations import nodes_of
from gpulaunch.launcher.runs.processes import agent_of
from gpulaunch.profiler.files import regular

CHECKPOINTS = "checkpoints"
_ATTEMPTS = "attempts"
_LAST = "job.json"
_SUMMARY = "summary.json"
_FOR_RESUME = ("verified.json", _SUMMARY, _LAST)
"""Files needed to resume from the checkpoints, or that describe them."""
_SHARED = ("traces", "flame")
"""Directories that may also contain files of the program."""
_IN_SHARED = re.compile(
    r"traces/(last|\d{8}-\d{6}(/(rank-\d+|trace)\.json)?)|flame/(stacks\.speedscope\.json|[a-z_]+\.svg)"
)
_MARKED = re.compile(r"report\.html|flame/[a-z_]+\.svg")
"""Files that contain the name gpulaunch in their first bytes if they are ours."""
_MARK, _MARK_WITHIN_BYTES = re.compile(rb'generator(" content="|: )gpulaunch'), 512
OURS = (
    *(_ATTEMPTS, *_SHARED, "group.json", "events.jsonl", "findings.jsonl", "stacks.folded", "report.html"),
    *("telemetry.sqlite", "telemetry.sqlite-wal", "telemetry.sqlite-shm", "telemetry.sqlite-journal"),
    *("control.bin", "sidecar.json", ".nodes", "filtered_stdout.log", "filtered_stderr.log"),
    *_FOR_RESUME,
)
"""The names that gpulaunch creates in a run directory; the one that identifies it is last."""

_LOST_AFTER_S = 86400.0
"""A run without a summary may be another machine's, on a shared file system: it must be unchanged for this long."""


_AFTER_THE_END_S = 60.0
"""A node that writes for longer after another has ended goes on, maybe on a machine that is not seen from here."""


class State(Enum):
    """The state of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """A signal asked its launcher to end it."""
    LOST = "lost"
    """No summary of its end, and no agent on this machine: it was killed, or runs on another machine."""


class RunInUseError(Exception):
    """The run's lock is held."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run directory."""

    path: str
    state: State
    began_s: float
    """Wall clock."""
    changed_s: float
    """Latest modification of any file in it, by the wall clock. Directories do not count: removal changes them."""
    size_bytes: int
    """Size on disk, checkpoints included."""
    checkpoint_bytes: int
    num_files: int
    """Files and directories: inodes."""
    is_pruned: bool = False
    """Only its checkpoints are left, and what is needed to resume from them."""

    @property
    def name(self) -> str:
        """The directory's own name."""
        return os.path.basename(self.path)


def stored(directory: str) -> list[Run]:
    """The runs of this user directly below a directory, the newest first. Raises OSError if it cannot be read."""
    runs = [run for name in os.listdir(directory) if (run := _look(os.path.join(directory, name))) is not None]
    return sorted(runs, key=lambda run: (-run.began_s, run.path))


def removable(
    runs: Sequence[Run], *, now_s: float, keep: int | None, older_s: float | None, checkpoints: bool = False
) -> list[Run]:
    """The runs that may be removed: finished, not among the `keep` newest of all, and not changed for `older_s`.

    Args:
        runs: the newest first, from `stored`.
        now_s: by the wall clock.
        keep: None: none is kept for being new.
        older_s: None: none is kept for its age.
        checkpoints: also remove their checkpoints; otherwise a run with nothing else left is not chosen again.
    """
    return [
        run
        for run in runs[keep or 0 :]
        if run.state is not State.RUNNING
        and (checkpoints or not run.is_pruned)
        and now_s - run.changed_s >= max(older_s or 0.0, _LOST_AFTER_S if run.state is State.LOST else 0.0)
    ]


def remove(run: Run, *, checkpoints: bool) -> list[str]:
    """Remove gpulaunch's files of a finished run; return the names of what stays, none if the directory is gone.

    Without `checkpoints` a run that has any keeps them, what is needed to resume from them, and the number of its last
    attempt: a later run in the same directory continues counting, and a checkpoint belongs to an attempt.

    Raises:
        RunInUseError: an agent runs there.
        OSError: something cannot be removed; what was removed before stays removed.
    """
    with _opened(run.path) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunInUseError(run.path) from None
        names = list(OURS)
        if checkpoints:
            names.insert(0, CHECKPOINTS)
        elif _has_any(CHECKPOINTS, fd):
            names = [name for name in OURS if name not in (_ATTEMPTS, *_FOR_RESUME)]
            _empty_attempts(fd)
        for name in names:
            if name in _SHARED:
                _clear(name, name, fd)
            elif _is_ours(name, name, fd):
                _remove(name, fd)
        with contextlib.suppress(OSError):  # it is not empty, or does not exist
            os.rmdir(CHECKPOINTS, dir_fd=fd)
        left = sorted(os.listdir(fd))
        if not left:
            os.rmdir(run.path)
        return left


def is_saved_to(run: Run) -> bool:
    """Whether a live process saves with gpulaunch.checkpoint into this run's directory: it holds a lock on `.owner`
    (gpulaunch.checkpoint, which needs torch). The process may belong to another run."""
    directory = os.path.join(run.path, CHECKPOINTS)
    for path, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith("step-")]
        if ".owner" in files:
            with contextlib.suppress(OSError):
                fd = os.open(os.path.join(path, ".owner"), os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                finally:
                    os.close(fd)
    return False


def _look(path: str) -> Run | None:
    """The run in this directory; None if there is none, or it is not this user's."""
    try:
        about = os.lstat(path)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return None
        job = _json(os.path.join(path, _LAST))
        if job is None or "gpulaunch_pid" not in job:
            return None
        files = list(_walk(path))
        began_s = os.lstat(os.path.join(path, _LAST)).st_mtime
        state = _state(path, began_s)
        is_pruned = _is_pruned(path, [name for name, _ in files])
    except OSError:  # removed meanwhile, or not readable
        return None
    inside = os.path.join(path, CHECKPOINTS) + os.sep
    return Run(
        path=path,
        state=state,
        began_s=began_s,
        changed_s=max(each.st_mtime for _, each in files if not stat.S_ISDIR(each.st_mode)),
        size_bytes=sum(each.st_blocks * 512 for _, each in files),
        checkpoint_bytes=sum(each.st_blocks * 512 for name, each in files if name.startswith(inside)),
        num_files=len(files),
        is_pruned=is_pruned,
    )


def _state(path: str, began_s: float) -> State:
    nodes = [str(directory) for _, directory in nodes_of(Path(path))]
    if any(agent_of(node) is not None for node in nodes):
        return State.RUNNING
    # The first node may be lost, or have left, and the others go on.
    summaries = [each for node in nodes if (each := _summary(node, began_s)) is not None]
    ended_s, summary = max(summaries, key=lambda each: each[0], default=(0.0, None))
    if summary is None or any(_went_on_s(node) > ended_s + _AFTER_THE_END_S for node in nodes):
        return State.LOST
    if summary.get("exit_code") == 0:
        return State.FINISHED
    return State.STOPPED if summary.get("stopped_by") else State.FAILED


def _summary(path: str, began_s: float) -> tuple[float, dict[str, object]] | None:
    """When it was written, and what it says, of the newest run in a directory: an older one is of an earlier run."""
    with contextlib.suppress(OSError):
        written_s = os.lstat(os.path.join(path, _SUMMARY)).st_mtime
        summary = _json(os.path.join(path, _SUMMARY)) if written_s >= began_s else None
        return None if summary is None else (written_s, summary)
    return None


def _went_on_s(path: str) -> float:
    """When a run was last seen to go on in a node's directory."""
    newest_s = 0.0
    for name in ("events.jsonl", "telemetry.sqlite", "telemetry.sqlite-wal"):
        with contextlib.suppress(OSError):
            newest_s = max(newest_s, os.lstat(os.path.join(path, name)).st_mtime)
    return newest_s


def _is_pruned(path: str, inside: Sequence[str]) -> bool:
    """Whether `remove` has kept the checkpoints here, and no file that it would remove was written since."""
    attempts = os.path.join(path, _ATTEMPTS) + os.sep
    if sum(name.startswith(attempts) for name in inside) > 1:  # more than the empty directory of the last
        return False
    with _opened(path) as fd:
        more = set(os.listdir(fd)).intersection(OURS) - {_ATTEMPTS, *_SHARED, *_FOR_RESUME}
        return _has_any(CHECKPOINTS, fd) and not any(_is_ours(name, name, fd) for name in more)


def _json(path: str) -> dict[str, object] | None:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with open(path, "rb", opener=regular) as file:
            content = json.load(file)
        if isinstance(content, dict):
            return content
    return None


def _walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """The directory and everything below it, links not followed."""
    yield path, os.lstat(path)
    for directory, directories, files in os.walk(path):
        for name in (*directories, *files):
            with contextlib.suppress(OSError):
                yield os.path.join(directory, name), os.lstat(os.path.join(directory, name))


def _open_directory(path: str, dir_fd: int | None = None) -> int:
    """A directory's descriptor. Raises OSError if it is a symbolic link, or missing."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


@contextlib.contextmanager
def _opened(path: str) -> Generator[int]:
    fd = _open_directory(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _has_any(name: str, dir_fd: int) -> bool:
    """Whether a directory is not empty, or the name is not a directory."""
    try:
        fd = _open_directory(name, dir_fd)
    except FileNotFoundError:
        return False
    except OSError:  # e.g. a symbolic link to the real place of the checkpoints
        return True
    try:
        return bool(os.listdir(fd))
    finally:
        os.close(fd)


def _empty_attempts(dir_fd: int) -> None:
    """Remove all attempts except the empty directory of the last."""
    try:
        fd = _open_directory(_ATTEMPTS, dir_fd)
    except OSError:
        return
    try:
        numbers = [int(name) for name in os.listdir(fd) if name.isdecimal()]
        for name in os.listdir(fd):
            _remove(name, fd)
        if numbers:
            os.mkdir(str(max(numbers)), mode=0o700, dir_fd=fd)
    finally:
        os.close(fd)


def _clear(path: str, name: str, dir_fd: int) -> None:
    """Remove our files of a directory, and the directory if it is then empty. `path`: relative to the run directory."""
    try:
        fd = _open_directory(name, dir_fd)
    except OSError:  # missing, or a symbolic link: not created by gpulaunch
        return
    try:
        for each in os.listdir(fd):
            inside = f"{path}/{each}"
            if not _IN_SHARED.fullmatch(inside):
                continue
            if stat.S_ISDIR(os.stat(each, dir_fd=fd, follow_symlinks=False).st_mode):
                _clear(inside, each, fd)
            elif _is_ours(inside, each, fd):
                os.unlink(each, dir_fd=fd)
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=dir_fd)


def _is_ours(path: str, name: str, dir_fd: int) -> bool:
    """Whether a file has content of ours, if a program may use the same name."""
    is_summary = path == _SUMMARY
    if not is_summary and not _MARKED.fullmatch(path):
        return True
    with contextlib.suppress(OSError, ValueError, RecursionError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=dir_fd), "rb") as file:
            if is_summary:
                return {"version", "exit_code", "ranks"} <= set(json.load(file))
            return _MARK.search(file.read(_MARK_WITHIN_BYTES)) is not None
    return False


def _remove(name: str, dir_fd: int) -> None:
    """Remove one name and everything below it; a symbolic link itself, not its target."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=dir_fd)
        else:
            os.unlink(name, dir_fd=dir_fd)
