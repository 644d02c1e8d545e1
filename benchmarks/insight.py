"""What the findings say of programs whose illness is known: `python benchmarks/insight.py`.

Each program of tests/corpus/sick is run under gpulaunch as it is, and before and after that with its cure (CURED=1), so
that a steady drift of the machine cancels: is the cause what the report names first, is it the right line, and is the
time that a cure should save what it does save? Those of tests/corpus/healthy are run once, and nothing should be found.
A program takes three quarters of a minute; one at a time, because findings are about what the cores do.

    right first   the first finding is the cause
    present       another one is first
    missed        the cause is not among the findings (also those of which no rule knows)
    false         something is found in a healthy program
    repeated      what the cure saves by the run before is what it saves by the run after. The run as it is, of which
                  there is one, varies as much, so that an exact prediction would be right about as often

What was measured is kept after each program: Ctrl-C loses one. Programs that are not run again keep their results. What
others took of the cores meanwhile is measured, too: with more than a tenth, step times and findings may say nothing.
Such programs are counted apart, and `--go-on` runs them again, and those that were not run so far.

`--uncured --demand 0.8` is for CI: no price is measured, a program that is not judged as it should be is run once more,
and it fails if fewer than that share of the sick ones are right first, or of the healthy ones clean. Sick ones whose
steps take twice as long as on record do not count, nor do fewer than seven.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _corpus import Program, programs
from _host import processor_s
from _insight_tables import Row, summary, table, tune_table
from _measure import BIN, HERE, machine, median

BOUND_S = 240.0
LONG_S = 22.0
"""Of a run as it is, by the programs themselves."""
OTHERS = 0.10
"""Of the cores: with more than that in the hands of others, a run is disturbed."""
SLOWER = 2.0
"""Steps that take so many times what is on record are those of a machine on which a short run has too few samples: of
six sick programs on one that was 1.7 to 4.8 times as slow, three were missed."""
ENOUGH = 7
"""Of fewer sick programs a demand says little: a tenth is missed in short runs, two of six in one of nine times."""
OUT = HERE / "results" / "insight.json"
TUNABLE = frozenset(
    {
        "dataloader-too-few-workers",
        "dataloader-too-many-workers",
        "dataloader-workers-restarted",
        "dataloader-head-of-line",
        "omp-oversubscribed",
        "gc-pauses",
    }
)
BUDGET = "60s"
KINDS = ("sick", "healthy")
CORES = len(os.sched_getaffinity(0))
FINDING = ("rule", "line", "subject", "ranks", "seconds_per_step", "confidence", "active", "evidence", "advice")


def environment(**more: str) -> dict[str, str]:
    """This one, without what would be a setting of gpulaunch or of the programs."""
    ours = ("PET_", "GPULAUNCH_", "OMP_")
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CURED", "SECONDS"}
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours) and name not in names}
    return {**env, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", **more}


def run(command: Sequence[str], work: Path, env: Mapping[str, str], bound_s: float = BOUND_S) -> tuple[int, str]:
    """Run a command to its end, and leave nothing of it; its exit code (-1: it took too long) and its output."""
    with open(work / "log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(bound_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:  # Ctrl-C reaches it, too
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()
                process.wait()
    return code, (work / "log").read_text(errors="replace")


def one_run(program: Program, *, cured: bool, seconds: float | None, keep: Path | None = None) -> Row:
    """One run of a program under gpulaunch: its own step time, and what the report says.

    `keep`: the run directory is copied there.
    """
    more = {"CURED": "1"} if cured else {}
    if seconds is not None:
        more["SECONDS"] = f"{seconds:g}"
    with tempfile.TemporaryDirectory(prefix="gpulaunch-bench-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        gpulaunch = str(BIN / "gpulaunch")
        command = [gpulaunch, "--nproc", str(program.ranks), "--job-dir", str(work / "run"), str(program.path)]
        began_s, spent_s, (busy_s, stolen_s) = time.monotonic(), own_cpu_s(), processor_s()
        code, log = run(command, work, environment(TMPDIR=directory, **more))
        wall_s = time.monotonic() - began_s
        then_s, then_stolen_s = processor_s()
        others_s = (then_s - busy_s) + (then_stolen_s - stolen_s) - (own_cpu_s() - spent_s)
        row: Row = {"code": code, "seconds": wall_s, "others": max(0.0, others_s) / wall_s / CORES}
        if keep is not None and (work / "run").exists():
            shutil.copytree(work / "run", keep / f"{program.path.stem}{'-cured' * cured}", dirs_exist_ok=True)
        if code:
            return {**row, "step_ms": None, "findings": [], "log": log.replace(directory, "")[-1500:]}
        told = re.search(r"step_ms ([\d.]+)", log)
        report = subprocess.run(
            [gpulaunch, "report", str(work / "run"), "--json"], env=environment(), capture_output=True, text=True
        )
        said = json.loads(report.stdout)
        found = [{"file": Path(f["file"] or "").name, **{key: f[key] for key in FINDING}} for f in said["findings"]]
        return {**row, "step_ms": float(told[1]) if told else None, "findings": found}


def measured(
    program: Program, seconds: float | None, cured_seconds: float | None, keep: Path | None
) -> tuple[Row, Row | None]:
    """The run of a program as it is, and of a sick one those with its cure, before and after it, as one; without them
    if `cured_seconds` is None."""
    if not program.sick or cured_seconds is None:
        return one_run(program, cured=False, seconds=seconds, keep=keep), None
    if "recompiles" in program.rules:  # the first compilation must not weigh more
        cured_seconds = seconds or LONG_S
    before = one_run(program, cured=True, seconds=cured_seconds, keep=keep and keep / "before")
    sick = one_run(program, cured=False, seconds=seconds, keep=keep)
    return sick, together([before, one_run(program, cured=True, seconds=cured_seconds, keep=keep)])


def together(runs: Sequence[Row]) -> Row:
    """Several runs of the same program as one: the mean of their step times, and all that was found."""
    steps_ms = [run["step_ms"] for run in runs]
    return {
        "code": next((run["code"] for run in runs if run["code"]), 0),
        "others": max(run["others"] for run in runs),
        "step_ms": None if None in steps_ms else sum(steps_ms) / len(runs),
        "steps_ms": steps_ms,
        "findings": [found for run in runs for found in run["findings"]],
        **next(({"log": run["log"]} for run in runs if "log" in run), {}),
    }


def commit() -> str | None:
    """Of this tree, with a + if it is changed; None outside of a repository."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() or None


def own_cpu_s() -> float:
    """CPU seconds of this process and of all that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def tuned(program: Program) -> Row:
    """What `gpulaunch tune` recommends, and the gain that it measured."""
    with tempfile.TemporaryDirectory(prefix="gpulaunch-bench-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        command = [str(BIN / "gpulaunch"), "tune", "--budget", BUDGET, "--nproc", str(program.ranks)]
        code, log = run([*command, str(program.path)], work, environment(TMPDIR=directory, SECONDS="600"))
        results = sorted(work.glob("gpulaunch-runs/*-tune-*/tune.json"))
        if code or not results:
            return {"code": code, "log": log.replace(directory, "")[-1500:]}
        said = json.loads(results[0].read_text())
        tried = [each for each in (*said["tried"], said["together"]) if each]
        best = next((each for each in tried if each["change"] == said["best"]), None)
        gain = best["gain_ratio"]["median"] if best and best["gain_ratio"] else 0.0
        return {"code": code, "best": best["name"] if best else None, "gain": gain, "trials": said["trials"]}


def judged(program: Program, sick: Row, cured: Row | None) -> Row:
    """What became of one program."""
    found = [each for each in sick["findings"] if each["active"]]
    right = next((each for each in found if each["rule"] in program.rules), None)
    if sick["code"] or (cured or {}).get("code"):
        verdict = "failed"
    elif not program.sick:
        verdict = "false" if found else "clean"
    elif right is None:
        verdict = "missed"
    else:
        verdict = "right first" if right is found[0] else "present"
    row: Row = {
        "program": program.name,
        "expected": program.expected,
        "first": found[0]["rule"] if found else None,
        "first_place": f"{found[0]['file']}:{found[0]['line']}" if found and found[0]["line"] else None,
        "verdict": verdict,
        "others": max(each.get("others", 0.0) for each in (sick, cured) if each),
        "line_right": None,
        "predicted_ms": None,
        "measured_ms": None,
        "ratio": None,
        "sick_ms": sick["step_ms"],
        "cured_ms": cured["step_ms"] if cured else None,
        "after_the_cure": sorted({each["rule"] for each in (cured or {"findings": []})["findings"] if each["active"]}),
    }

    def is_marked(each: Mapping[str, Any]) -> bool:
        return each["file"] == program.path.name and each["line"] in program.lines

    named = right or (found[0] if found and program.missing else None)
    if named is not None and program.lines:
        row["line_right"] = is_marked(named)
    if right is not None and right["seconds_per_step"] > 0:  # the cure may be about several of the lines
        cured_s = [each["seconds_per_step"] for each in found if each is right or is_marked(each)]
        row["predicted_ms"] = 1e3 * sum(cured_s)
    if cured and sick["step_ms"] and cured["step_ms"]:
        row["measured_ms"] = sick["step_ms"] - cured["step_ms"]
        row["measured_apart_ms"] = [sick["step_ms"] - each_ms for each_ms in cured["steps_ms"]]
        if row["predicted_ms"] and row["measured_ms"] > 0:
            row["ratio"] = row["predicted_ms"] / row["measured_ms"]
    return row


def totals(rows: Sequence[Row]) -> Row:
    """The figures of all."""
    ill = Counter(row["verdict"] for row in rows if row["program"].startswith("sick/"))
    well = Counter(row["verdict"] for row in rows if row["program"].startswith("healthy/"))
    lines = [row["line_right"] for row in rows if row["verdict"] in ("right first", "present")]
    errors = [abs(row["ratio"] - 1.0) for row in rows if row["ratio"] is not None]
    apart = [row["measured_apart_ms"] for row in rows if row["ratio"] is not None and "measured_apart_ms" in row]
    return {
        "sick": ill.total() - ill["failed"],
        **{name.replace(" ", "_"): ill[name] for name in ("right first", "present", "missed")},
        "misled": sum(row["verdict"] == "missed" and row["first"] is not None for row in rows),
        "lines_right": lines.count(True),
        "lines": len(lines) - lines.count(None),
        "healthy": well.total() - well["failed"],
        "false": well["false"],
        "found_after_the_cure": sum(bool(row["after_the_cure"]) for row in rows),
        "failed": ill["failed"] + well["failed"],
        "predictions": len(errors),
        "within_20_percent": sum(error <= 0.2 for error in errors),
        "within_30_percent": sum(error <= 0.3 for error in errors),
        "median_error": median(errors) if errors else None,
        "measured_twice": len(apart),
        "repeated_within_20_percent": sum(abs(after - before) <= 0.2 * before for before, after in apart),
    }


def is_right(row: Row) -> bool:
    """Whether a program was judged as it should be."""
    return row["verdict"] in ("right first", "clean")


def short_of(rows: Sequence[Row], share: float) -> list[str]:
    """The kinds of programs of which fewer than a share were judged as they should be."""
    right = {kind: [is_right(row) for row in rows if row["program"].startswith(f"{kind}/")] for kind in KINDS}
    return [kind for kind, each in right.items() if sum(each) < share * len(each)]


def telling(rows: Sequence[Row], before: Mapping[str, Row]) -> list[Row]:
    """Those that a demand is of: the healthy ones, and the sick ones at the pace on record, if they are enough."""

    def is_at_pace(row: Row) -> bool:
        then_ms = before.get(row["program"], row)["sick_ms"] or 0.0
        return not row["sick_ms"] or row["sick_ms"] <= SLOWER * then_ms

    healthy = [row for row in rows if row["program"].startswith("healthy/")]
    sick = [row for row in rows if row["program"].startswith("sick/") and is_at_pace(row)]
    return healthy + (sick if len(sick) >= ENOUGH else [])


def undisturbed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["others"] <= OTHERS]


def part(text: str) -> tuple[int, int]:
    """K/N: every N-th program, from the K-th on (1 is the first)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text}: K/N with K from 1 to N")
    return int(found[1]), int(found[2])


def kept(out: Path) -> dict[str, Row]:
    """What was measured before, of programs that still exist."""
    if not out.exists():
        return {}
    there = {program.name for program in programs()}
    return {row["program"]: row for row in json.loads(out.read_text())["rows"] if row["program"] in there}


def write(out: Path, rows: Mapping[str, Row]) -> None:
    ordered = [rows[program.name] for program in programs() if program.name in rows]
    calm = totals(undisturbed(ordered))
    result = {"machine": machine(), "totals": totals(ordered), "undisturbed": calm, "rows": ordered}
    new = out.with_suffix(".new")
    text = json.dumps(result, indent=1).replace(f"{HERE.parent}/", "")  # of no machine
    new.write_text(text + "\n")
    os.replace(new, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="GLOB", default="*", help="the programs of such a name")
    parser.add_argument("--kind", choices=KINDS, help="only these")
    parser.add_argument("--part", metavar="K/N", type=part, default=(1, 1), help="every N-th of them, from the K-th on")
    parser.add_argument("--within", metavar="S", type=float, help="after so many seconds begin no other one")
    parser.add_argument("--seconds", type=float, help="of a run, instead of those that the program is made for")
    parser.add_argument(
        "--cured-seconds", type=float, default=12.0, help="of each of the two runs with the cure (default: 12)"
    )
    parser.add_argument("--uncured", action="store_true", help="no runs with the cure")
    parser.add_argument(
        "--demand",
        metavar="SHARE",
        type=float,
        help="fail if fewer of the sick are right first, or healthy clean",
    )
    parser.add_argument("--go-on", action="store_true", help="only those that FILE has not, or that were disturbed")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="copy the run directories there")
    parser.add_argument("--tune", action="store_true", help="also run `gpulaunch tune` where it could help")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=OUT, help="results are kept here (default: benchmarks/results)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    began_s = time.monotonic()
    first, every = options.part
    chosen = [one for one in programs(options.only) if not options.kind or one.path.parent.name == options.kind]
    rows = kept(options.out)
    if options.go_on:
        known = {row["program"] for row in undisturbed(list(rows.values()))}
        chosen = [one for one in chosen if one.name not in known]
    chosen = sorted(chosen, key=lambda one: one.path.name)[first - 1 :: every]  # sick and healthy ones mixed
    done: list[Row] = []
    with contextlib.suppress(KeyboardInterrupt):
        for program in chosen:
            if done and options.within is not None and time.monotonic() - began_s > options.within:
                break
            cured_seconds = None if options.uncured else options.cured_seconds
            for _ in range(1 if options.demand is None else 2):
                sick, cured = measured(program, options.seconds, cured_seconds, options.keep)
                row = {**judged(program, sick, cured), "commit": commit()}
                if is_right(row):
                    break
            if options.tune and (program.rules & TUNABLE or "thread" in program.missing):
                row["tune"] = tuned(program)
            done.append({**row, "runs": {"sick": sick, "cured": cured} if program.sick else {"healthy": sick}})
            rows[program.name] = done[-1]
            write(options.out, rows)
            print(table(done[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(done))
    if len(done) < len(chosen):
        print(f"\nnot run: {len(chosen) - len(done)} of {len(chosen)}")
    if options.tune:
        print(f"\n{tune_table(done)}")
    print(f"\n{summary(totals(done))}")
    if len(calm := undisturbed(done)) < len(done):
        print(f"\nwithout the {len(done) - len(calm)} that others disturbed:\n{summary(totals(calm))}")
    if options.demand is None:
        return
    counted = telling(done, kept(OUT))
    print(f"\ncounted for the demand: {len(counted)} of {len(done)}; the others are too slow here, or too few")
    if short := short_of(counted, options.demand):
        sys.exit(f"fewer than {options.demand:.0%} are judged as they should be: {', '.join(short)}")


if __name__ == "__main__":
    main()
