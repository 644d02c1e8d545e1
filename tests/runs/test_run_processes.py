"""Whose pid it is: nothing is ever done to a process of anybody else."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulaunch.launcher.runs import processes as groups
from gpulaunch.launcher.runs.processes import Process, RunError, RunProcesses

RUN = "0123456789abcdef"
Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that waits, as one of a run or of nobody's; it is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def one(*, run: str | None = RUN, holding: Path | None = None) -> int:
        program = (
            "import os, sys, time\nfd = os.open(sys.argv[1], os.O_RDONLY)\nprint('held', flush=True)\ntime.sleep(600)"
        )
        env = {**os.environ, **({"GPULAUNCH_RUNS": f"outer:{run}"} if run else {})}
        argv = [sys.executable, "-c", program, str(holding or "/")]
        process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process.pid

    yield one
    for process in started:
        process.kill()
        process.communicate()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def group(tmp_path: Path, **pids: int) -> RunProcesses:
    return RunProcesses(
        run_dir=str(tmp_path), run_id=RUN, attempt=0, ranks=pids.pop("ranks", {}), helpers=pids, checkpoint_dirs=()
    )


def write(run_dir: Path, name: str, content: dict) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / name).write_text(json.dumps(content))


# -- whose process


def test_a_process_of_the_run_is_signalled(start: Start, tmp_path: Path) -> None:
    pid = start()
    with Process(pid, group(tmp_path)) as process:
        process.send(signal.SIGKILL)

    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert state_of(pid) == "Z"


@pytest.mark.parametrize("run", [None, "another", RUN[:-1], RUN + "0"])
def test_a_process_of_anybody_else_is_left_alone(start: Start, tmp_path: Path, run: str | None) -> None:
    pid = start(run=run)
    with pytest.raises(RunError, match=f"process {pid} does not belong to this run"):
        Process(pid, group(tmp_path))

    assert state_of(pid) in "SR"


def test_a_process_that_has_ended_is_gone(start: Start, tmp_path: Path) -> None:
    pid = start()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie still has its number
    with pytest.raises(RunError, match="has ended"):
        Process(pid, group(tmp_path))
    os.waitpid(pid, 0)
    with pytest.raises(RunError, match="no longer exists"):
        Process(pid, group(tmp_path))


def test_the_agent_is_known_by_the_directory_that_it_holds(start: Start, tmp_path: Path) -> None:
    agent, stranger = start(run=None, holding=tmp_path), start(run=None)

    groups.take_helper(group(tmp_path, agent=agent), "agent").close()
    with pytest.raises(RunError, match="does not belong to this run"):
        groups.take_helper(group(tmp_path, agent=stranger), "agent")


def test_no_rank_and_no_helper_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="rank 3 is not on this node; its ranks are 0, 1"):
        groups.take_rank(group(tmp_path, ranks={0: 1, 1: 1}), 3)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="this run has no sidecar"):
        groups.take_helper(group(tmp_path), "sidecar")


def test_looking_for_a_run_does_not_touch_its_lock(start: Start, tmp_path: Path) -> None:
    """A lock tried for is held for a moment, and an agent that starts just then would find it taken."""
    write(tmp_path, "group.json", {"agent_pid": start(run=None, holding=tmp_path)})
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        groups.agent_of(str(tmp_path))
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert groups.agent_of(str(tmp_path)) is not None
    finally:
        os.close(fd)


# -- group.json


GROUP = {
    "version": 1,
    "run_id": RUN,
    "attempt": 4,
    "world_size": 8,
    "ranks": [{"rank": 4, "local_rank": 0, "pid": 11}, {"rank": 5, "local_rank": 1, "pid": 12}],
    "agent_pid": 1,
    "store_pid": None,
    "fork_server_pid": 3,
    "sidecar_pid": 4,
    "checkpoint_dirs": ["/a", "s3://b"],
}


def test_the_group_is_read(tmp_path: Path) -> None:
    assert groups.read_group(str(tmp_path)) is None
    write(tmp_path, "group.json", GROUP)

    assert groups.read_group(str(tmp_path)) == RunProcesses(
        run_dir=str(tmp_path),
        run_id=RUN,
        attempt=4,
        ranks={4: 11, 5: 12},
        helpers={"agent": 1, "fork server": 3, "sidecar": 4},
        checkpoint_dirs=("/a", "s3://b"),
    )


def test_the_agent_may_say_where_the_pages_are(tmp_path: Path) -> None:
    write(tmp_path, "group.json", {**GROUP, "channel_dir": "/run/pages"})

    group = groups.read_group(str(tmp_path))
    assert group is not None
    assert group.channel_dir == "/run/pages"


def test_a_pipe_in_place_of_the_group_is_one_line_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "group.json")

    with pytest.raises(RunError, match=r"cannot read .*group\.json: OSError: .*not a regular file"):
        groups.read_group(str(tmp_path))
    assert groups.agent_of(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"run_id": 1, "attempt": "x", "ranks": []}', "\xff"])
def test_a_group_that_makes_no_sense_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "group.json").write_bytes(text.encode("latin-1"))

    with pytest.raises(RunError, match=r"cannot read .*group\.json"):
        groups.read_group(str(tmp_path))
    assert groups.agent_of(str(tmp_path)) is None
