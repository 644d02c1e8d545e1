"""What all tests share: a runner of the real command, and a census that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what lies beside this, as `ports`

MARKER = "TEST_OF_GPULAUNCH"
"""Set for each test; whatever the test starts inherits it, and the census finds it by it."""

SETTLE_S = 5.0
"""The kernel takes a moment to end what was told to die; what outlives this was left behind."""

PATIENCE_S = 300.0
"""A job that hangs fails its test after this. Nine interpreters that import torch took more than 120 s, once, beside
three other tests on two slow cores."""

_ENV_END = 51 - 3
"""Of /proc/<pid>/stat, from the state on (proc_pid_stat(5) counts from 1): 0 until the environment is written."""

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100, database=None)
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m` and one mark, such as `alone`, import only the files that name it: all of them take half a minute."""
    mark = str(config.option.markexpr)
    if not mark.isidentifier() or collection_path.suffix != ".py":
        return None
    return f"mark.{mark}" not in collection_path.read_text() or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this user may not do, with the reason; begin with what waits for minutes.

    Of the processes that share the tests (worksteal) one has all of that, then, while the others keep the cores busy.
    """
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


# --- the census ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def census(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the test if a process that it started still lives, or a gpulaunch file is left in the temporary directory
    (the test has its own, so that other runs on the machine do not count) or in /dev/shm."""
    tmp_path_factory.getbasetemp()  # pytest's own is made at its first use: not inside ours, which goes with the test
    with tempfile.TemporaryDirectory(prefix="test-of-gpulaunch-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        yield from _census(monkeypatch)


def _census(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    marker = secrets.token_hex(8)
    monkeypatch.setenv(MARKER, marker)
    before = shared_files()
    yield
    deadline = time.monotonic() + SETTLE_S
    while (left := left_behind(marker, before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in processes_of(marker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"


def left_behind(marker: str, files_before: set[str]) -> list[str]:
    """What is there that was not there before the test: processes and files."""
    files = [path for path in sorted(shared_files() - files_before) if not in_use(path)]
    return [f"process {pid} {command_of(pid)}" for pid in processes_of(marker)] + files


def processes_of(marker: str) -> list[int]:
    """Processes that were started with this marker in their environment; zombies have no environment any more."""
    wanted = f"{MARKER}={marker}".encode()
    found: list[int] = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in environ_of(entry.path).split(b"\0"):
                    found.append(int(entry.name))
    return found


def environ_of(process: str) -> bytes:
    """The environment that a process was started with; b"" for zombies and threads of the kernel. Raises OSError.

    In the middle of an exec there is none: `Popen` is back when the descriptors are closed, and the kernel writes the
    environment of the new program after that (up to 14 ms later, seen on a machine with more to do than cores).
    """
    until_s = time.monotonic() + SETTLE_S
    while not (environ := Path(process, "environ").read_bytes()) and time.monotonic() < until_s:
        os.readlink(f"{process}/exe")  # who has no program, does not get one either
        if Path(process, "stat").read_bytes().rpartition(b")")[2].split()[_ENV_END] != b"0":
            return Path(process, "environ").read_bytes()
        time.sleep(0.001)
    return environ


def command_of(pid: int) -> str:
    """The command line of a process, or "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def shared_files() -> set[str]:
    """Paths of ours in the places that outlive processes."""
    pages = {entry.path for entry in os.scandir("/dev/shm") if entry.name.startswith(f"gpulaunch-{os.getuid()}-")}
    ours = ("gpulaunch", "pymp-")  # the latter: where multiprocessing of a rank has its sockets
    return pages | {entry.path for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith(ours)}


def in_use(path: str) -> bool:
    """Whether an agent holds the lock of this page directory: it belongs to another run on this machine."""
    try:
        lock = os.open(f"{path}/lock", os.O_RDONLY)
    except OSError:
        return not os.path.lexists(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One finished run of the command."""

    code: int
    """As subprocess gives it: negative for a signal."""
    stdout: str
    stderr: str
    wall_s: float
    cwd: Path

    @property
    def run_dir(self) -> Path:
        """The run directory, where the command was left to choose it."""
        (directory,) = (self.cwd / "gpulaunch-runs").iterdir()
        return directory

    def __str__(self) -> str:
        return f"exit {self.code} after {self.wall_s:.1f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Running:
    """A run under way: wait for what it prints, signal it, wait for its end."""

    def __init__(self, argv: list[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        self.cwd = cwd
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.pid = self._process.pid
        self._news = threading.Condition()
        self._text: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._open = 2
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._text]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        with getattr(self._process, name) as pipe:
            while chunk := os.read(pipe.fileno(), 65536):
                with self._news:
                    self._text[name] += chunk
                    self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._text["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has said so far."""
        return self._text["stderr"].decode(errors="replace")

    def wait_until(self, condition: Callable[[Running], object], timeout_s: float = PATIENCE_S) -> None:
        """Wait until the output so far fulfils the condition; fail the test if it never can, or takes too long."""
        with self._news:
            if not self._news.wait_for(lambda: condition(self) or self._open == 0, timeout_s) or not condition(self):
                pytest.fail(f"never saw what was waited for\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}")

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until this text is on stdout or stderr."""
        self.wait_until(lambda run: text in run.stdout or text in run.stderr, timeout_s)

    def signal(self, signum: int) -> None:
        """Send a signal to the command itself."""
        self._process.send_signal(signum)

    def wait(self, timeout_s: float = PATIENCE_S) -> Ended:
        """Wait for the end; a run that takes longer is killed and fails the test."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"still running after {timeout_s:.0f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}")
        wall_s = time.monotonic() - self._started_s
        for reader in self._readers:  # a pipe stays open while any process of the job holds it
            reader.join(SETTLE_S)
            assert not reader.is_alive(), "the command has ended, but something still holds its output open"
        return Ended(code=code, stdout=self.stdout, stderr=self.stderr, wall_s=wall_s, cwd=self.cwd)

    def kill(self) -> None:
        """End it now, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(SETTLE_S)


class Launcher:
    """Runs the installed `gpulaunch` command, as a user would, in a directory of the test's own."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self._started: list[Running] = []

    def start(self, *args: str | os.PathLike[str], env: Mapping[str, str] | None = None) -> Running:
        """Start `gpulaunch *args`; `env` is added to a clean environment."""
        command = Path(sysconfig.get_path("scripts"), "gpulaunch")
        assert command.exists(), f"{command} is missing: pip install -e . in this environment ({sys.prefix})"
        run = Running([str(command), *map(os.fspath, args)], cwd=self.cwd, env={**clean_environment(), **(env or {})})
        self._started.append(run)
        return run

    def __call__(
        self, *args: str | os.PathLike[str], env: Mapping[str, str] | None = None, timeout_s: float = PATIENCE_S
    ) -> Ended:
        """Run `gpulaunch *args` to its end."""
        return self.start(*args, env=env).wait(timeout_s)

    def close(self) -> None:
        """End what a failed test left running."""
        for run in self._started:
            run.kill()


def clean_environment() -> dict[str, str]:
    """This environment without what would make the test a rank, or set an option."""
    ours = ("PET_", "GPULAUNCH_", "TORCHELASTIC_", "SLURM_")
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    return {name: value for name, value in os.environ.items() if not name.startswith(ours) and name not in names}


@pytest.fixture
def gpulaunch(tmp_path: Path, census: None) -> Iterator[Launcher]:
    """The installed command: `ended = gpulaunch("--nproc", "2", script)`, or `gpulaunch.start(...)` to signal it."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()
