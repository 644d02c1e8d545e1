"""What the fork server should import, and the record of packages that must not be imported before a fork."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType

from gpulaunch.launcher.job.imports import Reading, files_of_module, read_module, read_script
from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.launcher.loop.files import write_json

_MAX_SCRIPTS = 500
_MAX_CUSTOMIZE_BYTES = 1 << 20

# Variables that nsys, ncu and compute-sanitizer set in the processes they trace. nsys traces nothing between fork and
# exec unless --trace-fork-before-exec is true (docs.nvidia.com/nsight-systems/UserGuide).
_FOLLOW_EXEC = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
_FOLLOW_EXEC_PRELOADED = re.compile(
    r"(?:^|[/: ])(?:nsight-|nsys|libTreeLauncher|libInterceptorInjection|libsanitizer-)"
)
_OF_A_RANK = re.compile(rb"RANK\b|SLURM_(?:PROC|LOCAL|NODE)ID")


def reading_of(spec: JobSpec) -> Reading:
    """What must be known about the program before ranks are forked for it: from its source and from earlier runs."""
    kind, target = spec.program.kind, spec.program.target
    found = read_script(target) if kind in ("script", "run_path") else Reading()
    if kind == "module":
        found = read_module(target)
    if not found.obstacle and "torch" in (known := _of_script(spec)):
        found = dataclasses.replace(found, obstacle=f"as in an earlier run: {known['torch']}")
    if not found.obstacle:
        found = dataclasses.replace(found, obstacle=obstacle_of_process({**os.environ, **spec.env}, sys.modules))
    if spec.preload is None:
        return found
    return dataclasses.replace(found, packages=spec.preload, before_torch=())


def obstacle_of_process(environ: Mapping[str, str], modules: Mapping[str, ModuleType]) -> str:
    """Why no rank of any program can be forked from a process with this environment and these modules, or ""."""
    if any(name in environ for name in _FOLLOW_EXEC) or _FOLLOW_EXEC_PRELOADED.search(environ.get("LD_PRELOAD", "")):
        return "an NVIDIA tool (Nsight or compute-sanitizer) traces the ranks, and sees only processes that exec"
    for name in ("sitecustomize", "usercustomize"):
        with contextlib.suppress(OSError, KeyError, AttributeError), open(str(modules[name].__file__), "rb") as file:
            if _OF_A_RANK.search(file.read(_MAX_CUSTOMIZE_BYTES)):
                return f"{name} reads variables that only ranks have"
    return ""


def _memory_path() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "gpulaunch", "not-preloaded.json")


def _key(package: str) -> str:
    """Key for a package of one environment as it is now: an upgrade gives a new key and so a new trial."""
    for directory in sys.path:
        path = os.path.join(directory, *package.split("."))
        # Not just any file of that name: the command's own directory is on the path and has a script `transformers`.
        for file in (f"{path}/__init__.py", f"{path}.py", f"{path}/"):
            with contextlib.suppress(OSError):
                return f"{path}@{os.stat(file).st_mtime_ns}"
    return package


def recall(spec: JobSpec, packages: Iterable[str]) -> dict[str, str]:
    """Map each package in `packages` that an earlier run refused to the reason."""
    memory, of_script = _read("refused"), _of_script(spec)
    known = {package: memory.get(_key(package)) or of_script.get(package) for package in packages}
    return {package: why for package, why in known.items() if why}


def remember(refused: Mapping[str, str]) -> None:
    """Store what was refused for later runs; if the home directory is not writable, each run costs another trial."""
    _keep("refused", {_key(package): why for package, why in refused.items()})


def remember_script(spec: JobSpec, packages: Iterable[str], why: str) -> None:
    """Store that ranks of this script, in its present version, had to restart because these packages were imported."""
    _keep("scripts", {f"{package} {_script(spec)}": why for package in packages})


def _of_script(spec: JobSpec) -> dict[str, str]:
    """Package -> why ranks of this script had to restart because of it in an earlier run."""
    script = _script(spec)
    found = ((*key.partition(" "), why) for key, why in _read("scripts").items())
    return {package: why for package, _, of, why in found if of == script}


def _script(spec: JobSpec) -> str:
    """Key for a program's file in its present version: a changed file is tried again."""
    path = spec.program.target
    if spec.program.kind == "module":
        path = [*files_of_module(path), path][-1]
    with contextlib.suppress(OSError):
        seen = os.stat(path)
        return f"{os.path.realpath(path)}@{seen.st_mtime_ns}@{seen.st_size}"
    return f"{os.getcwd()}:{path}"


def _keep(what: str, fresh: Mapping[str, str]) -> None:
    memory = _read(what)
    if all(memory.get(key) == why for key, why in fresh.items()):
        return
    other = "scripts" if what == "refused" else "refused"
    merged = dict([*memory.items(), *fresh.items()][-_MAX_SCRIPTS:]) if what == "scripts" else {**memory, **fresh}
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(_memory_path()), exist_ok=True)
        write_json(_memory_path(), {"version": 1, what: merged, other: _read(other)})


def _read(what: str) -> dict[str, str]:
    try:
        with open(_memory_path(), encoding="utf-8") as stored:
            content = json.load(stored)
        found = content.get(what, {}) if content["version"] == 1 else {}
        return {str(key): str(why) for key, why in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
