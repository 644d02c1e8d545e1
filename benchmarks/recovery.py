"""Recovery, side by side with torchrun and NVIDIA's ft_launcher: `python benchmarks/recovery.py`.

Three questions, each to every launcher in turn, in a new order each time, so that a slow spell of the machine hits all:

    one kill     SIGKILL of one rank: is the job back, and how long until all ranks step again?
    many kills   one every few seconds, over a fixed time: how many of the steps that an undisturbed run makes count?
    stuck        one rank is killed and another one neither ends by SIGTERM nor by itself: how long until all step?

torchrun comes with its default and with its best settings, ft_launcher with its best ones (_measure.py). gpulaunch has
its defaults. Checkpoints: gpulaunch.checkpoint for gpulaunch; torch.save by rank 0, as often, for the others. For
ft_launcher name the program of an environment that has nvidia-resiliency-ext and this torch: `--ft-launcher PATH`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from _measure import GPULAUNCH, TORCHRUN, TORCHRUN_BEST, Job, Launcher, ft_launcher, job, machine, markdown, median

Row = dict[str, float | str | None]

OURS = "gpulaunch"
WARM_S = 1.0
"""All ranks have stepped for so long before one is killed."""
BACK_S = 90.0
"""A job that does not step again within this is not back."""
UNDISTURBED_S = 10.0
ENDLESS = 10_000
# What --check asks for: ratios only, because seconds are the machine's.
TIMES_FASTER = 20.0
TIMES_FASTER_STUCK = 15.0


def one_kill(launcher: Launcher, ranks: int, victim: int, *, deaf: int = -1) -> Row:
    """Kill one rank of a job that steps; an empty row if it never stepped."""
    with job(launcher, ranks, "recovery_job.py", "--deaf", str(deaf), restarts=3) as one:
        first = one.stepping()
        if first is None:
            return {}
        time.sleep(WARM_S)
        killed_s = time.monotonic()
        os.kill(first[1][victim], signal.SIGKILL)
        again = one.stepping(after=max(one.attempts()), within_s=BACK_S)
        return {"recovered": float(again is not None), "seconds": again[0] - killed_s if again else None}


def undisturbed(launcher: Launcher, options: argparse.Namespace) -> Row:
    """Steps per second of a run that nothing happens to, and that does not save."""
    with stepper(launcher, "never", options) as one:
        if one.stepping() is None:
            return {}
        time.sleep(WARM_S)
        before, began_s = steps_of(one), time.monotonic()
        time.sleep(UNDISTURBED_S)
        return {"steps_per_s": (steps_of(one) - before) / (time.monotonic() - began_s)}


def many_kills(launcher: Launcher, save: str, options: argparse.Namespace, seed: int) -> Row:
    """Kill a rank every few seconds, and see how far the job has come at the end of the time."""
    with stepper(launcher, save, options) as one:
        if one.stepping() is None:
            return {}
        time.sleep(WARM_S)
        before, began_s = steps_of(one), time.monotonic()
        kills, killed = 0, -1
        for turn in range(1, int(options.duration / options.interval)):
            time.sleep(max(0.0, began_s + turn * options.interval - time.monotonic()))
            attempt = max(one.attempts())
            alive = sorted(pid for pid, _ in one.attempts()[attempt].values() if os.path.exists(f"/proc/{pid}"))
            if alive:  # else it is still on its way back, and left alone
                os.kill(alive[(seed + 7 * turn) % len(alive)], signal.SIGKILL)
                kills, killed = kills + 1, attempt
        time.sleep(max(0.0, began_s + options.duration - time.monotonic()))
        row: Row = {"steps": steps_of(one) - before, "seconds": time.monotonic() - began_s, "kills": kills}
        row["recovered"] = float(one.stepping(after=killed, within_s=BACK_S) is not None)
        one.close()
        said = re.findall(r"goodput ([\d.]+) %", one.log.read_text(errors="replace"))
        row["own_goodput"] = float(said[-1]) / 100 if said else None
        return row


def stepper(launcher: Launcher, save: str, options: argparse.Namespace) -> AbstractContextManager[Job]:
    """The job that tells its steps."""
    return job(
        *(launcher, options.ranks, "recovery_job.py", "--progress", "progress", "--save", save),
        *("--every", str(options.every), "--pause-s", str(options.pause)),
        restarts=ENDLESS,
    )


def steps_of(one: Job) -> int:
    text = (one.work / "progress").read_text().strip()
    return int(text or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=10, help="one kill: runs of each launcher")
    parser.add_argument("--goodput-runs", type=int, default=3, help="many kills: runs of each launcher")
    parser.add_argument("--stuck-runs", type=int, default=3, help="stuck survivor: runs of each launcher")
    parser.add_argument("--interval", type=float, default=5.0, help="many kills: seconds between two of them")
    parser.add_argument("--duration", type=float, default=60.0, help="many kills: seconds in all")
    parser.add_argument("--every", type=int, default=10, help="many kills: save every so many steps")
    parser.add_argument("--pause", type=float, default=0.02, help="many kills: seconds that a step sleeps")
    parser.add_argument("--ft-launcher", metavar="PATH", help="NVIDIA's, of an environment of its own")
    parser.add_argument(
        "--only", metavar="WORDS", help="the launchers whose names begin with one of these, by semicolons"
    )
    parser.add_argument("--out", type=Path, help="write figures and raw rows here")
    parser.add_argument(
        "--check", action="store_true", help="end with 1 where gpulaunch is not as much better as meant"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the job: nothing of it stays

    launchers = {OURS: GPULAUNCH, "torchrun": TORCHRUN, "torchrun, best settings": TORCHRUN_BEST}
    if options.ft_launcher:
        launchers["ft_launcher, best settings"] = ft_launcher(options.ft_launcher)
    if options.only:
        wanted = tuple(options.only.split(";"))
        launchers = {name: one for name, one in launchers.items() if name.startswith(wanted)}
    rows = measure(launchers, options)
    figures = {name: summarise(name, rows, options.duration) for name in launchers}
    print(table(figures, options))
    if options.out:
        settings = {
            name: value for name, value in vars(options).items() if name not in ("out", "check", "ft_launcher", "only")
        }
        known = {name: {key: one if one == one else None for key, one in f.items()} for name, f in figures.items()}
        result = {"machine": machine(), "settings": settings, "figures": known, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.check:
        missed = misses(figures)
        print("\n".join(missed) or "as much better as meant", file=sys.stderr)
        sys.exit(1 if missed else 0)


def measure(launchers: Mapping[str, Launcher], options: argparse.Namespace) -> list[Row]:
    """Every question to every launcher; the one that was first is last in the next turn."""
    rows: list[Row] = []

    def ask(question: str, turn: int, how: Callable[[str, Launcher], Row]) -> None:
        names = [*launchers][turn % len(launchers) :] + [*launchers][: turn % len(launchers)]
        for name in names:
            rows.append({"question": question, "launcher": name, "turn": turn, **how(name, launchers[name])})
            print(rows[-1], file=sys.stderr, flush=True)

    for turn in range(options.runs):
        ask("one kill", turn, lambda _, launcher, turn=turn: one_kill(launcher, options.ranks, turn % options.ranks))
    for turn in range(options.goodput_runs):
        ask("undisturbed", turn, lambda _, launcher: undisturbed(launcher, options))
        ask(
            "many kills",
            turn,
            lambda name, launcher, turn=turn: many_kills(launcher, OURS if name == OURS else "plain", options, turn),
        )
    for turn in range(options.stuck_runs):
        ask("stuck", turn, lambda _, launcher: one_kill(launcher, options.ranks, 1, deaf=0))
    return rows


def summarise(name: str, rows: Sequence[Row], duration_s: float) -> dict[str, float | str]:
    def of(question: str, key: str) -> list[float]:
        asked = [row for row in rows if (row["launcher"], row["question"]) == (name, question)]
        return [float(row[key] or 0) for row in asked if row.get(key) is not None]

    def recovered(question: str) -> str:
        asked = sum((row["launcher"], row["question"]) == (name, question) for row in rows)
        return f"{sum(of(question, 'recovered')):.0f} of {asked}"

    possible = median(of("undisturbed", "steps_per_s")) * duration_s
    return {
        "recovered": recovered("one kill"),
        "seconds": median(of("one kill", "seconds")),
        "goodput_recovered": recovered("many kills"),
        "goodput": median(of("many kills", "steps")) / possible,
        "kills": median(of("many kills", "kills")),
        "own_goodput": median(of("many kills", "own_goodput")),
        "stuck_recovered": recovered("stuck"),
        "stuck_seconds": median(of("stuck", "seconds")),
    }


def misses(figures: Mapping[str, Mapping[str, float | str]]) -> list[str]:
    """What --check has to complain of. A figure that nobody else has is no reason to."""
    ours, missed = figures[OURS], []
    others = {name: of_one for name, of_one in figures.items() if name != OURS}

    def best(key: str, name_begins: str = "") -> float:
        """The shortest time of the others, each with its better settings; nan where none has one."""
        times_s = [float(of_one[key]) for name, of_one in others.items() if name.startswith(name_begins)]
        return min((time_s for time_s in times_s if time_s == time_s), default=float("nan"))

    for key in ("recovered", "goodput_recovered", "stuck_recovered"):
        done, asked = str(ours[key]).split(" of ")
        if done != asked:
            missed.append(f"{key}: {ours[key]}")
    for ratio, meant, words in (
        (best("seconds") / float(ours["seconds"]), TIMES_FASTER, "one kill: faster than the fastest other"),
        (best("stuck_seconds", "torchrun") / float(ours["stuck_seconds"]), TIMES_FASTER_STUCK, "stuck: than torchrun"),
    ):
        if ratio < meant:
            missed.append(f"{words} {ratio:.1f} times, meant are {meant:g}")
    if any(float(of_one["goodput"]) >= float(ours["goodput"]) for of_one in others.values()):
        missed.append("many kills: more steps count with another launcher")
    return missed


def table(figures: Mapping[str, Mapping[str, float | str]], options: argparse.Namespace) -> str:
    def row(words: str, key: str, form: str) -> list[str]:
        cells = [form.format(of_one[key]) if of_one[key] == of_one[key] else "" for of_one in figures.values()]
        return [words, *cells, *([] if options.ft_launcher else ["not measured"])]

    names = [*figures, *([] if options.ft_launcher else ["ft_launcher"])]
    kills = f"a kill every {options.interval:g} s for {options.duration:g} s"
    return markdown(
        [
            ["", *names],
            row("one SIGKILL: recovered", "recovered", "{}"),
            row(f"SIGKILL of a rank -> all {options.ranks} stepping again, median", "seconds", "{:.2f} s"),
            row(f"{kills}: jobs that stepped again after the last", "goodput_recovered", "{}"),
            row("productive steps, of those of an undisturbed run", "goodput", "{:.0%}"),
            row("ranks killed (none while the job was not back)", "kills", "{:.0f}"),
            row("goodput as the launcher counts it, its start included", "own_goodput", "{:.0%}"),
            row("a surviving rank ignores SIGTERM: recovered", "stuck_recovered", "{}"),
            row("the same: time to recover, median", "stuck_seconds", "{:.2f} s"),
        ]
    )


if __name__ == "__main__":
    main()
