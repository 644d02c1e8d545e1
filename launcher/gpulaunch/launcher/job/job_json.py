"""Builds job.json: the resolved job, the source of each value, and the host, without secrets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from gpulaunch.launcher.job.imports import preloaded
from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.profiler.redact import HIDDEN, is_secret, redact_all, redact_words

_ALWAYS = ("gpulaunch", "torch", "numpy", "nvidia-ml-py")
_DRIVER = "/proc/driver/nvidia/version"


CHANGES = "GPULAUNCH_TUNE"
"""The variable with changes that the probe of each rank applies: of a trial, or kept by `gpulaunch tune --apply`."""


def job_document(
    spec: JobSpec,
    packages: Iterable[str] = (),
    *,
    refused: Mapping[str, str] | None = None,
    spawn_because: str = "",
    trains: bool = True,
    path: Iterable[str] | None = None,
) -> dict[str, object]:
    """The content written to the run directory when the job begins.

    Args:
        spec: the job.
        packages: what the program imports: their versions are recorded in addition to torch's.
        refused: of these, those that earlier runs found unfit for import before the fork, and why; `with_preloaded`
            adds the findings of this run.
        spawn_because: why the ranks are not forked, or "".
        trains: whether the program may use torch.
        path: where packages are searched, if not along sys.path.
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
            "packages": [] if spawn_because else preloaded(packages, refused or {}, trains=trains),
            "refused": dict(refused or {}),
            "spawn_because": spawn_because,
        },
        **{name: redact_all(value) for name, value in document.items()},
        **({"changes": os.environ[CHANGES]} if CHANGES in os.environ else {}),
    }


def with_preloaded(
    document: Mapping[str, Any], loaded: Iterable[str], refused: Mapping[str, str], spawn_because: str
) -> dict[str, Any]:
    """The document of a job whose fork server is ready.

    Args:
        document: the result of `job_document`, or what was read back of it.
        loaded: what the fork server has imported.
        refused: what it found unfit for that, and why.
        spawn_because: why the ranks are nevertheless not forked, or "".
    """
    planned = dict(document["preloading"])
    planned["packages"] = [] if spawn_because else list(loaded)
    planned["refused"] = {**planned["refused"], **refused}
    planned["spawn_because"] = spawn_because
    return {**document, "preloading": planned}


def _versions(packages: Iterable[str], path: Iterable[str]) -> dict[str, str]:
    """Name -> installed version of these, of Python, the kernel and the GPU driver.

    From the names of the directories that pip makes: importlib.metadata would load `email` into the agent permanently.
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
    """A package's name, normalized by https://packaging.python.org/specifications/name-normalization."""
    return re.sub(r"[-_.]+", "-", name).lower()
