"""job.json: the resolved job, where each value came from, and what it ran on, without secrets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.profiler.redact import HIDDEN, is_secret, redact_all, redact_words

_ALWAYS = ("gpulaunch", "torch", "numpy", "nvidia-ml-py")
_DRIVER = "/proc/driver/nvidia/version"


def job_document(
    spec: JobSpec,
    packages: Iterable[str] = (),
    *,
    refused: Mapping[str, str] | None = None,
    spawn_because: str = "",
    path: Iterable[str] | None = None,
) -> dict[str, object]:
    """What is written into the run directory when the job begins.

    Args:
        spec: the job.
        packages: what the program imports: their versions are noted beside torch's.
        refused: of these, what earlier runs found not fit to be imported before the fork, and why; what this one finds
            is added by `with_preloaded`.
        spawn_because: why the ranks are not forked, or "".
        path: where packages are looked for, if not along sys.path.
    """
    packages = list(packages)
    document = dataclasses.asdict(spec)
    document["env"] = {name: HIDDEN if is_secret(name) else value for name, value in spec.env.items()}
    document["program"]["args"] = list(redact_words(spec.program.args))
    return {
        "version": 1,
        "gpulaunch_pid": os.getpid(),
        "command": list(redact_words(sys.argv)),
        "versions": _versions([*_ALWAYS, *packages], sys.path if path is None else path),
        "preloading": {
            "packages": [] if spawn_because else ["torch", *(name for name in packages if name not in (refused or {}))],
            "refused": dict(refused or {}),
            "spawn_because": spawn_because,
        },
        **{name: redact_all(value) for name, value in document.items()},
    }


def with_preloaded(
    document: Mapping[str, Any], loaded: Iterable[str], refused: Mapping[str, str], spawn_because: str
) -> dict[str, Any]:
    """The document of a job whose fork server is ready.

    Args:
        document: what `job_document` made, or what was read of it.
        loaded: what the fork server has imported.
        refused: what it found not fit for that, and why.
        spawn_because: why the ranks are not forked all the same, or "".
    """
    planned = dict(document["preloading"])
    planned["packages"] = [] if spawn_because else list(loaded)
    planned["refused"] = {**planned["refused"], **refused}
    planned["spawn_because"] = spawn_because
    return {**document, "preloading": planned}


def _versions(packages: Iterable[str], path: Iterable[str]) -> dict[str, str]:
    """Name -> version of what is installed of these, of Python, the kernel and the GPU driver.

    By the names of the directories that pip makes: importlib.metadata would bring `email` into the agent for good.
    """
    wanted = {_normal(name): name for name in packages}
    found = {"python": sys.version.split()[0], "kernel": os.uname().release}
    for directory in path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory):
                if entry.endswith(".dist-info"):
                    name, _, version = entry.removesuffix(".dist-info").partition("-")
                    if _normal(name) in wanted:
                        found.setdefault(wanted[_normal(name)], version)  # the first on the path is the one imported
    with contextlib.suppress(OSError), open(_DRIVER, encoding="utf-8", errors="replace") as file:
        if match := re.search(r"Module\s+(?:for \S+\s+)?([0-9.]+)", file.readline()):
            found["nvidia-driver"] = match[1]
    return found


def _normal(name: str) -> str:
    """A package's name as https://packaging.python.org/specifications/name-normalization compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
