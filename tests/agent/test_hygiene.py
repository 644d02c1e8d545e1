"""Whatever ends, and however: no process of the job is left (the census looks), and the exit code tells why."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest

# A rank with everything that launchers forget: a child, and a daemon that left the session and the process tree.
BROODY = """
    import os, signal, sys, time
    if os.fork() == 0:
        time.sleep(600)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(600)
    print("READY", os.environ["RANK"], os.getpid(), flush=True)
    time.sleep(600)
"""
METHODS = ["fork", "spawn"]


def script(path: Path, text: str) -> Path:
    file = path / "train.py"
    file.write_text(textwrap.dedent(text))
    return file


def ready_pids(run) -> dict[int, int]:
    lines = [line.split("READY ")[1].split() for line in run.stdout.splitlines() if "READY" in line]
    return {int(rank): int(pid) for rank, pid in lines}


def helper_pid(agent: int, comm: str) -> int:
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().strip() == comm:
            return int(child)
    raise LookupError(comm)


@pytest.mark.torch
@pytest.mark.parametrize("method", METHODS)
def test_when_the_agent_is_killed_everything_goes(gpulaunch, tmp_path: Path, method: str) -> None:
    run = gpulaunch.start("--nproc", "2", "--start-method", method, script(tmp_path, BROODY))
    run.wait_until(lambda run: len(ready_pids(run)) == 2)

    run.signal(signal.SIGKILL)

    assert run.wait().code == -signal.SIGKILL


@pytest.mark.torch
@pytest.mark.parametrize("method", METHODS)
def test_when_a_rank_is_killed_the_job_ends_with_all_it_started(gpulaunch, tmp_path: Path, method: str) -> None:
    run = gpulaunch.start("--nproc", "2", "--start-method", method, script(tmp_path, BROODY))
    run.wait_until(lambda run: len(ready_pids(run)) == 2)

    os.kill(ready_pids(run)[1], signal.SIGKILL)
    ended = run.wait()

    assert ended.code == 128 + signal.SIGKILL
    (cause,) = [line for line in ended.stderr.splitlines() if "first cause" in line]
    assert "rank 1 " in cause
    assert "SIGKILL" in cause


@pytest.mark.torch
@pytest.mark.parametrize("helper", ["gpulaunch-fork", "gpulaunch-side", "gpulaunch-keep"])
def test_a_killed_helper_does_not_touch_the_ranks(gpulaunch, tmp_path: Path, helper: str) -> None:
    run = gpulaunch.start("--nproc", "2", "--start-method", "fork", script(tmp_path, BROODY))
    run.wait_until(lambda run: len(ready_pids(run)) == 2)

    os.kill(helper_pid(run.pid, helper), signal.SIGKILL)
    for pid in ready_pids(run).values():
        os.kill(pid, 0)
    run.signal(signal.SIGTERM)

    assert run.wait().code == 128 + signal.SIGTERM


@pytest.mark.torch
def test_agent_and_keeper_killed_together_still_take_the_ranks_along(gpulaunch, tmp_path: Path) -> None:
    """Nobody is left to sweep; the ranks die by PR_SET_PDEATHSIG, and the next run removes the pages."""
    quiet = "import os, time; print('READY', os.environ['RANK'], os.getpid(), flush=True); time.sleep(600)"
    run = gpulaunch.start("--nproc", "2", script(tmp_path, quiet))
    run.wait_until(lambda run: len(ready_pids(run)) == 2)

    os.kill(helper_pid(run.pid, "gpulaunch-keep"), signal.SIGSTOP)
    orphan_reaper = helper_pid(run.pid, "gpulaunch-keep")
    run.signal(signal.SIGKILL)
    os.kill(orphan_reaper, signal.SIGKILL)
    run.wait()

    assert gpulaunch("--nproc", "1", "--no-python", "--job-dir", tmp_path / "again", "true").code == 0


@pytest.mark.torch
def test_dataloader_workers_of_a_killed_rank_go_with_it(gpulaunch, tmp_path: Path) -> None:
    loading = """
        import os, torch
        from torch.utils.data import DataLoader
        class Endless(torch.utils.data.IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.zeros(1)
        for _ in DataLoader(Endless(), num_workers=2):
            print("READY", os.environ["RANK"], os.getpid(), flush=True)
            break
        import time; time.sleep(600)
    """
    run = gpulaunch.start("--nproc", "2", script(tmp_path, loading))
    run.wait_until(lambda run: len(ready_pids(run)) == 2)

    os.kill(ready_pids(run)[0], signal.SIGKILL)

    assert run.wait().code == 128 + signal.SIGKILL


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_ranks_may_finish_what_they_do(
    gpulaunch, tmp_path: Path, signum: int, code: int
) -> None:
    saving = """
        import os, signal, sys, time
        def save(signum, frame):
            print("saved after", signum, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)
        print("READY", os.environ["RANK"], os.getpid(), flush=True)
        time.sleep(600)
    """
    run = gpulaunch.start("--nproc", "2", "--start-method", "spawn", script(tmp_path, saving))
    run.wait_until(lambda run: len(ready_pids(run)) == 2)

    run.signal(signum)
    ended = run.wait()

    assert ended.code == code
    assert ended.stdout.count(f"saved after {int(signum)}") == 2


DEAF = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("READY", os.environ["RANK"], os.getpid(), flush=True)
    if os.environ["RANK"] == "1" and os.path.exists("fail"):
        raise SystemExit(5)
    time.sleep(600)
"""


def test_a_rank_that_ignores_the_signal_is_killed_after_the_grace(gpulaunch, tmp_path: Path) -> None:
    run = gpulaunch.start("--nproc", "2", "--start-method", "spawn", "--shutdown-timeout", "1", script(tmp_path, DEAF))
    run.wait_until(lambda run: len(ready_pids(run)) == 2)

    run.signal(signal.SIGTERM)

    assert run.wait(30).code == 143


def test_the_grace_is_the_same_when_a_rank_fails(gpulaunch, tmp_path: Path) -> None:
    """torchrun honours --shutdown-timeout on the signal path only and waits 30 s here."""
    (tmp_path / "fail").touch()
    ended = gpulaunch(
        "--nproc", "2", "--start-method", "spawn", "--shutdown-timeout", "1", script(tmp_path, DEAF), timeout_s=25
    )

    assert ended.code == 5


def test_a_second_signal_ends_at_once(gpulaunch, tmp_path: Path) -> None:
    run = gpulaunch.start(
        "--nproc", "2", "--start-method", "spawn", "--shutdown-timeout", "600", script(tmp_path, DEAF)
    )
    run.wait_until(lambda run: len(ready_pids(run)) == 2)

    run.signal(signal.SIGINT)
    run.wait_until(lambda _: '"stopping"' in events(tmp_path))
    run.signal(signal.SIGINT)

    assert run.wait(30).code == 130


def events(cwd: Path) -> str:
    return "".join(path.read_text() for path in cwd.glob("gpulaunch-runs/*/events.jsonl"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("death", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", 137),
        ("import ctypes; ctypes.string_at(0)", 139),
        ("os.abort()", 134),
        ("raise ValueError('x')", 1),
        ("sys.exit('no data')", 1),
    ],
)
def test_the_exit_code_is_the_root_causes_own(gpulaunch, tmp_path: Path, method: str, death: str, code: int) -> None:
    dying = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {death}\ntime.sleep(600)\n"
    ended = gpulaunch("--nproc", "2", "--start-method", method, script(tmp_path, dying))

    assert ended.code == code, ended
    report = json.loads((ended.run_dir / "attempts/0/failure.json").read_text())
    assert report["first"]["rank"] == 1
    assert report["exit_code"] == code


def test_a_rank_that_cannot_hear_the_signal_and_ends_by_a_code_was_not_stopped(gpulaunch) -> None:
    """Both end by themselves; the one that is seen later has been signalled by then."""
    dying = "if [ $RANK = 1 ]; then until [ -e deaf ]; do sleep 0.1; done; exit 7; fi; "
    dying += "trap '' TERM; touch deaf; sleep 1; exit 7"
    ended = gpulaunch("--nproc", "2", "--no-profile", "--failure-grace", "20", "--no-python", "sh", "-c", dying)

    assert ended.code == 7, ended
    assert "rank 0 failed too: exited with code 7" in ended.stderr
    assert "before another rank that failed too" in ended.stderr
    assert "stopped by the launcher" not in ended.stderr


def test_a_rank_that_ends_well_and_early_is_waited_on(gpulaunch, tmp_path: Path) -> None:
    uneven = "import os, time\ntime.sleep(float(os.environ['RANK']))\nprint('end', os.environ['RANK'])\n"
    ended = gpulaunch("--nproc", "2", "--start-method", "spawn", script(tmp_path, uneven))

    assert ended.code == 0
    assert "end 0" in ended.stdout
    assert "end 1" in ended.stdout


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_sockets_of_a_killed_dataloader_go_with_the_job(gpulaunch, tmp_path: Path, method: str) -> None:
    """multiprocessing's own directory outlives a killed process; the census of every test looks for it."""
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent("""
            import multiprocessing.util, os, torch
            from torch.utils.data import DataLoader
            if __name__ == "__main__":
                loader = DataLoader(torch.arange(64.0), batch_size=4, num_workers=1)
                for number, _ in enumerate(loader):
                    if number == 3:
                        print("SOCKETS", multiprocessing.util.get_temp_dir(), flush=True)
                        os.kill(os.getpid(), 9)
        """)
    )

    ended = gpulaunch("--nproc", "2", "--start-method", method, program)

    assert ended.code == 137, ended
    assert f"SOCKETS /dev/shm/gpulaunch-{os.getuid()}-" in ended.stdout


def test_a_daemon_without_any_environment_is_ended_with_a_failed_job(gpulaunch, tmp_path: Path) -> None:
    """Nothing but descent tells whose it is."""
    program = """
        import os, subprocess, time
        subprocess.Popen(["setsid", "sh", "-c", "echo $$ > daemon; sleep 600"], env={"PATH": os.environ["PATH"]})
        while not (os.path.exists("daemon") and open("daemon").read()):
            time.sleep(0.01)
        raise SystemExit(5)
    """
    ended = gpulaunch("--nproc", "1", "--start-method", "spawn", script(tmp_path, program))
    daemon = int((tmp_path / "daemon").read_text())

    assert ended.code == 5, ended
    assert not Path(f"/proc/{daemon}").exists()
