"""What a look at a rank's stack costs, and whether looks tell where time passes: `python benchmarks/stacks.py`.

The profiler's own reader and py-spy look into the same eight processes, which train a little and rest, in turns. The
cost is CPU time of the process that looks and of all that it starts; the first looks, at which the reader learns its
way, are not in it. From it follows how often the share of the sidecar that the profiler gives to stacks permits a look.

A stack changes while it is read, most often where Python calls Python. Three programs that do that in turns with
operations of torch measure their share of the time by a clock: the share of the looks, with its standard error, should
be the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _measure import machine, markdown

from gpulaunch.profiler.samplers.peek import Peek, StackSampler
from gpulaunch.profiler.samplers.pyspy import PySpy
from gpulaunch.profiler.samplers.stacks import BUDGET

RANKS = 8
PROGRAM = """
import time, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
print("ready", flush=True)
while True:
    model(torch.randn(8, 64)).sum().backward()
    time.sleep(0.05)
"""

SHARES = {
    "logging": "for n in range(300): log.info('step %d of %d: %.4f', n, n, 0.5)",
    "json.dumps": "json.dumps([{'step': n, 'losses': [n, n], 'of': {str(n): n}} for n in range(150)], indent=1)",
    "copy.deepcopy": "copy.deepcopy(model), copy.deepcopy(model)",
}
PROGRAM_OF_SHARES = """
import copy, json, logging, sys, time, torch
torch.set_num_threads(1)
logging.basicConfig(stream=open("/dev/null", "w"), format="%(asctime)s %(message)s", level=logging.INFO)
log = logging.getLogger("train")
model, a = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]), torch.randn(512, 512)
def in_python():
    WHAT
def in_torch():
    for _ in range(6):
        torch.relu(a @ a)
in_python(), in_torch()
print("ready", flush=True)
python_s = torch_s = 0.0
began_s = ended_s = time.perf_counter()
while ended_s - began_s < float(sys.argv[1]):
    then_s = time.perf_counter()
    in_python()
    between_s = time.perf_counter()
    in_torch()
    ended_s = time.perf_counter()
    python_s, torch_s = python_s + between_s - then_s, torch_s + ended_s - between_s
print(python_s / (python_s + torch_s), flush=True)
"""
LOOKS_PER_S = 20.0
"""Of the profiler, in the first seconds of a run."""


@contextmanager
def ranks(count: int) -> Generator[list[int]]:
    """Processes that train; their pids."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.extend(subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) for _ in range(count))
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline(), "a process has ended before it trained"
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def looks(sampler: StackSampler, pids: Sequence[int]) -> list[dict[str, Any]]:
    """One look into each process."""
    rows: list[dict[str, Any]] = []
    for pid in pids:
        wall_s, cpu_s = time.monotonic(), time.thread_time()
        look = sampler.look(pid)
        cost_s = time.thread_time() - cpu_s + look.cpu_s
        rows.append(
            {
                "cpu_us": 1e6 * cost_s,
                "wall_us": 1e6 * (time.monotonic() - wall_s),
                "frames": len(look.frames),
                "failed": look.failed,
            }
        )
        time.sleep(0.01)
    return rows


def summed_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    cpu_us = [row["cpu_us"] for row in rows]
    return {
        "looks": len(rows),
        "failed": sum(bool(row["failed"]) for row in rows),
        "cpu_us": statistics.median(cpu_us),
        "cpu_us_quartiles": statistics.quantiles(cpu_us, n=4)[::2],
        "wall_us": statistics.median(row["wall_us"] for row in rows),
        # What has to be paid is the mean: a look that had to be begun again is paid for too.
        "looks_per_s": BUDGET * 1e6 / statistics.fmean(cpu_us),
    }


def shares(what: str, samplers: Sequence[StackSampler], seconds: float) -> dict[str, Any]:
    """The share of a program's time in what it does in Python, by its clock and by looks of each sampler in turns."""
    command = [sys.executable, "-c", PROGRAM_OF_SHARES.replace("WHAT", SHARES[what]), str(seconds)]
    found = {sampler.name: Counter[str]() for sampler in samplers}
    rest_s = random.Random(0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the program has ended before it was ready"
        until_s = time.monotonic() + seconds - 0.5
        while time.monotonic() < until_s:
            for sampler in samplers:
                names = {frame.name for frame in sampler.look(process.pid).frames}
                found[sampler.name].update(names & {"in_python", "in_torch"} or {""})
                time.sleep(rest_s.uniform(0.5, 1.5) / LOOKS_PER_S)
        by_clock = float(process.stdout.readline())
    rows: dict[str, Any] = {"by_clock": by_clock}
    for name, of in found.items():
        looks_in_both = of["in_python"] + of["in_torch"]
        share = of["in_python"] / looks_in_both
        error = (share * (1.0 - share) / looks_in_both) ** 0.5
        rows[name] = {"share": share, "standard_error": error, "looks": looks_in_both, "without": of[""]}
    return rows


def table_of_shares(of: Mapping[str, dict[str, Any]], names: Sequence[str]) -> str:
    rows = [("share of a program's time", "by its clock", *names)]
    for what, each in of.items():
        cells = [f"{each[name]['share']:.1%} +- {each[name]['standard_error']:.1%}" for name in names]
        rows.append((what, f"{each['by_clock']:.1%}", *cells))
    return markdown(rows)


def table(summaries: Mapping[str, dict[str, Any]]) -> str:
    head = ("", "looks", "failed", "CPU per look", "quartiles", "wall time", f"looks/s in {BUDGET:.1%} of a core")
    rows = [
        (
            name,
            str(of["looks"]),
            str(of["failed"]),
            f"{of['cpu_us']:.0f} us",
            "{:.0f} .. {:.0f} us".format(*of["cpu_us_quartiles"]),
            f"{of['wall_us']:.0f} us",
            f"{of['looks_per_s']:.1f}",
        )
        for name, of in summaries.items()
    ]
    return markdown([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="What a look at a rank's stack costs, and tells.")
    parser.add_argument("--turns", type=int, default=30, help="looks into each of the processes, by either reader")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each program that measures its shares")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()

    samplers: list[StackSampler] = [Peek(), PySpy()]
    for sampler in samplers:
        if why := sampler.absent():
            sys.exit(why)
    found: dict[str, list[dict[str, Any]]] = {sampler.name: [] for sampler in samplers}
    assert len(found) == len(samplers), f"the own reader does not work here, py-spy stands in for it: {list(found)}"
    with ranks(RANKS) as pids:
        for sampler in samplers:
            looks(sampler, pids)
        for turn in range(options.turns):
            for sampler in samplers if turn % 2 else reversed(samplers):
                found[sampler.name] += looks(sampler, pids)
    summaries = {name: summed_up(rows) for name, rows in found.items()}
    print(table(summaries), flush=True)
    of_time = {what: shares(what, samplers, options.seconds) for what in SHARES}
    print(f"\n{table_of_shares(of_time, list(found))}")
    result = {"machine": machine(), "budget_cores": BUDGET, "readers": summaries, "shares": of_time}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
