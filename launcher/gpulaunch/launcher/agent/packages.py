"""What the fork server should import, and the memory of packages that must not be imported before a fork."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping

from gpulaunch.launcher.job.imports import Reading, read_script
from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.launcher.loop.files import write_json


def reading_of(spec: JobSpec) -> Reading:
    """What must be known of the program before ranks are forked for it; a module is not looked for, nor read."""
    found = read_script(spec.program.target) if spec.program.kind in ("script", "run_path") else Reading()
    return found if spec.preload is None else dataclasses.replace(found, packages=spec.preload)


def _memory_path() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "gpulaunch", "not-preloaded.json")


def _key(package: str) -> str:
    """A package of one environment, as it is now: an upgrade makes a new key and so a new trial."""
    for directory in sys.path:
        path = os.path.join(directory, *package.split("."))
        with contextlib.suppress(OSError):
            return f"{path}@{os.stat(path).st_mtime_ns}"
    return package


def recall(packages: list[str]) -> dict[str, str]:
    """Package -> why it was refused in an earlier run, for those of `packages` that were."""
    memory = _read()
    return {package: memory[_key(package)] for package in packages if _key(package) in memory}


def remember(refused: Mapping[str, str]) -> None:
    """Keep what was refused now for the next runs; a home directory that cannot be written costs a trial each time."""
    fresh = {_key(package): why for package, why in refused.items()}
    memory = _read()
    if all(memory.get(key) == why for key, why in fresh.items()):
        return
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(_memory_path()), exist_ok=True)
        write_json(_memory_path(), {"version": 1, "refused": memory | fresh})


def _read() -> dict[str, str]:
    try:
        with open(_memory_path(), encoding="utf-8") as stored:
            content = json.load(stored)
        return {str(key): str(why) for key, why in content["refused"].items()} if content["version"] == 1 else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
