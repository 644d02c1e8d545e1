"""Finds a run: by its directory, by its name below gpulaunch-runs, the newest there, or the only active one.

The directory may be another user's, damaged, or no run at all; each is reported in one line.
"""

from __future__ import annotations

import os

from gpulaunch.launcher.runs.processes import RunError, agent_of

RUNS = "gpulaunch-runs"
"""Default location of run directories: below the directory that jobs are started in."""

_SIGNS = ("job.json", "attempts")
"""Any of these identifies a run directory. A node with a number other than 0 has its own in `node-<n>`."""


def here() -> str:
    """The current directory; `.` if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.curdir


def find_run(name: str | None, cwd: str, *, having: str = "job.json") -> str:
    """The directory of an active or finished run.

    Args:
        name: its path, or its name below `cwd`/gpulaunch-runs; None: the newest there.
        cwd: the current directory.
        having: a file that the newest must have; its modification time decides which is the newest.

    Raises:
        RunError: there is none, it is not readable, or it is no run.
    """
    if name is not None:
        path = _named(name, cwd)
        try:
            there = os.listdir(path)
        except OSError as err:
            raise RunError(f"cannot read {path}: {err.strerror}; only its owner can read a run directory") from None
        if not any(each in (having, *_SIGNS) or each.startswith("node-") for each in there):
            raise RunError(f"{path} is not a run directory: it contains no job.json")
        return path
    below = os.path.join(cwd, RUNS)
    runs = [(at_s, path) for path in _below(below) if (at_s := _written_s(os.path.join(path, having))) is not None]
    if not runs:
        none = f"no runs in {below}" if having in _SIGNS else f"no run in {below} has a {having}"
        raise RunError(f"{none}; for a job with --job-dir, specify that directory")
    return max(runs)[1]


def none_under_way(cwd: str) -> str:
    """A line for the user if no run below `cwd`/gpulaunch-runs is active on this node; "" if one is."""
    below = os.path.join(cwd, RUNS)
    if any(agent_of(path) is not None for path in _below(below)):
        return ""
    return f"no run is active in {below}; for a job with --job-dir, specify that directory"


def find_under_way(name: str | None, cwd: str) -> str:
    """The directory of an active run on this node.

    Args:
        name: its path, or its name below `cwd`/gpulaunch-runs; None: the only one there.
        cwd: the current directory.

    Raises:
        RunError: there is none, or more than one, which the message then lists.
    """
    if name is not None:
        path = _named(name, cwd)
        if agent_of(path) is None:
            raise RunError(f"none of your runs is active in {name}: {_why_not(path)}")
        return os.path.abspath(path)
    below = os.path.join(cwd, RUNS)
    running = [path for path in _below(below) if agent_of(path) is not None]
    if not running:
        raise RunError(f"no run is active in {below}; specify its run directory with --job-dir")
    if len(running) > 1:
        raise RunError(f"{len(running)} runs are active; select one with --job-dir: {', '.join(running)}")
    return running[0]


def _named(name: str, cwd: str) -> str:
    """The directory for a name."""
    if name:
        for path in (os.path.join(cwd, name), os.path.join(cwd, RUNS, name)):
            if os.path.isdir(path):
                return path
    raise RunError(f"there is no run directory {name or repr(name)}, neither here nor in {os.path.join(cwd, RUNS)}")


def _why_not(path: str) -> str:
    """Why the directory cannot be used."""
    try:
        there = os.listdir(path)
    except OSError as err:
        return str(err.strerror)
    return "the run has ended" if any(sign in there for sign in _SIGNS) else "it is not a run directory"


def _below(directory: str) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in sorted(os.listdir(directory))]
    except FileNotFoundError:
        return []
    except OSError as err:
        raise RunError(f"cannot read {directory}: {err.strerror}; specify a run directory") from None


def _written_s(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
