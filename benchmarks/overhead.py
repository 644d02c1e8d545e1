"""What the profiler costs a job: `python benchmarks/overhead.py`.

The same job in pairs, with the profiler and without, one run right after the other and in turned order; steps of 2, 20
and 200 ms, so that what costs a fixed time per step and what costs a share of a core can be told apart; at 20 ms, where
there is a target, its first seconds, and what it is once the profiler's budget has acted. Beside it the same job
watched by py-spy, at the rate at which the profiler samples stacks, and, where it is installed, under TraceML
(`--traceml PATH` of its command), each against its own launcher without it. Where runs of a kind follow each other,
they are compared too: that is what the measurement itself leaves of a ratio of 1.

A machine of others' is seldom left alone for an hour. Before each run it is waited, for a while, until the host takes
nothing away; a run from which it has taken something is made again, once; and `--go-on` adds to what `--out` has, until
there are as many pairs that were left alone as were asked for.

Every run is checked for what it is: pages of observed ranks have counted the steps that the ranks tell, others have
none; py-spy has taken stacks of each rank; TraceML's summary has steps of all ranks.

Then what the sidecar uses for eight ranks, whether a reader ever sees a torn record (torn.py), and whether an observed
rank grows (growth.py). What the probe costs within a step, to the microsecond, is probe.py's to say.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _host import STOLEN_CORES
from _measure import BIN, NothingToldError, machine
from _pairs import halves, middle, there_and_back
from growth import STEPS, growth
from overhead_page import fill, misses, table, targets
from overhead_runs import (
    PLAIN,
    PROFILED,
    PY_SPY,
    SETTLED,
    SETTLED_PLAIN,
    Way,
    one_run,
    pause_s,
    sidecar,
    traceml,
    until_calm,
)
from torn import READS, torn

Row = dict[str, Any]

STEPS_MS = (20, 2, 200)
WAITED_S = 60.0
"""For the host, before each run; at most."""
SECONDS = {2: 5.0, 20: 10.0, 200: 12.0}
AROUND_S = {"gpulaunch": 5.0, "TraceML": 15.0}
"""What a run takes besides, about; after the first one of a kind it is known."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Runs that are made one after the other. Each half has one run that the others of it are compared with."""

    step_ms: int
    runs: tuple[Way, ...]
    rounds: int | None = None
    """In how many rounds it is made; None: in all."""


def cells(by_traceml: tuple[Way, Way] | None, py_spy: bool) -> list[Cell]:
    """One round. The profiler is always next to the run without it; where it has a target, once its budget has acted,
    too."""
    found = [Cell(step_ms=20, runs=tuple(there_and_back(SETTLED_PLAIN, SETTLED)), rounds=4)]
    for step_ms in STEPS_MS:
        rounds = None if step_ms == 20 else 1
        ways = (PY_SPY, PLAIN, PROFILED) if py_spy else (PLAIN, PROFILED)
        found.append(Cell(step_ms=step_ms, runs=tuple(there_and_back(*ways)), rounds=rounds))
        if by_traceml is not None:
            found.append(Cell(step_ms=step_ms, runs=tuple(there_and_back(*by_traceml)), rounds=rounds))
    return found


class Measuring:
    """All runs, as long as there is time for another cell."""

    def __init__(self, options: argparse.Namespace, until_s: float, before: Row) -> None:
        """`before`: what was measured already, and is gone on with."""
        self._options = options
        self._until_s = until_s
        pauses_s = before.get("settings", {}).get("pause_s", {})
        self._pause_s = {step_ms: pauses_s.get(str(step_ms)) or pause_s(options.ranks, step_ms) for step_ms in STEPS_MS}
        self._calm = Counter((row["step_ms"], row["way"]) for row in before["rows"] if is_calm(pair_of(row)))
        self._took_s: dict[int, float] = {}
        self.broken_off: list[str] = []
        """Cells of which there is nothing, and why."""
        self.settings = {"pause_s": {str(step_ms): pause for step_ms, pause in self._pause_s.items()}}

    def rows(self, round_: list[Cell]) -> Iterator[Row]:
        for turn in range(self._options.rounds):
            for number, cell in enumerate(round_):
                rounds = self._options.rounds if cell.rounds is None else cell.rounds
                if self._pairs_of(cell) >= 2 * rounds:
                    continue
                now_s = time.monotonic()
                if now_s + self._took_s.get(number, self._expected_s(cell)) > self._until_s:
                    print(f"no time for {cell.step_ms} ms {[way.name for way in cell.runs]}", file=sys.stderr)
                    return
                try:
                    for row in self._cell(turn, cell):
                        self._calm[row["step_ms"], row["way"]] += is_calm(pair_of(row))
                        yield row
                    self._took_s[number] = time.monotonic() - now_s
                except NothingToldError as error:
                    self.broken_off.append(f"{cell.step_ms} ms {[way.name for way in cell.runs]}: {error}")
                    print(self.broken_off[-1], file=sys.stderr, flush=True)

    def _pairs_of(self, cell: Cell) -> int:
        """How many undisturbed pairs there are of each way of a cell, at least."""
        return min(self._calm[cell.step_ms, way.name] for way in cell.runs if not way.base)

    def _expected_s(self, cell: Cell) -> float:
        watched_s = SECONDS[cell.step_ms] * self._options.scale
        return sum(AROUND_S[way.launched_by] + way.settle_s + watched_s * way.watched for way in cell.runs)

    def _cell(self, turn: int, cell: Cell) -> Iterator[Row]:
        seconds = SECONDS[cell.step_ms] * self._options.scale
        ran: list[tuple[Way, Row]] = []
        for way in cell.runs:
            for _ in range(2):
                until_calm(WAITED_S)
                told = one_run(way, self._options.ranks, self._pause_s[cell.step_ms], seconds)
                print(f"{cell.step_ms} ms, {way.name}: {told}", file=sys.stderr, flush=True)
                if told["stolen_cores"] <= STOLEN_CORES:
                    break
            ran.append((way, told))
        about = {"step_ms": cell.step_ms, "round": turn}
        for half in halves(ran):
            (base,) = (told for way, told in half if way.base)
            yield from ({**about, "way": way.name, "with": told, "without": base} for way, told in half if not way.base)
        (way, first), (_, second) = ran[len(ran) // 2 - 1 : len(ran) // 2 + 1]
        yield {**about, "way": "control", "what": way.name, "with": second, "without": first}


def summed_up(rows: list[Row]) -> Row:
    """Way -> step -> what the pairs say of it."""
    found: Row = {}
    for row in rows:
        found.setdefault(row["way"], {}).setdefault(str(row["step_ms"]), []).append(pair_of(row))
    calm = {
        way: {step: ([pair for pair in pairs if is_calm(pair)], len(pairs)) for step, pairs in of.items()}
        for way, of in found.items()
    }
    return {
        way: {step: compared(pairs, left_out=ran - len(pairs)) for step, (pairs, ran) in of.items() if pairs}
        for way, of in calm.items()
    }


def pair_of(row: Row) -> tuple[Row, Row]:
    return row["with"], row["without"]


def is_calm(pair: tuple[Row, Row]) -> bool:
    return max(run["stolen_cores"] for run in pair) <= STOLEN_CORES


def compared(pairs: list[tuple[Row, Row]], *, left_out: int) -> Row:
    """Throughput as a ratio; what else differs, as a difference."""
    differences = {
        name: middle([one[name] - other[name] for one, other in pairs])
        for name in ("median_step_us", "cpu_us_per_step", "busy_cores", "pss_mib")
    }
    return {
        "left_out": left_out,
        "ratio": middle([one["steps_per_s"] / other["steps_per_s"] for one, other in pairs]),
        **differences,
        "busy_cores_without": statistics.median(other["busy_cores"] for _, other in pairs),
        "stolen_cores": max(max(one["stolen_cores"], other["stolen_cores"]) for one, other in pairs),
    }


def own_figure(rows: list[Row]) -> Row:
    """What the pages of the observed ranks say themselves that a step costs."""
    found: Row = {}
    for row in rows:
        if row["way"] == PROFILED.name and is_calm(pair_of(row)):
            found.setdefault(str(row["step_ms"]), []).append(row["with"]["probe_us_per_step"])
    return {step: statistics.median(values) for step, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the profiler costs a job.")
    parser.add_argument("--rounds", type=int, default=5, help="each has two pairs of each way at 20 ms")
    parser.add_argument("--minutes", type=float, default=65.0, help="begin no more runs than end in about this time")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0, help="of the time that a run is watched")
    parser.add_argument("--reads", type=int, default=READS, help="of records while they are written")
    parser.add_argument("--steps", type=int, default=STEPS, help="in which a rank must not grow")
    parser.add_argument("--traceml", metavar="PATH", help="TraceML's command, of an environment of its own")
    parser.add_argument("--out", type=Path, help="write figures and raw rows here")
    parser.add_argument("--go-on", action="store_true", help="add to what is there already")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    parser.add_argument("--from", type=Path, dest="result", metavar="FILE", help="measure nothing; take its raw rows")
    parser.add_argument("--check", action="store_true", help="end with 1 where a target is missed")
    options = parser.parse_args()
    if options.go_on and not options.out:
        parser.error("--go-on: name the file to go on with by --out")
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(143))

    result = figures(json.loads(options.result.read_text()) if options.result else measured(options))
    print(table(result))
    if options.out:
        write(result, options.out)
    if options.page:
        options.page.write_text(fill(options.page.read_text(), table(result)))
    if options.check and (missed := misses(result)):
        sys.exit("\n".join(missed))


def measured(options: argparse.Namespace) -> Row:
    began_s = time.monotonic()
    before: Row = json.loads(options.out.read_text()) if options.go_on and options.out.exists() else {}
    settings = {name: getattr(options, name) for name in ("ranks", "scale")}
    for name, now in (("machine", machine()), *settings.items()):
        if (then := before.get(name, before.get("settings", {}).get(name, now))) != now:
            sys.exit(f"{options.out} cannot be gone on with: its {name} is {then}, here {now}; name another file")
    result: Row = {"minutes": 0.0, "rows": [], "broken_off": [], **before, "machine": machine()}
    minutes = result["minutes"]

    def keep() -> None:
        result["minutes"] = minutes + (time.monotonic() - began_s) / 60
        if options.out:
            write(result, options.out)

    for name, measure in (
        ("sidecar_of_8_ranks", lambda: sidecar(60 * options.scale)),
        ("ring", lambda: torn(options.reads)),
        ("growth", lambda: growth(options.steps)),
    ):
        if name not in result:
            result[name] = measure()
            print(f"{name}: {result[name]}"[:1000], file=sys.stderr, flush=True)
            keep()
    measuring = Measuring(options, began_s + 60 * options.minutes, result)
    result["settings"] = {
        **settings,
        "rounds": options.rounds,
        "seconds": {str(step_ms): seconds * options.scale for step_ms, seconds in SECONDS.items()},
        **measuring.settings,
    }
    by_traceml = traceml(options.traceml) if options.traceml else None
    for row in measuring.rows(cells(by_traceml, py_spy=(BIN / "py-spy").exists())):
        result["rows"].append(row)
        keep()
    result["broken_off"] += measuring.broken_off
    keep()
    return result


def write(result: Row, path: Path) -> None:
    """Whole or not at all: it may be gone on with."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(path)


def figures(result: Row) -> Row:
    """What was measured, and what follows from it."""
    result = {**result, "ways": summed_up(result["rows"]), "own_us_per_step": own_figure(result["rows"])}
    return {**result, "targets": targets(result)}


if __name__ == "__main__":
    main()
