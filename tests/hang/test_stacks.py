"""Stacks of real processes, from every source; and what is said where a source is not open."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.failure import inside
from gpulaunch.launcher.hang import helper, proc, server, stacks
from gpulaunch.launcher.hang.values import Recorders
from gpulaunch.launcher.loop import linux

HOLDS_THE_GIL = "import ctypes\ndef in_c():\n    ctypes.PyDLL(None).sleep(600)\nREADY()\nin_c()\n"
OPENS_A_PIPE = "import os\nos.mkfifo('pipe')\ndef load():\n    return open('pipe')\nREADY()\nload()\n"
SLEEPS = "import time\ndef nap():\n    time.sleep(600)\nREADY()\nnap()\n"
PATIENCE_S = 30.0


@pytest.fixture
def no_pyspy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Python without py-spy beside it, and none on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))


def where(found: stacks.Stacks) -> list[str]:
    return [frame.name.rpartition(".")[2] for frame in found.main]


def test_what_the_rank_listens_to_is_what_the_launcher_sends() -> None:
    assert (stacks.STACKS_FILE, stacks.STACKS_SIGNAL) == (inside.STACKS_FILE, inside.STACKS_SIGNAL)


# -- py-spy


def test_pyspy_shows_where_a_rank_hangs(toys: Any) -> None:
    rank = toys.start(OPENS_A_PIPE)

    found = stacks.take([rank])[0]

    assert (found.source, found.refused) == ("py-spy", ())
    assert where(found)[:2] == ["load", "<module>"]
    assert not any(thread.owns_gil for thread in found.threads)


def test_pyspy_tells_who_sleeps_with_the_gil(toys: Any) -> None:
    found = stacks.take([toys.start(HOLDS_THE_GIL)])[0]

    assert [(thread.owns_gil, thread.idle) for thread in found.threads] == [(True, True)]
    assert where(found)[0] == "in_c"


def test_a_stopped_rank_is_read_and_stays_stopped(toys: Any) -> None:
    rank = toys.start(SLEEPS)
    os.kill(rank.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)

    found = stacks.take([replace(rank, stopped=True)])[0]

    assert (found.source, where(found)[0]) == ("py-spy", "nap")
    assert linux.state_of(rank.pid) == "T"


def test_all_ranks_are_asked_at_once(toys: Any) -> None:
    ranks = [toys.start(source, rank=rank) for rank, source in enumerate([OPENS_A_PIPE, SLEEPS, HOLDS_THE_GIL])]

    assert [where(one)[0] for one in stacks.take(ranks).values()] == ["load", "nap", "in_c"]


def test_a_process_that_is_gone_or_no_python_is_told(toys: Any) -> None:
    gone = stacks.Target(rank=1, pid=2**22 - 7, rank_dir="/nonexistent")
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        found = stacks.take([gone, replace(gone, rank=2, pid=sleeping.pid)])
        sleeping.kill()

    assert [one.source for one in found.values()] == ["", ""]
    assert all(one.refused[0].startswith("py-spy: ") and "\n" not in one.refused[0] for one in found.values())
    assert (
        found[2].refused[-1] == "faulthandler: the rank has no handler for it (not a Python program of this launcher)"
    )


# -- faulthandler


def test_without_pyspy_the_rank_itself_writes_its_stacks(toys: Any, no_pyspy: None) -> None:
    rank = toys.start(OPENS_A_PIPE)

    first, second = stacks.take([rank])[0], stacks.take([rank])[0]

    assert (first.source, where(first)[:2]) == ("faulthandler", ["load", "<module>"])
    assert first.main == second.main
    assert first.refused == (
        "py-spy: it is installed neither next to this Python nor on PATH",
        "torch's worker server: the program runs none (TORCH_WORKER_SERVER_SOCKET is not set)",
    )


def test_it_does_so_while_the_gil_is_held(toys: Any, no_pyspy: None) -> None:
    assert where(stacks.take([toys.start(HOLDS_THE_GIL)])[0])[0] == "in_c"


def test_a_rank_that_does_not_catch_the_signal_does_not_get_it(toys: Any, no_pyspy: None) -> None:
    """It would end it."""
    rank = toys.start(SLEEPS, armed=False)

    assert stacks.take([rank])[0].source == ""
    assert linux.state_of(rank.pid) == "S"


def test_a_rank_that_moves_is_not_signalled(toys: Any, no_pyspy: None) -> None:
    rank = toys.start(SLEEPS)

    found = stacks.take([replace(rank, may_signal=False)])[0]

    assert found.refused[-1] == "faulthandler: the rank moves, and a signal would disturb it"
    assert Path(rank.rank_dir, stacks.STACKS_FILE).read_bytes() == b""


@pytest.mark.root
def test_where_ptrace_is_forbidden_the_report_says_so(toys: Any) -> None:
    """Another user's rank, as py-spy sees it under Yama or in a container without SYS_PTRACE."""
    rank = toys.start(SLEEPS)
    answers, tell = os.pipe()
    nobody = os.fork()
    if nobody == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(tell, "; ".join(stacks.take([rank])[0].refused).encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(answers) as pipe:
        said = pipe.read()
    os.waitpid(nobody, 0)

    assert said.startswith("py-spy: permission denied (ptrace: another user, Yama, or a container")
    assert "torch's worker server: Permission denied" in said
    assert "faulthandler: " in said


# -- dataloader workers

LOADS = """
import ctypes, os, signal
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index == 1:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # who is stuck does not see that its rank has gone
            os.mkfifo("pipe")
            READY()
            open("pipe")
        return index
for _ in DataLoader(Data(), num_workers=2, batch_size=None):
    pass
"""


@pytest.mark.torch
def test_the_worker_that_is_stuck_is_told_from_the_one_that_has_nothing_to_do(toys: Any) -> None:
    """The second of two waits for storage; the first has delivered what was asked of it."""
    workers = proc.read(toys.start(LOADS).pid, {}).workers

    pid, frames = helper.busy_worker(workers)
    nobody = helper.busy_worker([each for each in workers if each != pid])

    assert (len(workers), pid) == (2, max(workers))
    assert (frames[0].name.rpartition(".")[2], Path(frames[0].file).name) == ("__getitem__", "train.py")
    assert frames[-1].name.rpartition(".")[2] == "fetch", "and not what the program was at that forked it"
    assert nobody == (0, ())


# -- torch's worker server

SERVED = """
import os, time
import torch.distributed as dist
from torch.distributed.elastic.control_plane import worker_main
rank = int(os.environ["RANK"])
def behind():
    READY()
    time.sleep(600)
with worker_main():
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
    import torch
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if rank:
        behind()
    READY()
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.torch
def test_torchs_worker_server_answers_for_a_hung_rank(toys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Stacks where py-spy cannot, and from the flight recorder, who is behind."""
    from concurrent.futures import ThreadPoolExecutor

    def start(rank: int) -> stacks.Target:
        socket = tmp_path / f"{rank}.sock"
        env = {"RANK": str(rank), "STORE": str(tmp_path / "store"), server.SOCKET_VARIABLE: str(socket)}
        found: stacks.Target = toys.start(SERVED, rank=rank, env=env)
        return found

    with ThreadPoolExecutor() as both:
        ranks = list(both.map(start, range(2)))
    paths = [server.socket_of(rank.pid) for rank in ranks]
    with contextlib.suppress(OSError):
        server.ask(paths[0], "nonsense")  # an unknown handler is an error, not an answer
        pytest.fail("the worker server answered to nonsense")

    recorded = {rank.rank: server.read_flight_record(rank.pid) for rank in ranks}
    while recorded[0] is None or recorded[0].enqueued["0"] < 4:  # it was ready just before its fourth
        recorded[0] = server.read_flight_record(ranks[0].pid)
    known = {rank: one for rank, one in recorded.items() if one is not None}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = stacks.take(ranks)

    assert server.compare_records(known, known) == Recorders(behind=(1,))
    assert server.summary(known) == (
        "flight recorder: rank 1 has begun 3 collectives (the last gloo:all_reduce), others 4"
    )
    assert [one.source for one in found.values()] == ["torch's worker server"] * 2
    assert "all_reduce" in where(found[0])
    assert where(found[1])[0] == "behind"


def test_no_worker_server_is_an_answer_too(toys: Any, tmp_path: Path) -> None:
    rank = toys.start(SLEEPS, env={server.SOCKET_VARIABLE: str(tmp_path / "nobody.sock")})

    assert server.read_flight_record(rank.pid) is None
    assert server.waits_of(rank.pid) == {}
    assert server.summary({}) == ""


def recorder(*entries: tuple[str, int, str]) -> server.FlightRecord:
    """What a rank has begun: process group, number, operation."""
    told = [
        {"process_group": [group, "tp"], "collective_seq_id": number, "profiling_name": call, "is_p2p": False}
        for group, number, call in entries
    ]
    known = server.parse_recorder(json.dumps({"entries": told}).encode())
    assert known is not None
    return known


@pytest.mark.parametrize(
    ("recorders", "expected"),
    [
        ({0: [("0", 4, "r")], 1: [("0", 4, "r")]}, Recorders(agree=True)),
        ({0: [("0", 4, "r")]}, Recorders()),  # rank 1 has none
        ({0: [("0", 4, "r")], 1: [("0", 3, "r")]}, Recorders(behind=(1,))),
        ({0: [("0", 4, "r")], 1: [("0", 4, "b")]}, Recorders(clashing=(0, 1))),
        ({0: [("0", 4, "r")], 1: [("0", 4, "r")], 2: [("0", 4, "b")]}, Recorders(clashing=(2,))),
        # Each pair of ranks has a group of its own, each at its own number: neither is behind.
        (
            {0: [("1", 9, "r"), ("0", 1, "b")], 1: [("1", 9, "r"), ("0", 1, "b")], 2: [("2", 4, "r"), ("0", 1, "b")]},
            Recorders(agree=True),
        ),
    ],
)
def test_recorders_are_compared_by_process_group(
    recorders: dict[int, list[tuple[str, int, str]]], expected: Recorders
) -> None:
    known = {rank: recorder(*entries) for rank, entries in recorders.items()}

    assert server.compare_records(known, {0, 1, *recorders}) == expected


@given(st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_what_a_recorder_may_answer(text: bytes) -> None:
    with contextlib.suppress(ValueError):
        server.parse_recorder(text)


# -- parsers


@given(st.binary())
def test_what_pyspy_may_print(out: bytes) -> None:
    stacks.parse_pyspy(out)


@given(st.text())
def test_what_a_rank_may_write(text: str) -> None:
    stacks.parse_faulthandler(text)


def test_faulthandler_of_newer_pythons_names_threads_and_shows_c_frames() -> None:
    text = (
        "Thread 0x00007f (most recent call first):\n  <no Python frame>\n\n"
        "Thread 0x00007e [pool-1] (most recent call first):\n"
        '  File "/x/a b.py", line 3 in work\n  ...\n\n'
        "Current thread 0x00007d [python] (most recent call first):\n"
        '  File "/x/train.py", line 7 in <module>\n\n'
        "Current thread's C stack trace (most recent call first):\n"
        '  Binary file "/usr/lib/libc.so", at sleep+0x1 [0x7f]\n'
    )

    threads = stacks.parse_faulthandler(text)

    assert [thread.name for thread in threads] == ["", "pool-1", "python"]
    assert [[(f.name, f.file, f.line) for f in thread.frames] for thread in threads] == [
        [],
        [("work", "/x/a b.py", 3)],
        [("<module>", "/x/train.py", 7)],
    ]


# -- /proc


def test_the_cpu_of_a_rank_counts_what_its_dead_children_used(toys: Any) -> None:
    """A compiler is started, works, and ends between two looks."""
    rank = toys.start(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'for _ in range(6_000_000): pass'])\n"
        "READY()\nimport time\ntime.sleep(600)\n"
    )

    reading = proc.read(rank.pid, {})

    assert reading.tree_ticks >= reading.own_ticks + 5
    assert (reading.state, reading.gpu, reading.traced, reading.workers) == ("S", False, False, ())
    assert reading.own_ticks >= reading.main_ticks > 0


@pytest.mark.alone
def test_the_time_that_a_rank_waits_for_a_core_is_read(toys: Any) -> None:
    """Two that compute, on one core."""
    core = str(min(os.sched_getaffinity(0)))
    computes = f"import os\nos.sched_setaffinity(0, {{{core}}})\nREADY()\nwhile True: pass\n"
    ranks = [toys.start(computes, rank=rank) for rank in range(2)]
    before = [proc.read(rank.pid, {}).main_delay_s for rank in ranks]
    time.sleep(1.0)
    after = [proc.read(rank.pid, {}).main_delay_s for rank in ranks]

    for index in range(2):
        assert after[index] - before[index] == pytest.approx(0.5, abs=0.3)


def test_what_runs_below_a_rank_is_known(toys: Any) -> None:
    # The rank says who it is: a child that is slow to start would ask only when its parent is gone.
    child = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
    rank = toys.start(
        f"import os, subprocess, sys\nREADY()\nsubprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
    )
    until_s = time.monotonic() + PATIENCE_S
    while not (reading := proc.read(rank.pid, {})).running and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(0.5)
    later = proc.read(rank.pid, {})

    (child_pid,) = reading.running
    assert [child_pid] == linux.descendants_of(rank.pid)
    assert later.wanted_s[child_pid] - reading.wanted_s[child_pid] > 0.4, "it runs, or waits for a core"


def test_a_rank_that_is_gone_reads_as_gone() -> None:
    assert proc.read(2**22 - 7, {}).state == ""
