"""Jobs of three hosts, side by side with torchrun: `python benchmarks/multinode.py` (needs root).

The hosts are network, UTS and PID namespaces of this machine (tests/multinode). The ranks are programs without torch,
which make steps together over TCP, so that what is timed is the launcher; both start plain interpreters. torchrun has
its best settings: c10d, a last call of 1 s, polls every 10 ms, a new store for each restart. Each pass is one job:

    form        three agents start at once -> all ranks step
    rank kill   SIGKILL of a rank on another host than the leader's -> all step again
    power off   a host loses its power without a word -> the other two step
    rejoin      the agent of that host starts again -> all three step
    cable cut   a host is cut off -> the other two step
    flap        a host is cut off for 5 s: was anything restarted?
    agent kill  SIGKILL of the agent of one host -> the other two step

What has not happened within 60 s counts as "never".
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "multinode")]

from _measure import BIN, machine, markdown, median  # noqa: E402
from hosts import Host, hosts  # noqa: E402

from job import Job  # noqa: E402

BOUND_S = 60.0
WARM_S = 1.0
ALL = ("host0", "host1", "host2")
Figures = dict[str, float]
"""Seconds, infinite for never; of `flap` the number of restarts."""


def gpulaunch(directory: Path) -> Job:
    """With a last call of 1 s, and otherwise as it comes."""
    return Job(directory, "2:3", "--rdzv-conf", "last_call_timeout=1", "--insecure", "--max-restarts", "20")


def torchrun(directory: Path) -> Job:
    """With its best settings."""
    command = [
        *(str(BIN / "torchrun"), "--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "20"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "job"),
        *("--rdzv-conf", "join_timeout=120,last_call_timeout=1", "--monitor-interval", "0.01"),
    ]
    return Job(directory, "2:3", command=command, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


LAUNCHERS: dict[str, Callable[[Path], Job]] = {"gpulaunch": gpulaunch, "torchrun": torchrun}


def timed(job: Job, names: tuple[str, ...], after_s: float) -> float:
    """Seconds until these hosts, and no others, step together."""
    try:
        return job.until_trains(*names, after_s=after_s, within_s=BOUND_S) - after_s
    except AssertionError:
        return float("inf")


def form(job: Job, three: list[Host]) -> float:
    """Start all three."""
    began_s = time.monotonic()
    job.start(*three)
    took_s = timed(job, ALL, began_s)
    time.sleep(WARM_S)
    return took_s


def faults(job: Job, three: list[Host]) -> Figures:
    """A killed rank, a lost host, and its return."""
    found: Figures = {"form": form(job, three)}
    killed_s = time.monotonic()
    os.kill(job.nodes["host1"].rank_pid(), signal.SIGKILL)
    found["rank kill"] = timed(job, ALL, killed_s)
    time.sleep(WARM_S)
    off_s = time.monotonic()
    three[2].power_off()
    found["power off"] = timed(job, ALL[:2], off_s)
    if found["power off"] < BOUND_S:
        back_s = time.monotonic()
        three[2].heal()
        job.start(three[2])
        found["rejoin"] = timed(job, ALL, back_s)
    return found


def cut(job: Job, three: list[Host]) -> Figures:
    """A short cut, then a lasting one."""
    form(job, three)
    three[2].cut()
    time.sleep(5.0)
    three[2].heal()
    time.sleep(15.0)
    found: Figures = {"flap": float(max(step["attempt"] for step in job.nodes["host0"].steps()))}
    cut_s = time.monotonic()
    three[2].cut()
    found["cable cut"] = timed(job, ALL[:2], cut_s)
    return found


def agent(job: Job, three: list[Host]) -> Figures:
    """A killed agent."""
    form(job, three)
    killed_s = time.monotonic()
    job.signal("host2", signal.SIGKILL)
    return {"agent kill": timed(job, ALL[:2], killed_s)}


def main() -> None:
    """Measure, print a table, and write benchmarks/results/multinode.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    options = parser.parse_args()
    names = options.launchers.split(",")
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for _ in range(options.runs):
        for play in (faults, cut, agent):
            for name in names:
                with tempfile.TemporaryDirectory() as directory, hosts(3) as three:
                    for what, figure in play(LAUNCHERS[name](Path(directory)), three).items():
                        found[name].setdefault(what, []).append(figure)
                        print(f"{name} {what}: {figure:.2f}", file=sys.stderr, flush=True)
    columns = ("form", "rank kill", "power off", "rejoin", "cable cut", "agent kill", "flap")
    rows = [[what, *(cell(found[name].get(what, [])) for name in names)] for what in columns]
    print(markdown([["", *names], *rows]))
    result = {"machine": machine(), "runs": options.runs, "seconds": found}
    (ROOT / "benchmarks" / "results" / "multinode.json").write_text(json.dumps(result, indent=1) + "\n")


def cell(figures: list[float]) -> str:
    """The median of those that came to an end, the worst, and how many did."""
    ended = [figure for figure in figures if figure < BOUND_S]
    if not ended:
        return f"never (0 of {len(figures)})"
    return f"{median(ended):.2f} ({max(ended):.2f}), {len(ended)} of {len(figures)}"


if __name__ == "__main__":
    main()
