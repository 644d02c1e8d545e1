"""What benchmarks of whole jobs share: the launchers with their settings, one job of many ranks, medians."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulaunch.profiler.channel import segment
from gpulaunch.profiler.channel.segment import SegmentSnapshot

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
BOUND_S = 180.0
MARK = "GPULAUNCH_BENCHMARK"
"""In the environment of everything that a job starts: a killed torchrun leaves its workers behind."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """How to start a program on so many ranks, with so many restarts; the path is a directory of the job's own."""

    command: Callable[[int, int, Path], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    before_arguments: Sequence[str] = ()
    """What it wants between the program and the program's arguments."""


def gpulaunch(*options: str, **environment: str) -> Launcher:
    """As it comes, and with these options."""

    def command(ranks: int, restarts: int, work: Path) -> list[str]:
        return [str(BIN / "gpulaunch"), "--nproc", str(ranks), "--max-restarts", str(restarts),
                "--job-dir", str(work / "run"), *options]  # fmt: skip

    return Launcher(command=command, environment=environment)


def _torchrun(*options: str) -> Callable[[int, int, Path], list[str]]:
    def command(ranks: int, restarts: int, _: Path) -> list[str]:
        return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks),
                "--max-restarts", str(restarts), *options]  # fmt: skip

    return command


def ft_launcher(path: str) -> Launcher:
    """NVIDIA's, of an environment of its own (nvidia-resiliency-ext; this torch).

    Its best settings for a quick restart, by its --help and its guide: it polls its workers (0.1 s by default), and
    gives the survivors of a failure 30 s between SIGTERM and SIGKILL. One of its own options must be there.
    """

    def command(ranks: int, restarts: int, _: Path) -> list[str]:
        return [path, "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts),
                "--monitor-interval", "0.01", "--workers-stop-timeout", "1",
                "--ft-workload-check-interval", "0.1"]  # fmt: skip

    return Launcher(command=command)


GPULAUNCH = gpulaunch()
TORCHRUN = Launcher(command=_torchrun())
TORCHRUN_BEST = Launcher(
    # A new store per restart, without which its restarts mostly fail on torch 2.13, and less time between its polls.
    command=_torchrun("--monitor-interval", "0.01"),
    environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
)


def environment(launcher: Launcher) -> dict[str, str]:
    """This environment, without what would change a launcher's settings; one thread per rank for all of them."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "GPULAUNCH_"))}
    return {**env, "OMP_NUM_THREADS": "1", **launcher.environment}


class Job:
    """One launcher over a program that notes its first step in each attempt and ends when a file appears.

    The program gets two arguments before its own: the file of notes and the file that ends it. A note is one line:
    attempt, rank, pid, monotonic seconds after the first optimizer step.
    """

    def __init__(self, launcher: Launcher, ranks: int, work: Path, program: Sequence[str], *, restarts: int) -> None:
        self.ranks = ranks
        self.work = work
        self.notes = work / "notes"
        self.stop = work / "stop"
        self.mark = {MARK: secrets.token_hex(8)}
        """In the environment of all that belongs to it."""
        self.log = work / "log"
        script, *args = program
        with open(self.log, "wb") as log:
            self.started_s = time.monotonic()
            self.process = subprocess.Popen(
                [
                    *launcher.command(ranks, restarts, work),
                    str(HERE / script),
                    *launcher.before_arguments,
                    str(self.notes),
                    str(self.stop),
                    *args,
                ],
                cwd=work,
                env={**environment(launcher), **self.mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def attempts(self) -> dict[int, dict[int, tuple[int, float]]]:
        """Attempt -> rank -> (pid, when it first stepped), as noted so far."""
        found: dict[int, dict[int, tuple[int, float]]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in self.notes.read_text().splitlines():
                attempt, rank, pid, when_s = line.split()
                found.setdefault(int(attempt), {})[int(rank)] = (int(pid), float(when_s))
        return found

    def stepping(self, after: int = -1, within_s: float = BOUND_S) -> tuple[float, dict[int, int]] | None:
        """When the last rank of an attempt later than `after` took its first step, and their pids; None: it never did.

        Only ranks of one attempt count.
        """
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and self.process.poll() is None:
            for attempt, ranks in self.attempts().items():
                if len(ranks) == self.ranks and attempt > after:
                    return max(when for _, when in ranks.values()), {rank: pid for rank, (pid, _) in ranks.items()}
            time.sleep(0.005)
        return None

    def close(self) -> None:
        """End it well, or kill it; then whatever is left of it."""
        self.stop.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """All that belongs to it and lives."""
        mark = f"{MARK}={self.mark[MARK]}".encode()
        found: list[int] = []
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found


@contextlib.contextmanager
def job(launcher: Launcher, ranks: int, *program: str, restarts: int) -> Generator[Job]:
    """A job in a temporary directory; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpulaunch-bench-", ignore_cleanup_errors=True) as work:
        one = Job(launcher, ranks, Path(work), program, restarts=restarts)
        try:
            yield one
        finally:
            one.close()


class NothingToldError(SystemExit):
    """A job has not told what it was run for; ends the benchmark, unless that can do without it."""


def notes_of(one: Job, ranks: int, *, within_s: float = BOUND_S) -> list[dict[str, Any]]:
    """What each rank has to tell, one line of JSON each. Raises NothingToldError."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s and one.process.poll() is None:
        lines = one.notes.read_text().splitlines() if one.notes.exists() else []
        if len(lines) == ranks:
            return [json.loads(line) for line in lines]
        time.sleep(0.1)
    raise NothingToldError(f"the job has not told its steps\n{one.log.read_text(errors='replace')[-2000:]}")


def page_of(channel_dir: str, rank: int) -> SegmentSnapshot | None:
    """What the probe of a rank has published; None: nothing observes it."""
    try:
        seen = segment.read(f"{channel_dir}/rank-{rank}.bin")
    except FileNotFoundError:
        return None
    return seen if seen.armed else None


def kib(pid: int, file: str, field: str) -> int:
    """A line of a file of /proc about a process."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(f"no {field} in /proc/{pid}/{file}")


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    import torch

    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)
