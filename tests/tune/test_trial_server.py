"""A trial from a trial server is as any other start of the job, as this user and as nobody; 7 s each, for torch."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from users import ROOT, User, user_named

pytestmark = pytest.mark.torch

LOOK = """
import json, os, resource, signal, sys
import torch

def link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
    except OSError:
        return "gone"

OF_A_RUN = ("MASTER_PORT", "GPULAUNCH_TRACER_PID", "TORCHELASTIC_RUN_ID")
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
kept = ["Name", "Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd"]
seen = {
    "env": {name: text for name, text in os.environ.items() if name not in OF_A_RUN},
    "marks": sorted(e for e in open("/proc/self/environ").read().split("\\0") if e.startswith("GPULAUNCH_RUN")),
    "status": {name: status[name] for name in [*kept, "CapAmb", "NoNewPrivs", "Threads"]},
    "modules": sorted(name for name in sys.modules if not name.startswith("gpulaunch")),
    "path": sys.path,
    "argv": [sys.argv, sys.orig_argv[1:], open("/proc/self/cmdline").read().rstrip("\\0"), list(sys.flags)],
    "limits": [resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")],
    "fds": sorted(map(link, os.listdir("/proc/self/fd"))),
    "cwd": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "agent": open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[1:3],
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "random": torch.rand(1).item(),
}
print("SEEN", json.dumps(seen).replace(os.environ["GPULAUNCH_RUN_ID"], "RUN"), flush=True)
open("written", "w").close()
"""

DRIVER = """
import os, shutil, signal, sys
from gpulaunch.launcher.cli.tune import trial_server_of
from gpulaunch.launcher.job.host_info import detect
from gpulaunch.launcher.job.load import resolve
from gpulaunch.launcher.job.parse import parse
from gpulaunch.launcher.loop import child
from gpulaunch.launcher.tune import scratch

directory = os.getcwd()
words = ["--nproc", "1", "--metrics-addr", "127.0.0.1:0", "--job-dir", sys.argv[1], "look.py"]
argv = [sys.executable, "-m", "gpulaunch.launcher.cli.main", *words]
view = scratch.upper_parent(directory)
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))  # as in `cli.main`

def await_end(pid):
    assert os.waitpid(pid, 0) == (pid, 0)
    with open(f"{sys.argv[1]}/events.jsonl") as events:
        print(events.read(), flush=True)
    shutil.rmtree(sys.argv[1])

with open(os.devnull) as null:
    spec = resolve(parse([*sys.argv[2:], *words]), os.environ, detect(os.environ)).spec
    server = trial_server_of(spec)
    server.wait(60, lambda: False)
    for _ in range(2):
        await_end(server.start(argv, os.environ, directory=directory, view=view, fds=(null.fileno(), 1, 2)))
    server.close()
    await_end(child.start(scratch.run_in_scratch_argv(argv, directory, view), os.environ, stdin_fd=null.fileno()))
scratch.discard(view)
try:
    print("left:", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child is left")
"""


# Another user's Python, if it is not this one, has no torch of its own.
PYTHON = ("env", f"PYTHONPATH={os.pathsep.join(path for path in sys.path if path.startswith(str(ROOT)))}")


@pytest.fixture(params=["self", "nobody"])
def user(request: pytest.FixtureRequest) -> User:
    found = user_named(request.param)
    done = found.run(*PYTHON, found.python, "-c", "import torch")
    if done.returncode:
        pytest.skip(f"another user cannot import torch: {done.stderr[-200:]}")
    return found


@pytest.fixture
def directory(user: User) -> Iterator[Path]:
    """One that the user may use, with the program."""
    made = Path(tempfile.mkdtemp(prefix="test-of-trials-", dir="/tmp"))
    (made / "job").mkdir()
    (made / "job/look.py").write_text(LOOK)
    for path in (made, made / "job", made / "job/look.py"):
        os.chown(path, user.uid, user.gid)
    yield made
    shutil.rmtree(made)


def test_a_rank_cannot_tell(user: User, directory: Path, census: None) -> None:
    """Two trials of a trial server, and a trial that is started by itself."""
    done = user.run(*PYTHON, user.python, "-c", DRIVER, str(directory / "run"), cwd=directory / "job")
    assert done.returncode == 0, done.stderr
    told = [line.partition("SEEN ")[2] for line in done.stdout.splitlines() if "SEEN " in line]
    *of_server, alone = [json.loads(each) for each in told]
    drawn = {each.pop("random") for each in (*of_server, alone)}

    assert len(of_server) == 2
    for each in of_server:
        assert differences(each, alone) == {}
    assert len(drawn) == 3
    assert alone["marks"] == ["GPULAUNCH_RUNS=RUN", "GPULAUNCH_RUN_ID=RUN"]
    assert os.listdir(directory / "job") == ["look.py"], "what they write is thrown away"
    assert "no child is left" in done.stdout
    assert done.stdout.count("fork_server_ready") == 3
    assert "fork_server_lost" not in done.stdout


@pytest.mark.parametrize("user", ["self"], indirect=True)
def test_a_server_that_has_imported_something_else_is_not_used(user: User, directory: Path, census: None) -> None:
    argv = (*PYTHON, user.python, "-c", DRIVER, str(directory / "run"), "--preload", "torch,numpy")
    done = user.run(*argv, cwd=directory / "job")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fork_server_lost") == 2, "in each of its trials, which then start one of their own"
    assert done.stdout.count("fork_server_ready") == 3
    assert done.stdout.count("SEEN") == 3


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in one | other:
        mine, its = one.get(name), other.get(name)
        if isinstance(mine, dict) and isinstance(its, dict):
            found |= differences(mine, its)
        elif mine != its:
            found[name] = (mine, its)
    return found
