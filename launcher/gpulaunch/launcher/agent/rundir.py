"""The run directory: an attempt's files. Nothing in it is ever overwritten; no secret is in what we write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Collection
from typing import Any

from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.launcher.loop.files import write_json
from gpulaunch.profiler.redact import redact_all

_NAMES = 1000
_HOSTS = 8192
"""Of a job whose nodes have no numbers of their own: each looks for its name, one by one."""
_LONGEST_NAME = 256
_PRUNED = 10
"""How often a directory that was removed before it was locked is created again."""


class RunDirError(Exception):
    """The run directory cannot be made or written; one line for the user."""


class RunDirLockedError(RunDirError):
    """Another launcher runs in it."""


class RunDir:
    """`path` and what is below it. Attempts continue the numbers that an earlier run in the same directory used."""

    def __init__(
        self,
        path: str,
        lock: int,
        *,
        torchrun_log_dir: str | None,
        shared: str = "",
        node: int = 0,
        fallback_from: str = "",
        ours: bool = False,
    ) -> None:
        """Called by `open_run_dir`. `lock`: from `_lock`. `torchrun_log_dir`: <log-dir>/<run id>_<random>, when
        --log-dir was given. `shared`, `node`: see there. `ours`: the directory was made for this run."""
        self.path = path
        self.shared = shared or path
        """What the nodes of the job have in common: `path`, or a directory above it."""
        self.node = node
        """The number of this node's directory."""
        self._ours = ours
        self.fallback_from = fallback_from
        self._log_dir = torchrun_log_dir
        self._lock = lock
        attempts = os.path.join(path, "attempts")
        os.makedirs(attempts, mode=0o700, exist_ok=True)
        taken = [int(name) for name in os.listdir(attempts) if name.isdigit()]
        self._first_attempt = max(taken, default=-1) + 1
        self._events: int | None = None

    def attempt_dir(self, attempt: int) -> str:
        """The directory of this run's `attempt` (from 0), under a number never used before."""
        path = os.path.join(self.path, "attempts", str(self.number_of(attempt)))
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def streams_dir(self, attempt: int) -> str:
        """Where files for the streams of all ranks of an attempt go; with --log-dir, in torchrun's layout."""
        if self._log_dir is None:
            return self.attempt_dir(attempt)
        return os.path.join(self._log_dir, f"attempt_{attempt}")

    def number_of(self, attempt: int) -> int:
        """The number, never used before in this directory, of this run's `attempt` (from 0)."""
        return self._first_attempt + attempt

    def rank_path(self, attempt: int, rank: int) -> str:
        """The directory of one rank's files of one attempt."""
        return os.path.join(self.attempt_dir(attempt), f"rank-{rank}")

    def rank_dir(self, attempt: int, rank: int, local_rank: int) -> str:
        """Make the directory of one rank of one attempt; with --log-dir, where torchrun would put it."""
        path = self.rank_path(attempt, rank)
        if self._log_dir is None:
            os.makedirs(path, mode=0o700)
            return path
        real = os.path.join(self._log_dir, f"attempt_{attempt}", str(local_rank))
        os.makedirs(real, mode=0o700)
        os.symlink(os.path.abspath(real), path)
        return real

    def write_json(self, name: str, content: Any) -> str:
        """Write `<run dir>/<name>` atomically; return its path."""
        path = os.path.join(self.path, name)
        write_json(path, redact_all(content))
        return path

    def amend_json(self, name: str, change: Callable[[Any], Any]) -> None:
        """Replace `<run dir>/<name>` by the result of `change`; unchanged if it cannot be read or written."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            with open(os.path.join(self.path, name), encoding="utf-8") as file:
                document = json.load(file)
            self.write_json(name, change(document))

    def event(self, what: str, **fields: Any) -> None:
        """Append one line to events.jsonl; a full disk costs the line, not the job."""
        stamps = {"version": 1, "time_s": time.time(), "monotonic_s": time.monotonic(), "event": what}
        line = json.dumps(stamps | {name: redact_all(value) for name, value in fields.items()})
        with contextlib.suppress(OSError):
            if self._events is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._events = os.open(os.path.join(self.path, "events.jsonl"), flags, 0o600)
            os.write(self._events, line.encode() + b"\n")

    def close(self) -> None:
        """Close events.jsonl and unlock the directory; a refused start leaves nothing of it."""
        if self._events is not None:
            os.close(self._events)
            self._events = None
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(os.path.join(self.path, "attempts"))
            if self._ours:
                os.rmdir(self.path)
        os.close(self._lock)


def open_run_dir(spec: JobSpec) -> RunDir:
    """Make the run directory that `spec` names, or the default one.

    Raises RunDirError where the user named a directory that cannot be used. The default, below the current directory,
    falls back to the temporary directory: torchrun also runs in a read-only directory.
    """
    log_dir = None
    if spec.log_dir is not None and spec.log_dir != os.devnull:  # torchrun's way to say: no log files
        log_dir = os.path.abspath(os.path.join(spec.log_dir, f"{spec.run_id}_{os.urandom(4).hex()}"))
        _make(log_dir, "--log-dir")
    if spec.job_dir is not None:
        shared = os.path.abspath(spec.job_dir)
        if spec.nnodes > 1:
            made = _make(shared, "--job-dir")
            _refuse_untrusted(os.stat(shared), made, shared, "--job-dir")
        try:
            node = _node(spec, shared)
        except OSError as err:
            raise RunDirError(f"cannot number the nodes in --job-dir {shared}: {err.strerror}") from err
        path = _of_node(shared, node)
        return RunDir(path, _hold(path, "--job-dir"), torchrun_log_dir=log_dir, shared=shared, node=node)
    if log_dir is not None:
        return RunDir(log_dir, _hold(log_dir, "--log-dir"), torchrun_log_dir=log_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    here = os.path.join(os.getcwd(), "gpulaunch-runs")
    try:
        if spec.shared_dir is not None:
            shared = _next(spec, os.path.join(here, spec.shared_dir.name), spec.shared_dir.start)
            node = _node(spec, shared)
            path = _of_node(shared, node)
            return RunDir(path, _hold(path, "the run directory"), torchrun_log_dir=log_dir, shared=shared, node=node)
        path = _fresh(os.path.join(here, f"{spec.name}-{stamp}"))
        return RunDir(path, _lock(path), torchrun_log_dir=log_dir, ours=True)
    except OSError as err:
        import tempfile

        path = tempfile.mkdtemp(prefix=f"gpulaunch-{spec.name}-")
        why = f"{here}: {err.strerror}"
        return RunDir(path, _lock(path), torchrun_log_dir=log_dir, fallback_from=why, ours=True)


def _of_node(shared: str, node: int) -> str:
    """Each node's part of a directory on a file system that all of them may share; the first one's is all of it."""
    return os.path.join(shared, f"node-{node}") if node else shared


def _node(spec: JobSpec, shared: str) -> int:
    """The number of this node's part of it."""
    if spec.elastic is not None and spec.elastic.order is None:
        return _number_of_host(shared)
    return spec.node_rank


def _number_of_host(shared: str) -> int:
    """Of this host among those that have used the directory, the first being 0: ranks of nodes may change, and are not
    known yet. `.nodes/<number>` has the host's name. Raises OSError."""
    host = os.uname().nodename
    nodes = os.path.join(shared, ".nodes")
    with contextlib.suppress(FileExistsError):
        os.mkdir(nodes, 0o700)
    directory = os.open(nodes, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for number in range(_HOSTS):
            if _host_of(directory, number, host) == host:
                return number
    finally:
        os.close(directory)
    raise OSError(errno.EMFILE, f"{_HOSTS} hosts have used it; use another directory")


def _host_of(directory: int, number: int, host: str) -> str:
    """The host that has the number; this one takes it if it is free."""
    try:
        file = os.open(str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except FileExistsError:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link, and no pipe that blocks
        file = os.open(str(number), flags, dir_fd=directory)
        with open(file, encoding="utf-8", errors="replace") as written:
            return written.read(_LONGEST_NAME)
    with open(file, "w", encoding="utf-8") as new:
        new.write(host)
    return host


def _next(spec: JobSpec, path: str, start: int) -> str:
    """The first of PATH, PATH-1, ... that this node has not used since the job was started."""
    for number in range(_NAMES):
        shared = path if number == 0 else f"{path}-{number}"
        os.makedirs(shared, mode=0o700, exist_ok=True)
        own = _of_node(shared, _node(spec, shared))
        os.makedirs(own, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(os.path.join(own, f".start-{start}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return shared
    raise OSError(17, f"{path} and {_NAMES - 1} similar names already exist")


def _fresh(path: str) -> str:
    """Make a directory that did not exist: two jobs started in the same second get different ones."""
    for number in range(_NAMES):
        candidate = path if number == 0 else f"{path}-{number}"
        try:
            os.makedirs(candidate, mode=0o700)
        except FileExistsError:
            continue
        return candidate
    raise OSError(17, f"{path} and {_NAMES - 1} similar names already exist")


def _make(path: str, flag: str) -> os.stat_result:
    """Ensure that a directory the user named exists and is writable; return stat of a file of mode 0600 made in it."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        probe = os.path.join(path, f".gpulaunch-{os.getpid()}")
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        made = os.fstat(descriptor)
        os.close(descriptor)
        os.unlink(probe)
    except OSError as err:
        raise RunDirError(f"cannot write to {flag} {path}: {err.strerror}; use a writable directory") from err
    return made


def _hold(path: str, flag: str) -> int:
    """Make and lock a directory the user named, and check that it can be trusted."""
    for _ in range(_PRUNED):
        made = _make(path, flag)
        with contextlib.suppress(FileNotFoundError):  # `gpulaunch runs prune` has just removed it
            lock = _lock(path)
            held = os.fstat(lock)
            # Some file systems count no links of directories.
            if held.st_nlink or (os.path.exists(path) and os.path.samefile(lock, path)):
                break
            os.close(lock)
    else:
        raise RunDirError(f"{flag} {path} is removed repeatedly; use another directory")
    try:
        _refuse_untrusted(held, made, path, flag)
    except RunDirError:
        os.close(lock)
        raise
    return lock


def _refuse_untrusted(found: os.stat_result, made: os.stat_result, path: str, flag: str) -> None:
    why = why_untrusted(found, made=made, groups={os.getegid(), *os.getgroups()}, mounted=os.path.ismount(path))
    if why:
        raise RunDirError(
            f"{flag} {path} {why}: its content, such as the checkpoint to resume from, may be another user's; "
            "use a directory of your own"
        )


def _lock(path: str) -> int:
    """Two launchers in one directory would number the same attempts. The lock ends with the process."""
    lock = os.open(os.path.realpath(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RunDirLockedError(
            f"another gpulaunch runs in {path}: wait until it ends, or use another --job-dir"
        ) from None
    return lock


def why_untrusted(found: os.stat_result, *, made: os.stat_result, groups: Collection[int], mounted: bool) -> str:
    """Why a run directory cannot be trusted, as one phrase; "" where it can.

    Args:
        found: stat of the directory.
        made: stat of a file of mode 0600 that this process has just made there. NFS may map all users to one, so its
            owner may be another user; CIFS, FUSE and WSL may show other modes than requested, which mean nothing then.
        groups: those that this process is in: Kubernetes' fsGroup is one of them and may write the volume.
        mounted: whether it is the root of a file system: a volume of Kubernetes belongs to root and has mode 0777.

    Groups may write, as with the umask of 002 on most clusters, except foreign groups where this process is root.
    """
    if found.st_uid not in (made.st_uid, 0):
        return f"belongs to another user (uid {found.st_uid})"
    if mounted or made.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if made.st_uid == 0 and found.st_gid not in (0, *groups) and found.st_mode & stat.S_IWGRP:
        return f"can be written by a group (gid {found.st_gid}), and this is root"
    return ""
