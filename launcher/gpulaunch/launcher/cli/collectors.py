"""Checks of the profiler for `gpulaunch doctor`: tries what each of its parts can measure on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from gpulaunch.launcher.cli.checks import Finding, Status
from gpulaunch.profiler.record import Collector

_OF_A_JOB: Final[Mapping[Collector, str]] = {
    Collector.RANKS: "reads the ranks' segments",
    Collector.RUN: "reads the launcher's state of the run",
    Collector.WORKERS: "reads the fetch times of DataLoader workers",
    Collector.COLLECTIVES: "reads the ranks' collectives",
    Collector.STORE: "writes telemetry.sqlite in the run directory",
}
"""Metrics that do not exist without a job."""
_TRACES_FROM = (2, 7)
"""As `profiler.probe.kineto.TORCH_FLOOR`."""
RANK_PROGRAM: Final = "import torch\nfrom gpulaunch.profiler.probe.inject import arm\narm()"
"""The program of the process in which the probe is armed."""
IMPORT_TIMEOUT_S: Final = 120.0
"""How long the import of torch may take, from a slow file system."""


def collectors() -> Iterator[Finding]:
    """Refresh the sidecar once, without ranks: everything unreadable here is reported, with the reason."""
    from gpulaunch.profiler.daemon.sidecar import Sidecar

    with tempfile.TemporaryDirectory(prefix="gpulaunch-doctor-") as directory:
        sidecar = Sidecar(Path(directory), lambda _: None)
        state = sidecar.refresh()
        sidecar.close()
    for collector in Collector:
        condition = state.collectors.get(collector)
        name = f"collector {collector.value}"
        if condition is None:
            yield Finding(name=name, status=Status.OK, value=f"ready: {_OF_A_JOB[collector]}")
        elif condition.errors:
            advice = "its metrics will be missing; see docs/metrics.md"
            yield Finding(name=name, status=Status.WARN, value=condition.reason, advice=advice)
        elif collector in _OF_A_JOB:
            yield Finding(name=name, status=Status.OK, value=f"ready: {_OF_A_JOB[collector]}")
        elif condition.available:
            yield Finding(name=name, status=Status.OK, value="available")
        else:
            yield Finding(name=name, status=Status.OK, value=f"absent: {condition.reason}")


def hooks() -> Iterator[Finding]:
    """Report which hooks the probe finds in this torch, by arming it in a process as in a rank."""
    from gpulaunch.profiler.channel import segment, segment_writer, workers
    from gpulaunch.profiler.channel.layout import Hook

    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return  # already reported
    with tempfile.TemporaryDirectory(prefix="gpulaunch-doctor-") as directory:
        path = os.path.join(directory, "rank-0.bin")
        segment_writer.create(path, rank=0, local_rank=0, attempt=0)
        workers.create(os.path.join(directory, "workers-0.bin"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("GPULAUNCH_")}
        environ |= {"RANK": "0", "GPULAUNCH_CHANNEL_DIR": directory}
        try:
            # -P: files in the current directory must not be imported as parts of torch.
            rank = subprocess.run(
                [sys.executable, "-P", "-c", RANK_PROGRAM],
                env=environ,
                capture_output=True,
                timeout=IMPORT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = f"torch was not imported within {IMPORT_TIMEOUT_S:g} s"
            yield Finding(name="probe", status=Status.WARN, value=why, advice="check whether its file system is slow")
            return
        seen = segment.read(path)
    if not seen.armed:
        said = rank.stderr.decode("utf-8", "replace").strip().splitlines()
        value = f"not loaded into a process that imports torch: {said[-1] if said else 'unknown reason'}"
        yield Finding(
            name="probe", status=Status.WARN, value=value, advice="jobs run, but nothing in the ranks is measured"
        )
        return
    for hook in Hook:
        if hook is Hook.GPU_MEMORY_FRACTION:
            continue  # an option, which hooks into nothing
        name = f"probe {(hook.name or '').lower()}"
        if hook in seen.hooks_unavailable:
            advice = "its metrics will be missing; this torch may be too new for this version of gpulaunch"
            yield Finding(name=name, status=Status.WARN, value=seen.fault, advice=advice)
        elif hook in seen.hooks_armed:
            yield Finding(name=name, status=Status.OK, value="available")
        else:
            yield Finding(name=name, status=Status.OK, value="absent: no GPU that torch can use")


def traces() -> Iterator[Finding]:
    """`gpulaunch trace` needs a client that is part of torch."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return  # already reported
    major, minor, *_ = (*version.split("."), "0")
    if (int(major), int(minor)) >= _TRACES_FROM:
        yield Finding(name="traces", status=Status.OK, value=f"torch {version}")
    else:
        needed = ".".join(map(str, _TRACES_FROM))
        advice = f"gpulaunch trace needs torch {needed} or newer; everything else works"
        yield Finding(name="traces", status=Status.WARN, value=f"torch {version}", advice=advice)
