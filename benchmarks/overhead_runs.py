"""The runs of benchmarks/overhead.py: one job, observed in one of several ways, and what it tells."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _host import STOLEN_CORES, processor_s
from _measure import BIN, BOUND_S, GPULAUNCH, Job, Launcher, gpulaunch, job, kib, notes_of, page_of

__all__ = [
    "PLAIN",
    "PROFILED",
    "PY_SPY",
    "SETTLED",
    "SETTLED_PLAIN",
    "STACKS_HZ",
    "Way",
    "one_run",
    "pause_s",
    "sidecar",
    "traceml",
    "until_calm",
]

Row = dict[str, Any]

STACKS_HZ = 2
"""How often the profiler looks into a rank, where that costs it no more than its share."""
WARM_S = 10.0
SETTLED_S = 75.0
"""By then the profiler observes as few steps as its budget asks for: it waits for 30 s."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a job is launched and observed."""

    name: str
    launcher: Launcher
    launched_by: str = "gpulaunch"
    base: bool = False
    """Not observed: what others are compared with."""
    profiled: bool = False
    py_spy: bool = False
    traceml: bool = False
    settle_s: float = 2.0
    """What starts beside the ranks has started, and loaders are full: steps count from then on."""
    watched: float = 1.0
    """How much longer than others it is watched."""


PLAIN = Way(name="without", launcher=gpulaunch("--no-profile"), base=True)
PROFILED = Way(name="profiler", launcher=GPULAUNCH, profiled=True)
SETTLED = Way(
    name=f"profiler, after {SETTLED_S:.0f} s", launcher=GPULAUNCH, profiled=True, settle_s=SETTLED_S, watched=3.0
)
SETTLED_PLAIN = Way(name="without", launcher=PLAIN.launcher, base=True, settle_s=SETTLED_S, watched=SETTLED.watched)
PY_SPY = Way(name=f"py-spy at {STACKS_HZ} Hz", launcher=PLAIN.launcher, py_spy=True)


def traceml(path: str) -> tuple[Way, Way]:
    """Under TraceML's launcher, observed and not.

    Its lightest settings: no live view, its own interval (2 s; the profiler's is 1 s), output that it does not copy.
    """

    def launched(*options: str) -> Launcher:
        def command(ranks: int, _: int, __: Path) -> list[str]:
            return [path, "run", "--mode", "summary", "--no-save-training-output", *options,
                    f"--nproc-per-node={ranks}"]  # fmt: skip

        return Launcher(command=command, before_arguments=("--args",))

    name = "TraceML"
    return (
        Way(name=name, launcher=launched(), launched_by=name, traceml=True),
        Way(name=f"{name}'s launcher alone", launcher=launched("--disable-traceml"), launched_by=name, base=True),
    )


def one_run(way: Way, ranks: int, pause: float, seconds: float) -> Row:
    """What a job of so many ranks has told, the mean over its ranks."""
    began_s = time.monotonic()
    arguments = ["--pause-s", str(pause), "--settle-s", str(way.settle_s), "--seconds", str(seconds * way.watched)]
    arguments += ["--traceml"] if way.traceml else []
    with job(way.launcher, ranks, "overhead_job.py", *arguments, restarts=0) as one, contextlib.ExitStack() as stack:
        if way.py_spy:
            stack.enter_context(py_spy(one, ranks_of(one, ranks)))
        told = notes_of(one, ranks)
        pss_kib = sum(pss_of(pid) for pid in one.processes())
        pages = {row["rank"]: page_of(row["channel_dir"], row["rank"]) for row in told}
        seen_by_probe: Row = {}
        if way.profiled:
            found = [page for page in pages.values() if page]
            seen_by_probe = {
                "probe_us_per_step": statistics.fmean(page.probe_ns_total / page.steps / 1e3 for page in found),
                "unobserved_ratio": statistics.fmean(page.unobserved_steps / page.steps for page in found),
            }
        for row in told:
            seen = pages[row["rank"]]
            steps = seen.steps if seen else 0
            assert steps >= row["steps"] if way.profiled else not steps, f"{way.name}: the probe saw {steps} steps"
        if way.traceml:
            one.close()
            seen, steps = steps_seen_by_traceml(one.work), sum(row["steps"] for row in told)
            assert seen >= steps / 2, f"TraceML saw {seen} of {steps} steps:\n{log_of(one)}"
    return {
        "steps_per_s": statistics.fmean(row["steps"] / row["seconds"] for row in told),
        "median_step_us": statistics.fmean(row["median_step_us"] for row in told),
        "cpu_us_per_step": 1e6 * statistics.fmean(row["cpu_s"] / row["steps"] for row in told),
        "busy_cores": statistics.fmean(row["busy_cores"] for row in told),
        "stolen_cores": statistics.fmean(row["stolen_cores"] for row in told),
        "pss_mib": pss_kib / 1024,
        "wall_s": time.monotonic() - began_s,
        **seen_by_probe,
    }


def pause_s(ranks: int, step_ms: float) -> float:
    """How long to pause in a step that is to take so long on this machine, unobserved.

    Found once and then left alone, so that what observing costs is not made up for.
    """
    guess_s = max(0.0, step_ms - 1.0) / 1e3
    step_s = 1 / one_run(PLAIN, ranks, guess_s, 3.0)["steps_per_s"]
    return max(0.0, guess_s - step_s + step_ms / 1e3)


def until_calm(within_s: float) -> None:
    """Wait until the host takes nothing from a busy core for two seconds; so long at most."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        before_s, end_s = processor_s()[1], time.monotonic() + 2.0
        while time.monotonic() < end_s:
            pass
        if processor_s()[1] - before_s <= 2.0 * STOLEN_CORES:
            return
        time.sleep(2.0)


def sidecar(seconds: float) -> Row:
    """CPU and memory of the sidecar while eight ranks make steps of about 20 ms, with all that it starts."""
    arguments = ("--pause-s", "0.019", "--seconds", str(WARM_S + seconds))
    with job(GPULAUNCH, 8, "overhead_job.py", *arguments, restarts=0) as one:
        pid = group_of(one)["sidecar_pid"]
        time.sleep(WARM_S)
        before_s, at_s = cpu_s(pid), time.monotonic()
        told = notes_of(one, 8)
        watched_s = time.monotonic() - at_s
        return {
            "cores": (cpu_s(pid) - before_s) / watched_s,
            "seconds": watched_s,
            "rss_bytes": kib(pid, "status", "VmRSS") * 1024,
            "largest_rss_bytes": kib(pid, "status", "VmHWM") * 1024,
            "steps_per_s": statistics.fmean(row["steps"] / row["seconds"] for row in told),
            "busy_cores": statistics.fmean(row["busy_cores"] for row in told),
        }


def group_of(one: Job) -> Mapping[str, Any]:
    """Who runs, as the agent says."""
    path = one.work / "run" / "group.json"
    until_s = time.monotonic() + BOUND_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError, ValueError):
            group: Mapping[str, Any] = json.loads(path.read_text())
            return group
        time.sleep(0.05)
    sys.exit(f"no {path}\n{log_of(one)}")


def ranks_of(one: Job, ranks: int) -> list[int]:
    found = [rank["pid"] for rank in group_of(one)["ranks"]]
    assert len(found) == ranks, found
    return found


@contextlib.contextmanager
def py_spy(one: Job, pids: Sequence[int]) -> Generator[None]:
    """A py-spy on each process, without stopping it, idle or not, as the profiler looks."""
    log = one.work / "py-spy-log"
    watching: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for pid in pids:
            stacks = one.work / f"py-spy-{pid}"
            command = [str(BIN / "py-spy"), "record", "--nonblocking", "--idle", "--rate", str(STACKS_HZ),
                       "--pid", str(pid), "--format", "raw", "--output", str(stacks), "--duration", "3600"]  # fmt: skip
            with open(log, "ab") as out:
                watching[stacks] = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **one.mark})
        yield
        assert all(process.poll() is None for process in watching.values()), f"py-spy has ended\n{log.read_text()}"
    finally:
        for process in watching.values():
            process.send_signal(signal.SIGINT)
        for process in watching.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    assert all(stacks.stat().st_size for stacks in watching), f"py-spy took no stacks\n{log.read_text()}"


def steps_seen_by_traceml(work: Path) -> int:
    """How many steps of all ranks its summary is made from."""
    found = list(work.glob("logs/*/final_summary.json"))
    if len(found) != 1:
        return 0
    summary = json.loads(found[0].read_text())
    seen: int = summary["analysis_window"]["sections"]["step_time"]["samples"]
    return seen


def cpu_s(pid: int) -> float:
    """Of a process, and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def pss_of(pid: int) -> int:
    """KiB; 0 if it has just ended."""
    with contextlib.suppress(OSError, LookupError):
        return kib(pid, "smaps_rollup", "Pss:")
    return 0


def log_of(one: Job) -> str:
    return one.log.read_text(errors="replace")[-2000:]
