"""Fifty scrapers at once: does one of them lose a sample, and does a rank make fewer steps for it?

    python benchmarks/load.py [--ranks 64] [--scrapers 50] [--hz 10] [--seconds 60] [--pairs 40] [--json FILE]

A real sidecar over 63 simulated ranks that make ten steps a second each and a real one that trains as fast as it can.
First `--seconds` of scraping without a pause: what is lost is judged as `_samples.py` says, and when the training has
ended, the very steps that were made must come to be told. Then pairs of blocks with the scrapers and without, there
and back: what counts is the ratio of the real rank's steps per second, its median over the pairs and the interval
that it lies in; and beside it that of its steps per second on a core, which a busy machine disturbs less. The scrapers
are one process on this machine, at the sidecar's niceness: `scrapers_cores` is what they take of it, and belongs to the
machine that scrapes. Exit 1 if something is lost, or if all of the interval says that the rank is slower by more than a
hundredth; `slower_by_at_most` is what the interval does not rule out.

Pairs during which the host of a virtual machine took more than 0.05 of a core away say nothing of scrapers: they are
left out, and counted.

On a machine that is busy otherwise: `chrt -f 1 python benchmarks/load.py`. Then the sidecar runs before the real rank,
which is worse for the rank than in a job. What was missed only because a core stood still (`_witness.py`) is counted
apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _host import STOLEN_CORES, processor_s
from _node import AS_PROMETHEUS, HERE, Node, ask, machine, node
from _pairs import interval, there_and_back
from _samples import counters, judge, pages_in, steps
from _witness import witnesses
from scrape import put

from gpulaunch.profiler.channel.segment import SegmentReader

_SLOWER = 0.99
_NICE = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--scrapers", type=int, default=50)
    parser.add_argument("--hz", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--block", type=float, default=4.0, help="seconds of each half of a pair")
    parser.add_argument("--json", type=Path, help="put the result into this file, under `load`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = {"machine": machine(), **_measure(Path(directory), args)}
    print(json.dumps(result, indent=1))
    if args.json:
        put(args.json, "load", result)
    return 0 if result["nothing_lost"] and not result["slower"] else 1


def _measure(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    kept = directory / "pages"
    kept.mkdir()
    channel = directory / "channel"
    channel.mkdir()
    with node(channel, args.ranks, program="load_job.py") as on, _scrapers(on, args, kept) as scrapers:
        rank = SegmentReader(str(channel / "rank-0.bin"))
        time.sleep(5)  # what is done once has been done
        late = _late(on)
        with witnesses() as stalls:
            long = scrapers.run(args.seconds)
        late = _late(on) - late
        blocks: dict[bool, list[_Block]] = {True: [], False: []}
        for scraped in there_and_back(True, False) * (args.pairs // 2):
            blocks[scraped].append(_block(on, rank, scrapers, args.block, scraped=scraped))
        made = on.settle()
        assert on.rank is not None, "it was started with one"
        on.rank.terminate()
        on.rank.wait()
        told = _told_in_the_end(on, made | {0: rank.read().steps})
        rank.close()
    sequences: list[list[int]] = long.pop("sequences")
    missed: list[tuple[float, float]] = long.pop("missed_between")
    # Without that, it would have been there in time.
    excused = sum(end - begin - stalls.held_up_s(begin, end) < 1 / args.hz for begin, end in missed)
    long |= {"missed_for_a_core_that_stood_still": excused, "cores_stood_still_s": stalls.stood_still_s}
    got = {number for sequence in sequences for number in sequence}
    pages = {number: page for number, page in pages_in(kept).items() if number in got}
    lost = judge(pages, sequences, ranks=args.ranks)
    pairs = list(zip(blocks[True], blocks[False], strict=True))
    calm = [pair for pair in pairs if max(block.stolen_cores for block in pair) <= STOLEN_CORES]
    ratios = {of: [getattr(one, of) / getattr(other, of) for one, other in calm] for of in ("pace", "cpu_pace")}
    within = interval(ratios["pace"])
    nothing_lost = not (
        long["failed"] or long["missed"] > excused or lost["pages_cut_short"] or lost["counters_fallen"]
    )
    return {
        "ranks": args.ranks,
        "scrapers": args.scrapers,
        "hz": args.hz,
        "long": {**long, **lost, "late_refreshes": late},
        "steps_told_in_the_end": told,
        "nothing_lost": nothing_lost and not lost["refreshes_not_seen"] and told == "all",
        "pairs": len(calm),
        "pairs_left_out": len(pairs) - len(calm),
        "seconds_each": args.block,
        "steps_per_s": round(statistics.median(block.pace for block in blocks[False]), 2),
        "ratio": _told(ratios["pace"]),
        "ratio_of_cpu_time": _told(ratios["cpu_pace"]),
        **{
            f"{of}_{'scraped' if scraped else 'unscraped'}": round(
                statistics.median(getattr(block, of) for block in blocks[scraped]), 3
            )
            for of in ("sidecar_cores", "machine_cores")
            for scraped in (True, False)
        },
        "scrapers_cores": round(statistics.median(block.scrapers_cores for block in blocks[True]), 3),
        "slower": within is not None and within[1] < _SLOWER,
        "slower_by_at_most": within and round(max(0.0, 1 - within[0]), 4),
    }


def _told(ratios: list[float]) -> dict[str, Any]:
    within = interval(ratios)
    return {
        "median": round(statistics.median(ratios), 4) if ratios else None,
        "interval": within and [round(bound, 4) for bound in within],
        "all": [round(ratio, 4) for ratio in ratios],
    }


class _Scrapers:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, seconds: float) -> dict[str, Any]:
        """Scrape for so long; what `_scrapers.py` tells."""
        assert self._process.stdin is not None, "it was started with one"
        assert self._process.stdout is not None, "it was started with one"
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told


@contextlib.contextmanager
def _scrapers(on: Node, args: argparse.Namespace, kept: Path) -> Generator[_Scrapers]:
    argv = ["nice", "-n", str(_NICE), sys.executable, str(HERE / "_scrapers.py"), *map(str, on.address)]
    argv += [str(args.scrapers), str(args.hz), str(kept)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it was started with one"
        process.stdout.readline()  # it is ready
        yield _Scrapers(process)


@dataclass(frozen=True, kw_only=True)
class _Block:
    pace: float
    """Steps per second of the real rank."""
    cpu_pace: float
    """Steps per second that it was on a core."""
    sidecar_cores: float
    scrapers_cores: float
    machine_cores: float
    """All that was in use, by whomever."""
    stolen_cores: float
    """What the host took away."""


def _block(on: Node, rank: SegmentReader, scrapers: _Scrapers, seconds: float, *, scraped: bool) -> _Block:
    time.sleep(0.5)  # what belongs to the block before is over
    assert on.rank is not None, "it was started with one"
    process = psutil.Process(on.rank.pid)
    before, rank_s = rank.read(), sum(process.cpu_times()[:2])
    cpu_s, (busy_s, stolen_s), began_s = on.sidecar_cpu_s(), processor_s(), time.monotonic()
    told: dict[str, Any] = {}
    if scraped:
        told = scrapers.run(seconds)
    else:
        time.sleep(seconds)
    after, rank_s, lasted_s = rank.read(), sum(process.cpu_times()[:2]) - rank_s, time.monotonic() - began_s
    busy_s, stolen_s = (now_s - then_s for now_s, then_s in zip(processor_s(), (busy_s, stolen_s), strict=True))
    # From the end of one step to the end of another: no part of a step is counted.
    took_s = (after.last_step_monotonic_ns - before.last_step_monotonic_ns) / 1e9
    return _Block(
        pace=(after.steps - before.steps) / took_s,
        cpu_pace=(after.steps - before.steps) / rank_s,
        sidecar_cores=(on.sidecar_cpu_s() - cpu_s) / lasted_s,
        scrapers_cores=told.get("cores", 0.0),
        machine_cores=busy_s / lasted_s,
        stolen_cores=stolen_s / lasted_s,
    )


def _late(on: Node) -> float:
    return counters(ask(on.address, "/metrics", Accept="text/plain")[1])["gpulaunch_sidecar_late_refreshes_total"]


def _told_in_the_end(on: Node, made: dict[int, int]) -> str:
    """Whether the page comes to tell the steps that were made; else what it tells instead."""
    until_s = time.monotonic() + 20
    while True:
        headers = {**AS_PROMETHEUS, "Accept-Encoding": "identity"}
        told = steps(counters(ask(on.address, "/metrics", **headers)[1]))
        if told == made:
            return "all"
        if time.monotonic() > until_s:
            return str({rank: (steps, told.get(rank)) for rank, steps in made.items() if told.get(rank) != steps})
        time.sleep(0.5)


if __name__ == "__main__":
    raise SystemExit(main())
