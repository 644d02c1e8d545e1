"""Launch, memory and recovery, side by side with torchrun: `python benchmarks/launch.py`.

Every comparison alternates the launchers in one run and gives medians, so that a slow spell of the machine hits all.
torchrun gets its best settings (_measure.py).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _measure import BOUND_S, GPULAUNCH, HERE, TORCHRUN_BEST, environment, job, kib, machine, markdown, median

LAUNCHERS = {"gpulaunch": GPULAUNCH, "torchrun": TORCHRUN_BEST}


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def one_start_and_recovery(launcher: str, ranks: int) -> dict[str, float]:
    """Start a job, weigh it, kill its rank 1, wait until all ranks step again."""
    seen: dict[str, float] = {}
    with job(LAUNCHERS[launcher], ranks, "ddp_job.py", restarts=3) as one:
        first = one.stepping()
        if first is None:
            return seen
        seen["start_s"] = first[0] - one.started_s
        pids = first[1]
        time.sleep(1.0)  # warm: the job has been stepping
        seen["ranks_pss_mib"] = sum(kib(pid, "smaps_rollup", "Pss:") for pid in pids.values()) / 1024
        seen["agent_rss_mib"] = kib(one.process.pid, "status", "VmRSS:") / 1024
        for child in children(one.process.pid):
            if comm(child) == "gpulaunch-side":
                seen["sidecar_rss_mib"] = kib(child, "status", "VmRSS:") / 1024
        victim = pids[1]
        pidfd = os.pidfd_open(victim)
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        select.select([pidfd], [], [], 10)
        reported_s = time.monotonic()  # the kernel has told us; when did it tell the agent?
        os.close(pidfd)
        again = one.stepping(after=max(one.attempts()))
        seen["recovered"] = float(again is not None)
        if again is not None:
            seen["recover_s"] = again[0] - killed_s
        if launcher == "gpulaunch":
            for line in (one.work / "run" / "events.jsonl").read_text().splitlines():
                event = json.loads(line)
                if event["event"] == "rank_ended" and event["pid"] == victim:
                    seen["death_seen_ms"] = (event["seen_s"] - reported_s) * 1e3
    return seen


def one_import() -> float:
    started_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=True, env=environment(GPULAUNCH))
    return time.monotonic() - started_s


def one_exit(launcher: str, ranks: int) -> int:
    with tempfile.TemporaryDirectory(prefix="gpulaunch-bench-") as work:
        return subprocess.run(
            [*LAUNCHERS[launcher].command(ranks, 0, Path(work)), str(HERE / "exit_job.py")],
            env=environment(LAUNCHERS[launcher]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=BOUND_S,
        ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=10, help="alternating runs of each launcher")
    parser.add_argument("--exits", type=int, default=100, help="gpulaunch jobs of 4 ranks that must exit 0")
    parser.add_argument("--torchrun-exits", type=int, default=12, help="the same under torchrun (slower)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    runs: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    imports: list[float] = []
    one_import()  # bytecode and page cache
    for number in range(options.runs):
        imports.append(one_import())
        for launcher in LAUNCHERS:
            runs[launcher].append(one_start_and_recovery(launcher, options.ranks))
            print(f"run {number + 1}/{options.runs} {launcher}: {runs[launcher][-1]}", file=sys.stderr, flush=True)
    exits = {
        "gpulaunch": [one_exit("gpulaunch", 4) for _ in range(options.exits)],
        "torchrun": [one_exit("torchrun", 4) for _ in range(options.torchrun_exits)],
    }
    figures = summarise(runs, imports, exits, options.ranks)
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps({"figures": figures, "runs": runs, "imports_s": imports}, indent=1) + "\n")


def summarise(
    runs: dict[str, list[dict[str, float]]], imports: list[float], exits: dict[str, list[int]], ranks: int
) -> dict[str, object]:
    def of(launcher: str, key: str) -> float:
        return median([run[key] for run in runs[launcher] if key in run])

    return {
        "ranks": ranks,
        "runs": len(imports),
        **machine(),
        "import_s": median(imports),
        **{
            f"{launcher}_{key}": of(launcher, key)
            for launcher in LAUNCHERS
            for key in ("start_s", "recover_s", "ranks_pss_mib", "agent_rss_mib")
        },
        "start_ratio": median([b["start_s"] / a["start_s"] for a, b in pairs(runs, "start_s")]),
        "start_over_import": median(
            [run["start_s"] / own for run, own in zip(runs["gpulaunch"], imports, strict=True) if "start_s" in run]
        ),
        "recover_ratio": median([b["recover_s"] / a["recover_s"] for a, b in pairs(runs, "recover_s")]),
        "pss_ratio": median([b["ranks_pss_mib"] / a["ranks_pss_mib"] for a, b in pairs(runs, "ranks_pss_mib")]),
        **{
            f"{launcher}_recovered": f"{sum(int(run.get('recovered', 0)) for run in of_one)} of {len(of_one)}"
            for launcher, of_one in runs.items()
        },
        "sidecar_rss_mib": of("gpulaunch", "sidecar_rss_mib"),
        "death_seen_ms": of("gpulaunch", "death_seen_ms"),
        **{
            f"{launcher}_exit_0": f"{sum(code == 0 for code in codes)} of {len(codes)}"
            for launcher, codes in exits.items()
        },
    }


def pairs(runs: dict[str, list[dict[str, float]]], key: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    """(gpulaunch, torchrun) of each alternation in which both have the figure."""
    both = zip(runs["gpulaunch"], runs["torchrun"], strict=True)
    return [(ours, theirs) for ours, theirs in both if key in ours and key in theirs]


def table(f: dict[str, object]) -> str:
    n = f["ranks"]

    def both(key: str, form: str) -> tuple[str, str]:
        return form.format(f[f"gpulaunch_{key}"]), form.format(f[f"torchrun_{key}"])

    rows = [
        ("", "gpulaunch", "torchrun", "ratio"),
        (f"command -> first DDP step on all of {n} ranks", *both("start_s", "{:.2f} s"), f"{f['start_ratio']:.1f}x"),
        (
            "the same, over one `import torch, torch._dynamo`",
            f"{f['start_over_import']:.2f}x",
            "",
            f"(import {f['import_s']:.2f} s)",
        ),
        (
            f"SIGKILL of a rank -> all {n} stepping again",
            *both("recover_s", "{:.2f} s"),
            f"{f['recover_ratio']:.0f}x",
        ),
        ("recovered", *both("recovered", "{}"), ""),
        (f"host memory of {n} ranks (sum of PSS)", *both("ranks_pss_mib", "{:.0f} MiB"), f"{f['pss_ratio']:.1f}x"),
        ("a script that ran to its end exits 0, 4 ranks", *both("exit_0", "{}"), ""),
        ("agent RSS", *both("agent_rss_mib", "{:.0f} MiB"), ""),
        ("sidecar RSS", f"{f['sidecar_rss_mib']:.0f} MiB", "", ""),
        (
            "death of a rank seen by the agent, after this benchmark saw it (negative: before)",
            f"{f['death_seen_ms']:.2f} ms",
            "",
            "",
        ),
    ]
    return markdown(rows)


if __name__ == "__main__":
    main()
