"""The nemesis: random faults, several to one job, then what must hold whatever came in which order.

    python tests/faults/nemesis.py --seeds 30 [--first 0] [--blows 5] [--ranks 2] [--keep DIR]

A seed decides which faults come, to whom, and after how many steps; the moments within a step are the machine's. What
must hold is in `violations`, a function over what the job left behind; a violation is told with the seed and the whole
history. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_harness import Around, Job, wait_until

from gpulaunch.launcher.chaos.faults import Fault, Verb, choose
from gpulaunch.launcher.chaos.inject import inject
from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.runs.processes import RunError

STEPS = 150
SAVE_EVERY = 5
HANG_TIMEOUT_S = 10
OPTIONS = ("--hang-timeout", str(HANG_TIMEOUT_S), "--no-progress-limit", "0", "--restart-backoff", "0")
PROGRAM = ("--plant", "leak", "--rank", "-1", "--save-every", str(SAVE_EVERY), "--keep-all", "--steps", str(STEPS))
SLOW_S = 1.0

_OF_SIGNALS = {
    signal.SIGKILL: {"signal"},
    signal.SIGSEGV: {"segfault"},
    signal.SIGABRT: {"abort"},
    signal.SIGBUS: {"bus_error", "shm_full"},
}
KINDS: dict[Verb, set[str]] = {
    Verb.HANG_RANK: {"hang"},
    Verb.OOM_RANK: {"host_oom", "abort", "segfault", "exception", "hang"},
    Verb.KILL_LOADER: {"loader_worker"},
}
"""What failure.json may call the end of a rank that met this. Memory that is refused has many ends: std::bad_alloc in
a thread of torch's aborts, Python cannot start a thread, and what waits for such a thread waits for ever."""
HARMLESS = frozenset({Verb.SLOW_RANK, Verb.KILL_SIDECAR, Verb.KILL_FORK_SERVER, Verb.CORRUPT_CHECKPOINT})
"""What must never end an attempt."""

Result = Mapping[int, Sequence[tuple[str, list[int]]]]


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One planned fault: made when every rank has made `after` steps since the attempt began or the last blow."""

    after: int
    fault: Fault


@dataclass(kw_only=True)
class Made:
    """One fault that was made, and how things stood."""

    fault: Fault | None
    """None: it could not be made; `what` says why."""
    attempt: int
    what: str
    committed: tuple[int, ...]
    """The steps of the committed checkpoints just before, without those that were damaged."""
    damaged: int | None = None
    """The step of the checkpoint that it damaged."""


@dataclass(kw_only=True)
class History:
    """Everything that is looked at afterwards."""

    seed: int
    code: int = -1
    made: list[Made] = field(default_factory=list)
    starts: int = 1
    """How often the job was started: once, and again after its agent was killed."""
    attempts: int = 0
    first_steps: dict[int, int] = field(default_factory=dict)
    """The first step that each attempt made; attempts that made none are missing."""
    steps: list[dict] = field(default_factory=list)
    """Every step of every rank, as the ranks wrote it down: rank, attempt, step, loss, samples."""
    first_causes: dict[int, tuple[str, int]] = field(default_factory=dict)
    """(kind, rank) of the first cause of each attempt that has one."""
    manifests: list[dict] = field(default_factory=list)
    restarts: int = 0
    left: list[str] = field(default_factory=list)
    """Processes and files that outlived the job."""


def plan(seed: int, *, blows: int, ranks: int, verbs: Sequence[Verb] = tuple(Verb)) -> list[Blow]:
    """What this seed does."""
    rng = random.Random(seed)
    return [
        Blow(after=rng.randrange(3, 20), fault=choose(rng, verbs, range(ranks), for_s=SLOW_S)) for _ in range(blows)
    ]


def violations(history: History, expected: Result) -> list[str]:
    """What of operations.md's invariants does not hold, one line each."""
    found = [f"left behind: {what}" for what in history.left]
    if history.code != 0:
        found.append(f"the job ended with {history.code}")
    found += _of_commits(history.manifests)
    found += _of_steps(history, expected)
    found += _of_resuming(history)
    found += _of_causes(history)
    return found


def _of_commits(manifests: Sequence[dict]) -> list[str]:
    """One generation commits at a time: what a later one has committed, no earlier one comes after."""
    found: list[str] = []
    ordered = sorted(manifests, key=lambda each: each["step"])
    for before, after in pairwise(ordered):
        for name in ("generation", "attempt", "saved_s"):
            if after[name] < before[name]:
                found.append(f"{name} goes back between the checkpoints of step {before['step']} and {after['step']}")
    attempts: dict[int, set[int]] = {}
    for each in manifests:
        attempts.setdefault(each["generation"], set()).add(each["attempt"])
    found += [f"generation {one} is of attempts {sorted(many)}" for one, many in attempts.items() if len(many) > 1]
    return found


def _of_steps(history: History, expected: Result) -> list[str]:
    """Every step of every attempt made the loss that it makes when nothing happens, from the same samples."""
    found: list[str] = []
    made: dict[int, set[int]] = {}
    for step in history.steps:
        made.setdefault(step["rank"], set()).add(step["step"])
        if expected[step["rank"]][step["step"] - 1] != (step["loss"], step["samples"]):
            found.append(f"rank {step['rank']} step {step['step']} of attempt {step['attempt']}: other loss or samples")
    for rank, steps in expected.items():
        missing = set(range(1, len(steps) + 1)) - made.get(rank, set())
        if missing and history.code == 0:
            found.append(f"rank {rank} never made steps {sorted(missing)}")
    return found[:10]


def _of_resuming(history: History) -> list[str]:
    """Every attempt goes on from what was committed before, and never from what was damaged."""
    found: list[str] = []
    for attempt, first in history.first_steps.items():
        before = [made for made in history.made if made.attempt < attempt]
        intact = before[-1].committed if before else ()
        if first - 1 < max(intact, default=0):
            found.append(f"attempt {attempt} resumed at {first - 1}, and step {max(intact)} was committed")
    return found


def _of_causes(history: History) -> list[str]:
    """The first cause of an attempt is something that was done in it, and nothing else ended one."""
    found: list[str] = []
    for attempt in range(history.attempts - 1):
        deadly = [one for one in _faults(history, attempt) if may_end(one)]
        if not deadly:
            done = [made.what for made in history.made if made.attempt == attempt]
            found.append(f"attempt {attempt} ended, and nothing was done that may end it: {done or 'nothing at all'}")
        cause = history.first_causes.get(attempt)
        if cause is not None and not any(_explains(one, *cause) for one in deadly):
            found.append(f"attempt {attempt} is said to have ended by {cause}, and this was done: {deadly}")
        if cause is None and not any(one.verb in (Verb.KILL_STORE, Verb.KILL_AGENT) for one in deadly):
            found.append(f"attempt {attempt} has no first cause, and this was done: {deadly}")
    deadly = [one for attempt in range(history.attempts) for one in _faults(history, attempt) if may_end(one)]
    if history.restarts > len(deadly):
        found.append(f"{history.restarts} restarts were charged for {len(deadly)} faults")
    return found


def _faults(history: History, attempt: int) -> list[Fault]:
    return [made.fault for made in history.made if made.attempt == attempt and made.fault is not None]


def _explains(fault: Fault, kind: str, rank: int) -> bool:
    # The timeout here is shorter than what hang detection needs to see which of the silent ranks is to blame.
    return kind in kinds_of(fault) and (rank == fault.rank or kind == "hang")


def may_end(fault: Fault) -> bool:
    """Whether this fault may end an attempt, at the price of a restart."""
    return fault.verb not in HARMLESS


def kinds_of(fault: Fault) -> set[str]:
    """The kinds that a failure may have which this fault caused on its rank."""
    return _OF_SIGNALS[signal.Signals(fault.signum)] if fault.verb is Verb.KILL_RANK else KINDS.get(fault.verb, set())


# -- doing it


def run(seed: int, directory: Path, *, blows: int = 5, ranks: int = 2, verbs: Sequence[Verb] = tuple(Verb)) -> History:
    """Give one job all the blows of this seed; what it left behind is what is judged."""
    history = History(seed=seed)
    planned = plan(seed, blows=blows, ranks=ranks, verbs=verbs)
    options = [*OPTIONS, "--max-restarts", str(blows)]
    job = Job(directory, ranks=ranks, options=options, program=[*PROGRAM, "--hold"], around=Around())
    job.start()
    try:
        for number, blow in enumerate(planned):
            strike(job, blow, history, random.Random(f"{seed} {number}"))
        job.release()
        history.code = job.wait()
        look(job, history)
    finally:
        job.close()
    return history


def strike(job: Job, blow: Blow, history: History, rng: random.Random) -> None:
    """Wait for the moment, make the fault, and remember how things stood."""
    base = len(job.trace(0)) if job.steps() else 0
    wait_until(lambda: stepped(job, base + blow.after) or not job.running, f"{blow}\n{job}")
    if not job.running:
        return
    group, attempt = job.group(), job.attempts - 1
    damaged = {made.damaged for made in history.made}
    committed = checkpoints(job)
    fault: Fault | None = blow.fault
    try:
        what = inject(blow.fault, group, rng).what
    except RunError as err:
        # Between two epochs there is no loader; before the first save there is no checkpoint.
        fault, what = None, f"not made: {err}"
    found = re.search(r"/step-(\d+)", what)
    hit = int(found[1]) if found else None
    intact = tuple(step for step in committed if step != hit and step not in damaged)
    history.made.append(Made(fault=fault, attempt=attempt, what=what, committed=intact, damaged=hit))
    if fault is not None and blow.fault.verb is Verb.KILL_AGENT:
        job.wait()
        job.start()
        history.starts += 1


def stepped(job: Job, lines: int) -> bool:
    """Whether every rank has made so many steps in all, or waits before the last one."""
    traces = [job.trace(rank) for rank in range(job.ranks)] if job.steps() else [[]]
    return all(len(trace) >= lines or (trace and trace[-1]["step"] >= STEPS - 1) for trace in traces)


def checkpoints(job: Job) -> list[int]:
    """The steps of the committed checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in job.checkpoints()]


def look(job: Job, history: History) -> None:
    """Read what the job left behind."""
    history.attempts = job.attempts
    for rank in range(job.ranks):
        for step in job.trace(rank):
            history.steps.append({"rank": rank, **step})
            history.first_steps.setdefault(step["attempt"], step["step"])
    for attempt in range(job.attempts):
        path = job.run_dir / f"attempts/{attempt}/failure.json"
        if path.exists():
            first = json.loads(path.read_text())["first"]
            history.first_causes[attempt] = (first["kind"], first["rank"])
    history.manifests = [json.loads((path / "gpulaunch-manifest.json").read_text()) for path in job.checkpoints()]
    history.restarts = json.loads((job.run_dir / "summary.json").read_text())["restarts"]
    run_ids = [event["run_id"] for event in job.events("run_started")]
    wait_gone = [pid for run_id in run_ids for pid in linux.all_pids() if linux.is_of_run(pid, run_id)]
    history.left += [f"process {pid} {linux.comm_of(pid)}" for pid in wait_gone if linux.state_of(pid) not in ("Z", "")]
    history.left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if any(one in name for one in run_ids)]
    history.left += [str(path) for path in (job.run_dir / "checkpoints").glob(".saving-*")]


def tell(history: History, job_directory: Path) -> str:
    """The history for a person."""
    lines = [f"seed {history.seed}: exit code {history.code}, {history.attempts} attempts, files in {job_directory}"]
    lines += [f"  attempt {made.attempt}: {made.what}; committed before: {made.committed}" for made in history.made]
    lines += [f"  attempt {attempt} began at step {step}" for attempt, step in sorted(history.first_steps.items())]
    lines += [f"  attempt {attempt} ended by {cause}" for attempt, cause in sorted(history.first_causes.items())]
    return "\n".join(lines)


def undisturbed(directory: Path, ranks: int) -> Result:
    """What a job makes that nothing happens to."""
    job = Job(directory, ranks=ranks, program=[*PROGRAM, "--pace", "0"], around=Around())
    job.start()
    try:
        assert job.wait() == 0, f"{job}"
    finally:
        job.close()
    return job.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--blows", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where to leave the jobs' directories")
    args = parser.parse_args()
    place = args.keep or Path(tempfile.mkdtemp(prefix="nemesis-"))
    expected = undisturbed(place / "undisturbed", args.ranks)
    failed = 0
    for seed in range(args.first, args.first + args.seeds):
        directory = place / f"seed-{seed}"
        try:
            history = run(seed, directory, blows=args.blows, ranks=args.ranks)
            wrong = violations(history, expected)
        except AssertionError as err:
            print(f"seed {seed}: {err}", flush=True)
            failed += 1
            continue
        failed += bool(wrong)
        print(tell(history, directory) if wrong else f"seed {seed}: ok, {len(history.made)} faults", flush=True)
        for line in wrong:
            print(f"  VIOLATION: {line}", flush=True)
    print(f"{args.seeds - failed} of {args.seeds} seeds without a violation; files in {place}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
