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
    form 2, 4   so many agents start at once -> all ranks step
    late join   the agent of a third host starts -> all three step
    spare       one of two hosts loses its power while a third waits -> the first and the third step
    leader      SIGKILL of the agent of the first host, started again at once -> all three step
    etcd        with the plan in etcd, a member on each host: the first host loses its power -> the other two step

What has not happened within 60 s counts as "never". `--plays` measures some of them again, and keeps the rest of
benchmarks/results/multinode.json.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "multinode")]

import etcd  # noqa: E402
from _measure import BIN, machine, markdown, median  # noqa: E402
from hosts import Host, hosts  # noqa: E402

from job import Job  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "multinode.json"
BOUND_S = 60.0
WARM_S = 1.0
ALL = ("host0", "host1", "host2")
OURS = ("--rdzv-conf", "last_call_timeout=1", "--insecure", "--max-restarts", "20")
Figures = dict[str, float]
"""Seconds, infinite for never; of `flap` the number of restarts."""


def gpulaunch(directory: Path, nnodes: str) -> Job:
    """With a last call of 1 s, and otherwise as it comes."""
    return Job(directory, nnodes, *OURS)


def torchrun(directory: Path, nnodes: str) -> Job:
    """With its best settings."""
    command = [
        *(str(BIN / "torchrun"), "--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", "20"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "job"),
        *("--rdzv-conf", "join_timeout=120,last_call_timeout=1", "--monitor-interval", "0.01"),
    ]
    return Job(directory, nnodes, command=command, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


LAUNCHERS: dict[str, Callable[[Path, str], Job]] = {"gpulaunch": gpulaunch, "torchrun": torchrun}


def timed(job: Job, names: tuple[str, ...], after_s: float, before: str = "") -> float:
    """Seconds until these hosts, and no others, step together; `before`: steps with this store do not count."""
    try:
        return job.until_trains(*names, after_s=after_s, before=before, within_s=BOUND_S) - after_s
    except AssertionError:
        return float("inf")


def form(job: Job, those: list[Host]) -> float:
    """Start all of them."""
    began_s = time.monotonic()
    job.start(*those)
    took_s = timed(job, tuple(host.name for host in those), began_s)
    time.sleep(WARM_S)
    return took_s


def faults(job: Job, three: list[Host]) -> Figures:
    """A killed rank, a lost host, and its return."""
    found: Figures = {"form": form(job, three)}
    if found["form"] > BOUND_S:
        return found
    before, killed_s = job.store(), time.monotonic()
    os.kill(job.nodes["host1"].rank_pid(), signal.SIGKILL)
    found["rank kill"] = timed(job, ALL, killed_s, before)
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


def late(job: Job, three: list[Host]) -> Figures:
    """A host that comes late."""
    form(job, three[:2])
    came_s = time.monotonic()
    job.start(three[2])
    return {"late join": timed(job, ALL, came_s)}


def spare(job: Job, three: list[Host]) -> Figures:
    """A host that waits takes the place of a lost one."""
    form(job, three[:2])
    job.start(three[2])
    time.sleep(5.0)
    off_s = time.monotonic()
    three[1].power_off()
    return {"spare": timed(job, ("host0", "host2"), off_s)}


def leader(job: Job, three: list[Host]) -> Figures:
    """The agent of the first host, where the plan or the store is, ends and comes back."""
    form(job, three)
    before, killed_s = job.store(), time.monotonic()
    job.signal("host0", signal.SIGKILL)
    job.start(three[0])
    return {"leader": timed(job, ALL, killed_s, before)}


def first_host(job: Job, three: list[Host]) -> Figures:
    """The loss of the first host, and of the member of etcd on it."""
    etcd.on_hosts(three, job.directory)
    form(job, three)
    off_s = time.monotonic()
    three[0].power_off()
    return {"etcd": timed(job, ALL[1:], off_s)}


@dataclass(frozen=True, kw_only=True)
class Play:
    """A job that something happens to."""

    run: Callable[[Job, list[Host]], Figures]
    nnodes: str = "2:3"
    num_hosts: int = 3
    columns: tuple[str, ...]
    """What is measured."""


PLAYS = {
    "faults": Play(run=faults, columns=("form", "rank kill", "power off", "rejoin")),
    "cut": Play(run=cut, columns=("cable cut", "flap")),
    "agent": Play(run=agent, columns=("agent kill",)),
    "two": Play(run=lambda job, two: {"form 2": form(job, two)}, nnodes="2", num_hosts=2, columns=("form 2",)),
    "four": Play(run=lambda job, four: {"form 4": form(job, four)}, nnodes="4", num_hosts=4, columns=("form 4",)),
    "late": Play(run=late, columns=("late join",)),
    "spare": Play(run=spare, nnodes="2", columns=("spare",)),
    "leader": Play(run=leader, nnodes="3", columns=("leader",)),
    "etcd": Play(run=first_host, columns=("etcd",)),
}


def job_of(name: str, play: str, directory: Path) -> Job:
    """The job of a launcher; only ours has the plan in etcd."""
    if play == "etcd":
        meets = ("--rdzv-backend", "etcd", "--rdzv-endpoint", ",".join(ALL), "--rdzv-id", "job")
        return Job(directory, PLAYS[play].nnodes, *OURS, meets=meets)
    return LAUNCHERS[name](directory, PLAYS[play].nnodes)


def main() -> None:
    """Measure, print a table, and write benchmarks/results/multinode.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--plays", default=",".join(PLAYS), help=", ".join(PLAYS))
    options = parser.parse_args()
    names, plays = options.launchers.split(","), options.plays.split(",")
    found: dict[str, dict[str, list[float]]] = {name: {} for name in LAUNCHERS}
    for _ in range(options.runs):
        for play in plays:
            for name in names if play != "etcd" else ["gpulaunch"]:
                with tempfile.TemporaryDirectory() as directory, hosts(PLAYS[play].num_hosts) as those:
                    for what, figure in PLAYS[play].run(job_of(name, play, Path(directory)), those).items():
                        found[name].setdefault(what, []).append(figure)
                        print(f"{name} {what}: {figure:.2f}", file=sys.stderr, flush=True)
    if RESULTS.exists() and set(plays) != set(PLAYS):
        before: dict[str, dict[str, list[float]]] = json.loads(RESULTS.read_text())["seconds"]
        found = {name: {**before.get(name, {}), **found[name]} for name in LAUNCHERS}
    columns = [what for play in PLAYS.values() for what in play.columns]
    rows = [[what, *(cell(found[name].get(what, [])) for name in LAUNCHERS)] for what in columns]
    print(markdown([["", *LAUNCHERS], *rows]))
    RESULTS.write_text(json.dumps({"machine": machine(), "seconds": found}, indent=1) + "\n")


def cell(figures: list[float]) -> str:
    """The median of those that came to an end, the worst, and how many did."""
    ended = [figure for figure in figures if figure < BOUND_S]
    if not figures:
        return ""
    if not ended:
        return f"never (0 of {len(figures)})"
    return f"{median(ended):.2f} ({max(ended):.2f}), {len(ended)} of {len(figures)}"


if __name__ == "__main__":
    main()
