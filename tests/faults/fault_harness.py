"""A job of train.py under gpulaunch, what can be done to it from outside, and what it left to be looked at."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpulaunch.launcher.chaos.faults import Fault, Verb
from gpulaunch.launcher.chaos.inject import inject
from gpulaunch.launcher.runs.processes import RunProcesses, read_group

HERE = Path(__file__).parent
COMMAND = Path(sysconfig.get_path("scripts"), "gpulaunch")
STEPS = 60
PATIENCE_S = 300.0
"""How long anything is waited for that must come: a bound for broken runs, not a measure of good ones."""
SEEN_STEPS = 12
"""Every rank has made so many steps when something is done from outside."""
OURS = ("PET_", "GPULAUNCH_", "TORCHELASTIC_", "SLURM_")
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for something that must come."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"never: {what}"
        time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Around:
    """How a job is started in special surroundings."""

    prefix: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Job:
    """One job directory with one program; it may be started more than once."""

    def __init__(
        self, directory: Path, *, ranks: int, options: Sequence[str] = (), program: Sequence[str] = (), around: Around
    ) -> None:
        self.directory = directory
        self.ranks = ranks
        self.run_dir = directory / "job"
        self.out = directory / "out"
        self.out.mkdir(parents=True)
        self._around = around
        options = ["--nproc", str(ranks), "--job-dir", str(self.run_dir), *options, *around.options]
        self.argv = [*around.prefix, str(COMMAND), *options, str(HERE / "train.py"), str(self.out), *program]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS) and k not in RANK_VARIABLES}
        self._env = {**clean, **around.env}
        self._process: subprocess.Popen[bytes] | None = None
        self.started_s: list[float] = []
        self.acted_s: list[float] = []
        self.codes: list[int] = []

    def start(self) -> None:
        """Start it (again)."""
        with (self.directory / "stderr").open("ab") as err:
            self._process = subprocess.Popen(
                self.argv,
                cwd=self.directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
            )
        self.started_s.append(time.monotonic())

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Wait for its end; the exit code as a shell shows it."""
        assert self._process is not None, "not started"
        try:
            if self._process.stdout is not None and not self._process.stdout.closed:
                rest, _ = self._process.communicate(timeout=PATIENCE_S)
                (self.directory / "stdout").write_bytes(rest)
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE_S:.0f} s\n{self}") from None
        self.codes.append(code if code >= 0 else 128 - code)
        return self.codes[-1]

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def close_output(self) -> None:
        """Whoever reads its output goes away."""
        assert self._process is not None, "not started"
        assert self._process.stdout is not None, "has no output"
        self._process.stdout.close()

    # -- what it did

    def trace(self, rank: int) -> list[dict]:
        """The steps that a rank made, in the order in which it made them."""
        path = self.out / f"trace-{rank}.jsonl"
        # A rank killed in the middle of a write leaves a line without its end.
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> int:
        """How many steps every rank has made by now."""
        counts = [0]
        with contextlib.suppress(FileNotFoundError):
            counts = [len(self.trace(rank)) for rank in range(self.ranks)]
        return min(counts)

    def wait_for_steps(self, number: int) -> None:
        """Wait until every rank has made so many."""
        wait_until(lambda: self.steps() >= number or not self.running, f"{number} steps of every rank\n{self}")
        assert self.running, f"ended before every rank had made {number} steps\n{self}"

    def result(self) -> dict[int, list[tuple[str, list[int]]]]:
        """(loss, samples) of every step of every rank, as it was made last."""
        return {
            rank: [made for _, made in sorted({t["step"]: (t["loss"], t["samples"]) for t in self.trace(rank)}.items())]
            for rank in range(self.ranks)
        }

    def events(self, name: str) -> list[dict]:
        """The events of this name in events.jsonl."""
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def failure(self, attempt: int) -> dict:
        """failure.json of an attempt."""
        return json.loads((self.run_dir / f"attempts/{attempt}/failure.json").read_text())

    def checkpoints(self) -> list[Path]:
        """The committed checkpoints, oldest first."""
        return sorted(path.parent for path in (self.run_dir / "checkpoints").glob("step-*/gpulaunch-manifest.json"))

    @property
    def attempts(self) -> int:
        """How many attempts there were."""
        return len(list((self.run_dir / "attempts").glob("[0-9]*")))

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text(errors="replace")

    def __str__(self) -> str:
        history = self.run_dir / "events.jsonl"
        shown = history.read_text() if history.exists() else "none"
        causes = [path.read_text() for path in sorted(self.run_dir.glob("attempts/*/failure.json"))]
        failures = "\n".join(causes) or "none"
        told = {"stderr": self.stderr, "events": shown, "failures": failures}
        return "\n".join([" ".join(self.argv), *(f"--- {name}\n{text}" for name, text in told.items())])

    # -- what is done to it

    def group(self) -> RunProcesses:
        """Who runs now."""
        group = read_group(str(self.run_dir))
        assert group is not None, f"no group.json\n{self}"
        return group

    def act(self, what: str, rank: int, *, seed: int = 0) -> str:
        """Do one thing to it from outside; say what was done."""
        if "checkpoint" in what or "clock" in what:
            wait_until(lambda: len(self.checkpoints()) > 1, f"two checkpoints\n{self}")
        self.acted_s.append(time.monotonic())
        if what in ACTS:
            ACTS[what](self)
            return what
        how = what.removesuffix("-checkpoint")
        verb = Verb.CORRUPT_CHECKPOINT if how != what else Verb(what)
        fault = Fault(verb=verb, rank=rank, factor=4, for_s=2.0, how=how)
        return inject(fault, self.group(), random.Random(seed)).what

    def release(self) -> None:
        """Let it make its last step."""
        (self.out / "released").touch()


def _ctrl_c(job: Job) -> None:
    already = job.stderr.count("SIGINT")
    os.kill(job.pid, signal.SIGINT)
    wait_until(lambda: job.stderr.count("SIGINT") > already, "gpulaunch says that it heard")


def _start_again(job: Job) -> None:
    job.wait()
    job.start()


def _clock_back(job: Job) -> None:
    """The wall clock of all its processes, and the times that the file system has for its checkpoints."""
    (job.directory / "clock-back").touch()
    an_hour_ago = time.time() - 3600
    newest = job.checkpoints()[-1]
    for path in [*newest.rglob("*"), newest]:
        os.utime(path, (an_hour_ago, an_hour_ago))
    job.wait_for_steps(job.steps() + 6)


def _enlarge_disk(job: Job) -> None:
    """Once a save has failed for want of room."""
    wait_until(lambda: "No space left on device" in job.stderr, f"a save that fails\n{job}")
    disk = job.directory / "disk"
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)


ACTS: dict[str, Callable[[Job], object]] = {
    "enlarge-disk": _enlarge_disk,
    "ctrl-c": _ctrl_c,
    "start-again": _start_again,
    "close-output": Job.close_output,
    "clock-back": _clock_back,
}

# -- surroundings

MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def _memory_cgroup(directory: Path) -> Iterator[Around]:
    """A memory cgroup (v1) with room for the job, and not for a rank that eats memory."""
    group = MEMORY_CGROUPS / f"gpulaunch-test-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
        yield Around(prefix=("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"))
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the cgroup is empty")
        group.rmdir()


@contextlib.contextmanager
def _small_shm(directory: Path) -> Iterator[Around]:
    """A /dev/shm of the job's own, as a container has it."""
    mount = 'mount -t tmpfs -o size=16m none /dev/shm && exec "$@"'
    yield Around(prefix=("unshare", "--mount", "sh", "-c", mount, "sh"))


@contextlib.contextmanager
def _tmpfs(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


@contextlib.contextmanager
def _full_shm_dir(directory: Path) -> Iterator[Around]:
    with _tmpfs(directory / "shm", "64k") as small:
        with (small / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        yield Around(env={"GPULAUNCH_SHM_DIR": str(small)})


@contextlib.contextmanager
def _small_checkpoint_disk(directory: Path) -> Iterator[Around]:
    """A disk that has room for the directory of the checkpoints, and for none of them."""
    with _tmpfs(directory / "disk", "8k") as small:
        yield Around(options=("--checkpoint-dir", str(small / "checkpoints")))


@contextlib.contextmanager
def _taken_port(directory: Path) -> Iterator[Around]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Around(options=("--master-port", str(server.getsockname()[1])))


CLOCK = """
import os, time
_real, _real_ns = time.time, time.time_ns
time.time = lambda: _real() - 3600 * os.path.exists({flag!r})
time.time_ns = lambda: _real_ns() - 3600 * 10**9 * os.path.exists({flag!r})
"""


@contextlib.contextmanager
def _clock(directory: Path) -> Iterator[Around]:
    """The wall clock of every Python of the job can be set back. A time namespace has none: time_namespaces(7)."""
    site = directory / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(CLOCK.format(flag=str(directory / "clock-back")))
    yield Around(env={"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])})


@contextlib.contextmanager
def _plain(directory: Path) -> Iterator[Around]:
    yield Around()


AROUND: dict[str, Callable[[Path], contextlib.AbstractContextManager[Around]]] = {
    "": _plain,
    "memory-cgroup": _memory_cgroup,
    "small-shm": _small_shm,
    "full-shm-dir": _full_shm_dir,
    "small-checkpoint-disk": _small_checkpoint_disk,
    "taken-port": _taken_port,
    "clock": _clock,
}
